"""Values of actions from a scorer: a process reward model or a judge looks at the history with the action behind it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import anyio

from turngate.envs.base import End, Task
from turngate.runtime.answers import said_last
from turngate.runtime.errors import GuidanceError
from turngate.runtime.guided_types import action_key
from turngate.runtime.scorers import Scorer
from turngate.runtime.types import Completion, Message, Trajectory, Turn
from turngate.runtime.unwrap import single_errors
from turngate.runtime.value_functions import DecisionPoint, QValues

__all__ = ["ScorerQ", "imagined"]


class ScorerQ:
    """Asks a scorer what the episode would be worth after each candidate; equal candidates are asked about once.

        Guidance(ScorerQ(JudgeEndpoint(server)), beta=5.0, draws=4)

    The scorer is shown the episode so far with one turn more, which the environment has not answered. One that has
    `score_turn(trajectory, turn)`, as judges have, is asked about that turn alone.
    """

    def __init__(self, scorer: Scorer, *, version: int = 0) -> None:
        """Hold the scorer. Args: version: of its model, for the records."""
        self._scorer, self._version = scorer, version
        self.name = str(getattr(scorer, "name", "") or getattr(scorer, "__name__", type(scorer).__name__))

    def __repr__(self) -> str:
        return f"<ScorerQ {self._scorer!r}>"

    async def __call__(self, point: DecisionPoint, candidates: Sequence[Completion], /) -> QValues:
        """Return the score after each candidate; what the scorer cannot tell is NaN. Cancelled: so are its calls.

        Raises: GuidanceError: the scorer does not give one score per turn. What it raises itself goes on.
        """
        nodes = {action_key(candidate): candidate for candidate in candidates}
        found: dict[object, float] = {}

        async def one(key: object, candidate: Completion) -> None:
            found[key] = await self._score(imagined(point, candidate))

        with single_errors():
            async with anyio.create_task_group() as tg:
                for key, candidate in nodes.items():
                    tg.start_soon(one, key, candidate)
        return QValues([found[action_key(candidate)] for candidate in candidates], self._version)

    async def _score(self, trajectory: Trajectory) -> float:
        score_turn = getattr(self._scorer, "score_turn", None)
        if score_turn is not None:
            ask = cast(Callable[[Trajectory, int], Awaitable[float]], score_turn)
            return await ask(trajectory, len(trajectory.turns) - 1)
        scores = list(await self._scorer(trajectory))
        if len(scores) != len(trajectory.turns):
            raise GuidanceError(
                f"scores must be one number per turn: expected {len(trajectory.turns)}, got {len(scores)} ({self.name})"
            )
        return scores[-1]  # as it is: guidance makes numbers of values, and knows what is none


def imagined(point: DecisionPoint, candidate: Completion) -> Trajectory:
    """Return the episode as it would stand after a candidate, before anybody answers: text and calls, no tokens."""
    messages = [*(point.history or point.messages), Message("assistant", candidate.text, candidate.tool_calls)]
    said = [index for index, message in enumerate(messages) if message.role == "assistant"]
    ends = [*said[1:], len(messages)]
    turns = tuple(
        Turn(
            index=number,
            segment=0,
            start=0,
            length=0,
            text=messages[at].content,
            tool_calls=messages[at].tool_calls,
            observation="\n".join(message.content for message in messages[at + 1 : end]),
        )
        for number, (at, end) in enumerate(zip(said, ends, strict=True))
    )
    opening = messages[: said[0]]
    asked = next((message.content for message in opening if message.role == "user"), "")
    return Trajectory(
        id=f"decision.{point.seed:x}",
        task=point.task or Task("decision", asked),
        first_observation=said_last(opening),
        turns=turns,
        end=End.turn_limit,  # cut before the environment answers
        messages=tuple(messages),
        trainable=False,
        untrainable_because="it was imagined, to be scored",
    )
