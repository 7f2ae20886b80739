"""The tool-call form: the same shop, results matched by id."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import Action, End, ToolCall
from turngate.envs.shopping import SHOPPING_TOOLS, Shop, ShoppingEnv, ShoppingToolEnv, parse_command, running_example
from turngate.envs.shopping.grammar import Command
from turngate.envs.shopping.tools import _parse_call
from turngate.envs.testing import SnapshotEnvConformance

ARGUMENTS = {"search": "query", "click": "item", "select": "color", "buy": "item"}
WALK = [
    'search["red hiking backpack"]',
    'click["item_1"]',
    "back",
    'click["item_3"]',
    'select["red"]',
    'buy["item_3"]',
]


def call(text, call_id="call_0"):
    command = parse_command(text)
    arguments = {ARGUMENTS[command.verb]: command.argument} if command.verb != "back" else {}
    return ToolCall(call_id, command.verb, json.dumps(arguments))


def act(*texts):
    return Action("", tuple(call(text, f"call_{n}") for n, text in enumerate(texts)))


class TestConformance(SnapshotEnvConformance):
    stochastic = True

    def make_env(self):
        return ShoppingToolEnv()

    def make_task(self):
        return running_example()

    def make_actions(self):
        return [act('search["backpack"]'), *(act(text) for text in WALK)]


async def started(seed=6):
    env = ShoppingToolEnv()
    await env.reset(running_example(), seed)
    return env


async def test_the_running_example_by_tool_calls():
    env, shop = await started(), Shop(running_example(), 6)
    for text in WALK:
        step, expected = await env.step(act(text)), shop.act(text)
        assert [(r.call_id, r.text) for r in step.observation.results] == [("call_0", expected.observation.text)]
        assert (step.rewards, step.end, step.valid, step.state) == (
            expected.rewards, expected.end, expected.valid, expected.state
        )  # fmt: skip
    assert shop.end is End.success


async def test_the_first_observation_offers_the_tools():
    observation = await ShoppingToolEnv().reset(running_example(), 0)
    assert observation.tools == SHOPPING_TOOLS
    assert [tool.name for tool in observation.tools] == ["search", "click", "select", "back", "buy"]
    assert observation.tools[1].parameters == {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
        "additionalProperties": False,
    }


async def test_calls_of_one_turn_run_in_order_and_each_counts():
    env = await started()
    step = await env.step(act(*WALK[:4]))
    assert [result.call_id for result in step.observation.results] == ["call_0", "call_1", "call_2", "call_3"]
    assert step.observation.results[3].text == "Price: $69. Rating: 4.5. Available colors: red, blue."
    assert step.state is not None
    assert step.state["turns"] == 4


async def test_nothing_runs_after_the_end_but_every_call_is_answered():
    env = await started()
    step = await env.step(act(*WALK, 'search["hat"]'))
    assert step.observation.results[-1].text == "The episode is over."
    assert (step.end, step.rewards) == (End.success, {"outcome": 1.0})


@pytest.mark.parametrize(
    "bad",
    [
        ToolCall("a", "fly", "{}"),
        ToolCall("a", "click", "{"),
        ToolCall("a", "click", "[]"),
        ToolCall("a", "click", '{"item": 3}'),
        ToolCall("a", "click", '{"id": "item_3"}'),
        ToolCall("a", "click", '{"item": "item_3", "fast": "yes"}'),
        ToolCall("a", "back", '{"item": "item_3"}'),
        ToolCall("a", "search", "\ud800"),
        ToolCall("a", "search", json.dumps({"query": "a" * 201})),
    ],
)
async def test_calls_that_do_not_fit_the_schema_are_answered_as_invalid(bad):
    step = await (await started()).step(Action("", (bad,)))
    assert [(r.call_id, r.text) for r in step.observation.results] == [("a", "Invalid: unknown action.")]
    assert (step.valid, step.end) == (False, None)


async def test_a_turn_without_calls_is_invalid():
    step = await (await started()).step(Action("I would like a backpack."))
    assert (step.observation.text, step.valid) == ("Invalid: unknown action.", False)


def test_missing_arguments_are_fine_where_none_are_needed():
    assert _parse_call(ToolCall("a", "back", "")) == Command("back")


async def test_snapshots_move_between_the_two_forms():
    tools, text = await started(), ShoppingEnv()
    await tools.step(act(*WALK[:4]))
    await text.restore(await tools.snapshot(), 0)
    assert (await text.step(Action('select["red"]'))).observation.text == "Red selected. Price: $69."


@given(st.text(), st.text())
def test_no_call_crashes_the_parser(name, arguments):
    _parse_call(ToolCall("a", name, arguments))
    _parse_call(ToolCall("a", "search", arguments))
