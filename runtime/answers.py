"""What the runtime demands of an environment's answers, and how they become messages."""

import math
import traceback
from typing import Any

from turngate.envs.base import End, Observation, Snapshot, Step
from turngate.runtime.errors import EnvError
from turngate.runtime.types import Message

__all__ = [
    "answer_messages",
    "answer_text",
    "check_observation",
    "check_snapshot",
    "checked_rewards",
    "describe_error",
]


def checked_rewards(step: Step) -> dict[str, float]:
    """Require a well-formed step and return its rewards as floats. Raises EnvError naming what is wrong."""
    _require(step, Step, "step()")
    check_observation(step.observation, "step().observation")
    end: Any = step.end
    if end is not None and (not isinstance(end, End) or end.is_failure):
        raise EnvError(
            f"env.step().end must be a terminal End, a truncation, or None: got {end!r}; raise an exception to fail"
        )
    rewards: dict[str, float] = {}
    for name, value in step.rewards.items():
        try:
            rewards[name] = number = float(value)  # numpy's scalars too: the record is plain JSON
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise EnvError(f"rewards must be finite numbers: got {value!r} (env.step().rewards[{name!r}])")
    return rewards


def check_observation(observation: Observation, where: str) -> None:
    """Require an observation whose texts can be sent. Raises EnvError."""
    _require(observation, Observation, where)
    _check_text(observation.text, f"{where}.text")
    for result in observation.results:
        _check_text(result.text, f"{where}.results")


def check_snapshot(snapshot: Snapshot) -> None:
    """Require a snapshot. Raises EnvError."""
    _require(snapshot, Snapshot, "snapshot()")


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


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def _require(value: object, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise EnvError(f"env.{where} must be {kind.__name__}: got {type(value).__name__} ({str(value)[:80]!r})")


def _check_text(text: str, where: str) -> None:
    if not isinstance(text, str):
        raise EnvError(f"env.{where} must be str: got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EnvError(f"env.{where} must be text that UTF-8 can carry: {error}") from error
