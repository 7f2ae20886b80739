"""`turngate check URL`: what a server can do, and what that means for Turngate."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from turngate.runtime.commands import Commands
from turngate.runtime.errors import ConfigError

if TYPE_CHECKING:
    from turngate.runtime.rendering import Renderer

__all__ = ["add", "add_server_arguments", "api_key_of", "read_key", "renderer_of"]


def add(commands: Commands) -> None:
    """Declare the command."""
    check = commands.add_parser(
        "check",
        help="ask a server what it can do, and say what will work",
        description="Ask a server what it can do, with at most 25 small requests that change nothing. Exit code 0: "
        "episodes can be played on it; 1: not even that.",
    )
    add_server_arguments(check)
    check.add_argument("--json", type=Path, metavar="PATH", help="write the capabilities as JSON, too")
    check.set_defaults(run=_check)


def add_server_arguments(parser: argparse.ArgumentParser, *, url_option: str = "") -> None:
    """Declare what commands that talk to a server have in common; its URL comes first, or as an option."""
    help_text = "the part before /chat/completions, e.g. http://127.0.0.1:8000/v1"
    if url_option:
        parser.add_argument(url_option, dest="url", metavar="URL", required=True, help=f"the server: {help_text}")
    else:
        parser.add_argument("url", help=help_text)
    parser.add_argument("--model", help="what the server calls it (default: the first one it lists)")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the key; also read from TURNGATE_API_KEY. Keys on command lines can be seen by other users",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="the model's folder, to render chats here and send token ids (needs turngate[hf], except for models of "
        "the embedded engine)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds per question (default: %(default)s)"
    )


def api_key_of(arguments: argparse.Namespace) -> str | None:
    """Return the key for the server, None when there is none. Raises: ConfigError: the file cannot be read."""
    file: Path | None = arguments.api_key_file
    if file is None:
        return os.environ.get("TURNGATE_API_KEY") or None
    return read_key(file, "--api-key-file")


def read_key(file: Path, option: str) -> str:
    """Return the key in a file. Raises: ConfigError: it cannot be read, or holds something else."""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} must be readable: {error}") from error
    if not key or not key.isprintable():
        raise ConfigError(f"{option} must hold one key in one line: got something else ({file})")
    return key


def renderer_of(arguments: argparse.Namespace) -> "Renderer | None":
    """Return the renderer for --tokenizer, None without it. Raises: ConfigError: the folder has none."""
    folder: Path | None = arguments.tokenizer
    if folder is None:
        return None
    if (folder / "tokenizer_config.json").exists():
        from turngate.runtime.huggingface_renderer import HuggingFaceRenderer  # late: it needs transformers

        return HuggingFaceRenderer(folder)
    from turngate.runtime.engine_renderer import EngineRenderer

    return EngineRenderer(folder)


def _check(arguments: argparse.Namespace) -> int:
    import msgspec

    from turngate.runtime.probe import probe

    asked = probe(
        arguments.url,
        arguments.model,
        api_key=api_key_of(arguments),
        renderer=renderer_of(arguments),
        timeout_s=arguments.timeout,
    )
    found = asyncio.run(asked)
    print(found.table())
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return 1 if found.problems("evaluate", has_renderer=arguments.tokenizer is not None) else 0
