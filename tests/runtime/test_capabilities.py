import re

import msgspec
import pytest

from turngate.runtime import OPENAI, Endpoint, Sampling
from turngate.runtime.capabilities import USES, Capabilities, Finding, check_trainable
from turngate.runtime.errors import ConfigError
from turngate.runtime.testing import FakeEndpoint

YES, NO = Finding("yes", "seen"), Finding("no", "not seen")
GOOD = Capabilities(url="http://server/v1", model="policy", **dict.fromkeys(
    (name for name, field in ((f.name, f) for f in msgspec.structs.fields(Capabilities)) if field.type is Finding), YES
))  # fmt: skip


def but(**findings):
    return msgspec.structs.replace(GOOD, **findings)


def test_a_server_that_can_everything_has_no_problems():
    assert {use: GOOD.problems(use) for use in USES} == {use: [] for use in USES}


@pytest.mark.parametrize(
    ("findings", "has_renderer", "expected"),
    [
        ({}, True, "tokens"),
        ({}, False, "server"),
        ({"id_prompts": NO}, True, "server"),
        ({"completion_ids": NO, "sampled_ids": NO}, True, "tokens"),  # by token_id: strings
        ({"completion_ids": NO, "id_strings": NO}, True, "server"),
        ({"prompt_ids": NO}, False, "text"),
        ({"sampled_ids": NO}, False, "text"),
        ({"chat": NO}, True, "tokens"),
    ],
)
def test_the_best_source_of_ids_is_chosen(findings, has_renderer, expected):
    assert but(**findings).token_mode(has_renderer=has_renderer) == expected


def test_dialects_ask_for_what_the_server_knows():
    renderer = object()
    assert GOOD.dialect().return_token_ids
    tokens = GOOD.dialect(renderer)
    assert (tokens.token_mode, tokens.return_token_ids, tokens.token_id_strings) == ("tokens", False, True)
    tokens = but(id_strings=NO).dialect(renderer)
    assert (tokens.token_mode, tokens.return_token_ids, tokens.token_id_strings) == ("tokens", True, False)
    assert but(plain_logprobs=NO).dialect().top_logprobs == 1
    assert but(plain_logprobs=NO).dialect(renderer).top_logprobs is None
    text = but(prompt_ids=NO, logprobs=NO, top_k=NO, seeds=NO).dialect()
    assert (text.token_mode, text.logprobs, text.top_k, text.seed, text.asks_ids) == (
        "text",
        False,
        False,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("sampling", "is_fine"),
    [
        (Sampling(), True),
        (Sampling(temperature=0.7), False),
        (Sampling(top_p=0.9), False),
        (Sampling(top_k=5), False),
        (None, False),
    ],
)
def test_raw_logprobs_train_at_temperature_1_over_the_whole_vocabulary_alone(sampling, is_fine):
    raw = but(follows_temperature=NO, follows_truncation=NO)
    problems = raw.problems("train", sampling)
    assert (problems == []) == is_fine
    assert is_fine or "processed_logprobs" in problems[0]


def test_a_top_k_without_effect_is_a_problem_for_those_who_use_it():
    assert but(top_k=NO).problems("train", Sampling()) == []
    assert "top_k" in but(top_k=NO).problems("train", Sampling(top_k=4))[0]


def test_logprobs_are_needed_on_the_route_that_is_used():
    assert but(completion_logprobs=NO).problems("record", has_renderer=False) == []
    assert "log-probs" in but(completion_logprobs=NO).problems("record", has_renderer=True)[0]


def test_an_unknown_use_is_refused():
    with pytest.raises(ConfigError, match="evaluate, record, train, guide, publish"):
        GOOD.problems("dream")


def test_the_table_says_what_works_and_what_is_missing():
    table = but(prompt_ids=NO, weights=Finding("no", "no known route"), n=NO).table()
    assert re.search(r"^ids of the prompt +no +not seen$", table, re.M)
    assert re.search(r"^  evaluate +yes", table, re.M)
    assert "(--tokenizer FOLDER); recording is impossible without" in " ".join(table.split())
    assert "VLLM_SERVER_DEV_MODE" in table
    assert "one request per candidate" in table
    assert max(map(len, table.splitlines())) <= 200


async def test_training_is_refused_with_all_reasons():
    check_trainable(FakeEndpoint(["hi"]), Sampling())
    check_trainable(Endpoint("http://server/v1", model="policy"), Sampling())
    check_trainable(Endpoint("http://server/v1", model="policy", capabilities=GOOD), Sampling(temperature=0.5))
    with pytest.raises(ConfigError, match="token mode is 'text'"):
        check_trainable(Endpoint("http://server/v1", model="policy", dialect=OPENAI), Sampling())
    raw = Endpoint("http://server/v1", model="policy", capabilities=but(follows_temperature=NO, logprobs=YES))
    check_trainable(raw, Sampling())
    with pytest.raises(ConfigError, match="processed_logprobs"):
        check_trainable(raw, Sampling(temperature=0.5))
