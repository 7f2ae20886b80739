"""The tools of an environment: the calls of a turn become answers, and whatever goes wrong an answer the model sees."""

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from turngate.envs.base import ToolCall, ToolResult, ToolSpec
from turngate.envs.tool_calls import excerpt
from turngate.envs.tool_running import Call, Ended, run_calls
from turngate.envs.tools import BadArguments, BadJson, Finish, Tool

__all__ = ["MODEL_FAULTS", "TOOL_FAULTS", "ToolAnswer", "ToolSet"]

MODEL_FAULTS: tuple[str, ...] = (
    "unknown_tool",
    "bad_json",
    "bad_arguments",
    "duplicate_id",
    "too_many_calls",
    "malformed",
    "no_call",
)
"""What the model did wrong, by name. `malformed` is a call in text that its parser could not read, `no_call` a turn
that had to call a tool and did not."""
TOOL_FAULTS: tuple[str, ...] = ("timeout", "exception", "bad_result", "cut", "not_run")
"""What came of the tool: `bad_result` is a value that JSON cannot carry, `cut` one shown in part, `not_run` a call
after the one that ended the episode."""

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class ToolAnswer(msgspec.Struct, frozen=True):
    """What came of one call."""

    result: ToolResult
    """What the model sees."""
    problem: str = ""
    """One of MODEL_FAULTS or TOOL_FAULTS; empty when all went well."""
    finish: Finish | None = None
    """Set when the call ended the episode."""


