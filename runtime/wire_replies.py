"""From a server's reply to a completion: whole, aligned, and of the prompt that was sent, or not at all."""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, cast

import msgspec

from turngate.envs.base import ToolCall
from turngate.runtime.errors import GenerationAborted, MalformedReply
from turngate.runtime.json_ids import JsonIds, parse_ids
from turngate.runtime.types import Completion
from turngate.runtime.wire import LEAST_LOGPROB, LOGPROB_SLACK, ChatChoice, ChatReply, TextChoice, TextReply

__all__ = [
    "chat_completion",
    "check_finished",
    "check_logprobs",
    "check_prompt",
    "choice_completion",
    "prompt_ids",
    "spelled_ids",
    "text_completion",
]

_ID_STRING = b'"token_id:'
"""How vLLM begins a token when asked for `return_tokens_as_token_ids`."""


def chat_completion(
    reply: ChatReply, version_sent: int, version_received: int, newest_version: int | None = None
) -> Completion:
    """Check a chat reply and return its only choice as a completion.

    Args: newest_version: the newest policy version that can be in service; None when nobody knows.
    Raises: MalformedReply: what is there contradicts itself, or claims a version from the future. Missing ids or
        log-probs are not an error.
    """
    prompt = prompt_ids(reply.prompt_token_ids)
    return choice_completion(_first(reply.choices), prompt, version_sent, version_received, newest_version)


def prompt_ids(text: "bytes | msgspec.Raw") -> Sequence[int]:
    """Return the ids that a server wrote as a JSON array; none when it wrote nothing, or null."""
    text = bytes(text)
    return JsonIds(text) if text and text != b"null" else ()


def choice_completion(
    choice: ChatChoice | TextChoice,
    prompt: Sequence[int],
    version_sent: int,
    version_received: int,
    newest_version: int | None = None,
) -> Completion:
    """Check one choice of a reply and return it. Raises MalformedReply as `chat_completion` does."""
    check_finished(choice)
    text, logprobs, calls = _said_in_chat(choice) if isinstance(choice, ChatChoice) else _said_in_text(choice)
    return Completion(
        text,
        *_aligned(choice, logprobs, version_sent, newest_version),
        prompt,
        choice.finish_reason or "stop",
        calls,
        version_sent,
        version_received,
    )


def text_completion(
    reply: TextReply,
    prompt: Sequence[int],
    version_sent: int,
    version_received: int,
    newest_version: int | None = None,
) -> Completion:
    """Check a reply of /completions to a prompt of ids. Raises MalformedReply as `chat_completion` does.

    Also when the server says that it has seen another prompt: cut, or with ids of its own before it.
    """
    choice = _first(reply.choices)
    check_prompt(prompt_ids(choice.prompt_token_ids) or prompt_ids(reply.prompt_token_ids), prompt)
    return choice_completion(choice, prompt, version_sent, version_received, newest_version)


def check_prompt(told: Sequence[int], sent: Sequence[int]) -> None:
    """Require of the prompt that a server says it has seen, if it says so, that it is the one it was sent.

    Raises: MalformedReply: the tokens sampled after it are none after ours.
    """
    if not told or (type(told) is JsonIds and type(sent) is JsonIds and told.text == sent.text):
        return
    if list(told) != list(sent):
        raise MalformedReply(
            f"prompt_token_ids must be those that were sent: expected {len(sent)} ids, got {len(told)} or others"
        )


_Said: TypeAlias = tuple[str, Sequence[float], tuple[ToolCall, ...]]
"""Text, log-probs and tool calls of a choice."""


def _said_in_chat(choice: ChatChoice) -> _Said:
    message = choice.message
    logprobs: list[float] = []
    if choice.logprobs is not None and choice.logprobs.content is not None:
        logprobs = [token.logprob for token in choice.logprobs.content]
    calls = message.tool_calls or ()
    return message.content or "", logprobs, tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in calls)


def _said_in_text(choice: TextChoice) -> _Said:
    if not choice.token_ids and choice.logprobs is not None:
        choice.token_ids = spelled_ids(choice.logprobs.tokens)
    logprobs: Sequence[float | None] = []
    if choice.logprobs is not None and choice.logprobs.token_logprobs:
        logprobs = choice.logprobs.token_logprobs
        check_logprobs(logprobs, "choices[0].logprobs.token_logprobs")
    return choice.text, cast(Sequence[float], logprobs), ()


C = TypeVar("C", ChatChoice, TextChoice)


def _first(choices: list[C]) -> C:
    if not choices:
        raise MalformedReply("choices must hold one completion: expected 1, got 0 (choices)")
    return choices[0]


def check_finished(choice: ChatChoice | TextChoice) -> None:
    """Require that a choice came to an end of its own. Raises MalformedReply."""
    if choice.finish_reason in ("abort", "error"):
        # No sample of the policy: its end was not the model's, nor a length that we asked for.
        kind = GenerationAborted if choice.finish_reason == "abort" else MalformedReply
        raise kind(f"generation must finish: got {choice.finish_reason!r} (choices[0].finish_reason)")


def spelled_ids(tokens: msgspec.Raw) -> list[int] | None:
    """Return the ids of tokens spelled `token_id:123`; None when they are texts. Raises MalformedReply: some are."""
    text = bytes(tokens)
    # The first is enough to tell: a server spells all of them so, or none.
    if not text.lstrip(b"[ \n\r\t").startswith(_ID_STRING):
        return None
    return parse_ids(text.replace(_ID_STRING, b"").replace(b'"', b""), "choices[0].logprobs.tokens").tolist()


def _aligned(
    choice: ChatChoice | TextChoice, logprobs: Sequence[float], version_sent: int, newest_version: int | None
) -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
    """Return (ids, log-probs, versions) of the sampled tokens, aligned; empty where the server gave none."""
    ids, versions = choice.token_ids, choice.policy_versions
    if not ids:
        return (), (), ()
    count = len(ids)
    if logprobs and len(logprobs) != count:
        raise MalformedReply(
            f"logprobs must align with token_ids: expected {count}, got {len(logprobs)} (choices[0].logprobs)"
        )
    if not versions:
        # The server does not say: the version known at send is the oldest that can have produced a token.
        return ids, logprobs, [version_sent] * count
    if len(versions) != count:
        raise MalformedReply(
            f"policy_versions must align with token_ids: expected {count}, got {len(versions)} "
            "(choices[0].policy_versions)"
        )
    if newest_version is not None and max(versions) > newest_version:
        raise MalformedReply(
            f"policy_versions must have been published: expected at most {newest_version}, got {max(versions)} "
            "(choices[0].policy_versions); tell an endpoint whose server is ahead its policy_version"
        )
    return ids, logprobs, versions


def check_logprobs(logprobs: Sequence[float | None], where: str) -> None:
    """Require finite log-probs of at most 0. Raises MalformedReply naming the first that is not."""
    for at, logprob in enumerate(logprobs):
        if logprob is None or not LEAST_LOGPROB <= logprob <= LOGPROB_SLACK:
            raise MalformedReply(f"log-probs must be finite and at most 0: got {logprob} ({where}[{at}])")
