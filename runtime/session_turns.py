"""The turns of a session while their answers and rewards still come in."""

import msgspec

from turngate.runtime.answers import checked_reward
from turngate.runtime.errors import EnvError
from turngate.runtime.session_recorder import Placed
from turngate.runtime.types import Completion, Turn

__all__ = ["NEWEST", "SessionTurns"]

NEWEST = -1
"""Names the turn that was delivered last."""


class SessionTurns:
    """Grows by a turn for each reply delivered; a turn is finished once the agent has shown what came of it."""

    # Changed by its methods: all of it.
    __slots__ = ("_delivered_s", "_early", "_finished", "_turns")

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._delivered_s: list[float] = []
        self._finished: set[int] = set()
        self._early: dict[str, float] = {}
        """Rewards that came before any turn."""

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, completion: Completion, placed: Placed, *, role: str, model_s: float, now_s: float) -> None:
        """Add what was delivered at `now_s`. The completion itself is not kept: it holds the whole prompt."""
        rewards, self._early = self._early, {}
        turn = Turn(
            index=len(self._turns),
            segment=placed.segment,
            start=placed.start,
            length=placed.length,
            text=completion.text,
            tool_calls=completion.tool_calls,
            stop_reason=completion.stop_reason,
            rewards=rewards,
            role=role,
            version_sent=completion.version_sent,
            version_received=completion.version_received,
            guided_tokens=completion.guided_tokens,
            decision=completion.decision,
            model_s=model_s,
        )
        self._turns.append(turn)
        self._delivered_s.append(now_s)

    def answer(self, index: int, observation: str, asked_s: float) -> Turn | None:
        """Say what came of a turn, as a request made at `asked_s` has shown; None when that was known already."""
        if index in self._finished:
            return None
        self._finished.add(index)
        env_s = max(0.0, asked_s - self._delivered_s[index])
        turn = msgspec.structs.replace(self._turns[index], observation=observation, env_s=env_s)
        self._turns[index] = turn
        return turn

    def add_reward(self, name: str, value: float, index: int, where: str) -> None:
        """Add to a component of a turn's reward. Raises EnvError: there is no such turn, or the value is no reward."""
        if index != NEWEST and not 0 <= index < len(self._turns):
            known = f"0 to {len(self._turns) - 1} or -1 for the newest" if self._turns else "-1 before the first"
            raise EnvError(f"turn must be one that was delivered: expected {known}, got {index} ({where})")
        rewards = self._turns[index].rewards if self._turns else self._early
        rewards[name] = checked_reward(name, rewards.get(name, 0.0) + checked_reward(name, value, where), where)

    def unfinished(self) -> list[Turn]:
        """Return the turns that nothing came of yet."""
        return [turn for turn in self._turns if turn.index not in self._finished]

    def all(self) -> tuple[Turn, ...]:
        """Return all turns as they stand."""
        return tuple(self._turns)

    @property
    def early_rewards(self) -> dict[str, float]:
        """Rewards that wait for a first turn."""
        return self._early

    def reward(self) -> float:
        """Return what decides between success and failure: the component `outcome` if any turn has it, else all."""
        given = [turn.rewards for turn in self._turns] + [self._early]
        named = [rewards["outcome"] for rewards in given if "outcome" in rewards]
        return sum(named) if named else sum(sum(rewards.values()) for rewards in given)
