"""The running example: an agent shops for an item that meets every constraint of a sentence.

Catalogue and goals (`catalogue`), sentences and splits (`tasks`), actions as text (`grammar`), the state machine
(`shop`), the environments around it (`env`, `tools`), scripted shoppers and their demonstrations, recovery counts.
"""

from turngate.envs.shopping.catalogue import Goal, Item, violations
from turngate.envs.shopping.demonstrations import (
    ScriptedEpisode,
    demonstrations,
    run_shopper,
    vocabulary,
)
from turngate.envs.shopping.env import ShoppingEnv
from turngate.envs.shopping.grammar import Command, format_command, parse_command
from turngate.envs.shopping.metrics import Recovery, compute_recovery, has_opened_wrong_item
from turngate.envs.shopping.shop import Shop
from turngate.envs.shopping.shoppers import EXPERT, NOISY, Noise, Shopper
from turngate.envs.shopping.tasks import held_out_tasks, make_task, running_example, split_of, train_tasks
from turngate.envs.shopping.tools import SHOPPING_TOOLS, ShoppingToolEnv

__all__ = [
    "EXPERT",
    "NOISY",
    "SHOPPING_TOOLS",
    "Command",
    "Goal",
    "Item",
    "Noise",
    "Recovery",
    "ScriptedEpisode",
    "Shop",
    "Shopper",
    "ShoppingEnv",
    "ShoppingToolEnv",
    "compute_recovery",
    "demonstrations",
    "format_command",
    "has_opened_wrong_item",
    "held_out_tasks",
    "make_task",
    "parse_command",
    "run_shopper",
    "running_example",
    "split_of",
    "train_tasks",
    "violations",
    "vocabulary",
]
