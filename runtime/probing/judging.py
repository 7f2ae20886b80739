"""Judgements of single answers: plain functions from what came back to what it shows."""

from collections.abc import Callable, Sequence
from typing import Any

from turngate.runtime.capabilities import Finding
from turngate.runtime.probing.asking import Answer, as_ids, as_number, as_text, at, decoded, shown

__all__ = [
    "chat_text",
    "failed",
    "judge_count",
    "judge_echo",
    "judge_ids",
    "judge_logprobs",
    "judge_seeds",
    "judge_stop",
    "judge_stop_ids",
    "judge_stream",
    "judge_strings",
    "judge_tool_calls",
    "judge_versions",
    "no",
    "sampled_logprobs",
    "token_strings",
    "unknown",
    "yes",
]

_ID_STRING = "token_id:"


def yes(seen: str) -> Finding:
    """Return that the server can."""
    return Finding("yes", shown(seen))


def no(seen: str) -> Finding:
    """Return that it cannot."""
    return Finding("no", shown(seen))


def unknown(seen: str) -> Finding:
    """Return that it did not become clear."""
    return Finding("unknown", shown(seen))


def failed(answer: Answer) -> Finding:
    """Return what a failed question says: a refusal is a no, silence is not."""
    return no(answer.problem) if answer.was_refused else unknown(answer.problem)


def chat_text(answer: Answer, choice: int = 0) -> str:
    """Return the text of a chat reply."""
    return as_text(answer.at("choices", choice, "message", "content"))


def sampled_logprobs(answer: Answer) -> list[float]:
    """Return the log-probs of a chat or text choice; empty when one of them is no number."""
    content = answer.at("choices", 0, "logprobs", "content")
    values = [at(entry, "logprob") for entry in content] if isinstance(content, list) else None
    if values is None:
        values = answer.at("choices", 0, "logprobs", "token_logprobs")
    if not isinstance(values, list):
        return []
    numbers = [number for value in values if (number := as_number(value)) is not None]
    return numbers if len(numbers) == len(values) else []


def token_strings(answer: Answer) -> list[str]:
    """Return how the log-probs of a chat or text choice name their tokens."""
    content = answer.at("choices", 0, "logprobs", "content")
    if isinstance(content, list):
        return [as_text(at(entry, "token")) for entry in content]
    tokens = answer.at("choices", 0, "logprobs", "tokens")
    return [as_text(token) for token in tokens] if isinstance(tokens, list) else []


def judge_ids(ids: object, what: str) -> Finding:
    """Judge a list that should hold ids."""
    found = as_ids(ids)
    return yes(f"{what}: {len(found)} ids") if found else no(f"{what}: none in the reply")


def judge_strings(answer: Answer) -> Finding:
    """Judge whether log-probs name their tokens by id."""
    tokens = token_strings(answer)
    if not tokens:
        return no("no log-probs that name tokens")
    by_id = all(t.startswith(_ID_STRING) and t.removeprefix(_ID_STRING).isdecimal() for t in tokens)
    return yes(f"tokens are named {tokens[0]}") if by_id else no(f"tokens are named {tokens[0]!r:.20}")


def judge_logprobs(answer: Answer, ids: Sequence[int] = ()) -> Finding:
    """Judge the log-probs of sampled tokens: finite, at most 0, one for each id where there are ids."""
    values = sampled_logprobs(answer)
    if not values:
        return no("none in the reply")
    if not all(-1e9 < value <= 1e-3 for value in values):
        return no(f"not log-probs: {values[:3]}")
    if ids and len(ids) != len(values):
        return no(f"{len(values)} log-probs for {len(ids)} ids")
    return yes(f"{len(values)} log-probs, mean {sum(values) / len(values):.2f}")


def judge_versions(answer: Answer) -> Finding:
    """Judge whether each sampled token has a policy version."""
    versions = as_ids(answer.at("choices", 0, "policy_versions"))
    return yes(f"policy_versions, {versions[-1]} now") if versions else no("no policy_versions in the reply")


def judge_count(answer: Answer, asked: int) -> Finding:
    """Judge whether `n` choices came."""
    choices = answer.at("choices")
    if not answer.ok or not isinstance(choices, list):
        return failed(answer) if not answer.ok else no("no choices in the reply")
    told = f"asked for {asked}, got {len(choices)}"
    return yes(told) if len(choices) == asked else no(f"{told}, without an error")


