"""A set of tools: one answer per call in order, and whatever goes wrong is an answer with a name, counted."""

import asyncio
import contextlib
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs import Finish, Tool, ToolAnswer, ToolCall, ToolSet, tool
from turngate.envs.tool_set import MODEL_FAULTS, TOOL_FAULTS
from turngate.runtime.testing import cancel_everywhere, run_virtual


def call(name: str, call_id: str = "1", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments))


@tool
async def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


@tool(timeout_s=10)
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return f"waited {seconds:g} s"


async def answer_of(function: Any, **settings: Any) -> ToolAnswer:
    tools = ToolSet([Tool.of(function, name="f", **settings)])
    (answer,) = await tools.run([call("f")])
    counts = tools.statistics()
    assert counts.pop("calls") == 1
    assert {name for name, n in counts.items() if n} == ({answer.problem} if answer.problem else set())
    return answer


def test_verl_3991_each_of_several_calls_has_exactly_one_answer_in_the_order_of_the_calls():
    async def main() -> tuple[list[ToolAnswer], float]:
        delays = [3, 1, 2, 0]
        answers = await ToolSet([wait]).run([call("wait", str(i), seconds=s) for i, s in enumerate(delays)])
        return answers, asyncio.get_running_loop().time()

    answers, seconds = run_virtual(main())
    assert [a.result.call_id for a in answers] == ["0", "1", "2", "3"]
    assert [a.result.text for a in answers] == ["waited 3 s", "waited 1 s", "waited 2 s", "waited 0 s"]
    assert seconds == 3


async def test_verl_3070_a_tool_that_does_not_exist_is_an_answer_with_the_names_of_those_that_do():
    tools = ToolSet([add, wait])
    made_up, good = await tools.run([call("multiply", "1"), call("add", "2", a=1)])
    assert made_up.result.text == "error: there is no tool 'multiply'; the tools are: add, wait"
    assert (made_up.problem, good.result.text, good.problem) == ("unknown_tool", "2", "")
    assert tools.statistics()["unknown_tool"] == 1


@pytest.mark.parametrize(
    ("arguments", "problem", "text"),
    [
        ('{"a": 1', "bad_json", "the arguments of add are not valid JSON"),
        ("<a>1</a>", "bad_json", "the arguments of add are not valid JSON"),
        ("{}", "bad_arguments", "missing required field `a`"),
        ('{"a": "1"}', "bad_arguments", "Expected `int`, got `str`"),
    ],
)
async def test_verl_7044_malformed_arguments_are_an_answer_and_spoil_no_other_call(arguments, problem, text):
    bad, good = await ToolSet([add]).run([ToolCall("1", "add", arguments), call("add", "2", a=1)])
    assert (bad.problem, good.result.text) == (problem, "2")
    assert text in bad.result.text
    assert bad.result.call_id == "1"


async def test_a_second_call_with_the_same_id_is_not_run():
    ran: list[int] = []

    @tool
    async def note(n: int) -> None:
        ran.append(n)

    answers = await ToolSet([note]).run([call("note", "x", n=1), call("note", "x", n=2), call("note", "y", n=3)])
    assert [a.problem for a in answers] == ["", "duplicate_id", ""]
    assert ran == [1, 3]
    no_ids = await ToolSet([note]).run([call("note", "", n=1), call("note", "", n=2)])
    assert [a.problem for a in no_ids] == ["", ""]


async def test_only_so_many_calls_of_a_turn_are_run():
    answers = await ToolSet([add], max_calls=2).run([call("add", str(i), a=i) for i in range(4)])
    assert [a.problem for a in answers] == ["", "", "too_many_calls", "too_many_calls"]


