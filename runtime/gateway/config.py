"""Settings of a gateway."""

import msgspec

from turngate.runtime.errors import ConfigError

__all__ = ["LOOPBACK", "GatewayConfig"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that nobody on another machine reaches."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a gateway listens, whom it lets in, and what it bears.

    Raises: ConfigError: a limit cannot work.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    admin_key: str | None = None
    """Opens sessions over HTTP, rewards and reads them. None makes a random one."""
    agents_may_reward: bool = False
    """Whether a session's own key is enough for its rewards, end and trajectory. The model may read that key, if its
    tools can read the environment of the agent's process, and give itself what rewards it likes."""
    sessions_by_key: bool = False
    """Whether a key that nobody has seen yet opens a session of its own; else sessions are opened before. With an
    `admin_key` given, such keys must be that key, or that key, a dot and a name."""
    max_sessions: int = 16_384
    """Open at once; a key that would open one more gets a 429."""
    max_body_bytes: int = 16 * 1024 * 1024
    max_open: int = 4096
    """Requests to the server under way; one more gets a 429. Draws of a guided reply, and choices of one that is put
    together here, are requests each."""
    max_open_per_session: int = 256
    body_timeout_s: float = 30.0
    """In which the body of a request must have come in."""
    write_timeout_s: float = 60.0
    """In which a client must take the next piece of its reply; one that stalls is disconnected."""
    max_guidance_beta: float = 100.0
    max_guidance_draws: int = 32
    """What requests may ask for in `x-turngate-guidance`; draws stand for the candidates of token guidance too."""
    request_timeout_s: float = 600.0
    """For the upstream's whole answer, retries included."""
    keep_alive_s: float = 75.0
    """How long a connection may wait for the head of its next request, its first one included."""
    idle_timeout_s: float = 900.0
    """Sessions opened by their key end after so long without a request."""
    kept_replies: int = 16
    """Delivered replies that each session keeps for clients that missed them and ask again."""
    kept_trajectories: int = 256
    """Of sessions opened over HTTP, after their end."""

    def __post_init__(self) -> None:
        if not self.max_guidance_beta >= 0:
            raise ConfigError(f"max_guidance_beta must be at least 0: got {self.max_guidance_beta} (GatewayConfig)")
        if self.max_guidance_draws < 1:
            raise ConfigError(f"max_guidance_draws must be 1 or more: got {self.max_guidance_draws} (GatewayConfig)")
        for name in (
            "max_sessions",
            "max_body_bytes",
            "max_open",
            "max_open_per_session",
            "kept_replies",
            "kept_trajectories",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more: got {getattr(self, name)} (GatewayConfig)")
        for name in ("body_timeout_s", "write_timeout_s", "request_timeout_s", "keep_alive_s", "idle_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0: got {getattr(self, name)} (GatewayConfig)")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be in [0, 65536): got {self.port} (GatewayConfig); 0 takes a free one")
        if self.admin_key is not None and not (self.admin_key.isascii() and self.admin_key.isprintable()):
            raise ConfigError("admin_key must be printable ASCII: it travels in a header (GatewayConfig)")
        if self.admin_key == "":
            raise ConfigError("admin_key must not be empty (GatewayConfig); None makes a random one")

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "admin_key")
        return f"GatewayConfig({', '.join(shown)})"  # without the key: settings get printed and logged
