"""The draws of one decision: actions of the base policy, all from one context, of which one will be played."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from turngate.envs.base import ToolSpec
from turngate.runtime.conversation import Conversation
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.token_conversation import Generate, TokenConversation
from turngate.runtime.types import Completion, Message, Sampling

__all__ = ["BaseDraw", "Draw"]

Draw: TypeAlias = Callable[[int], Awaitable[Completion]]
"""Samples one action of the base policy with a seed."""


class BaseDraw:
    """Draws as often as asked; called with a seed, it samples one action."""

    # Changed by draws: _drawn, what each was with what remembers it.
    __slots__ = (
        "_conversation",
        "_drawn",
        "_is_seeded",
        "_messages",
        "_timeout_s",
        "endpoint",
        "sampling",
        "tools",
    )

    def __init__(
        self,
        endpoint: ChatEndpoint,
        conversation: Conversation,
        messages: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[ToolSpec],
        *,
        timeout_s: float,
        is_seeded: bool = True,
    ) -> None:
        """Hold what the base would be asked with. Args: is_seeded: send seeds; a request without any gets none."""
        self.endpoint, self._conversation, self._messages = endpoint, conversation, messages
        self.sampling, self.tools, self._timeout_s, self._is_seeded = sampling, tools, timeout_s, is_seeded
        self._drawn: list[tuple[Completion, list[Callable[[], None]]]] = []

    async def __call__(self, seed: int) -> Completion:
        """Sample one action. Raises as `Endpoint.complete` does."""
        later: list[Callable[[], None]] = []
        drawn = await self._complete(seed if self._is_seeded else None, later)
        self._drawn.append((drawn, later))
        return drawn

    async def _complete(self, seed: int | None, later: list[Callable[[], None]]) -> Completion:
        conversation, messages, sampling, tools = self._conversation, self._messages, self.sampling, self.tools
        timeout_s = self._timeout_s
        if isinstance(conversation, TokenConversation):  # remembers: not every draw, but the one that is played
            return await conversation.complete(
                messages, sampling, seed=seed, tools=tools, timeout_s=timeout_s, later=later
            )
        return await conversation.complete(messages, sampling, seed=seed, tools=tools, timeout_s=timeout_s)

    @property
    def has_own_ids(self) -> bool:
        """Whether the chat is rendered here, so that an action can be put into it as ids of ours."""
        return isinstance(self._conversation, TokenConversation)

    async def put(self, generate: Generate) -> Completion:
        """Play what `generate` gives for the prompt's ids, as if it had been sampled; needs `has_own_ids`."""
        assert isinstance(self._conversation, TokenConversation)
        return await self._conversation.complete(
            self._messages, self.sampling, tools=self.tools, timeout_s=self._timeout_s, generate=generate
        )

    def keep(self, chosen: Completion) -> None:
        """Let the conversation go on from the draw that is played; from the others nothing does."""
        for drawn, later in self._drawn:
            if drawn.token_ids is chosen.token_ids:
                for remember in later:
                    remember()
        self._drawn.clear()
