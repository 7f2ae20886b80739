"""Where collection stops, in turns, tokens and seconds."""

import msgspec

from turngate.runtime.errors import ConfigError
from turngate.runtime.plain_numbers import make_plain

__all__ = ["Limits"]

_COUNTS = ("max_turns", "max_policy_tokens", "max_context_tokens")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Where collection stops. Reaching a limit of turns, tokens or the rollout's time truncates the episode: the task
    could go on. Reaching the limit of one call means that something hangs: a failure, refilled and never trained on."""

    max_turns: int = 16
    max_policy_tokens: int | None = None
    """Generated tokens per episode; the last turn's `max_tokens` shrinks to what is left."""
    max_context_tokens: int | None = None
    """Prompt and completion of one turn; no recorded segment is longer. None leaves it to the server."""
    request_timeout_s: float = 600.0
    """One completion, retries included; running into it is an endpoint_error."""
    tool_timeout_s: float = 120.0
    """One reset or step of the environment; running into it is an env_error."""
    turn_timeout_s: float = 900.0
    """One turn as a whole, context function included; running into it is the failure of whatever it waited for."""
    rollout_timeout_s: float = 3600.0
    close_timeout_s: float = 10.0
    """Closing the environment, and the end of a call that was cancelled; either is left behind after that."""

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        make_plain(self, floats=[n for n in given if n not in _COUNTS], ints=[n for n in given if n in _COUNTS])
        for name in given:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)} (Limits)")
