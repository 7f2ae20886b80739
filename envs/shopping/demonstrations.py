"""Texts to start a small model from: whole episodes of a scripted shopper, and the words that they are made of."""

import random
from typing import Any, NamedTuple

from turngate.envs.base import End, Task
from turngate.envs.shopping.catalogue import BRANDS, CATEGORIES, COLORS, STARS, USES
from turngate.envs.shopping.shop import Shop
from turngate.envs.shopping.shoppers import NOISY, Noise, Shopper
from turngate.envs.shopping.tasks import train_tasks

__all__ = ["Dialogue", "ScriptedEpisode", "demonstrations", "run_shopper", "vocabulary"]

Dialogue = list[tuple[str, str]]
"""(role, content) pairs; roles as in the chat template: `user` for the shop, `assistant` for the shopper."""


class ScriptedEpisode(NamedTuple):
    """One episode of a scripted shopper."""

    dialogue: Dialogue
    """From the task's sentence to the last action; the shop's last answer is left out."""
    end: End
    states: list[dict[str, Any]]
    """`Step.state` after each action."""


def run_shopper(task: Task, seed: int, noise: Noise = NOISY) -> ScriptedEpisode:
    """Play one episode; `seed` gives the shop's luck and the shopper's mistakes."""
    shop, shopper = Shop(task, seed), Shopper(noise, random.Random(f"shopper {seed}"))
    observation, states = task.prompt, list[dict[str, Any]]()
    dialogue: Dialogue = []
    while True:
        action = shopper.act(observation)
        dialogue += [("user", observation), ("assistant", action)]
        step = shop.act(action)
        states.append(step.state or {})
        observation = step.observation.text
        if step.end is not None:
            return ScriptedEpisode(dialogue, step.end, states)


def demonstrations(n: int, seed: int, noise: Noise = NOISY) -> list[Dialogue]:
    """Return `n` episodes of a scripted shopper on training tasks, successful or not."""
    tasks = train_tasks(n, seed)
    return [run_shopper(task, _episode_seed(seed, i), noise).dialogue for i, task in enumerate(tasks)]


def vocabulary() -> tuple[str, ...]:
    """Return every word the shop and its shoppers use, for building a tokenizer; digits and punctuation apart."""
    shop = "Results No results Price Rating Available colors selected is not available Bought The episode over Invalid"
    refusals = "unknown action empty search no page to go back first such item listed open an color another"
    task = "Find a under rated at least stars price rating yes"
    words = [*shop.split(), *refusals.split(), *task.split(), "search", "click", "select", "buy"]
    items = [f"item_{n}" for n in range(1, 7)]
    capitals = [color.capitalize() for color in COLORS]
    return tuple(dict.fromkeys([*words, *items, *CATEGORIES, *USES, *COLORS, *capitals, *BRANDS, *STARS]))


def _episode_seed(seed: int, index: int) -> int:
    return seed * 1_000_003 + index
