import math
import random
import re
from typing import Any

import pytest
import torch

from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.request import BatcherConfig, Finished, Progress, Rejection, Request
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError

TOKENIZER = Tokenizer([f"word_{i}" for i in range(40)])
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(len(TOKENIZER)) for _ in range(RNG.randint(1, 180))] for _ in range(24)]


@pytest.fixture
def model(make_policy) -> PolicyModel:
    return make_policy(len(TOKENIZER))


@pytest.fixture
def make(make_policy):
    """Return a function that makes a batcher with a model of its own; equal seeds make equal models."""

    def batcher(seed: int = 0, **settings: Any) -> Batcher:
        return Batcher(make_policy(len(TOKENIZER), seed=seed), TOKENIZER, BatcherConfig(**settings))

    return batcher


def ask(prompt: list[int], seed: int = 0, **settings: Any) -> Request:
    # No stop token, so that lengths are known, unless the test is about stopping.
    return Request(**{"prompt_ids": prompt, "seed": seed, "max_tokens": 12, "stop_ids": (), **settings})


def collect(batcher: Batcher) -> dict[int, Finished]:
    done = {}
    while batcher.has_work:
        done.update({output.id: output for output in batcher.step() if isinstance(output, Finished)})
    return done


def run(batcher: Batcher, *requests: Request) -> list[Finished]:
    ids = [i for request in requests if isinstance(i := batcher.submit(request), int)]
    assert len(ids) == len(requests)
    done = collect(batcher)
    return [done[i] for i in ids]


def scored(model: PolicyModel, prompt: list[int], generated: list[int], temperature: float = 1.0) -> list[float]:
    ids = [*prompt, *generated]
    mask = [0] * len(prompt) + [1] * len(generated)
    with torch.no_grad():
        return model.score(pack([ids], [mask]), temperature=temperature).logprobs_M.tolist()


MIXED = [
    ask(
        prompt,
        seed,
        max_tokens=5 + seed % 9,
        temperature=(1.0, 0.7, 0.0)[seed % 3],
        top_p=(1.0, 0.9)[seed % 2],
        top_k=(0, 0, 0, 5)[seed % 4],
    )
    for seed, prompt in enumerate(PROMPTS)
]


def test_equal_seeds_give_equal_tokens_and_log_probs_whatever_else_is_in_the_batch(make):
    alone = [run(make(max_running=1), request)[0] for request in MIXED]
    for running in (2, 3, 7, 64):
        together = run(make(max_running=running), *MIXED)
        assert [a.token_ids for a in alone] == [b.token_ids for b in together]
        for a, b in zip(alone, together, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_two_hundred_seeds_draw_the_same_tokens_alone_and_together(make):
    requests = [ask(PROMPTS[seed % 8][:20], seed, max_tokens=4, temperature=1.5) for seed in range(200)]
    together = run(make(max_running=64), *requests)
    batcher = make(max_running=1, max_cached_tokens=0)
    assert [b.token_ids for b in together] == [run(batcher, request)[0].token_ids for request in requests]
    # Seeds matter: nearly all of the 200 short answers differ from their group's first.
    assert sum(a.token_ids != together[seed % 8].token_ids for seed, a in enumerate(together)) > 180


def test_any_integer_is_the_root_of_the_seeds_of_requests_without_one(make_policy):
    model, request = make_policy(len(TOKENIZER)), Request(prompt_ids=PROMPTS[0], max_tokens=12, stop_ids=())
    drawn = [
        run(Batcher(model, TOKENIZER, BatcherConfig(seed=root)), request)[0].token_ids for root in (-1, -1, -2, 2**70)
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn}) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_log_probs_equal_the_training_pass(make, model, temperature):
    batcher = make()
    for prompt, done in zip(PROMPTS, run(batcher, *(ask(p, temperature=temperature) for p in PROMPTS)), strict=True):
        assert done.logprobs == pytest.approx(scored(model, prompt, done.token_ids, temperature), abs=1e-4)


def test_log_probs_after_top_p_are_renormalised(make, model):
    prompt = PROMPTS[1]
    (done,) = run(make(), ask(prompt, top_p=0.5, max_tokens=1))
    with torch.no_grad():
        probs = model.logits(pack([[*prompt, 0]], [[0] * len(prompt) + [1]]))[0].double().softmax(-1)
    ordered, kept = probs.sort(descending=True).values.tolist(), 0.0
    for p in ordered:
        kept += p
        if kept >= 0.5:
            break
    assert done.logprobs[0] == pytest.approx(math.log(probs[done.token_ids[0]] / kept), abs=1e-4)


