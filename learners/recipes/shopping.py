"""The warm start of shopping: a policy that knows what it reads and shops carelessly.

Two kinds of conversations, mixed in every step. Demonstrations of a careless scripted shopper teach what actions look
like; they overlook most faults. Lessons hold no action: a goal, then pages and lists from the shop, each followed by
what is wrong with it or which titles fit. They stand for what a pretrained model knows. The verdict is the very first
token after the shop's text, where an episode decides what to do, so that the same features serve both: told constraint
by constraint further on, the knowledge never reached the decision (AUC of leaving for a wrong price 0.53, not 0.94).
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from turngate.envs.base import Task
from turngate.envs.shopping.catalogue import BRANDS, CATEGORIES, COLORS, USES, Goal, Item, make_goal, violations
from turngate.envs.shopping.demonstrations import Dialogue, demonstrations, vocabulary
from turngate.envs.shopping.shop import item_page
from turngate.envs.shopping.shoppers import NOISY
from turngate.envs.shopping.tasks import goal_sentence, split_of
from turngate.learners.cloning import CloningConfig, CloningProgress, clone, score_chats
from turngate.learners.episode_credit import GAEConfig
from turngate.learners.grpo import GRPO
from turngate.learners.optimizers import Schedule
from turngate.learners.policy_learner import PolicyLearner
from turngate.learners.ppo import PPO
from turngate.learners.step_credit import StepGroups
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError

__all__ = [
    "CARELESS",
    "SHOPPING_CLONING",
    "SHOPPING_METHODS",
    "knowledge",
    "lessons",
    "shopping_grpo",
    "shopping_learner",
    "shopping_policy",
    "shopping_ppo",
]

SHOPPING_METHODS = {
    "trajectory": "trajectory GRPO",
    "step_groups": "step groups (GiGPO)",
    "turn_gae": "turn-GAE PPO",
    "bilevel_gae": "bi-level PPO",
}
"""Ways to assign credit that can be compared on this task, and what to call them in a table."""

SHOPPING_CLONING = CloningConfig(steps=600, adamw_lr=0.02, schedule=Schedule(warmup_updates=10, decay_start=1.0))
"""At most so long at the full rate; this part ends when the checks are known. Embeddings of unit scale need the larger
AdamW rate: at 6e-3 the rating was still not compared after 200 steps."""

SHOPPING_SETTLING = CloningConfig(
    steps=100, adamw_lr=0.02, schedule=Schedule(decay_start=0.0, decay_to=0.05), all_tokens_steps=0
)
"""And then so long with a falling rate: at the full one the success of two neighbouring steps differs threefold."""

CARELESS = msgspec.structs.replace(NOISY, miss=0.7)
"""Overlooks 0.7 of the faults: every check is made now and then, which reinforcement learning then builds on."""

_DEMONSTRATIONS = 16
_LESSONS = 24
"""Conversations of each kind a step."""

_QUESTIONS = 5
"""Pages and lists in one lesson. Several in a row teach that the newest counts, at the positions episodes reach."""

_LIST_SHARE = 0.3
_FAULTS = ("price", "rating", "color")
_CHECKED = ("price", "rating", None)
"""What must be told apart before the warm start ends: each of these faults, and no fault. Colours are not among them:
the shop itself says when one is not available."""
_ENOUGH = 0.95
"""Share of right verdicts of each kind. Seeds differ by 250 steps in when the price comparison appears, and a policy
without it takes that lack through the whole of reinforcement learning."""
_NONE = "yes"
"""The verdict on a page without fault."""


def shopping_policy(
    folder: Path,
    seed: int,
    progress: Callable[[CloningProgress], None] | None = None,
    *,
    config: CloningConfig = SHOPPING_CLONING,
    settling: CloningConfig = SHOPPING_SETTLING,
) -> Path:
    """Train a policy from nothing until it knows what to check, and return `folder`, now a model folder.

    Equal arguments give equal weights on the same machine.
    """
    tokenizer = _tokenizer()

    def conversations(step: int) -> list[Dialogue]:
        step_seed = seed * 1_000_003 + step
        return demonstrations(_DEMONSTRATIONS, step_seed, CARELESS) + lessons(_LESSONS, step_seed)

    def knows_enough(model: PolicyModel, step: int) -> bool:
        return min(knowledge(model, tokenizer).values()) >= _ENOUGH

    clone(conversations, folder, tokenizer=tokenizer, config=config, seed=seed, progress=progress, gate=knows_enough)
    return clone(
        lambda step: conversations(config.steps + step), folder, model=folder, tokenizer=tokenizer, config=settling,
        seed=seed, progress=progress,
    )  # fmt: skip


def knowledge(model: PolicyModel, tokenizer: Tokenizer, *, n: int = 64, seed: int = -1) -> dict[str, float]:
    """Return the share of right verdicts on `n` unseen close calls each: price wrong, rating wrong, nothing wrong.

    The page stands where it stands in an episode: after the goal and a list.
    """
    rng = random.Random(f"shopping knowledge {seed}")
    shares: dict[str, float] = {}
    for fault in _CHECKED:
        chats = [
            [
                ("user", goal_sentence(goal)),
                ("user", _list_lesson(goal, rng)[0]),
                ("user", item_page(_item(goal, {fault or _NONE}, rng, close_share=1.0))),
                ("assistant", fault or _NONE),
            ]
            for goal, _ in zip(_training_goals(rng), range(n), strict=False)
        ]
        scores = score_chats(model, tokenizer, chats)
        shares[fault or "nothing"] = sum(score.correct == score.tokens for score in scores) / n
    return shares


def shopping_grpo(model: Path, updates: int, *, seed: int = 0, **changes: Any) -> GRPO:
    """Return the learner that goes with the warm start; `changes` are fields of `GRPO`.

    Both optimizers take steps whose size does not shrink with the gradient. As success rises most groups are all
    successes and say nothing, and what the others say gets noisier: twice these rates, or four steps a batch instead of
    two, reached 0.8 in 40 updates and then shook between 0.7 and 0.85, with ratios up to 50.
    """
    settings: dict[str, Any] = _step_settings(updates, seed) | {"preset": "grpo"}
    return GRPO(model, **(settings | changes))


def shopping_ppo(model: Path, updates: int, *, seed: int = 0, **changes: Any) -> PPO:
    """Return a learner with a critic that takes the same steps as `shopping_grpo`; `changes` are fields of `PPO`."""
    return PPO(model, **(_step_settings(updates, seed) | changes))


def shopping_learner(method: str, model: Path, updates: int, *, seed: int = 0) -> PolicyLearner:
    """Return the learner of one of `SHOPPING_METHODS`. They differ in how credit is assigned and in nothing else.

    Raises: ConfigError: there is no such method.
    """
    if method == "trajectory":
        return shopping_grpo(model, updates, seed=seed)
    if method == "step_groups":
        return shopping_grpo(model, updates, seed=seed, credit=StepGroups())
    if method == "turn_gae":
        return shopping_ppo(model, updates, seed=seed, credit=GAEConfig(level="turn"))
    if method == "bilevel_gae":
        return shopping_ppo(model, updates, seed=seed, credit=GAEConfig(level="bilevel"))
    raise ConfigError(f"method must be one of {', '.join(SHOPPING_METHODS)}: got {method!r}")


def _step_settings(updates: int, seed: int) -> dict[str, Any]:
    """Return what all learners of this task share: the off-policy correction, and how large their steps are."""
    return {
        "off_policy": "decoupled",
        "epochs": 1,
        "muon_lr": 2e-3,
        "adamw_lr": 1e-3,
        "schedule": Schedule(warmup_updates=5, total_updates=updates, decay_start=0.2, decay_to=0.1),
        "seed": seed,
    }


def lessons(n: int, seed: int) -> list[Dialogue]:
    """Return `n` conversations about training goals: what is wrong with a page, which titles of a list fit."""
    rng = random.Random(f"shopping lessons {seed}")
    return [_lesson(goal, rng) for goal, _ in zip(_training_goals(rng), range(n), strict=False)]


def _lesson(goal: Goal, rng: random.Random) -> Dialogue:
    lesson: Dialogue = [("user", goal_sentence(goal))]
    for _ in range(_QUESTIONS):
        question, answer = _list_lesson(goal, rng) if rng.random() < _LIST_SHARE else _page_lesson(goal, rng)
        lesson += [("user", question), ("assistant", answer)]
    return lesson


def _training_goals(rng: random.Random) -> Iterator[Goal]:
    while True:
        goal = make_goal(rng)
        if split_of(Task("goal", goal_sentence(goal))) == "train":
            yield goal


def _page_lesson(goal: Goal, rng: random.Random) -> tuple[str, str]:
    """Return a page and its faults. Most pages have at most one: only the right comparison gives it away."""
    faults = {rng.choice((*_FAULTS, _NONE))}
    if rng.random() < 0.1:
        faults.add(rng.choice(_FAULTS))
    item = _item(goal, faults, rng)
    found = [name for name in violations(goal, item) if name in _FAULTS]
    rng.shuffle(found)  # the first token speaks for each fault alike
    return item_page(item), " ".join(found) or _NONE


def _item(goal: Goal, faults: set[str], rng: random.Random, *, close_share: float = 0.5) -> Item:
    """Return an item with these faults. Close calls, on this side or that of what the goal asks, are what tells whether
    two numbers are compared: a policy that knew only low ratings from high ones bought 3.5 stars when told four."""
    is_close = rng.random() < close_share
    most, least = goal.max_price, 10 * goal.min_rating
    if "price" in faults:
        price = rng.randint(most, min(99, most + 9) if is_close else 99)
    else:
        price = rng.randint(most - 10 if is_close else 10, most - 1)
    if "rating" in faults:
        tenths = rng.randint(least - 10 if is_close else 15, least - 1)
    else:
        tenths = rng.randint(least, least + 9 if is_close else 50)
    colors = rng.sample([c for c in COLORS if c != goal.color], rng.choice((1, 2)))
    if "color" not in faults:
        colors.insert(rng.randint(0, len(colors)), goal.color)
    elif rng.random() < 0.5:
        colors += rng.sample([c for c in COLORS if c != goal.color and c not in colors], 1)
    return Item("item_1", BRANDS[0], goal.use, goal.category, price, tenths / 10, tuple(colors))


def _list_lesson(goal: Goal, rng: random.Random) -> tuple[str, str]:
    """Return a list of results and the items in it whose titles fit."""
    listed, fitting = list[str](), list[str]()
    for number in rng.sample(range(1, 7), rng.randint(2, 4)):
        use = goal.use if rng.random() < 0.6 else rng.choice(USES)
        category = goal.category if rng.random() < 0.6 else rng.choice(CATEGORIES)
        brand = goal.brand if goal.brand and rng.random() < 0.6 else rng.choice(BRANDS)
        listed.append(f"item_{number} {brand} {use} {category}")
        if (use, category) == (goal.use, goal.category) and goal.brand in (None, brand):
            fitting.append(f"item_{number}")
    return f"Results: {'; '.join(listed)}.", " ".join(fitting) or "no"


def _tokenizer() -> Tokenizer:
    """Return the tokenizer of the shop, the same for every seed: its words, and the separators of its grammar."""
    texts = [text for dialogue in demonstrations(200, 0, CARELESS) for _, text in dialogue]
    return Tokenizer.train([*texts, " ".join(vocabulary())])
