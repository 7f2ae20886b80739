"""How experience becomes weights: batches, advantages, losses, learners.

Imports `turngate.runtime` and `turngate.envs`.
"""

if __name__ == "learners":
    raise ImportError("import turngate.learners, not learners: the bare name makes a second copy of every class")

from turngate.learners.cloning import CloningConfig, clone
from turngate.learners.grpo import GRPO
from turngate.learners.optimizers import Schedule

__all__ = ["GRPO", "CloningConfig", "Schedule", "clone"]
