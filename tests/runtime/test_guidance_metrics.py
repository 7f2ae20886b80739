"""What guidance did, in the metrics of a batch."""

import math
from array import array

import pytest

from turngate.envs.base import End, Task
from turngate.envs.fakes import EchoEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.buffer import Buffer
from turngate.runtime.gauges import RunGauges
from turngate.runtime.guidance import Guidance, QValues
from turngate.runtime.guidance_metrics import guidance_row
from turngate.runtime.ledger import Ledger
from turngate.runtime.metrics import LoopLagMeter
from turngate.runtime.slots import Slots
from turngate.runtime.staleness import StalenessLimit
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Batch, Group, GuidedTokens, Segment, Trajectory, Turn

TASK = Task("t")


def played(guidance, *, turns=4, policy_version=0):
    async def play():
        texts = iter(["a", "b", "a", "b"] * 8)
        endpoint = FakeEndpoint(lambda _: next(texts), policy_version=policy_version)
        runtime = Runtime(endpoint, limits=Limits(max_turns=turns))
        return await runtime.rollout(lambda: EchoEnv(turns), TASK, guidance=guidance)

    return run_virtual(play())


async def q(point, candidates):
    if point.turn == 1:
        raise RuntimeError("no")
    return QValues([float(one.text == "a") for one in candidates], version=3)


def test_shares_means_and_reasons_come_from_the_records():
    row = guidance_row([played(Guidance(q, beta=2.0, draws=2))])
    low, high = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2))
    assert row["guidance_decisions"] == 4
    assert row["guidance_share"] == 0.75
    assert row["guidance_fallback_error"] == 0.25
    assert (row["guidance_distinct"], row["guidance_draws"], row["guidance_beta"]) == (2.0, 2.0, 2.0)
    assert row["guidance_kl"] == pytest.approx(low * math.log(2 * low) + high * math.log(2 * high))
    assert (row["guidance_value_version_min"], row["guidance_value_version_max"]) == (3.0, 3.0)


def test_a_schedule_by_policy_version_shows_in_the_row():
    schedule = Guidance(q, beta=lambda version: 10.0 / version, draws=2)
    assert guidance_row([played(schedule, policy_version=2)])["guidance_beta"] == 5.0
    assert guidance_row([played(schedule, policy_version=5)])["guidance_beta"] == 2.0


def test_without_guidance_there_are_no_columns():
    assert guidance_row([played(None)]) == {}
    assert guidance_row([]) == {}


def test_guided_tokens_say_how_far_they_are_from_the_base():
    tokens = GuidedTokens(beta=2.0, top_k=8, tail="base", value_version=1, base_logprobs=array("f", [-2, -1]).tobytes())
    segment = Segment.of([1, 2, 3], [0, 1, 1], [0.0, -1.0, -0.5], [-1, 0, 0], [-1, 0, 0])
    turn = Turn(index=0, segment=0, start=1, length=2, text="", guided_tokens=tokens)
    row = guidance_row([Trajectory(id="x", task=TASK, turns=(turn,), segments=(segment,), end=End.success)])
    assert row == {"guidance_token_share": 1.0, "guidance_token_kl": 0.75, "guidance_token_beta": 2.0}


def test_the_row_of_an_update_has_the_columns_of_its_guided_batch():
    trajectory = played(Guidance(q, beta=lambda version: 4.0 - version, draws=2), policy_version=1)
    batch = Batch(groups=(Group(id="g", task=TASK, order=0, trajectories=(trajectory,)),), policy_version=1)
    buffer = Buffer(groups_per_batch=1, limit=StalenessLimit())
    row = RunGauges(Slots(1), LoopLagMeter()).row(batch, buffer, Ledger())
    assert (row["guidance_share"], row["guidance_fallback_error"], row["guidance_beta"]) == (0.75, 0.25, 3.0)
    assert row["guidance_value_s"] >= 0
