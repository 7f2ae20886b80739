"""Turngate: an asyncio runtime for agentic reinforcement learning.

The three parts are `turngate.envs` (what an agent acts in), `turngate.runtime` (how agents are run and recorded) and
`turngate.learners` (how experience becomes weights).
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
