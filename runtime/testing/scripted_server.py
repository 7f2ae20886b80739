"""A real HTTP server that says what it is told to, in JSON or as a stream, with ids, log-probs and versions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import msgspec
from aiohttp import web

from turngate.envs.base import ToolCall
from turngate.runtime.testing.endpoints import END_ID, fake_logprob, render_ids
from turngate.runtime.types import Message

__all__ = ["Said", "ScriptedServer"]


class Said(NamedTuple):
    """One turn of the model."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"

    def pieces(self) -> list[str]:
        """Return what is streamed piece by piece: words, and each call as the fakes' tokenizer writes it."""
        words = [word + " " for word in self.text.split(" ")]
        words[-1] = words[-1][:-1]
        return words if self.text else []

    def token_ids(self) -> list[int]:
        """Return the ids under the fakes' tokenizer."""
        calls = "".join(f"{call.name}({call.arguments})" for call in self.tool_calls)
        return [*self.text.encode(), *calls.encode(), END_ID]


Script: TypeAlias = "str | Callable[[dict[str, Any]], str | Said]"


class ScriptedServer:
    """Listens on a free loopback port while its `async with` block runs.

    async with ScriptedServer("hello") as server: ...
    """

    def __init__(self, say: Script = "ok", *, policy_version: int = 0) -> None:
        """Args: say: a text for every request, or a function of the decoded request."""
        self._say = say if callable(say) else lambda _: say
        self.policy_version = policy_version
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        """Decoded body of every request, in order."""
        self.headers: list[dict[str, str]] = []
        self.failures: list[web.StreamResponse] = []
        """Answered before anything else, each once."""
        self.before_answer: Callable[[], Awaitable[object]] | None = None
        self.between_chunks: Callable[[], Awaitable[object]] | None = None
        self.breaks_after: int | None = None
        """Chunks after which a stream breaks off; it does so once."""
        self.open = self.cancelled = 0
        """Requests under way, and those whose client left before the end."""

    def __repr__(self) -> str:
        return f"<ScriptedServer {self.url}, {len(self.requests)} requests, {self.open} open>"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/{api:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        request = msgspec.json.decode(await http.read())
        self.requests.append(request)
        self.headers.append(dict(http.headers))
        self.open += 1
        try:
            if self.before_answer is not None:
                await self.before_answer()
            if self.failures:
                return self.failures.pop(0)
            return await self._answer(http, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _answer(self, http: web.Request, request: dict[str, Any]) -> web.StreamResponse:
        is_text = "prompt" in request
        said = [_as_said(self._say(request)) for _ in range(request.get("n") or 1)]
        prompt = _prompt_ids(request)
        if not request.get("stream"):
            return web.json_response(self._whole(request, said, prompt, is_text))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(http)
        left = self.breaks_after
        async for chunk in self._chunks(request, said, prompt, is_text):
            if left is not None:
                left -= 1
                if left < 0:
                    self.breaks_after = None
                    assert http.transport is not None
                    http.transport.abort()
                    return reply
            await reply.write(b"data: %b\n\n" % msgspec.json.encode(chunk))
        await reply.write(b"data: [DONE]\n\n")
        await reply.write_eof()
        return reply

    def _whole(self, request: dict[str, Any], said: list[Said], prompt: list[int], is_text: bool) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, one in enumerate(said):
            body = {"text": one.text} if is_text else {"message": {"role": "assistant", **_spoken(one)}}
            ids = one.token_ids()
            choices.append(
                {"index": index, **body, "finish_reason": _reason(one), **self._extras(request, ids, is_text)}
            )
        more: dict[str, Any] = {"prompt_token_ids": prompt} if request.get("return_token_ids") else {}
        return {**_envelope(request), "choices": choices, "usage": _usage(prompt, said), **more}

    async def _chunks(
        self, request: dict[str, Any], said: list[Said], prompt: list[int], is_text: bool
    ) -> AsyncIterator[dict[str, Any]]:
        envelope = _envelope(request)
        for index, one in enumerate(said):
            ids = one.token_ids()
            first: dict[str, Any] = {"prompt_token_ids": prompt} if request.get("return_token_ids") else {}
            if not is_text:
                opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield {**envelope, "choices": [opening], **first}
                first = {}
            for piece in one.pieces():
                count = len(piece.encode())
                step, ids = ids[:count], ids[count:]
                body = {"text": piece} if is_text else {"delta": {"content": piece}}
                yield {
                    **envelope,
                    "choices": [{"index": index, **body, **self._extras(request, step, is_text)}],
                    **first,
                }
                first = {}
                if self.between_chunks is not None:
                    await self.between_chunks()
            for delta in _call_deltas(one):
                yield {**envelope, "choices": [{"index": index, "delta": delta}]}
            end: dict[str, Any] = {"text": ""} if is_text else {"delta": {}}
            extras = self._extras(request, ids, is_text)
            yield {**envelope, "choices": [{"index": index, **end, "finish_reason": _reason(one), **extras}]}
        if (request.get("stream_options") or {}).get("include_usage"):
            yield {**envelope, "choices": [], "usage": _usage(prompt, said)}

    def _extras(self, request: dict[str, Any], ids: list[int], is_text: bool) -> dict[str, Any]:
        more: dict[str, Any] = {"logprobs": None}
        if request.get("logprobs") not in (None, False):
            if is_text:
                prefix = "token_id:" if request.get("return_tokens_as_token_ids") else ""
                tokens = [f"{prefix}{i}" for i in ids]
                more["logprobs"] = {"token_logprobs": [fake_logprob(i) for i in ids], "tokens": tokens}
            else:
                more["logprobs"] = {"content": [{"token": str(i), "logprob": fake_logprob(i)} for i in ids]}
        if request.get("return_token_ids"):
            more |= {"token_ids": ids, "policy_versions": [self.policy_version] * len(ids)}
        return more


def _as_said(given: str | Said) -> Said:
    return given if isinstance(given, Said) else Said(given)


def _reason(one: Said) -> str:
    return "tool_calls" if one.tool_calls and one.finish_reason == "stop" else one.finish_reason


def _spoken(one: Said) -> dict[str, Any]:
    if not one.tool_calls:
        return {"content": one.text}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in one.tool_calls
    ]
    return {"content": one.text or None, "tool_calls": calls}


def _call_deltas(one: Said) -> list[dict[str, Any]]:
    """Return the calls as servers stream them: the name first, the arguments in two pieces."""
    deltas: list[dict[str, Any]] = []
    for index, call in enumerate(one.tool_calls):
        half = len(call.arguments) // 2
        opening = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        deltas.append({"tool_calls": [opening]})
        for part in (call.arguments[:half], call.arguments[half:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    return deltas


def _prompt_ids(request: dict[str, Any]) -> list[int]:
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return list(prompt.encode())
    if prompt is not None:
        return [int(each) for each in prompt]
    return render_ids([_message(m) for m in request["messages"]])


def _message(given: dict[str, Any]) -> Message:
    calls = tuple(
        ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in given.get("tool_calls") or ()
    )
    content = given.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    role = "system" if given["role"] == "developer" else given["role"]
    return Message(role, text, calls)


def _envelope(request: dict[str, Any]) -> dict[str, Any]:
    kind = "text_completion" if "prompt" in request else "chat.completion"
    if request.get("stream") and kind == "chat.completion":
        kind += ".chunk"
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": request["model"]}


def _usage(prompt: list[int], said: list[Said]) -> dict[str, int]:
    sampled = sum(len(one.token_ids()) for one in said)
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
