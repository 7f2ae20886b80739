"""A real HTTP server with a toy model behind it and a switch for every trait that servers differ in."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import msgspec
from aiohttp import web

__all__ = ["FakeServer", "Traits"]

_VOCABULARY = 26
_DRAWN = ("temperature", "top_p", "top_k", "seed", "max_tokens", "n", "stop", "stream", "model", "messages", "prompt")
"""Fields that every server knows; `top_k` is one of the traits."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a server can do; the defaults can everything."""

    chat: bool = True
    completions: bool = True
    id_prompts: bool = True
    token_ids: bool = True
    """`return_token_ids` has its effect."""
    id_strings: bool = True
    refuses_unknown: bool = False
    """Fields without effect are refused with 422 rather than ignored."""
    logprobs: Literal["yes", "with_top", "no"] = "yes"
    after_temperature: bool = True
    after_truncation: bool = True
    echo: bool = True
    top_k: bool = True
    n: bool = True
    seeds: bool = True
    stream: Literal["yes", "no", "one_chunk", "no_end", "garbled"] = "yes"
    tools: Literal["parsed", "text", "silent", "refused"] = "parsed"
    stop: Literal["yes", "kept", "no"] = "yes"
    """`kept`: generation ends, and the text holds the stop string."""
    versions: bool = True
    cached_tokens: int | None = 16
    sharpness: float = 3.0
    """Scale of the toy model's logits: 0 makes all tokens alike, 100 makes it certain."""
    owned_by: str = "vllm"
    max_model_len: int | None = 2048
    routes: tuple[str, ...] = ("/collective_rpc",)
    """Below the root; they take POST, and count what they get."""
    schema: bool = True
    """/openapi.json is served."""
    api_key: str = ""


