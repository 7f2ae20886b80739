"""What the runtime demands of an environment's and a context function's answers, and how they become messages."""

import math
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from turngate.envs.base import Action, End, Observation, Snapshot, Step, ToolCall, ToolResult, ToolSpec
from turngate.runtime.errors import EnvError, ToolError
from turngate.runtime.types import Message

__all__ = [
    "answer_messages",
    "answer_text",
    "check_action",
    "check_messages",
    "check_snapshot",
    "check_start",
    "checked_reward",
    "checked_rewards",
    "describe_error",
    "said_last",
    "writable",
]

_MAX_REWARD = 1e30
"""Far below the largest float32, in which learners compute, so that no sum of rewards becomes infinite."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_encode = msgspec.json.Encoder().encode


def checked_rewards(step: Step) -> dict[str, float]:
    """Require a well-formed step and return its rewards as floats. Raises EnvError naming what is wrong."""
    _require(step, Step, "step()")
    _check_observation(step.observation, "step().observation")
    end: Any = step.end
    if end is not None and (not isinstance(end, End) or end.is_failure):
        raise EnvError(
            f"env.step().end must be a terminal End, a truncation, or None: got {_show(end)}; raise an exception to "
            "fail"
        )
    valid: Any = step.valid
    if valid is not True and valid is not False and type(valid).__name__ not in ("bool", "bool_"):  # NumPy's
        raise EnvError(f"env.step().valid must be bool: got {_show(valid)}")
    if step.state is not None:
        _require(step.state, dict, "step().state")
    _require(step.rewards, dict, "step().rewards")
    rewards: dict[str, float] = {}
    for name, value in step.rewards.items():
        rewards[name] = checked_reward(name, value, "env.step().rewards")
    return rewards


def checked_reward(name: object, value: object, where: str) -> float:
    """Return one named reward as a float. Raises EnvError naming what is wrong, and `where`."""
    if problem := _text_problem(name):
        raise EnvError(f"{where}' names {problem}")
    try:
        if isinstance(value, (str, bytes)):  # float() reads those: a reply that was returned would be a reward
            raise TypeError
        number = float(value)  # type: ignore[arg-type]  # NumPy's scalars too: the record is plain JSON
    except Exception:  # whatever the value's own __float__ raises
        number = math.nan
    if not -_MAX_REWARD <= number <= _MAX_REWARD:
        raise EnvError(
            f"rewards must be finite numbers of at most {_MAX_REWARD:g}: got {_show(value)} ({where}[{name!r}])"
        )
    return number


def check_start(observation: Observation) -> None:
    """Require a first observation: with its system prompt and its tools. Raises EnvError naming what is wrong."""
    _check_observation(observation, "reset()")
    _check_text(observation.system, "reset().system")
    tools: Any = observation.tools
    _require(tools, tuple, "reset().tools")
    for index, tool in enumerate(tools):
        where = f"reset().tools[{index}]"
        _require(tool, ToolSpec, where)
        _check_text(tool.name, f"{where}.name")
        _check_text(tool.description, f"{where}.description")
        _require(tool.parameters, dict, f"{where}.parameters")
        try:
            _encode(tool)
        except Exception as error:  # whatever stands in the parameters
            raise EnvError(f"env.{where}.parameters must be a JSON schema: got {describe_error(error)}") from error


def check_snapshot(snapshot: Snapshot) -> None:
    """Require a snapshot. Raises EnvError."""
    _require(snapshot, Snapshot, "snapshot()")
    _check_text(snapshot.kind, "snapshot().kind")
    _require(snapshot.data, bytes, "snapshot().data")


def check_action(action: Action, actor: str) -> None:
    """Require of an action that something other than the model chose that it can be shown. Raises ToolError."""
    if not isinstance(action, Action):
        raise ToolError(f"action must be an Action: got {_show(action)} ({actor})")
    if problem := _text_problem(action.text):
        raise ToolError(f"action must have a text that can be sent: it {problem} ({actor})")
    if problem := _calls_problem(action.tool_calls):
        raise ToolError(f"action must have tool calls that can be sent: {problem} ({actor})")


def check_messages(shown: Sequence[Message], context: str) -> None:
    """Require of what a context function returned that it can be sent. Raises ToolError naming the function."""
    if not isinstance(shown, (list, tuple)) or not shown:
        raise ToolError(
            f"the context function must return messages, in a list or tuple: got {_show(shown)} ({context})"
        )
    for index, message in enumerate(shown):
        if not isinstance(message, Message):
            problem = f"must be a Message: got {_show(message)}"
        elif type(message.role) is not str or message.role not in _ROLES:
            problem = f"must have a role of {', '.join(sorted(_ROLES))}: got {_show(message.role)}"
        elif bad := _text_problem(message.content):
            problem = f"must have a content that can be sent: it {bad}"
        elif message.tool_call_id and (bad := _text_problem(message.tool_call_id)):
            problem = f"must have tool calls that can be sent: tool_call_id {bad}"
        elif bad := _calls_problem(message.tool_calls):
            problem = f"must have tool calls that can be sent: {bad}"
        else:
            continue
        raise ToolError(f"message {index} of the context function {problem} ({context})")


def answer_messages(observation: Observation) -> list[Message]:
    """Return an observation as messages: tool results in their order, then the text unless it is empty."""
    messages = [Message("tool", result.text, (), result.call_id) for result in observation.results]
    if observation.text:
        messages.append(Message("user", observation.text))
    return messages


def answer_text(observation: Observation) -> str:
    """Return all an observation says, for people."""
    texts = [result.text for result in observation.results]
    return "\n".join([*texts, observation.text] if observation.text else texts)


def said_last(messages: Sequence[Message]) -> str:
    """Return what the environment said after the last action, as turns record it."""
    texts: list[str] = []
    for message in reversed(messages):
        if message.role in ("assistant", "system"):
            break
        texts.append(message.content)
    return "\n".join(reversed(texts))


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    try:
        text = str(error)
    except (Exception, SystemExit):  # whatever its own __str__ raises
        text = "an error whose text cannot be had"
    return writable(f"{type(error).__name__}: {text}{at}")


def writable(text: str) -> str:
    """Return text that UTF-8 can carry: lone surrogates, which it cannot, as escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _check_observation(observation: Observation, where: str) -> None:
    _require(observation, Observation, where)
    _check_text(observation.text, f"{where}.text")
    results: Any = observation.results
    if type(results) is tuple and not results:
        return
    _require(results, tuple, f"{where}.results")
    for index, result in enumerate(results):
        _require(result, ToolResult, f"{where}.results[{index}]")
        _check_text(result.text, f"{where}.results[{index}].text")
        _check_text(result.call_id, f"{where}.results[{index}].call_id")


