"""The embedded OpenAI-compatible inference server: tokenizer, chat template, model, batching, sampling, HTTP.

Importing the package loads nothing heavy; `model`, `cache`, `sampler` and `batcher` need torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turngate.runtime.engine.handle import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # Late: the tokenizer and the chat template are used without the HTTP client that the engine's handle needs.
    if name == "Engine":
        from turngate.runtime.engine.handle import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
