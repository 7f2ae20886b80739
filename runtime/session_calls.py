"""Requests of one session that are under way, so that they end when it does."""

from collections.abc import Sequence

from turngate.envs.base import ToolSpec
from turngate.runtime.chat_messages import why_not_asked
from turngate.runtime.conversation import Conversation
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.errors import EnvError, TurngateError
from turngate.runtime.types import Completion, Message, Sampling

__all__ = ["CallDropped", "SessionCalls"]


class CallDropped(Exception):
    """The session was sealed while its request was under way."""


class SessionCalls:
    """Asks through one conversation, from any task of the session's event loop."""

    # Changed by ask(): _scopes, bug.
    __slots__ = ("_scopes", "bug", "conversation")

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self._scopes: set[Deadline] = set()
        self.bug: Exception | None = None
        """What a request raised that is neither the server's failure nor the agent's: nobody should swallow it."""

    def __len__(self) -> int:
        return len(self._scopes)

    async def ask(
        self,
        chat: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[ToolSpec],
        seed: int,
        timeout_s: float,
        *,
        through: Conversation | None = None,
    ) -> Completion:
        """Sample a completion, by way of another conversation where one is given. Cancelled: the request is dropped.

        Raises: CallDropped: `drop_all` was called meanwhile. EndpointError: the server failed. EnvError: no request can
            carry what is asked.
        """
        scope = Deadline()
        self._scopes.add(scope)
        try:
            with scope:
                asked = self.conversation if through is None else through
                return await asked.complete(chat, sampling, seed=seed, tools=tools, timeout_s=timeout_s)
        except DeadlineExceeded as error:
            if not scope.expired:
                raise  # somebody else's
            raise CallDropped from error
        except TurngateError:
            raise
        except Exception as error:
            if why := why_not_asked(chat, tools, sampling, seed):
                raise EnvError(why) from error
            self.bug = error
            raise
        finally:
            self._scopes.discard(scope)

    def drop_all(self) -> None:
        """Cancel what is under way, each in the task that waits for it."""
        for scope in self._scopes:
            scope.expire()
