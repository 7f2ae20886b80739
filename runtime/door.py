"""Where agents that speak HTTP reach the sessions of their own process."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Door"]


class Door(Protocol):
    """A URL, and clients for it. Opened on first use, in the running event loop."""

    @property
    def base_url(self) -> str:
        """The URL that SDKs are given, the part before /chat/completions."""
        ...

    def client(self, key: str) -> "AsyncOpenAI":
        """Return a client whose requests belong to the session with this key."""
        ...
