"""How turns are chosen: what a guided one is shown, and which weights are on its record."""

import asyncio
import itertools

import pytest

from tests.runtime.test_base_draw import MODES, answers
from turngate.envs.base import Task
from turngate.envs.fakes import EchoEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.context import last_turns
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.guidance import Guidance, QValues
from turngate.runtime.testing import FakeEndpoint, run_virtual

TASK = Task("t", "say something")


def test_new_weights_between_draws_and_values_are_on_the_tokens_that_they_sampled():
    async def play(favourite):
        latencies = itertools.cycle([1.0, 3.0])  # the second draw is answered under newer weights
        endpoint = FakeEndpoint(lambda _: "ab", latency_s=lambda: next(latencies), policy_version=4)

        async def q(point, candidates):
            assert point.policy_version == 4
            assert endpoint.policy_version == 5
            endpoint.policy_version = 6
            return QValues([float(index == favourite) for index in range(2)], version=9)

        runtime = Runtime(endpoint, limits=Limits(max_turns=1), guidance=Guidance(q, beta=1000.0, draws=2))
        asyncio.get_running_loop().call_later(2.0, setattr, endpoint, "policy_version", 5)
        return await runtime.rollout(lambda: EchoEnv(1), TASK)

    for favourite, versions in ((0, [4, 4, 4]), (1, [4, 4, 5])):
        trajectory = run_virtual(play(favourite))
        (turn,) = trajectory.turns
        assert turn.decision.chosen == favourite
        assert list(trajectory.segments[0].sampled_versions()) == versions
        assert (turn.version_sent, turn.version_received, turn.decision.value_version) == (4, versions[-1], 9)
        assert trajectory.version_range() == (4, versions[-1])


@pytest.mark.parametrize("mode", MODES)
def test_a_value_function_sees_what_the_model_was_shown_and_all_that_was_said(mode):
    seen = []

    async def q(point, candidates):
        seen.append((len(point.messages), len(point.history), point.turn))
        return [float(index) for index in range(len(candidates))]

    async def play():
        endpoint = Endpoint("http://x/v1", model="m", transport=answers(), **MODES[mode])
        runtime = Runtime(
            endpoint, limits=Limits(max_turns=3), context=last_turns(1), guidance=Guidance(q, beta=2.0, draws=3)
        )
        return await runtime.rollout(lambda: EchoEnv(9), TASK)

    trajectory = run_virtual(play())
    assert seen == [(1, 1, 0), (3, 3, 1), (3, 5, 2)]
    for turn in trajectory.turns:
        decision = turn.decision
        chosen = decision.candidates[decision.chosen]
        assert (decision.fallback, chosen.text) == ("", turn.text)
        if mode != "text":
            segment = trajectory.segments[turn.segment]
            recorded = segment.ids()[turn.start : turn.start + turn.length]
            assert recorded.tolist() == memoryview(chosen.token_ids).cast("i").tolist()
