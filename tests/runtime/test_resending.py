import asyncio

import pytest

from turngate.runtime.errors import GenerationAborted
from turngate.runtime.resending import resend_aborted
from turngate.runtime.testing import run_virtual


async def test_a_reply_that_was_not_aborted_is_asked_for_once() -> None:
    left: list[float] = []

    async def send(left_s: float) -> str:
        left.append(left_s)
        return "done"

    assert await resend_aborted(send, 5.0) == "done"
    assert left == [pytest.approx(5.0, abs=0.1)]


def test_the_time_that_aborted_attempts_took_is_gone() -> None:
    async def main() -> None:
        left: list[float] = []

        async def send(left_s: float) -> str:
            left.append(left_s)
            await asyncio.sleep(2)
            raise GenerationAborted("abort")

        with pytest.raises(GenerationAborted):
            await resend_aborted(send, 5.0)
        assert left == [5.0, 3.0, 1.0]

    run_virtual(main())


async def test_a_server_that_aborts_for_ever_is_given_up() -> None:
    calls = 0

    async def send(left_s: float) -> str:
        nonlocal calls
        calls += 1
        raise GenerationAborted("abort")

    with pytest.raises(GenerationAborted):
        await resend_aborted(send, 5.0)
    assert calls == 9