def test_a_prompt_that_extends_a_finished_sequence_takes_its_prefix_from_the_cache(make, model):
    batcher = make()
    prompt = PROMPTS[3]
    (first,) = run(batcher, ask(prompt))
    extended = [*prompt, *first.token_ids, 1, 2, 3]
    (second,) = run(batcher, ask(extended))
    # The last token drawn was never fed, so its key and value are missing.
    assert second.cached_tokens == len(prompt) + len(first.token_ids) - 1
    (fresh,) = run(make(), ask(extended))
    assert fresh.cached_tokens == 0
    assert second.token_ids == fresh.token_ids
    assert second.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
    assert second.logprobs == pytest.approx(scored(model, extended, second.token_ids), abs=1e-4)
    seen = batcher.statistics()
    assert (seen.cache_entries, seen.cached_tokens) == (1, second.cached_tokens)


def test_members_of_a_group_share_the_prompt_that_the_first_one_computes(make):
    prompt = PROMPTS[3]
    done = run(make(), *(ask(prompt, seed) for seed in range(8)))
    assert [d.cached_tokens for d in done] == [0] + [len(prompt)] * 7
    for seed, member in enumerate(done):
        assert member.token_ids == run(make(), ask(prompt, seed))[0].token_ids


def test_a_running_sequence_that_moved_into_a_gap_is_still_found(make):
    batcher = make()
    batcher.submit(ask(PROMPTS[5], max_tokens=2))
    batcher.submit(ask(PROMPTS[3], max_tokens=40))
    batcher.step()
    assert batcher.statistics().running == 1
    # Something else takes the row that the running sequence left.
    batcher.submit(ask(PROMPTS[6], max_tokens=40))
    batcher.step()
    asked = batcher.submit(ask([*PROMPTS[3], 1, 2]))
    done = collect(batcher)[asked]
    assert done.cached_tokens == len(PROMPTS[3])
    assert done.token_ids == run(make(), ask([*PROMPTS[3], 1, 2]))[0].token_ids


def test_prompts_with_a_common_beginning_share_it_also_when_they_arrive_together(make):
    common = PROMPTS[3][:64]
    done = run(make(), *(ask([*common, i, i]) for i in range(4)))
    assert [d.cached_tokens for d in done] == [0, 64, 64, 64]


def test_without_a_cache_everything_is_computed(make):
    batcher = make(max_cached_tokens=0)
    done = run(batcher, *(ask(PROMPTS[3], seed) for seed in range(3)))
    assert [d.cached_tokens for d in done] == [0, 0, 0]
    assert batcher.statistics().cache_tokens == 0
    assert [d.token_ids for d in done] == [d.token_ids for d in run(make(), *(ask(PROMPTS[3], s) for s in range(3)))]


def test_the_end_of_turn_token_ends_a_sequence_and_belongs_to_it(make):
    end = run(make(), ask(PROMPTS[2], max_tokens=6))[0].token_ids[3]
    (done,) = run(make(), ask(PROMPTS[2], max_tokens=6, stop_ids=(end,)))
    assert done.finish_reason == "stop"
    assert done.token_ids[-1] == end
    assert len(done.token_ids) == len(done.logprobs) == len(done.versions) <= 4


def test_the_tokenizers_end_token_is_the_default_stop(make_policy):
    model = make_policy(len(TOKENIZER))
    with torch.no_grad():
        model.embed.weight[TOKENIZER.end] *= 40
    batcher = Batcher(model, TOKENIZER)
    results = run(batcher, *(ask([i], i, stop_ids=None, max_tokens=200) for i in range(20)))
    stopped = [done for done in results if done.finish_reason == "stop"]
    assert stopped
    assert all(done.token_ids.index(TOKENIZER.end) == len(done.token_ids) - 1 for done in stopped)


