"""Values in the engine: peeking, guided tokens, values of prompts, a critic beside the policy."""

import copy
import math
import random
from typing import Any

import msgspec
import pytest
import torch

from turngate.runtime.engine import incremental
from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.guidance import guided_logprobs
from turngate.runtime.engine.incremental import Incremental, Span
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.request import BatcherConfig, Finished, Rejection, Request
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError, PublishError
from turngate.runtime.types import TokenGuidance

TOKENIZER = Tokenizer([])
PROMPT = tuple(range(40, 70))


def make_model(seed, *, value_head=False, layers=2):
    config = ModelConfig(
        vocab_size=len(TOKENIZER), width=32, layers=layers, heads=2, head_dim=16, value_head=value_head
    )
    model = PolicyModel(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("out.weight", "down.weight", "value_head.weight")):
                weight.normal_(std=0.3, generator=generator)
    return model


def serve(policy, critic=None, **config):
    return Batcher(policy, TOKENIZER, BatcherConfig(**config), critic=critic)


def run(batcher, *requests):
    order = [batcher.submit(request) for request in requests]
    assert all(isinstance(one, int) for one in order), order
    found = {}
    while batcher.has_work:
        found.update({report.id: report for report in batcher.step() if isinstance(report, Finished)})
    return [found[one] for one in order]


def guided(beta, *, seed=1, max_tokens=12, prompt=PROMPT, **settings):
    return Request(
        prompt_ids=prompt, max_tokens=max_tokens, seed=seed, stop_ids=(), guidance=TokenGuidance(beta=beta, **settings)
    )


@torch.inference_mode()
def value_of(model, ids):
    """The value of a prefix by the whole pass, with nothing cached."""
    engine = Incremental(model, 1)
    return float(engine.value_outputs(engine.prefill_hidden([Span(0, 0, 0, ids)])).double().sigmoid()[0])


@torch.inference_mode()
def base_logprobs(model, ids):
    return Incremental(model, 1).prefill([Span(0, 0, 0, ids)])[0].double().log_softmax(-1)


# Peeking.


