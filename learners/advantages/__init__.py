"""Advantages: how good each action was compared with what else the policy might have done. Pure functions."""

from turngate.learners.advantages.bilevel import BilevelForm, BilevelGae, gae_bilevel
from turngate.learners.advantages.gae import (
    FlatGae,
    Gae,
    bootstrap_value,
    gae,
    gae_batch,
    gae_flat_tokens,
    gae_segments,
    length_adaptive_lambda,
)
from turngate.learners.advantages.group import (
    GROUP_PRESETS,
    GroupAdvantage,
    GroupScheme,
    batch_reward_std,
    group_advantages,
    sample_advantages,
)
from turngate.learners.advantages.returns import masked_whiten, reward_to_go
from turngate.learners.advantages.steps import (
    StepAdvantages,
    add_step_advantages,
    edge_advantages,
    edge_keys,
    step_group_advantages,
    step_returns,
)
from turngate.learners.advantages.trees import (
    intra_inter_advantages,
    leaf_counts,
    local_global_advantages,
    shared_prefix_weights,
    tree_values,
)
from turngate.learners.advantages.turn_index import turn_index_advantages

__all__ = [
    "GROUP_PRESETS",
    "BilevelForm",
    "BilevelGae",
    "FlatGae",
    "Gae",
    "GroupAdvantage",
    "GroupScheme",
    "StepAdvantages",
    "add_step_advantages",
    "batch_reward_std",
    "bootstrap_value",
    "edge_advantages",
    "edge_keys",
    "gae",
    "gae_batch",
    "gae_bilevel",
    "gae_flat_tokens",
    "gae_segments",
    "group_advantages",
    "intra_inter_advantages",
    "leaf_counts",
    "length_adaptive_lambda",
    "local_global_advantages",
    "masked_whiten",
    "reward_to_go",
    "sample_advantages",
    "shared_prefix_weights",
    "step_group_advantages",
    "step_returns",
    "tree_values",
    "turn_index_advantages",
]
