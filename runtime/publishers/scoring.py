"""Log-probs of given ids from a server that is being published to."""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import MalformedReply
from turngate.runtime.publishers.admin import Admin

__all__ = ["score_by_alternatives", "score_by_echo", "served_models"]


_ALTERNATIVES = 20
"""Per position; what vLLM allows unless told otherwise (`--max-logprobs`)."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _NextLogprobs(msgspec.Struct):
    top_logprobs: Annotated[list[dict[str, float]], msgspec.Meta(min_length=1)]


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
    url, api_key = admin.credentials
    async with Endpoint(url, model=model, api_key=api_key, max_retries=2) as endpoint:
        return await endpoint.score(token_ids, timeout_s=timeout_s)


async def score_by_alternatives(
    admin: Admin, model: str | None, token_ids: Sequence[int], timeout_s: float
) -> list[float]:
    """Return log-probs of ids as far as each is among the 20 likeliest after the ids before it, NaN for the others.

    For vLLM with adapters enabled: an echo kills version 0.32 on a CPU while it generates for others, as the prompt's
    positions are taken for those of the batch; and asking for given ids (`logprob_token_ids`) spoils the log-prob of
    others' tokens whose id is 0. What every client asks for, alternatives to a sampled token, does neither.
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
        "logprobs": _ALTERNATIVES,
        "return_tokens_as_token_ids": True,
    }
    url, api_key = admin.credentials
    async with Endpoint(url, model=model, api_key=api_key, max_retries=2) as endpoint:
        told = await endpoint.request("/completions", msgspec.json.encode(body), timeout_s=timeout_s)
    choices = sorted(admin.decode(told, _Choices, "/v1/completions").choices, key=lambda choice: choice.index)
    if len(choices) != len(token_ids) - 1:
        raise MalformedReply(f"each prompt must have an answer: expected {len(token_ids) - 1}, got {len(choices)}")
    likely = [choice.logprobs.top_logprobs[0] for choice in choices]
    return [0.0, *(likely[at].get(f"token_id:{token_id}", math.nan) for at, token_id in enumerate(token_ids[1:]))]
