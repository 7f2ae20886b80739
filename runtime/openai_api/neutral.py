"""Fields that change what is sampled: where they are not implemented they are refused, unless they ask for nothing.

A client that trains on a reply must be able to trust its log-probs, so nothing of this kind is ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from turngate.runtime.openai_api.refusals import RequestError

__all__ = ["NEUTRAL", "NEUTRAL_CHAT", "refuse_unsupported"]

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Values that ask for nothing."""
NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {"functions": ([],), "tool_choice": ("none", "auto")}
"""The same for fields of chat requests only."""

_HINTS = {
    "prompt_logprobs": "; use /v1/completions with echo and logprobs",
    "best_of": "; ask for n choices and pick one",
    "functions": "; use tools",
    "tool_choice": "; the model decides whether to call a tool",
}


def refuse_unsupported(value_of: Callable[[str], Any], neutral: Mapping[str, tuple[Any, ...]], who: str) -> None:
    """Refuse a field whose value asks for something. Raises RequestError naming it.

    Args: value_of: returns a field's value, None when it was not given. who: does not support it.
    """
    for name, values in neutral.items():
        value = value_of(name)
        if value is not None and value not in values:
            raise RequestError(
                f"{name} is not supported by {who}: leave it out, got {value!r:.80}{_HINTS.get(name, '')}",
                param=name,
                code="unsupported_parameter",
            )
