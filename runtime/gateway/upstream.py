"""The server behind a gateway: what of its failures an agent is told, and by which status."""

import math

from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import (
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    MalformedReply,
)
from turngate.runtime.gateway.collected import Arrival
from turngate.runtime.openai_api.refusals import RequestError

__all__ = ["arrival", "refusal_of"]


def arrival(endpoint: Endpoint, version_sent: int) -> Arrival:
    """Return the versions around a request whose reply is there."""
    return Arrival(version_sent, endpoint.serving_version, endpoint.newest_version())


def refusal_of(error: EndpointError) -> RequestError:
    """Return what the agent is told of a failure: what the server said, not where it is nor who we are to it."""
    told = error.told  # without our secrets already
    if isinstance(error, EndpointTimeout):
        return _failure("the upstream must answer in time: it did not", 504, "upstream_timeout")
    if isinstance(error, ContextOverflow):
        return RequestError(told or "the prompt is too long", param="messages", code="context_length_exceeded")
    if isinstance(error, EndpointRefused):
        if error.status in (401, 403, 407):
            return _failure("the upstream must let the gateway in: it refused the gateway's own key", 502)
        status = error.status if 400 <= error.status < 500 else 502
        return RequestError(told or "the upstream refused the request", status=status, code="upstream_refused")
    if isinstance(error, MalformedReply):
        return _failure("the upstream must answer with a whole completion: it did not; see the gateway's log", 502)
    if error.status == 429:
        return RequestError(
            told or "the upstream is busy",
            status=429,
            code="rate_limit_exceeded",
            kind="rate_limit_error",
            retry_after_s=max(1, math.ceil(error.retry_after_s)),
        )
    what = f"got status {error.status}: {told}" if error.status else "it could not be reached"
    return _failure(f"the upstream must answer: {what}, retries included", 502)


def _failure(message: str, status: int, code: str = "upstream_failed") -> RequestError:
    return RequestError(message, status=status, code=code, kind="server_error")
