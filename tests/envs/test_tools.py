"""A tool: made from a function, bound like a method, strict about arguments."""

import asyncio
import json
import threading
from datetime import date
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs import End, Finish, Tool, tool
from turngate.envs.tools import BadArguments, BadJson


class Point(msgspec.Struct):
    x: int


@tool
async def plot(point: Point, label: str = "none", on: date | None = None, way: Literal["up", "down"] = "up") -> str:
    """Plot."""
    return f"{point.x} {label} {on} {way}"


@tool(name="halve", timeout_s=5, max_concurrent=2, max_chars=100)
def half(n: float) -> float:
    """Halve."""
    return n / 2


class Counter:
    def __init__(self) -> None:
        self.n = 0

    @tool
    async def add(self, by: int = 1) -> int:
        """Add."""
        self.n += by
        return self.n


def test_a_tool_says_what_it_is_and_still_is_a_function():
    assert repr(half) == "<Tool halve in threads, 2 at once>"
    assert (half.spec.description, half.timeout_s, half.max_chars) == ("Halve.", 5, 100)
    assert half(3) == 1.5
    assert (plot.name, plot.is_async) == ("plot", True)


async def test_arguments_are_converted_and_the_functions_own_defaults_hold():
    arguments = plot.read('{"point": {"x": 3}, "on": "2026-11-30"}')
    assert arguments == {"point": Point(3), "on": date(2026, 11, 30)}
    assert await plot.invoke(arguments) == "3 none 2026-11-30 up"
    assert await half.invoke(half.read('{"n": 3}')) == 1.5


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        ("{", BadJson, "column 2"),
        ("{'n': 1}", BadJson, "column 2"),
        ('{"n": NaN}', BadJson, "NaN"),
        ('{"n": 1, "n": 2}', BadJson, "'n' twice"),
        ("[" * 100_000, BadJson, "too deep"),
        ('{"n": "\ud800"}', BadJson, "surrogates"),
        ('{"n": 1} {"n": 2}', BadJson, "Extra data"),
        ("", BadArguments, "missing required field `n`"),
        ("{}", BadArguments, "missing required field `n`"),
        ('{"n": "1"}', BadArguments, r"Expected `float`, got `str` - at `\$.n`"),
        ('{"n": true}', BadArguments, "got `bool`"),
        ('{"n": null}', BadArguments, "got `null`"),
        ('{"n": 1, "m": 2}', BadArguments, "unknown field `m`"),
        ("[1]", BadArguments, "Expected `object`, got `array`"),
        ('"{\\"n\\": 1}"', BadArguments, "got `str`"),
        ("null", BadArguments, "got `null`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_path(arguments, kind, why):
    with pytest.raises(kind, match=why):
        half.read(arguments)


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
arguments_like = st.dictionaries(st.sampled_from(["point", "label", "on", "way", "x"]), json_values | st.just({"x": 1}))


@given(arguments_like.map(json.dumps) | json_values.map(json.dumps) | st.text(st.characters()))
def test_whatever_the_arguments_they_fit_exactly_or_are_refused(text):
    try:
        arguments = plot.read(text)
    except (BadJson, BadArguments):
        return
    assert isinstance(arguments["point"], Point)
    assert isinstance(arguments["point"].x, int)
    assert arguments.keys() <= {"point", "label", "on", "way"}
    assert isinstance(arguments.get("label", ""), str)
    assert isinstance(arguments.get("on"), date | None)
    assert arguments.get("way", "up") in ("up", "down")


async def test_a_method_binds_to_its_instance_and_shares_the_slots():
    first, second = Counter(), Counter()
    assert await first.add.invoke({"by": 2}) == 2
    assert await second.add() == 1
    assert first.add._slots is second.add._slots is Counter.add._slots
    with pytest.raises(TypeError, match="must be bound"):
        await Counter.add.invoke({})


async def test_what_would_stop_the_loop_or_the_thread_is_an_error():
    def leave() -> None:
        raise SystemExit(3)

    async def leave_at_once() -> None:
        raise KeyboardInterrupt

    def stop() -> None:
        raise StopIteration

    def cancelled() -> None:
        raise asyncio.CancelledError

    for function in (leave, leave_at_once, stop, cancelled):
        with pytest.raises(RuntimeError):
            await Tool.of(function).invoke({})


async def test_a_plain_function_that_returns_a_coroutine_is_awaited():
    async def later() -> int:
        return 3

    assert await Tool.of(lambda: later(), name="later").invoke({}) == 3


async def test_skyrl_53_a_blocking_function_does_not_block_the_loop():
    go = threading.Event()

    @tool
    def block() -> str:
        return "gone on" if go.wait(5) else "blocked"

    call = asyncio.ensure_future(block.invoke({}))
    await asyncio.sleep(0)  # the loop goes on while the function blocks, or this would never be reached
    go.set()
    assert await call == "gone on"


def test_settings_that_make_no_sense_are_refused():
    for settings in ({"timeout_s": 0}, {"timeout_s": float("nan")}, {"max_concurrent": 0}, {"max_chars": 0}):
        with pytest.raises(ValueError, match="above 0"):
            tool(**settings)(lambda: None)


def test_an_end_is_what_the_reward_says_unless_told():
    assert (Finish(1).end, Finish(1).rewards) == (End.success, {"outcome": 1.0})
    assert Finish().end is End.failure
    assert Finish(0.3, End.failure, "no").text == "no"
    assert Finish({"outcome": 1.0, "speed": 0.5}).rewards == {"outcome": 1.0, "speed": 0.5}
    with pytest.raises(ValueError, match="by the task's rules"):
        Finish(1, End.tool_error)
