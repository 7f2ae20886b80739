"""Continuous batching: sequences join and leave a running batch between two decode steps.

Synchronous and single-threaded: one thread calls `submit`, `cancel`, `swap_weights` and `step` in turn. A step

    1. admits waiting requests into free rows, copies what the prefix cache knows and runs the rest (prefill);
    2. feeds every running sequence its last token and draws the next (decode);
    3. reports what finished or streams, and closes the gaps in the batch.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from turngate.runtime.engine.admission import Admission, Admitted
from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.counters import Counters
from turngate.runtime.engine.guidance import tilt_of
from turngate.runtime.engine.incremental import Span
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.request import BatcherConfig, BatcherStatistics, Finished, Progress, Rejection, Request
from turngate.runtime.engine.rows import CachedRows
from turngate.runtime.engine.sampler import Drawn, SamplingRows, draw, raw_logprobs, top_logprobs
from turngate.runtime.engine.sequence import LiveSequence, check_request
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine.values import Values
from turngate.runtime.errors import ConfigError, PublishError

__all__ = ["Batcher"]

_MAX_WAVES = 4
"""Prefills in one step. Requests that share a new prefix wait for the first of them, one wave each."""
_SEED_MASK = (1 << 64) - 1


class Batcher:
    """Decodes many sequences together. Not thread-safe: one thread drives it.

    Mutable state: the requests that wait; the running sequences, which fill rows 0 to R - 1 without gaps; all of them
    by id; per-row token, position and sampling columns; the key-value rows with their prefix cache, and those of a
    critic; the policy version; counters.
    """

    def __init__(
        self,
        model: PolicyModel,
        tokenizer: Tokenizer,
        config: BatcherConfig | None = None,
        *,
        policy_version: int = 0,
        critic: PolicyModel | None = None,
        value_kind: ValueKind | None = None,
        value_version: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Serve `model`, which the batcher owns from now on, and read values off `critic`, or off its own head.

        Raises: ConfigError: model and tokenizer or critic do not fit, or a size is not positive.
        """
        self.config = config or BatcherConfig()
        _check_config(self.config, model, tokenizer)
        rows = self.config.max_running
        self._tokenizer = tokenizer
        self._model = model.eval().requires_grad_(False)
        cached = self.config.max_cached_tokens
        self._rows = CachedRows(model, rows, cached)
        self._values = Values(
            self._rows, critic, kind=value_kind, rows=rows, max_cached_tokens=cached, version=value_version
        )
        self._policy_version = policy_version
        self._waiting = Admission(self._rows, self._values)
        self._running: list[LiveSequence] = []
        self._live: dict[int, LiveSequence] = {}
        self._tokens = np.zeros(rows, dtype=np.int64)
        self._positions = np.zeros(rows, dtype=np.int64)
        self._sampling = SamplingRows(rows)
        self._next_id = 0
        self._seeds = np.random.default_rng(self.config.seed & _SEED_MASK)
        self._counts = Counters(clock)

    def __repr__(self) -> str:
        return f"<Batcher {len(self._running)} running, {len(self._waiting)} waiting, version {self._policy_version}>"

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve now."""
        return self._policy_version

    @property
    def has_work(self) -> bool:
        """True while `step` would do something."""
        return bool(self._live)

    def submit(self, request: Request) -> int | Rejection:
        """Queue a request; returns its sequence id, or why it was not taken."""
        context = self._model.config.max_context
        rejection = check_request(request, context, has_values=self._values.is_available)
        # Free slots count, too: those that will fill them between two steps do not wait.
        if rejection is None and len(self._live) >= self.config.max_running + self.config.max_waiting:
            message = f"requests must wait for a slot and {self.config.max_waiting} already do; try again later"
            rejection = Rejection("max_waiting", message, "overloaded")
        if rejection is not None:
            self._counts.rejected += 1
            return rejection
        seed = int(self._seeds.integers(1 << 63)) if request.seed is None else request.seed
        sequence = LiveSequence(self._next_id, request, seed & _SEED_MASK, self._tokenizer, context)
        self._next_id += 1
        self._waiting.put(sequence)
        self._live[sequence.id] = sequence
        return sequence.id

    def cancel(self, sequence_id: int) -> bool:
        """Drop a sequence and free its slot; False when it is not known (any more). It reports nothing further."""
        sequence = self._live.pop(sequence_id, None)
        if sequence is None:
            return False
        if sequence.row < 0:
            self._waiting.remove(sequence)
        else:
            self._release([sequence])
        self._counts.cancelled += 1
        return True

    @torch.inference_mode()
    def step(self) -> list[Progress | Finished]:
        """Admit what fits, decode one token for every running sequence, report what streams or finished."""
        if not self.has_work:
            return []
        started_s = self._counts.clock()
        out: list[Progress | Finished] = []
        self._admit(out)
        if self._running:
            count = len(self._running)
            tokens, positions = self._to_device(self._tokens[:count]), self._to_device(self._positions[:count])
            hidden = self._rows.engine.decode_hidden(tokens, positions)
            self._follow(tokens, positions, hidden)
            self._advance(0, count, self._rows.engine.logits(hidden), out)
        self._counts.end_step(started_s)
        return out

    def swap_weights(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Serve new weights from the next step on. Running sequences go on under the policy `on_update`.

        Raises: PublishError: the weights do not fit the model or are not finite; the old ones go on serving.
        """
        self._model.load_tensors(state, where=f"policy version {policy_version}")
        self._rows.renew()
        self._policy_version = policy_version
        for sequence in self._running:
            sequence.entry = None
        if self.config.on_update == "recompute":
            self._recompute()

    @torch.inference_mode()
    def swap_critic(self, state: Mapping[str, torch.Tensor], value_version: int) -> None:
        """Read values off new critic weights from the next step on; what is running is run again under them.

        Raises: PublishError: the weights do not fit or are not finite, or there is no critic; the old ones go on.
        """
        if not self._values.has_own_rows:
            raise PublishError("the engine must have a critic to take weights for one: start it with critic=...")
        self._values.rows.engine.model.load_tensors(state, where=f"value version {value_version}")
        self._counts.recomputed_tokens += self._values.renew(value_version, self._running)

    def statistics(self) -> BatcherStatistics:
        """Return counts and present load."""
        return self._counts.statistics(len(self._running), len(self._waiting), self._policy_version, self._rows.cache)

    @property
    def value_version(self) -> int:
        """Version of the weights that values are read off."""
        return self._values.version if self._values.has_own_rows else self._policy_version

    def _admit(self, out: list[Progress | Finished]) -> None:
        """Fill free rows, in waves: a later wave finds in the cache what an earlier one computed."""
        budget = self.config.max_prefill_tokens
        for _ in range(_MAX_WAVES):
            wave = self._waiting.next_wave(range(len(self._running), self.config.max_running), budget)
            if not wave:
                return
            budget -= sum(one.new_tokens for one in wave)
            self._prefill(wave, out)

    def _prefill(self, wave: list[Admitted], out: list[Progress | Finished]) -> None:
        """Run the prompts of a wave, score echoed ones, read values, and draw everyone's first token."""
        hidden = self._prefill_hidden(wave)
        first = len(self._running)
        for sequence, span, _ in wave:
            self._join(sequence)
            if span is not None:
                self._make_findable(sequence)
        if followed := [(one.sequence, one.value_span) for one in wave if one.value_span is not None]:
            self._values.prefill(followed)
        elif valued := [i for i, one in enumerate(wave) if one.sequence.wants_values]:
            self._values.remember([wave[i].sequence.row for i in valued], hidden[valued])
        for sequence, _, _ in wave:
            if sequence.request.value:
                sequence.value = float(self._values.of_prefixes([sequence.row])[0])
        self._advance(first, len(self._running), self._rows.engine.logits(hidden), out)

    def _prefill_hidden(self, wave: list[Admitted]) -> torch.Tensor:
        """Return the policy's final states after each prompt, shape (wave, width); zeros where it did not run."""
        engine = self._rows.engine
        hidden = torch.zeros(len(wave), self._model.config.width, device=self._model.embed.weight.device)
        run = [(i, one.span) for i, one in enumerate(wave) if one.span is not None]
        plain = [(i, span) for i, span in run if not wave[i].sequence.request.echo]
        if plain:
            hidden[[i for i, _ in plain]] = engine.prefill_hidden([span for _, span in plain])
        echoed = [(i, span) for i, span in run if wave[i].sequence.request.echo]
        if echoed:
            whole = engine.prefill_hidden([span for _, span in echoed], needs="all")
            for (i, _), part in zip(echoed, whole.split([len(span.ids) for _, span in echoed]), strict=True):
                _score_prompt(wave[i].sequence, engine.logits(part))
                hidden[i] = part[-1]
        return hidden

    def _follow(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        """Note the values of the running prefixes, where they guide: the policy was just fed these tokens."""
        rows = [sequence.row for sequence in self._running if sequence.request.guidance is not None]
        if rows and self._values.has_own_rows:
            self._values.decode(rows, tokens_B[rows], positions_B[rows])
        elif rows:
            self._values.remember(rows, hidden_BD[rows])

    def _join(self, sequence: LiveSequence) -> None:
        """Make a prefilled sequence the last running row."""
        row, request = sequence.row, sequence.request
        assert row == len(self._running)
        self._running.append(sequence)
        self._counts.prompt_tokens += sequence.prompt_length
        self._counts.cached_tokens += sequence.cached_tokens
        self._positions[row] = sequence.prompt_length - 1
        self._sampling.temperature[row] = request.temperature
        self._sampling.top_p[row] = request.top_p
        self._sampling.top_k[row] = request.top_k
        self._sampling.seed[row] = sequence.seed
        self._sampling.index[row] = 0

    def _make_findable(self, sequence: LiveSequence) -> None:
        prompt = sequence.ids[: sequence.prompt_length]
        sequence.entry = self._rows.make_findable(sequence.row, prompt, sequence.keys)

    def _advance(self, first: int, last: int, logits: torch.Tensor, out: list[Progress | Finished]) -> None:
        """Draw a token for rows first..last-1, append it, and report and release what finished."""
        drawn = draw(logits, self._sampling, first, last, tilt_of(self._running[first:last], self._values))
        self._tokens[first:last] = drawn.tokens_B
        self._positions[first:last] += 1
        self._sampling.index[first:last] += 1
        version, done = self._policy_version, list[LiveSequence]()
        columns = zip(self._running[first:last], drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True)
        for line, (sequence, token, logprob) in enumerate(columns):
            if self._push(sequence, token, logprob, version, drawn, line):
                done.append(sequence)
            if sequence.request.stream:
                out.append(sequence.progress())
        self._release(done)
        out.extend(sequence.finished(self._tokenizer, version, self.value_version) for sequence in done)
        for sequence in done:
            del self._live[sequence.id]
        self._counts.finished += len(done)

    def _push(self, sequence: LiveSequence, token: int, logprob: float, version: int, drawn: Drawn, line: int) -> bool:
        """Append one drawn token; True when the sequence is done. A request for no tokens is done before the first."""
        if sequence.room == 0:
            sequence.finish_reason = "length"
            return True
        self._counts.generated_tokens += 1
        if sequence.request.guidance is not None:
            sequence.base_logprobs.append(float(drawn.base_logprobs_B[line]))
            sequence.value_versions.append(self.value_version)
            self._counts.guided_tokens += 1
        if sequence.request.top_logprobs:
            sequence.top_logprobs.append(top_logprobs(drawn.distribution_BV[line], sequence.request.top_logprobs))
        return sequence.push(token, logprob, version)

    def _release(self, done: Iterable[LiveSequence]) -> None:
        """Take sequences out of the batch, keep their prefixes, and move the last rows into the gaps."""
        for sequence in sorted(done, key=lambda s: -s.row):
            self._keep(sequence)
            gap, last = sequence.row, len(self._running) - 1
            sequence.row = -1
            moved = self._running.pop()
            if gap == last:
                continue
            self._rows.move(last, gap, len(moved.ids), moved.entry)
            self._values.move(last, gap, moved)
            self._sampling.move(last, gap)
            self._tokens[gap], self._positions[gap] = self._tokens[last], self._positions[last]
            self._running[gap] = moved
            moved.row = gap

    def _keep(self, sequence: LiveSequence) -> None:
        """Hand a leaving sequence's keys and values to the prefix cache. The last token's were never computed."""
        ids = sequence.ids[: max(sequence.prompt_length, len(sequence.ids) - 1)]
        self._rows.keep(sequence.entry, sequence.row, ids)
        if self._values.has_own_rows:
            self._values.rows.keep(sequence.value_entry, sequence.row, ids)
        sequence.entry = sequence.value_entry = None

    @torch.inference_mode()
    def _recompute(self) -> None:
        """Run all running sequences again under the new weights, except their last tokens, which are yet to be fed."""
        spans = [Span(sequence.row, 0, 0, sequence.ids[:-1]) for sequence in self._running]
        if spans:
            self._rows.engine.prefill_hidden(spans, needs="none")
            self._counts.recomputed_tokens += sum(len(span.ids) for span in spans)
        for sequence in self._running:
            self._make_findable(sequence)

    def _to_device(self, column: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> torch.Tensor:
        return torch.from_numpy(column).to(self._model.embed.weight.device)


def _score_prompt(sequence: LiveSequence, logits_TV: torch.Tensor) -> None:
    """Record the log-prob of each prompt token given those before it."""
    logprobs_TV = raw_logprobs(logits_TV[:-1])
    targets = torch.tensor(sequence.ids[1:], dtype=torch.int64)
    sequence.prompt_logprobs = [None, *logprobs_TV.gather(1, targets[:, None])[:, 0].tolist()]
    if count := sequence.request.top_logprobs:
        sequence.prompt_top_logprobs = [(), *(top_logprobs(line, count) for line in logprobs_TV)]


def _check_config(config: BatcherConfig, model: PolicyModel, tokenizer: Tokenizer) -> None:
    if len(tokenizer) != model.config.vocab_size:
        raise ConfigError(
            f"model and tokenizer must share one vocabulary: expected {len(tokenizer)} tokens, got a model of "
            f"{model.config.vocab_size}; keep tokenizer.json beside the weights it was trained with"
        )
    for name in ("max_running", "max_waiting", "max_prefill_tokens"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1: got {getattr(config, name)} (BatcherConfig)")
    if config.max_cached_tokens < 0:
        raise ConfigError(f"max_cached_tokens must be at least 0: got {config.max_cached_tokens} (BatcherConfig)")
