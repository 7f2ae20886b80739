"""How agents are run and recorded: endpoints, rollouts, scheduling, the buffer. Imports `turngate.envs`."""

if __name__ == "runtime":
    raise ImportError("import turngate.runtime, not runtime: the bare name makes a second copy of every class")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from turngate.runtime.agent import Agent, Outcome
from turngate.runtime.capabilities import Capabilities
from turngate.runtime.connect import connect
from turngate.runtime.context import Context, History, full, last_turns, summarise, token_budget
from turngate.runtime.dialect import OPENAI, Dialect, TokenMode
from turngate.runtime.endpoint import ChatEndpoint, Endpoint
from turngate.runtime.evaluation import Evaluation
from turngate.runtime.events import EvaluationFinished, Events, RolloutFinished, UpdateFinished
from turngate.runtime.guidance import Guidance
from turngate.runtime.injection import Injection
from turngate.runtime.learner import Learner
from turngate.runtime.ledger import Ledger
from turngate.runtime.limits import Limits
from turngate.runtime.probe import probe
from turngate.runtime.progress import show_progress
from turngate.runtime.rendering import Renderer
from turngate.runtime.rollout import run_rollout
from turngate.runtime.runtime import Runtime
from turngate.runtime.scorers import Scorer, ScorerSet
from turngate.runtime.session import Session
from turngate.runtime.staleness import StalenessLimit
from turngate.runtime.transcript import read_trajectories, render_transcript, write_trajectories
from turngate.runtime.types import (
    Batch,
    Candidate,
    Completion,
    Decision,
    Group,
    GuidedTokens,
    Message,
    RestartedFrom,
    Sampling,
    Segment,
    TokenGuidance,
    Trajectory,
    Turn,
    UpdateReport,
)
from turngate.runtime.weights import WeightPublisher

if TYPE_CHECKING:
    from turngate.runtime.branch_budget import BranchLedger, BranchLimits
    from turngate.runtime.branching import branch
    from turngate.runtime.buffer import Buffer
    from turngate.runtime.collecting import collect
    from turngate.runtime.critic_q import CriticQ
    from turngate.runtime.engine_renderer import EngineRenderer
    from turngate.runtime.group_branching import Branching
    from turngate.runtime.huggingface_renderer import HuggingFaceRenderer
    from turngate.runtime.judge import JudgeEndpoint
    from turngate.runtime.monte_carlo_q import MonteCarloQ
    from turngate.runtime.plot import plot_run
    from turngate.runtime.publishers import EnginePublisher, FolderPublisher, SGLangPublisher, VLLMPublisher
    from turngate.runtime.restarts import RestartPoint, Restarts
    from turngate.runtime.run import TrainReport
    from turngate.runtime.scheduler import Collection
    from turngate.runtime.scorer_q import ScorerQ
    from turngate.runtime.session_table import SessionTable
    from turngate.runtime.token_view import render_tokens
    from turngate.runtime.training import train

__all__ = [
    "OPENAI",
    "Agent",
    "Batch",
    "BranchLedger",
    "BranchLimits",
    "Branching",
    "Buffer",
    "Candidate",
    "Capabilities",
    "ChatEndpoint",
    "Collection",
    "Completion",
    "Context",
    "CriticQ",
    "Decision",
    "Dialect",
    "Endpoint",
    "EnginePublisher",
    "EngineRenderer",
    "Evaluation",
    "EvaluationFinished",
    "Events",
    "FolderPublisher",
    "Group",
    "Guidance",
    "GuidedTokens",
    "History",
    "HuggingFaceRenderer",
    "Injection",
    "JudgeEndpoint",
    "Learner",
    "Ledger",
    "Limits",
    "Message",
    "MonteCarloQ",
    "Outcome",
    "Renderer",
    "RestartPoint",
    "RestartedFrom",
    "Restarts",
    "RolloutFinished",
    "Runtime",
    "SGLangPublisher",
    "Sampling",
    "Scorer",
    "ScorerQ",
    "ScorerSet",
    "Segment",
    "Session",
    "SessionTable",
    "StalenessLimit",
    "TokenGuidance",
    "TokenMode",
    "TrainReport",
    "Trajectory",
    "Turn",
    "UpdateFinished",
    "UpdateReport",
    "VLLMPublisher",
    "WeightPublisher",
    "branch",
    "collect",
    "connect",
    "full",
    "last_turns",
    "plot_run",
    "probe",
    "read_trajectories",
    "render_tokens",
    "render_transcript",
    "run_rollout",
    "show_progress",
    "summarise",
    "token_budget",
    "train",
    "write_trajectories",
]

# What not every program needs, by the module that has it: imported when it is asked for.
_LATE = {
    "BranchLedger": "branch_budget",
    "BranchLimits": "branch_budget",
    "Branching": "group_branching",
    "Buffer": "buffer",
    "Collection": "scheduler",
    "CriticQ": "critic_q",
    "EnginePublisher": "publishers",
    "EngineRenderer": "engine_renderer",
    "FolderPublisher": "publishers",
    "HuggingFaceRenderer": "huggingface_renderer",
    "JudgeEndpoint": "judge",
    "MonteCarloQ": "monte_carlo_q",
    "RestartPoint": "restarts",
    "Restarts": "restarts",
    "SGLangPublisher": "publishers",
    "ScorerQ": "scorer_q",
    "SessionTable": "session_table",
    "TrainReport": "run",
    "VLLMPublisher": "publishers",
    "branch": "branching",
    "collect": "collecting",
    "plot_run": "plot",
    "render_tokens": "token_view",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    return value
