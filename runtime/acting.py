"""How the turns of an episode are chosen: by the policy, by a guided one, or by what is injected."""

from collections.abc import Callable, Sequence

from turngate.envs.base import Snapshot, Task, ToolSpec
from turngate.runtime.base_draw import BaseDraw
from turngate.runtime.conversation import conversation_of
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.episode_env import EpisodeEnv, Waits
from turngate.runtime.errors import ToolError
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.injection import Injection
from turngate.runtime.limits import Limits
from turngate.runtime.live_snapshot import LiveSnapshot
from turngate.runtime.recorded_chat import RecordedChat
from turngate.runtime.seeds import derive_seed
from turngate.runtime.token_conversation import TokenConversation
from turngate.runtime.types import Completion, Message, Sampling

__all__ = ["Acting", "Sampled"]


class Sampled:
    """A completion and what the record needs to know about it until the environment has answered."""

    __slots__ = ("completion", "is_injected", "length", "model_s", "said", "segment", "snapshot", "start")

    def __init__(self, completion: Completion, model_s: float, *, is_injected: bool = False) -> None:
        """Hold a completion that took `model_s` seconds; the recorder says where its tokens are."""
        self.completion = completion
        self.said = Message("assistant", completion.text, completion.tool_calls)
        self.model_s = model_s
        self.is_injected = is_injected
        self.segment = self.start = self.length = 0
        self.snapshot: Snapshot | None = None


class Acting:
    """Chooses the actions of one episode. Cancelled: so is what is under way, and nothing is left behind."""

    # Changed as the episode goes on: tools, which the environment names first; _injected.
    __slots__ = (
        "_calls",
        "_conversation",
        "_endpoint",
        "_env",
        "_guidance",
        "_injected",
        "_injection",
        "_limits",
        "_now",
        "_seed",
        "_task",
        "_timeout_s",
        "_waits",
        "tools",
    )

    def __init__(
        self,
        endpoint: ChatEndpoint,
        task: Task,
        env: EpisodeEnv,
        calls: ForeignCalls,
        waits: Waits,
        *,
        limits: Limits,
        seed: int,
        injection: Injection | None,
        guidance: Guidance | None,
        now: Callable[[], float],
    ) -> None:
        """Begin a conversation with the endpoint. Args: as of `run_rollout`; `calls` and `waits` are the episode's."""
        self._endpoint, self._task, self._env, self._calls, self._waits = endpoint, task, env, calls, waits
        self._seed, self._injection, self._guidance, self._now = seed, injection, guidance, now
        self._limits, self._timeout_s = limits, limits.request_timeout_s
        self._conversation = conversation_of(endpoint)
        self._injected = 0
        self.tools: tuple[ToolSpec, ...] = ()

    async def act(
        self,
        shown: Sequence[Message],
        sampling: Sampling,
        turn: int,
        history: Sequence[Message],
        *,
        policy_tokens: int = 0,
        saved: Snapshot | None = None,
    ) -> Sampled:
        """Return the action of a turn, whoever chooses it.

        Args: shown: what the model sees. history: all messages of the episode, for value functions. policy_tokens:
            generated so far, likewise. saved: the environment's state, where it was taken for the record anyway.
        Raises: EndpointError, as of `Endpoint.complete`. ToolError: the injection failed.
        """
        if self.injects(turn):
            return await self._inject(shown, turn)
        if (guidance := self._guidance) is None:
            return await self.sample(shown, sampling, turn)
        self._waits.wait_for("completion")
        asked_s = self._now()
        draw = BaseDraw(self._endpoint, self._conversation, shown, sampling, self.tools, timeout_s=self._timeout_s)
        where = f"decision of turn {turn}, task {self._task.id}"
        snapshot = LiveSnapshot(self._env, self._limits, where, saved) if self._env.has_snapshots else None
        point = DecisionPoint(
            messages=shown,
            history=history,
            tools=self.tools,
            task=self._task,
            turn=turn,
            seed=derive_seed(self._seed, "sampler", turn),
            policy_version=self._endpoint.policy_version,
            policy_tokens=policy_tokens,
            snapshot=snapshot,
        )
        try:
            chosen = await guidance.choose(draw, point)
        finally:
            if snapshot is not None:
                await snapshot.aclose()
        draw.keep(chosen)
        return Sampled(chosen, self._now() - asked_s)

    def injects(self, turn: int) -> bool:
        """Return whether something other than the policy acts in this turn."""
        return self._injection is not None and self._injection.is_due(self._seed, turn, self._injected)

    def recall(self, chat: RecordedChat) -> None:
        """Go on from the ids of a recorded chat, where chats are rendered here; the tools must be known by now."""
        if isinstance(self._conversation, TokenConversation):
            self._conversation.recall(chat, self.tools)

    async def sample(self, shown: Sequence[Message], sampling: Sampling, turn: int) -> Sampled:
        """Return an action of the policy itself. Raises as `act` does."""
        self._waits.wait_for("completion")
        asked_s, seed = self._now(), derive_seed(self._seed, "sampler", turn)
        completion = await self._conversation.complete(
            shown, sampling, seed=seed, tools=self.tools, timeout_s=self._timeout_s
        )
        return Sampled(completion, self._now() - asked_s)

    async def _inject(self, shown: Sequence[Message], turn: int) -> Sampled:
        assert self._injection is not None
        self._waits.wait_for("injection")
        asked_s = self._now()
        action = await self._calls.run("the injection", ToolError, self._injection.act, shown, self._seed, turn)
        self._injected += 1
        version = self._endpoint.policy_version
        completion = Completion(
            action.text, tool_calls=action.tool_calls, version_sent=version, version_received=version
        )
        return Sampled(completion, self._now() - asked_s, is_injected=True)
