"""Log-probs by an independent forward pass: transformers on the recorded ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
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

    @torch.inference_mode()
    def _segment_errors(self, segment: Segment, temperature: float) -> list[float]:
        ids_1T = torch.tensor([segment.ids().tolist()])
        logits_TV = self._model(input_ids=ids_1T).logits[0, :-1].float() / temperature
        expected_T = logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]
        recorded_T = torch.tensor(segment.logprob_values().tolist())[1:]
        sampled_T = torch.tensor(list(segment.policy_mask)).bool()[1:]
        return (expected_T - recorded_T).abs()[sampled_T].tolist()
