import msgspec
import pytest

from turngate.runtime.dialect import OPENAI, Dialect
from turngate.runtime.gateway.asks import decode_chat, decode_text
from turngate.runtime.gateway.drawing import drawing_for
from turngate.runtime.gateway.edits import Keep, chat_body, strip, text_body
from turngate.runtime.limits import Limits
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.types import Sampling

PINNED = Sampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=20, stop=("END",))


VLLM = Dialect()


def edited(fields, *, sampling=None, dialect=VLLM, limits=None):
    session = SessionTable(FakeEndpoint([]), limits=limits or Limits()).create(sampling=sampling, seed=3)
    raw, ask = decode_chat(msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], **fields}))
    drawing = drawing_for(raw, ask, session)
    return msgspec.json.decode(chat_body(raw, ask, drawing, model="base", dialect=dialect)), drawing


async def test_the_record_needs_ids_logprobs_and_a_sampling_that_is_said():
    body, drawing = edited({"model": "gpt-9", "parallel_tool_calls": True})
    assert body.pop("seed") >= 0
    assert body == {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "base",
        "parallel_tool_calls": True,
        "logprobs": True,
        "return_token_ids": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    assert drawing.recorded is not None


async def test_what_the_agent_says_of_sampling_stands_unless_the_session_pins_it():
    asked = {"temperature": 0.2, "top_p": 0.8, "top_k": -1, "max_tokens": 9, "seed": 5, "stop": "x", "min_p": 0.1}
    own, drawing = edited(asked)
    pinned, _ = edited(asked, sampling=PINNED)
    assert (own["temperature"], own["top_p"], own["top_k"], own["max_tokens"]) == (0.2, 0.8, 0, 9)
    assert (own["seed"], own["stop"], own["min_p"]) == (5, "x", 0.1)
    assert (drawing.is_known, drawing.recorded) == (False, None)
    assert (pinned["temperature"], pinned["top_p"], pinned["top_k"]) == (0.5, 0.9, 7)
    assert (pinned["max_tokens"], pinned["stop"], "min_p" in pinned) == (9, "x", False)


async def test_a_pinned_session_gives_its_cap_and_stops_where_the_agent_has_none():
    body, _ = edited({}, sampling=PINNED)
    assert (body["max_tokens"], body["stop"]) == (20, ["END"])


async def test_the_cap_shrinks_to_what_the_episode_has_left_under_the_name_the_agent_uses():
    body, _ = edited({"max_completion_tokens": 50}, limits=Limits(max_policy_tokens=30))
    assert (body["max_completion_tokens"], "max_tokens" in body) == (30, False)
    assert edited({}, limits=Limits(max_policy_tokens=30))[0]["max_tokens"] == 30
    assert "max_tokens" not in edited({})[0]


async def test_samplers_of_one_vendor_alone_are_shapes_too():
    asked = {"mirostat": 2, "repeat_penalty": 1.1, "bad_words": ["no"]}
    own, drawing = edited(asked)
    pinned, _ = edited(asked, sampling=PINNED)
    assert {name: own[name] for name in asked} == asked
    assert (drawing.is_known, set(asked) & set(pinned)) == (False, set())


@pytest.mark.parametrize(
    "neutral", [{"frequency_penalty": 0}, {"logit_bias": {}}, {"repetition_penalty": 1.0}, {"bad_words": []}]
)
async def test_shaping_fields_that_ask_for_nothing_leave_the_sampling_known(neutral):
    assert edited(neutral)[1].is_known


async def test_a_server_of_the_openai_api_alone_is_not_sent_fields_it_does_not_know():
    body, _ = edited({"temperature": 0.3}, dialect=OPENAI)
    assert set(body) == {"messages", "model", "temperature", "logprobs", "seed"}


async def test_a_server_that_gives_logprobs_only_with_alternatives_is_asked_for_both():
    dialect = Dialect(top_logprobs=1, seed=False)
    assert edited({}, dialect=dialect)[0]["top_logprobs"] == 1
    assert edited({"logprobs": True, "top_logprobs": 4}, dialect=dialect)[0]["top_logprobs"] == 4
    assert "seed" not in edited({}, dialect=dialect)[0]


async def test_text_completions_are_asked_the_same_way():
    session = SessionTable(FakeEndpoint([])).create(sampling=PINNED)
    raw, ask = decode_text(b'{"prompt": [1, 2], "suffix": "kept"}')
    body = msgspec.json.decode(text_body(raw, ask, drawing_for(raw, ask, session), model="base", dialect=Dialect()))
    assert (body["prompt"], body["suffix"], body["logprobs"], body["max_tokens"]) == ([1, 2], "kept", 1, 20)
    raw, ask = decode_text(b'{"prompt": [1, 2], "echo": true, "max_tokens": 0, "logprobs": 3}')
    body = msgspec.json.decode(text_body(raw, ask, drawing_for(raw, ask, session), model="base", dialect=Dialect()))
    assert (body["logprobs"], body["max_tokens"]) == (3, 0)


REPLY = {
    "id": "x",
    "unknown": [1],
    "prompt_token_ids": [1],
    "policy_version": 3,
    "choices": [{"index": 0, "logprobs": {"content": []}, "token_ids": [2], "policy_versions": [3], "kept": 1.5}],
}


def test_only_what_was_asked_for_is_left_and_the_rest_is_as_it_came():
    bare = msgspec.json.decode(strip(msgspec.json.encode(REPLY), Keep(False, False)))
    assert bare == {"id": "x", "unknown": [1], "choices": [{"index": 0, "logprobs": None, "kept": 1.5}]}
    with_logprobs = msgspec.json.decode(strip(msgspec.json.encode(REPLY), Keep(True, False)))
    assert with_logprobs["choices"] == [{"index": 0, "logprobs": {"content": []}, "kept": 1.5}]
    with_ids = msgspec.json.decode(strip(msgspec.json.encode(REPLY), Keep(False, True)))
    assert (with_ids["prompt_token_ids"], with_ids["choices"][0]["token_ids"]) == ([1], [2])
    assert strip(msgspec.json.encode(REPLY), Keep(True, True)) == msgspec.json.encode(REPLY)
