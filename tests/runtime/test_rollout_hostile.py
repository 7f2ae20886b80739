"""Rollouts against a real server that misbehaves: a typed end with a clear reason, and no harm to siblings."""

import asyncio
from random import Random

import pytest

from turngate.envs.base import End, Task
from turngate.envs.testing import EchoEnv
from turngate.runtime import retries
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.limits import Limits
from turngate.runtime.rollout import run_rollout
from turngate.runtime.testing import HostileServer
from turngate.runtime.testing.hostile import answer, broken, hang, raw, reset, status

TASK = Task("t", "Say three things.")
LIMITS = Limits(request_timeout_s=30.0)


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch):
    monkeypatch.setattr(retries, "_FIRST_DELAY_S", 0.001)


async def play(server, *, limits=LIMITS, max_retries=2):
    """Run one episode and check that its environment was closed once."""
    env = EchoEnv()
    async with Endpoint(server.url, model="m", max_retries=max_retries, random=Random(0)) as endpoint:
        trajectory = await run_rollout(lambda: env, TASK, endpoint, limits=limits)
        assert endpoint.statistics().in_flight == 0
    assert env.closed == 1
    return trajectory


def drop_a_logprob(reply):
    reply["choices"][0]["logprobs"]["content"].pop()


def spoil_a_prompt_id(reply):
    reply["prompt_token_ids"][0] = -7


NAN = (
    b'{"choices": [{"message": {"content": "a"}, "token_ids": [1], "logprobs": {"content": [{"logprob": NaN}]}}],'
    b' "prompt_token_ids": [1]}'
)


@pytest.mark.parametrize(
    ("bad", "end", "reason"),
    [
        (status(500, "boom"), End.endpoint_error, "EndpointError: server must answer: got status 500: boom"),
        (reset(), End.endpoint_error, "EndpointError: server must answer: got "),
        (broken(), End.endpoint_error, "EndpointError: server must answer: got "),
        (raw(NAN), End.endpoint_error, "MalformedReply: reply must be a completion object"),
        (raw(b"<html>"), End.endpoint_error, "MalformedReply: reply must be a completion object"),
        (answer("a", drop_a_logprob), End.endpoint_error, "MalformedReply: logprobs must align with token_ids"),
        (answer("a", spoil_a_prompt_id), End.endpoint_error, "MalformedReply: token ids must be integers"),
        (
            status(401, "no key"),
            End.endpoint_error,
            "EndpointRefused: request must be acceptable to the server",
        ),
        (status(400, "maximum context length is 8"), End.context_overflow, "request must be acceptable to the server"),
    ],
)
async def test_what_the_server_does_wrong_ends_the_episode_with_the_reason_and_the_turns_before(bad, end, reason):
    async with HostileServer(answer("one"), bad) as server:
        trajectory = await play(server)
    assert (trajectory.end, [turn.text for turn in trajectory.turns]) == (end, ["one"])
    assert trajectory.error.startswith(reason)
    assert "turn 1)" in trajectory.error
    assert trajectory.policy_tokens == 4


async def test_a_server_that_hangs_is_an_endpoint_error_at_the_request_deadline():
    async with HostileServer(answer("one"), hang()) as server:
        trajectory = await play(server, limits=Limits(request_timeout_s=0.1))
    assert (trajectory.end, len(trajectory.turns)) == (End.endpoint_error, 1)
    assert trajectory.error.startswith("EndpointTimeout: reply must arrive within 0.1 s")


async def test_trouble_that_passes_is_not_seen_in_the_trajectory():
    behaviours = [status(503), answer("one"), reset(), answer("two"), broken(), answer("three")]
    async with HostileServer(*behaviours) as server:
        trajectory = await play(server)
    assert (trajectory.end, trajectory.error) == (End.success, "")
    assert [turn.text for turn in trajectory.turns] == ["one", "two", "three"]
    assert len(trajectory.segments) == 1  # a retry is not a second turn


async def test_one_poisoned_rollout_harms_no_sibling():
    def poison(reply):
        # Bytes of "poison" somewhere in the prompt.
        if bytes(i for i in reply["prompt_token_ids"] if i < 256).find(b"poison") >= 0:
            reply["choices"][0]["token_ids"].append(1)

    async with HostileServer(answer("ok", poison)) as server, Endpoint(server.url, model="m") as endpoint:
        tasks = [Task(str(n), "poison" if n == 3 else "fine") for n in range(8)]
        trajectories = await asyncio.gather(*(run_rollout(EchoEnv, task, endpoint) for task in tasks))
    assert [t.end for t in trajectories] == [End.endpoint_error if n == 3 else End.success for n in range(8)]