def test_a_stop_string_cuts_the_text_and_keeps_the_whole_token(make):
    request = ask(PROMPTS[2], 3, max_tokens=20)
    (whole,) = run(make(), request)
    words = TOKENIZER.decode(whole.token_ids[:8])
    stop = words[-2:]
    (done,) = run(make(), ask(PROMPTS[2], 3, max_tokens=20, stop=(stop,)))
    assert done.finish_reason == "stop"
    assert done.text == whole.text[: whole.text.index(stop)]
    assert done.token_ids == whole.token_ids[: len(done.token_ids)]
    assert stop in TOKENIZER.decode(done.token_ids)
    assert stop not in TOKENIZER.decode(done.token_ids[:-1])


def test_generation_ends_at_max_tokens_and_at_the_edge_of_the_context(make):
    short, edge = run(make(), ask([1], max_tokens=3), ask([1] * 250, max_tokens=100))
    assert (short.finish_reason, len(short.token_ids)) == ("length", 3)
    assert (edge.finish_reason, len(edge.token_ids)) == ("length", 6)


def test_streamed_progress_concatenates_to_the_finished_sequence(make):
    batcher = make()
    batcher.submit(ask(PROMPTS[4], stream=True, top_logprobs=2, stop=("never seen",)))
    outputs = []
    while batcher.has_work:
        outputs += batcher.step()
    *progress, done = outputs
    assert all(isinstance(output, Progress) for output in progress)
    assert len(progress) == 12
    assert [token for p in progress for token in p.token_ids] == done.token_ids
    assert [value for p in progress for value in p.logprobs] == done.logprobs
    assert [value for p in progress for value in p.versions] == done.versions
    assert [value for p in progress for value in p.top_logprobs] == done.top_logprobs
    assert "".join(p.text for p in progress) == done.text == TOKENIZER.decode(done.token_ids)


def test_alternatives_are_ordered_and_hold_the_drawn_tokens_own_log_prob(make):
    (done,) = run(make(), ask(PROMPTS[4], temperature=0.0, top_logprobs=3))
    for token, logprob, alternatives in zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True):
        assert len(alternatives) == 3
        assert alternatives[0][0] == token
        assert alternatives[0][1] == pytest.approx(logprob)
        assert sorted(alternatives, key=lambda pair: -pair[1]) == list(alternatives)


def test_echo_scores_the_prompt_like_the_training_pass(make, model):
    batcher = make()
    prompts = [PROMPTS[0], PROMPTS[5], [7]]
    run(batcher, ask(PROMPTS[5]))
    plain, *echoed = run(batcher, ask([3, 4]), *(ask(p, echo=True, max_tokens=0, top_logprobs=2) for p in prompts))
    assert plain.prompt_logprobs is None
    for prompt, done in zip(prompts, echoed, strict=True):
        assert (done.token_ids, done.finish_reason, done.cached_tokens) == ([], "length", 0)
        first, *rest = done.prompt_logprobs or []
        assert first is None
        assert rest == pytest.approx(scored(model, prompt[:1], prompt[1:]), abs=1e-4)
        assert [len(pairs) for pairs in done.prompt_top_logprobs] == [0] + [2] * (len(prompt) - 1)


def test_echo_with_generation_generates_what_it_would_without(make):
    (echoed,) = run(make(), ask(PROMPTS[5], 9, echo=True))
    (plain,) = run(make(), ask(PROMPTS[5], 9))
    assert echoed.token_ids == plain.token_ids
    assert len(echoed.prompt_logprobs) == len(PROMPTS[5])


def test_requests_beyond_the_running_rows_wait_their_turn(make):
    batcher = make(max_running=2)
    for prompt in PROMPTS[:5]:
        batcher.submit(ask(prompt))
    batcher.step()
    assert repr(batcher) == "<Batcher 2 running, 3 waiting, version 0>"
    assert len(collect(batcher)) == 5
    seen = batcher.statistics()
    assert (seen.running, seen.waiting, seen.finished, seen.generated_tokens) == (0, 0, 5, 60)


def test_prefill_stops_at_its_budget_so_that_running_sequences_go_on(make):
    batcher = make(max_prefill_tokens=100, max_cached_tokens=0)
    for start in range(4):
        batcher.submit(ask([start] * 60, max_tokens=50))
    batcher.step()
    assert batcher.statistics().running == 2
    batcher.step()
    assert batcher.statistics().running == 4


