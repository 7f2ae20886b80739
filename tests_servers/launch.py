"""Start servers that others wrote, and stop them.

    python -m tests_servers.launch vllm --model tiny             # until Ctrl-C; prints its URL when it answers
    python -m tests_servers.launch vllm --model smollm2 --lora --raw-logprobs
    python -m tests_servers.launch llamacpp --model digits.gguf
    python -m tests_servers.launch transformers --model tiny

Each runs in an environment of its own under `.servers/`, on a free port of the loopback interface, in a process group
of its own that is stopped as a whole. What it prints goes to a file under `.servers/logs/`.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

__all__ = ["KINDS", "MODELS", "Options", "Server", "running"]

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".servers"
MODELS = HOME / "models"
MODEL_NAME = "policy"
"""What clients call the model, whichever it is."""
START_S = 300.0
"""vLLM takes 30 s on two free cores; the rest is for cores that are not free."""
STOP_S = 15.0
LOG_LINES_SHOWN = 40


@dataclass(frozen=True)
class Options:
    """What tests ask of a server beyond its defaults. A kind ignores what it does not have."""

    raw_logprobs: bool = False
    """vLLM: log-probs before temperature and top-p, its own default, instead of those that were sampled from."""
    lora: bool = False
    """vLLM: adapters can be loaded while it runs."""
    dtype: str = "float32"
    """vLLM and transformers: precision of the weights."""
    max_model_len: int = 2048
    """vLLM and llama.cpp: longest context, tokens."""
    arguments: tuple[str, ...] = ()
    """Appended to the command as they are."""


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    kind: str
    url: str
    """Root of the OpenAI API, ending in /v1."""
    model: str
    """What to ask for by name."""
    folder: Path
    """The model's folder or file."""
    log: Path
    pid: int
    ready_s: float
    """Seconds from start to the first answer."""

    @property
    def root(self) -> str:
        """The URL without /v1, where a server's own routes are."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class _Command:
    arguments: list[str]
    environment: dict[str, str]
    model: str = MODEL_NAME


def _engine(model: Path, port: int, options: Options) -> _Command:
    program = [sys.executable, "-c", "import sys; from turngate.runtime.cli import main; sys.exit(main())"]
    return _Command([*program, "serve", str(model), "--port", str(port), "--model-name", MODEL_NAME], {})


def _vllm(model: Path, port: int, options: Options) -> _Command:
    # The command `vllm` itself fails on a CPU build.
    arguments = [_python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
    arguments += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len), "--max-num-seqs", "64"]
    arguments += ["--enforce-eager", "--generation-config", "vllm"]
    # On a CPU it dies when a prompt is computed in parts and the request has a seed; so prompts are computed whole.
    arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(2048, options.max_model_len))]
    arguments += ["--logprobs-mode", "raw_logprobs" if options.raw_logprobs else "processed_logprobs"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if options.lora:
        arguments += ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--max-cpu-loras", "4"]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that load weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
    }
    return _Command(arguments, environment)


def _llamacpp(model: Path, port: int, options: Options) -> _Command:
    arguments = [_python("llamacpp"), "-m", "llama_cpp.server", "--model", str(model), "--model_alias", MODEL_NAME]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", str(options.max_model_len)]
    # Log-probs of a sampled token need the logits of all positions.
    arguments += ["--n_threads", "1", "--logits_all", "true"]
    return _Command(arguments, {})


def _transformers(model: Path, port: int, options: Options) -> _Command:
    arguments = [_python("transformers"), "-m", "transformers.cli.transformers", "serve", str(model)]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", options.dtype, "--device", "cpu"]
    hub = HOME / "hub"  # its list of models fails without a cache of downloads, even an empty one
    hub.mkdir(parents=True, exist_ok=True)
    return _Command(arguments, {"HF_HUB_CACHE": str(hub)}, model=str(model))


KINDS: dict[str, Callable[[Path, int, Options], _Command]] = {
    "engine": _engine,
    "vllm": _vllm,
    "llamacpp": _llamacpp,
    "transformers": _transformers,
}


@contextlib.contextmanager
def running(kind: str, model: str | Path, options: Options | None = None, *, port: int = 0) -> Generator[Server]:
    """Run a server while the block does.

    Args: kind: one of KINDS. model: a name under `.servers/models`, or a path. port: 0 takes a free one.
    Raises: RuntimeError: it died, or did not answer in time; the message has the end of its log.
    """
    folder = Path(model) if isinstance(model, Path) or "/" in model else MODELS / model
    if not folder.exists():
        raise RuntimeError(f"model must exist: got none at {folder}; run `make servers`")
    port = port or _free_port()
    command = KINDS[kind](folder, port, options or Options())
    log = HOME / "logs" / f"{kind}-{port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **command.environment}
    environment.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command.arguments, *(options.arguments if options else ())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,  # stopped as a group: some servers have children
        )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        _wait_until_ready(process, url, log, deadline=started + START_S)
        ready_s = time.monotonic() - started
        yield Server(kind, url, command.model, folder, log, process.pid, ready_s)
    finally:
        _stop(process)


def _python(name: str) -> str:
    python = HOME / name / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"the environment {name} must be installed: got none at {python}; run `make servers`")
    return str(python)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path, *, deadline: float) -> None:
    """Ask for the list of models until there is one: none of these servers announces that it is ready."""
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"server must stay up: got exit status {process.returncode} ({log}):\n{_end(log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"server must answer within {START_S:g} s: got nothing ({log}):\n{_end(log)}")
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop the whole group, by force if asking does not help in time."""
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            break
    with contextlib.suppress(ProcessLookupError):  # children that outlived it
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Run one server until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests_servers.launch", description="Run a test server.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--model", default="tiny", help="name under .servers/models, or a path (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--raw-logprobs", action="store_true", help="vLLM's own default")
    parser.add_argument("--lora", action="store_true", help="let adapters be loaded (vLLM)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=2048)
    given, more = parser.parse_known_args()
    options = Options(given.raw_logprobs, given.lora, given.dtype, given.max_model_len, tuple(more))

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        with running(given.kind, given.model, options, port=given.port) as server:
            print(f"{server.url} model={server.model} pid={server.pid} log={server.log}", flush=True)
            print(f"ready after {server.ready_s:.1f} s; Ctrl-C stops it", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
