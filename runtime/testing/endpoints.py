"""A scripted endpoint that records like a real one, and a transport that answers without a network."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec

from turngate.envs.base import Action, ToolSpec
from turngate.runtime.transport import Reply
from turngate.runtime.types import Completion, Message, Sampling
from turngate.runtime.weights import WeightPublisher

__all__ = ["END_ID", "Call", "FakeEndpoint", "FakeTransport", "fake_logprob", "fake_reply", "render_ids"]

_ROLES = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
"""Ids of the role markers; ids below are the bytes of the text."""
END_ID = 260
"""Id that ends every message."""


def render_ids(messages: Iterable[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """Return the ids of a conversation under the fakes' tokenizer: role marker, UTF-8 bytes, end, per message.

    Append-only, as a chat template should be: what was sampled is rendered as the same ids in the next prompt.
    """
    ids: list[int] = []
    for message in messages:
        ids.append(_ROLES[message.role])
        ids += message.content.encode()
        for call in message.tool_calls:
            ids += f"{call.name}({call.arguments})".encode()
        ids.append(END_ID)
    if add_generation_prompt:
        ids.append(_ROLES["assistant"])
    return ids


def fake_logprob(token_id: int) -> float:
    """Return the log-prob that the fakes give a token: a sixteenth between -1 and -1/16, exact in float32."""
    return -(1 + token_id % 16) / 16


class Call(NamedTuple):
    """One request a FakeEndpoint has seen."""

    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int | None
    tools: tuple[ToolSpec, ...]


Answer: TypeAlias = "str | Action | Completion | BaseException"
Script: TypeAlias = "Iterable[Answer] | Callable[[Sequence[Message]], Answer | Awaitable[Answer]]"


class FakeEndpoint:
    """Answers from a script, with ids, log-probs and versions as a good server would give them.

    The script is answers in the order of the calls, or a function of the messages. A text, or an Action with tool
    calls, is tokenised by `render_ids`; a Completion is returned as it is; an exception is raised. The first half of
    an answer's tokens has the version at send, the rest the version after the latency: publish in between and a turn
    spans two versions.
    """

    def __init__(
        self,
        script: Script,
        *,
        latency_s: float | Callable[[], float] = 0.0,
        policy_version: int = 0,
        token_ids: bool = True,
        logprobs: bool = True,
    ) -> None:
        """Prepare to answer; `token_ids` and `logprobs` say what the server is able to give."""
        self._answer = script if callable(script) else _in_order(iter(script))
        self._latency_s = latency_s
        self._token_ids, self._logprobs = token_ids, logprobs
        self.policy_version = policy_version
        self.publisher: WeightPublisher | None = None
        self.calls: list[Call] = []
        """Every request, in order."""
        self.in_flight = 0
        self.most_in_flight = 0
        self.closed = False

    def __repr__(self) -> str:
        return f"<FakeEndpoint version {self.policy_version}, {len(self.calls)} calls, {self.in_flight} in flight>"

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = 600.0,
    ) -> Completion:
        """Answer the next request."""
        self.calls.append(Call(tuple(messages), sampling, seed, tuple(tools)))
        prompt = render_ids(messages)  # now: the sequence may be a live view
        sent = self.policy_version
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self._answer(messages)
            if isinstance(answer, Awaitable):
                answer = await answer
            latency_s = self._latency_s() if callable(self._latency_s) else self._latency_s
            await asyncio.sleep(latency_s)
        finally:
            self.in_flight -= 1
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Completion):
            return answer
        return self._completion(prompt, answer, sampling, sent)

    async def aclose(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def _completion(self, prompt: list[int], answer: str | Action, sampling: Sampling, sent: int) -> Completion:
        text, calls = (answer, ()) if isinstance(answer, str) else (answer.text, answer.tool_calls)
        ids = render_ids([Message("assistant", text, calls)], add_generation_prompt=False)[1:]
        stop_reason = "tool_calls" if calls else "stop"
        if len(ids) > sampling.max_tokens:
            ids, stop_reason = ids[: sampling.max_tokens], "length"
            text, calls = bytes(ids).decode(errors="replace"), ()
        now = self.policy_version
        half = (len(ids) + 1) // 2
        return Completion(
            text=text,
            token_ids=ids if self._token_ids else (),
            logprobs=[fake_logprob(i) for i in ids] if self._logprobs and self._token_ids else (),
            versions=[sent] * half + [now] * (len(ids) - half) if self._token_ids else (),
            prompt_token_ids=prompt if self._token_ids else (),
            stop_reason=stop_reason,
            tool_calls=calls,
            version_sent=sent,
            version_received=now,
        )


def _in_order(answers: "Any") -> Callable[[Sequence[Message]], Answer]:
    def answer(_messages: Sequence[Message]) -> Answer:
        try:
            return cast(Answer, next(answers))
        except StopIteration:
            raise AssertionError("the FakeEndpoint's script is over: more calls than answers") from None

    return answer


def fake_reply(request: Mapping[str, Any], text: str, *, policy_version: int = 0) -> dict[str, Any]:
    """Return what a good server would answer to a decoded chat request with `text`; edit it to make a bad one."""
    messages = [Message(m["role"], m["content"]) for m in request["messages"]]
    ids = [*text.encode(), END_ID]
    prompt = render_ids(messages)
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "model": request["model"],
        "prompt_token_ids": prompt,
        "policy_version": policy_version,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "logprobs": {"content": [{"token": str(i), "logprob": fake_logprob(i), "bytes": None} for i in ids]},
                "token_ids": ids,
                "policy_versions": [policy_version] * len(ids),
            }
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }


class FakeOpenReply(NamedTuple):
    """A reply of which the body comes in the pieces given."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    pieces: list[bytes]

    async def read(self, *, timeout_s: float) -> bytes:
        """Return the next piece."""
        await asyncio.sleep(0)
        return self.pieces.pop(0) if self.pieces else b""

    def close(self) -> None:
        """Forget the rest."""
        self.pieces.clear()


class FakeTransport:
    """Answers posts from a script: a Reply, an exception, or a function of (path, decoded body)."""

    def __init__(self, *answers: "Reply | BaseException | Callable[[str, Any], Reply]", latency_s: float = 0.0) -> None:
        """Give the answers in order; the last one repeats."""
        self._answers = list(answers)
        self._latency_s = latency_s
        self.requests: list[tuple[str, Any]] = []
        """Path and decoded body of every post."""
        self.closed = False

    def __repr__(self) -> str:
        return f"<FakeTransport {len(self.requests)} requests>"

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Reply:
        """Answer the next post; TimeoutError when the latency is beyond the timeout."""
        decoded = msgspec.json.decode(body)
        self.requests.append((path, decoded))
        await asyncio.sleep(min(self._latency_s, timeout_s))
        if self._latency_s >= timeout_s:
            raise TimeoutError("fake timeout")
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, Reply) else answer(path, decoded)

    async def open(self, path: str, body: bytes, *, timeout_s: float) -> FakeOpenReply:
        """Answer the next post line by line."""
        reply = await self.post(path, body, timeout_s=timeout_s)
        if reply.status != 200:
            return FakeOpenReply(reply.status, reply.headers, reply.body, [])
        return FakeOpenReply(200, reply.headers, b"", reply.body.splitlines(keepends=True))

    async def aclose(self) -> None:
        """Remember that it was closed."""
        self.closed = True
