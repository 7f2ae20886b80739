"""A tiny model and hand-made trajectories sampled from it, token by token, without an engine."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from turngate.envs.base import End, Task
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.types import Batch, Group, Segment, Trajectory, Turn

VOCABULARY = 24
TASK = Task("task")


def make_model(seed: int = 0, **sizes: int) -> PolicyModel:
    """Return a model whose layers all speak: fresh ones write nothing into the residual stream."""
    shape = {"width": 16, "layers": 2, "heads": 2, "head_dim": 8, "mlp_width": 32, "max_context": 128} | sizes
    model = PolicyModel(ModelConfig(vocab_size=VOCABULARY, **shape), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                parameter.normal_(std=0.3, generator=generator)
    return model


def sample_trajectory(
    model: PolicyModel,
    generator: torch.Generator,
    *,
    name: str = "t",
    reward: float = 0.0,
    turns: int = 3,
    version: int = 0,
    temperature: float = 1.0,
    end: End = End.success,
    drop_early_turns: bool = False,
) -> Trajectory:
    """Sample turns of 2-4 tokens between observations of 1-3; the last turn earns the reward.

    With `drop_early_turns` every turn after the first sees only the first observation and the latest one, so each turn
    is a segment of its own.
    """
    columns: list[tuple[list[int], list[int], list[float], list[int], list[int]]] = []
    made: list[Turn] = []
    first = [1, *_some(generator, 3)]
    for index in range(turns):
        if index == 0 or drop_early_turns:
            seen = first + (_some(generator, 2) if index else [])
            columns.append((list(seen), [0] * len(seen), [0.0] * len(seen), [-1] * len(seen), [-1] * len(seen)))
        else:
            for column, values in zip(columns[-1], _context(_some(generator, 1 + index % 3)), strict=True):
                column.extend(values)
        ids, mask, logprobs, versions, turn_ids = columns[-1]
        start, length = len(ids), 2 + index % 3
        for _ in range(length):
            token, logprob = _draw(model, ids, generator, temperature)
            ids.append(token)
            mask.append(1)
            logprobs.append(logprob)
            versions.append(version)
            turn_ids.append(index)
        rewards = {"outcome": reward} if index == turns - 1 else {}
        segment = len(columns) - 1
        made.append(Turn(index=index, segment=segment, start=start, length=length, text="", rewards=rewards))
    segments = tuple(Segment.of(*column) for column in columns)
    return Trajectory(id=name, task=TASK, turns=tuple(made), segments=segments, end=end)


def make_batch(groups: Sequence[Sequence[Trajectory]], *, policy_version: int = 0, min_version: int = 0) -> Batch:
    """Return a batch of groups in the order given."""
    made = [Group(id=f"g{i}", task=TASK, order=i, trajectories=tuple(members)) for i, members in enumerate(groups)]
    return Batch(groups=tuple(made), policy_version=policy_version, min_version=min_version)


def sample_batch(
    model: PolicyModel, rewards: Sequence[Sequence[float]], *, seed: int = 0, policy_version: int = 0, **options: object
) -> Batch:
    """Sample one trajectory per reward, group by group."""
    generator, number = torch.Generator().manual_seed(seed), itertools.count()
    groups = [
        [
            sample_trajectory(model, generator, name=f"t{next(number)}", reward=reward, turns=2 + i % 3, **options)
            for i, reward in enumerate(group)
        ]
        for group in rewards
    ]
    return make_batch(groups, policy_version=policy_version)


class Lab:
    """The functions of this module, for tests to use: test modules cannot import each other."""

    make_model = staticmethod(make_model)
    sample_trajectory = staticmethod(sample_trajectory)
    make_batch = staticmethod(make_batch)
    sample_batch = staticmethod(sample_batch)


@pytest.fixture
def lab() -> Lab:
    """Makes tiny models and samples from them."""
    return Lab()


@pytest.fixture
def model() -> PolicyModel:
    """A tiny model."""
    return make_model()


@pytest.fixture
def folder(tmp_path: Path, model: PolicyModel) -> Path:
    """The folder of that model."""
    model.save(tmp_path / "start")
    return tmp_path / "start"


def _some(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()


def _context(ids: list[int]) -> tuple[list[int], list[int], list[float], list[int], list[int]]:
    n = len(ids)
    return ids, [0] * n, [0.0] * n, [-1] * n, [-1] * n


@torch.no_grad()
def _draw(model: PolicyModel, ids: list[int], generator: torch.Generator, temperature: float) -> tuple[int, float]:
    """Draw one token after `ids` and return it with its log-prob."""
    logits_1V = model.logits(pack([[*ids, 0]], [[0] * len(ids) + [1]])) / temperature
    logprobs_V = torch.log_softmax(logits_1V[0], dim=-1)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])
