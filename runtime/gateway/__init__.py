"""An OpenAI-compatible door in front of any server, for agents that bring their own loop, in any SDK or language."""

from turngate.runtime.gateway.config import GatewayConfig
from turngate.runtime.gateway.server import Gateway, GatewayStatistics

__all__ = ["Gateway", "GatewayConfig", "GatewayStatistics"]