@torch.inference_mode()
@pytest.mark.parametrize("ways", [1, 2, 7])
def test_peeking_gives_what_decoding_each_way_would_and_writes_nothing(ways):
    model = make_model(1)
    engine = Incremental(model, 4)
    rows = [list(range(5, 5 + n)) for n in (3, 40, 17)]
    engine.prefill([Span(i, 0, 0, row) for i, row in enumerate(rows)], needs="none")
    before = engine.cache.kv.clone(), engine.cache.previous.clone()
    tokens = torch.randint(0, 200, (3, ways), generator=torch.Generator().manual_seed(0))
    found = engine.peek_hidden(torch.tensor([2, 0, 1]), tokens, torch.tensor([17, 3, 40]))
    assert torch.equal(engine.cache.kv, before[0])
    assert torch.equal(engine.cache.previous, before[1])
    for line, row in enumerate([rows[2], rows[0], rows[1]]):
        for way in range(ways):
            ids = [*row, int(tokens[line, way])]
            alone = Incremental(model, 1).prefill_hidden([Span(0, 0, 0, ids)])[0]
            torch.testing.assert_close(found[line, way], alone, atol=2e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("most", [1, 32 * 2 * 5, 32 * 2 * 14])
def test_peeking_in_parts_gives_what_peeking_at_once_does(most, monkeypatch):
    engine = Incremental(make_model(1), 4)
    rows = [list(range(5, 5 + n)) for n in (3, 22, 17)]
    engine.prefill([Span(i, 0, 0, row) for i, row in enumerate(rows)], needs="none")
    at, positions = torch.tensor([0, 1, 2]), torch.tensor([3, 22, 17])
    tokens = torch.randint(0, 200, (3, 7), generator=torch.Generator().manual_seed(0))
    whole = engine.peek_hidden(at, tokens, positions)
    sizes, bmm = [], torch.bmm

    def noted(*of):
        found = bmm(*of)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(torch, "bmm", noted)
    monkeypatch.setattr(incremental, "_MAX_SCORES", most)
    torch.testing.assert_close(engine.peek_hidden(at, tokens, positions), whole, atol=2e-5, rtol=0)
    assert max(sizes) <= max(most, 32 * 2)  # one way of one row at the least


@torch.inference_mode()
def test_decoding_some_rows_leaves_the_others_alone():
    model = make_model(1)
    engine, whole = Incremental(model, 4), Incremental(model, 4)
    spans = [Span(i, 0, 0, list(range(3, 10 + i))) for i in range(3)]
    engine.prefill(spans, needs="none")
    whole.prefill(spans, needs="none")
    some = engine.decode_hidden(torch.tensor([7, 8]), torch.tensor([9, 7]), torch.tensor([2, 0]))
    everyone = whole.decode_hidden(torch.tensor([8, 5, 7]), torch.tensor([7, 8, 9]))
    torch.testing.assert_close(some, everyone[[2, 0]], atol=1e-5, rtol=0)
    # Row 1 goes on as if nothing had happened.
    alone = engine.decode_hidden(torch.tensor([5]), torch.tensor([8]), torch.tensor([1]))
    torch.testing.assert_close(alone[0], everyone[1], atol=1e-5, rtol=0)


# The distribution.


def tilt(base, q, beta, k, *, tail_is_base, v=0.0):
    tokens = base[None].topk(k).indices
    return guided_logprobs(
        base[None],
        tokens,
        q[None].gather(1, tokens),
        beta_B=torch.tensor([beta], dtype=torch.float64),
        tail_is_base_B=torch.tensor([tail_is_base]),
        v_state_B=torch.tensor([v], dtype=torch.float64),
    )[0]


def test_without_beta_a_base_tail_is_the_base_and_a_zero_tail_its_top():
    base = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    q = torch.rand(9, dtype=torch.float64)
    torch.testing.assert_close(tilt(base, q, 0.0, 3, tail_is_base=True, v=0.4), base)
    top = tilt(base, q, 0.0, 3, tail_is_base=False)
    assert int(top.isfinite().sum()) == 3
    torch.testing.assert_close(top.exp().sum(), torch.tensor(1.0, dtype=torch.float64))


def test_no_beta_is_too_large_and_equally_good_tokens_keep_the_bases_odds():
    base = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64).log()
    q = torch.tensor([-3.0, 40.0, 40.0, 0.0], dtype=torch.float64)  # of any scale
    for beta in (1e4, 1e300, 1.7e308):
        best = tilt(base, q, beta, 3, tail_is_base=False)
        torch.testing.assert_close(best.exp(), torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64))
        tail = tilt(base, q - 50, beta, 2, tail_is_base=True, v=-1.0)
        torch.testing.assert_close(tail.exp(), torch.tensor([0.0, 0.0, 2 / 3, 1 / 3], dtype=torch.float64))


def test_the_best_token_is_the_best_of_those_that_truncation_left():
    base = torch.tensor([0.6, 0.4, 0.0, 0.0], dtype=torch.float64).log()
    q = torch.tensor([0.1, 0.3, 0.9, 0.0], dtype=torch.float64)
    for beta in (2.0, 1.7e308):
        found = tilt(base, q, beta, 3, tail_is_base=True, v=5.0)
        odds = 1.5 * math.exp(-0.2 * beta)
        torch.testing.assert_close(found.exp(), torch.tensor([odds, 1, 0, 0], dtype=torch.float64) / (1 + odds))


# Guided decoding.


@pytest.mark.parametrize("place", ["critic", "trunk"])
@pytest.mark.parametrize("tail", ["base", "zero"])
def test_b6_1_the_recorded_log_prob_is_the_guided_one_and_the_base_one_is_kept_beside_it(place, tail):
    policy = make_model(1, value_head=place == "trunk")
    critic = make_model(2, value_head=True, layers=1) if place == "critic" else None
    values = critic or policy
    (done,) = run(serve(policy, critic), guided(4.0, top_k=5, tail=tail))
    ids = list(PROMPT)
    for token, logprob, base in zip(done.token_ids, done.logprobs, done.base_logprobs, strict=True):
        expected_base = base_logprobs(policy, ids)
        q = torch.tensor([value_of(values, [*ids, w]) for w in expected_base.topk(5).indices.tolist()])
        full = torch.zeros_like(expected_base)
        full[expected_base.topk(5).indices] = q.double()
        expected = tilt(expected_base, full, 4.0, 5, tail_is_base=tail == "base", v=value_of(values, ids))
        assert base == pytest.approx(float(expected_base[token]), abs=1e-4)
        assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
        ids.append(token)


