"""Whether a server's log-probs are those of the distribution that tokens were drawn from.

Alternatives of the first token have one context whatever the seed, so two requests can be compared exactly. Under
temperature T, log p is log_softmax(logits / T): differences between alternatives are 1/T of those at temperature 1 when
the temperature went in, and the same as there when it did not. The normaliser cancels.
"""

import math
from collections import Counter
from collections.abc import Mapping

from turngate.runtime.capabilities import Finding
from turngate.runtime.probing.asking import Answer, as_number, as_text, at
from turngate.runtime.probing.judging import failed, no, sampled_logprobs, unknown, yes

__all__ = ["HOT", "TINY_TOP_P", "alternatives", "judge_temperature", "judge_truncation"]

HOT = 2.0
"""The highest temperature that all servers take."""
TINY_TOP_P = 1e-6
"""Leaves the likeliest token alone."""
_LEAST = -1000.0
"""Servers write huge negative numbers for tokens that cannot be drawn."""
_CLEAR = 4.0
"""How many times closer one hypothesis must be than the other."""
_LEAST_SPREAD = 0.02
"""Root mean square, in nats, by which the two hypotheses must differ: beyond the rounding of bf16 in most models."""
_CERTAIN = 1e-3
"""How far from 0 the log-prob of a token may be that was the only one left."""
_UNSURE = 0.05
"""How far below 0 the log-prob of the likeliest token must be for the difference to show."""


def alternatives(answer: Answer) -> dict[str, float]:
    """Return the alternatives of a reply's first token by their name; names that several share are left out."""
    by_name = answer.at("choices", 0, "logprobs", "top_logprobs", 0)
    if isinstance(by_name, dict):  # text completions
        numbers = {str(name): as_number(value) for name, value in by_name.items()}
        return {name: value for name, value in numbers.items() if value is not None and value > _LEAST}
    found = answer.at("choices", 0, "logprobs", "content", 0, "top_logprobs")
    if not isinstance(found, list):
        return {}
    pairs = [(_name(entry), as_number(at(entry, "logprob"))) for entry in found]
    counts = Counter(name for name, _ in pairs)
    return {name: value for name, value in pairs if value is not None and value > _LEAST and counts[name] == 1}


def _name(entry: object) -> str:
    # Bytes tell apart tokens that are no whole characters, whose texts all read the same.
    spelled = at(entry, "bytes")
    return as_text(at(entry, "token")) + (str(spelled) if isinstance(spelled, list) else "")


def judge_temperature(at_one: Answer, hot: Answer, temperature: float) -> Finding:
    """Judge by the alternatives of one context at temperature 1 and at another."""
    for answer in (at_one, hot):
        if not answer.ok:
            return failed(answer) if not answer.was_refused else unknown(answer.problem)
    ones, hots = alternatives(at_one), alternatives(hot)
    names = sorted(ones.keys() & hots.keys())
    if len(names) < 2:
        return unknown("no two alternatives to compare")
    plain = _centred({name: ones[name] for name in names})
    seen = _centred({name: hots[name] for name in names})
    off_raw = _distance(seen, plain)
    off_processed = _distance(seen, {name: value / temperature for name, value in plain.items()})
    told = (
        f"{len(names)} alternatives at {temperature:g} are {off_processed:.0e} off scaled, {off_raw:.0e} off raw ones"
    )
    if max(off_raw, off_processed) < _LEAST_SPREAD:
        return unknown(f"too alike to tell: {told}")
    if off_processed * _CLEAR <= off_raw:
        return yes(told)
    if off_raw * _CLEAR <= off_processed:
        return no(f"raw: {told}")
    return unknown(f"neither fits: {told}")


def judge_truncation(at_one: Answer, hot: Answer, cut: Answer) -> Finding:
    """Judge a reply whose first token was drawn under a top_p that leaves the likeliest alone.

    Its log-prob is 0 under the distribution it was drawn from. Otherwise it is the untruncated log-prob of the best
    alternative: at temperature 1, or at that of the replies `hot` and `cut`.
    """
    if not cut.ok:
        return unknown(cut.problem)
    values = sampled_logprobs(cut)
    bests = [max(found.values()) for answer in (at_one, hot) if (found := alternatives(answer))]
    if not values or not bests:
        return unknown("no log-probs to compare")
    if max(bests) > -_UNSURE:
        return unknown("the model is too sure of its first token to tell")
    if abs(values[0]) < _CERTAIN:
        return yes(f"log-prob {values[0]:.0e} where top_p leaves one token")
    if any(math.isclose(values[0], best, abs_tol=_UNSURE) for best in bests):
        return no(f"raw: {values[0]:.2f} where top_p leaves one token")
    return unknown(f"log-prob {values[0]:.2f} where top_p leaves one token: expected 0, or {bests[0]:.2f}")


def _centred(values: Mapping[str, float]) -> dict[str, float]:
    mean = math.fsum(values.values()) / len(values)
    return {name: value - mean for name, value in values.items()}


def _distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    return math.sqrt(math.fsum((one[name] - other[name]) ** 2 for name in one) / len(one))
