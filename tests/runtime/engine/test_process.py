"""The parent's end of the engine process, against stand-ins for the child that start at once."""

import asyncio
import os
import platform
import signal

import anyio
import pytest

from turngate.runtime.engine import process
from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.process import EngineProcess
from turngate.runtime.errors import ConfigError, EndpointError

READY = """
import sys, json
start = json.loads(sys.stdin.readline())
print(json.dumps({"port": 4242}), flush=True)
"""
UNTIL_END_OF_INPUT = READY + "sys.stdin.read()"


@pytest.fixture
def start(monkeypatch, tmp_path):
    def start(code: str, **settings) -> EngineProcess:
        monkeypatch.setattr(process, "_BOOT", code)
        return EngineProcess(tmp_path, EngineConfig(), **{"start_timeout_s": 60.0, **settings})

    return start


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_child_serves_until_its_input_ends(start):
    child = start(UNTIL_END_OF_INPUT)
    assert await child.start() == 4242
    watch = asyncio.create_task(child.watch())
    await child.stop()
    assert await watch == ""
    assert not is_alive(child.pid)


async def test_child_that_does_not_stop_is_killed(start, monkeypatch):
    monkeypatch.setattr(process, "_STOP_TIMEOUT_S", 0.05)
    child = start(READY + "import time\nwhile True: time.sleep(60)")
    await child.start()
    await child.stop()
    assert not is_alive(child.pid)


async def test_death_is_told_with_exit_code_and_last_words(start):
    child = start(UNTIL_END_OF_INPUT + "\nsys.stderr.write('x' * 9000 + ' out of memory'); sys.exit(7)")
    await child.start()
    child._process.stdin.close()
    why = await child.watch()
    assert why.startswith("the engine process died: exit code 7")
    assert why.endswith("out of memory")
    assert len(why) < 5000
    await child.stop()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other habits")
async def test_the_child_keeps_the_memory_that_every_step_needs(start):
    steps = """
import resource
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(20):
    blocks = [b"x" * (4 << 20) for _ in range(6)]  # 6,144 pages together
    del blocks
sys.exit(3 if faults() - before < 20_000 else 4)
"""
    child = start(READY + "sys.stdin.read()" + steps)
    await child.start()
    child._process.stdin.close()
    assert "exit code 3" in await child.watch()
    await child.stop()


async def test_killed_child_is_told_with_the_signal(start):
    child = start(UNTIL_END_OF_INPUT)
    await child.start()
    os.kill(child.pid, signal.SIGKILL)
    assert await child.watch() == "the engine process died: exit code -9 (SIGKILL); it said nothing on stderr"
    await child.stop()


async def test_death_while_starting_is_told(start):
    child = start("raise SystemExit('no such module')")
    with pytest.raises(EndpointError, match=r"died while starting: exit code 1; its last words on stderr:\nno such"):
        await child.start()
    assert not is_alive(child.pid)


@pytest.mark.parametrize(("is_config_error", "kind"), [(True, ConfigError), (False, EndpointError)])
async def test_child_that_cannot_serve_says_why(start, is_config_error, kind):
    answer = {"error": "no weights here", "is_config_error": is_config_error}
    child = start(f"import json; print(json.dumps({answer!r}), flush=True)")
    with pytest.raises(kind, match="no weights here"):
        await child.start()


async def test_start_has_a_deadline_and_leaves_no_child(start, monkeypatch):
    monkeypatch.setattr(process, "_STOP_TIMEOUT_S", 0.05)
    child = start("import time; time.sleep(600)", start_timeout_s=0.2)
    with pytest.raises(EndpointError, match=r"ready within 0\.2 s"):
        await child.start()
    assert not is_alive(child.pid)


async def until_half_started(child):
    async with asyncio.timeout(20):
        while child.pid is None:  # noqa: ASYNC110 - nothing tells when a half-started child has its id
            await asyncio.sleep(0)


async def test_cancelled_start_leaves_no_child(start, monkeypatch):
    monkeypatch.setattr(process, "_STOP_TIMEOUT_S", 0.05)
    child = start("import time; time.sleep(600)")
    task = asyncio.create_task(child.start())
    await until_half_started(child)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(child.pid)


async def test_cancel_scope_around_start_leaves_no_child(start, monkeypatch):
    monkeypatch.setattr(process, "_STOP_TIMEOUT_S", 0.05)
    child = start("import time; time.sleep(600)")

    async def cancel() -> None:
        await until_half_started(child)
        scope.cancel()

    scope = anyio.CancelScope()
    canceller = asyncio.create_task(cancel())
    with scope:
        await child.start()
    assert scope.cancelled_caught
    await canceller
    assert not is_alive(child.pid)


async def test_child_gets_the_settings_and_the_import_path(start):
    config = {"host": "127.0.0.1", "api_key": None}
    check = f"""
import sys, json
start = json.loads(sys.stdin.readline())
assert start["config"].items() >= {config!r}.items(), start
assert any("turngate" in path or "src" in path for path in start["sys_path"]), start
print(json.dumps({{"port": 1}}), flush=True)
"""
    child = start(check)
    assert await child.start() == 1
    await child.stop()