def test_cancelling_frees_the_slot_and_reports_nothing_further(make):
    batcher = make(max_running=2)
    first, second, third = (batcher.submit(ask(prompt, max_tokens=30)) for prompt in PROMPTS[:3])
    batcher.step()
    assert batcher.cancel(first)
    assert not batcher.cancel(first)
    assert batcher.statistics().running == 1
    batcher.step()
    assert batcher.statistics().running == 2
    done = collect(batcher)
    assert set(done) == {second, third}
    expected = [run(make(), ask(prompt, max_tokens=30))[0].token_ids for prompt in PROMPTS[1:3]]
    assert [done[second].token_ids, done[third].token_ids] == expected
    assert batcher.statistics().cancelled == 1
    assert not batcher.cancel(second)


def test_cancelling_a_waiting_request_takes_it_off_the_queue(make):
    batcher = make(max_running=1)
    ids = [batcher.submit(ask(prompt)) for prompt in PROMPTS[:3]]
    assert batcher.cancel(ids[1])
    assert set(collect(batcher)) == {ids[0], ids[2]}


def test_cancelling_everything_leaves_nothing_to_do(make):
    batcher = make(max_running=2)
    ids = [batcher.submit(ask(prompt)) for prompt in PROMPTS[:3]]
    batcher.step()
    assert all(batcher.cancel(i) for i in ids)
    assert not batcher.has_work
    assert batcher.step() == []


def test_a_full_queue_turns_requests_away_as_overloaded(make):
    batcher = make(max_running=2, max_waiting=2)
    answers = [batcher.submit(ask(PROMPTS[0])) for _ in range(5)]  # two find free slots, before any step
    assert not any(isinstance(answer, Rejection) for answer in answers[:4])
    assert isinstance(answers[4], Rejection)
    assert answers[4].kind == "overloaded"
    assert batcher.statistics().rejected == 1


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids", "must not be empty"),
        ({"prompt_ids": [1] * 256}, "prompt_ids", "context of 256 tokens: got 256"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, or 0 with echo: got 0"),
        ({"temperature": -0.1}, "temperature", "got -0.1"),
        ({"temperature": math.nan}, "temperature", "got nan"),
        ({"top_p": 0.0}, "top_p", r"\(0, 1\]: got 0.0"),
        ({"top_p": 1.1}, "top_p", "got 1.1"),
        ({"top_k": -1}, "top_k", "got -1"),
        ({"stop": ("",)}, "stop", "empty string"),
    ],
)
def test_a_request_that_cannot_be_served_is_turned_away_with_the_field_named(make, settings, param, message):
    answer = make().submit(ask(**{"prompt": [1], **settings}))
    assert isinstance(answer, Rejection)
    assert (answer.param, answer.kind) == (param, "invalid")
    assert re.search(message, answer.message)


def test_a_full_context_can_still_be_scored(make):
    (done,) = run(make(), ask([1] * 256, echo=True, max_tokens=0))
    assert len(done.prompt_logprobs) == 256


def test_requests_without_a_seed_draw_differently_and_reproducibly(make):
    first, again = (run(make(seed=0), *(ask([5], None) for _ in range(4))) for _ in range(2))
    assert len({tuple(done.token_ids) for done in first}) == 4
    assert [done.token_ids for done in first] == [done.token_ids for done in again]


def test_any_integer_is_a_seed(make):
    results = run(make(), *(ask([5], seed) for seed in (-1, 2**64 - 1, 2**200)))
    assert results[0].token_ids == results[1].token_ids


def test_the_recent_rate_follows_the_clock(make_policy):
    now = [0.0]

    def clock() -> float:
        now[0] += 0.05
        return now[0]

    batcher = Batcher(make_policy(len(TOKENIZER)), TOKENIZER, clock=clock)
    assert batcher.statistics().tokens_per_s == 0
    run(batcher, ask([1], max_tokens=100), ask([2], max_tokens=100))
    # Two tokens per step of 0.05 s.
    assert batcher.statistics().tokens_per_s == pytest.approx(40)
    assert batcher.statistics().busy_s == pytest.approx(99 * 0.05)


def test_settings_and_tokenizers_that_cannot_work_are_refused(make, make_policy):
    with pytest.raises(ConfigError, match="max_running must be at least 1: got 0"):
        make(max_running=0)
    with pytest.raises(ConfigError, match="max_cached_tokens must be at least 0"):
        make(max_cached_tokens=-1)
    with pytest.raises(ConfigError, match="share one vocabulary"):
        Batcher(make_policy(len(TOKENIZER) + 1), TOKENIZER)
