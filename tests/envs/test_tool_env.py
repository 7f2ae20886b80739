"""An environment made of tools: calls answered, texts scored or nudged, ends, penalties, calls written as text."""

import asyncio
import functools
import json
import random
from typing import Annotated, Any

import msgspec
import pytest

from turngate.envs import (
    Action,
    End,
    Finish,
    Observation,
    Snapshot,
    SnapshotEnv,
    Task,
    Tool,
    ToolCall,
    ToolEnv,
    ToolSet,
    replayed,
    tool,
)
from turngate.envs.testing import EnvConformance, SnapshotEnvConformance
from turngate.runtime import run_rollout
from turngate.runtime.testing import FakeEndpoint, cancel_everywhere
from turngate.runtime.types import Completion


class Vault(ToolEnv):
    """Two tools: look at a clue, and enter a code. A text is no answer."""

    async def start(self, task: Task, seed: int) -> str:
        self.code, self.tries = task.data["code"], 0
        return task.prompt

    @tool
    async def look(self, place: Annotated[str, msgspec.Meta(description="where to look")]) -> dict[str, int]:
        """Look for a clue."""
        if place != "desk":
            raise LookupError(f"there is no {place}")
        return {"code": self.code}

    @tool
    def enter(self, code: int) -> str:
        """Enter the code."""
        self.tries += 1
        self.add_reward("tries", -0.1)
        if code == self.code:
            raise Finish(1.0, text="open")
        return "closed"


TASK = Task("v", "Open the vault.", {"code": 42})


def call(name: str, call_id: str = "1", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments))


def acting(*calls: ToolCall) -> Action:
    return Action("", calls)


async def started(env: ToolEnv, task: Task = TASK) -> ToolEnv:
    await env.reset(task, 0)
    return env


class TestVaultConforms(EnvConformance):
    def make_env(self) -> Vault:
        return Vault(penalties=0.1)

    def make_task(self) -> Task:
        return TASK

    def make_actions(self) -> list[Action]:
        broken = (call("fly"), ToolCall("2", "look", "{"), call("enter", "3", code=1))
        return [acting(call("look", place="desk")), Action("hm"), acting(*broken), acting(call("enter", code=42))]


class TestVaultInTextConforms(TestVaultConforms):
    def make_env(self) -> Vault:
        return Vault(parser="hermes", system="Be quick.")

    def make_actions(self) -> list[Action]:
        texts = [
            '{"name": "look", "arguments": {"place": "desk"}}',
            "{",
            '{"name": "enter", "arguments": {"code": 42}}',
        ]
        return [Action(f"<tool_call>{text}</tool_call>") for text in texts]


async def test_an_episode_offers_its_tools_and_ends_where_a_tool_says_so():
    env = Vault(system="Be quick.")
    first = await env.reset(TASK, 0)
    assert (first.text, first.system, [t.name for t in first.tools]) == (
        "Open the vault.",
        "Be quick.",
        ["look", "enter"],
    )
    step = await env.step(acting(call("look", "a", place="desk"), call("look", "b", place="bed")))
    assert [r.text for r in step.observation.results] == [
        '{"code":42}',
        "error: look failed: LookupError: there is no bed",
    ]
    assert (step.end, step.rewards, step.valid) == (None, {}, True)
    assert step.state == {"problems": ["exception"]}
    last = await env.step(acting(call("enter", code=42)))
    assert (last.end, last.rewards) == (End.success, {"tries": -0.1, "outcome": 1.0})
    assert last.observation.results[0].text == "open"


async def test_tools_keep_the_order_of_the_class_and_a_subclass_may_replace_one():
    class Other(Vault):
        @tool
        async def look(self) -> str:
            """See nothing."""
            return "dark"

        @tool
        async def wait(self) -> None:
            """Wait."""

    first = await Other().reset(TASK, 0)
    assert [(t.name, t.description) for t in first.tools] == [
        ("look", "See nothing."),
        ("enter", "Enter the code."),
        ("wait", "Wait."),
    ]