class ToolSet:
    """Tools by name. Stateless but for its counts: one set can serve every episode."""

    # Changed by run(): _counts and _logged, which sets bound to instances share.
    __slots__ = ("_counts", "_fatal", "_grace_s", "_logged", "_max_calls", "_owner", "_sequential", "_tools")

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]],
        *,
        sequential: bool = False,
        max_calls: int = 32,
        grace_s: float = 1.0,
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        """Collect tools; functions become tools with the default settings of `Tool.of`.

        Args: sequential: run the calls of a turn one after the other, for tools that share state; the first that ends
                the episode is the last to run. Otherwise they run at once.
            max_calls: calls of one turn that are run; the model is told of the others.
            grace_s: seconds a cancelled call may take to end before it is left behind.
            fatal: exceptions that `run` raises: they say that the machinery broke, not that the call was a bad one.

        Raises: ValueError: two tools have one name.
        """
        made = [one if isinstance(one, Tool) else Tool.of(one) for one in tools]
        self._tools = {one.name: one for one in made}
        if len(self._tools) < len(made):
            name = Counter(one.name for one in made).most_common(1)[0][0]
            raise ValueError(f"tools must have names of their own: got {name!r} twice; pass name= to Tool.of")
        self._sequential, self._max_calls, self._grace_s, self._fatal = sequential, max_calls, grace_s, fatal
        self._owner: object = None
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def __repr__(self) -> str:
        return f"<ToolSet {', '.join(self._tools)}; {self._counts['calls']} calls>"

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as the model is told of them."""
        return tuple(one.spec for one in self._tools.values())

    def bound_to(self, owner: object) -> "ToolSet":
        """Return the set whose methods are called on `owner`; counts and slots stay shared."""
        bound = copy.copy(self)
        bound._owner = owner
        return bound

    def with_tools(self, tools: Iterable[Tool | Callable[..., Any]]) -> "ToolSet":
        """Return the set with tools besides, which shares its counts. Raises: ValueError: two have one name."""
        more = ToolSet([*self._tools.values(), *tools])
        both = copy.copy(self)
        both._tools = more._tools
        return both

    def statistics(self) -> dict[str, int]:
        """Return how many calls there were, how many were left behind, and how often each thing went wrong."""
        return {name: self._counts[name] for name in ("calls", *MODEL_FAULTS, *TOOL_FAULTS, "left_behind")}

    def count(self, problem: str) -> None:
        """Count something that went wrong outside of a call: `malformed`, `no_call`."""
        self._counts[problem] += 1

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        """Run the calls of one turn and return one answer for each, in their order.

        Raises only what `fatal` names, once all calls have ended. Cancelled: async calls are cancelled, those in
        threads go on unheard; what they had done is done.
        """
        self._counts["calls"] += len(calls)
        answers: list[ToolAnswer | None] = [None] * len(calls)
        ready: list[tuple[int, Tool, Call]] = []
        seen = set[str]()
        for index, call in enumerate(calls):
            try:
                ready.append((index, *self._prepare(index, call, seen)))
            except _Refused as refused:
                answers[index] = self._problem(call, refused.problem, str(refused))
            seen.add(call.id)
        batches = [[one] for one in ready] if self._sequential else [ready] if ready else []
        is_over = False
        for batch in batches:
            if is_over:
                index = batch[0][0]
                answers[index] = self._problem(calls[index], "not_run", "not run: the episode had ended")
                continue
            ended = await run_calls([call for _, _, call in batch], grace_s=self._grace_s)
            for (index, one, _), how in zip(batch, ended, strict=True):
                answers[index] = answer = self._answer(calls[index], one, how)
                is_over = is_over or answer.finish is not None
        return [answer for answer in answers if answer is not None]

    def _prepare(self, index: int, call: ToolCall, seen: set[str]) -> tuple[Tool, Call]:
        """Return a call that can run. Raises: _Refused: why it cannot."""
        if index >= self._max_calls:
            raise _Refused("too_many_calls", f"not run: one turn may make {self._max_calls} calls")
        if call.id and call.id in seen:  # an empty id is none: nothing can be confused with it
            raise _Refused("duplicate_id", f"not run: another call of this turn has the id {excerpt(call.id)!r}")
        one = self._tools.get(call.name)
        if one is None:
            names = ", ".join(self._tools) or "none"
            raise _Refused("unknown_tool", f"there is no tool {excerpt(call.name)!r}; the tools are: {names}")
        try:
            arguments = one.read(call.arguments)
        except BadJson as error:
            raise _Refused(
                "bad_json", f"the arguments of {one.name} are not valid JSON: {excerpt(str(error), 300)}"
            ) from error
        except BadArguments as error:
            raise _Refused(
                "bad_arguments", f"the arguments of {one.name} do not fit: {excerpt(str(error), 300)}"
            ) from error
        bound = one.bound_to(self._owner) if self._owner is not None else one
        return one, Call(functools.partial(bound.invoke, arguments), one.timeout_s)

    def _answer(self, call: ToolCall, one: Tool, how: Ended) -> ToolAnswer:
        if how.timed_out:
            self._counts["left_behind"] += how.left_behind
            return self._problem(call, "timeout", f"{one.name} did not answer within {one.timeout_s:g} s")
        value = how.value if how.error is None else how.error
        if isinstance(value, Finish):
            return ToolAnswer(ToolResult(call.id, self._shown(value.text, one)[0]), finish=value)
        if how.error is not None:
            if isinstance(how.error, self._fatal):
                raise how.error
            self._log_once(one.name, how.error)
            text, _ = self._shown(f"{type(how.error).__name__}: {_text_of(how.error)}", one)
            return self._problem(call, "exception", f"{one.name} failed: {text}")
        try:
            text = value if isinstance(value, str) else _encode(value).decode()
        except Exception as error:  # whatever hides in the value
            self._log_once(one.name, error)
            return self._problem(call, "bad_result", f"the result of {one.name} cannot be shown")
        text, is_cut = self._shown(text, one)
        self._counts["cut"] += is_cut
        return ToolAnswer(ToolResult(call.id, text), "cut" if is_cut else "")

    def _problem(self, call: ToolCall, problem: str, text: str) -> ToolAnswer:
        self._counts[problem] += 1
        return ToolAnswer(ToolResult(call.id, f"error: {text}"), problem)

    def _shown(self, text: str, one: Tool) -> tuple[str, bool]:
        """Return a text as it can be sent and shown, and whether it was cut."""
        if not text.isascii():
            text = text.encode(errors="backslashreplace").decode()
        if len(text) <= one.max_chars:
            return text, False
        return f"{text[: one.max_chars]}\n[cut: these are the first {one.max_chars} of {len(text)} characters]", True

    def _log_once(self, name: str, error: BaseException) -> None:
        if name not in self._logged:
            self._logged.add(name)
            _log.warning("tool %s failed for the first time; the model is told, and goes on", name, exc_info=error)


class _Refused(Exception):
    """A call that is answered without running it."""

    def __init__(self, problem: str, text: str) -> None:
        super().__init__(text)
        self.problem = problem


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except (Exception, SystemExit):  # whatever its own __str__ raises
        return "an error whose text cannot be had"
