"""Trajectories for people and for files: readable transcripts, and JSON lines that read back exactly."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from turngate.runtime.answers import writable
from turngate.runtime.errors import RecordError
from turngate.runtime.guided_types import Candidate, Decision
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.opening import opening_messages
from turngate.runtime.types import Trajectory, Turn

__all__ = ["read_trajectories", "render_transcript", "trajectory_json", "write_trajectories"]


def _plain(value: Any) -> Any:
    """Make what an environment left in `state` writable: NumPy scalars and arrays as numbers, the rest as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
_MAX_DEPTH = 64
"""Of the containers in what an environment leaves in `state`."""
_CANDIDATE_CHARS = 80
"""Of a candidate that a transcript shows: to tell it from the others."""
_decode_any = msgspec.json.Decoder().decode
_decode = msgspec.json.Decoder(Trajectory).decode


def render_transcript(trajectory: Trajectory) -> str:
    """Return an episode as plain text: the task, every turn with its answer and rewards, and how it ended."""
    lines = [f"trajectory {trajectory.id}  task {trajectory.task.id}  seed {trajectory.seed}"]
    if (origin := trajectory.restarted_from) is not None:
        lines.append(f"restarted from trajectory {origin.origin} after {origin.turn} turns ({origin.reason}):")
    for message in opening_messages(trajectory):
        lines += _block(message.role, message.content)
    for turn in trajectory.turns:
        lines += _turn_lines(turn)
    lines.append(_ending(trajectory))
    return "\n".join(lines)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> int:
    """Write one JSON object per line, replacing the file; token arrays are base64. Returns how many were written.

    What JSON cannot hold in a turn's `state` or a task's `data`, which are the environment's, is written as text.
    """
    count = 0
    with path.open("wb") as file:
        for trajectory in trajectories:
            file.write(trajectory_json(trajectory) + b"\n")
            count += 1
    return count


def trajectory_json(trajectory: Trajectory) -> bytes:
    """Return a trajectory as the line that `write_trajectories` writes."""
    try:
        return _encode(trajectory)
    except (TypeError, ValueError, RecursionError, OverflowError):
        # States first: what nests too deep, or is part of itself, cannot even be made plain.
        turns = tuple(msgspec.structs.replace(turn, state=_tame(turn.state)) for turn in trajectory.turns)
        task = msgspec.structs.replace(trajectory.task, data=_tame(trajectory.task.data))
        tamed = msgspec.structs.replace(trajectory, turns=turns, task=task)
        return _encode(_tame(msgspec.to_builtins(tamed, enc_hook=_plain)))


def _tame(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return a copy that JSON can hold: texts without lone surrogates, keys as text, an end to the nesting."""
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, (dict, list, tuple)):
        if len(above) > _MAX_DEPTH or id(value) in above:
            return f"<{type(value).__name__}>"
        above = (*above, id(value))
        if isinstance(value, dict):
            return {_tame_key(key): _tame(each, above) for key, each in value.items()}
        return [_tame(each, above) for each in value]
    try:
        return _decode_any(_encode(value))
    except Exception:  # whatever a value of the environment's raises
        return f"<{type(value).__name__}>"


def _tame_key(key: object) -> str:
    try:
        return writable(str(key))
    except Exception:
        return f"<{type(key).__name__}>"


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file written by `write_trajectories`.

    Raises: RecordError: a line is not a trajectory; the message has the file, the line and the field.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _decode(line)
            except DECODE_ERRORS as error:
                raise RecordError(f"each line must hold a trajectory: {error} ({path}:{number})") from error


def _turn_lines(turn: Turn) -> list[str]:
    said = turn.text if turn.stop_reason != "length" else f"{turn.text} [cut at {turn.length} tokens]"
    calls = [f"{call.name}({call.arguments})" for call in turn.tool_calls]
    lines = _block(f"turn {turn.index}", "\n".join([said, *calls] if said else calls))
    if turn.decision is not None:
        lines += _block("choice", "\n".join(_decision_lines(turn.decision)))
    lines += _block("answer", turn.observation)
    notes = [f"{name} {reward:+g}" for name, reward in turn.rewards.items()]
    if not turn.valid:
        notes.append("invalid action")
    if turn.injected:
        notes.append("injected")
    if (guided := turn.guided_tokens) is not None:
        notes.append(f"every token guided, beta {guided.beta:g}, top {guided.top_k}, tail {guided.tail}")
    return lines + ([f"          ({', '.join(notes)})"] if notes else [])


def _decision_lines(decision: Decision) -> list[str]:
    """Return how a turn was chosen, then a line for every different candidate: how often it is there, its value."""
    how = "listed" if decision.is_enumerated else "drawn"
    if decision.fallback:
        return [f"left to the base, of {len(decision.candidates)} {how}: {decision.fallback}"]
    floor = f", floor {decision.floor:g}" if decision.floor else ""
    lines = [
        f"by values of {decision.source}, beta {decision.beta_used:g}{floor}, of {len(decision.candidates)} {how}:"
    ]
    alike: dict[tuple[str, float | None], list[Candidate]] = {}
    for one in decision.candidates:
        alike.setdefault(_said(one), []).append(one)
    chosen = _said(decision.candidates[decision.chosen])
    for (said, q), ones in alike.items():
        value = "none" if q is None else f"{q:.2f}"
        short = said if len(said) <= _CANDIDATE_CHARS else f"{said[:_CANDIDATE_CHARS]}..."
        mark, chance = ">" if (said, q) == chosen else " ", sum(one.weight for one in ones)
        lines.append(f"{mark} {len(ones)}x  Q {value}  p {chance:.2f}  {short}")
    return lines


def _said(candidate: Candidate) -> tuple[str, float | None]:
    calls = (f"{call.name}({call.arguments})" for call in candidate.tool_calls)
    return " ".join(" ".join([candidate.text, *calls]).split()), candidate.q


def _ending(trajectory: Trajectory) -> str:
    oldest, newest = trajectory.version_range()
    versions = "no policy tokens" if oldest < 0 else f"policy version {oldest}"
    if newest > oldest:
        versions += f" to {newest}"
    parts = [
        f"end {trajectory.end.value}",
        f"reward {trajectory.reward:g}",
        f"{len(trajectory.turns)} turns",
        f"{trajectory.policy_tokens} policy tokens in {len(trajectory.segments)} segments",
        versions,
    ]
    if trajectory.error:
        parts.append(trajectory.error)
    if not trajectory.trainable:
        parts.append(f"not trainable: {trajectory.untrainable_because}")
    return "  ".join(parts)


def _block(label: str, text: str) -> list[str]:
    """The text behind its label, further lines indented to the same column."""
    first, *rest = text.split("\n") if text else [""]
    return [f"{label:>8}  {first}".rstrip(), *(f"{'':>8}  {line}".rstrip() for line in rest)]
