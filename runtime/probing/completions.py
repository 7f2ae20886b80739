"""Questions to /completions: prompts of token ids, and log-probs of prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from turngate.runtime.capabilities import Finding
from turngate.runtime.probing.asking import Answer, Asker, as_ids, as_number, together
from turngate.runtime.probing.distribution import HOT, TINY_TOP_P, judge_temperature, judge_truncation
from turngate.runtime.probing.judging import failed, judge_echo, judge_ids, judge_logprobs, judge_strings, no, yes

__all__ = ["ask_completions"]

_PATH = "/completions"
_EXTRAS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_SOME_IDS = (10, 11, 12, 13)
"""For servers that do not say how they render: ordinary tokens in any vocabulary that is larger than a few."""


async def ask_completions(
    asker: Asker, model: str, prompt_ids: Sequence[int], *, alone: bool
) -> tuple[dict[str, Finding], list[Answer]]:
    """Ask with a prompt of ids (`prompt_ids`, or some if there are none), and with a text when ids are refused.

    Args: alone: chats do not work, so that questions about the distribution are asked here.
    Returns: the findings, and the successful replies.
    """
    prompt = list(prompt_ids or _SOME_IDS)
    base: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": 4, "logprobs": 1}
    answer = await asker.post(_PATH, {**base, "prompt": prompt, **_EXTRAS})
    if answer.was_refused and answer.status != 404:
        del base["logprobs"]  # the plainest request
        answer = await asker.post(_PATH, {**base, "prompt": prompt})
    found = {"id_prompts": _judge_id_prompts(answer, prompt)}
    if not answer.ok:
        found["completions"] = failed(answer)
        if answer.was_refused and answer.status != 404:
            by_text = await asker.post(_PATH, {**base, "prompt": "One, two,"})
            found["completions"] = _judge_text(by_text)
        return found, []
    found["completions"] = _judge_text(answer)
    ids = as_ids(answer.at("choices", 0, "token_ids"))
    found["completion_ids"] = judge_ids(ids, "token_ids")
    if not found["id_prompts"].is_yes:
        return found, [answer]
    found["id_strings"] = judge_strings(answer)  # here they matter: chats without ids of the prompt cannot be used
    found["completion_logprobs"] = judge_logprobs(answer, ids)
    echo = {"model": model, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 1.0}
    echoed = await asker.post(_PATH, echo)
    found["prompt_logprobs"] = judge_echo(echoed, len(prompt))
    if alone and found["completion_logprobs"].is_yes:
        found |= await _ask_distribution(asker, {"model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 5})
    return found, [answer, echoed]


async def _ask_distribution(asker: Asker, base: Mapping[str, Any]) -> dict[str, Finding]:
    at_one, hot, cut = await together(
        asker.post(_PATH, {**base, "temperature": 1.0, "top_p": 1.0}),
        asker.post(_PATH, {**base, "temperature": HOT, "top_p": 1.0}),
        asker.post(_PATH, {**base, "temperature": HOT, "top_p": TINY_TOP_P}),
    )
    return {
        "follows_temperature": judge_temperature(at_one, hot, HOT),
        "follows_truncation": judge_truncation(at_one, hot, cut),
    }


def _judge_text(answer: Answer) -> Finding:
    if not answer.ok:
        return failed(answer)
    text = answer.at("choices", 0, "text")
    return yes(f"said {text:.40}") if isinstance(text, str) else no(f"no text in the reply: {answer.text[:60]}")


def _judge_id_prompts(answer: Answer, prompt: list[int]) -> Finding:
    """Judge whether the prompt was read as ids, and not as something else of the same shape."""
    if not answer.ok:
        return failed(answer)
    told = as_ids(answer.at("choices", 0, "prompt_token_ids")) or as_ids(answer.at("prompt_token_ids"))
    counted = as_number(answer.at("usage", "prompt_tokens"))
    if told and told != prompt:
        return no(f"other ids came back: {told[:4]} for {prompt[:4]}")
    if counted is not None and counted != len(prompt):
        return no(f"{len(prompt)} ids were counted as {counted:g} tokens")
    if not isinstance(answer.at("choices", 0, "text"), str):
        return no("no text in the reply")
    return yes(f"{len(prompt)} ids, the same came back" if told else f"{len(prompt)} ids accepted")
