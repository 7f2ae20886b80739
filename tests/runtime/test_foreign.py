"""Code that is not ours: it can be left, its exits are errors, and what it does to our task is seen."""

import asyncio

import anyio
import pytest

from turngate.envs.base import End, Observation, Step, Task
from turngate.envs.testing import EchoEnv
from turngate.runtime.closing import close_env
from turngate.runtime.limits import Limits
from turngate.runtime.rollout import run_rollout
from turngate.runtime.runtime import Runtime
from turngate.runtime.testing import FakeEndpoint, run_virtual

TASK = Task("t", "Go.")
LIMITS = Limits(tool_timeout_s=30, close_timeout_s=5)


async def stubborn():
    while True:
        try:
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            pass


async def stubborn_below():
    await asyncio.ensure_future(stubborn_for_a_while())


async def stubborn_for_a_while():
    """Ends some time, so that its task does not outlive the test."""
    end_s = asyncio.get_running_loop().time() + 1000
    while (left_s := end_s - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.sleep(left_s)
        except asyncio.CancelledError:
            pass


async def stubborn_gathering():
    await asyncio.gather(stubborn_for_a_while(), stubborn_for_a_while())


async def stubborn_even_when_closed():
    for _ in range(3):  # the deadline, the close, and what Python does with the coroutine when it is gone
        try:
            await asyncio.sleep(50)
        except BaseException:
            pass


def env_whose(method, does):
    """Return an environment class with one method replaced."""

    class Foreign(EchoEnv):
        async def aclose(self):
            self.closed += 1
            if method == "aclose":
                await does()

        if method == "reset":

            async def reset(self, task, seed):
                await does()
                return Observation("go")

        if method == "step":

            async def step(self, action):
                await does()
                return Step(Observation("x"), {"outcome": 1.0}, End.success)

    return Foreign


async def until(rollout):
    """Return (trajectory, when it was there)."""
    return await rollout, asyncio.get_running_loop().time()


def play(env, **options):
    options.setdefault("limits", LIMITS)
    return run_virtual(until(run_rollout(env, TASK, FakeEndpoint(["one"] * 3), **options)))


@pytest.mark.parametrize("does", [stubborn, stubborn_below, stubborn_gathering])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_call_that_ignores_its_deadline_is_left_after_the_grace(method, does, caplog):
    env = env_whose(method, does)
    trajectory, ended_s = play(env)
    assert (trajectory.end, ended_s) == (End.env_error, 35.0)
    assert f"env.{method} must finish within 30 s: it did not" in trajectory.error
    assert f"trajectory t.0: env.{method} ignored its cancellation for 5 s and was left behind" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_that_cannot_even_be_closed_is_left_all_the_same(caplog):
    trajectory, ended_s = play(env_whose("step", stubborn_even_when_closed))
    assert (trajectory.end, ended_s) == (End.env_error, 35.0)
    assert "env.step could not even be closed: RuntimeError" in caplog.text


def test_a_context_function_that_ignores_its_deadline_is_left_too(caplog):
    async def context(history):
        await stubborn()

    trajectory, ended_s = play(EchoEnv, context=context, limits=Limits(turn_timeout_s=20, close_timeout_s=5))
    assert (trajectory.end, ended_s) == (End.tool_error, 25.0)
    assert "the context function ignored its cancellation" in caplog.text


@pytest.mark.parametrize("does", [stubborn, stubborn_below])
def test_cancelled_from_outside_a_stubborn_call_is_left_after_the_grace(does):
    async def main(cancel):
        rollout = asyncio.ensure_future(
            run_rollout(env_whose("step", does), TASK, FakeEndpoint(["one"]), limits=LIMITS)
        )
        await asyncio.sleep(10)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        return asyncio.get_running_loop().time()

    assert run_virtual(main(None)) == 15.0


def test_a_stubborn_close_ends_within_twice_its_time(caplog):
    async def main():
        env = env_whose("aclose", stubborn)()
        await close_env(env, timeout_s=5, owner="x")
        await asyncio.sleep(6)
        return len(asyncio.all_tasks())

    assert run_virtual(main()) == 1
    assert "x: env.aclose ignored its cancellation" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        GeneratorExit(),
        BaseExceptionGroup("g", [asyncio.CancelledError()]),
        type("Own", (BaseException,), {})(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_exit_of_an_environment_or_context_function_reaches_the_event_loop(error, caplog):
    async def does():
        raise error

    def make():
        raise error

    for method in ("reset", "step"):
        trajectory, _ = play(env_whose(method, does))
        assert trajectory.end is End.env_error
        assert f"env.{method} must not raise: got {type(error).__name__}" in trajectory.error
    assert play(make)[0].error.startswith(f"the environment factory must not raise: got {type(error).__name__}")
    trajectory, _ = play(EchoEnv, context=lambda history: make())
    assert trajectory.end is End.tool_error
    assert f"the context function must not raise: got {type(error).__name__}" in trajectory.error
    assert play(env_whose("aclose", does))[0].end is End.success
    assert "env.aclose() raised" in caplog.text


def test_a_keyboard_interrupt_is_the_users_and_goes_on():
    def make():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(make)


async def cancel_myself():
    asyncio.current_task().cancel()


async def cancel_myself_and_wait():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


@pytest.mark.parametrize("does", [cancel_myself, cancel_myself_and_wait])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_cancels_its_own_task_is_an_env_error(method, does):
    async def main():
        trajectory = await run_rollout(env_whose(method, does), TASK, FakeEndpoint(["one"]), limits=LIMITS)
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(1)
        return trajectory

    trajectory = run_virtual(main())
    assert trajectory.end is End.env_error
    assert trajectory.error.startswith(f"env.{method} must not cancel the task that it runs in")


def test_factories_and_context_functions_that_cancel_the_task_are_errors_too():
    def make():
        asyncio.current_task().cancel()
        return EchoEnv()

    def context(history):
        asyncio.current_task().cancel()
        return history.messages

    assert play(make)[0].error.startswith("the environment factory must not cancel the task")
    assert play(EchoEnv, context=context)[0].error.startswith(
        "ToolError: the context function must not cancel the task"
    )


def test_an_environment_may_use_timeouts_and_task_groups_of_its_own():
    async def does():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(10)
        try:
            async with asyncio.TaskGroup() as tg:
                tg.create_task(asyncio.sleep(10))
                tg.create_task(fail())
        except* ValueError:
            pass
        with anyio.move_on_after(1):
            await asyncio.ensure_future(asyncio.sleep(10))
        await asyncio.gather(asyncio.sleep(1), asyncio.to_thread(int))

    async def fail():
        raise ValueError

    trajectory, _ = play(env_whose("step", does))
    assert (trajectory.end, trajectory.error) == (End.success, "")


@pytest.mark.parametrize("reacts", ["returns", "raises"])
def test_a_cancelled_scope_gets_through_to_an_environment_that_swallows_it(reacts):
    async def does():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            if reacts == "raises":
                raise ValueError from None

    Swallowing = type("Swallowing", (env_whose("reset", does), EchoEnv), {})

    async def main():
        with anyio.move_on_after(10) as scope:
            await run_rollout(Swallowing, TASK, FakeEndpoint(["one"] * 3, latency_s=1), limits=LIMITS)
            await asyncio.sleep(1)
        return scope.cancelled_caught, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (True, 10.0)


def test_a_deadline_counts_after_an_environments_task_group_failed():
    """Before Python 3.13 a failing asyncio.TaskGroup leaves the task's count of cancellations one too high."""

    async def fail():
        raise ValueError

    class Grouped(EchoEnv):
        async def reset(self, task, seed):
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as tg:
                    tg.create_task(fail())
            return await super().reset(task, seed)

        async def step(self, action):
            await asyncio.sleep(100)
            return await super().step(action)

    trajectory, _ = play(Grouped)
    assert trajectory.error.startswith("env.step must finish within 30 s")


def test_evaluation_counts_every_episode_that_cancelled_itself():
    n = 0

    async def does():
        nonlocal n
        n += 1
        if n % 2:
            await cancel_myself_and_wait()

    runtime = Runtime(FakeEndpoint(lambda messages: "hi"), limits=LIMITS)
    evaluation = run_virtual(runtime.evaluate(env_whose("step", does), [Task(str(i), "p") for i in range(10)]))
    assert (evaluation.scored, evaluation.failed, len(evaluation.trajectories)) == (5, 5, 10)
    assert "must not cancel the task that it runs in" in str(evaluation)


def test_an_episode_cancelled_behind_our_back_is_still_in_the_evaluation():
    async def does():
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await asyncio.sleep(1)

    runtime = Runtime(FakeEndpoint(lambda messages: "hi"), limits=LIMITS)
    evaluation = run_virtual(runtime.evaluate(env_whose("step", does), [Task("a", "p"), Task("b", "p")]))
    assert (evaluation.scored, evaluation.ends) == (0, {"env_error": 2})
    assert "was cancelled by something that runs inside it" in evaluation.first_error
