import asyncio
import copy
import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import aiohttp
import anyio
import pytest
import torch

from turngate.runtime.engine import Engine
from turngate.runtime.errors import ConfigError, EndpointError
from turngate.runtime.types import Message, Sampling

MESSAGES = [Message("user", "buy the red one")]


@pytest.fixture
def folder(tiny_model, tokenizer, tmp_path):
    tiny_model.save(tmp_path / "model")
    tokenizer.save(tmp_path / "model" / "tokenizer.json")
    return tmp_path / "model"


def thread_engine(tiny_model, tokenizer, **settings) -> Engine:
    return Engine.start(tiny_model, tokenizer, mode="thread", **settings)


async def test_engine_serves_its_block_and_stops(tiny_model, tokenizer):
    engine = thread_engine(tiny_model, tokenizer, policy_version=2, api_key="k")
    assert repr(engine) == "<Engine policy, thread, not started>"
    async with engine:
        completion = await engine.endpoint.complete(MESSAGES, Sampling(max_tokens=5), seed=1)
        assert len(completion.token_ids) == len(completion.logprobs) == 5
        assert list(completion.versions) == [2] * 5
        assert engine.endpoint.policy_version == 2
        assert (await engine.statistics())["generated_tokens"] == 5
        assert engine.pid is None
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(engine.url + "/health")
    assert repr(engine) == "<Engine policy, thread, left>"


async def test_thread_engine_reads_a_model_folder(folder):
    async with Engine.start(str(folder), mode="thread") as engine:
        assert (await engine.statistics())["policy_version"] == 0


async def test_callers_model_is_left_alone(tiny_model, tokenizer, tmp_path):
    before = copy.deepcopy(tiny_model.state_dict())
    async with thread_engine(tiny_model, tokenizer) as engine:
        other = copy.deepcopy(tiny_model)
        with torch.no_grad():
            other.embed.weight.zero_()
        other.save_weights(tmp_path / "w.safetensors")
        await engine.publisher.publish(tmp_path / "w.safetensors", 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny_model.state_dict().items())
    assert all(parameter.requires_grad for parameter in tiny_model.parameters())


async def test_broken_engine_ends_the_block_with_the_reason(tiny_model, tokenizer, monkeypatch, caplog):
    def fail(self):
        raise ZeroDivisionError("the model is on fire")

    monkeypatch.setattr("turngate.runtime.engine.batcher.Batcher.step", fail)

    async def use() -> None:
        async with thread_engine(tiny_model, tokenizer) as engine:
            await engine.endpoint.complete(MESSAGES, Sampling(max_tokens=4))
            pytest.fail("retries must not outlive the engine")

    with pytest.raises(EndpointError, match="the model is on fire"):
        await use()
    assert asyncio.current_task().cancelling() == 0


async def test_cancellation_from_outside_passes_through(tiny_model, tokenizer):
    entered = asyncio.Event()

    async def use() -> None:
        async with thread_engine(tiny_model, tokenizer):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_broken_engine_ends_task_groups_inside_the_block(tiny_model, tokenizer, monkeypatch, caplog):
    def fail(self):
        raise ZeroDivisionError("the model is on fire")

    monkeypatch.setattr("turngate.runtime.engine.batcher.Batcher.step", fail)

    async def use() -> None:
        async with thread_engine(tiny_model, tokenizer) as engine, anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(engine.endpoint.complete, MESSAGES, Sampling(max_tokens=4))

    with pytest.raises(EndpointError, match="the model is on fire"):
        await use()


async def test_cancel_scope_around_the_block_stops_the_engine(tiny_model, tokenizer):
    engine = thread_engine(tiny_model, tokenizer)
    with anyio.CancelScope() as scope:
        async with engine:
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    async with aiohttp.ClientSession() as session:
        assert not await is_listening(session, engine.url)


async def test_error_of_the_block_passes_through(tiny_model, tokenizer):
    with pytest.raises(KeyError, match="mine"):
        async with thread_engine(tiny_model, tokenizer):
            raise KeyError("mine")


def test_bad_settings_are_refused_before_anything_starts(tiny_model):
    with pytest.raises(ConfigError, match="must come with its tokenizer"):
        Engine.start(tiny_model)
    with pytest.raises(ConfigError, match="mode must be"):
        Engine.start("folder", mode="fiber")
    with pytest.raises(ConfigError, match="port must be in"):
        Engine.start("folder", port=-1)


async def test_missing_folder_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        async with Engine.start(tmp_path, mode="thread"):
            pass


async def test_engine_process_serves_learns_and_its_violent_death_is_told(tiny_model, tokenizer, tmp_path, monkeypatch):
    """One process start for all of it: importing torch is what these seconds are spent on."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    async def use() -> None:
        async with Engine.start(tiny_model, tokenizer, api_key="k") as engine:
            # Nothing that kill -9 of this process could leave behind.
            assert list((tmp_path / "temporary").iterdir()) == []
            first = await engine.endpoint.complete(MESSAGES, Sampling(max_tokens=4), seed=1)
            again = await engine.endpoint.complete(MESSAGES, Sampling(max_tokens=4), seed=1)
            assert first.token_ids == again.token_ids
            tiny_model.save_weights(tmp_path / "w.safetensors")
            await engine.publisher.publish(tmp_path / "w.safetensors", 1)
            os.kill(engine.pid, signal.SIGTERM)  # is left to this process, which may need the engine to the end
            later = await engine.endpoint.complete(MESSAGES, Sampling(max_tokens=4), seed=1)
            assert (later.token_ids, list(later.versions)) == (first.token_ids, [1] * 4)
            os.kill(engine.pid, signal.SIGKILL)
            await engine.endpoint.complete(MESSAGES, Sampling(max_tokens=4), timeout_s=60)

    with pytest.raises(EndpointError, match=r"the engine process died: exit code -9 \(SIGKILL\)"):
        await use()


SCRIPT = """
    import asyncio, sys
    from pathlib import Path
    from turngate.runtime.engine import Engine

    async def main():
        async with Engine.start(Path(sys.argv[1])) as engine:
            print(engine.url, flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


async def is_listening(session, url) -> bool:
    try:
        async with session.get(url + "/health"):
            return True
    except aiohttp.ClientConnectionError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_engine_process_ends_with_its_parent(folder, number):
    """By SIGKILL the parent cannot say goodbye; Ctrl-C it handles, and the whole group gets it."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(SCRIPT),
        str(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        url = (await parent.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession() as session:
            async with session.get(url + "/health") as reply:
                assert reply.status == 200
            os.killpg(parent.pid, number)
            _, words = await asyncio.wait_for(parent.communicate(), 30)
            async with asyncio.timeout(30):
                while await is_listening(session, url):
                    pass
        assert parent.returncode == -number
        assert (b"KeyboardInterrupt" in words) == (number == signal.SIGINT)
        assert b"Event loop is closed" not in words
    finally:
        if parent.returncode is None:
            parent.kill()
            await parent.wait()
