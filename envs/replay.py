"""Snapshots for environments that have none: replay the actions that led to a state.

    reset(task, seed) -> actions -> state       saved: task, seed, actions, a digest of every answer
    restore:  reset(task, seed) again -> the same actions -> the same answers -> fresh luck

That is sound where steps have no luck, or where the luck to come can be drawn anew; an environment must say which. It
costs one environment step per action, so use it where a state cannot be written down.
"""

import functools
import inspect
import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, cast

import msgspec

from turngate.envs.base import Action, Env, EnvFactory, Observation, Snapshot, Step, Task

__all__ = ["ReplayedEnv", "replayed"]

_DIGEST_BYTES = 8
"""Per answer: enough to tell answers apart, small beside the action."""


class _Stretch(msgspec.Struct):
    """Actions taken under one luck."""

    seed: int
    actions: list[Action] = []
    digests: list[str] = []
    """Of the answers, hexadecimal."""


class _Record(msgspec.Struct):
    task: Task
    digest: str
    """Of the first observation."""
    stretches: list[_Stretch]
    """The first begins with the reset, each other one with the fresh luck of a restore."""


def replayed(env_factory: EnvFactory, *, deterministic_step: bool | None = None) -> Callable[[], "ReplayedEnv"]:
    """Return a factory of the same environments with `snapshot` and `restore`, by replay.

        runtime.rollout(replayed(MyEnv), task, keep_snapshots=True)

    The environment declares what makes that sound: `deterministic_step = True` when the same actions after the same
    reset always lead to the same answers, whatever the luck; otherwise a method (or coroutine) `reseed(seed)`, which
    is called once the actions are replayed and draws all luck to come from `seed`.

    Args: deterministic_step: declares it of an environment that does not say so itself.
    """
    return functools.partial(ReplayedEnv, env_factory, deterministic_step=deterministic_step)


class ReplayedEnv:
    """An environment that is restored by doing again what was done.

    Mutable state: `env` (the environment; a fresh one after each restore), `_record` (None before `reset` and after
    `aclose`), `_task` (of the last reset), `_is_used` (it has been reset or restored), `_is_torn` (a step began and did
    not end).
    """

    def __init__(self, env_factory: EnvFactory, *, deterministic_step: bool | None = None) -> None:
        """Make the environment. Raises: TypeError: it does not declare what makes replay sound."""
        self._make = env_factory
        self.env: Env = env_factory()
        declared: Any = getattr(self.env, "deterministic_step", False)
        self.deterministic_step = bool(declared) if deterministic_step is None else deterministic_step
        """Whether steps have no luck, as the environment or the caller says."""
        if not self.deterministic_step and not callable(getattr(self.env, "reseed", None)):
            raise TypeError(
                f"replay needs deterministic_step = True or a method reseed(seed): {_name(self.env)} has neither, and "
                "branches from one state would all replay the same luck; declare one of them"
            )
        self.kind = f"turngate.replay:{getattr(self.env, 'kind', '') or _name(self.env)}"
        """Names the environment within, so that its replays are not taken for another's."""
        self._record: _Record | None = None
        self._task: Task | None = None
        self._is_used = self._is_torn = False

    def __repr__(self) -> str:
        taken = _actions(self._record) if self._record else 0
        return f"<ReplayedEnv {_name(self.env)}, {taken} actions>"

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode and a new record."""
        self._is_used, self._record, self._task = True, None, task
        observation = await self.env.reset(task, seed)
        self._record, self._is_torn = _Record(task, _digest(observation), [_Stretch(seed)]), False
        return observation

    async def step(self, action: Action) -> Step:
        """Execute an action and record it. Cancelled or failed: no snapshot can be taken any more."""
        record = self._running()
        self._is_torn = True
        step = await self.env.step(action)
        record.stretches[-1].actions.append(action)
        record.stretches[-1].digests.append(_digest(step))
        self._is_torn = False
        return step

    async def aclose(self) -> None:
        """Close the environment."""
        self._record = None
        await self.env.aclose()

    async def snapshot(self) -> Snapshot:
        """Return what was done so far. Raises: RuntimeError: no episode is running, or a step did not end."""
        record = self._running()
        if self._is_torn:
            raise RuntimeError("a snapshot must be taken between two steps: one was cancelled or raised; restore first")
        # Luck under which nothing was done yet belongs to the future, which no snapshot holds.
        stretches = [*record.stretches[:1], *(stretch for stretch in record.stretches[1:] if stretch.actions)]
        saved = msgspec.structs.replace(record, stretches=stretches)
        # Not msgspec's encoder: it refuses the lone surrogates that models can be made to write.
        return Snapshot(self.kind, json.dumps(msgspec.to_builtins(saved)).encode())

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        """Replay what led to `snapshot` in a fresh environment, then let luck derive from `seed`.

        Cancelled: the environment is somewhere in between, and must be restored again or closed.
        Raises: ValueError: the snapshot is of another kind. RuntimeError: the replay was answered differently.
        """
        if snapshot.kind != self.kind:
            raise ValueError(
                f"snapshot must be of kind {self.kind!r}: got {snapshot.kind!r}; restore it where it is from"
            )
        record = msgspec.convert(json.loads(snapshot.data), _Record)
        if self._task is not None and _plain(self._task) == _plain(record.task):
            record.task = self._task  # what JSON made of it may lack tuples, bytes, and keys that are no text
        self._record = None
        if self._is_used:
            used, self.env = self.env, self._make()
            await used.aclose()
        self._is_used = True
        await self._replay(record)
        if not self.deterministic_step:
            await self._reseed(seed)
            record.stretches.append(_Stretch(seed))
        self._record, self._is_torn = record, False

    async def _replay(self, record: _Record) -> None:
        first = record.stretches[0]
        _check(await self.env.reset(record.task, first.seed), record.digest, "the first observation", self.env)
        total, done = _actions(record), 0
        for stretch in record.stretches:
            if stretch is not first:
                await self._reseed(stretch.seed)
            for action, digest in zip(stretch.actions, stretch.digests, strict=True):
                done += 1
                _check(await self.env.step(action), digest, f"the answer to action {done} of {total}", self.env)

    async def _reseed(self, seed: int) -> None:
        done = cast(Any, self.env).reseed(seed)
        if inspect.isawaitable(done):
            await done

    def _running(self) -> _Record:
        if self._record is None:
            raise RuntimeError("step and snapshot must come after reset: no episode is running; call reset first")
        return self._record


def _digest(answer: Observation | Step) -> str:
    # Not `Step.state`, which is for people and may hold what has no fixed order; repr takes any text there is.
    shown = (answer.observation, answer.rewards, answer.end, answer.valid) if isinstance(answer, Step) else answer
    return blake2b(repr(shown).encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


def _plain(task: Task) -> str:
    return json.dumps(msgspec.to_builtins(task))


def _check(answer: Observation | Step, expected: str, what: str, env: Env) -> None:
    if (got := _digest(answer)) != expected:
        raise RuntimeError(
            f"{what} must be the recorded one: expected digest {expected}, got {got} ({_name(env)}); the environment "
            "is not reproducible, give it snapshots of its own"
        )


def _name(env: Env) -> str:
    return f"{type(env).__module__}.{type(env).__qualname__}"


def _actions(record: _Record) -> int:
    return sum(len(stretch.actions) for stretch in record.stretches)
