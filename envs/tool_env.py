"""An environment made of tools: it runs the calls, answers them, and ends where a tool or a score says so.

class Library(ToolEnv):
    async def start(self, task, seed):
        self.shelf = task.data["shelf"]
        return task.prompt

    @tool
    async def search(self, words: str) -> list[str]:
        "List the titles that contain all words."
        return [title for title in self.shelf if words in title]

    async def score(self, answer):
        return float(answer == self.shelf[0])

With `save` and `load` it has snapshots, too; without them `replayed(Library)` has, if it has no luck.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import msgspec

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task
from turngate.envs.tool_calls import ToolParser
from turngate.envs.tool_parsers import tool_parser
from turngate.envs.tool_set import MODEL_FAULTS, TOOL_FAULTS, ToolAnswer, ToolSet
from turngate.envs.tools import Finish, Tool

__all__ = ["NUDGE", "Score", "Start", "ToolEnv"]

NUDGE = "That was no tool call. Call one of the tools."
"""What a turn without a call is answered with, where there is nothing to score."""

Verdict: TypeAlias = Finish | float | str | None
Start: TypeAlias = Callable[[Task, int], Observation | str | Awaitable[Observation | str]]
Score: TypeAlias = Callable[[Task, str], Verdict | Awaitable[Verdict]]


class ToolEnv:
    """One episode with tools. Use it with functions, or subclass it and decorate methods with `@tool`.

    Calls of a turn run at once, or one after the other in a subclass with `sequential = True`. An exception of a tool
    is an answer the model sees; one of `start` or `score` ends the episode as a failure of the environment.

    A subclass with two methods more is a SnapshotEnv: `save() -> bytes` returns what its tools have changed, without
    any luck, and `load(data)` sets that and all else that `start` sets, with `self.task` known. Where there is luck,
    `reseed(seed)` draws what is to come; it is called after `load`. Each may be a coroutine.

    Mutable state: `task`, `_turn`, `_rewards` (components of the step under way).
    """

    sequential: ClassVar[bool] = False
    """Whether calls of one turn run in order, for tools that share state."""
    fatal: ClassVar[tuple[type[Exception], ...]] = ()
    """Exceptions of tools that end the episode as `env_error`, and are no answer."""
    deterministic_step: ClassVar[bool] = False
    """Whether equal actions after equal starts always have equal answers; then actions can be replayed."""
    _class_tools: ClassVar[ToolSet] = ToolSet([])

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The order of definition, base classes first; a tool of the same name in a subclass takes the place.
        names = {name: None for base in reversed(cls.__mro__) for name in vars(base)}
        tools = [made for name in names if isinstance(made := getattr(cls, name, None), Tool)]
        cls._class_tools = ToolSet(tools, sequential=cls.sequential, fatal=cls.fatal)
        if _is_hook(cls, "save") and _is_hook(cls, "load") and not hasattr(cls, "snapshot"):
            # Only then: a class that has these methods counts as an environment that can be saved.
            setattr(cls, "snapshot", _snapshot)  # noqa: B010 - a type checker would want it declared for all
            setattr(cls, "restore", _restore)  # noqa: B010

    def __init__(
        self,
        tools: ToolSet | Iterable[Tool | Callable[..., Any]] = (),
        *,
        start: Start | None = None,
        score: Score | None = None,
        system: str = "",
        nudge: str = NUDGE,
        max_turns: int | None = None,
        penalties: float | Mapping[str, float] = 0.0,
        parser: str | ToolParser | None = None,
        tools_in_prompt: bool = True,
    ) -> None:
        """Make an environment for one episode.

        Args: tools: a set of tools, shared by all episodes, or tools besides those of the class.
            start: how an episode begins, instead of the method: returns what the agent reads first.
            score: what to make of a turn without calls, instead of the method; see there.
            system: system prompt.
            nudge: answer to a turn without calls that is not scored.
            max_turns: turns after which an episode has failed, as `End.budget`, to be learned from; None leaves it to
                the runtime's limits, which cut it short and teach nothing.
            penalties: what a mistake costs, in the reward component `tool_error`: a number for each of the model's, or
                numbers by name, see MODEL_FAULTS and TOOL_FAULTS.
            parser: name of a format in TOOL_PARSERS, or a parser, for models that write calls in text: calls are then
                read from the text, and their results come as a user message. None: the server reads all calls.
            tools_in_prompt: with a parser, describe the tools in the system prompt. False: the server's chat template
                does, and what is read from the text is what the server could not read, to say what is wrong with it.

        Raises: ValueError: max_turns is not positive; a penalty is negative or for something that does not exist; no
            parser has this name.
        """
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more: got {max_turns}; None for no budget")
        if isinstance(tools, ToolSet):
            own = tools
        else:
            tools = list(tools)
            own = self._class_tools.with_tools(tools) if tools else self._class_tools
        self.tools = own.bound_to(self)
        """The tools of this episode; counts are shared with all others of the class or the set."""
        self.task = Task("")
        """The task of the episode, once it has started."""
        self._start, self._score, self._system, self._nudge = start, score, system, nudge
        self._max_turns = max_turns
        self._penalties = _checked_penalties(penalties)
        self._parser = tool_parser(parser) if parser is not None else None
        self._tools_in_prompt = tools_in_prompt
        self._turn = 0
        self._rewards: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task.id or 'not started'}, turn {self._turn}, {self.tools!r}>"

    async def start(self, task: Task, seed: int) -> Observation | str:
        """Begin an episode and return what the agent reads first; all luck derives from `seed`. Override it."""
        return await _awaited(self._start(task, seed)) if self._start is not None else task.prompt

    async def score(self, answer: str) -> Verdict:
        """Judge a turn without calls. Override it.

        Returns: a number or Finish ends the episode with it; a text is shown to the agent, and it goes on; None is no
            answer: the agent is nudged, and the turn was invalid.
        """
        return await _awaited(self._score(self.task, answer)) if self._score is not None else None

    def add_reward(self, name: str, value: float) -> None:
        """Add to a named reward of the step under way; for tools and scores."""
        self._rewards[name] = self._rewards.get(name, 0.0) + value

    @classmethod
    def statistics(cls) -> dict[str, int]:
        """Return the counts of this class's tools over all episodes; a ToolSet that was passed in has its own."""
        return cls._class_tools.statistics()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode of `task`."""
        self.task, self._turn = task, 0
        first = await self.start(task, seed)
        shown = Observation(first) if isinstance(first, str) else first
        system, specs = shown.system or self._system, self.tools.specs
        if self._parser is not None and self._tools_in_prompt and specs:
            described = self._parser.render_tools(specs)
            system, specs = f"{system}\n\n{described}" if system else described, ()
        return msgspec.structs.replace(shown, system=system, tools=shown.tools or specs)

    async def step(self, action: Action) -> Step:
        """Run the calls of a turn, or judge its text. Cancelled: what the calls had done by then is done."""
        self._turn += 1
        self._rewards = {}
        parsed = self._parser.parse(action.text, id_prefix=f"text_{self._turn}") if self._parser is not None else None
        in_text, errors = (parsed.tool_calls, parsed.errors) if parsed is not None else ((), ())
        if not (action.tool_calls or in_text or errors):
            return await self._judge(action.text)
        answers = await self.tools.run((*action.tool_calls, *in_text))
        for _ in errors:
            self.tools.count("malformed")
        called, written = answers[: len(action.tool_calls)], answers[len(action.tool_calls) :]
        texts = [self._parser.render_results([a.result for a in written])] if self._parser and written else []
        texts += [f"error: {error}" for error in errors]
        observation = Observation("\n".join(texts), tuple(answer.result for answer in called))
        return self._step(observation, answers, ["malformed"] * len(errors))

    async def _judge(self, text: str) -> Step:
        try:
            verdict = await self.score(text)
        except Finish as raised:
            verdict = raised
        if verdict is None:
            self.tools.count("no_call")
            return self._step(Observation(self._nudge), (), ["no_call"])
        if isinstance(verdict, str):
            return self._step(Observation(verdict), (), ())
        finish = verdict if isinstance(verdict, Finish) else Finish(verdict)
        return self._step(Observation(finish.text), [finish], ())

    def _step(self, observation: Observation, answers: Sequence[ToolAnswer | Finish], problems: Sequence[str]) -> Step:
        """Return the step: rewards, the first end in the order of the calls, and what went wrong."""
        finishes = [a if isinstance(a, Finish) else a.finish for a in answers]
        finish = next((one for one in finishes if one is not None), None)
        problems = [*(a.problem for a in answers if isinstance(a, ToolAnswer) and a.problem), *problems]
        cost = sum(self._penalties.get(problem, 0.0) for problem in problems)
        if cost:
            self.add_reward("tool_error", -cost)
        for name, value in finish.rewards.items() if finish is not None else ():
            self.add_reward(name, value)
        is_out_of_turns = self._max_turns is not None and self._turn >= self._max_turns
        return Step(
            observation,
            self._rewards,
            finish.end if finish is not None else End.budget if is_out_of_turns else None,
            valid=not any(problem in MODEL_FAULTS for problem in problems),
            state={"problems": problems} if problems else None,
        )

    async def aclose(self) -> None:
        """Release what the episode holds. Override it."""


class _Saved(msgspec.Struct):
    task: Task
    turn: int
    data: bytes


async def _snapshot(self: Any) -> Snapshot:
    """Return the state as `save` tells it."""
    env = cast(ToolEnv, self)
    data = await _awaited(self.save())
    if not isinstance(data, bytes):
        raise TypeError(f"save must return bytes: got {type(data).__name__} ({type(env).__name__})")
    return Snapshot(_kind(env), msgspec.msgpack.encode(_Saved(env.task, env._turn, data)))


async def _restore(self: Any, snapshot: Snapshot, seed: int) -> None:
    """Return to a state by `load`; luck to come is drawn by `reseed`, where there is any."""
    env = cast(ToolEnv, self)
    if snapshot.kind != (kind := _kind(env)):
        raise ValueError(f"snapshot must be of kind {kind!r}: got {snapshot.kind!r}; restore it where it is from")
    saved = msgspec.msgpack.decode(snapshot.data, type=_Saved)
    env.task, env._turn = saved.task, saved.turn
    await _awaited(self.load(saved.data))
    if _is_hook(type(env), "reseed"):
        await _awaited(self.reseed(seed))


def _is_hook(cls: type, name: str) -> bool:
    found = getattr(cls, name, None)
    return callable(found) and not isinstance(found, Tool)  # a tool that the agent may call is something else


def _kind(env: ToolEnv) -> str:
    return str(getattr(env, "kind", "")) or f"{type(env).__module__}.{type(env).__qualname__}"


def _checked_penalties(penalties: float | Mapping[str, float]) -> dict[str, float]:
    costs = dict(penalties if isinstance(penalties, Mapping) else dict.fromkeys(MODEL_FAULTS, penalties))
    for name, cost in costs.items():
        if name not in MODEL_FAULTS and name not in TOOL_FAULTS:
            raise ValueError(f"a penalty must be for one of {', '.join((*MODEL_FAULTS, *TOOL_FAULTS))}: got {name!r}")
        if not 0 <= cost < math.inf:
            raise ValueError(f"a penalty must be a finite number of 0 or more: got {cost} (penalties[{name!r}])")
    return costs


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
