"""What an agent acts in: tasks, environments and tools. Imports no other part of Turngate."""

if __name__ == "envs":
    raise ImportError("import turngate.envs, not envs: the bare name makes a second copy of every class")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from turngate.envs.base import (
    Action,
    End,
    Env,
    EnvFactory,
    Observation,
    Snapshot,
    SnapshotEnv,
    Step,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

if TYPE_CHECKING:
    from turngate.envs.arithmetic import ArithmeticEnv
    from turngate.envs.latency import HeavyTail, compute_latency_s
    from turngate.envs.replay import replayed
    from turngate.envs.shopping import ShoppingEnv, ShoppingToolEnv
    from turngate.envs.tool_calls import ParsedReply, ToolParser
    from turngate.envs.tool_env import ToolEnv
    from turngate.envs.tool_parsers import TOOL_PARSERS, tool_parser
    from turngate.envs.tool_set import ToolAnswer, ToolSet
    from turngate.envs.tools import Finish, Tool, tool

__all__ = [
    "TOOL_PARSERS",
    "Action",
    "ArithmeticEnv",
    "End",
    "Env",
    "EnvFactory",
    "Finish",
    "HeavyTail",
    "Observation",
    "ParsedReply",
    "ShoppingEnv",
    "ShoppingToolEnv",
    "Snapshot",
    "SnapshotEnv",
    "Step",
    "Task",
    "Tool",
    "ToolAnswer",
    "ToolCall",
    "ToolEnv",
    "ToolParser",
    "ToolResult",
    "ToolSet",
    "ToolSpec",
    "compute_latency_s",
    "replayed",
    "tool",
    "tool_parser",
]

# What not every program needs, by the module that has it: imported when it is asked for.
_LATE = {
    "ArithmeticEnv": "arithmetic",
    "Finish": "tools",
    "HeavyTail": "latency",
    "ParsedReply": "tool_calls",
    "ShoppingEnv": "shopping",
    "ShoppingToolEnv": "shopping",
    "TOOL_PARSERS": "tool_parsers",
    "Tool": "tools",
    "ToolAnswer": "tool_set",
    "ToolEnv": "tool_env",
    "ToolParser": "tool_calls",
    "ToolSet": "tool_set",
    "compute_latency_s": "latency",
    "replayed": "replay",
    "tool": "tools",
    "tool_parser": "tool_parsers",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    return value
