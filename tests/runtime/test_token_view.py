"""Tokens for people."""

import pytest

from turngate.envs.base import End, Task
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError
from turngate.runtime.token_view import TokenView, render_tokens, view_tokens
from turngate.runtime.types import Segment, Trajectory

WORDS = Tokenizer(["red", "blue", ".\n"])


def ids(text: str) -> list[int]:
    return [WORDS.special(part) if part.startswith("<|") else WORDS.encode(part)[0] for part in text.split(" ")]


def trajectory(*segments: Segment) -> Trajectory:
    return Trajectory(id="g0.1", task=Task("t"), end=End.success, segments=segments)


PLAYED = trajectory(
    Segment.of(ids("<|user|> red .\n <|assistant|> blue <|end|>"), [0] * 4 + [1] * 2, [0] * 4 + [-0.25, -0.5],
               [-1] * 4 + [7, 8], [-1] * 4 + [0] * 2),
    Segment.of([*ids("<|user|>"), 0xC3], [0, 1], [0, -12.125], [-1, 8], [-1, 11]),
)  # fmt: skip


def test_every_token_shows_what_training_knows_about_it() -> None:
    assert render_tokens(PLAYED, WORDS).splitlines() == [
        "segment 0: 6 tokens, 2 sampled",
        "     s       id    turn  version   logprob  text",
        "     0      260                             <|user|>",
        "     1      264                             red",
        "     2      266                             .\\n",
        "     3      261                             <|assistant|>",
        "     4      265  *    0        7   -0.2500  blue",
        "     5      258  *    0        8   -0.5000  <|end|>",
        "segment 1: 2 tokens, 1 sampled",
        "     s       id    turn  version   logprob  text",
        "     0      260                             <|user|>",
        "     1      195  *   11        8  -12.1250  \\xc3",
    ]


def test_tokens_are_values_too() -> None:
    views = list(view_tokens(PLAYED, WORDS))
    assert len(views) == 8
    assert views[4] == TokenView(0, 4, 265, "blue", True, -0.25, 7, 0)


def test_another_servers_tokenizer_is_a_function_of_the_id() -> None:
    assert [view.text for view in view_tokens(PLAYED, "<{}>".format)][:2] == ["<260>", "<264>"]


def test_a_trajectory_without_tokens_is_an_empty_table() -> None:
    assert render_tokens(trajectory(), WORDS) == ""


def test_the_tokenizer_of_another_model_is_noticed() -> None:
    with pytest.raises(ConfigError, match=r"token ids must lie in .*use this model's tokenizer"):
        render_tokens(trajectory(Segment.of([9999], [0], [0], [-1], [-1])), WORDS)