async def test_results_that_are_no_text_are_json_and_long_ones_are_cut():
    async def nothing() -> None: ...
    async def listing() -> list[object]:
        return [{"a": 1}, None, "é"]

    async def long() -> str:
        return "x" * 1000

    async def secret() -> object:
        return object()

    async def half_a_character() -> str:
        return "\ud800"

    assert (await answer_of(nothing)).result.text == "null"
    assert (await answer_of(listing)).result.text == '[{"a":1},null,"é"]'
    cut = await answer_of(long, max_chars=10)
    assert cut.result.text == "xxxxxxxxxx\n[cut: these are the first 10 of 1000 characters]"
    assert cut.problem == "cut"
    bad = await answer_of(secret)
    assert (bad.problem, bad.result.text) == ("bad_result", "error: the result of f cannot be shown")
    assert (await answer_of(half_a_character)).result.text == "\\ud800"


async def test_an_exception_is_an_answer_and_logged_once(caplog):
    @tool
    async def divide(a: int, b: int) -> float:
        return a / b

    tools = ToolSet([divide])
    for _ in range(3):
        (answer,) = await tools.run([call("divide", a=1, b=0)])
        assert answer.result.text == "error: divide failed: ZeroDivisionError: division by zero"
    assert tools.statistics()["exception"] == 3
    assert [record.name for record in caplog.records] == ["turngate.envs.tool_set"]


async def test_exceptions_of_every_kind_are_answers():
    class Rude(Exception):
        def __str__(self) -> str:
            raise ValueError

    async def rude() -> None:
        raise Rude

    async def leave() -> None:
        raise SystemExit(1)

    async def cancelled() -> None:
        raise asyncio.CancelledError

    def leave_thread() -> None:
        raise SystemExit(1)

    def leave_later() -> Any:
        return leave()

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise SystemExit(1)

    async def unspeakable() -> None:
        raise Unspeakable

    for function in (rude, leave, cancelled, leave_thread, leave_later, unspeakable):
        assert (await answer_of(function)).problem == "exception"


async def test_an_exception_that_says_that_the_machinery_broke_is_raised():
    class SandboxDied(Exception): ...

    @tool
    async def run() -> None:
        raise SandboxDied("gone")

    with pytest.raises(SandboxDied):
        await ToolSet([run, add], fatal=(SandboxDied,)).run([call("add", "1", a=1), call("run", "2")])


def test_nemo_gym_162_a_tool_that_hangs_is_an_answer_after_its_deadline():
    async def main() -> tuple[list[ToolAnswer], float, dict[str, int]]:
        tools = ToolSet([wait, add])
        answers = await tools.run([call("wait", "1", seconds=1e9), call("add", "2", a=1)])
        return answers, asyncio.get_running_loop().time(), tools.statistics()

    (hung, good), seconds, counts = run_virtual(main())
    assert (hung.problem, hung.result.text) == ("timeout", "error: wait did not answer within 10 s")
    assert good.result.text == "2"
    assert seconds == 10
    assert (counts["timeout"], counts["left_behind"]) == (1, 0)


async def test_nemo_gym_162_a_thread_that_hangs_is_an_answer_too_and_keeps_its_slot_until_it_ends():
    go = threading.Event()

    @tool(timeout_s=0.02, max_concurrent=1)
    def hang() -> str:
        return str(go.wait())

    tools = ToolSet([hang, add])
    try:
        for _ in range(2):  # the second waits in vain for the slot of the first
            hung, good = await tools.run([call("hang", "1"), call("add", "2", a=1)])
            assert (hung.problem, good.problem) == ("timeout", "")
        assert hang._slots.here().free == 0
    finally:
        go.set()
    await asyncio.wait_for(hang._slots.here().acquire(), 5)


def test_no_more_calls_of_a_tool_run_at_once_than_it_allows():
    running, most = 0, 0

    @tool(max_concurrent=3)
    async def busy() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1

    async def main() -> float:
        tools = ToolSet([busy])
        turns = [[call("busy", str(i)) for i in range(4)] for _ in range(3)]
        await asyncio.gather(*(tools.run(turn) for turn in turns))  # three episodes share the limit
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 4
    assert (most, running) == (3, 0)