async def test_a_turn_without_a_call_is_nudged_and_invalid():
    step = await (await started(Vault(nudge="Use a tool."))).step(Action("I think..."))
    assert (step.observation.text, step.valid, step.end) == ("Use a tool.", False, None)
    assert step.state == {"problems": ["no_call"]}


async def test_an_episode_that_goes_on_for_too_long_has_failed_unless_its_last_turn_ends_it():
    env = await started(Vault(max_turns=2))
    ends = [(await env.step(action)).end for action in (Action("hm"), acting(call("look", place="desk")))]
    assert ends == [None, End.budget]
    env = await started(Vault(max_turns=1))
    assert (await env.step(acting(call("enter", code=42)))).end is End.success
    with pytest.raises(ValueError, match="max_turns"):
        Vault(max_turns=0)


async def test_functions_alone_make_an_environment_and_their_set_counts_over_episodes():
    async def add(a: int, b: int) -> int:
        return a + b

    tools = ToolSet([add])
    make_env = functools.partial(ToolEnv, tools, score=lambda task, answer: float(answer == task.data["sum"]))
    for answer, end in (("5", End.success), ("6", End.failure)):
        env = await started(make_env(), Task("t", "2 + 3?", {"sum": "5"}))
        assert (await env.step(acting(call("add", a=2, b=3)))).observation.results[0].text == "5"
        assert (await env.step(Action(answer))).end is end
    assert tools.statistics()["calls"] == 2


async def test_a_score_may_answer_end_or_decline():
    async def score(_task: Task, answer: str) -> Finish | str | float | None:
        if answer == "raise":
            raise Finish(0.7, End.success, "raised")
        verdicts: dict[str, Any] = {"text": "warmer", "end": Finish(0.2), "number": 0, "none": None}
        return verdicts[answer]

    env = await started(ToolEnv([], score=score, start=lambda task, seed: Observation(f"seed {seed}")))
    assert env.tools.specs == ()
    assert (await env.step(Action("text"))).observation.text == "warmer"
    assert (await env.step(Action("none"))).valid is False
    assert (await env.step(Action("number"))).end is End.failure
    assert (await env.step(Action("end"))).rewards == {"outcome": 0.2}
    raised = await env.step(Action("raise"))
    assert (raised.observation.text, raised.rewards) == ("raised", {"outcome": 0.7})


async def test_of_two_ends_in_one_turn_the_first_in_the_order_of_the_calls_counts():
    @tool
    async def end(reward: float, delay: int) -> Finish:
        for _ in range(delay):
            await asyncio.sleep(0)
        return Finish(reward)

    env = await started(ToolEnv([end]))
    step = await env.step(acting(call("end", "1", reward=0.1, delay=9), call("end", "2", reward=0.9, delay=0)))
    assert step.rewards == {"outcome": 0.1}


async def test_mistakes_cost_what_was_asked():
    wrong = acting(call("fly"), call("enter", "2", code=1), call("look", "3", place="bed"), ToolCall("4", "look", "{"))
    free = await (await started(Vault())).step(wrong)
    assert free.rewards == {"tries": -0.1}
    each = await (await started(Vault(penalties=0.25))).step(wrong)
    assert each.rewards["tool_error"] == -0.5
    named = await (await started(Vault(penalties={"unknown_tool": 1, "exception": 2}))).step(wrong)
    assert named.rewards["tool_error"] == -3
    assert not named.valid
    for bad in ({"typo": 1.0}, {"cut": -1.0}, float("nan")):
        with pytest.raises(ValueError, match="penalty"):
            Vault(penalties=bad)


async def test_calls_of_a_stateful_environment_run_in_order():
    class Shelf(ToolEnv):
        sequential = True

        async def start(self, task: Task, seed: int) -> str:
            self.items: list[str] = []
            return ""

        @tool
        async def put(self, item: str) -> str:
            seen = list(self.items)
            await asyncio.sleep(0)
            self.items = [*seen, item]  # a race, if calls ran at once
            return ",".join(self.items)

    env = await started(Shelf())
    step = await env.step(acting(*(call("put", str(i), item=item) for i, item in enumerate("abc"))))
    assert [r.text for r in step.observation.results] == ["a", "a,b", "a,b,c"]


