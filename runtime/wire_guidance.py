"""What a server says of tokens that it guided, and what is asked of one that cannot."""

from array import array

import msgspec

from turngate.runtime.dialect import Dialect
from turngate.runtime.errors import ConfigError, MalformedReply
from turngate.runtime.types import Completion, GuidedTokens, Sampling, TokenGuidance
from turngate.runtime.wire import ChatReply, TextReply

__all__ = ["asked_guidance", "with_guided_tokens"]


def asked_guidance(sampling: Sampling, dialect: Dialect) -> TokenGuidance | None:
    """Return the guidance to ask for. Raises: ConfigError: the server has none."""
    if sampling.guidance is not None and not dialect.guidance:
        raise ConfigError(
            "token guidance needs a server that draws tokens by values: this one is not known to "
            "(Dialect(guidance=False)); use the embedded engine with a critic, or guide whole actions with Guidance"
        )
    return sampling.guidance


def with_guided_tokens(completion: Completion, reply: ChatReply | TextReply, sampling: Sampling) -> Completion:
    """Return the completion with what guidance did to it; as it is when none was asked for.

    Raises: MalformedReply: the server does not say what the tokens' log-probs were without guidance.
    """
    guidance = sampling.guidance
    if guidance is None:
        return completion
    base = reply.choices[0].base_logprobs
    if base is None or len(base) != len(completion.token_ids):
        got = "none" if base is None else str(len(base))
        raise MalformedReply(
            f"guided tokens must come with their log-probs under the policy: expected {len(completion.token_ids)}, got "
            f"{got} (choices[0].base_logprobs)"
        )
    versions = reply.choices[0].value_versions
    if versions is not None and len(versions) != len(base):
        raise MalformedReply(
            f"value versions must be per token: expected {len(base)}, got {len(versions)} (choices[0].value_versions)"
        )
    versions = versions or [reply.value_version]
    guided = GuidedTokens(
        beta=guidance.beta,
        top_k=guidance.top_k,
        tail=guidance.tail,
        value_version=min(versions),
        base_logprobs=array("f", base).tobytes(),
        value_versions=array("i", versions).tobytes() if len(set(versions)) > 1 else b"",
    )
    return msgspec.structs.replace(completion, guided_tokens=guided)
