"""One chat with one endpoint: what an episode asks through, and where what was rendered is remembered."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from turngate.envs.base import ToolSpec
from turngate.runtime.dialect import Dialect
from turngate.runtime.types import Completion, Message, Sampling

if TYPE_CHECKING:
    from turngate.runtime.endpoint import ChatEndpoint

__all__ = ["Conversation", "Shown", "conversation_of", "token_mode_of"]


class Conversation(Protocol):
    """Completes messages, as an endpoint does, for one episode."""

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = ...,
    ) -> Completion:
        """Sample one completion. Raises EndpointError, or one of its kinds."""
        ...


def conversation_of(endpoint: "ChatEndpoint") -> Conversation:
    """Return a new conversation with `endpoint`; the endpoint itself when it keeps nothing between turns."""
    begin = getattr(endpoint, "conversation", None)
    return cast(Conversation, begin()) if begin is not None else endpoint


def token_mode_of(endpoint: object) -> str:
    """Return the endpoint's `TokenMode`; empty when it does not say."""
    dialect = getattr(endpoint, "dialect", None)
    return dialect.token_mode if isinstance(dialect, Dialect) else ""


class Shown:
    """The messages that the model saw last, and what it said to them: tells whether a context goes on from there."""

    # Changed by add(): all of it.
    __slots__ = ("_messages",)

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def is_extended_by(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are those shown last, the answer to them, and at least one more."""
        known = self._messages
        # Lists compare element by element, by identity first: histories share their messages from turn to turn.
        return 0 < len(known) < len(messages) and list(messages[: len(known)]) == known

    def add(self, messages: Sequence[Message], answer: Message, *, goes_on: bool) -> None:
        """Remember what was shown and what the model answered; `goes_on` is what `is_extended_by` has said."""
        known = self._messages
        if goes_on:
            known += messages[len(known) :]
        else:
            known[:] = messages
        known.append(answer)