def judge_seeds(first: Answer, again: Answer, others: Sequence[Answer], said: Callable[[Answer], Any]) -> Finding:
    """Judge equal and different seeds by what `said` reads of the replies: ids, or texts where there are none."""
    for answer in (first, again, *others):
        if not answer.ok:
            return failed(answer)
    if not said(first):
        return unknown("replies are empty")
    if said(first) != said(again):
        return no("equal seeds gave different tokens, asked side by side")
    if all(said(first) == said(other) for other in others):
        return unknown("all seeds gave the same tokens")
    return yes("equal seeds gave equal tokens, others others")


def judge_stop(answer: Answer, whole: str, stop: str) -> Finding:
    """Judge a greedy reply that should end before `stop`, given what comes without stop strings."""
    if not answer.ok:
        return failed(answer)
    text, expected = chat_text(answer), whole[: whole.index(stop)]
    if text == expected:
        return yes(f"text ended before {stop!r}")
    if stop in text and (text.startswith(whole) or whole.startswith(text)):
        return no(f"text holds the stop string {stop!r}")
    return unknown("greedy replies differ")


def judge_stop_ids(answer: Answer, stop: str) -> Finding:
    """Judge whether the tokens run on to the end of the one that completed the stop string."""
    tokens = token_strings(answer)
    if not answer.ok or not tokens or tokens[0].startswith(_ID_STRING):
        return unknown("no log-probs that spell the tokens")
    if stop in "".join(tokens):
        return yes(f"the last token is {tokens[-1]!r:.20}")
    return no("the token with the stop string is missing")


def judge_stream(answer: Answer, whole: str, *, least: int = 2) -> tuple[Finding, Finding]:
    """Judge a greedy stream against the same reply without streaming; return (streaming, ids in chunks)."""
    if not answer.ok:
        return failed(answer), unknown("no stream")
    if not answer.events:
        return no("the reply is no stream of events"), unknown("no stream")
    chunks = [Answer(body=decoded(event)) for event in answer.events if event != "[DONE]"]
    if any(not isinstance(chunk.body, dict) for chunk in chunks):
        return no("an event holds no JSON object"), unknown("no stream")
    text = "".join(as_text(chunk.at("choices", 0, "delta", "content")) for chunk in chunks)
    ids = [i for chunk in chunks for i in as_ids(chunk.at("choices", 0, "token_ids"))]
    with_ids = yes(f"{len(ids)} ids in chunks") if ids else no("no token_ids in chunks")
    if answer.events[-1] != "[DONE]":
        return no("the stream ends without [DONE]"), with_ids
    if text != whole:
        return no("streamed text differs from the same reply without streaming"), with_ids
    if len(chunks) < least:
        return no(f"all in {len(chunks)} chunk"), with_ids
    return yes(f"{len(chunks)} chunks, same text, [DONE]"), with_ids


def judge_tool_calls(answer: Answer, name: str) -> tuple[Finding, Finding]:
    """Judge a chat that offered the tool `name`; return (accepted, calls parsed)."""
    if not answer.ok:
        return failed(answer), unknown("tools were not accepted")
    call = answer.at("choices", 0, "message", "tool_calls", 0, "function")
    if call is not None:
        arguments = at(call, "arguments")
        if at(call, "name") == name and isinstance(arguments, str) and isinstance(decoded(arguments), dict):
            return yes("accepted"), yes(f"{name}({shown(arguments, 40)})")
        return yes("accepted"), no(f"a malformed call: {call}")
    text = chat_text(answer)
    if "<tool_call>" in text or f'"name": "{name}"' in text:
        return yes("accepted"), no(f"the call came as text: {text:.60}")
    return yes("accepted"), unknown("the model made no call")


def judge_echo(answer: Answer, count: int) -> Finding:
    """Judge the log-probs of an echoed prompt of `count` ids; the first has none."""
    if not answer.ok:
        return failed(answer)
    values = answer.at("choices", 0, "logprobs", "token_logprobs")
    numbers = [as_number(value) for value in values[1:count]] if isinstance(values, list) else []
    if len(numbers) < count - 1 or any(number is None for number in numbers):
        return no("echo came without log-probs of the prompt")
    return yes(f"echo gave {len(numbers)} log-probs")
