"""One episode of an agent that brings its own loop: what it may still ask, what was recorded, and how it ended."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

import msgspec

from turngate.envs.base import End, Task, ToolSpec
from turngate.runtime.answers import describe_error, said_last, writable
from turngate.runtime.chat_messages import AnyMessage, chat_messages
from turngate.runtime.conversation import Conversation, conversation_of, token_mode_of
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EnvError,
    MalformedReply,
    SessionError,
    SessionLimit,
    SessionSealed,
    ToolError,
)
from turngate.runtime.events import Events, RolloutFinished, RolloutStarted, TurnFinished
from turngate.runtime.limits import Limits
from turngate.runtime.seeds import derive_seed
from turngate.runtime.session_recorder import SessionRecorder
from turngate.runtime.session_turns import SessionTurns
from turngate.runtime.types import Completion, Message, Sampling, Trajectory, Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Door", "Session", "SessionState"]

SessionState: TypeAlias = Literal["open", "sealed"]


class Door(Protocol):
    """Where agents that speak HTTP reach the sessions of this process."""

    @property
    def base_url(self) -> str:
        """The URL that SDKs are given, the part before /chat/completions."""
        ...

    def client(self, key: str) -> "AsyncOpenAI":
        """Return a client whose requests belong to the session with this key."""
        ...


class Session:
    """One episode of an agent with its own loop; made by `Runtime.session` or a `SessionTable`.

        async with runtime.session(task) as session:
            reply = await session.chat([{"role": "user", "content": task.prompt}])
            session.add_reward("outcome", float(reply.text == "4"))
        session.trajectory

    Open until sealed: by its owner, or by its deadline. It belongs to the event loop that it was made in. An exception
    that leaves the `async with` seals it as a failure and goes on.
    """

    # State.
    state: SessionState
    stopped_by: End | None  # the limit it has reached, once it has
    failure: str  # the endpoint's failure since the last reply that was delivered, empty for none
    _stopped_because: str
    _requests: int  # replies recorded, the choices of one reply together
    _asked: int  # requests that were given a seed
    _scopes: set[Deadline]  # one per request of chat() under way
    _has_looked: bool  # whether the server was asked for the context after the last turn
    _first_observation: str  # what the agent had been told before the first turn
    _trajectory: Trajectory | None

    def __init__(
        self,
        endpoint: ChatEndpoint,
        task: Task,
        *,
        id: str,
        key: str,
        limits: Limits,
        sampling: Sampling | None,
        seed: int = 0,
        env_seed: int | None = None,
        group_id: str = "",
        member: int = 0,
        events: Events | None = None,
        last_contexts: bool = False,
        door: Door | None = None,
        on_sealed: Callable[["Session"], None] | None = None,
    ) -> None:
        """Open a session, inside a running event loop. Args: as of `SessionTable.create`; `on_sealed` must not fail."""
        self.id, self.key, self.task, self.limits, self.sampling = id, key, task, limits, sampling
        self.seed = seed
        self.env_seed = derive_seed(seed, "env") if env_seed is None else env_seed
        self._group_id, self._member, self._last_contexts = group_id, member, last_contexts
        self._endpoint, self._conversation = endpoint, conversation_of(endpoint)
        self._events, self._door = events or Events(), door
        loop = asyncio.get_running_loop()
        self._loop = weakref.ref(loop)
        self._started_s = loop.time()
        self._recorder = SessionRecorder()
        self._turns = SessionTurns()
        self.state, self.stopped_by, self.failure = "open", None, ""
        self._stopped_because = ""
        self._requests = self._asked = 0
        self._scopes = set()
        self._has_looked = False
        self._first_observation = ""
        self._trajectory = None
        self._on_sealed = [on_sealed] if on_sealed is not None else []
        if (tell := self._events.rollout_started) is not None:
            tell(RolloutStarted(id, group_id, member, task.id))

    def __repr__(self) -> str:
        state = f", {self._trajectory.end.value}" if self._trajectory is not None else ""
        return f"<Session {self.id} {self.state}{state}, {len(self._turns)} turns, {self.in_flight} in flight>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.seal()
        else:
            self.seal(*self.verdict_on(error))

    @property
    def in_flight(self) -> int:
        """Requests of `chat` under way."""
        return len(self._scopes)

    @property
    def is_orphan(self) -> bool:
        """Whether its event loop is closed, so that nothing of it can go on."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    @property
    def turns(self) -> int:
        """Turns delivered so far; every choice of a reply is one."""
        return len(self._turns)

    @property
    def trajectory(self) -> Trajectory:
        """The record of the sealed session. Raises SessionError while it is open."""
        if self._trajectory is None:
            raise SessionError(f"session must be sealed before it is read: it is open (session {self.id})")
        return self._trajectory

    @property
    def conversation(self) -> Conversation:
        """The chat that all its requests go through, so that ids are kept from one to the next."""
        return self._conversation

    def when_sealed(self, call: Callable[["Session"], None]) -> None:
        """Have `call` called once the session is sealed, for those who hold something on its behalf; it must not fail.

        Called at once when it is sealed already.
        """
        if self.state == "sealed":
            call(self)
        else:
            self._on_sealed.append(call)

    @property
    def openai(self) -> "AsyncOpenAI":
        """A client of the official `openai` package whose requests belong to this session.

        It speaks to a gateway in this process, started on first use. The model's name does not matter.
        """
        return self._open_door().client(self.key)

    @property
    def base_url(self) -> str:
        """The URL for any other SDK; `key` is the API key to give it."""
        return self._open_door().base_url

    def _open_door(self) -> Door:
        if self._door is None:
            raise ConfigError(f"session.openai needs a Runtime: this session has none (session {self.id})")
        return self._door

    # What agents do.

    async def chat(
        self,
        messages: Sequence[AnyMessage],
        *,
        sampling: Sampling | None = None,
        tools: Sequence[ToolSpec] = (),
        role: str = "",
        seed: int | None = None,
    ) -> Completion:
        """Ask the model, and record what it says.

        Cancelled, or sealed meanwhile: the request is dropped, nothing is recorded.

        Args: messages: our structs or OpenAI's dictionaries. sampling: `max_tokens` and `stop` are the agent's choice;
                the rest is too when the session pins nothing.
            role: which agent of the episode asks, when there are several. seed: derived from the session's when None.
        Raises: SessionSealed: the episode is over. SessionLimit: it has reached a limit. EndpointError: the server
            failed. EnvError: what is to be sent are no messages.
        """
        chat = chat_messages(messages)
        try:
            self.admit(role)
        except SessionLimit:
            await self._look_ahead(chat, tools)
            raise
        asked_s = self._now()
        drawn = self.allowed_sampling(sampling)
        completion = await self._ask(chat, drawn, tools, self.next_seed() if seed is None else seed)
        waited_s = self._now() - asked_s
        try:
            recorded = self.record([completion], role=role, messages=chat, sampling=drawn, model_s=waited_s)
        except MalformedReply as error:  # ids are looked at when they are recorded
            self.failed(error)
            raise
        if not recorded:
            self.admit(role)  # says why
        return completion

    def add_reward(self, name: str, value: float, turn: int = -1) -> None:
        """Add to the component `name` of a turn's reward; `outcome` is the gold one.

        -1 is the turn delivered last; before any turn, what is given goes to the first.
        Raises: SessionSealed: too late. EnvError: no such turn was delivered, or the value is not finite.
        """
        if self.state == "sealed":
            raise self._sealed("rewards")
        self._turns.add_reward(name, value, turn, f"rewards of session {self.id}")

    # What the sides that carry requests do.

    def admit(self, role: str = "") -> None:
        """Let one more request be sent to the model. Raises: SessionSealed, SessionLimit: it must not be.

        A limit counts replies that were delivered and requests of `chat` under way.
        """
        if self.state == "sealed":
            raise self._sealed("requests")
        limits = self.limits
        if self.stopped_by is None:
            if self._requests + len(self._scopes) >= limits.max_turns:
                self._stop(End.turn_limit, f"got {limits.max_turns} turns (Limits.max_turns)")
            elif limits.max_policy_tokens is not None and self._recorder.policy_tokens >= limits.max_policy_tokens:
                self._stop(End.token_limit, f"got {limits.max_policy_tokens} tokens (Limits.max_policy_tokens)")
        if self.stopped_by is not None:
            raise SessionLimit(
                f"session must stay within its limits: {self._stopped_because} (session {self.id}"
                f"{f', role {role}' if role else ''}); end the episode, rewards are still taken"
            )

    def allowed_sampling(self, asked: Sampling | None) -> Sampling:
        """Return how the next request is drawn: what is pinned and the token limit before what the agent asks for."""
        pinned = self.sampling
        if asked is None or pinned is None:
            drawn = asked or pinned or Sampling()
        else:
            drawn = msgspec.structs.replace(pinned, max_tokens=asked.max_tokens, stop=asked.stop)
        limit = self.limits.max_policy_tokens
        if limit is None or (left := limit - self._recorder.policy_tokens) >= drawn.max_tokens:
            return drawn
        return msgspec.structs.replace(drawn, max_tokens=max(1, left))

    def next_seed(self) -> int:
        """Return the seed of the next request that brings none."""
        self._asked += 1
        return derive_seed(self.seed, "sampler", self._asked - 1)

    def record(
        self,
        completions: Sequence[Completion],
        *,
        role: str = "",
        messages: Sequence[Message] = (),
        sampling: Sampling | None = None,
        model_s: float = 0.0,
    ) -> bool:
        """Record a reply, all its choices, once it was delivered; False when it came too late or is beyond a limit.

        Args: messages: what was asked with; they must not change any more.
            sampling: how it was drawn; without it a session that pins nothing cannot be trained on.
            model_s: seconds waited for the model.
        Raises: MalformedReply: the prompt's ids are none.
        """
        if self.state == "sealed":
            return False
        now_s = self._now()
        if self.sampling is None and (why := _why_not_trained(sampling)):
            self._recorder.refuse_training(f"{why} (turn {len(self._turns)})")
        if not self._turns:
            self._first_observation = said_last(messages)
        is_whole = True
        for completion in completions:
            if self._is_too_long(completion):
                limit = self.limits.max_context_tokens
                self._stop(End.context_overflow, f"got a turn beyond {limit} tokens (Limits.max_context_tokens)")
                self._keep_last_context(completion)
                is_whole = False
                continue
            placed = self._recorder.place(completion, len(self._turns), messages)
            if placed.answers >= 0:
                self._finish(self._turns.answer(placed.answers, said_last(messages), now_s - model_s))
            self._turns.add(completion, placed, role=role, model_s=model_s, now_s=now_s)
        self._requests += 1
        self.failure = ""
        return is_whole

    def failed(self, error: EndpointError) -> None:
        """Remember that the server failed a request: if the agent gives up now, it is not the agent's fault."""
        if isinstance(error, ContextOverflow):
            self._stop(End.context_overflow, writable(str(error)))
        self.failure = writable(f"{type(error).__name__}: {error}")

    def verdict_on(self, error: BaseException) -> tuple[End, str]:
        """Return the end, and the words for it, of an episode whose agent was left by `error`.

        An exception of the agent's is data: its code stands around the model as an environment does, so it ends the
        episode with `env_error`, unless it is the echo of something else: of a limit, of a server that failed.
        """
        if not isinstance(error, Exception):  # GeneratorExit too: its event loop is gone
            return End.cancelled, "cancelled from outside"
        if (echoed := self._stopped()) is not None:
            return echoed
        if isinstance(error, ToolError):
            return End.tool_error, self._where(str(error))
        what = str(error) if isinstance(error, EnvError) else f"the agent must not raise: got {describe_error(error)}"
        return End.env_error, self._where(what)

    def seal(self, end: End | None = None, error: str = "") -> Trajectory:
        """End the episode and return its record; a sealed session stays as it is. Requests under way are dropped.

        Args: end: None for the limit that was reached or the server's failure that nothing came after: no agent's
            shrug makes a failure of the policy of it. Otherwise success when the rewards come to more than 0 (those
            named `outcome`, if there are any), failure when they do not.
        """
        if self._trajectory is not None:
            return self._trajectory
        if end is None:
            verdict = End.success if self._turns.reward() > 0 else End.failure
            end, error = self._stopped() or (verdict, error)
        self.state = "sealed"
        try:
            for turn in self._turns.unfinished():
                self._finish(turn)
            self._trajectory = trajectory = self._record_of(end, error)
        finally:
            self._drop_requests()
            while self._on_sealed:
                self._on_sealed.pop(0)(self)
        if (tell := self._events.rollout_finished) is not None:
            tell(RolloutFinished(trajectory))
        return trajectory

    # Steps of the above.

    async def _ask(
        self, chat: tuple[Message, ...], sampling: Sampling, tools: Sequence[ToolSpec], seed: int
    ) -> Completion:
        scope = Deadline()
        self._scopes.add(scope)
        try:
            with scope:
                return await self._conversation.complete(
                    chat, sampling, seed=seed, tools=tools, timeout_s=self.limits.request_timeout_s
                )
        except DeadlineExceeded as error:
            if not scope.expired:
                raise  # somebody else's
            raise self._sealed("requests") from error
        except EndpointError as error:
            self.failed(error)
            raise
        finally:
            self._scopes.discard(scope)

    async def _look_ahead(self, chat: tuple[Message, ...], tools: Sequence[ToolSpec]) -> None:
        """Learn the ids of a request that a limit forbids, when value estimates are to bootstrap from there."""
        if not self._last_contexts or self._has_looked:
            return
        sampling = msgspec.structs.replace(self.allowed_sampling(None), max_tokens=1)
        try:
            completion = await self._ask(chat, sampling, tools, self.next_seed())
        except EndpointError:
            return  # what was recorded last has to do
        self._keep_last_context(completion)

    def _keep_last_context(self, completion: Completion) -> None:
        self._has_looked = True
        limit = self.limits.max_context_tokens
        if limit is None or len(completion.prompt_token_ids) <= limit:  # learners may be sized for the limit
            self._recorder.add_last_context(completion.prompt_token_ids)

    def _stopped(self) -> tuple[End, str] | None:
        """Return what keeps the episode from being the agent's to judge, and the words for it; None when nothing."""
        if self.stopped_by is not None:
            return self.stopped_by, self._stopped_because if self.stopped_by is End.context_overflow else ""
        return (End.endpoint_error, self._where(self.failure)) if self.failure else None

    def _is_too_long(self, completion: Completion) -> bool:
        limit = self.limits.max_context_tokens
        return limit is not None and len(completion.prompt_token_ids) + len(completion.token_ids) > limit

    def _stop(self, end: End, why: str) -> None:
        if self.stopped_by is None:
            self.stopped_by, self._stopped_because = end, why

    def _sealed(self, what: str) -> SessionSealed:
        trajectory = self._trajectory
        end = f" with {trajectory.end.value}" if trajectory is not None else ""
        return SessionSealed(f"{what} must come before the session is sealed: it ended{end} (session {self.id})")

    def _drop_requests(self) -> None:
        if not self.is_orphan:
            for scope in self._scopes:
                scope.expire()

    def _finish(self, turn: Turn | None) -> None:
        if turn is not None and (tell := self._events.turn_finished) is not None:
            tell(TurnFinished(self.id, turn))

    def _record_of(self, end: End, error: str) -> Trajectory:
        recorder = self._recorder
        if not self._turns and self._turns.early_rewards and not error:
            error = self._where(f"rewards must have a turn to stand on: got {self._turns.early_rewards} and no turn")
        last_context = recorder.last_context() if end.is_truncation else b""
        return Trajectory(
            id=self.id,
            task=self.task,
            group_id=self._group_id,
            member=self._member,
            seed=self.seed,
            first_observation=self._first_observation,
            turns=self._turns.all(),
            segments=recorder.segments(),
            end=end,
            error=error,
            messages=recorder.messages(),
            last_context=last_context,
            last_context_is_whole=recorder.knows_last_context and last_context != b"",
            token_mode=token_mode_of(self._endpoint),
            drifts=recorder.drifts,
            trainable=not recorder.untrainable_because,
            untrainable_because=recorder.untrainable_because,
            started_s=self._started_s,
            ended_s=self._now(),
        )

    def _now(self) -> float:
        loop = self._loop()  # gone when the episode outlives it
        return loop.time() if loop is not None else self._started_s

    def _where(self, what: str) -> str:
        return writable(f"{what} (session {self.id}, turn {len(self._turns)})")


def _why_not_trained(sampling: Sampling | None) -> str:
    """Say why log-probs of such a sample are not the policy's; empty when they are."""
    if sampling is None:
        return "nobody said how the reply was drawn"
    if (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0):
        return ""
    return (
        f"the agent drew at temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}: "
        "expected 1, 1, 0; let the session pin its sampling"
    )
