"""Guidance over actions that somebody lists: softmax(log pi + beta Q), with log pi asked of the server.

    all actions of the situation -> log pi of each, in the model's own ids -> Q of each -> one of them

Log pi of an action is the sum over its tokens, the end of turn included: that is what the target asks for, and it
favours short actions. The tokens of the action that is taken were not drawn one by one, so the record holds their
log-probs under the base, and in `log_selection` what is missing to the log-prob with which the action was taken:

    log p_guided(a) = sum of base log-probs + log_selection

The weight exp(-log_selection) leads back to the base policy on the listed actions, exactly. Costs one scored prompt per
action; needs chats that are rendered here (token mode 'tokens'), and a server that scores prompts.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from turngate.envs.base import Action, ToolSpec
from turngate.runtime.answers import check_action
from turngate.runtime.base_draw import BaseDraw, Draw
from turngate.runtime.errors import ConfigError, EndpointRefused, GuidanceError
from turngate.runtime.guided_types import action_key, written_beta
from turngate.runtime.json_ids import JsonIds, ids_text
from turngate.runtime.rendering import Renderer, says_the_same
from turngate.runtime.selection import Strength, enumerated_probs, pick
from turngate.runtime.types import Candidate, Completion, Decision, Message, Sampling
from turngate.runtime.unwrap import single_errors
from turngate.runtime.value_functions import Candidates, DecisionPoint, ValueCalls

if TYPE_CHECKING:
    from turngate.runtime.endpoint import Endpoint

__all__ = ["NoDecision", "action_ids", "choose_enumerated"]

_AT_ONCE = 64
"""Prompts that one decision has scored at once: a list may be long, and connections are not without number."""
_BEFORE, _AFTER = Message("user", "hi"), Message("user", "go on")
"""What is rendered around an action, to see where it begins and ends; whole episodes would take long, action by action.
"""


class NoDecision(GuidanceError):
    """Values chose nothing, for the reason that is the text."""


async def choose_enumerated(
    calls: ValueCalls,
    listing: Candidates,
    draw: Draw,
    point: DecisionPoint,
    strength: Strength,
    *,
    length_normalised: bool = False,
) -> Completion:
    """Return the chosen action, as if it had been sampled, with the decision on it; see the module.

    Args: length_normalised: log pi is divided by the action's number of tokens.
    Raises: NoDecision: there is no list, or no values. ConfigError: this endpoint or sampling has no log-probs of whole
        actions. EndpointError: scoring failed.
    """
    base = _scoring_draw(draw)
    endpoint = cast("Endpoint", base.endpoint)
    actions, why = await calls.outcome_of("list of candidates", point, lambda: _listed(listing, point))
    if not actions:
        raise NoDecision(why or "no candidates: nothing was listed")

    async def generate(
        prompt: Sequence[int], sampling: Sampling, /, *, seed: int | None = None, timeout_s: float = 600.0
    ) -> Completion:
        scored = await _score(endpoint, prompt, actions, base.tools, sampling.max_tokens, timeout_s)
        return await _choose(calls, scored, point, strength, length_normalised)

    try:
        return await base.put(generate)
    except NoDecision:
        raise
    except GuidanceError as error:
        raise NoDecision(f"values: {error}") from error


def _scoring_draw(draw: Draw) -> BaseDraw:
    """Return the draw if its endpoint can score actions. Raises: ConfigError."""
    endpoint = getattr(draw, "endpoint", None)
    scores = getattr(getattr(endpoint, "capabilities", None), "prompt_logprobs", None)
    cannot = getattr(endpoint, "renderer", None) is None or getattr(scores, "verdict", "") == "no"
    if not isinstance(draw, BaseDraw) or not draw.has_own_ids or cannot:
        raise ConfigError(
            "enumerated candidates need the log-probs of whole actions: expected an endpoint with a renderer "
            "(token mode 'tokens') and a server that scores prompts; guide draws instead: Guidance(candidates=None)"
        )
    sampling = draw.sampling
    if (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, 0) or sampling.guidance is not None:
        raise ConfigError(
            "enumerated candidates need the policy itself, whose log-probs servers give: expected temperature 1, top_p "
            f"1, top_k 0 and no token guidance, got {sampling!r}"
        )
    return draw


async def _listed(listing: Candidates, point: DecisionPoint) -> list[Action]:
    """Return the actions once each: their probabilities are known, so a second mention adds nothing."""
    found = listing(point)
    actions = list(await found if inspect.isawaitable(found) else found)
    for action in actions:
        check_action(action, "listed")
    return list({action_key(action): action for action in actions}.values())


async def _score(
    endpoint: "Endpoint",
    prompt: Sequence[int],
    actions: Sequence[Action],
    tools: Sequence[ToolSpec],
    max_tokens: int,
    timeout_s: float,
) -> list[Completion]:
    """Return the actions with their ids and log-probs under the base; those longer than a turn may be are left out."""
    assert endpoint.renderer is not None
    sent = endpoint.serving_version
    ids_A = [action_ids(endpoint.renderer, action, tools) for action in actions]
    fitting = [(action, ids) for action, ids in zip(actions, ids_A, strict=True) if len(ids) <= max_tokens]
    prompt_text = prompt.text[1:-1] if type(prompt) is JsonIds else ids_text(prompt)
    start = len(prompt)

    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one(action: Action, ids: list[int]) -> Completion:
        whole = JsonIds(b"[%b,%b]" % (prompt_text, ids_text(ids)), start + len(ids))
        async with at_once:
            logprobs = (await endpoint.score(whole, timeout_s=timeout_s))[start:]
        versions = [sent] * len(ids)
        return Completion(action.text, ids, logprobs, versions, prompt, "stop", action.tool_calls, sent, sent)

    with single_errors():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(action, ids)) for action, ids in fitting]
    if endpoint.serving_version != sent:
        raise GuidanceError("new weights came while actions were scored: their log-probs are of two policies")
    if not tasks:
        raise GuidanceError(f"at least one action must be short enough: all have more than {max_tokens} tokens")
    return [task.result() for task in tasks]


async def _choose(
    calls: ValueCalls, scored: list[Completion], point: DecisionPoint, strength: Strength, length_normalised: bool
) -> Completion:
    """Return the chosen one, with the decision on it. Raises: GuidanceError: nothing can be chosen."""
    began_s = time.monotonic()
    q, version, why = await calls.values(point, scored)
    if why:
        raise NoDecision(why)
    sums = [math.fsum(one.logprobs) for one in scored]
    base = [s / len(one.token_ids) for s, one in zip(sums, scored, strict=True)] if length_normalised else sums
    beta = strength.within_budget(base, q)
    probs = enumerated_probs(base, q, beta, floor=strength.floor)
    chosen = pick(probs, point.seed)
    decision = Decision(
        candidates=tuple(map(Candidate.of, scored, q, probs)),
        chosen=chosen,
        beta=written_beta(beta),
        floor=strength.floor,
        log_selection=math.log(probs[chosen]) - sums[chosen],
        source=calls.name,
        value_version=version,
        seconds=time.monotonic() - began_s,
        is_enumerated=True,
    )
    return msgspec.structs.replace(scored[chosen], decision=decision)


def action_ids(renderer: Renderer, action: Action, tools: Sequence[ToolSpec]) -> list[int]:
    """Return the ids that the model would sample to say an action, the end of turn included.

    They are what the chat format writes between the prompt and what follows the action.
    Raises: EndpointRefused: the format does not write the action as the model would say it.
    """
    said = Message("assistant", action.text, action.tool_calls)
    after = [Message("tool", "", (), call.id) for call in action.tool_calls] or [_AFTER]
    try:
        prompt = renderer.render([_BEFORE], tools)
        whole = renderer.render([_BEFORE, said, *after], tools)
        for end in renderer.stop_token_ids:
            tail = renderer.extend([end], after, tools)
            ids = whole[len(prompt) : len(whole) - len(tail)]
            is_inside = whole[: len(prompt)] == prompt and whole[len(whole) - len(tail) :] == tail
            if is_inside and ids and ids[-1] == end and _reads_as(renderer, ids, said, tools):
                return ids
    except ConfigError as error:
        raise EndpointRefused(f"action must be one that the model's format can write: {error}") from error
    raise EndpointRefused(
        "action must be written as the model would say it: the chat format does not, or does not only append "
        f"({said!r:.120}); guide draws instead"
    )


def _reads_as(renderer: Renderer, ids: Sequence[int], said: Message, tools: Sequence[ToolSpec]) -> bool:
    reply = renderer.parse(ids, has_tools=bool(tools))
    return says_the_same(said, Message("assistant", reply.text, reply.tool_calls))