class _Token(NamedTuple):
    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class FakeServer:
    """Listens on a free loopback port while its `async with` block runs.

    async with FakeServer(Traits(token_ids=False)) as server: ...
    """

    traits: Traits = field(default_factory=Traits)
    url: str = ""
    requests: list[tuple[str, str, Any]] = field(default_factory=list[tuple[str, str, Any]])
    """Method, path and decoded body of every request, in order."""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def changed(self) -> list[str]:
        """Paths of weight routes that were really called."""
        return [path for method, path, _ in self.requests if method == "POST" and path in self.traits.routes]

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        text = await http.read()
        body = msgspec.json.decode(text) if text else {}
        self.requests.append((http.method, http.path, body))
        traits = self.traits
        if traits.api_key and http.headers.get("Authorization") != f"Bearer {traits.api_key}":
            return _refuse(401, f"wrong key: {http.headers.get('Authorization')}")
        if http.path in traits.routes:
            return _refuse(405, "Method Not Allowed") if http.method == "GET" else web.json_response({})
        known: dict[str, Callable[[], web.StreamResponse | None]] = {
            "/v1/models": lambda: _json(self._models()),
            "/openapi.json": lambda: (
                _json({"paths": {route: {} for route in traits.routes}}) if traits.schema else None
            ),
            "/v1/chat/completions": lambda: self._chat(body) if traits.chat else None,
            "/v1/completions": lambda: self._complete(body) if traits.completions else None,
        }
        answer = known.get(http.path)
        return (answer and answer()) or _refuse(404, "Not Found")

    def _models(self) -> dict[str, Any]:
        card = {"id": "toy", "owned_by": self.traits.owned_by, "max_model_len": self.traits.max_model_len}
        return {"object": "list", "data": [card]}

    def _unknown(self, body: dict[str, Any]) -> str:
        """Return the first field that a strict server refuses, empty when there is none."""
        t = self.traits
        understood = {
            "top_k": t.top_k,
            "logprobs": t.logprobs != "no",
            "top_logprobs": t.logprobs != "no",
            "return_token_ids": t.token_ids,
            "return_tokens_as_token_ids": t.id_strings,
            "tools": t.tools != "refused",
            "echo": t.echo,
        }
        if "tools" in body and not understood["tools"]:
            return "tools"
        unknown = [name for name in body if not understood.get(name, name in _DRAWN)]
        return unknown[0] if unknown and t.refuses_unknown else ""

    # The toy model: logits depend on the position alone.

    def _tokens(self, body: dict[str, Any], choice: int) -> list[_Token]:
        seed = body.get("seed")
        random = Random(f"{seed} {choice}") if self.traits.seeds and seed is not None else Random()
        return [self._draw(position, body, random) for position in range(body.get("max_tokens", 16))]

    def _draw(self, position: int, body: dict[str, Any], random: Random) -> _Token:
        scale, temperature = self.traits.sharpness, body.get("temperature", 1.0)
        logits = [scale * math.sin(1.7 * v + 2.3 * position) for v in range(_VOCABULARY)]
        raw = _log_softmax(logits)
        heated = _log_softmax([x / temperature for x in logits]) if temperature else raw
        kept = sorted(range(_VOCABULARY), key=lambda v: -heated[v])
        if (top_k := body.get("top_k", 0)) > 0 and self.traits.top_k:
            kept = kept[:top_k]
        mass, nucleus = 0.0, 0
        while nucleus < len(kept) and mass < body.get("top_p", 1.0):
            mass, nucleus = mass + math.exp(heated[kept[nucleus]]), nucleus + 1
        kept = kept[:1] if temperature == 0 else kept[:nucleus]
        token = random.choices(kept, [math.exp(heated[v]) for v in kept])[0]
        told = heated if self.traits.after_temperature else raw
        if self.traits.after_truncation and temperature:
            whole = math.log(math.fsum(math.exp(told[v]) for v in kept))
            told = [told[v] - whole if v in kept else -9999.0 for v in range(_VOCABULARY)]
        best = sorted(range(_VOCABULARY), key=lambda v: -told[v])
        return _Token(token, min(0.0, told[token]), [(v, min(0.0, told[v])) for v in best])

    def _cut(self, tokens: list[_Token], stops: list[str]) -> tuple[str, list[_Token]]:
        """Return the text up to the first stop string, and the tokens up to the one that completes it."""
        text = ""
        for index, token in enumerate(tokens):
            text += _text(token.id)
            for stop in stops:
                if stop in text and self.traits.stop != "no":
                    return text if self.traits.stop == "kept" else text[: text.index(stop)], tokens[: index + 1]
        return text, tokens

    # Replies.

    def _chat(self, body: dict[str, Any]) -> web.StreamResponse:
        if unknown := self._unknown(body):
            return _refuse(422, f"unknown field: {unknown}")
        prompt = [7, *range(len(body["messages"])), 9]
        count = body.get("n", 1) if self.traits.n else 1
        choices = [self._chat_choice(body, choice) for choice in range(count)]
        reply: dict[str, Any] = {"object": "chat.completion", "model": "toy", "choices": choices}
        reply["usage"] = self._usage(len(prompt))
        if body.get("return_token_ids") and self.traits.token_ids:
            reply["prompt_token_ids"] = prompt
        return self._stream(reply) if body.get("stream") and self.traits.stream != "no" else _json(reply)

    def _chat_choice(self, body: dict[str, Any], choice: int) -> dict[str, Any]:
        text, tokens = self._cut(self._tokens(body, choice), body.get("stop", []))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if body.get("tools"):
            call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
            if self.traits.tools == "parsed":
                message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]}
            elif self.traits.tools == "text":
                message["content"] = '<tool_call>{"name": "get_weather"}</tool_call>'
        found: dict[str, Any] = {"index": choice, "message": message, "finish_reason": "stop", "logprobs": None}
        top = body.get("top_logprobs", 0)
        if body.get("logprobs") and (self.traits.logprobs == "yes" or (self.traits.logprobs == "with_top" and top)):
            found["logprobs"] = {"content": [self._named(body, token, top) for token in tokens]}
        if body.get("return_token_ids") and self.traits.token_ids:
            found["token_ids"] = [token.id for token in tokens]
            if self.traits.versions:
                found["policy_versions"] = [3] * len(tokens)
        return found

    def _named(self, body: dict[str, Any], token: _Token, top: int) -> dict[str, Any]:
        named = [{"token": self._name(body, v), "logprob": value} for v, value in token.top[:top]]
        return {"token": self._name(body, token.id), "logprob": token.logprob, "top_logprobs": named}

    def _name(self, body: dict[str, Any], token: int) -> str:
        by_id = self.traits.id_strings and body.get("return_tokens_as_token_ids")
        return f"token_id:{token}" if by_id else _text(token)

    def _complete(self, body: dict[str, Any]) -> web.StreamResponse:
        prompt: Any = body["prompt"]
        if unknown := self._unknown(body):
            return _refuse(422, f"unknown field: {unknown}")
        if isinstance(prompt, list) and not self.traits.id_prompts:
            return _refuse(500, "prompt must be a string")
        text, tokens = self._cut(self._tokens(body, 0), body.get("stop", []))
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        if "logprobs" in body and self.traits.logprobs != "no":
            top = [{self._name(body, v): value for v, value in t.top[: body["logprobs"]]} for t in tokens]
            names, values = [self._name(body, t.id) for t in tokens], [t.logprob for t in tokens]
            echoed = [None, *[-1.0] * (len(prompt) - 1)] if body.get("echo") and self.traits.echo else []
            choice["logprobs"] = {"tokens": names, "token_logprobs": [*echoed, *values], "top_logprobs": top}
        if body.get("return_token_ids") and self.traits.token_ids:
            choice |= {"token_ids": [token.id for token in tokens], "prompt_token_ids": prompt}
        return _json({"object": "text_completion", "choices": [choice], "usage": self._usage(len(prompt))})

    def _usage(self, prompt_tokens: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt_tokens, "prompt_tokens_details": {"cached_tokens": self.traits.cached_tokens}}

    def _stream(self, reply: dict[str, Any]) -> web.Response:
        choice = reply["choices"][0]
        text, ids = choice["message"]["content"], choice.get("token_ids", [])
        size = len(text) if self.traits.stream == "one_chunk" else 2
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        events = [
            msgspec.json.encode({"choices": [{"delta": {"content": piece}, "token_ids": ids[at : at + 1]}]}).decode()
            for at, piece in enumerate(pieces)
        ]
        if self.traits.stream == "garbled":
            events[1] = events[1][:-3]
        events += [] if self.traits.stream == "no_end" else ["[DONE]"]
        return web.Response(text="".join(f"data: {event}\n\n" for event in events), content_type="text/event-stream")


def _text(token: int) -> str:
    return chr(97 + token) + chr(97 + token * 7 % _VOCABULARY)


def _log_softmax(logits: list[float]) -> list[float]:
    most = max(logits)
    whole = most + math.log(math.fsum(math.exp(x - most) for x in logits))
    return [x - whole for x in logits]


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode({"error": {"message": message}}), content_type="application/json"
    )
