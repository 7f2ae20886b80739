"""The engine as the user's script holds it: started, used and stopped by one `async with` block."""

import asyncio
import contextlib
import copy
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import aiohttp
import anyio
import msgspec

from turngate.runtime.dialect import Dialect
from turngate.runtime.engine.config import EngineConfig, ValueKind
from turngate.runtime.engine.process import EngineProcess
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError, EndpointError
from turngate.runtime.publishers.engine import EnginePublisher

if TYPE_CHECKING:
    from turngate.runtime.endpoint import Endpoint
    from turngate.runtime.engine.model import PolicyModel

__all__ = ["Engine", "EngineMode"]

EngineMode: TypeAlias = Literal["process", "thread"]
_log = logging.getLogger(__name__)


class Engine:
    """An inference server of our own.

        async with Engine.start(Path("policy")) as engine:
            completion = await engine.endpoint.complete(messages, Sampling())

    When the engine dies, the block is cancelled and leaves with an EndpointError that says why: a run must not go on
    against a server that will never answer. Leaving the block stops the engine within seconds.
    """

    # State, set on entry.
    url: str
    """Root of the server; the OpenAI API is below /v1."""
    endpoint: "Endpoint"
    publisher: EnginePublisher

    def __init__(
        self,
        model: "Path | str | PolicyModel",
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        mode: EngineMode,
        start_timeout_s: float,
    ) -> None:
        """Hold the settings; see `start`."""
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._mode = mode
        self._start_timeout_s = start_timeout_s
        self._process: EngineProcess | None = None
        self._death = ""
        self._is_leaving = False
        self.url = ""

    @classmethod
    def start(
        cls,
        model: "Path | str | PolicyModel",
        tokenizer: Tokenizer | None = None,
        *,
        policy_version: int = 0,
        mode: EngineMode = "process",
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        model_name: str = "policy",
        max_running: int = 128,
        max_waiting: int = 8192,
        max_cached_tokens: int = 262_144,
        on_update: Literal["recompute", "keep"] = "recompute",
        seed: int | None = None,
        critic: Path | str | None = None,
        value_kind: ValueKind | None = None,
        value_version: int = 0,
        start_timeout_s: float = 60.0,
    ) -> "Engine":
        """Return an engine that runs while its `async with` block does.

        Args: model: a model folder, or a model with its `tokenizer`. mode: `process` keeps decoding off this process;
            `thread` decodes in a thread of it, for tests and small experiments. policy_version: of the weights it
            starts with. port: 0 takes a free one. seed: root of the streams of requests without a seed. critic: folder
            of a model with a value head, which guides tokens and answers `/pooling`.
            The other settings are explained at EngineConfig.
        Raises: ConfigError: a setting cannot work; the model itself is checked on entry.
        """
        if mode not in ("process", "thread"):
            raise ConfigError(f"mode must be 'process' or 'thread': got {mode!r}")
        if not isinstance(model, (Path, str)) and tokenizer is None:
            raise ConfigError("a model must come with its tokenizer: got None; pass both, or a model folder")
        config = EngineConfig(
            host=host,
            port=port,
            api_key=api_key,
            model_name=model_name,
            policy_version=policy_version,
            max_running=max_running,
            max_waiting=max_waiting,
            max_cached_tokens=max_cached_tokens,
            on_update=on_update,
            seed=seed,
            critic=None if critic is None else os.path.abspath(critic),
            value_kind=value_kind,
            value_version=value_version,
        )
        return cls(model, tokenizer, config, mode, start_timeout_s)

    def __repr__(self) -> str:
        state = "dead" if self._death else "left" if self._is_leaving else self.url or "not started"
        return f"<Engine {self._config.model_name}, {self._mode}, {state}>"

    @property
    def pid(self) -> int | None:
        """Id of the engine's process; None in thread mode."""
        return self._process.pid if self._process else None

    async def statistics(self) -> dict[str, float]:
        """Return the engine's counts and load: sequences running and waiting, tokens, cache, updates.

        Raises: EndpointError: the engine does not answer or is broken.
        """
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
                async with session.get(self.url + "/health") as reply:
                    told = msgspec.json.decode(await reply.read(), type=dict[str, Any])
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            raise EndpointError(
                f"the engine must answer /health: got {error!r}; {self._death or 'is it alive?'}"
            ) from error
        if "statistics" not in told:
            raise EndpointError(str(told.get("error", told)))
        statistics: dict[str, float] = told["statistics"]
        return statistics

    async def __aenter__(self) -> "Engine":
        from turngate.runtime.endpoint import Endpoint  # late: an engine without a client needs none of it

        host_task = asyncio.current_task()
        assert host_task is not None
        self._host_task, self._cancelling = host_task, host_task.cancelling()
        async with contextlib.AsyncExitStack() as stack:
            running = self._run_process() if self._mode == "process" else self._run_thread()
            port = await stack.enter_async_context(running)
            self.url = f"http://{_reachable(self._config.host)}:{port}"
            self.publisher = EnginePublisher(self.url, api_key=self._config.api_key)
            self.endpoint = Endpoint(
                self.url + "/v1",
                model=self._config.model_name,
                api_key=self._config.api_key,
                dialect=Dialect(guidance=True),
                policy_version=self._config.policy_version,
                publisher=self.publisher,
            )
            stack.push_async_callback(self.endpoint.aclose)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if isinstance(error, (EndpointError, OSError)):
            # The client may have met the dead socket before we heard of the death.
            await asyncio.wait({self._watcher}, timeout=0.25)
        self._is_leaving = True
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()
        if not self._death:
            return
        if self._host_task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise EndpointError(self._death) from error
        if error is not None:
            error.add_note(self._death)

    @contextlib.asynccontextmanager
    async def _run_process(self) -> AsyncGenerator[int]:
        port = await self._start_process()
        assert self._process is not None
        try:
            async with self._watching(self._process.watch):
                yield port
        finally:
            await self._process.stop()

    @contextlib.asynccontextmanager
    async def _run_thread(self) -> AsyncGenerator[int]:
        from turngate.runtime.engine.server import EngineServer, load_critic, load_model

        if isinstance(self._model, (Path, str)):
            model, tokenizer = await asyncio.to_thread(load_model, Path(self._model))
        else:
            assert self._tokenizer is not None
            # A copy: weight updates would otherwise change the caller's model, and training it would change ours.
            model, tokenizer = copy.deepcopy(self._model), self._tokenizer
        critic = await asyncio.to_thread(load_critic, self._config)
        async with EngineServer(model, tokenizer, self._config, critic) as server, self._watching(server.failed):
            yield server.port

    async def _start_process(self) -> int:
        """Start the process on the user's folder, or on a temporary one with the user's model; return its port."""
        async with contextlib.AsyncExitStack() as stack:
            if isinstance(self._model, (Path, str)):
                folder = await asyncio.to_thread(Path(self._model).absolute)
            else:
                # Gone as soon as the process has read it, so that a violent end of this one leaves no folder behind.
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-engine-")))
                await asyncio.to_thread(self._save_model, self._model, folder)
            self._process = EngineProcess(folder, self._config, start_timeout_s=self._start_timeout_s)
            return await self._process.start()

    def _save_model(self, model: "PolicyModel", folder: Path) -> None:
        assert self._tokenizer is not None
        model.save(folder)
        self._tokenizer.save(folder / "tokenizer.json")

    @contextlib.asynccontextmanager
    async def _watching(self, death: Callable[[], Awaitable[str]]) -> AsyncGenerator[None]:
        """Cancel the block that uses the engine when the engine dies under it."""
        self._watcher = asyncio.create_task(self._watch(death), name="turngate-engine-watch")
        try:
            yield
        finally:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})

    async def _watch(self, death: Callable[[], Awaitable[str]]) -> None:
        why = await death()
        if why and not self._is_leaving:
            _log.error("%s", why)
            self._death = why
            self._host_task.cancel()


def _reachable(host: str) -> str:
    """Return the host part of a URL for a server bound to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
