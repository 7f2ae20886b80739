"""`turngate serve MODEL_FOLDER`: the embedded engine as a server of its own."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from turngate.runtime.commands import Commands
from turngate.runtime.errors import ConfigError

__all__ = ["add"]

_WEIGHTS = "model.safetensors"  # by name: the module that defines it needs torch


def add(commands: Commands) -> None:
    """Declare the command."""
    serve = commands.add_parser("serve", help="serve a model folder over the OpenAI API until interrupted")
    serve.add_argument("model_folder", type=Path, help="folder with config.json, tokenizer.json, model.safetensors")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="port, 0 for a free one (default: %(default)s)")
    serve.add_argument(
        "--api-key",
        default=os.environ.get("TURNGATE_API_KEY") or None,
        help="key that requests must carry; also read from TURNGATE_API_KEY, where other users cannot see it",
    )
    serve.add_argument("--model-name", default="policy", help="what clients call the model (default: %(default)s)")
    serve.add_argument("--policy-version", type=int, default=0, help="version of the weights (default: %(default)s)")
    serve.add_argument("--critic", type=Path, help="folder of a model with a value head, for guidance and /pooling")
    serve.add_argument("--max-running", type=int, default=128, help="sequences decoded together (default: %(default)s)")
    serve.add_argument("--max-waiting", type=int, default=8192, help="sequences that may wait (default: %(default)s)")
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    # Late: --help and the other commands need no torch.
    from turngate.runtime.engine.config import EngineConfig

    try:
        from turngate.runtime.engine.server import load_critic, load_model, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"turngate serve needs the extra train: {error}; pip install 'turngate[train]'") from error

    config = EngineConfig(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key,
        model_name=arguments.model_name,
        policy_version=arguments.policy_version,
        max_running=arguments.max_running,
        max_waiting=arguments.max_waiting,
        critic=None if arguments.critic is None else str(arguments.critic),
    )
    if config.api_key is None and config.host not in ("127.0.0.1", "localhost", "::1"):
        print(
            f"turngate: serving on {config.host} without --api-key: everybody who reaches it can replace the weights",
            file=sys.stderr,
        )
    _check_folder(arguments.model_folder)
    (model, tokenizer), critic = load_model(arguments.model_folder), load_critic(config)

    def announce(port: int) -> None:
        print(f"serving {config.model_name} at http://{config.host}:{port}/v1", flush=True)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(model, tokenizer, config, stop, critic=critic, on_ready=announce)

    asyncio.run(run())
    return 0


def _check_folder(folder: Path) -> None:
    """Raise ConfigError for a folder that holds model folders, a run or a checkpoint; the error names the newest."""
    if (folder / _WEIGHTS).exists():
        return
    for pattern in ("checkpoints/update-*/model", "update-*/model", "model"):
        if found := sorted(path.parent for path in folder.glob(f"{pattern}/{_WEIGHTS}")):
            raise ConfigError(f"MODEL_FOLDER must hold {_WEIGHTS} itself: {folder} does not; serve {found[-1]}")
