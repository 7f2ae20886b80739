"""New weights under running sequences: versions, exact log-probs, nothing reused, failures harmless."""

import random
from typing import Any

import pytest
import torch

from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.request import BatcherConfig, Finished, Request
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import PublishError

TOKENIZER = Tokenizer([])
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(len(TOKENIZER)) for _ in range(RNG.randint(1, 150))] for _ in range(12)]


@pytest.fixture
def make(make_policy):
    def batcher(**settings: Any) -> Batcher:
        return Batcher(make_policy(len(TOKENIZER), seed=0), TOKENIZER, BatcherConfig(**settings), policy_version=4)

    return batcher


@pytest.fixture
def old(make_policy) -> PolicyModel:
    return make_policy(len(TOKENIZER), seed=0)


@pytest.fixture
def new(make_policy) -> PolicyModel:
    return make_policy(len(TOKENIZER), seed=1)


def start(batcher: Batcher, steps: int, prompts: list[list[int]] = PROMPTS) -> list[int]:
    requests = [Request(prompt_ids=p, seed=i, max_tokens=20, stop_ids=()) for i, p in enumerate(prompts)]
    ids = [i for request in requests if isinstance(i := batcher.submit(request), int)]
    for _ in range(steps):
        batcher.step()
    return ids


def finish(batcher: Batcher, ids: list[int]) -> list[Finished]:
    done = {}
    while batcher.has_work:
        done.update({output.id: output for output in batcher.step() if isinstance(output, Finished)})
    return [done[i] for i in ids]


def scored(model: PolicyModel, prompt: list[int], generated: list[int]) -> list[float]:
    with torch.no_grad():
        packed = pack([[*prompt, *generated]], [[0] * len(prompt) + [1] * len(generated)])
        return model.score(packed).logprobs_M.tolist()


def test_every_token_carries_the_version_that_drew_it_and_its_exact_log_prob(make, old, new):
    batcher = make()
    ids = start(batcher, 5)
    batcher.swap_weights(new.state_dict(), 5)
    for prompt, done in zip(PROMPTS, finish(batcher, ids), strict=True):
        # Admission draws one token more than the steps that follow it.
        assert done.versions == [4] * 6 + [5] * 14
        assert done.logprobs[:6] == pytest.approx(scored(old, prompt, done.token_ids)[:6], abs=1e-4)
        assert done.logprobs[6:] == pytest.approx(scored(new, prompt, done.token_ids)[6:], abs=1e-4)
        assert done.policy_version == 5
    assert batcher.statistics().recomputed_tokens == sum(len(p) + 5 for p in PROMPTS)


def test_kept_keys_and_values_go_on_without_recomputation_and_are_never_reused(make, new):
    batcher = make(on_update="keep")
    ids = start(batcher, 5)
    batcher.swap_weights(new.state_dict(), 5)
    results = finish(batcher, ids)
    assert batcher.statistics().recomputed_tokens == 0
    assert [done.versions for done in results] == [[4] * 6 + [5] * 14] * len(PROMPTS)
    assert batcher.statistics().cache_entries == 0
    # Old keys under new weights give another distribution: that is what `keep` gives up.
    prompt, done = max(zip(PROMPTS, results, strict=True), key=lambda pair: len(pair[0]))
    assert done.logprobs[6:] != pytest.approx(scored(new, prompt, done.token_ids)[6:], abs=1e-2)


def test_nothing_computed_under_old_weights_is_reused_under_new_ones(make, new):
    batcher = make()
    finish(batcher, start(batcher, 0))
    assert batcher.statistics().cache_entries > 0
    batcher.swap_weights(new.state_dict(), 5)
    assert batcher.statistics().cache_tokens == 0
    (done,) = finish(batcher, start(batcher, 0, [max(PROMPTS, key=len)]))
    assert done.cached_tokens == 0
    assert done.logprobs == pytest.approx(scored(new, max(PROMPTS, key=len), done.token_ids), abs=1e-4)


def test_recomputed_sequences_are_found_by_later_prompts(make, new):
    batcher = make()
    prompt = max(PROMPTS, key=len)
    ids = start(batcher, 3, [prompt])
    batcher.swap_weights(new.state_dict(), 5)
    (first,) = finish(batcher, ids)
    extended = [*prompt, *first.token_ids]
    (second,) = finish(batcher, start(batcher, 0, [extended]))
    assert second.cached_tokens == len(extended) - 1
    assert second.logprobs == pytest.approx(scored(new, extended, second.token_ids), abs=1e-4)


def test_sequences_waiting_at_a_swap_run_wholly_under_the_new_weights(make, new):
    batcher = make(max_running=1)
    ids = start(batcher, 2, PROMPTS[:2])
    batcher.swap_weights(new.state_dict(), 5)
    assert finish(batcher, ids)[1].versions == [5] * 20


def test_swapping_the_same_weights_changes_no_token(make, old):
    batcher = make()
    ids = start(batcher, 5)
    batcher.swap_weights(old.state_dict(), 5)
    swapped = finish(batcher, ids)
    plain = make()
    assert [d.token_ids for d in swapped] == [d.token_ids for d in finish(plain, start(plain, 0))]


@pytest.mark.parametrize("damage", ["nan", "missing", "shape"])
def test_weights_that_do_not_fit_leave_the_old_version_serving(make, new, damage):
    batcher = make()
    ids = start(batcher, 5)
    state = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    # The last name, so that a careless copy would have changed all the others already.
    name = list(state)[-1]
    if damage == "nan":
        state[name].flatten()[-1] = torch.nan
    elif damage == "missing":
        del state[name]
    else:
        state[name] = state[name][..., :-1]
    with pytest.raises(PublishError, match=name):
        batcher.swap_weights(state, 5)
    assert batcher.policy_version == 4
    plain = make()
    assert [d.token_ids for d in finish(batcher, ids)] == [d.token_ids for d in finish(plain, start(plain, 0))]
