"""How a session ends: by its rewards, unless something else has decided it."""

from turngate.envs.base import End
from turngate.runtime.answers import describe_error, writable
from turngate.runtime.errors import ContextOverflow, EndpointError, EnvError, ToolError

__all__ = ["SessionVerdict"]


class SessionVerdict:
    """What has happened to an episode that is not for its agent to judge: a limit, or a server that failed."""

    # Changed by its methods: all of it.
    __slots__ = ("because", "failure", "stopped_by")

    def __init__(self) -> None:
        self.stopped_by: End | None = None
        """The limit that was reached, once one was."""
        self.because = ""
        """What of the limit was reached, in words."""
        self.failure = ""
        """The server's failure since the last reply that was delivered; empty for none."""

    def __repr__(self) -> str:
        return f"<SessionVerdict {self.stopped_by.value if self.stopped_by else 'open'} {self.failure}>"

    def stop(self, end: End, because: str) -> None:
        """Remember the first limit that was reached."""
        if self.stopped_by is None:
            self.stopped_by, self.because = end, because

    def fail(self, error: EndpointError) -> None:
        """Remember a request that the server failed; one that is too long for it is a limit."""
        if isinstance(error, ContextOverflow):
            self.stop(End.context_overflow, writable(str(error)))
        self.failure = writable(f"{type(error).__name__}: {error}")

    def delivered(self) -> None:
        """Forget a failure that a later reply has made good."""
        self.failure = ""

    def on_return(self, reward: float) -> tuple[End, str]:
        """Return the end, and the words for it, of an episode whose agent is done, with this much reward.

        A limit or a failure that no reply came after goes before the reward: an agent that shrugs off an error and
        returns 0 would have the policy pay for it.
        """
        return self._forced() or (End.success if reward > 0 else End.failure, "")

    def on_error(self, error: BaseException) -> tuple[End, str]:
        """Return the same for an agent that `error` has left.

        Its own exceptions are data: its code stands around the model as an environment does, so they end the episode
        with `env_error`, unless they are the echo of a limit or of a server that failed.
        """
        if not isinstance(error, Exception):  # GeneratorExit too: its event loop is gone
            return End.cancelled, "cancelled from outside"
        if (forced := self._forced()) is not None:
            return forced
        if isinstance(error, ToolError):
            return End.tool_error, str(error)
        if isinstance(error, EnvError):
            return End.env_error, str(error)
        return End.env_error, f"the agent must not raise: got {describe_error(error)}"

    def _forced(self) -> tuple[End, str] | None:
        if self.stopped_by is not None:
            return self.stopped_by, self.because if self.stopped_by is End.context_overflow else ""
        return (End.endpoint_error, self.failure) if self.failure else None
