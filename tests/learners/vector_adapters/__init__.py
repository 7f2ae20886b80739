"""One adapter per function that golden cases name, one module per area.

Adapters read params and inputs, never a case's name. A new area writes its module and adds it to `AREAS`.
"""

from tests.learners.vector_adapters import branching, credit, ends, group, losses, recovery, shaping, staleness, targets
from tests.learners.vector_adapters.case import Adapter, Case, Values, numbers

__all__ = ["ADAPTERS", "Case", "Values", "numbers", "run"]

AREAS = (
    branching.ADAPTERS,
    credit.ADAPTERS,
    ends.ADAPTERS,
    group.ADAPTERS,
    losses.ADAPTERS,
    recovery.ADAPTERS,
    shaping.ADAPTERS,
    staleness.ADAPTERS,
    targets.ADAPTERS,
)
COMPARISONS = (credit.compare, losses.compare)
"""Every `compare` case goes to the first of these that knows its inputs, the others answer None."""


def compare(case: Case) -> Values:
    """State two computations that must, or must not, coincide."""
    for comparison in COMPARISONS:
        if (values := comparison(case)) is not None:
            return values
    raise NotImplementedError(f"compare: no adapter for inputs {sorted(case.inputs)}")


ADAPTERS: dict[str, Adapter] = {"compare": compare, **{fn: call for area in AREAS for fn, call in area.items()}}


def run(case: Case) -> Values:
    """Return what the product computes for a case; raises NotImplementedError for an `fn` nobody knows."""
    fn, _, mode = case.case["fn"].partition("+")
    if fn in losses.TOKEN_LOSSES:
        return losses.TOKEN_LOSSES[fn](case, mode or None)
    if mode or fn not in ADAPTERS:
        known = sorted(ADAPTERS | losses.TOKEN_LOSSES)
        raise NotImplementedError(f"no adapter for fn {case.case['fn']!r}; known: {known}")
    return ADAPTERS[fn](case)
