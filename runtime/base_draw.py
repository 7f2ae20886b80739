"""The draws of one decision: actions of the base policy, all from one context, of which one will be played."""

from collections.abc import Sequence

from turngate.envs.base import ToolSpec
from turngate.runtime.conversation import Conversation
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.token_conversation import Generate, TokenConversation
from turngate.runtime.types import Completion, Message, Sampling

__all__ = ["BaseDraw"]


class BaseDraw:
    """Draws as often as asked; called with a seed, it samples one action."""

    # Changed by draws: _drawn.
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
        self._drawn: list[Completion] = []

    async def __call__(self, seed: int) -> Completion:
        """Sample one action. Raises as `Endpoint.complete` does."""
        drawn = await self._conversation.complete(
            self._messages,
            self.sampling,
            seed=seed if self._is_seeded else None,
            tools=self.tools,
            timeout_s=self._timeout_s,
        )
        self._drawn.append(drawn)
        return drawn

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
        """Forget the draws that were not chosen: nothing goes on from them."""
        if isinstance(self._conversation, TokenConversation):
            for drawn in self._drawn:
                if drawn.token_ids is not chosen.token_ids:
                    self._conversation.forget(drawn)
        self._drawn.clear()
