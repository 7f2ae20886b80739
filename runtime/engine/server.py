"""The embedded engine's HTTP server: routes, door, health, metrics and weight updates."""

import asyncio
import hmac
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import anyio
import msgspec
import torch
from aiohttp import web

from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.completions import Completions
from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.model_thread import ModelThread
from turngate.runtime.engine.protocol import CriticRequest, WeightsRequest, decode_request
from turngate.runtime.engine.replies import now_s
from turngate.runtime.engine.request import BatcherConfig
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine.updates import WeightUpdates
from turngate.runtime.errors import ConfigError, EndpointError, PublishError
from turngate.runtime.openai_api.refusals import (
    JSON_HEADERS,
    RequestError,
    error_body,
    nested_too_deep,
    refusal_headers,
)
from turngate.runtime.transport import raise_file_limit

__all__ = ["EngineServer", "load_critic", "load_model", "serve"]

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BACKLOG = 4096
"""Thousands of agents may connect at once; the usual 128 drops their SYNs, and each waits a second or more."""
_SWITCH_INTERVAL_S = 0.0005
"""At the default 5 ms the model thread and the event loop starve each other."""
_LAST_WORDS_S = 0.5
"""A broken engine stays up this long, so that clients hear why instead of losing their connections."""
_WEIGHTS = msgspec.json.Decoder(WeightsRequest)
_CRITIC = msgspec.json.Decoder(CriticRequest)


def load_model(folder: Path) -> tuple[PolicyModel, Tokenizer]:
    """Read a model folder; whoever serves it checks that the two fit each other.

    Raises: ConfigError: it is no model folder, or its weights do not fit its config.
    """
    try:
        return PolicyModel.load(folder), Tokenizer.load(folder)
    except PublishError as error:
        raise ConfigError(str(error)) from error


def load_critic(config: EngineConfig) -> PolicyModel | None:
    """Read the critic's folder, None when there is none. Raises: ConfigError: it cannot be read."""
    if config.critic is None:
        return None
    try:
        return PolicyModel.load(Path(config.critic))
    except (PublishError, ConfigError) as error:
        raise ConfigError(f"critic: {error}") from error


