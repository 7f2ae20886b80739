"""An endpoint for a server that one knows only by its URL: asked what it can do, then used as well as it can be."""

import logging

from turngate.runtime.capabilities import Capabilities
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import EndpointError
from turngate.runtime.probe import probe
from turngate.runtime.rendering import Renderer
from turngate.runtime.weights import WeightPublisher

__all__ = ["connect"]

_log = logging.getLogger("turngate.connect")


async def connect(
    url: str,
    *,
    model: str | None = None,
    renderer: Renderer | None = None,
    api_key: str | None = None,
    publisher: WeightPublisher | None = None,
    policy_version: int = 0,
    max_retries: int = 6,
    timeout_s: float = 60.0,
) -> Endpoint:
    """Probe a server and return an endpoint that gets as much of the record from it as it can give.

    The choice is logged at INFO; `endpoint.capabilities` keeps what was found, for the run's config.json. Cancelled: no
    connection stays open.

    Args: model: None takes the first one that the server lists.
        renderer: the model's chat format; with it, and a server that takes token ids, chats are rendered here (token
            mode `tokens`).
        timeout_s: deadline of each question of the probe. The others are as of `Endpoint`.
    Raises: ConfigError, EndpointRefused, EndpointError: as `probe` does; EndpointError also when it cannot chat.
    """
    capabilities = await probe(url, model, api_key=api_key, renderer=renderer, timeout_s=timeout_s)
    if problems := capabilities.problems("evaluate", has_renderer=renderer is not None):
        raise EndpointError(f"server must be able to chat: {'; '.join(problems)} ({capabilities.url})")
    dialect = capabilities.dialect(renderer)
    endpoint = Endpoint(
        url,
        model=capabilities.model,
        api_key=api_key,
        dialect=dialect,
        renderer=renderer if dialect.token_mode == "tokens" else None,
        max_retries=max_retries,
        policy_version=policy_version,
        publisher=publisher,
        capabilities=capabilities,
    )
    _log.info(_choice(capabilities, endpoint))
    return endpoint


def _choice(capabilities: Capabilities, endpoint: Endpoint) -> str:
    mode = endpoint.dialect.token_mode
    why = capabilities.problems("record", has_renderer=endpoint.renderer is not None)
    cannot = f"; no training: {'; '.join(why)}" if why else ""
    return f"{capabilities.server} at {capabilities.url} serves {capabilities.model}: token mode {mode!r}{cannot}"
