"""The options of commands that serve a guided policy, and the values that they name."""

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from turngate.runtime.commands.check import read_key
from turngate.runtime.errors import ConfigError

if TYPE_CHECKING:
    from turngate.runtime.endpoint import Endpoint
    from turngate.runtime.guidance import Guidance, QFunction

__all__ = ["add_guidance_arguments", "check_guidance_arguments", "guidance_of"]

_BETA, _DRAWS, _TIMEOUT_S = 5.0, 8, 30.0
_NEEDS: dict[str, tuple[str, ...]] = {
    "guided_model": ("guided_by",),
    "judge_model": ("judge",),
    **dict.fromkeys(("values_key_file", "beta", "draws", "max_kl", "values_timeout"), ("guided_by", "judge")),
}
"""The sources of values that an option is for."""


def add_guidance_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where values come from, and how replies are chosen by them."""
    group = parser.add_argument_group(
        "guidance", "serves the model BASE@guided: the best of several replies, by values"
    )
    group.add_argument(
        "--guided-by",
        metavar="URL",
        help="values from POST URL/pooling: the embedded engine with a critic, or a reward model of its vocabulary; "
        "asked once at the start",
    )
    group.add_argument("--guided-model", metavar="M", help="what that server calls its model")
    group.add_argument("--judge", metavar="URL", help="values from a judge, the part before /chat/completions")
    group.add_argument("--judge-model", metavar="M", help="what that server calls it (default: the first one it lists)")
    group.add_argument("--values-key-file", type=Path, metavar="FILE", help="file with the key of either of them")
    group.add_argument("--beta", type=float, help=f"weight of the values (default: {_BETA:g})")
    group.add_argument("--draws", type=int, help=f"replies to choose among (default: {_DRAWS})")
    group.add_argument(
        "--max-kl", type=float, metavar="NATS", help="lowers beta until a choice moves no more than this"
    )
    group.add_argument(
        "--values-timeout", type=float, metavar="S", help=f"then the base replies (default: {_TIMEOUT_S:g})"
    )


def check_guidance_arguments(arguments: argparse.Namespace) -> None:
    """Require options that fit together. Raises: ConfigError."""
    if arguments.guided_by is not None and arguments.judge is not None:
        raise ConfigError("--guided-by and --judge must not come together: expected one source of values")
    for name, sources in _NEEDS.items():
        if getattr(arguments, name) is not None and all(getattr(arguments, source) is None for source in sources):
            expected = " or ".join(map(_option, sources))
            raise ConfigError(f"{_option(name)} must come with a source of values: expected {expected}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@asynccontextmanager
async def guidance_of(arguments: argparse.Namespace, endpoint: "Endpoint") -> AsyncGenerator["Guidance | None"]:
    """Yield the guidance that the options ask for, None for none; its connections close with the block.

    Raises: ConfigError: it cannot work with this endpoint. EndpointError: the values' server does not answer.
    """
    key = read_key(arguments.values_key_file, "--values-key-file") if arguments.values_key_file is not None else None
    if arguments.guided_by is not None:
        from turngate.runtime.critic_q import CriticQ
        from turngate.runtime.guidance import DecisionPoint
        from turngate.runtime.types import Completion

        if endpoint.dialect.token_mode == "text":
            raise ConfigError(
                "--guided-by reads token ids, which --upstream does not give (token mode 'text'): use --judge, or a "
                "server that returns ids"
            )
        async with CriticQ(arguments.guided_by, model=arguments.guided_model, api_key=key) as critic:
            guidance = _guidance(critic, arguments)
            # A wrong address is told now, and not by decisions that are all left to the base.
            await critic(DecisionPoint(messages=()), [Completion("", [1], prompt_token_ids=[1])])
            yield guidance
    elif arguments.judge is not None:
        from turngate.runtime.connect import connect
        from turngate.runtime.judge import JudgeEndpoint
        from turngate.runtime.scorer_q import ScorerQ

        judge = await connect(arguments.judge, model=arguments.judge_model, api_key=key, timeout_s=arguments.timeout)
        async with judge:
            yield _guidance(ScorerQ(JudgeEndpoint(judge, timeout_s=_timeout_s(arguments))), arguments)
    else:
        yield None


def _guidance(q: "QFunction", arguments: argparse.Namespace) -> "Guidance":
    from turngate.runtime.guidance import Guidance

    return Guidance(
        q,
        beta=_BETA if arguments.beta is None else arguments.beta,
        draws=_DRAWS if arguments.draws is None else arguments.draws,
        max_kl=arguments.max_kl,
        timeout_s=_timeout_s(arguments),
    )


def _timeout_s(arguments: argparse.Namespace) -> float:
    return _TIMEOUT_S if arguments.values_timeout is None else arguments.values_timeout
