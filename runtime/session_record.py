"""What a session was, written down once it is over."""

from typing import NamedTuple

from turngate.envs.base import End, Task
from turngate.runtime.answers import writable
from turngate.runtime.chat_messages import why_not_sendable
from turngate.runtime.session_recorder import SessionRecorder
from turngate.runtime.session_turns import SessionTurns
from turngate.runtime.types import Trajectory

__all__ = ["SessionFacts", "session_trajectory"]


class SessionFacts(NamedTuple):
    """What is settled when a session opens."""

    id: str
    task: Task
    group_id: str
    member: int
    seed: int
    token_mode: str
    started_s: float

    def where(self, what: str, turns: int) -> str:
        """Return a message with the place it is about."""
        return writable(f"{what} (session {self.id}, turn {turns})")


def session_trajectory(
    facts: SessionFacts,
    recorder: SessionRecorder,
    turns: SessionTurns,
    end: End,
    error: str,
    *,
    first_observation: str,
    ended_s: float,
) -> Trajectory:
    """Return the record of a session that ended so."""
    early = turns.early_rewards
    if not turns and early and not error:
        error = facts.where(f"rewards must have a turn to stand on: got {early} and no turn", len(turns))
    messages = recorder.messages()
    if why := why_not_sendable(messages):  # structs of the agent's own making that a server let pass
        end, error, messages = End.env_error, facts.where(why, len(turns)), ()
    last_context = recorder.last_context() if end.is_truncation else b""
    return Trajectory(
        id=facts.id,
        task=facts.task,
        group_id=facts.group_id,
        member=facts.member,
        seed=facts.seed,
        first_observation=first_observation,
        turns=turns.all(),
        segments=recorder.segments(),
        end=end,
        error=error,
        messages=messages,
        last_context=last_context,
        last_context_is_whole=recorder.knows_last_context and last_context != b"",
        token_mode=facts.token_mode,
        drifts=recorder.drifts,
        trainable=not recorder.untrainable_because,
        untrainable_because=recorder.untrainable_because,
        started_s=facts.started_s,
        ended_s=ended_s,
    )
