"""Log-probs of given ids from a server that is being published to."""

from collections.abc import Sequence

import msgspec

from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import EndpointRefused
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.publishers.admin import Admin

__all__ = ["score_by_echo", "score_by_next_token", "served_models"]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _NextLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    index: int
    logprobs: _NextLogprobs


class _Choices(msgspec.Struct):
    choices: list[_Choice]


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


async def score_by_next_token(
    admin: Admin, model: str | None, token_ids: Sequence[int], timeout_s: float
) -> list[float]:
    """Return log-probs of ids from vLLM, by asking after every prefix how likely the next id is.

    Not by echo, which kills a vLLM 0.32 on a CPU that has adapters enabled and generates for others: it takes the
    prompt's positions for those of the running batch. Servers that cannot do this are asked for an echo.
    Raises as `score_by_echo` does.
    """
    if model is None:
        model = next(iter(await served_models(admin)), "")
    body = {
        "model": model,
        "prompt": [list(token_ids[:end]) for end in range(1, len(token_ids))],
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "logprobs": 1,
        "logprob_token_ids": sorted(set(token_ids[1:])),
        "return_tokens_as_token_ids": True,
    }
    async with Endpoint(admin.url + "/v1", model=model, api_key=admin.api_key, max_retries=2) as endpoint:
        try:
            told = await endpoint.request("/completions", msgspec.json.encode(body), timeout_s=timeout_s)
            choices = sorted(msgspec.json.decode(told, type=_Choices).choices, key=lambda choice: choice.index)
            found = [choice.logprobs.top_logprobs[0] for choice in choices]
            return [0.0, *(found[at][f"token_id:{token_id}"] for at, token_id in enumerate(token_ids[1:]))]
        except (EndpointRefused, LookupError, *DECODE_ERRORS):
            return await endpoint.score(token_ids, timeout_s=timeout_s)
