"""Values of actions from a server that scores token sequences: the embedded engine with a critic, or a reward model.

Q(h, a) is the value of the finished prefix: everything the model saw, and the action behind it, as the very ids that
were sampled; nothing is rendered or tokenised again.
"""

from collections.abc import Sequence
from random import Random
from types import TracebackType
from typing import Protocol, Self

import msgspec

from turngate.runtime.errors import GuidanceError, MalformedReply
from turngate.runtime.json_ids import DECODE_ERRORS, JsonIds, TokenId, ids_text
from turngate.runtime.retries import RetryingClient
from turngate.runtime.transport import Transport
from turngate.runtime.types import Completion
from turngate.runtime.value_functions import DecisionPoint, QValues

__all__ = ["CriticQ"]


class Served(Protocol):
    """Something that runs at a URL, such as an `Engine`."""

    url: str
    """Root of the server; the OpenAI API is below /v1."""


class _PoolingRequest(msgspec.Struct, omit_defaults=True):
    input: list[msgspec.Raw]
    model: str | None = None


class _Pooled(msgspec.Struct):
    index: int
    data: list[float | list[float]]


class _PoolingReply(msgspec.Struct):
    data: list[_Pooled]
    value_version: TokenId = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_PoolingReply).decode


class CriticQ:
    """Asks POST /pooling what each candidate is worth; one request per decision.

        Guidance(CriticQ.of(engine), beta=5.0)  # an engine that was started with critic=...
        Guidance(CriticQ("http://reward-model:8000", model="prm"), beta=5.0)

    Needs candidates with token ids, of the scoring model's own vocabulary.
    """

    name = "critic"
    needs_token_ids = True

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 2,
        transport: Transport | None = None,
    ) -> None:
        """Prepare to ask the server at `url`, the part before /pooling. Connects on first use.

        Raises: ConfigError: the URL cannot work, or comes with a name and password beside the key.
        """
        self.model, self._timeout_s = model, timeout_s
        self._client = RetryingClient(
            url, api_key=api_key, transport=transport, max_retries=max_retries, random=Random()
        )
        self.url = self._client.url

    @classmethod
    def of(cls, served: Served, *, api_key: str | None = None) -> Self:
        """Return the values of an engine that runs in this script."""
        return cls(served.url, api_key=api_key)

    def __repr__(self) -> str:
        return f"<CriticQ {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._client.transport.aclose()

    async def __call__(self, point: DecisionPoint, candidates: Sequence[Completion], /) -> QValues:
        """Return the value of each candidate's finished prefix.

        Raises: GuidanceError: a candidate has no ids. EndpointError: the server does not answer. MalformedReply: it
        answers something else.
        """
        inputs = [_prefix(candidate, index) for index, candidate in enumerate(candidates)]
        body = await self._client.request("/pooling", _encode(_PoolingRequest(inputs, self.model)), self._timeout_s)
        try:
            reply = _decode(body)
        except DECODE_ERRORS as error:
            raise MalformedReply(f"reply must hold pooled values: {error} (POST {self.url}/pooling)") from error
        given = sorted(one.index for one in reply.data)
        if given != list(range(len(candidates))):
            raise MalformedReply(
                f"reply must hold one value per input: expected indices 0 to {len(candidates) - 1}, got "
                f"{given!r:.80} (POST {self.url}/pooling)"
            )
        found = {one.index: _last(one.data, candidates[one.index]) for one in reply.data}
        return QValues([found[index] for index in range(len(candidates))], reply.value_version)


def _prefix(candidate: Completion, index: int) -> msgspec.Raw:
    """Return the ids of prompt and action as a JSON array; what the server wrote is not read again."""
    prompt = candidate.prompt_token_ids
    if not prompt or not candidate.token_ids:
        raise GuidanceError(
            f"candidates must have token ids to be scored: got none (candidate {index}); use a server that returns "
            "them, or a value function that reads text"
        )
    text = prompt.text[1:-1] if type(prompt) is JsonIds else ids_text(prompt)
    return msgspec.Raw(b"[%b,%b]" % (text, ids_text(candidate.token_ids)))


def _last(data: list[float | list[float]], candidate: Completion) -> float:
    """Return the value after the last token: servers give it alone, or one per token."""
    tokens = len(candidate.prompt_token_ids) + len(candidate.token_ids)
    if len(data) not in (1, tokens):  # an embedding's last dimension, or a class, is no value
        raise MalformedReply(
            f"pooled data must hold one value, or one per token: expected 1 or {tokens}, got {len(data)} (data); is it "
            "a reward model?"
        )
    last = data[-1]
    if not isinstance(last, list):
        return last
    if len(last) != 1:
        raise MalformedReply(
            f"pooled data must be scalars: got {len(last)} numbers per token (data); is it a reward model?"
        )
    return last[0]
