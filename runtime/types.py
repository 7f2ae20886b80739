"""The values that flow through the runtime, one type per stage. Read this first.

    Task -> run_rollout -> Trajectory -> Group -> Buffer -> Batch -> Learner -> UpdateReport

A trajectory holds its tokens as segments: sequences whose prefix really was the model's input. Arrays inside a
segment are token aligned (index s belongs to token s) and stored as bytes in machine byte order.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import msgspec

from turngate.envs.base import End, Snapshot, Task, ToolCall
from turngate.runtime.errors import ConfigError
from turngate.runtime.guided_types import Candidate, Decision, GuidedTokens, TokenGuidance
from turngate.runtime.plain_numbers import make_plain

__all__ = [
    "NO_TURN",
    "NO_VERSION",
    "Batch",
    "Candidate",
    "Completion",
    "Decision",
    "Group",
    "GuidedTokens",
    "Message",
    "RestartedFrom",
    "Sampling",
    "Segment",
    "TokenGuidance",
    "Trajectory",
    "Turn",
    "UpdateReport",
]

NO_TURN = -1
"""turn_ids entry of a token that belongs to no turn (context)."""
NO_VERSION = -1
"""versions entry of a token that no policy produced."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message, encoded to JSON as the OpenAI API spells it."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How completions are drawn. The defaults sample the policy itself.

    Raises: ConfigError: no server could sample like this.
    """

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_tokens: int = 64
    """Cap on generated tokens per turn."""
    stop: tuple[str, ...] = ()
    guidance: TokenGuidance | None = None
    """Values that a critic on the server gives every token a weight by; see `Guidance` for whole actions."""

    def __post_init__(self) -> None:
        make_plain(self, floats=("temperature", "top_p"), ints=("top_k", "max_tokens"))
        # Written so that NaN fails: it is neither too small nor too large.
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature must be a finite number >= 0: got {self.temperature} (Sampling)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1: got {self.top_p} (Sampling); 1 keeps all tokens")
        if not self.top_k >= 0:
            raise ConfigError(f"top_k must be 0 or more: got {self.top_k} (Sampling); 0 keeps the whole vocabulary")
        if not self.max_tokens >= 1:
            raise ConfigError(f"max_tokens must be 1 or more: got {self.max_tokens} (Sampling)")
        stop: object = self.stop
        if isinstance(stop, str):  # each of its characters would be one
            raise ConfigError(f"stop must be a tuple of texts: got {self.stop!r:.80} (Sampling)")
        guidance: object = self.guidance
        if not isinstance(guidance, TokenGuidance | None):  # it would be ignored, or refused by the server
            raise ConfigError(
                f"guidance must be TokenGuidance(...) or None: got {guidance!r:.80} (Sampling); what chooses whole "
                "actions goes into Runtime(guidance=...)"
            )


class Completion(msgspec.Struct, frozen=True):
    """What an endpoint sampled for one context."""

    text: str
    token_ids: Sequence[int] = ()
    """Ids as sampled, the stop token included if one was sampled. Empty when the server gives none."""
    logprobs: Sequence[float] = ()
    """Log-probability of each sampled token under the distribution it was drawn from; aligned with token_ids."""
    versions: Sequence[int] = ()
    """Policy version that produced each token; aligned with token_ids."""
    prompt_token_ids: Sequence[int] = ()
    """The ids the server really saw. Empty when the server gives none."""
    stop_reason: str = "stop"
    """`stop`: the model ended its turn. `length`: cut at max_tokens. `tool_calls`: the turn is tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    version_sent: int = 0
    version_received: int = 0
    """Published policy version as the client knew it when it sent the request and when the reply arrived."""
    guided_tokens: GuidedTokens | None = None
    """When the server guided the tokens: `logprobs` are then those of the guided distribution."""
    decision: Decision | None = None
    """When this draw was chosen among several: `logprobs` are those of drawing it."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One action and what the environment made of it."""

    index: int
    segment: int
    """Which segment of the trajectory holds the action's tokens."""
    start: int
    """Position of the action's first token inside that segment."""
    length: int
    """Number of generated tokens, the stop token included."""
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: str = "stop"
    observation: str = ""
    """What the environment answered, for people; the tokens are in the segments."""
    rewards: dict[str, float] = {}
    scores: dict[str, float] = {}
    """Named judgements of the history after this turn, by scorers: progress, process scores, potentials. No rewards
    until a learner makes them so; kept apart from the environment's own."""
    valid: bool = True
    role: str = ""
    """Which agent of the episode acted; empty when there is only one."""
    injected: bool = False
    """True when something other than the policy chose the action: it has no tokens of its own (`length` 0), what it
    said is context to the turns after it."""
    version_sent: int = 0
    version_received: int = 0
    model_s: float = 0.0
    env_s: float = 0.0
    """Seconds waited for the model and for the environment."""
    snapshot: Snapshot | None = None
    """State before the action, when the rollout was asked to keep snapshots."""
    state: dict[str, Any] | None = None
    guided_tokens: GuidedTokens | None = None
    """When the server guided the action's tokens."""
    decision: Decision | None = None
    """When the action was chosen among several draws."""

    @property
    def reward(self) -> float:
        """Sum of the reward components."""
        return sum(self.rewards.values())