class EngineServer:
    """Serves one model while its `async with` block runs, on the running event loop and one model thread."""

    # State.
    port: int  # where it listens; known after entry
    _requests: "Counter[tuple[str, int]]"  # answered, by path and status

    def __init__(
        self, model: PolicyModel, tokenizer: Tokenizer, config: EngineConfig, critic: PolicyModel | None = None
    ) -> None:
        """Prepare to serve. The server owns `model` and `critic` from now on: weight updates change them.

        Raises: ConfigError: model, tokenizer and critic do not fit each other.
        """
        self._config = config
        self._model = model
        batching = BatcherConfig(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_cached_tokens=config.max_cached_tokens,
            on_update=config.on_update,
        )
        if config.seed is not None:
            batching = msgspec.structs.replace(batching, seed=config.seed)
        batcher = Batcher(
            model,
            tokenizer,
            batching,
            policy_version=config.policy_version,
            critic=critic,
            value_kind=config.value_kind,
            value_version=config.value_version,
        )
        self._thread = ModelThread(batcher)
        self._completions = Completions(
            self._thread,
            tokenizer,
            model_name=config.model_name,
            max_context=model.config.max_context,
            max_open=config.max_running + config.max_waiting,
        )
        self._created = now_s()
        self._updates = WeightUpdates(self._thread, model, config.policy_version)
        self._critic_updates: WeightUpdates | None = None
        if critic is not None:
            self._critic_updates = WeightUpdates(
                self._thread, critic, config.value_version, swap=Batcher.swap_critic, field="value_version"
            )
        self._key = config.api_key.encode() if config.api_key else None
        self._requests = Counter()
        self.port = 0

    def __repr__(self) -> str:
        version = self._updates.version
        return f"<EngineServer {self._config.model_name}, port {self.port}, version {version}, {self._thread!r}>"

    async def __aenter__(self) -> "EngineServer":
        app = web.Application(client_max_size=self._config.max_body_bytes)
        for method, path, handler in self._routes():
            app.router.add_route(method, path, self._guarded(path, handler))
        app.router.add_route("*", "/{path:.*}", self._guarded("other", self._unknown))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,  # a client that hangs up frees its slots
            keepalive_timeout=self._config.keep_alive_s,
            shutdown_timeout=1.0,  # open requests were failed before, they only have to be written
        )
        self._threads_before = torch.get_num_threads(), sys.getswitchinterval()
        torch.set_num_threads(1)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        raise_file_limit()
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, self._config.host, self._config.port, backlog=_BACKLOG).start()
        except BaseException as error:
            await self._stop()
            if isinstance(error, OSError):
                raise ConfigError(f"the engine must be able to listen: {error}; choose another host or port") from error
            raise
        self.port = self._runner.addresses[0][1]
        self._thread.start()
        return self

    async def failed(self) -> str:
        """Wait until the engine is broken for good and return why; the caller decides what becomes of it."""
        return await self._thread.failed()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._thread.stop()
            await self._runner.cleanup()
        torch.set_num_threads(self._threads_before[0])
        sys.setswitchinterval(self._threads_before[1])

    def _routes(self) -> list[tuple[str, str, _Handler]]:
        return [
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model}", self._one_model),
            ("POST", "/v1/chat/completions", self._completions.chat),
            ("POST", "/v1/completions", self._completions.complete),
            ("POST", "/pooling", self._completions.pool),
            ("POST", "/v1/pooling", self._completions.pool),  # for those who give the same URL for everything
            ("POST", "/admin/weights", self._weights),
            ("POST", "/admin/critic", self._critic),
        ]

    # The door: every request passes here.

    def _guarded(self, path: str, handler: _Handler) -> _Handler:
        is_open = path == "/health"  # probes carry no keys

        async def answer(http: web.Request) -> web.StreamResponse:
            try:
                if not is_open:
                    self._check_key(http)
                reply = await handler(http)
            except RequestError as error:
                reply = _refuse(error)
            except web.HTTPRequestEntityTooLarge:
                reply = _refuse(
                    RequestError(
                        f"the body must hold at most {self._config.max_body_bytes} bytes",
                        status=413,
                        code="body_too_large",
                    )
                )
            except RecursionError:  # decoded, but too deep for what is done with it: tools are written out again
                reply = _refuse(nested_too_deep())
            except ConnectionError:
                raise  # the client is gone; aiohttp tidies up
            except Exception:  # the boundary: a bug costs one request, not the server, and is told
                logging.getLogger(__name__).exception("a request failed")
                reply = _refuse(RequestError("the engine has a bug; see its log", status=500, kind="server_error"))
            self._requests[path, reply.status] += 1
            return reply

        return answer

    def _check_key(self, http: web.Request) -> None:
        if self._key is None:
            return
        given = http.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        if not hmac.compare_digest(given, self._key):  # takes as long whatever the first wrong byte is
            raise RequestError(
                "the request must carry the engine's API key: Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    async def _unknown(self, http: web.Request) -> web.StreamResponse:
        allowed = [method for method, path, _ in self._routes() if path == http.path]
        if allowed:
            raise RequestError(f"{http.path} must be called with {allowed[0]}: got {http.method}", status=405)
        raise RequestError(f"unknown path: {http.method} {http.path}", status=404, code="not_found")

    # What the engine says about itself.

    async def _models(self, http: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, http: web.Request) -> web.StreamResponse:
        if http.match_info["model"] != self._config.model_name:
            raise RequestError(
                f"model must be {self._config.model_name!r}: got {http.match_info['model']!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "turngate",
            "max_model_len": self._model.config.max_context,
        }

    async def _health(self, http: web.Request) -> web.StreamResponse:
        told: dict[str, Any] = {
            "status": "ok",
            "policy_version": self._updates.version,
            "model": self._config.model_name,
        }
        if self._critic_updates is not None:
            told["value_version"] = self._critic_updates.version
        elif self._model.config.value_head:
            told["value_version"] = self._updates.version  # values are read off the policy itself
        if self._thread.failure:
            return _json({**told, "status": "failed", "error": self._thread.failure}, status=503)
        return _json({**told, "statistics": await self.statistics()})

    async def statistics(self) -> dict[str, float]:
        """Return counts since the start and the present load, by name.

        Raises: EndpointError: the engine is broken or stopping.
        """
        batching = await self._thread.call(lambda batcher: batcher.statistics())
        return {
            **msgspec.structs.asdict(batching),
            "open": self._thread.open,
            "updates": self._updates.done,
            "failed_updates": self._updates.failed,
        }

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        try:
            statistics = await self.statistics()
        except EndpointError:
            statistics = {}
        up = 0 if self._thread.failure else 1
        text = _prometheus({"up": up, **statistics}, self._requests)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _weights(self, http: web.Request) -> web.StreamResponse:
        _require_json(http)
        ask = decode_request(_WEIGHTS, await http.read())
        return _json({"policy_version": await self._updates.take(Path(ask.path), ask.policy_version)})

    async def _critic(self, http: web.Request) -> web.StreamResponse:
        _require_json(http)
        ask = decode_request(_CRITIC, await http.read())
        if self._critic_updates is None:
            raise RequestError(
                "the engine must have a critic to take weights for one: start it with critic=...", status=404
            )
        return _json({"value_version": await self._critic_updates.take(Path(ask.path), ask.value_version)})


async def serve(
    model: PolicyModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    stop: asyncio.Event,
    *,
    critic: PolicyModel | None = None,
    on_ready: Callable[[int], None],
) -> None:
    """Serve until `stop` is set; `on_ready` is told the port. Cancelled: the server is stopped first.

    Raises: ConfigError: it cannot start. EndpointError: the engine broke, after its clients have been told.
    """
    async with EngineServer(model, tokenizer, config, critic) as server:
        on_ready(server.port)
        failed, stopped = asyncio.create_task(server.failed()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                await asyncio.sleep(_LAST_WORDS_S)
                raise EndpointError(failed.result())
        finally:
            failed.cancel()
            stopped.cancel()


def _require_json(http: web.Request) -> None:
    # A web page can make a browser post plain text to loopback, but not JSON.
    if http.content_type != "application/json":
        raise RequestError(f"weights must be posted as application/json: got {http.content_type}", status=415)


def _json(told: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(told), status=status, headers=JSON_HEADERS)


def _refuse(error: RequestError) -> web.Response:
    return web.Response(body=error_body(error), status=error.status, headers=refusal_headers(error))


_METRIC_NAMES = {"busy_s": "busy_seconds"}
"""Prometheus spells out its units."""
_GAUGES = frozenset(
    {"up", "running", "waiting", "open", "policy_version", "tokens_per_s", "cache_entries", "cache_tokens"}
)


def _prometheus(values: dict[str, float], requests: "Counter[tuple[str, int]]") -> str:
    """Return the text exposition format; everything that is no gauge only grows."""
    lines: list[str] = []
    for name, value in values.items():
        kind, suffix = ("gauge", "") if name in _GAUGES else ("counter", "_total")
        full = f"turngate_engine_{_METRIC_NAMES.get(name, name)}{suffix}"
        lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
    lines.append("# TYPE turngate_engine_http_requests_total counter")
    for (path, status), count in sorted(requests.items()):
        lines.append(f'turngate_engine_http_requests_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
