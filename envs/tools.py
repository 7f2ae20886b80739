"""Tools from typed Python functions: OpenAI-style definitions, and calls whose arguments are checked.

@tool
async def search(query: Annotated[str, msgspec.Meta(description="words to look for")], limit: int = 10) -> list[str]:
    "List titles that contain all words."
"""

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast, overload

import msgspec

from turngate.envs.base import End, ToolSpec
from turngate.envs.tool_calls import JSON_ERRORS, read_json
from turngate.envs.tool_signature import read_signature
from turngate.envs.tool_threads import Slots, run_in_thread

__all__ = ["BadArguments", "BadJson", "Finish", "Tool", "tool"]

TIMEOUT_S = 30.0
"""Seconds a call may take, the wait for a slot included; below `Limits.tool_timeout_s`, which would end the episode."""
MAX_CONCURRENT = 64
"""Calls of one tool that run at once in a process, over all episodes that share the tool."""
MAX_CHARS = 16_384
"""Characters of a result that the model is shown: about 4k tokens, a good part of a small model's context."""

Function: TypeAlias = Callable[..., Any]


class BadJson(ValueError):
    """The arguments of a call are not JSON."""


class BadArguments(ValueError):
    """The arguments of a call do not fit the tool's parameters."""


class Finish(Exception):
    """Ends the episode; a tool raises or returns it, and so may what scores an answer.

    Args: reward: `outcome` of the episode, or named rewards.
        end: how it ended; by default success when the reward is above 0, failure otherwise.
        text: what the call is answered with.
    """

    def __init__(self, reward: float | dict[str, float] = 0.0, end: End | None = None, text: str = "") -> None:
        rewards = dict(reward) if isinstance(reward, dict) else {"outcome": float(reward)}
        if end is None:
            end = End.success if sum(rewards.values()) > 0 else End.failure
        if end.is_failure:
            raise ValueError(f"a tool must end an episode by the task's rules: got {end}; raise an exception to fail")
        super().__init__(f"{end.name} {rewards}")
        self.rewards, self.end, self.text = rewards, end, text


class Tool:
    """A function that an agent may call, made by `tool` or `Tool.of`; in a class it binds as methods do.

    One tool serves every episode: its slots bound how many calls run at once, in whatever episodes they were made.
    """

    __slots__ = ("_decode", "_slots", "function", "is_async", "max_chars", "spec", "takes_self", "timeout_s")

    spec: ToolSpec
    """What the model is told."""
    function: Function
    takes_self: bool
    """True until it is bound to an instance of the class whose body it stands in."""
    is_async: bool
    timeout_s: float
    max_chars: int
    _decode: Callable[[str], Any]
    _slots: Slots

    @classmethod
    def of(
        cls,
        function: Function,
        *,
        name: str = "",
        description: str = "",
        timeout_s: float = TIMEOUT_S,
        max_concurrent: int = MAX_CONCURRENT,
        max_chars: int = MAX_CHARS,
    ) -> "Tool":
        """Make a tool of a function: async ones run in the loop, others in threads. Costs about 0.1 ms, so do it once.

        The docstring's first part describes the tool, its section `Args:` or `Annotated[..., msgspec.Meta(
        description=...)]` the parameters, and parameters with defaults are optional.

        Args: name: what the model calls it, instead of the function's name.
            timeout_s: seconds a call may take, the wait for its turn included; then the model reads that it took too
                long. A function in a thread cannot be stopped: it goes on, unheard, and keeps its slot until it ends.
            max_concurrent: calls that run at once in this process.
            max_chars: longer results are cut, and the model is told.

        Raises: TypeError, ValueError: the function cannot be a tool, and why; see `read_signature`.
        """
        if not timeout_s > 0 or max_concurrent < 1 or max_chars < 1:
            raise ValueError(
                "timeout_s, max_concurrent and max_chars of a tool must be above 0: "
                f"got {timeout_s}, {max_concurrent}, {max_chars}"
            )
        signature = read_signature(function, name=name, description=description)
        made = cls()
        made.spec, made.function, made.takes_self = signature.spec, function, signature.takes_self
        made.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        made.timeout_s, made.max_chars = timeout_s, max_chars
        made._decode = msgspec.json.Decoder(signature.arguments).decode
        made._slots = Slots(max_concurrent)
        return made

    @property
    def name(self) -> str:
        """What the model calls it."""
        return self.spec.name

    def __repr__(self) -> str:
        return f"<Tool {self.name} {'async' if self.is_async else 'in threads'}, {self._slots.limit} at once>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as Python does."""
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> "Tool":
        return self.bound_to(instance) if instance is not None else self

    def bound_to(self, instance: object) -> "Tool":
        """Return the tool for one instance of its class, with the same slots; one of a plain function as it is."""
        if not self.takes_self:
            return self
        bound = copy.copy(self)
        bound.function, bound.takes_self = self.function.__get__(instance), False
        return bound

    def read(self, arguments: str) -> dict[str, Any]:
        """Check and convert the raw arguments of a call, strictly; an empty text is an empty object.

        Raises: BadJson: they are not JSON, or name a key twice. BadArguments: one is missing, unknown or of another
            type; the message has its path.
        """
        try:
            read_json(arguments or "{}")
            given = self._decode(arguments or "{}")
        except msgspec.ValidationError as error:
            raise BadArguments(str(error)) from error
        except JSON_ERRORS as error:
            raise BadJson("nested too deep" if isinstance(error, RecursionError) else str(error)) from error
        values = ((name, getattr(given, name)) for name in given.__struct_fields__)
        return {name: value for name, value in values if value is not msgspec.UNSET}

    async def invoke(self, arguments: dict[str, Any]) -> Any:
        """Call the function with checked arguments, once there is a slot for it.

        Raises what the function raises; SystemExit and its like as RuntimeError. Cancelled: an async function is
        cancelled; a thread is left behind and keeps its slot until it ends.
        """
        if self.takes_self:
            raise TypeError(f"a method must be bound to be a tool: {self.name} is not; take it from an instance")
        slots = self._slots.here()
        await slots.acquire()
        if self.is_async:
            try:
                return await _awaited(lambda: self.function(**arguments))
            finally:
                slots.release()
        value, error = await run_in_thread(lambda: _outcome(self.function, arguments), slots.release)
        if error is not None:
            raise error
        return await _awaited(lambda: value) if inspect.isawaitable(value) else value


@overload
def tool(function: Function, /) -> Tool: ...


@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    timeout_s: float = TIMEOUT_S,
    max_concurrent: int = MAX_CONCURRENT,
    max_chars: int = MAX_CHARS,
) -> Callable[[Function], Tool]: ...


def tool(function: Function | None = None, /, **settings: Any) -> Tool | Callable[[Function], Tool]:
    """Make a tool of a function, as a decorator: `@tool` or `@tool(timeout_s=5)`; see `Tool.of`."""
    if function is not None:
        return Tool.of(function)
    return lambda decorated: Tool.of(decorated, **settings)


async def _awaited(make: Callable[[], Any]) -> Any:
    try:
        return await cast(Awaitable[Any], make())
    except (SystemExit, KeyboardInterrupt) as error:  # would stop the event loop, from whatever task
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _outcome(function: Function, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
    """Return a function's value or its exception; in a thread, where nobody can raise StopIteration or SystemExit."""
    try:
        return function(**arguments), None
    except asyncio.CancelledError as error:
        return None, RuntimeError(f"CancelledError: {error}")
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        return None, RuntimeError(f"{type(error).__name__}: {error}")
    except Exception as error:
        return None, error
