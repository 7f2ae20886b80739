"""Find out what a server can do by asking it: a few small requests, nothing that changes it."""

from turngate.runtime.capabilities import Capabilities
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.rendering import Renderer

__all__ = ["probe"]


async def probe(
    server: str | Endpoint,
    model: str | None = None,
    *,
    api_key: str | None = None,
    renderer: Renderer | None = None,
    timeout_s: float = 60.0,
) -> Capabilities:
    """Ask a server what it can do with a model, in at most 25 small requests that change nothing.

    Args: server: its URL, the part before /chat/completions, or an endpoint, whose model and key are then used.
        model: None takes the first one that the server lists. renderer: renders the prompt of ids that is asked with
        where the server does not say how it renders. timeout_s: deadline of each request.
    Raises: ConfigError: the URL cannot work, or no model is known. EndpointRefused: the key is not accepted.
        EndpointError: nothing answers there. Whatever else the server does is in the capabilities.
    """
    from turngate.runtime.probing.server import probe_server  # late: runs that ask nothing need none of it

    return await probe_server(server, model, api_key=api_key, renderer=renderer, timeout_s=timeout_s)
