import anyio
import pytest

from turngate.runtime.unwrap import single_errors


async def _fail(error: Exception) -> None:
    raise error


async def _run_nested() -> None:
    with single_errors():
        async with anyio.create_task_group() as outer:
            async with anyio.create_task_group() as inner:
                inner.start_soon(_fail, KeyError("one"))
            outer.start_soon(anyio.sleep, 0)


async def _run_two() -> None:
    with single_errors():
        async with anyio.create_task_group() as tg:
            tg.start_soon(_fail, KeyError("one"))
            tg.start_soon(_fail, OSError("two"))


async def test_the_error_of_a_task_arrives_as_itself() -> None:
    with pytest.raises(KeyError, match="one"):
        await _run_nested()


async def test_further_errors_become_notes() -> None:
    with pytest.raises(KeyError) as caught:
        await _run_two()
    assert caught.value.__notes__ == ["also: OSError: two"]