def test_b6_6_values_are_read_off_the_very_ids_that_were_sampled_whoever_shares_the_batch():
    policy, critic = make_model(1), make_model(2, value_head=True)
    (alone,) = run(serve(policy, critic), guided(6.0))
    others = [Request(prompt_ids=(9, 8, 7 + i), max_tokens=3 + i, seed=i, stop_ids=()) for i in range(5)]
    crowd = run(serve(policy, critic), *others[:2], guided(6.0), *others[2:], guided(2.0, seed=4))
    assert crowd[2].token_ids == alone.token_ids
    assert crowd[2].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    plain = run(serve(make_model(1)), *others)
    assert [done.token_ids for done in [*crowd[:2], *crowd[3:6]]] == [done.token_ids for done in plain]


def sampled(count):
    """Requests with all kinds of sampling."""
    kinds = [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.9}, {"top_k": 7}]
    prompts = [(9, 8, 7 + i, *range(3, 30)) for i in range(count)]
    return [
        Request(prompt_ids=prompt, max_tokens=20, seed=i, stop_ids=(), **kinds[i % 4])
        for i, prompt in enumerate(prompts)
    ]


def test_beta_zero_is_the_base_bit_for_bit():
    requests = sampled(8)
    plain = run(serve(make_model(1)), *requests)
    zero = [msgspec.structs.replace(one, guidance=TokenGuidance(beta=0.0)) for one in requests]
    found = run(serve(make_model(1), make_model(2, value_head=True)), *zero)
    for one, other in zip(found, plain, strict=True):
        assert (one.token_ids, one.logprobs, one.base_logprobs) == (other.token_ids, other.logprobs, other.logprobs)


