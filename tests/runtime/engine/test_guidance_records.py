"""What is recorded of guided tokens, against whole passes in float64 under the very versions that the record names."""

import copy
import random
from typing import Any

import msgspec
import pytest
import torch

from tests.runtime.engine.test_guidance import TOKENIZER, make_model
from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.request import BatcherConfig, Finished, Request
from turngate.runtime.types import TokenGuidance


class Referee:
    """Recomputes log-probs from nothing but ids and weights."""

    def __init__(self, policies, critics):
        self.policies = {version: copy.deepcopy(model).double() for version, model in policies.items()}
        self.critics = {version: copy.deepcopy(model).double() for version, model in critics.items()}

    @torch.no_grad()
    def base(self, version, ids, request):
        logits = self.policies[version].logits(pack([[*ids, 0]], [[0] * len(ids) + [1]]))[0]
        logprobs = (logits / request.temperature).log_softmax(0)
        if request.top_k:
            logprobs[logprobs < logprobs.topk(request.top_k).values[-1]] = -torch.inf
        return logprobs.log_softmax(0)

    @torch.no_grad()
    def value(self, version, ids):
        return self.critics[version].values(pack([[*ids, 0]], [[0] * len(ids) + [1]]))[0].sigmoid()

    def guided(self, version, value_version, ids, request):
        base, guidance = self.base(version, ids, request), request.guidance
        outside = guidance.beta * self.value(value_version, ids) if guidance.tail == "base" else -torch.inf
        tilted = base + outside
        for token in base.topk(min(guidance.top_k, len(base))).indices.tolist():
            tilted[token] = base[token] + guidance.beta * self.value(value_version, [*ids, token])
        return base, tilted.log_softmax(0)


def a_request(rng, seed, shared):
    prompt = shared[: rng.randrange(1, 40)] + [rng.randrange(3, 200) for _ in range(rng.choice([0, 2, 12]))]
    if rng.random() < 0.15:
        return Request(prompt_ids=prompt, value=True, max_tokens=0)
    tail: Any = rng.choice(["base", "zero"])
    return Request(
        prompt_ids=prompt,
        max_tokens=rng.randrange(1, 16),
        seed=seed,
        stop_ids=(),
        temperature=rng.choice([1.0, 0.6, 1.7]),
        top_k=rng.choice([0, 0, 12]),
        guidance=TokenGuidance(beta=rng.choice([0.0, 2.0, 30.0]), top_k=rng.choice([1, 3, 8]), tail=tail),
        stop=rng.choice([(), ("zz",)]),
    )


@pytest.mark.parametrize("trunk", [False, True])
def test_each_token_has_the_log_probs_of_the_versions_it_says_whatever_is_replaced_meanwhile(trunk):
    rng = random.Random(5)
    policies, critics = {0: make_model(10, value_head=trunk)}, {0: make_model(20, value_head=True, layers=1)}
    batcher = Batcher(
        copy.deepcopy(policies[0]),
        TOKENIZER,
        BatcherConfig(max_running=4, max_cached_tokens=300),
        critic=None if trunk else copy.deepcopy(critics[0]),
    )
    shared = [rng.randrange(3, 200) for _ in range(40)]
    waiting = [a_request(rng, seed, shared) for seed in range(24)]
    asked: dict[Any, Request] = {}
    found: dict[int, Finished] = {}
    while waiting or batcher.has_work:
        while waiting and len(asked) - len(found) < 6:
            request = waiting.pop()
            asked[batcher.submit(request)] = request
        found.update({report.id: report for report in batcher.step() if isinstance(report, Finished)})
        if rng.random() < 0.12:
            policies[len(policies)] = make_model(10 + len(policies), value_head=trunk)
            batcher.swap_weights(policies[len(policies) - 1].state_dict(), len(policies) - 1)
        if rng.random() < 0.12 and not trunk:
            critics[len(critics)] = make_model(50 + len(critics), value_head=True, layers=1)
            batcher.swap_critic(critics[len(critics) - 1].state_dict(), len(critics) - 1)
    referee = Referee(policies, policies if trunk else critics)
    for number, done in found.items():
        request, ids = asked[number], list(asked[number].prompt_ids)
        if request.value:
            assert done.value == pytest.approx(float(referee.value(done.value_version, ids)), abs=1e-5)
        for at, token in enumerate(done.token_ids):
            base, guided = referee.guided(done.versions[at], done.value_versions[at], ids, request)
            assert done.base_logprobs[at] == pytest.approx(float(base[token]), abs=1e-4)
            assert done.logprobs[at] == pytest.approx(float(guided[token]), abs=1e-4)
            ids.append(token)
    assert any(len(set(done.value_versions)) > 1 for done in found.values())  # some were replaced in mid-sequence
    for rows in (batcher._rows, batcher._values.rows):
        assert all(entry.stored is not None for entries in rows.cache._index.values() for entry in entries)


def test_a_running_sequence_is_kept_for_others_under_the_new_critic():
    critic, new = make_model(2, value_head=True), make_model(3, value_head=True)
    batcher = Batcher(make_model(1), TOKENIZER, critic=critic)
    first = Request(prompt_ids=tuple(range(3, 60)), max_tokens=9, seed=1, stop_ids=(), guidance=TokenGuidance(beta=3.0))
    batcher.submit(first)
    batcher.step()
    batcher.swap_critic(new.state_dict(), 1)
    done = next(r for _ in iter(lambda: batcher.has_work, False) for r in batcher.step() if isinstance(r, Finished))
    longer = [*first.prompt_ids, *done.token_ids]
    batcher.submit(msgspec.structs.replace(first, prompt_ids=longer, value=True, max_tokens=0, guidance=None))
    (value,) = [r for r in batcher.step() if isinstance(r, Finished)]
    assert value.cached_tokens == len(longer) - 1
    assert value.value == pytest.approx(float(Referee({}, {1: new}).value(1, longer)), abs=1e-5)
