"""Where an episode's own turns begin in its messages."""

from turngate.runtime.types import Message, Trajectory

__all__ = ["opening_messages"]


def opening_messages(trajectory: Trajectory) -> tuple[Message, ...]:
    """Return what was there before the first of the trajectory's own turns: the task, and the turns before a restart.

    All messages when they do not hold the turns.
    """
    replies = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"]
    own = len(trajectory.turns)
    return trajectory.messages[: replies[-own]] if 0 < own <= len(replies) else trajectory.messages