async def test_calls_written_as_text_are_described_read_and_answered_as_text():
    env = Vault(parser="hermes", system="Be quick.")
    first = await env.reset(TASK, 0)
    assert first.tools == ()
    assert first.system.startswith("Be quick.\n\n")
    assert '"name":"enter"' in first.system
    good = '<tool_call>{"name": "look", "arguments": {"place": "desk"}}</tool_call>'
    step = await env.step(Action(f"{good}<tool_call>{{</tool_call>"))
    assert step.observation.results == ()
    response, error = step.observation.text.split("</tool_response>")
    assert response == '<tool_response>\n{"code":42}\n'
    assert error.startswith("\nerror: a tool call could not be read")
    assert step.state == {"problems": ["malformed"]}
    assert not step.valid
    both = await env.step(Action(good, (call("enter", code=1),)))
    assert [r.text for r in both.observation.results] == ["closed"]
    assert '{"code":42}' in both.observation.text


async def test_calls_that_the_server_could_not_read_are_reported_beside_those_it_could():
    env = Vault(parser="hermes", tools_in_prompt=False)
    first = await env.reset(TASK, 0)
    assert ([t.name for t in first.tools], first.system) == (["look", "enter"], "")
    step = await env.step(Action('<tool_call>{"name": "look"}</tool_call>', (call("look", place="desk"),)))
    assert [r.text for r in step.observation.results] == ['{"code":42}']
    assert "a call must have arguments: got none" in step.observation.text
    assert step.state == {"problems": ["malformed"]}


async def test_an_unknown_parser_is_refused():
    with pytest.raises(ValueError, match="hermes, json, shopping"):
        ToolEnv([], parser="yaml")


async def test_what_start_and_fatal_tools_raise_is_no_answer():
    class Sandbox(ToolEnv):
        fatal = (ConnectionError,)

        @tool
        async def run(self) -> None:
            raise ConnectionError("sandbox gone")

    with pytest.raises(ConnectionError):
        await (await started(Sandbox())).step(acting(call("run")))


def test_a_step_cancelled_at_any_wait_leaves_no_call_running():
    class Slow(ToolEnv):
        running = 0

        @tool
        async def work(self) -> None:
            self.running += 1
            try:
                await asyncio.sleep(1)
            finally:
                self.running -= 1

    envs: list[Slow] = []

    async def main() -> None:
        envs.append(Slow())
        await envs[-1].reset(TASK, 0)
        try:
            await envs[-1].step(acting(call("work", "1"), call("work", "2")))
        finally:
            await envs[-1].aclose()

    assert cancel_everywhere(main, lambda outcome: None) >= 1
    assert [env.running for env in envs] == [0] * len(envs)


async def test_the_runtime_plays_an_episode_with_it():
    look = Completion("", tool_calls=(call("look", "a", place="desk"), call("jump", "b")), stop_reason="tool_calls")
    enter = Completion("", tool_calls=(call("enter", "c", code=42),), stop_reason="tool_calls")
    trajectory = await run_rollout(Vault, TASK, FakeEndpoint([look, "hm", enter]))
    assert (trajectory.end, [turn.valid for turn in trajectory.turns]) == (End.success, [False, False, True])
    assert [m.role for m in trajectory.messages][:6] == ["user", "assistant", "tool", "tool", "assistant", "user"]


def test_it_says_what_it_is_and_what_happened():
    env = Vault()
    assert repr(env).startswith("<Vault not started, turn 0, <ToolSet look, enter;")
    assert set(Vault.statistics()) >= {"calls", "unknown_tool", "timeout"}
    assert isinstance(Vault.look, Tool)


# Snapshots.


class SavedVault(Vault):
    """Says how its state is saved; the budget of turns is part of it."""

    def __init__(self) -> None:
        super().__init__(max_turns=4, penalties=0.1)

    def save(self) -> bytes:
        return str(self.tries).encode()

    def load(self, data: bytes) -> None:
        self.code, self.tries = self.task.data["code"], int(data)

    @tool
    def count(self) -> int:
        """Count the tries."""
        return self.tries