class Segment(msgspec.Struct, frozen=True):
    """One token sequence the model really saw or sampled, position by position."""

    token_ids: bytes
    """int32 ids."""
    policy_mask: bytes
    """uint8, 1 on tokens this segment's context generated, 0 on context."""
    logprobs: bytes
    """float32 behaviour log-probs, 0 on context."""
    versions: bytes
    """int32 policy version, NO_VERSION on context."""
    turn_ids: bytes
    """int32 turn index, NO_TURN on context."""

    def __len__(self) -> int:
        return len(self.policy_mask)

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        policy_mask: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        turn_ids: Sequence[int],
    ) -> "Segment":
        """Build a segment from plain sequences of equal length."""
        lengths = {len(token_ids), len(policy_mask), len(logprobs), len(versions), len(turn_ids)}
        if len(lengths) != 1:
            raise ValueError(f"segment arrays must have one length: got {sorted(lengths)}; align them by token")
        return cls(
            array("i", token_ids).tobytes(),
            bytes(policy_mask),
            array("f", logprobs).tobytes(),
            array("i", versions).tobytes(),
            array("i", turn_ids).tobytes(),
        )

    def ids(self) -> "memoryview[int]":
        """Token ids as a view of ints; no copy."""
        return memoryview(self.token_ids).cast("i")

    def logprob_values(self) -> "memoryview[float]":
        """Behaviour log-probs as a view of floats; no copy."""
        return memoryview(self.logprobs).cast("f")

    def version_values(self) -> "memoryview[int]":
        """Policy versions as a view of ints; no copy."""
        return memoryview(self.versions).cast("i")

    def sampled_versions(self) -> Iterator[int]:
        """Policy versions of the generated tokens alone, at C speed: contexts can be long."""
        return compress(self.version_values(), self.policy_mask)

    def turn_values(self) -> "memoryview[int]":
        """Turn ids as a view of ints; no copy."""
        return memoryview(self.turn_ids).cast("i")


class RestartedFrom(msgspec.Struct, frozen=True):
    """Where an episode started that did not start at its task's beginning."""

    origin: str
    """Id of the trajectory that reached the state."""
    turn: int
    """Turns that the origin had taken by then."""
    policy_version: int
    """Oldest policy that chose one of those turns."""
    reason: str
    """Why that state is worth starting from; see `Restarts.reasons`."""
    scores: tuple[tuple[str, float], ...] = ()
    """What scorers said of the state, by name: shaping starts from it."""
    policy_tokens: int = 0
    """Generated tokens that lead there and count towards `Limits.max_policy_tokens`: a branch may not say more than the
    episode that it values. Restarts of training count none."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One episode: what the model saw, what it did, what came of it, and how it ended."""

    id: str
    task: Task
    group_id: str = ""
    member: int = 0
    seed: int = 0
    restarted_from: RestartedFrom | None = None
    """None when the episode started at its task's beginning. Otherwise `turns` are those since the restart, and what
    happened before is context to them."""
    first_observation: str = ""
    """What the environment had said last before the first turn, for detectors and for naming situations."""
    turns: tuple[Turn, ...] = ()
    segments: tuple[Segment, ...] = ()
    end: End
    error: str = ""
    """What went wrong, when the machinery failed."""
    messages: tuple[Message, ...] = ()
    """The whole history, for people; training never reads it."""
    last_context: bytes = b""
    """For truncations, int32 ids to bootstrap a value from; empty when not known."""
    last_context_is_whole: bool = False
    """True when `last_context` holds what the model would have been shown next (rollouts asked for `last_contexts`), or
    ends in the action that the environment did not answer. False when it is the last prompt with its completion,
    without the environment's last answer: no server has tokenised that."""
    token_mode: str = ""
    """Where the ids came from, see `TokenMode`; empty when the endpoint does not say."""
    drifts: int = 0
    """Turns whose messages extended what was shown before and whose ids did not: chats that were rendered or tokenised
    differently the second time. Each started a segment of its own."""
    trainable: bool = True
    """False when the server gave no token ids or log-probs; `untrainable_because` says which."""
    untrainable_because: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def reward(self) -> float:
        """Undiscounted return: the sum of all turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def outcome(self) -> float:
        """Sum of the gold reward component `outcome` alone."""
        return sum(turn.rewards.get("outcome", 0.0) for turn in self.turns)

    @property
    def policy_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(turn.length for turn in self.turns)

    def version_range(self) -> tuple[int, int]:
        """Oldest and newest policy version among the generated tokens; (NO_VERSION, NO_VERSION) when there are none."""
        sampled = [s for s in self.segments if 1 in s.policy_mask]
        if not sampled:
            return NO_VERSION, NO_VERSION
        return min(min(s.sampled_versions()) for s in sampled), max(max(s.sampled_versions()) for s in sampled)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories sampled for one task from the same start: the unit of the buffer and of group statistics."""

    id: str
    task: Task
    order: int
    """Submission order within the run, from 0."""
    trajectories: tuple[Trajectory, ...]

    @property
    def restarted_from(self) -> RestartedFrom | None:
        """Where all its members started, None for the task's beginning."""
        return self.trajectories[0].restarted_from if self.trajectories else None

    def version_range(self) -> tuple[int, int]:
        """Oldest and newest policy version among the generated tokens of all members."""
        ranges = [r for r in (t.version_range() for t in self.trajectories) if r[0] != NO_VERSION]
        return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else (NO_VERSION, NO_VERSION)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What the buffer hands to the learner for one update."""

    groups: tuple[Group, ...]
    policy_version: int
    """The learner's version at consumption."""
    min_version: int = 0
    """Tokens older than this carry no loss (policy `mask`); under `wait` and `drop` there are none."""
    stale: tuple[Group, ...] = ()
    """Groups discarded as too old for the policy since the last batch: for critics alone, never for a ratio."""


class UpdateReport(msgspec.Struct, frozen=True):
    """What one update did, as named numbers."""

    metrics: dict[str, float]
