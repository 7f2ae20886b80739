"""Watching generated text for stop strings, and telling which text is already certain."""

from collections.abc import Sequence

from turngate.runtime.engine.tokenizer import StreamDecoder, Tokenizer

__all__ = ["TextWatcher"]


class TextWatcher:
    """Decodes one sequence as it grows. `text` ends before the first stop string once one was found."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.text = ""
        self.is_stopped = False
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._taken = 0

    def push(self, token: int) -> bool:
        """Add a token; True when its text completed a stop string."""
        self._append(self._decoder.push(token))
        return self.is_stopped

    def finish(self) -> None:
        """No token follows: what was held back is certain."""
        if not self.is_stopped:
            self._append(self._decoder.finish())
        self._stop = ()

    def take(self) -> str:
        """Return the text that became certain since the last call: no stop string can begin inside it any more."""
        end = len(self.text) if self.is_stopped else len(self.text) - self._held_back()
        piece = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _append(self, piece: str) -> None:
        # A stop string may begin in the old text, but not so early that it would have ended there.
        start = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [index for stop in self._stop if (index := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def _held_back(self) -> int:
        """Return the length of the longest tail that begins a stop string."""
        for length in range(min(self._longest - 1, len(self.text) - self._taken), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