class TestSavedVaultConforms(SnapshotEnvConformance):
    def make_env(self) -> SavedVault:
        return SavedVault()

    def make_task(self) -> Task:
        return TASK

    def make_actions(self) -> list[Action]:
        return [acting(call("enter", code=1)), Action("hm"), acting(call("count")), acting(call("enter", code=7))]


class Dice(ToolEnv):
    """Throws dice; its hooks are coroutines."""

    async def start(self, task: Task, seed: int) -> str:
        self.thrown: list[int] = []
        self.reseed_now(seed)
        return "Throw."

    def reseed_now(self, seed: int) -> None:
        self.rng = random.Random(f"dice {seed}")

    async def reseed(self, seed: int) -> None:
        self.reseed_now(seed)

    async def save(self) -> bytes:
        return bytes(self.thrown)

    async def load(self, data: bytes) -> None:
        self.thrown = list(data)

    @tool
    async def throw(self) -> int:
        """Throw a die."""
        self.thrown.append(self.rng.randint(1, 6))
        if len(self.thrown) == 4:
            raise Finish(sum(self.thrown) / 24)
        return self.thrown[-1]


class TestDiceConform(SnapshotEnvConformance):
    stochastic = True

    def make_env(self) -> Dice:
        return Dice()

    def make_task(self) -> Task:
        return Task("dice")

    def make_actions(self) -> list[Action]:
        return [acting(call("throw")), acting(call("throw", "1"), call("throw", "2")), acting(call("throw"))]


class ReplayableVault(Vault):
    deterministic_step = True


make_replayed_vault = replayed(ReplayableVault)


class TestReplayedVaultConforms(SnapshotEnvConformance):
    factory_path = f"{__name__}:make_replayed_vault"

    def make_env(self) -> Any:
        return make_replayed_vault()

    def make_task(self) -> Task:
        return TASK

    def make_actions(self) -> list[Action]:
        return TestVaultConforms().make_actions()


def test_only_an_environment_that_says_how_it_is_saved_has_snapshots():
    class Editor(ToolEnv):
        @tool
        def save(self) -> str:
            """Save the file."""
            return "saved"

        @tool
        def load(self) -> str:
            """Load the file."""
            return "loaded"

    assert isinstance(SavedVault(), SnapshotEnv)
    assert not isinstance(Vault(), SnapshotEnv)
    assert not isinstance(Editor(), SnapshotEnv)


async def test_snapshots_of_one_class_are_refused_by_another_and_must_be_bytes():
    class Wrong(SavedVault):
        def save(self) -> Any:
            return "text"

    env, other = await started(Wrong()), await started(SavedVault())
    with pytest.raises(TypeError, match=r"save must return bytes: got str \(Wrong\)"):
        await env.snapshot()
    snapshot = await other.snapshot()
    assert snapshot.kind == f"{__name__}.SavedVault"
    with pytest.raises(ValueError, match="snapshot must be of kind"):
        await env.restore(snapshot, 0)
    with pytest.raises(ValueError, match="snapshot must be of kind"):
        await other.restore(Snapshot("x", snapshot.data), 0)


async def test_the_counts_of_tools_stay_shared_after_a_restore():
    before = SavedVault.statistics()["calls"]
    env = await started(SavedVault())
    await env.restore(await env.snapshot(), 0)
    await env.step(acting(call("count")))
    assert SavedVault.statistics()["calls"] == before + 1


async def test_an_environment_made_of_functions_can_be_replayed_when_its_maker_says_that_it_has_no_luck():
    async def add(a: int, b: int) -> int:
        return a + b

    make = functools.partial(ToolEnv, ToolSet([add]), score=lambda task, answer: float(answer == "5"), max_turns=3)
    with pytest.raises(TypeError, match="needs deterministic_step = True or a method reseed"):
        replayed(make)()
    env = replayed(make, deterministic_step=True)()
    await env.reset(TASK, 0)
    await env.step(acting(call("add", a=2, b=3)))
    snapshot = await env.snapshot()
    for text, end in (("5", End.success), ("6", End.failure), ("5", End.success)):
        await env.restore(snapshot, 1)
        assert (await env.step(Action(text))).end is end
