"""A transport that keeps what went over the wire, to compare records with what the server really said."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from turngate.runtime.transport import HttpTransport, OpenReply, Reply
from turngate.runtime.types import Trajectory

__all__ = ["Exchange", "Sampled", "Tap", "recorded", "replied"]

Sampled: TypeAlias = tuple[bytes, bytes, bytes]
"""Ids of the prompt, ids sampled after it, their log-probs; int32, int32 and float32 as bytes."""


class Exchange(NamedTuple):
    """One request that was answered."""

    path: str
    request: dict[str, Any]
    reply: dict[str, Any]


class Tap:
    """Posts by HTTP and remembers every exchange that succeeded."""

    def __init__(self, url: str) -> None:
        self._http = HttpTransport(url)
        self.exchanges: list[Exchange] = []

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Reply:
        reply = await self._http.post(path, body, timeout_s=timeout_s)
        if reply.status == 200:
            decode = msgspec.json.decode
            self.exchanges.append(Exchange(path, decode(body), decode(reply.body)))
        return reply

    async def open(self, path: str, body: bytes, *, timeout_s: float) -> OpenReply:
        return await self._http.open(path, body, timeout_s=timeout_s)

    async def aclose(self) -> None:
        await self._http.aclose()


def replied(exchanges: Sequence[Exchange]) -> Counter[Sampled]:
    """Return what the server sampled, by its own words."""
    found: Counter[Sampled] = Counter()
    for path, request, reply in exchanges:
        (choice,) = reply["choices"]
        ids = choice.get("token_ids")
        if path == "/chat/completions":
            prompt = reply["prompt_token_ids"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        else:
            prompt = request["prompt"]
            logprobs = choice["logprobs"]["token_logprobs"]
            if ids is None:
                ids = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        found[_sampled(prompt, ids, logprobs)] += 1
    return found


def recorded(trajectories: Sequence[Trajectory]) -> Counter[Sampled]:
    """Return what was sampled by the record: of every turn the ids before it, its ids, its log-probs."""
    found: Counter[Sampled] = Counter()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            segment = trajectory.segments[turn.segment]
            ids, end = segment.ids(), turn.start + turn.length
            found[_sampled(ids[: turn.start], ids[turn.start : end], segment.logprob_values()[turn.start : end])] += 1
    return found


def _sampled(prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]) -> Sampled:
    return array("i", prompt).tobytes(), array("i", token_ids).tobytes(), array("f", logprobs).tobytes()
