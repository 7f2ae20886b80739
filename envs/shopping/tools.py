"""The same shop for models that call tools: one function per action, results matched by call id."""

import msgspec

from turngate.envs.base import Action, Observation, Step, Task, ToolCall, ToolResult, ToolSpec
from turngate.envs.shopping.env import ShoppingEnv
from turngate.envs.shopping.grammar import MAX_ARGUMENT_CHARS, Command

__all__ = ["ARGUMENT_NAMES", "SHOPPING_TOOLS", "ShoppingToolEnv"]

TOOL_INSTRUCTIONS = "You are shopping. Use the tools; buying ends the task."

ARGUMENT_NAMES = {"search": "query", "click": "item", "select": "color", "buy": "item"}
_DESCRIPTIONS = {
    "search": "List items whose title matches the words of the query.",
    "click": "Open a listed item: shows its price, rating and colors.",
    "select": "Choose a color of the open item.",
    "back": "Leave the open item and return to the list.",
    "buy": "Buy the open item in the selected color. Final: ends the task.",
}


def _tool_spec(verb: str) -> ToolSpec:
    name = ARGUMENT_NAMES.get(verb)
    properties = {name: {"type": "string"}} if name else {}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return ToolSpec(verb, _DESCRIPTIONS[verb], schema)


SHOPPING_TOOLS = tuple(_tool_spec(verb) for verb in _DESCRIPTIONS)


class ShoppingToolEnv(ShoppingEnv):
    """The shop with tools. Calls of one turn run in order and each counts as one action; none runs after the end."""

    kind = "turngate.shopping"  # the same states: a snapshot may move between the two forms

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; the first observation carries the tools."""
        await super().reset(task, seed)
        system = TOOL_INSTRUCTIONS if self._instructions else ""
        return Observation(task.prompt, system=system, tools=SHOPPING_TOOLS)

    async def step(self, action: Action) -> Step:
        """Execute the calls. A turn without calls is invalid. When cancelled while waiting, nothing has been done."""
        await self._wait()
        if not action.tool_calls:
            return self.shop.do(None)
        steps = [self.shop.do(_parse_call(call)) for call in action.tool_calls]
        results = tuple(
            ToolResult(call.id, step.observation.text) for call, step in zip(action.tool_calls, steps, strict=True)
        )
        rewards = {name: value for step in steps for name, value in step.rewards.items()}
        valid = all(step.valid for step in steps)
        return Step(Observation(results=results), rewards, steps[-1].end, valid, steps[-1].state)


def _parse_call(call: ToolCall) -> Command | None:
    """Return the command a call stands for, or None when name or arguments do not fit the schema."""
    if call.name not in _DESCRIPTIONS:
        return None
    name = ARGUMENT_NAMES.get(call.name)
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, str])
    except (msgspec.DecodeError, UnicodeEncodeError):  # a lone surrogate cannot be encoded
        return None
    if set(arguments) != ({name} if name else set()):
        return None
    argument = arguments[name].strip() if name else ""
    return Command(call.name, argument) if len(argument) <= MAX_ARGUMENT_CHARS else None
