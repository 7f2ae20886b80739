"""The off-policy choice: one value, required where data can be stale."""

from typing import Any

import pytest

from turngate.learners.filters import M2PO
from turngate.learners.off_policy_choice import OffPolicy, require_off_policy_choice
from turngate.learners.offpolicy import Correction
from turngate.runtime.errors import ConfigError


def test_asynchronous_training_without_a_choice_is_refused_and_the_options_explained() -> None:
    with pytest.raises(ConfigError, match=r"got None with a staleness of up to 2") as raised:
        require_off_policy_choice(None, 2)
    for name in ("decoupled", "bypass", "reinforce", "none", "max_staleness=0"):
        assert name in str(raised.value)


@pytest.mark.parametrize("choice", ["decoupled", "none", OffPolicy.bypass()])
def test_any_choice_will_do(choice: Any) -> None:
    require_off_policy_choice(choice, 4)


def test_fresh_data_needs_no_choice() -> None:
    require_off_policy_choice(None, 0)


def test_choices_compare_by_value() -> None:
    assert OffPolicy.decoupled() == OffPolicy(kind="decoupled")
    assert OffPolicy.decoupled(Correction(upper=3.0)) != OffPolicy.decoupled()
    assert len({OffPolicy.none(), OffPolicy.none(), OffPolicy.bypass(filters=(M2PO(),))}) == 2


@pytest.mark.parametrize("kind", ["bypass", "none"])
def test_b2_10_a_correction_where_the_ratio_holds_it_already_is_refused(kind: Any) -> None:
    # PufferLib#306: the same gap corrected by ratio and by weight.
    with pytest.raises(ConfigError, match="applied twice"):
        OffPolicy(kind=kind, correction=Correction())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "maybe"}, "off_policy must be decoupled"),
        ({"kind": "decoupled", "proximal": "guessed"}, "proximal must be recomputed or interpolated"),
        ({"kind": "bypass", "proximal": "interpolated"}, "nothing else reads it"),
        ({"kind": "none", "filters": (M2PO(),)}, "filters must be empty"),
        ({"kind": "reinforce", "correction": Correction(normalise=True)}, "must not be normalised"),
        (
            {"kind": "decoupled", "proximal": "interpolated", "correction": Correction(normalise=True)},
            "must not be normalised",
        ),
    ],
)
def test_choices_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffPolicy(**options)
