"""Text that is said while it is sampled: where ids come from the server and only we know how they read."""

from collections.abc import Sequence

from turngate.runtime.errors import ConfigError
from turngate.runtime.rendering import Renderer

__all__ = ["Speaker"]

_STEPS = 16
"""Ids are read again when there are a sixteenth more of them, so that the work stays linear and the first words come at
once."""
_UNFINISHED = "\ufffd"
"""What a character reads as of which only some bytes are there yet."""


class Speaker:
    """Reads growing ids, and says of their text what cannot change any more."""

    # Changed by push(): all of it.

    def __init__(self, renderer: Renderer, stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._stops = stops
        self._ids: list[int] = []
        self._read = 0
        self._said = ""

    def push(self, ids: Sequence[int]) -> str:
        """Take in what was sampled next, and return what can be said now; maybe nothing."""
        self._ids += ids
        if len(self._ids) - self._read < max(1, self._read // _STEPS):
            return ""
        self._read = len(self._ids)
        try:
            text = self._renderer.parse(self._ids, has_tools=False).text.rstrip(_UNFINISHED)
        except ConfigError:
            return ""  # ids that nobody knows: the reply as a whole is refused for them
        return self._say(text[: self._certain(text)])

    def rest(self, text: str) -> str:
        """Return what is left to say of the whole text.

        Tokenizers that tidy spaces up may read the beginning otherwise by then; it is left as it was said.
        """
        shared = 0
        for one, other in zip(self._said, text, strict=False):
            if one != other:
                break
            shared += 1
        return text[shared:]

    def _say(self, text: str) -> str:
        new = text[len(self._said) :] if text.startswith(self._said) else ""
        self._said += new
        return new

    def _certain(self, text: str) -> int:
        """Return the length of the text before anything that may yet turn out to be a stop string, or is one."""
        end = len(text)
        for stop in self._stops:
            if (at := text.find(stop)) >= 0:
                end = min(end, at)
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    end = min(end, len(text) - length)
                    break
        return end
