"""Capabilities as text for people."""

import textwrap

from turngate.runtime.capabilities import PROCESSED_HINT, USES, Capabilities, Finding, Use
from turngate.runtime.types import Sampling

__all__ = ["render_table"]

_LABELS = {
    "models": "model is listed",
    "chat": "chat completions",
    "completions": "text completions",
    "prompt_ids": "ids of the prompt",
    "sampled_ids": "ids of what was sampled",
    "id_prompts": "prompts of token ids",
    "completion_ids": "ids from completions",
    "id_strings": "token_id: strings",
    "logprobs": "log-probs of sampled tokens",
    "plain_logprobs": "  without alternatives",
    "completion_logprobs": "  from completions",
    "follows_temperature": "  after temperature",
    "follows_truncation": "  after top_k, top_p",
    "prompt_logprobs": "log-probs of prompts",
    "top_k": "top_k",
    "n": "n choices",
    "seeds": "seeds",
    "streaming": "streaming",
    "stream_ids": "  with ids",
    "tools": "tools on offer",
    "tool_calls": "  calls parsed",
    "stop": "stop strings",
    "stop_ids": "  whole last token in ids",
    "prefix_cache": "prefix cache",
    "weights": "takes weights",
    "versions": "policy version per token",
}
_WIDTH = 120
_PLAIN = Sampling()


def render_table(capabilities: Capabilities) -> str:
    """Return each capability with what was seen, then each use with its problems and limits."""
    context = f", context {capabilities.max_context}" if capabilities.max_context else ""
    lines = [
        f"{capabilities.model} at {capabilities.url}",
        f"{capabilities.server}{context}; {capabilities.requests} requests asked",
        "",
    ]
    width = max(map(len, _LABELS.values()))
    for name, label in _LABELS.items():
        finding: Finding = getattr(capabilities, name)
        lines.append(f"{label:<{width}}  {finding.verdict:<7}  {finding.seen}".rstrip())
    lines += ["", "In Turngate:"]
    for use in USES:
        lines += _use_lines(capabilities, use)
    return "\n".join(lines)


def _use_lines(capabilities: Capabilities, use: Use) -> list[str]:
    problems = capabilities.problems(use, _PLAIN if use == "train" else None)
    if problems:
        return [f"  {use:<9} no   {USES[use]}", *_wrapped(problems)]
    return [f"  {use:<9} yes  {USES[use]}", *_wrapped(_limits(capabilities, use))]


def _wrapped(sentences: list[str]) -> list[str]:
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, _WIDTH, initial_indent=f"{'':<14}- ", subsequent_indent=f"{'':<16}")
    ]


def _limits(capabilities: Capabilities, use: Use) -> list[str]:
    """Return what to know about a use that works."""
    if use == "record":
        return [_token_modes(capabilities)]
    if use == "train":
        limits = _sampling_limits(capabilities)
        if not capabilities.versions.is_yes:
            limits.append("tokens get the policy version known when their request was sent")
        return limits
    if use == "guide":
        levels = f"one request per candidate{_token_level(capabilities)}"
        if capabilities.token_mode(has_renderer=True) == "text":
            return [levels, "only by values that read text, as judges do"]
        return [levels]
    if use == "publish":
        limits = [capabilities.weights.seen]
        if not capabilities.prompt_logprobs.is_yes:
            limits.append("without log-probs of prompts a canary cannot check that they arrived")
        return limits
    return []


def _token_level(capabilities: Capabilities) -> str:
    if capabilities.value_version is not None:
        return ", or token by token, in one"
    return "" if capabilities.server.startswith("turngate") else "; token by token in the embedded engine only"


def _sampling_limits(capabilities: Capabilities) -> list[str]:
    """Return which settings cannot be trained with, and what would change that."""
    limits: list[str] = []
    if not (temperature := capabilities.follows_temperature).is_yes:
        limits.append(f"only at temperature 1: {temperature.seen}")
    if not (truncation := capabilities.follows_truncation).is_yes:
        limits.append(f"only with top_p 1 and top_k 0: {truncation.seen}")
    return [*limits, PROCESSED_HINT] if limits else []


def _token_modes(capabilities: Capabilities) -> str:
    plain, rendered = capabilities.token_mode(), capabilities.token_mode(has_renderer=True)
    if plain == rendered:
        return f"token mode {plain!r}"
    other = "recording is impossible" if plain == "text" else f"mode {plain!r}"
    return f"token mode {rendered!r} with a renderer for its chats (--tokenizer FOLDER); {other} without"