def test_guidance_of_others_changes_no_bit_of_a_row_that_has_none():
    requests, others = sampled(8), [guided(5.0, seed=n, max_tokens=20) for n in range(5)]
    greedy = Request(prompt_ids=PROMPT, max_tokens=20, temperature=0.0, stop_ids=())
    fillers = [msgspec.structs.replace(one, guidance=None) for one in others]
    plain = run(serve(make_model(1)), *requests, greedy, *fillers)
    mixed = run(serve(make_model(1), make_model(2, value_head=True)), *requests, greedy, *others)
    for one, other in zip(mixed[:9], plain[:9], strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_requests_that_want_more_or_fewer_candidates_do_not_see_each_other():
    policy, critic = make_model(1), make_model(2, value_head=True)
    sizes = [1, 3, 3, len(TOKENIZER), 10**30]
    requests = [guided(6.0, seed=n, top_k=k, tail="zero" if n % 2 else "base") for n, k in enumerate(sizes)]
    together = run(serve(policy, critic), *requests)
    for request, done in zip(requests, together, strict=True):
        (alone,) = run(serve(policy, critic), request)
        assert done.token_ids == alone.token_ids
        assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert together[1].logprobs != together[0].logprobs


def test_a_large_beta_takes_the_best_candidate():
    policy, critic = make_model(1), make_model(2, value_head=True)
    (done,) = run(serve(policy, critic), guided(1e6, top_k=4, tail="zero", max_tokens=1))
    top = base_logprobs(policy, list(PROMPT)).topk(4).indices.tolist()
    assert done.token_ids[0] == max(top, key=lambda w: value_of(critic, [*PROMPT, w]))
    assert done.logprobs[0] == pytest.approx(0.0, abs=1e-9)


def test_a_conversation_goes_on_from_the_critics_own_cached_prefix():
    batcher = serve(make_model(1), make_model(2, value_head=True))
    (first,) = run(batcher, guided(3.0))
    (again,) = run(batcher, guided(3.0))
    assert again.token_ids == first.token_ids
    longer = (*PROMPT, *first.token_ids, 5, 6)
    (cached,) = run(batcher, guided(3.0, prompt=longer))
    (fresh,) = run(serve(make_model(1), make_model(2, value_head=True)), guided(3.0, prompt=longer))
    assert cached.cached_tokens > len(PROMPT)
    assert cached.token_ids == fresh.token_ids
    assert cached.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


@pytest.mark.parametrize("is_renewed", [False, True])
def test_the_critic_runs_only_what_its_own_cache_does_not_know_also_after_new_weights(monkeypatch, is_renewed):
    batcher = serve(make_model(1), make_model(2, value_head=True))
    batcher.submit(guided(3.0, prompt=PROMPT * 4))
    batcher.step()
    if is_renewed:
        batcher.swap_critic(make_model(3, value_head=True).state_dict(), 7)
    # It is still running: the next one starts from its row.
    engine, sizes = batcher._values.rows.engine, list[int]()
    prefill = engine.prefill_hidden

    def counted(spans, **more):
        sizes.append(sum(len(span.ids) for span in spans))
        return prefill(spans, **more)

    monkeypatch.setattr(engine, "prefill_hidden", counted)
    run(batcher, guided(3.0, prompt=(*PROMPT * 4, 5, 6)))
    assert 0 < sum(sizes) < len(PROMPT * 4) / 2


# Values of prompts.


@pytest.mark.parametrize("place", ["critic", "trunk"])
def test_the_value_of_a_prompt_is_the_whole_passs(place):
    policy = make_model(1, value_head=place == "trunk")
    critic = make_model(2, value_head=True) if place == "critic" else None
    batcher = serve(policy, critic)
    prompts = [PROMPT, PROMPT[:7], (*PROMPT, 3)]
    asked = [Request(prompt_ids=prompt, value=True, max_tokens=0) for prompt in prompts]
    found = run(batcher, *asked, Request(prompt_ids=PROMPT, max_tokens=4, seed=0, stop_ids=()))
    for prompt, done in zip(prompts, found, strict=False):
        assert (done.token_ids, done.finish_reason) == ([], "length")
        assert done.value == pytest.approx(value_of(critic or policy, list(prompt)), abs=1e-5)
    assert len(found[-1].token_ids) == 4
    assert batcher.statistics().running == 0


def test_the_models_config_says_what_its_head_puts_out_unless_somebody_knows_better():
    critic = make_model(2, value_head=True)
    probability = value_of(critic, list(PROMPT))
    logit = math.log(probability / (1 - probability))
    critic.config = msgspec.structs.replace(critic.config, value_kind="scalar")
    kinds: list[tuple[Any, float]] = [(None, logit), ("scalar", logit), ("success", probability)]
    for kind, expected in kinds:
        batcher = Batcher(make_model(1), TOKENIZER, critic=copy.deepcopy(critic), value_kind=kind)
        (done,) = run(batcher, Request(prompt_ids=PROMPT, value=True, max_tokens=0))
        assert done.value == pytest.approx(expected, abs=1e-4)


# New weights.


def test_a_new_critic_guides_running_sequences_from_the_next_token_on():
    policy, old, new = make_model(1), make_model(2, value_head=True), make_model(3, value_head=True)
    batcher = serve(policy, old)
    batcher.submit(guided(5.0, max_tokens=10))
    for _ in range(4):
        batcher.step()
    batcher.swap_critic(new.state_dict(), 7)
    done = None
    while batcher.has_work:
        done = next((r for r in batcher.step() if isinstance(r, Finished)), done)
    assert (done.value_version, batcher.value_version) == (7, 7)
    assert done.value_versions == [0] * 5 + [7] * 5  # a step draws one token, the first one two
    ids, at = [*PROMPT, *done.token_ids[:6]], 6
    base = base_logprobs(policy, ids)
    full = torch.zeros_like(base)
    for w in base.topk(8).indices.tolist():
        full[w] = value_of(new, [*ids, w])
    expected = tilt(base, full, 5.0, 8, tail_is_base=True, v=value_of(new, ids))
    assert done.logprobs[at] == pytest.approx(float(expected[done.token_ids[at]]), abs=1e-4)


def test_critic_weights_need_a_critic():
    with pytest.raises(PublishError, match="must have a critic"):
        serve(make_model(1, value_head=True)).swap_critic({}, 1)


def mixed_request(rng, seed):
    prompt = (*range(3, rng.choice([8, 36, 43])), *(rng.randrange(3, 200) for _ in range(rng.choice([0, 1, 20]))))
    kind, length = rng.choice(["guided", "guided", "value", "echo", "plain"]), rng.randrange(1, 14)
    if kind == "guided":
        tail = rng.choice(["base", "zero"])
        return guided(rng.choice([0.0, 3.0, 30.0]), seed=seed, max_tokens=length, prompt=prompt, top_k=4, tail=tail)
    if kind == "value":
        return Request(prompt_ids=prompt, value=True, max_tokens=0)
    return Request(prompt_ids=prompt, max_tokens=length, seed=seed, stop_ids=(), echo=kind == "echo")


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_whatever_is_cancelled_or_replaced_beside_it_a_sequence_is_what_it_is_alone(on_update):
    policies, critics = [make_model(1), make_model(5)], [make_model(n, value_head=True) for n in (2, 7)]
    rng, at, swaps, compared = random.Random(0), [0, 0], 0, 0

    def batcher_of(running, cached):
        config = BatcherConfig(max_running=running, max_cached_tokens=cached, on_update=on_update)
        return Batcher(copy.deepcopy(policies[at[0]]), TOKENIZER, config, critic=copy.deepcopy(critics[at[1]]))

    batcher, waiting = batcher_of(4, 400), [mixed_request(rng, seed) for seed in range(80)]
    live: dict[Any, Any] = {}
    while waiting or batcher.has_work:
        while waiting and len(live) < 6:
            request = waiting.pop()
            live[batcher.submit(request)] = request, swaps
        for done in (report for report in batcher.step() if isinstance(report, Finished)):
            request, before = live.pop(done.id)
            if before == swaps:  # one policy and one critic from its first token to its last
                (alone,) = run(batcher_of(1, 0), request)
                assert done.token_ids == alone.token_ids
                assert done.value == pytest.approx(alone.value, abs=1e-5)
                assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
                assert done.base_logprobs == pytest.approx(alone.base_logprobs, abs=1e-4)
                compared += 1
        if rng.random() < 0.06:
            which, swaps = rng.randrange(2), swaps + 1
            at[which] = 1 - at[which]
            swap = batcher.swap_critic if which else batcher.swap_weights
            swap((critics if which else policies)[at[which]].state_dict(), swaps)
        if live and rng.random() < 0.1:
            batcher.cancel(gone := rng.choice(list(live)))
            del live[gone]
    assert compared > 20
    assert batcher.statistics().running == 0


# What is refused.


@pytest.mark.parametrize(
    ("request_", "has_critic", "message"),
    [
        (guided(1.0), False, "needs values: the engine has no critic"),
        (Request(prompt_ids=PROMPT, value=True), False, "needs values"),
        (Request(prompt_ids=PROMPT, temperature=0.0, guidance=TokenGuidance(beta=1.0)), True, "temperature above 0"),
    ],
)
def test_guidance_that_cannot_work_is_rejected(request_, has_critic, message):
    batcher = serve(make_model(1), make_model(2, value_head=True) if has_critic else None)
    answer = batcher.submit(request_)
    assert isinstance(answer, Rejection)
    assert message in answer.message


def test_a_critic_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="must have a value head"):
        serve(make_model(1), make_model(2))
    other = PolicyModel(ModelConfig(vocab_size=7, width=32, layers=1, heads=2, head_dim=16, value_head=True))
    with pytest.raises(ConfigError, match="must share vocab_size"):
        serve(make_model(1), other)
    shorter = PolicyModel(msgspec.structs.replace(make_model(1, value_head=True).config, max_context=32))
    with pytest.raises(ConfigError, match="max_context must be at least the policy's: expected 1024, got 32"):
        serve(make_model(1), shorter)


