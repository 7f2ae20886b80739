"""What an agent acts in: tasks, actions, observations, steps, and how an episode ends.

Everything here is a value or a protocol; nothing imports the rest of Turngate.
"""

import enum
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

__all__ = [
    "Action",
    "End",
    "Env",
    "EnvFactory",
    "Observation",
    "Snapshot",
    "SnapshotEnv",
    "Step",
    "Task",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
]


class End(enum.Enum):
    """Why an episode ended. Set where it is known, never guessed later.

    Terminal ends are the task's own verdict: nothing follows, the bootstrap value is 0. Truncations are the
    collector's: the task could go on, so value estimates bootstrap from the last context. Failures are the
    machinery's: recorded, kept out of the loss and of group statistics, and refilled.
    """

    success = "success"
    failure = "failure"
    budget = "budget"
    """The task itself defines running out of turns or money as failure."""
    turn_limit = "turn_limit"
    token_limit = "token_limit"
    timeout = "timeout"
    context_overflow = "context_overflow"
    cancelled = "cancelled"
    env_error = "env_error"
    endpoint_error = "endpoint_error"
    tool_error = "tool_error"

    @property
    def is_terminal(self) -> bool:
        """True when the task ended by its own rules."""
        return self in _TERMINAL

    @property
    def is_truncation(self) -> bool:
        """True when collection stopped although the task could go on."""
        return self in _TRUNCATIONS

    @property
    def is_failure(self) -> bool:
        """True when the machinery failed; the episode says nothing about the policy."""
        return self in _FAILURES


_TERMINAL = frozenset({End.success, End.failure, End.budget})
_TRUNCATIONS = frozenset({End.turn_limit, End.token_limit, End.timeout, End.context_overflow})
_FAILURES = frozenset({End.cancelled, End.env_error, End.endpoint_error, End.tool_error})


class Task(msgspec.Struct, frozen=True):
    """One problem for an agent. `data` must survive a JSON round trip.

    Raises: TypeError: a field is of another type; most often data given where the prompt belongs.
    """

    id: str
    """Unique within the run."""
    prompt: str = ""
    """The task in words, for people and transcripts."""
    data: dict[str, Any] = {}
    """What the environment needs to set the task up."""

    def __post_init__(self) -> None:
        # Structs check types when they are decoded, not when they are made.
        for name, kind in (("id", str), ("prompt", str), ("data", dict)):
            if not isinstance(value := getattr(self, name), kind):
                hint = f"; name the arguments: Task({self.id!r}, data={{...}})" if isinstance(value, dict) else ""
                raise TypeError(f"{name} must be a {kind.__name__}: got {type(value).__name__} {value!r:.80}{hint}")


class ToolSpec(msgspec.Struct, frozen=True):
    """One tool the agent may call, in the shape of an OpenAI function definition."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments object."""


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call by the agent; `arguments` is the raw JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True):
    """The answer to one tool call, matched by its id."""

    call_id: str
    text: str


class Action(msgspec.Struct, frozen=True):
    """What the agent did in one turn: text, tool calls, or both."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class Observation(msgspec.Struct, frozen=True):
    """What the agent sees next."""

    text: str = ""
    """Shown as a user message when not empty."""
    results: tuple[ToolResult, ...] = ()
    """Shown as tool messages, in this order, before `text`."""
    system: str = ""
    """System prompt; read from the first observation of an episode only."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools on offer; read from the first observation of an episode only."""


class Step(msgspec.Struct, frozen=True):
    """What one action led to."""

    observation: Observation
    rewards: dict[str, float] = {}
    """Named components, finite. `outcome` is the gold reward; shaping gets names of its own."""
    end: End | None = None
    """A terminal end when the task is over, a truncation when the environment itself cuts it short, None while it goes
    on. Never a failure: raise an exception for that."""
    valid: bool = True
    """False when the environment could not make sense of the action."""
    state: dict[str, Any] | None = None
    """An optional description of the hidden state, for people looking at the trajectory."""

    @property
    def reward(self) -> float:
        """Sum of the reward components."""
        return sum(self.rewards.values())


class Snapshot(msgspec.Struct, frozen=True):
    """The whole state of an environment between two steps, as bytes that survive the process."""

    kind: str
    """Name of the environment that wrote it; restoring into another kind is an error."""
    data: bytes


class Env(Protocol):
    """One episode's environment. Made fresh for every rollout and used by one coroutine at a time."""

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode of `task`; all luck derives from `seed`."""
        ...

    async def step(self, action: Action) -> Step:
        """Execute an action. A nonsensical action is answered (`valid=False`), never raised."""
        ...

    async def aclose(self) -> None:
        """Release what the episode holds; called exactly once, also after errors and cancellation."""
        ...


@runtime_checkable
class SnapshotEnv(Protocol):
    """An environment that can be saved between steps and resumed with fresh luck."""

    async def snapshot(self) -> Snapshot:
        """Return the state as it is now."""
        ...

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        """Return to `snapshot`; the future's luck derives from `seed`, not from the snapshot."""
        ...


EnvFactory: TypeAlias = Callable[[], Env]
"""A class or callable that makes one environment per rollout."""
