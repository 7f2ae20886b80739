"""The page about metrics lists what learners report, all of it and nothing else."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from turngate.envs.base import End
from turngate.learners.critic import CriticConfig
from turngate.learners.episode_credit import GAEConfig
from turngate.learners.grpo import GRPO
from turngate.learners.hacking import HackingConfig
from turngate.learners.policy_learner import PolicyLearner
from turngate.learners.ppo import PPO
from turngate.learners.replay import ReplayConfig
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.step_credit import StepGroups
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.types import Batch, Candidate, Decision, GuidedTokens

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
REWARDS = [[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [1.0] * 8]
CANARY = HackingConfig(canaries=frozenset({"task"}))
CASES: dict[str, tuple[type[PolicyLearner], dict[str, Any]]] = {
    "GRPO": (GRPO, {"kl_coef": 0.1, "hacking": CANARY}),
    "step groups": (GRPO, {"credit": StepGroups()}),
    "turn index": (GRPO, {"credit": "turn_index"}),
    "vine": (GRPO, {"credit": "vine"}),
    "bi-level PPO": (PPO, {"credit": GAEConfig(level="bilevel"), "mistake_drop": 1e-3}),
    "action values": (PPO, {"critic": CriticConfig(action_values=True), "replay": ReplayConfig(start_after=8)}),
    "trunk": (
        PPO,
        {"critic": CriticConfig(place="trunk", kind="scalar"), "rewards": RewardScheme(turn_cost=0.01)},
    ),
}
"""Together, with guided experience for the first, they report everything that a learner can."""


def documented() -> set[str]:
    """Return the names of the tables about learners."""
    text = PAGE.read_text().partition("\n## Outcome\n")[2]
    cells = re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}


def pattern(name: str) -> re.Pattern[str]:
    """Return what a documented name stands for."""
    parts = [".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name)]
    return re.compile("".join(parts))


def batch(lab: Any, model: PolicyModel, seed: int) -> Batch:
    """Return a batch with a token too old to train on, an invalid turn, and an episode that was cut short."""
    made = lab.sample_batch(model, REWARDS, seed=seed, policy_version=3, version=2)
    first = made.groups[0].trajectories[0]
    wrong = msgspec.structs.replace(first, turns=(msgspec.structs.replace(first.turns[0], valid=False), first.turns[1]))
    context = np.asarray([1, 2, 3], np.int32).tobytes()
    cut = msgspec.structs.replace(made.groups[0].trajectories[1], end=End.turn_limit, last_context=context)
    members = (wrong, cut, *made.groups[0].trajectories[2:])
    groups = (msgspec.structs.replace(made.groups[0], trajectories=members), made.groups[1])
    return msgspec.structs.replace(made, groups=groups)


def guided(made: Batch) -> Batch:
    """Return the batch with one action as if chosen among draws, and another's tokens as if guided."""
    first, second, *rest = made.groups[0].trajectories
    candidates = tuple(Candidate(text=text, weight=0.5) for text in "ab")
    choice = Decision(candidates=candidates, chosen=0, beta=1.0, log_selection=0.0, source="test")
    base = np.full(second.turns[0].length, -1.0, np.float32).tobytes()
    record = GuidedTokens(beta=1.0, top_k=2, tail="base", value_version=0, base_logprobs=base)
    members = [
        msgspec.structs.replace(t, turns=(msgspec.structs.replace(t.turns[0], **change), *t.turns[1:]))
        for t, change in ((first, {"decision": choice}), (second, {"guided_tokens": record}))
    ]
    group = msgspec.structs.replace(made.groups[0], trajectories=(*members, *rest))
    return msgspec.structs.replace(made, groups=(group, *made.groups[1:]))


@pytest.fixture
def reported(lab: Any, folder: Path, model: PolicyModel) -> dict[str, set[str]]:
    """What each case reports over five updates."""
    found: dict[str, set[str]] = {}
    for case, (kind, options) in CASES.items():
        learner = kind(folder, parity="report", off_policy="decoupled", min_ess_ratio=0.0, **options)
        learner.load(None)
        found[case] = set()
        for seed in range(5):
            # On-policy data as well: fresh tokens have numbers of their own.
            made = batch(lab, model, seed) if seed else lab.sample_batch(model, REWARDS)
            made = guided(made) if case == "GRPO" and seed == 0 else made
            found[case] |= learner.update(made).metrics.keys()
    return found


def test_the_page_lists_what_learners_report_and_nothing_else(reported: dict[str, set[str]]) -> None:
    patterns = {name: pattern(name) for name in documented()}
    everything = set().union(*reported.values())
    runtime = {
        n for n in patterns if re.match(r"restart_|injected_|recovery_rate|mistake_rate|clean_success|branch_", n)
    }

    assert {n for n in everything if not any(p.fullmatch(n) for p in patterns.values())} == set()
    assert {n for n, p in patterns.items() if not any(map(p.fullmatch, everything))} - runtime == set()


def test_no_metric_has_the_name_of_another_of_the_runs(reported: dict[str, set[str]]) -> None:
    run = set(re.findall(r"`(\w+)`", PAGE.read_text().partition("\n## Outcome\n")[0]))

    assert run & set().union(*reported.values()) <= {"policy_tokens"}
