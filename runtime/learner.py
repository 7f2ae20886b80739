"""The seam between the runtime and whatever learns: four synchronous methods."""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import msgspec

from turngate.envs.base import Task
from turngate.runtime.errors import ConfigError
from turngate.runtime.guidance import Guidance
from turngate.runtime.types import Batch, Sampling, Trajectory, UpdateReport

__all__ = ["Learner", "check_learner", "lean_trajectory"]


def check_learner(
    learner: "Learner",
    sampling: Sampling,
    max_staleness: int,
    scorers: Collection[str] = (),
    guidance: Guidance | None = None,
) -> None:
    """Require that the learner can learn from what it will be given, as far as it says what it needs.

    Raises: ConfigError: it takes another sampling for granted, cannot learn from data that old or guided in that way,
    or needs scores that no scorer gives.
    """
    if missing := [name for name in getattr(learner, "needs_scores", ()) if name not in scorers]:
        raise ConfigError(
            f"the runtime must have a scorer for each score the learner reads: expected {', '.join(missing)}, got "
            f"{', '.join(scorers) or 'none'}; pass Runtime(scorers=...), for Monte Carlo values train(branching=...), "
            "or correct the name"
        )
    if (check_staleness := getattr(learner, "check_staleness", None)) is not None:
        check_staleness(max_staleness)
    if (check_guidance := getattr(learner, "check_guidance", None)) is not None:
        check_guidance(guidance, sampling.guidance)
    expects: Sampling | None = getattr(learner, "sampling", None)
    if expects is None:
        return
    for name in ("temperature", "top_p", "top_k"):
        sampled, expected = getattr(sampling, name), getattr(expects, name)
        if sampled != expected:
            raise ConfigError(
                f"the learner must know how rollouts are sampled: it expects {name} {expected}, the runtime samples at "
                f"{sampled}; pass the same Sampling to both"
            )


def lean_trajectory(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without what only people and environments read; it may be large, or not plain data at all."""
    turns = tuple(msgspec.structs.replace(turn, state=None, snapshot=None) for turn in trajectory.turns)
    task = Task(trajectory.task.id, trajectory.task.prompt)
    return msgspec.structs.replace(trajectory, task=task, turns=turns, messages=())


class Learner(Protocol):
    """Turns batches into weights. Knows nothing of asyncio, HTTP or environments.

    An instance is sent to its worker process by pickling before `load`, so it must be light until then:
    build models and optimizers in `load`. What a learner may have beside these methods, all of it optional:

    * `sampling: Sampling`: the distribution that it takes rollouts to be drawn from, for ratios; `train` refuses a
      runtime that samples another one.
    * `needs_last_context: bool`: rollouts fetch the whole `last_context` of truncated episodes, for bootstrapping.
    * `wants_stale: bool`: batches bring the groups that were discarded as too old for the policy, in `Batch.stale`.
    * `needs_scores: Collection[str]`: names of the scores it reads; `train` refuses a runtime without such scorers.
    * `check_guidance(guidance: Guidance | None, tokens: TokenGuidance | None) -> None`: called likewise; raises
      ConfigError when the learner cannot learn from what a policy does that is guided so.
    * `check_staleness(max_staleness: int) -> None`: called by `train` before anything runs; raises ConfigError when the
      learner cannot learn from data that old, such as one without an off-policy correction.
    """

    def load(self, folder: Path | None) -> None:
        """Get ready: from a folder written by `save`, or from the configured start when None. Called once, first."""
        ...

    def update(self, batch: Batch) -> UpdateReport:
        """Take one policy update on `batch`; the policy version grows by one when its weights are published."""
        ...

    def save_weights(self, path: Path) -> None:
        """Write the policy's weights to one safetensors file, whole or not at all."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything needed to go on exactly from here: weights, optimizer, RNG."""
        ...
