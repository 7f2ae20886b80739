import random

import pytest
import torch

from turngate.runtime.engine.incremental import Incremental, Span
from turngate.runtime.engine.packing import pack

RNG = random.Random(0)
ROWS = [[RNG.randrange(300) for _ in range(length)] for length in [5, 230, 40, 199, 2, 64, 1, 201, 90, 33]]


@pytest.fixture
def model(make_policy):
    return make_policy()


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1)


@torch.inference_mode()
def prefill_alone(model, row: list[int]) -> torch.Tensor:
    return Incremental(model, 1).prefill([Span(0, 0, 0, row)], needs="all")


@torch.inference_mode()
def test_prefill_gives_the_log_probs_of_the_training_pass(model):
    expected = logprobs(model.logits(pack(ROWS))).split([len(row) - 1 for row in ROWS])
    spans = [Span(i, 0, 0, row) for i, row in enumerate(ROWS)]
    found = Incremental(model, 16).prefill(spans, needs="all").split([len(row) for row in ROWS])
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, logprobs(b[:-1]), atol=2e-5, rtol=0)


@torch.inference_mode()
def test_batched_prefill_equals_prefill_alone(model):
    spans = [Span(i, 0, 0, row) for i, row in enumerate(ROWS)]
    together = Incremental(model, 16).prefill(spans, needs="all").split([len(row) for row in ROWS])
    last = Incremental(model, 16).prefill(spans)
    for row, batched, end in zip(ROWS, together, last, strict=True):
        alone = prefill_alone(model, row)
        torch.testing.assert_close(batched, alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(end, alone[-1], atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_prefill_behind_a_cached_prefix_equals_a_whole_prefill(model, share):
    engine = Incremental(model, 16)
    cuts = [max(1, int(len(row) * share)) for row in ROWS]
    engine.prefill(
        [Span(i, 0, 0, row[:cut]) for i, (row, cut) in enumerate(zip(ROWS, cuts, strict=True))], needs="none"
    )
    spans = [Span(i, cut - 1, cut, row[cut - 1 :]) for i, (row, cut) in enumerate(zip(ROWS, cuts, strict=True))]
    found = engine.prefill(spans, needs="all").split([len(span.ids) for span in spans])
    for row, cut, part in zip(ROWS, cuts, found, strict=True):
        torch.testing.assert_close(part, prefill_alone(model, row)[cut - 1 :], atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("batch", [1, 2, 3, 10])
def test_decoding_token_by_token_equals_a_whole_prefill(model, batch):
    """Covers RoPE positions, the smeared key of the token before, and batches below BLAS' smallest kernel."""
    rows = ROWS[:batch]
    engine = Incremental(model, 16)
    engine.prefill([Span(i, 0, 0, row[: max(1, len(row) - 20)]) for i, row in enumerate(rows)], needs="none")
    for i, row in enumerate(rows):
        # Rows are decoded together, each from its own position.
        assert len(row) > 0, i
    expected = [prefill_alone(model, row) for row in rows]
    positions = [max(1, len(row) - 20) for row in rows]
    for _ in range(20):
        tokens = [row[min(p, len(row) - 1)] for row, p in zip(rows, positions, strict=True)]
        found = engine.decode(torch.tensor(tokens), torch.tensor(positions))
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if position < len(row):
                torch.testing.assert_close(found[i], expected[i][position], atol=1e-5, rtol=0)
        positions = [position + 1 for position in positions]


@torch.inference_mode()
def test_padding_and_other_rows_leave_a_row_alone(model):
    engine = Incremental(model, 4)
    engine.prefill([Span(2, 0, 0, ROWS[2])], needs="none")
    before = engine.cache.export(2, len(ROWS[2]))
    engine.prefill([Span(0, 0, 0, ROWS[1]), Span(3, 0, 0, ROWS[0])], needs="none")
    engine.decode(torch.tensor([1, 2]), torch.tensor([230, 0]))
    assert torch.equal(engine.cache.export(2, len(ROWS[2])), before)


@torch.inference_mode()
def test_refreshed_weights_serve_from_the_next_call_on(model, make_policy):
    engine = Incremental(model, 1)
    span = [Span(0, 0, 0, ROWS[2])]
    engine.prefill(span)
    other = make_policy(seed=1)
    model.load_tensors(other.state_dict())
    engine.refresh()
    torch.testing.assert_close(engine.prefill(span), Incremental(other, 1).prefill(span), atol=1e-5, rtol=0)