def test_cancelled_at_any_wait_a_turn_leaves_no_call_and_no_slot_behind():
    @tool(max_concurrent=1, timeout_s=5)
    async def step(n: int) -> int:
        await asyncio.sleep(n)
        return n

    free: list[int] = []

    async def main() -> None:
        tools = ToolSet([step], sequential=False)
        try:
            await tools.run([call("step", "1", n=1), call("step", "2", n=2), call("step", "3", n=9)])
        finally:
            free.append(step._slots.here().free)

    assert cancel_everywhere(main, lambda outcome: None) >= 1
    assert set(free) == {1}


def test_cancelled_at_any_wait_calls_in_order_do_not_go_on():
    ran: list[int] = []

    @tool
    async def step(n: int) -> int:
        ran.append(n)
        await asyncio.sleep(1)
        ran.append(-n)
        return n

    tools = ToolSet([step], sequential=True)

    def check(outcome: Any) -> None:
        assert not outcome.cancelled or ran == [n for k in range(1, 4) for n in (k, -k)][: len(ran)]
        ran.clear()

    assert cancel_everywhere(lambda: tools.run([call("step", str(n), n=n) for n in (1, 2, 3)]), check) >= 3


async def test_a_cancelled_turn_does_not_wait_for_its_threads():
    go, started, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    @tool
    def hang() -> None:
        loop.call_soon_threadsafe(started.set)
        go.wait()

    turn = asyncio.ensure_future(ToolSet([hang], grace_s=60).run([call("hang")]))
    await started.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(turn, 5)
    go.set()


def test_calls_in_order_see_what_the_ones_before_did_and_stop_at_the_end():
    said: list[str] = []

    @tool
    async def say(word: str) -> str:
        await asyncio.sleep(0 if said else 1)
        said.append(word)
        if word == "bye":
            raise Finish(0.5, text="closed")
        return " ".join(said)

    calls = [call("say", str(i), word=w) for i, w in enumerate(["a", "b", "bye", "c"])]
    answers = run_virtual(ToolSet([say], sequential=True).run(calls))
    assert [a.result.text for a in answers] == ["a", "a b", "closed", "error: not run: the episode had ended"]
    assert [a.problem for a in answers] == ["", "", "", "not_run"]
    assert [a.finish is not None for a in answers] == [False, False, True, False]
    assert said == ["a", "b", "bye"]


async def test_an_end_may_be_returned_as_well_as_raised():
    async def end() -> Finish:
        return Finish(1.0)

    finish = (await answer_of(end)).finish
    assert finish is not None
    assert finish.rewards == {"outcome": 1.0}


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'add' twice"):
        ToolSet([add, add])
    assert [spec.name for spec in ToolSet([add]).with_tools([wait]).specs] == ["add", "wait"]


def test_a_set_works_in_one_event_loop_after_another():
    tools = ToolSet([add])
    for _ in range(2):
        assert asyncio.run(tools.run([call("add", a=1)]))[0].result.text == "2"
    assert tools.statistics()["calls"] == 2
    assert repr(tools) == "<ToolSet add; 2 calls>"


texts = st.text(st.characters(), max_size=20)
calls = st.builds(
    ToolCall,
    st.sampled_from(["1", "2", ""]) | texts,
    st.sampled_from(["add", "echo"]) | texts,
    st.sampled_from(['{"a": 1}', '{"text": "hi"}', "{}", "", "[]", '{"a": 1, "a": 2}']) | texts,
)


@given(st.lists(calls, max_size=5))
def test_whatever_the_calls_each_has_an_answer_that_can_be_sent(some):
    async def echo(text: str) -> str:
        return text

    tools = ToolSet([add, Tool.of(echo)], max_calls=4)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        answers = loop.run_until_complete(tools.run(some))
    assert [a.result.call_id for a in answers] == [c.id for c in some]
    for answer in answers:
        answer.result.text.encode()
        assert answer.problem in ("", *MODEL_FAULTS, *TOOL_FAULTS)
    counts = tools.statistics()
    assert sum(counts.values()) - counts["calls"] == sum(bool(a.problem) for a in answers)
