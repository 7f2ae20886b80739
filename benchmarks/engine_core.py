"""Speed of the embedded engine's core, without HTTP: one CPU thread, the default model, shopping-like lengths.

Prints one JSON object: `decode_tokens_per_s` (model alone, batch 64 on 300 cached tokens),
`batcher_tokens_per_s` (whole steps: sampling and bookkeeping included, same load), `batcher_overhead_ratio` (CPU of a
whole step to that of the model's part), `guided_8_tokens_per_s` (the same with every token guided: 8 candidates, a
critic of the policy's size), `guided_8_step_ratio` (CPU of a guided step to a plain one, with `_low` and `_high` over
rounds that measure both), the same for 4 candidates, `prefill_tokens_per_s` (40 new tokens on 150 cached, 64
sequences), `multi_turn_tokens_per_s` (generated tokens of 8-turn conversations with cached prefixes),
`multi_turn_cached_share`, `train_tokens_per_s` (forward and backward, all tokens scored), `train_quarter_tokens_per_s`
(a quarter scored), `swap_ms` (weight swap with 64 running sequences recomputed). Seconds are of CPU time.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.incremental import Incremental, Span
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.process import CHILD_ENVIRONMENT
from turngate.runtime.engine.request import BatcherConfig, Finished, Rejection, Request
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.types import TokenGuidance

ROWS, CONTEXT, TURNS, TURN_TOKENS, OBSERVATION_TOKENS = 64, 300, 8, 12, 30
STEP_ROUNDS, CANDIDATES = 5, (4, 8)


def cpu_s(action: Callable[[], object], repeats: int, *, rounds_of: int = 3) -> float:
    """CPU seconds per call, the best of some rounds: the machine may be shared."""
    action()
    rounds = []
    for _ in range(rounds_of):
        started = time.process_time()
        for _ in range(repeats):
            action()
        rounds.append((time.process_time() - started) / repeats)
    return min(rounds)


@torch.inference_mode()
def measure_model(model: PolicyModel) -> dict[str, float]:
    engine = Incremental(model, ROWS)
    tokens, positions = torch.ones(ROWS, dtype=torch.int64), torch.full((ROWS,), CONTEXT)
    decode_s = cpu_s(lambda: engine.decode(tokens, positions), 30)
    spans = [Span(row, 149, 150, [1] * 41) for row in range(ROWS)]
    prefill_s = cpu_s(lambda: engine.prefill(spans), 4)
    return {"decode_tokens_per_s": ROWS / decode_s, "prefill_tokens_per_s": 41 * ROWS / prefill_s}


def start_rows(model: PolicyModel, tokenizer: Tokenizer, guidance: TokenGuidance | None = None) -> Batcher:
    """Return a batcher whose rows all have a long reply to give."""
    critic = PolicyModel(msgspec.structs.replace(model.config, value_head=True)) if guidance is not None else None
    batcher = Batcher(model, tokenizer, BatcherConfig(max_running=ROWS), critic=critic)
    rng = random.Random(0)
    for seed in range(ROWS):
        prompt = [rng.randrange(len(tokenizer)) for _ in range(CONTEXT - 60)]
        asked = Request(prompt_ids=prompt, max_tokens=600, seed=seed, stop_ids=(), guidance=guidance)
        assert not isinstance(batcher.submit(asked), Rejection)
    return batcher


def measure_steps(model: PolicyModel, tokenizer: Tokenizer) -> dict[str, float]:
    """Steps with guidance and without, by turns: whatever else the machine does slows both down."""
    found: dict[str, list[float]] = {}
    for _ in range(STEP_ROUNDS):
        plain_s = cpu_s(start_rows(model, tokenizer).step, 60, rounds_of=1)
        found.setdefault("batcher_tokens_per_s", []).append(ROWS / plain_s)
        for top_k in CANDIDATES:
            guided = start_rows(model, tokenizer, TokenGuidance(beta=5.0, top_k=top_k))
            guided_s = cpu_s(guided.step, 30, rounds_of=1)
            found.setdefault(f"guided_{top_k}_tokens_per_s", []).append(ROWS / guided_s)
            found.setdefault(f"guided_{top_k}_step_ratio", []).append(guided_s / plain_s)
    figures = {name: statistics.median(values) for name, values in found.items()}
    for name in [name for name in found if name.endswith("_ratio")]:
        figures |= {f"{name}_low": min(found[name]), f"{name}_high": max(found[name])}
    return figures


def measure_swap(model: PolicyModel, tokenizer: Tokenizer) -> dict[str, float]:
    batcher = start_rows(model, tokenizer)
    batcher.step()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {"swap_ms": cpu_s(lambda: batcher.swap_weights(state, 1), 1) * 1e3}


def measure_conversations(model: PolicyModel, tokenizer: Tokenizer) -> dict[str, float]:
    """Eight groups of eight members talk for eight turns; each turn's prompt extends the last."""
    batcher = Batcher(model, tokenizer, BatcherConfig(max_running=ROWS))
    rng = random.Random(0)
    starts = [[rng.randrange(len(tokenizer)) for _ in range(60)] for _ in range(8)]
    turns: dict[int, tuple[list[int], int]] = {}

    def ask(prompt: list[int], turn: int) -> None:
        answer = batcher.submit(
            Request(prompt_ids=prompt, max_tokens=TURN_TOKENS, seed=rng.randrange(1 << 30), stop_ids=())
        )
        assert not isinstance(answer, Rejection)
        turns[answer] = (prompt, turn)

    started = time.process_time()
    for start in starts:
        for _ in range(8):
            ask(start, 0)
    while batcher.has_work:
        for output in batcher.step():
            if isinstance(output, Finished):
                prompt, turn = turns.pop(output.id)
                if turn + 1 < TURNS:
                    observation = [rng.randrange(len(tokenizer)) for _ in range(OBSERVATION_TOKENS)]
                    ask(prompt + output.token_ids + observation, turn + 1)
    seconds, seen = time.process_time() - started, batcher.statistics()
    return {
        "multi_turn_tokens_per_s": seen.generated_tokens / seconds,
        "multi_turn_cached_share": seen.cached_tokens / seen.prompt_tokens,
    }