def _require(value: object, kind: type, where: str) -> None:
    if isinstance(value, kind) or (kind is tuple and isinstance(value, list)):
        return
    raise EnvError(f"env.{where} must be {kind.__name__}: got {type(value).__name__} ({_show(value, str)!r})")


def _check_text(text: str, where: str) -> None:
    if type(text) is str and text.isascii():
        return
    if problem := _text_problem(text):
        raise EnvError(f"env.{where} {problem}")


def _text_problem(text: object) -> str:
    """Say what keeps `text` from being sent; empty when nothing does."""
    if not isinstance(text, str):
        return f"must be str: got {type(text).__name__}"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"must be text that UTF-8 can carry: {error}"
    return ""


def _calls_problem(calls: Any) -> str:
    if calls == ():
        return ""
    if not isinstance(calls, (list, tuple)):
        return f"got {_show(calls)}"
    for call in calls:
        if not isinstance(call, ToolCall):
            return f"got {_show(call)}"
        for text in (call.id, call.name, call.arguments):
            if bad := _text_problem(text):
                return bad
    return ""


def _show(value: object, how: Any = repr) -> str:
    """Return the start of a value's text, for an error message; a text that itself fails must not fail the message."""
    try:
        return writable(str(how(value))[:80])
    except Exception:
        return f"a {type(value).__name__}"
