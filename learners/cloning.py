"""Behaviour cloning: a small policy learns from demonstrations, as the warm start of reinforcement learning.

The loss is cross-entropy on assistant tokens, end of turn included; for the first steps all tokens count a little,
because predicting what the environment writes teaches a random model to copy from its context.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from turngate.envs.base import ToolSpec
from turngate.learners.batch import length_sorted
from turngate.learners.logprobs import selected_logprobs
from turngate.learners.optimizers import MuonAdamW, Schedule
from turngate.learners.threads import one_thread
from turngate.runtime.engine.chat import ROLES, render
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.protocol import ChatMessage
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.seeds import require_seed
from turngate.runtime.types import Message

__all__ = ["Chat", "ChatScore", "CloningConfig", "CloningProgress", "Demonstrations", "clone", "score_chats"]

Chat: TypeAlias = Sequence[Message | tuple[str, str] | Mapping[str, Any]]
"""One conversation; a pair is (role, content), a mapping a message as the OpenAI API spells it."""
Demonstrations: TypeAlias = Sequence[Chat] | Callable[[int], Sequence[Chat]]
"""A fixed set, dealt in shuffled epochs; or a function from the step number to the conversations of that step."""


class CloningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how fast to clone."""

    steps: int = 350
    batch_size: int = 16
    """Conversations a step, when the demonstrations are a fixed set."""
    muon_lr: float = 0.02
    adamw_lr: float = 6e-3
    schedule: Schedule = Schedule(warmup_updates=10)
    """Learning-rate factor by step; `total_updates=0` stands for `steps`."""
    all_tokens_weight: float = 0.5
    """Weight of next-token prediction on all tokens, beside 1 on assistant tokens."""
    all_tokens_steps: int = 150
    """After this many steps only assistant tokens count."""
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 8192
    """Tokens per forward pass; changes speed and memory, not the result beyond rounding."""
    gate_every: int = 25
    """Steps between two looks at the gate."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "microbatch_tokens", "gate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)}")
        if self.all_tokens_weight < 0 or self.all_tokens_steps < 0:
            raise ConfigError("all_tokens_weight and all_tokens_steps must not be negative")


class CloningProgress(msgspec.Struct, frozen=True):
    """What one step did."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean cross-entropy per assistant token, in nats."""
    grad_norm: float
    tokens: int
    """Tokens seen by the model in this step, padding not counted."""
    seconds: float
    """Since the start."""


class ChatScore(msgspec.Struct, frozen=True):
    """How well a model predicts the assistant's part of one conversation."""

    logprob: float
    """Sum over assistant tokens."""
    tokens: int
    correct: int
    """Assistant tokens that are the model's first choice given what came before."""


