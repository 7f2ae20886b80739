"""Which limit a session has reached, and which replies are beyond one."""

from turngate.envs.base import End
from turngate.runtime.limits import Limits
from turngate.runtime.types import Completion

__all__ = ["fits_context", "limit_reached", "over_long"]


def limit_reached(limits: Limits, *, requests: int, policy_tokens: int) -> tuple[End, str] | None:
    """Return the end, and what was reached in words, of a session that has asked so often and got so much; or None."""
    if requests >= limits.max_turns:
        return End.turn_limit, f"got {limits.max_turns} turns (Limits.max_turns)"
    if limits.max_policy_tokens is not None and policy_tokens >= limits.max_policy_tokens:
        return End.token_limit, f"got {limits.max_policy_tokens} tokens (Limits.max_policy_tokens)"
    return None


def over_long(limits: Limits, completion: Completion) -> tuple[End, str] | None:
    """Return the same for a reply that, with its prompt, is longer than a segment may be; None when it is not."""
    limit = limits.max_context_tokens
    if limit is None or len(completion.prompt_token_ids) + len(completion.token_ids) <= limit:
        return None
    return End.context_overflow, f"got a turn beyond {limit} tokens (Limits.max_context_tokens)"


def fits_context(limits: Limits, completion: Completion) -> bool:
    """Whether the prompt of a reply is no longer than a segment may be: learners may be sized for that."""
    return limits.max_context_tokens is None or len(completion.prompt_token_ids) <= limits.max_context_tokens
