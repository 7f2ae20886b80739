"""Where nothing is left to luck, every branch is the rest of the episode: to the id, and under every limit."""

from hashlib import blake2b
from random import Random
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task, ToolCall, ToolResult, ToolSpec
from turngate.envs.replay import replayed
from turngate.runtime import Dialect, Limits, Runtime, Sampling, Trajectory, Turn
from turngate.runtime.branch_outcomes import branch_outcomes
from turngate.runtime.branching import branch
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import EnvError
from turngate.runtime.testing import FakeEndpoint, FakeRenderer, FakeTransport, run_virtual
from turngate.runtime.testing.renderers import PAIR
from turngate.runtime.transport import Reply

TASK = Task("t", "Go.")
END = 260
TOOLS = (ToolSpec("add", "Adds.", {"type": "object"}),)


def number(*what: Any) -> int:
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little")


class Clockwork:
    """Answers by what was done so far and nothing else; may break, by the same rule."""

    kind = "test.clockwork"
    deterministic_step = True

    def __init__(self, turns: int, tools: tuple[ToolSpec, ...], breaks: bool) -> None:
        self.turns, self.tools, self.breaks = turns, tools, breaks
        self.done: list[tuple[str, list[tuple[str, str]]]] = []

    async def reset(self, task: Task, seed: int) -> Observation:
        self.done = []
        return Observation(task.prompt, tools=self.tools)

    async def step(self, action: Action) -> Step:
        self.done.append((action.text, [(call.name, call.arguments) for call in action.tool_calls]))
        n = number(self.done)
        if self.breaks and n % 7 == 3:
            raise EnvError("broken, as ever")
        results = tuple(ToolResult(call.id, f"result {n % 100}") for call in action.tool_calls)
        end = (End.success, End.failure)[n % 2] if len(self.done) >= self.turns else None
        return Step(Observation(f"seen {n % 1000}", results=results), {"r": n % 8 / 8}, end, valid=n % 5 > 0)

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.kind, msgspec.json.encode(self.done))

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        self.done = msgspec.json.decode(snapshot.data, type=list[tuple[str, list[tuple[str, str]]]])

    async def aclose(self) -> None:
        pass


class Unsaved(Clockwork):
    """The same, to be replayed."""

    snapshot = None  # type: ignore[assignment]
    restore = None  # type: ignore[assignment]


def says(context: Any, tools: tuple[ToolSpec, ...]) -> str:
    n = number(context)
    return f"add({n % 50})" if tools and n % 3 == 0 else ("ab", "abab", "cab", "x" * (n % 9 + 1), "hello ab")[n % 5]


def ids_server(tools: tuple[ToolSpec, ...]) -> Endpoint:
    """A server that is given ids, and writes one text now in this, now in that way."""

    def reply(path: str, body: Any) -> Reply:
        text, n = says(body["prompt"], tools), number(body["prompt"], "way")
        ids = [*(text.replace("ab", "\x00") if n % 2 else text).encode(), END]
        ids = [PAIR if i == 0 else i for i in ids]
        kept = ids[: body["max_tokens"]]
        choice: dict[str, Any] = {"text": "", "finish_reason": "stop" if kept == ids else "length", "token_ids": kept}
        choice["logprobs"] = {"token_logprobs": [-0.5] * len(kept)}
        return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))

    dialect, transport = Dialect(token_mode="tokens"), FakeTransport(reply)
    return Endpoint("http://x/v1", model="m", dialect=dialect, renderer=FakeRenderer(), transport=transport)


def chat_server(tools: tuple[ToolSpec, ...]) -> FakeEndpoint:
    def answer(messages: Any) -> str | Action:
        shown = [(m.role, m.content, [(c.name, c.arguments) for c in m.tool_calls]) for m in messages]
        text = says(shown, tools)
        call = ToolCall(f"c{len(messages)}", "add", text[4:-1])
        return Action("", (call,)) if text.startswith("add(") else text

    return FakeEndpoint(answer)


def told(turn: Turn) -> Any:
    calls = [(call.name, call.arguments) for call in turn.tool_calls]
    return turn.text, calls, turn.observation, turn.rewards, turn.valid


def check_rest(episode: Trajectory, continuation: Trajectory, turn: int) -> None:
    rest = episode.turns[turn:]
    assert [told(one) for one in continuation.turns] == [told(one) for one in rest]
    assert continuation.end is episode.end
    for one, other in zip(continuation.turns, rest, strict=True):
        if one.length:  # all but an action that is done again
            assert (one.length, one.stop_reason) == (other.length, other.stop_reason)
            seen = continuation.segments[one.segment].ids()[: one.start + one.length]
            assert seen == episode.segments[other.segment].ids()[: other.start + other.length]


@pytest.mark.parametrize("seed", range(60))
def test_a_branch_is_the_rest_of_the_episode(seed: int) -> None:
    random = Random(seed)
    tools = random.choice([(), TOOLS])
    limits = Limits(
        max_turns=random.randint(1, 9),
        max_policy_tokens=random.choice([None, random.randint(1, 40)]),
        max_context_tokens=random.choice([None, random.randint(20, 120)]),
    )
    turns, breaks = random.randint(1, 8), random.random() < 0.3

    def make() -> Clockwork:
        return Clockwork(turns, tools, breaks)

    env = random.choice([make, replayed(lambda: Unsaved(turns, tools, breaks))])
    endpoint = random.choice([ids_server, chat_server])(tools)

    async def play() -> None:
        runtime = Runtime(endpoint, limits=limits, sampling=Sampling(max_tokens=random.choice([5, 64])))
        episode = await runtime.rollout(env, TASK, seed=seed, keep_snapshots=True)
        found = await branch(runtime, env, episode, continuations=2, estimands=["Q", "V"])
        for side in (found.q, found.v):
            assert list(side) == list(range(len(episode.turns)))
            for turn, branches in side.items():
                assert (len(branches.trajectories), branches.other_context) == (2, 0)
                for one in branches.trajectories:
                    check_rest(episode, one, turn)
        for turn, outcomes in (await branch_outcomes(runtime, env, episode, outcomes=1, continuations=2)).items():
            first, *others = outcomes.trajectories[0]
            check_rest(episode, first, turn)
            for one in others:
                check_rest(episode, one, turn + 1)

    run_virtual(play())