@one_thread()
def clone(
    demonstrations: Demonstrations,
    folder: Path | str,
    *,
    tokenizer: Tokenizer | None = None,
    model: ModelConfig | Path | str | None = None,
    config: CloningConfig = CloningConfig(),  # noqa: B008 - frozen
    tools: Sequence[ToolSpec] = (),
    seed: int = 0,
    progress: Callable[[CloningProgress], None] | None = None,
    gate: Callable[[PolicyModel, int], bool] | None = None,
) -> Path:
    """Train a policy on demonstrations and return `folder`, now a model folder.

    Args: tokenizer: by default the folder's own when going on from one, else trained on the demonstrations. model: a
    configuration to start from random weights, or a model folder to go on from; by default the smallest policy.
    tools: on offer in every demonstration. gate: looks at the model every `gate_every` steps, with the number of steps
    done, and stops the training by returning True. Equal arguments give equal weights on the same machine.
    Raises: ConfigError: the seed is not one, or a message; the error has its place, as in `demonstrations[3][0]`.
    LearnerError: the loss is not finite, or a demonstration has no assistant message.
    """
    require_seed(seed, "clone")
    folder, model = Path(folder), Path(model) if isinstance(model, str) else model
    if not callable(demonstrations):
        demonstrations = [_messages(chat, f"demonstrations[{i}]") for i, chat in enumerate(demonstrations)]
    tokenizer = tokenizer or _tokenizer(demonstrations, model)
    model = model or ModelConfig(vocab_size=len(tokenizer))
    policy = PolicyModel.load(model) if isinstance(model, Path) else PolicyModel(model, seed=seed)
    if policy.config.vocab_size != len(tokenizer):
        raise ConfigError(
            f"vocab_size must be the tokenizer's: expected {len(tokenizer)}, got {policy.config.vocab_size}"
        )
    optimizer = MuonAdamW(policy, muon_lr=config.muon_lr, adamw_lr=config.adamw_lr)
    schedule = config.schedule
    if not schedule.total_updates:
        schedule = msgspec.structs.replace(schedule, total_updates=config.steps)
    chats_of = _dealer(demonstrations, config.batch_size, torch.Generator().manual_seed(seed))
    started = time.perf_counter()
    for step in range(config.steps):
        rows = _rows(chats_of(step), tokenizer, tools, "demonstrations")
        all_tokens_weight = config.all_tokens_weight if step < config.all_tokens_steps else 0.0
        loss = _backward(policy, rows, all_tokens_weight, config.microbatch_tokens)
        grad_norm = optimizer.clip_grad_norm(config.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise LearnerError(
                f"cloning must have a finite loss: got {loss}, gradient norm {grad_norm} (step {step}); "
                "lower the learning rates"
            )
        optimizer.step(schedule.factor(step))
        optimizer.zero_grad()
        if progress is not None:
            tokens = sum(len(row.token_ids) for row in rows)
            progress(CloningProgress(step, loss, grad_norm, tokens, time.perf_counter() - started))
        if gate is not None and (step + 1) % config.gate_every == 0 and gate(policy, step + 1):
            break
    policy.save(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


@torch.inference_mode()
def score_chats(
    model: PolicyModel,
    tokenizer: Tokenizer,
    chats: Sequence[Chat],
    *,
    tools: Sequence[ToolSpec] = (),
    microbatch_tokens: int = 8192,
) -> list[ChatScore]:
    """Return how well `model` predicts the assistant's tokens of each conversation: a measure to gate cloning on."""
    rows = _rows(chats, tokenizer, tools, "chats")
    scores: dict[int, ChatScore] = {}
    for indices in length_sorted([len(row.token_ids) for row in rows], microbatch_tokens):
        packed = pack([rows[i].token_ids for i in indices], [rows[i].is_assistant for i in indices])
        logits_MV = model.logits(packed)
        counts = [sum(rows[i].is_assistant) for i in indices]
        logprobs = selected_logprobs(logits_MV, packed.targets_M).split(counts)
        correct = (logits_MV.argmax(-1) == packed.targets_M).split(counts)
        for index, count, logprobs_P, correct_P in zip(indices, counts, logprobs, correct, strict=True):
            scores[index] = ChatScore(float(logprobs_P.sum()), count, int(correct_P.sum()))
    return [scores[i] for i in range(len(rows))]


@dataclass(frozen=True, slots=True)
class _Row:
    token_ids: list[int]
    is_assistant: list[bool]


def _rows(chats: Sequence[Chat], tokenizer: Tokenizer, tools: Sequence[ToolSpec], what: str) -> list[_Row]:
    return [_row(_messages(chat, f"{what}[{i}]"), tokenizer, tools) for i, chat in enumerate(chats)]


def _messages(chat: Chat, where: str) -> list[Message]:
    """Return the messages of a conversation, whichever way they are spelled."""
    return [_message(message, f"{where}[{i}]") for i, message in enumerate(chat)]


def _message(message: Any, where: str) -> Message:
    """Return one message. Raises: ConfigError: it is none, or its role is unknown."""
    made = message if isinstance(message, Message) else _made(message, where)
    if made.role not in ROLES:
        raise ConfigError(f"role must be one of {', '.join(ROLES)}: got {made.role!r} ({where})")
    return made


def _made(message: Any, where: str) -> Message:
    if isinstance(message, Mapping):
        try:
            return msgspec.convert(message, ChatMessage).as_message()
        except msgspec.ValidationError as error:
            role = f", role {message['role']!r}" if "role" in message else ""
            raise ConfigError(f"each dict must be an OpenAI message: {error} ({where}{role})") from error
    parts: list[Any] = list(message) if isinstance(message, tuple | list) else []
    if [type(part) for part in parts] != [str, str]:
        raise ConfigError(
            f"each message must be (role, content), a dict or a Message: got {message!r:.80} ({where}); "
            "a demonstration is a list of messages"
        )
    return Message(*parts)


def _row(messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[ToolSpec]) -> _Row:
    """Render a conversation and mark what the assistant wrote, its end of turn included."""
    token_ids: list[int] = []
    is_assistant: list[bool] = []
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = render(messages[:i], tokenizer, add_generation_prompt=True, tools=tools)
        through = render(messages[: i + 1], tokenizer, add_generation_prompt=False, tools=tools)
        if through[: len(prompt)] != prompt:
            raise LearnerError(
                f"a demonstration must render as prompt plus reply: message {i} does not extend its prompt; "
                "what the policy sees when it generates would not be what it learned from"
            )
        is_assistant += [False] * (len(prompt) - len(token_ids)) + [True] * (len(through) - len(prompt))
        token_ids = through
    if not token_ids:
        raise LearnerError("a demonstration must hold an assistant message: got none; add the reply to learn")
    return _Row(token_ids, is_assistant)


def _backward(model: PolicyModel, rows: Sequence[_Row], all_tokens_weight: float, microbatch_tokens: int) -> float:
    """Add the gradients of one step and return its loss per assistant token; the counts are the whole step's."""
    assistant_total = sum(sum(row.is_assistant) for row in rows)
    all_total = sum(len(row.token_ids) - 1 for row in rows)
    loss = 0.0
    for indices in length_sorted([len(row.token_ids) for row in rows], microbatch_tokens):
        chosen = [rows[i] for i in indices]
        masks = None if all_tokens_weight else [row.is_assistant for row in chosen]
        surprisal_M = -model.score(pack([row.token_ids for row in chosen], masks)).logprobs_M
        assistant_M = torch.tensor([flag for row in chosen for flag in row.is_assistant[1:]])
        on_assistant = (surprisal_M[assistant_M] if all_tokens_weight else surprisal_M).sum() / assistant_total
        on_all = all_tokens_weight * surprisal_M.sum() / all_total
        torch.autograd.backward(on_assistant + on_all if all_tokens_weight else on_assistant)
        loss += float(on_assistant.detach())
    return loss


def _tokenizer(demonstrations: Demonstrations, model: ModelConfig | Path | None) -> Tokenizer:
    if isinstance(model, Path):
        return Tokenizer.load(model)
    if callable(demonstrations):
        raise ConfigError("tokenizer must be given when demonstrations are a function: there is no text to train it on")
    chats = (_messages(chat, f"demonstrations[{i}]") for i, chat in enumerate(demonstrations))
    return Tokenizer.train(message.content for chat in chats for message in chat)


def _dealer(
    demonstrations: Demonstrations, batch_size: int, generator: torch.Generator
) -> Callable[[int], Sequence[Chat]]:
    if callable(demonstrations):
        return demonstrations
    chats = list(demonstrations)
    if not chats:
        raise ConfigError("demonstrations must not be empty: got none")
    deck: list[int] = []

    def deal(step: int) -> Sequence[Chat]:
        del step
        while len(deck) < batch_size:
            deck.extend(torch.randperm(len(chats), generator=generator).tolist())
        dealt, deck[:batch_size] = deck[:batch_size], []
        return [chats[i] for i in dealt]

    return deal
