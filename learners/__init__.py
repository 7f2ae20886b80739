"""How experience becomes weights: batches, advantages, losses, learners.

Imports `turngate.runtime` and `turngate.envs`.
"""

from importlib.util import find_spec

if __name__ == "learners":
    raise ImportError("import turngate.learners, not learners: the bare name makes a second copy of every class")
if find_spec("torch") is None:
    raise ModuleNotFoundError("turngate.learners needs the extra train: pip install 'turngate[train]'", name="torch")

from turngate.learners.cloning import CloningConfig, clone
from turngate.learners.critic import CriticConfig
from turngate.learners.episode_credit import GAEConfig
from turngate.learners.filters import M2PO, OPSM, GeometricFilter
from turngate.learners.grpo import GRPO
from turngate.learners.hacking import HackingConfig
from turngate.learners.huggingface import HuggingFaceModel, untie_folder
from turngate.learners.lora import LoRA
from turngate.learners.losses import Clip
from turngate.learners.off_policy_choice import OffPolicy
from turngate.learners.offpolicy import Correction
from turngate.learners.optimizers import Schedule
from turngate.learners.ppo import PPO
from turngate.learners.replay import ReplayConfig
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.step_credit import StepGroups
from turngate.learners.value_fit import ValueFitConfig, fit_critic

__all__ = [
    "GRPO",
    "M2PO",
    "OPSM",
    "PPO",
    "Clip",
    "CloningConfig",
    "Correction",
    "CriticConfig",
    "GAEConfig",
    "GeometricFilter",
    "HackingConfig",
    "HuggingFaceModel",
    "LoRA",
    "OffPolicy",
    "ReplayConfig",
    "RewardScheme",
    "Schedule",
    "StepGroups",
    "ValueFitConfig",
    "clone",
    "fit_critic",
    "untie_folder",
]
