"""What an agent acts in: tasks, environments and tools. Imports no other part of Turngate."""

if __name__ == "envs":
    raise ImportError("import turngate.envs, not envs: the bare name makes a second copy of every class")

from turngate.envs.arithmetic import ArithmeticEnv
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
from turngate.envs.latency import HeavyTail, compute_latency_s
from turngate.envs.shopping import ShoppingEnv, ShoppingToolEnv

__all__ = [
    "Action",
    "ArithmeticEnv",
    "End",
    "Env",
    "EnvFactory",
    "HeavyTail",
    "Observation",
    "ShoppingEnv",
    "ShoppingToolEnv",
    "Snapshot",
    "SnapshotEnv",
    "Step",
    "Task",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
    "compute_latency_s",
]
