"""The warm start of arithmetic: a policy that adds two-digit numbers in writing and forgets most carries."""

from collections.abc import Callable
from pathlib import Path

from turngate.envs.arithmetic import demonstrations
from turngate.learners.cloning import CloningConfig, CloningProgress, clone

__all__ = ["ARITHMETIC_CLONING", "arithmetic_policy"]

ARITHMETIC_CLONING = CloningConfig(steps=400, batch_size=32)
"""Two passes over the demonstrations: long enough to learn nearly all sums of two digits, about 11 CPU seconds. What
is not learned here limits what reinforcement learning reaches: after 300 steps one seed in three ended 0.1 lower."""

_DEMONSTRATIONS = 6000
"""Nearly all training problems of two digits, each worked through once."""

_DROP_RATE = 0.65
"""Share of carries forgotten. The worker is right 0.44 of the time and the policy less, since it slips on sums too;
carries stay common enough that the policy can write one, which reinforcement learning then builds on."""


def arithmetic_policy(
    folder: Path,
    seed: int,
    progress: Callable[[CloningProgress], None] | None = None,
    *,
    config: CloningConfig = ARITHMETIC_CLONING,
) -> Path:
    """Train a policy from nothing on a careless worker's additions and return `folder`, now a model folder.

    It solves 0.33 to 0.41 of the held-out problems at temperature 1, 0.37 on average (seeds 1 to 6, 512 problems).
    Equal arguments give equal weights on the same machine.
    """
    worker = demonstrations(_DEMONSTRATIONS, seed, drop_rate=_DROP_RATE)
    return clone(worker, folder, config=config, seed=seed, progress=progress)
