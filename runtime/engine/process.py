"""An engine in a process of its own: both ends of it.

The parent writes the start-up message to the child's stdin and keeps that pipe open: its end of file, however the
parent died, tells the child to stop. The child answers with one line on stdout when it serves, or why it cannot.
A fresh interpreter rather than a `multiprocessing` child, so the user's script is not imported a second time and
needs no `if __name__ == "__main__"`.
"""

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from asyncio.subprocess import Process
from pathlib import Path
from typing import IO, NoReturn

import anyio
import msgspec

from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.errors import ConfigError, EndpointError

__all__ = ["CHILD_ENVIRONMENT", "EngineProcess", "main"]

_STOP_TIMEOUT_S = 5.0
"""A child that has not stopped by then is killed; open requests are cut, not served, so this is generous."""
_STDERR_TAIL_BYTES = 4096
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
"""Of the child, where nobody says otherwise: one thread, and memory that it keeps. glibc gives blocks as large as a
step's back to the system at once, to ask for them again in the next: up to a third of a guided step went into page
faults. Others ignore that."""

# sys.path travels as with multiprocessing: the parent may have found turngate in ways the child cannot guess.
_BOOT = (
    "import json, sys; start = json.loads(sys.stdin.buffer.readline()); sys.path[:] = start['sys_path']; "
    "from turngate.runtime.engine.process import main; main(start)"
)


class _Ready(msgspec.Struct, frozen=True):
    """What the child says when it serves, or `error` when it cannot."""

    port: int = 0
    error: str = ""
    is_config_error: bool = False


class EngineProcess:
    """The parent's end: starts the child, notices its death, stops it."""

    # State.
    port: int  # where the child serves; 0 before `start` returned
    death: str  # why the child is gone, once it died without being asked to

    def __init__(self, folder: Path, config: EngineConfig, *, start_timeout_s: float) -> None:
        self._folder = folder
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._process: Process | None = None
        self._stderr: IO[bytes] | None = None
        self._is_stopping = False
        self.port = 0
        self.death = ""

    def __repr__(self) -> str:
        pid = self._process.pid if self._process else None
        return f"<EngineProcess pid {pid}, port {self.port}{', dead' if self.death else ''}>"

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before it was started."""
        return self._process.pid if self._process else None

    async def start(self) -> int:
        """Start the child and return its port once it serves. Cancelled or failed: no child is left behind.

        Raises: ConfigError: the model folder or a setting cannot work. EndpointError: the child died or took too long.
        """
        # A file rather than a pipe: nobody has to drain it, and it outlives the child.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _BOOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._stderr,
                env={**CHILD_ENVIRONMENT, **os.environ},
                process_group=0,  # Ctrl-C reaches the parent only; it decides when the engine stops
            )
            ready = await self._handshake(self._process)
        except BaseException:
            await self.stop()
            raise
        self.port = ready.port
        return self.port

    async def _handshake(self, process: Process) -> _Ready:
        assert process.stdin is not None
        assert process.stdout is not None
        message = {
            "sys_path": sys.path,
            "folder": str(self._folder),
            "config": msgspec.to_builtins(self._config),
        }
        try:
            async with asyncio.timeout(self._start_timeout_s):
                with contextlib.suppress(ConnectionError):  # a dead child is reported by its exit code below
                    process.stdin.write(json.dumps(message).encode() + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise EndpointError(
                f"the engine must be ready within {self._start_timeout_s} s: got no sign of it; "
                f"raise start_timeout_s on a slow machine{self._stderr_tail()}"
            ) from None
        if not line:
            raise EndpointError(f"the engine process died while starting: {await self._obituary(process)}")
        ready = msgspec.json.decode(line, type=_Ready)
        if ready.error:
            raise (ConfigError if ready.is_config_error else EndpointError)(ready.error)
        return ready

    async def watch(self) -> str:
        """Wait for the child to die unasked and return why, with its exit code and last words.

        Returns an empty text when it was stopped on purpose.
        """
        assert self._process is not None
        await self._process.wait()
        if not self._is_stopping:
            self.death = f"the engine process died: {await self._obituary(self._process)}"
        return self.death

    async def stop(self) -> None:
        """Stop the child: ask, then kill. Finishes within seconds; cancelled: the child is killed."""
        self._is_stopping = True
        try:
            if self._process is not None and self._process.returncode is None:
                with anyio.CancelScope(shield=True):
                    await _stop(self._process)
        finally:
            if self._stderr is not None:
                self._stderr.close()

    async def _obituary(self, process: Process) -> str:
        code = await process.wait()
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"exit code {code}{name}{self._stderr_tail()}"

    def _stderr_tail(self) -> str:
        """The child's last words, introduced, or an empty text when it said nothing."""
        assert self._stderr is not None
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return f"; its last words on stderr:\n{tail}" if tail else "; it said nothing on stderr"


async def _stop(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    await process.wait()


def main(start: dict[str, object]) -> NoReturn:
    """Run in the child: serve until the parent hangs up. `start` is the parent's message."""
    # The end of our input says when to stop. Service managers send SIGTERM to all: the parent may still need us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Stdout belongs to the handshake; whatever else prints goes to stderr and cannot fill the pipe.
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        asyncio.run(_serve(Path(str(start["folder"])), msgspec.convert(start["config"], EngineConfig), answer))
    except Exception as error:  # the boundary: the parent must learn why, whatever it was
        traceback.print_exc()
        with contextlib.suppress(OSError):
            _answer(answer, _Ready(error=f"engine: {error}", is_config_error=isinstance(error, ConfigError)))
        sys.exit(1)
    sys.exit(0)


async def _serve(folder: Path, config: EngineConfig, answer: IO[bytes]) -> None:
    # Imported here: the parent needs neither torch nor the server.
    from turngate.runtime.engine.server import load_critic, load_model, serve

    stop = asyncio.Event()
    _stop_at_end_of_input(asyncio.get_running_loop(), stop)
    (model, tokenizer), critic = load_model(folder), load_critic(config)
    # What is loaded stays; collections during decoding need not look at it, and rarely need to run at all.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    await serve(model, tokenizer, config, stop, critic=critic, on_ready=lambda port: _answer(answer, _Ready(port=port)))


def _answer(answer: IO[bytes], ready: _Ready) -> None:
    answer.write(msgspec.json.encode(ready) + b"\n")


def _stop_at_end_of_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set `stop` when the parent closes our stdin or dies; end the process even if the loop is stuck."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(stop.set)
        time.sleep(_STOP_TIMEOUT_S)
        os._exit(1)

    threading.Thread(target=wait, name="turngate-parent-watch", daemon=True).start()
