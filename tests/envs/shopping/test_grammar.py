"""Actions as text: exactly the five forms, nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.shopping.grammar import Command, format_command, parse_command


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ('search["red hiking backpack"]', Command("search", "red hiking backpack")),
        ('click["item_3"]', Command("click", "item_3")),
        ('select["red"]', Command("select", "red")),
        ("back", Command("back")),
        ('buy["item_3"]', Command("buy", "item_3")),
        ('  buy["item_3"]\n', Command("buy", "item_3")),
        ('search[" "]', Command("search", "")),
    ],
)
def test_every_action_parses(text, command):
    assert parse_command(text) == command


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Back",
        'back["item_3"]',
        "click[item_3]",
        'click["item_3"',
        'click["item_3"] now',
        'click["item_3"] back',
        'click["item_3"]click["item_4"]',
        'open["item_3"]',
        'click ["item_3"]',
        'search["a"b"]',
        'search["a\nb"]',
        f'search["{"a" * 201}"]',
    ],
)
def test_anything_else_is_no_action(text):
    assert parse_command(text) is None


@given(st.sampled_from(["search", "click", "select", "buy"]), st.text(st.characters(exclude_characters='"[]\n')))
def test_formatted_commands_parse_back(verb, argument):
    command = Command(verb, argument.strip()[:200].strip())
    assert parse_command(format_command(command)) == command


@given(st.text())
def test_no_text_crashes_the_parser(text):
    parse_command(text)
