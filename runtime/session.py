"""One episode of an agent that brings its own loop: what it may still ask, what was recorded, and how it ended."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self, TypeAlias, cast

import msgspec

from turngate.envs.base import End, Task, ToolSpec
from turngate.runtime.answers import said_last, writable
from turngate.runtime.chat_messages import AnyMessage, AnyTool, chat_messages, chat_role, chat_tools
from turngate.runtime.conversation import Conversation, conversation_of, token_mode_of
from turngate.runtime.door import Door
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import (
    EndpointError,
    EnvError,
    MalformedReply,
    SessionError,
    SessionLimit,
    SessionSealed,
)
from turngate.runtime.events import Events, RolloutFinished, RolloutStarted, TurnFinished
from turngate.runtime.guidance import Guidance
from turngate.runtime.guided_conversation import GuidedConversation
from turngate.runtime.limits import Limits
from turngate.runtime.seeds import derive_seed
from turngate.runtime.session_calls import CallDropped, SessionCalls
from turngate.runtime.session_door import HasDoor
from turngate.runtime.session_limits import fits_context, limit_reached, over_long
from turngate.runtime.session_record import SessionFacts, session_trajectory
from turngate.runtime.session_recorder import SessionRecorder
from turngate.runtime.session_sampling import allowed_sampling, why_not_trained
from turngate.runtime.session_turns import SessionTurns
from turngate.runtime.session_verdict import SessionVerdict
from turngate.runtime.types import Completion, Message, Sampling, Trajectory, Turn

__all__ = ["Session", "SessionState"]

SessionState: TypeAlias = Literal["open", "sealed"]


class Session(HasDoor):
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
    _requests: int  # replies recorded, the choices of one reply together
    _asked: int  # requests that were given a seed
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
        guidance: Guidance | None = None,
        on_sealed: Callable[["Session"], None] | None = None,
    ) -> None:
        """Open a session, inside a running event loop. Args: as of `SessionTable.create`; `on_sealed` must not fail."""
        self.id, self.key, self.task, self.limits, self.sampling = id, key, task, limits, sampling
        self.seed = seed
        self.env_seed = derive_seed(seed, "env") if env_seed is None else env_seed
        self._last_contexts = last_contexts
        self._endpoint, self._calls = endpoint, SessionCalls(conversation_of(endpoint))
        self._events, self._door = events or Events(), door
        self.guidance = guidance
        """Chooses its replies among several draws; None when the policy itself speaks."""
        loop = asyncio.get_running_loop()
        self._loop = weakref.ref(loop)
        self._facts = SessionFacts(id, task, group_id, member, seed, token_mode_of(endpoint), loop.time())
        self._recorder = SessionRecorder()
        self._turns = SessionTurns()
        self._verdict = SessionVerdict()
        self.state = "open"
        self._requests = self._asked = 0
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
        _ = self.seal() if error is None else self.seal_after(error)

    @property
    def in_flight(self) -> int:
        """Requests of `chat` under way."""
        return len(self._calls)

    @property
    def is_orphan(self) -> bool:
        """Whether its event loop is closed, so that nothing of it can go on."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    @property
    def bug(self) -> Exception | None:
        """What went wrong with a `chat` that no endpoint and no agent can be blamed for; None for nothing."""
        return self._calls.bug

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
        return self._calls.conversation

    def guided(self, guidance: Guidance | None) -> Conversation:
        """Return the chat as its requests go through it: chosen by `guidance`, or as the policy itself speaks."""
        if guidance is None:
            return self.conversation
        return GuidedConversation(self._endpoint, self.conversation, guidance, task=self.task)

    def when_sealed(self, call: Callable[["Session"], None]) -> None:
        """Have `call` called once the session is sealed, or now, when it is; for those who hold something for it.

        It must not fail.
        """
        if self.state == "sealed":
            call(self)
        else:
            self._on_sealed.append(call)

    # What agents do.

    async def chat(
        self,
        messages: Sequence[AnyMessage],
        *,
        sampling: Sampling | None = None,
        tools: Sequence[AnyTool] = (),
        role: str = "",
        seed: int | None = None,
    ) -> Completion:
        """Ask the model, and record what it says.

        Cancelled, or sealed meanwhile: the request is dropped, nothing is recorded.

        Args: messages, tools: our structs or OpenAI's dictionaries.
            sampling: `max_tokens` and `stop` are the agent's choice; the rest is too when the session pins nothing.
            role: which agent of the episode asks, when there are several. seed: derived from the session's when None.
        Raises: SessionSealed: the episode is over. SessionLimit: it has reached a limit. EndpointError: the server
            failed. EnvError: what is given can be neither sent nor recorded.
        """
        chat, offered = chat_messages(messages), chat_tools(tools) if tools else ()
        role = chat_role(role)
        try:
            self.admit(role)
        except SessionLimit:
            await self.look_ahead(chat, offered)
            raise
        asked_s, drawn = self._now(), self.allowed_sampling(sampling)
        seed = self.next_seed() if seed is None else seed
        completion = await self._ask(chat, drawn, offered, seed, guidance=self.guidance)
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

    def admit(self, role: str = "", *, others: int = 0) -> None:
        """Let one more request be sent to the model. Raises: SessionSealed, SessionLimit: it must not be.

        A limit counts replies that were delivered, requests of `chat` under way, and `others` that are under way.
        """
        if self.state == "sealed":
            raise self._sealed("requests")
        requests = self._requests + len(self._calls) + others
        if reached := limit_reached(self.limits, requests=requests, policy_tokens=self._recorder.policy_tokens):
            self._verdict.stop(*reached)
        if self._verdict.stopped_by is not None:
            raise SessionLimit(
                f"session must stay within its limits: {self._verdict.because} (session {self.id}"
                f"{f', role {role}' if role else ''}); end the episode, rewards are still taken"
            )

    def allowed_sampling(self, asked: Sampling | None, choices: int = 1) -> Sampling:
        """Return how the next request is drawn: what is pinned and the token limit before what the agent asks for.

        Its choices share the tokens that are left.
        """
        limit = self.limits.max_policy_tokens
        left = None if limit is None else (limit - self._recorder.policy_tokens) // choices
        return allowed_sampling(asked, self.sampling, left)

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
        if self.sampling is None and (why := why_not_trained(sampling)):
            self.refuse_training(why)
        if not self._turns:
            self._first_observation = said_last(messages)
        is_whole = True
        for completion in completions:
            if reached := over_long(self.limits, completion):
                self._verdict.stop(*reached)
                self._keep_last_context(completion)
                is_whole = False
                continue
            try:
                placed = self._recorder.place(completion, len(self._turns), messages, role)
            except MalformedReply as error:  # its agent may have got its text, and go on: later turns do not heal that
                self._recorder.refuse_training(f"{error} (turn {len(self._turns)})")
                raise
            if placed.answers >= 0:
                self._finish(self._turns.answer(placed.answers, said_last(messages), now_s - model_s))
            self._turns.add(completion, placed, role=role, model_s=model_s, now_s=now_s)
        self._requests += 1
        self._verdict.delivered()
        return is_whole

    def refuse_training(self, why: str) -> None:
        """Make the record one that cannot be trained on, because of the next turn; the first reason stays."""
        self._recorder.refuse_training(f"{why} (turn {len(self._turns)})")

    async def look_ahead(self, chat: tuple[Message, ...], tools: Sequence[ToolSpec]) -> None:
        """Learn the ids of a request that a limit forbids, when value estimates are to bootstrap from there.

        Does nothing unless the session was opened with `last_contexts`, and then once.
        """
        if not self._last_contexts or self._has_looked:
            return
        sampling = msgspec.structs.replace(self.allowed_sampling(None), max_tokens=1)
        try:
            completion = await self._ask(chat, sampling, tools, self.next_seed())
        except EndpointError:
            return  # what was recorded last has to do
        self._keep_last_context(completion)

    def failed(self, error: EndpointError) -> None:
        """Remember that the server failed a request: if the agent gives up now, it is not the agent's fault."""
        self._verdict.fail(error)

    def seal_after(self, error: BaseException) -> Trajectory:
        """End the episode of an agent that `error` has left; see `SessionVerdict.on_error`."""
        end, why = self._verdict.on_error(error)
        return self.seal(end, why and self._where(why))

    def seal(self, end: End | None = None, error: str = "") -> Trajectory:
        """End the episode and return its record; a sealed session stays as it is. Requests under way are dropped.

        Args: end: None for the limit that was reached, or the server's failure that no reply came after; otherwise
            success when the rewards come to more than 0 (those named `outcome`, if there are any), failure if not.
        Raises: EnvError: the end is none; the session stays open.
        """
        if self.state == "sealed":
            return self.trajectory
        if end is not None and not isinstance(cast(object, end), End):
            raise EnvError(f"end must be an End or None: got {end!r:.80} (session {self.id})")
        error = writable(str(error or ""))
        if end is None:
            end, why = self._verdict.on_return(self._turns.reward())
            error = error or (why and self._where(why))
        self.state = "sealed"
        try:
            for turn in self._turns.unfinished():
                self._finish(turn)
            self._trajectory = trajectory = session_trajectory(
                self._facts,
                self._recorder,
                self._turns,
                end,
                error,
                first_observation=self._first_observation,
                ended_s=self._now(),
            )
        finally:
            if not self.is_orphan:
                self._calls.drop_all()
            while self._on_sealed:
                self._on_sealed.pop(0)(self)
        if (tell := self._events.rollout_finished) is not None:
            tell(RolloutFinished(trajectory))
        return trajectory

    # Steps of the above.

    async def _ask(
        self,
        chat: tuple[Message, ...],
        sampling: Sampling,
        tools: Sequence[ToolSpec],
        seed: int,
        guidance: Guidance | None = None,
    ) -> Completion:
        through, timeout_s = self.guided(guidance), self.limits.request_timeout_s
        try:
            return await self._calls.ask(chat, sampling, tools, seed, timeout_s, through=through)
        except CallDropped:
            raise self._sealed("requests") from None
        except EndpointError as error:
            self.failed(error)
            raise

    def _keep_last_context(self, completion: Completion) -> None:
        self._has_looked = True
        if fits_context(self.limits, completion):
            self._recorder.add_last_context(completion.prompt_token_ids)

    def _sealed(self, what: str) -> SessionSealed:
        trajectory = self._trajectory
        end = f" with {trajectory.end.value}" if trajectory is not None else ""
        return SessionSealed(f"{what} must come before the session is sealed: it ended{end} (session {self.id})")

    def _finish(self, turn: Turn | None) -> None:
        if turn is not None and (tell := self._events.turn_finished) is not None:
            tell(TurnFinished(self.id, turn))

    def _now(self) -> float:
        loop = self._loop()  # gone when the episode outlives it
        return loop.time() if loop is not None else self._facts.started_s

    def _where(self, what: str) -> str:
        return self._facts.where(what, len(self._turns))
