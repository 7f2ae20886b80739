"""How an engine is run: one frozen value that also crosses into its process."""

from typing import Literal, TypeAlias

import msgspec

from turngate.runtime.engine.protocol import MAX_POLICY_VERSION
from turngate.runtime.errors import ConfigError

__all__ = ["EngineConfig", "ValueKind"]

ValueKind: TypeAlias = Literal["success", "scalar"]
"""`success`: a value head puts out the logit of a success probability; `scalar`: the value itself."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine.

    Raises: ConfigError: a setting cannot work.
    """

    host: str = "127.0.0.1"
    """Loopback by default: the engine loads weights from any path it is told."""
    port: int = 0
    """0 takes a free port."""
    api_key: str | None = None
    """When set, every request but GET /health must carry it as a bearer token."""
    model_name: str = "policy"
    """What clients call the model."""
    policy_version: int = 0
    """Version of the weights the engine starts with."""
    critic: str | None = None
    """Folder of a model with a value head, to read values off; None reads them off the served model's own head."""
    value_kind: ValueKind | None = None
    """What the head puts out; None takes the word of the model's config."""
    value_version: int = 0
    """Version of the critic the engine starts with."""
    max_running: int = 128
    """Sequences decoded together."""
    max_waiting: int = 8192
    """Sequences that may wait for a place; beyond it requests are answered 429."""
    max_cached_tokens: int = 262_144
    """Tokens of finished sequences kept for prompts that go on from them; 0 computes every prompt anew."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """After a weight update, running sequences have their cache recomputed, so that each token's log-prob is exactly
    its version's; `keep` goes on with the old cache, which is faster and makes those tokens a mixture."""
    max_body_bytes: int = 32 * 2**20
    """Larger requests are answered 413."""
    keep_alive_s: float = 3600.0
    """Idle connections stay open this long: longer than any client keeps them, or reused ones die under requests."""
    seed: int | None = None
    """Root of the streams of requests that bring no seed; None draws one."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "max_body_bytes", "keep_alive_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)}; leave it out for the default")
        if self.max_cached_tokens < 0:
            raise ConfigError(
                f"max_cached_tokens must be 0 or more: got {self.max_cached_tokens}; 0 turns the cache off"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be in [0, 65535]: got {self.port}; 0 takes a free one")
        for name in ("policy_version", "value_version"):
            if not 0 <= getattr(self, name) <= MAX_POLICY_VERSION:
                raise ConfigError(f"{name} must be in [0, {MAX_POLICY_VERSION}]: got {getattr(self, name)}")
        if self.value_kind not in (None, "success", "scalar"):
            raise ConfigError(f"value_kind must be success or scalar: got {self.value_kind!r}")
        if self.api_key == "":
            raise ConfigError("api_key must not be empty: got ''; use None to serve without one")
