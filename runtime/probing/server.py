"""The whole probe: which questions are asked of a server, in which order, and what the answers come to."""

from turngate.runtime.capabilities import Capabilities, Finding
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import ConfigError, EndpointError, EndpointRefused
from turngate.runtime.probing.asking import Answer, Asker, as_number, shown, together
from turngate.runtime.probing.chat import PROMPT, ChatProbe
from turngate.runtime.probing.completions import ask_completions
from turngate.runtime.probing.routes import (
    WEIGHT_ROUTES,
    judge_models,
    judge_prefix_cache,
    judge_weights,
    max_context,
    model_ids,
    routes_of,
    server_of,
)
from turngate.runtime.rendering import Renderer
from turngate.runtime.types import Message

__all__ = ["probe_server"]

_ENGINE_ROUTE = "/admin/weights"


async def probe_server(
    server: str | Endpoint, model: str | None, *, api_key: str | None, renderer: Renderer | None, timeout_s: float
) -> Capabilities:
    """Do what `probe` says, which is its only caller."""
    if isinstance(server, Endpoint):
        url, key = server.credentials
        model, api_key, renderer = model or server.model, api_key or key, renderer or server.renderer
    else:
        url = server
    async with Asker(url, api_key=api_key, timeout_s=timeout_s) as asker:
        # 1. What does it say about itself?
        models, version, health, openapi = await together(
            asker.get("/models"),
            asker.get("/version", of_root=True),
            asker.get("/health", of_root=True),
            asker.get("/openapi.json", of_root=True),
        )
        model = _chosen(model, models, asker)
        # 2. What does it do?
        chat = ChatProbe(asker, model)
        await chat.run()
        prompt = chat.prompt_ids
        if not prompt and renderer is not None:
            prompt = renderer.render([Message("user", PROMPT)])
        completed, replies = await ask_completions(asker, model, prompt, alone=not chat.found["chat"].is_yes)
        # 3. What can be seen of weights and caches?
        weights, routes = await _weights(asker, health, openapi)
        metrics = await asker.get("/metrics", of_root=True)
        found = {
            **chat.found,
            **completed,
            "models": judge_models(models, model),
            "weights": weights,
            "prefix_cache": judge_prefix_cache([*chat.replies, *replies], metrics),
        }
        return Capabilities(
            url=asker.url,
            model=model,
            server=shown(server_of(models, version, openapi), 60),
            max_context=max_context(models, model),
            requests=asker.requests,
            weight_routes=routes,
            value_version=_value_version(health),
            **found,
        )


def _chosen(model: str | None, models: Answer, asker: Asker) -> str:
    """Return the model to ask for. Raises as `probe` does."""
    if not asker.connected:
        raise EndpointError(f"server must answer: got {models.problem} (GET {asker.url}/models); check that it is up")
    if models.status in (401, 403):
        raise EndpointRefused(
            f"server must accept the key: got {models.problem} (GET {asker.url}/models); pass the right one as "
            "api_key, or --api-key-file"
        )
    if model:
        return model
    ids = model_ids(models)
    if not ids:
        raise ConfigError(
            f"model must be named: the server lists none, {models.problem or 'an empty list'} "
            f"(GET {asker.url}/models); check the URL, which mostly ends in /v1, or pass model, or --model"
        )
    return ids[0]


def _value_version(health: Answer) -> int | None:
    found = as_number(health.at("value_version"))
    return int(found) if found is not None and found.is_integer() and 0 <= found < 2**31 else None


async def _weights(asker: Asker, health: Answer, openapi: Answer) -> tuple[Finding, tuple[str, ...]]:
    told = routes_of(openapi)
    if told:
        return judge_weights({}, told)
    # Without a schema: a route that takes POST answers GET with 405, and does nothing.
    asked = [_ENGINE_ROUTE] if as_number(health.at("policy_version")) is not None else list(WEIGHT_ROUTES)
    answers = await together(*(asker.get(route, of_root=True) for route in asked))
    return judge_weights(dict(zip(asked, answers, strict=True)), told)
