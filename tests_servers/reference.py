"""Log-probs by an independent forward pass: transformers on the recorded ids."""

from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turngate.runtime.types import Segment, Trajectory

__all__ = ["Errors", "Reference"]


class Errors(NamedTuple):
    """How far behaviour log-probs are from the reference, nats."""

    tokens: int
    mean: float
    largest: float


class Reference:
    """A Hugging Face model in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def errors(self, trajectories: Sequence[Trajectory], *, temperature: float = 1.0) -> Errors:
        """Compare every sampled token of every trajectory."""
        found: list[float] = []
        for trajectory in trajectories:
            for segment in trajectory.segments:
                found += self._segment_errors(segment, temperature)
        return Errors(len(found), sum(found) / len(found), max(found))

    def load(self, weights: Path) -> None:
        """Take other weights: a safetensors file under the names of the folder."""
        self._model.load_state_dict(load_file(weights))

    def turn_errors(self, trajectory: Trajectory, *, temperature: float = 1.0) -> list[float]:
        """Return the largest difference within each turn."""
        by_segment = [self._differences(segment, temperature) for segment in trajectory.segments]
        return [max(by_segment[t.segment][t.start : t.start + t.length]) for t in trajectory.turns]

    def _segment_errors(self, segment: Segment, temperature: float) -> list[float]:
        return list(compress(self._differences(segment, temperature), segment.policy_mask))

    @torch.inference_mode()
    def _differences(self, segment: Segment, temperature: float) -> list[float]:
        """Return |reference - recorded| for every token, 0 for the first, which has no context."""
        ids_1T = torch.tensor([segment.ids().tolist()])
        logits_TV = self._model(input_ids=ids_1T).logits[0, :-1].float() / temperature
        expected_T = logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]
        recorded_T = torch.tensor(segment.logprob_values().tolist())[1:]
        return [0.0, *(expected_T - recorded_T).abs().tolist()]
