"""Behaviour cloning: what is learned, from which tokens, and that it repeats exactly."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from turngate.envs.base import ToolCall, ToolSpec
from turngate.learners.cloning import Chat, CloningConfig, CloningProgress, clone, score_chats
from turngate.learners.optimizers import Schedule
from turngate.runtime.engine.chat import render
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Message

WORDS = ("red", "blue", "green", "tent", "boots", "lamp")
CHATS: list[list[tuple[str, str]]] = [
    [("user", f"say {word}"), ("assistant", word), ("user", "again"), ("assistant", word)] for word in WORDS
]
FEW = CloningConfig(steps=4, batch_size=3)


def tokenizer() -> Tokenizer:
    return Tokenizer.train(content for chat in CHATS for _, content in chat)


def small(**changes: int) -> ModelConfig:
    sizes = {"width": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp_width": 32, "max_context": 64}
    return ModelConfig(vocab_size=len(tokenizer()), **(sizes | changes))


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(PolicyModel.load(folder).state_dict())


def same(one: Path, other: Path) -> bool:
    return all(torch.equal(value, state(other)[name]) for name, value in state(one).items())


def test_it_learns_to_answer_and_leaves_a_model_folder(tmp_path: Path) -> None:
    seen: list[CloningProgress] = []
    config = CloningConfig(steps=150, batch_size=6)
    folder = clone(CHATS, tmp_path / "model", model=small(), config=config, progress=seen.append)
    assert (folder / "config.json").exists()
    assert Tokenizer.load(folder) == tokenizer()
    assert [p.step for p in seen] == list(range(150))
    assert seen[-1].loss < 0.1 * seen[0].loss
    scores = score_chats(PolicyModel.load(folder), tokenizer(), CHATS)
    assert sum(s.correct for s in scores) >= 0.9 * sum(s.tokens for s in scores)


def reference_loss(model: PolicyModel, chat: list[tuple[str, str]], *, all_tokens_weight: float) -> torch.Tensor:
    """Return the loss of one conversation, its assistant tokens found by hand: each word and the end after it."""
    words = tokenizer()
    ids = render([Message(*m) for m in chat], words, add_generation_prompt=False)
    marker = words.special("<|assistant|>")
    spans = [i + k for i, token in enumerate(ids) if token == marker for k in (1, 2)]
    logp = model.score(pack([ids])).logprobs_M
    on_assistant = -torch.stack([logp[s - 1] for s in spans]).mean()
    return on_assistant - all_tokens_weight * logp.mean()


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_loss_is_on_assistant_tokens_and_their_end_and_a_little_on_all(tmp_path: Path, weight: float) -> None:
    seen: list[CloningProgress] = []
    config = CloningConfig(steps=1, batch_size=1, all_tokens_weight=weight)
    clone(CHATS[:1], tmp_path / "m", tokenizer=tokenizer(), model=small(), config=config, progress=seen.append)
    model = PolicyModel(small())
    reference_loss(model, CHATS[0], all_tokens_weight=weight).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    assert seen[0].grad_norm == pytest.approx(norm, rel=1e-4)
    assert seen[0].loss == pytest.approx(reference_loss(model, CHATS[0], all_tokens_weight=0.0).item(), rel=1e-4)


def test_scores_are_of_the_assistants_tokens(tmp_path: Path) -> None:
    model = PolicyModel(small())
    (score,) = score_chats(model, tokenizer(), CHATS[:1])
    assert score.tokens == 4  # two words, two ends of turn
    expected = -4 * reference_loss(model, CHATS[0], all_tokens_weight=0.0).item()
    assert score.logprob == pytest.approx(expected, rel=1e-5)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path: Path) -> None:
    folders = [
        clone(CHATS, tmp_path / str(i), model=small(), config=FEW, seed=seed) for i, seed in enumerate((0, 0, 1))
    ]
    assert same(folders[0], folders[1])
    assert not same(folders[0], folders[2])


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    whole, cut = (
        clone(CHATS, tmp_path / str(cap), model=small(), config=CloningConfig(steps=2, microbatch_tokens=cap))
        for cap in (4096, 12)
    )
    for name, value in state(whole).items():
        torch.testing.assert_close(value, state(cut)[name], rtol=1e-2, atol=1e-3)


def test_after_the_first_steps_only_assistant_tokens_count(tmp_path: Path) -> None:
    def norms(config: CloningConfig, name: str) -> list[float]:
        seen: list[CloningProgress] = []
        frozen = msgspec.structs.replace(config, steps=2, muon_lr=0.0, adamw_lr=0.0, batch_size=6)
        clone(CHATS, tmp_path / name, model=small(), config=frozen, progress=seen.append)
        return [p.grad_norm for p in seen]

    first, second = norms(CloningConfig(all_tokens_steps=1), "a")
    assert second == pytest.approx(norms(CloningConfig(all_tokens_weight=0.0), "b")[1], rel=1e-5)
    assert first != pytest.approx(second, rel=1e-2)


def test_a_function_may_provide_the_demonstrations_of_each_step(tmp_path: Path) -> None:
    asked: list[int] = []

    def deal(step: int) -> Sequence[Chat]:
        asked.append(step)
        return CHATS[:2]

    clone(deal, tmp_path / "model", tokenizer=tokenizer(), model=small(), config=FEW)
    assert asked == [0, 1, 2, 3]


def test_a_gate_stops_the_training_when_it_is_satisfied(tmp_path: Path) -> None:
    looks: list[int] = []

    def gate(model: PolicyModel, steps: int) -> bool:
        assert isinstance(model, PolicyModel)
        looks.append(steps)
        return steps >= 4

    seen: list[CloningProgress] = []
    config = CloningConfig(steps=100, gate_every=2)
    clone(CHATS, tmp_path / "model", model=small(), config=config, gate=gate, progress=seen.append)
    assert looks == [2, 4]
    assert len(seen) == 4


def test_cloning_goes_on_from_a_model_folder(tmp_path: Path) -> None:
    first = clone(CHATS, tmp_path / "first", model=small(), config=FEW)
    frozen = CloningConfig(steps=1, muon_lr=0.0, adamw_lr=0.0)
    assert same(first, clone(CHATS, tmp_path / "second", model=first, config=frozen))


def test_tools_on_offer_are_part_of_what_is_learned_from(tmp_path: Path) -> None:
    tool = ToolSpec("say", "Says it.", {"type": "object"})
    tokens: list[int] = []
    for i, tools in enumerate(((), (tool,))):
        clone(
            CHATS,
            tmp_path / str(i),
            tokenizer=tokenizer(),
            model=small(max_context=256),
            tools=tools,
            config=CloningConfig(steps=1, batch_size=6),
            progress=lambda p: tokens.append(p.tokens),
        )
    assert tokens[1] > tokens[0]


def test_a_demonstration_without_a_reply_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="must hold an assistant message"):
        clone([[("user", "hello")]], tmp_path / "m", config=FEW)


def test_dicts_as_openai_spells_them_are_the_same_demonstrations(tmp_path: Path) -> None:
    dicts = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    one = clone(CHATS, tmp_path / "one", model=small(), config=FEW)
    other = clone(dicts, str(tmp_path / "other"), model=small(), config=FEW)
    assert other == tmp_path / "other"
    assert same(one, other)
    assert same(
        one, clone(CHATS, tmp_path / "on", model=str(one), config=CloningConfig(steps=1, muon_lr=0, adamw_lr=0))
    )


def test_tool_calls_of_dicts_are_learned_too() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "say", "arguments": '{"word": "red"}'}}
    chat: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "say red"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    spelled = [
        Message("system", "be brief"),
        Message("user", "say red"),
        Message("assistant", "", (ToolCall("c1", "say", '{"word": "red"}'),)),
    ]
    model = PolicyModel(small())
    assert score_chats(model, tokenizer(), [chat]) == score_chats(model, tokenizer(), [spelled])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (("bot", "hi"), r"role must be one of system, user, assistant, tool: got 'bot' \(demonstrations\[1\]\[0\]\)"),
        ({"role": "bot", "content": "hi"}, r"OpenAI message: .*\(demonstrations\[1\]\[0\], role 'bot'\)"),
        ({"content": "hi"}, r"missing required field `role` \(demonstrations\[1\]\[0\]\)"),
        ("user", r"\(role, content\), a dict or a Message: got 'user' \(demonstrations\[1\]\[0\]\)"),
        (("user", 3), r"got \('user', 3\) \(demonstrations\[1\]\[0\]\)"),
    ],
)
def test_a_bad_message_is_named_with_its_place(tmp_path: Path, message: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        clone([CHATS[0], [message, ("assistant", "red")]], tmp_path / "m", config=FEW)
    with pytest.raises(ConfigError, match=says):
        clone(lambda step: [CHATS[0], [message]], tmp_path / "m", tokenizer=tokenizer(), model=small(), config=FEW)


def test_no_demonstrations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        clone([], tmp_path / "m", tokenizer=tokenizer(), config=FEW)


def test_a_function_needs_a_tokenizer_beside_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer must be given"):
        clone(lambda step: CHATS, tmp_path / "m", config=FEW)


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size must be the tokenizer's"):
        clone(CHATS, tmp_path / "m", tokenizer=tokenizer(), model=ModelConfig(vocab_size=3), config=FEW)


def test_a_seed_that_no_generator_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed must be a signed 64-bit integer: got 9223372036854775808"):
        clone(CHATS, tmp_path / "m", model=small(), config=FEW, seed=2**63)


def test_a_diverging_run_is_stopped(tmp_path: Path) -> None:
    config = CloningConfig(steps=50, muon_lr=1e30, adamw_lr=1e30, schedule=Schedule())
    with pytest.raises(LearnerError, match=r"finite loss.*lower the learning rates"):
        clone(CHATS, tmp_path / "m", model=small(), config=config)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch_size": 0}, {"all_tokens_weight": -1.0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CloningConfig(**wrong)
