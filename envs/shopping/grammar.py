"""The actions as text: `search["red hiking backpack"]`, `click["item_3"]`, `select["red"]`, `back`, `buy["item_3"]`."""

import re

import msgspec

__all__ = ["Command", "format_command", "parse_command"]

MAX_ARGUMENT_CHARS = 200

_WITH_ARGUMENT = re.compile(r'(search|click|select|buy)\["([^"\]\[\n]*)"\]')


class Command(msgspec.Struct, frozen=True):
    """One parsed action."""

    verb: str
    argument: str = ""
    """Empty for `back`."""


def parse_command(text: str) -> Command | None:
    """Return the command that `text` is, or None when it is none. Only white space may surround it."""
    text = text.strip()
    if text == "back":
        return Command("back")
    found = _WITH_ARGUMENT.fullmatch(text)
    if found is None or len(found[2]) > MAX_ARGUMENT_CHARS:
        return None
    return Command(found[1], found[2].strip())


def format_command(command: Command) -> str:
    """Return the text that `parse_command` reads back."""
    return "back" if command.verb == "back" else f'{command.verb}["{command.argument}"]'
