"""Log-probs of given ids from a server that is being published to."""

from collections.abc import Sequence

import msgspec

from turngate.runtime.endpoint import Endpoint
from turngate.runtime.publishers.admin import Admin

__all__ = ["score_by_echo", "served_models"]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def served_models(admin: Admin) -> list[str]:
    """Return the names of the models on offer. Raises: PublishError: the server does not say."""
    return [model.id for model in admin.decode(await admin.get("/v1/models"), _Models, "/v1/models").data]


async def score_by_echo(admin: Admin, model: str | None, token_ids: Sequence[int], timeout_s: float) -> list[float]:
    """Return log-probs of ids by one echo request to /v1/completions; without `model`, of the first on offer.

    Raises: EndpointError: the server cannot, or not in time. PublishError: it does not say what it serves.
    """
    if model is None:
        model = next(iter(await served_models(admin)), "")
    async with Endpoint(admin.url + "/v1", model=model, api_key=admin.api_key, max_retries=2) as endpoint:
        return await endpoint.score(token_ids, timeout_s=timeout_s)