def overflowing(model):
    with torch.no_grad():
        model.value_head.weight.sign_().mul_(3e38)
    return model


def test_a_head_that_overflows_is_refused_at_the_start():
    for policy, critic in [
        (make_model(1), overflowing(make_model(2, value_head=True))),
        (overflowing(make_model(1, value_head=True)), None),
    ]:
        with pytest.raises(ConfigError, match="values must be finite: the weights overflow"):
            serve(policy, critic)


def test_values_that_are_no_numbers_are_told_for_what_they_are():
    batcher = serve(make_model(1), make_model(2, value_head=True))
    overflowing(batcher._values.rows.engine.model)
    batcher.submit(guided(1.0))
    with pytest.raises(FloatingPointError, match="values must be finite: got NaN or infinity; the critic's weights"):
        batcher.step()


def test_guided_sequences_end_with_the_context():
    config = ModelConfig(vocab_size=len(TOKENIZER), width=32, layers=1, heads=2, head_dim=16, max_context=48)
    batcher = serve(PolicyModel(config), PolicyModel(msgspec.structs.replace(config, value_head=True)))
    for length in (44, 47):
        (done,) = run(batcher, guided(3.0, prompt=tuple(range(3, 3 + length)), max_tokens=99))
        assert (len(done.token_ids), done.finish_reason) == (48 - length, "length")
    (done,) = run(batcher, Request(prompt_ids=tuple(range(48)), value=True, max_tokens=0))
    assert done.value == pytest.approx(0.5)  # a new head is silent
