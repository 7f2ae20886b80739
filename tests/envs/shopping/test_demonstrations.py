"""Demonstrations: what they hold, and that nothing held out is in them."""

import re

import pytest

from turngate.envs.base import Task
from turngate.envs.shopping import EXPERT, demonstrations, split_of, vocabulary
from turngate.envs.shopping.tasks import parse_goal


def test_demonstrations_alternate_and_end_with_an_action():
    for dialogue in demonstrations(100, 0):
        assert [role for role, _ in dialogue] == ["user", "assistant"] * (len(dialogue) // 2)
        parse_goal(dialogue[0][1])


def test_nothing_held_out_is_demonstrated():
    for dialogue in demonstrations(300, 0):
        assert split_of(Task("x", dialogue[0][1])) == "train"


def test_equal_seeds_give_equal_rows():
    assert demonstrations(20, 3) == demonstrations(20, 3) != demonstrations(20, 4)


def tokens(text):
    """Words, identifiers, single digits and separator runs; one space between two words is free."""
    pieces = re.findall(r"[A-Za-z]+(?:_\d+)?|\d|[^A-Za-z0-9]+", text)
    return [piece for piece in pieces if piece != " "]


@pytest.mark.parametrize("noise", [None, EXPERT])
def test_an_episode_is_about_130_tokens(noise):
    rows = demonstrations(300, 0) if noise is None else demonstrations(300, 0, noise)
    mean = sum(len(tokens(text)) for dialogue in rows for _, text in dialogue) / len(rows)
    assert 110 < mean < 150


def test_the_vocabulary_holds_every_word_that_occurs():
    words = {word for row in demonstrations(500, 0) for _, text in row for word in tokens(text)}
    assert {word for word in words if word[0].isalpha()} <= set(vocabulary())
    assert len(vocabulary()) == len(set(vocabulary())) < 150
