import asyncio
import os
import signal

import pytest

from turngate.runtime.sigterm import exit_on_sigterm


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_the_block_is_cancelled_cleans_up_and_leaves_as_an_exit() -> None:
    steps: list[str] = []

    async def use() -> None:
        with exit_on_sigterm():
            try:
                _terminate()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                steps.append("saved")
                raise

    with pytest.raises(SystemExit) as caught:
        await use()
    assert caught.value.code == 143
    assert steps == ["saved"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_other_cancellations_and_errors_pass_through() -> None:
    async def use() -> None:
        with exit_on_sigterm():
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(KeyError):
        with exit_on_sigterm():
            raise KeyError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_whoever_cancelled_too_gets_the_cancellation() -> None:
    async def use() -> None:
        with exit_on_sigterm():
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    _terminate()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_handler_of_the_application_is_left_alone() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with exit_on_sigterm():
            _terminate()
            await asyncio.sleep(0)
        assert heard == [signal.SIGTERM]
        _terminate()
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def test_other_threads_have_no_say_in_it() -> None:
    def run() -> signal.Handlers:
        async def use() -> signal.Handlers:
            with exit_on_sigterm():
                return signal.getsignal(signal.SIGTERM)  # type: ignore[return-value]

        return asyncio.run(use())

    assert await asyncio.to_thread(run) is signal.SIG_DFL
