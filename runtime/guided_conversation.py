"""A conversation whose answers are chosen by their values: guidance for agents with loops of their own.

Nobody sees an agent's environment, so there is no snapshot to branch from; whatever else a value function reads, the
messages and the draws, is there.
"""

import secrets
from collections.abc import Sequence

from turngate.envs.base import Task, ToolSpec
from turngate.runtime.base_draw import BaseDraw
from turngate.runtime.conversation import Conversation
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.types import Completion, Message, Sampling

__all__ = ["GuidedConversation", "decision_point"]

_SEED_BITS = 53


class GuidedConversation:
    """Answers as the conversation behind it would, chosen among several draws. Several requests may be under way."""

    __slots__ = ("_conversation", "_endpoint", "_guidance", "_task")

    def __init__(
        self, endpoint: ChatEndpoint, conversation: Conversation, guidance: Guidance, *, task: Task | None = None
    ) -> None:
        """Guide `conversation`, which is one with `endpoint`."""
        self._endpoint, self._conversation, self._guidance, self._task = endpoint, conversation, guidance, task

    def __repr__(self) -> str:
        return f"<GuidedConversation {self._guidance!r} over {self._conversation!r}>"

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = 600.0,
    ) -> Completion:
        """Return the chosen draw, with the decision on it. Cancelled: so are draws and values.

        Only the chosen one is remembered as said. Raises as `Guidance.choose` does.
        """
        draw = BaseDraw(
            self._endpoint,
            self._conversation,
            messages,
            sampling,
            tools,
            timeout_s=timeout_s,
            is_seeded=seed is not None,
        )
        point = decision_point(messages, tools, seed, self._task, self._endpoint.policy_version)
        chosen = await self._guidance.choose(draw, point)
        draw.keep(chosen)
        return chosen


def decision_point(
    messages: Sequence[Message], tools: Sequence[ToolSpec], seed: int | None, task: Task | None, policy_version: int
) -> DecisionPoint:
    """Return what is known of a decision in somebody else's loop: the turns are the answers that it shows."""
    return DecisionPoint(
        messages=messages,
        history=messages,
        tools=tools,
        task=task,
        turn=sum(message.role == "assistant" for message in messages),
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        policy_version=policy_version,
    )
