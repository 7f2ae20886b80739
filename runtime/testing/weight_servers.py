"""Servers that take weights as vLLM and SGLang do, without a model: they answer like the canary of what they loaded."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from aiohttp import web

from turngate.runtime.canary import Canary, read_canary
from turngate.runtime.errors import PublishError

__all__ = ["Failure", "FakeSGLang", "FakeVLLM"]

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Failure(NamedTuple):
    """What a route does in place of its work, once."""

    status: int
    """0 hangs up without a word; -1 does the work and hangs up."""
    message: str = "scripted"


class _WeightServer:
    """What both have in common: routes that can fail as scripted, a pause, and a cache of prefixes.

    A generation reads the cache: `cached` is the canary of the weights that filled it, or None when it is empty.
    """

    def __init__(self, base_model: Path, *, keeps_weights: bool = False) -> None:
        """Serve a folder's weights; `keeps_weights` answers 200 to updates and changes nothing, like a tied head."""
        self.loaded = _canary(base_model)
        self.cached: Canary | None = None
        self.keeps_weights = keeps_weights
        self.weight_version = "default"
        self.calls: list[str] = []
        """Path of every call, in order, with its mode where it has one."""
        self._called: dict[str, asyncio.Event] = {}
        self.failures: dict[str, list[Failure]] = {}
        """By path: what the next calls do instead."""
        self.running = asyncio.Event()
        self.running.set()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Listen on a free port of the loopback interface; `url` says which."""
        app = web.Application()
        for method, path, handler in self._routes():
            app.router.add_route(method, path, self._failing(path, handler))
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    def _routes(self) -> list[tuple[str, str, Handler]]:
        raise NotImplementedError

    async def called(self, path: str) -> None:
        """Wait until a path is called, before it is answered."""
        await self._called.setdefault(path, asyncio.Event()).wait()

    def generate(self) -> Canary:
        """Return the weights that a request with a known prefix is answered by: the cache's, when it has any."""
        self.cached = self.cached or self.loaded
        return self.cached

    def _load(self, folder: Path) -> None:
        if not self.keeps_weights:
            self.loaded = _canary(folder)

    def _failing(self, path: str, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            mode = request.query.get("mode", "")
            self.calls.append(f"{path}?{mode}" if mode else path)
            self._called.setdefault(path, asyncio.Event()).set()
            if scripted := self.failures.get(path):
                failure = scripted.pop(0)
                if failure.status == -1:
                    await handler(request)
                if failure.status <= 0:
                    assert request.transport is not None
                    request.transport.abort()
                    return web.Response()
                return web.json_response({"error": {"message": failure.message}}, status=failure.status)
            return await handler(request)

        return answer


class FakeVLLM(_WeightServer):
    """The routes of a vLLM in development mode, with LoRA adapters."""

    def __init__(self, base_model: Path, *, keeps_weights: bool = False, name: str = "policy") -> None:
        """Serve the model in a folder under a name."""
        super().__init__(base_model, keeps_weights=keeps_weights)
        self.name = name
        self.dtype, self.device = "bfloat16", "cuda"
        self.unlikely: set[int] = set()
        """Positions of a canary that are not among the likeliest."""
        self.keeps_cache = False
        """Whether asking it to drop cached prefixes fails, as it does while requests hold them."""
        self.adapters: dict[str, Canary] = {}

    def _routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("POST", "/collective_rpc", self._rpc),
            ("POST", "/reset_prefix_cache", self._reset),
            ("POST", "/update_weight_version", self._set_version),
            ("GET", "/weight_info", self._version),
            ("GET", "/server_info", self._info),
            ("GET", "/v1/models", self._models),
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/load_lora_adapter", self._load_adapter),
            ("POST", "/v1/unload_lora_adapter", self._unload_adapter),
        ]

    async def _pause(self, request: web.Request) -> web.Response:
        self.running.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({"status": "resumed"})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        self._load(Path(body["kwargs"]["weights_path"]))
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request) -> web.Response:
        if not self.keeps_cache:
            self.cached = None
        return web.json_response({"success": not self.keeps_cache})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _info(self, request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        model, device = {"dtype": f"torch.{self.dtype}"}, {"device_type": self.device}
        return web.json_response({"vllm_config": {"model_config": model, "device_config": device}})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in (self.name, *self.adapters)]})

    async def _completions(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        await self.running.wait()
        if body["model"] != self.name and body["model"] not in self.adapters:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        # As in vLLM, scoring a prompt reads no cache.
        weights = self.adapters.get(body["model"], self.loaded)
        if body.get("echo"):
            choice = {"text": "", "finish_reason": "length", "logprobs": {"token_logprobs": [None, *weights.logprobs]}}
            return web.json_response({"choices": [choice]})
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            likely = {f"token_id:{100 + place}": -9.0 for place in range(body["logprobs"] - 1)}
            if len(prompt) not in self.unlikely:
                likely[f"token_id:{weights.token_ids[len(prompt)]}"] = weights.logprobs[len(prompt) - 1]
            choices.append({"index": index, "text": "", "logprobs": {"top_logprobs": [likely]}})
        return web.json_response({"choices": choices[::-1]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        assert (Path(body["lora_path"]) / "adapter_config.json").exists()
        loaded = _canary(Path(body["lora_path"]), "adapter_model.safetensors")
        self.adapters[body["lora_name"]] = self.loaded if self.keeps_weights else loaded
        return web.Response(text="Success")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        if self.adapters.pop((await request.json())["lora_name"], None) is None:
            return web.json_response({"error": {"message": "cannot be found"}}, status=404)
        return web.Response(text="Success")


class FakeSGLang(_WeightServer):
    """The routes of an SGLang server, as its documentation describes them."""

    def __init__(self, base_model: Path, *, keeps_weights: bool = False) -> None:
        """Serve the model in a folder."""
        super().__init__(base_model, keeps_weights=keeps_weights)
        self.updates: list[dict[str, Any]] = []
        """Bodies of the updates asked for."""

    def _routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/pause_generation", self._pause),
            ("POST", "/continue_generation", self._continue),
            ("POST", "/update_weights_from_disk", self._update),
            ("GET", "/get_model_info", self._info),
            ("POST", "/generate", self._generate),
        ]

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] in ("abort", "retract", "in_place")
        self.running.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.updates.append(body)
        try:
            self._load(Path(body["model_path"]))
        except PublishError as error:  # it loads what it had before, and says no
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self.weight_version = body["weight_version"]
        if body["flush_cache"]:
            self.cached = None
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "model", "weight_version": self.weight_version})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["return_logprob"] is True
        assert body["logprob_start_len"] == 0
        await self.running.wait()
        logprobs = [None, *self.loaded.logprobs]
        told = [[logprob, token_id, None] for logprob, token_id in zip(logprobs, body["input_ids"], strict=True)]
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": told}})


def _canary(folder: Path, name: str = "model.safetensors") -> Canary:
    canary = read_canary(folder / name)
    assert canary is not None, f"fakes answer like the canary of their weights: {folder} has none"
    return canary
