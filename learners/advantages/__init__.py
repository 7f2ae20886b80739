"""Advantages: how good each action was compared with what else the policy might have done. Pure functions."""

from turngate.learners.advantages.group import (
    GROUP_PRESETS,
    GroupAdvantage,
    GroupScheme,
    batch_reward_std,
    group_advantages,
    sample_advantages,
)
from turngate.learners.advantages.returns import masked_whiten, reward_to_go

__all__ = [
    "GROUP_PRESETS",
    "GroupAdvantage",
    "GroupScheme",
    "batch_reward_std",
    "group_advantages",
    "masked_whiten",
    "reward_to_go",
    "sample_advantages",
]
