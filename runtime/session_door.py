"""How an agent that speaks HTTP reaches its own session."""

from typing import TYPE_CHECKING

from turngate.runtime.door import Door
from turngate.runtime.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["HasDoor"]


class HasDoor:
    """What a session offers to SDKs; `key` is the API key to give them."""

    id: str
    key: str
    _door: Door | None

    @property
    def openai(self) -> "AsyncOpenAI":
        """A client of the official `openai` package whose requests belong to this session.

        It speaks to a gateway in this process, started on first use. The model's name does not matter.
        """
        return self._open_door().client(self.key)

    @property
    def base_url(self) -> str:
        """The URL for any other SDK; `key` is the API key to give it."""
        return self._open_door().base_url

    def _open_door(self) -> Door:
        if self._door is None:
            raise ConfigError(f"session.openai needs a Runtime: this session has none (session {self.id})")
        return self._door
