"""From histories with returns to what a critic learns from: V before the first token of the action to come.

Relabelled episodes have no tokens of their own, since nobody acted under that prompt. Rendering states what the policy
would have been shown; it ends where the policy would begin to answer, and that is where the value is read.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from turngate.envs.base import ToolSpec
from turngate.learners.batch import TokenBatch
from turngate.learners.critic import Critic, ValueTargets
from turngate.learners.hindsight import ValueExample
from turngate.runtime.engine.chat import render
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import LearnerError
from turngate.runtime.types import NO_TURN, NO_VERSION

__all__ = ["hindsight_value_batch"]


def hindsight_value_batch(
    examples: Sequence[ValueExample], critic: Critic, tokenizer: Tokenizer, *, tools: Sequence[ToolSpec] = ()
) -> tuple[TokenBatch, ValueTargets]:
    """Return what `critic.learn(tokens, targets)` takes: one row per history, its target behind the last token.

    Histories are rendered as they are. Where the policy acts under a context function that shortens them, shorten
    those of the examples first: `example._replace(messages=tuple(context(History.of(example.messages))))`.

    No policy can learn from it: the behaviour log-probs are NaN, which every loss with a ratio refuses.
    Args: examples: returns discounted as the critic's targets are. tools: on offer in these episodes.
    Raises: LearnerError: a history is longer than the critic's context, or has an id outside its vocabulary; a return
    is not finite, or no probability and the critic predicts success.
    """
    rows = [render(example.messages, tokenizer, tools=tools) for example in examples]
    for number, (ids, example) in enumerate(zip(rows, examples, strict=True)):
        _check(ids, example.target, critic, f"example {number}")
    # The model reads a value where it predicts a token; which one is never looked at.
    lengths = np.asarray([len(ids) + 1 for ids in rows], np.int64)
    ids_N = torch.tensor([token for ids in rows for token in (*ids, 0)], dtype=torch.int64)
    rows_N = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
    mask_N = torch.zeros_like(ids_N, dtype=torch.bool)
    mask_N[torch.from_numpy(np.cumsum(lengths) - 1)] = True
    tokens = TokenBatch(
        token_ids_N=ids_N,
        mask_N=mask_N,
        generated_N=mask_N,
        behaviour_logprobs_N=torch.full(ids_N.shape, math.nan),
        versions_N=torch.full_like(ids_N, NO_VERSION),
        turn_ids_N=torch.full_like(ids_N, NO_TURN),
        row_ids_N=rows_N,
        trajectory_ids_N=rows_N,
        group_ids_N=rows_N,
        row_lengths=tuple(lengths.tolist()),
        row_trajectories=tuple(range(len(rows))),
        trajectory_names=tuple(f"example {number}" for number in range(len(rows))),
    )
    targets_N = torch.zeros(len(ids_N))
    targets_N[mask_N] = torch.tensor([example.target for example in examples])
    return tokens, ValueTargets(targets_N, mask_N, critic.values(tokens))


def _check(ids: Sequence[int], target: float, critic: Critic, where: str) -> None:
    model = critic.model.config
    if len(ids) >= model.max_context:
        raise LearnerError(
            f"histories must leave room for a token in a context of {model.max_context}: got {len(ids)} tokens "
            f"({where}); no policy acts from there, so leave it out, or shorten it as the policy's context does"
        )
    if max(ids) >= model.vocab_size:
        raise LearnerError(
            f"token ids must be in the vocabulary of {model.vocab_size}: got {max(ids)} ({where}); use the tokenizer "
            "of the critic's model folder"
        )
    is_probability = 0 <= target <= 1
    if not math.isfinite(target) or (critic.config.kind == "success" and not is_probability):
        expected = "finite" if critic.config.kind == "scalar" else "within [0, 1] for a critic of success"
        raise LearnerError(
            f"returns must be {expected}: got {target} ({where}); CriticConfig(kind='scalar') has no bounds"
        )