def measure_training(config: ModelConfig) -> dict[str, float]:
    model, rng = PolicyModel(config), random.Random(0)
    rows = [[rng.randrange(config.vocab_size) for _ in range(rng.randint(80, 260))] for _ in range(48)]
    count = sum(map(len, rows))
    quarter = [bytes([0, *(rng.random() < 0.25 for _ in row[1:])]) for row in rows]

    def seconds(masks: list[bytes] | None) -> float:
        packed = pack(rows, masks)
        return cpu_s(lambda: model.score(packed).logprobs_M.mean().backward(), 2)

    return {"train_tokens_per_s": count / seconds(None), "train_quarter_tokens_per_s": count / seconds(quarter)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--vocabulary", type=int, default=500, help="number of tokens")
    arguments = parser.parse_args()
    if not CHILD_ENVIRONMENT.items() <= os.environ.items():  # as the engine's own process; read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **CHILD_ENVIRONMENT})
    torch.set_num_threads(1)
    bare = len(Tokenizer([]))
    tokenizer = Tokenizer([f"word_{index}" for index in range(arguments.vocabulary - bare)])
    model = PolicyModel(ModelConfig(vocab_size=len(tokenizer)))
    figures = measure_model(model) | measure_steps(model, tokenizer) | measure_swap(model, tokenizer)
    figures |= measure_conversations(model, tokenizer) | measure_training(model.config)
    figures["batcher_overhead_ratio"] = figures["decode_tokens_per_s"] / figures["batcher_tokens_per_s"]
    text = msgspec.json.encode({name: round(value, 3) for name, value in figures.items()}).decode()
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
