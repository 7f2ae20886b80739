"""Recovery counts, by hand."""

import math
from typing import Any

from turngate.envs.shopping import compute_recovery, has_opened_wrong_item

RIGHT: list[dict[str, Any] | None] = [{"violates": []}, {"violates": []}]
WRONG: list[dict[str, Any] | None] = [{"violates": []}, {"violates": ["price"]}, {"violates": []}]


def test_a_wrong_item_is_one_that_violated_a_constraint_while_open():
    assert has_opened_wrong_item(WRONG)
    assert not has_opened_wrong_item(RIGHT)
    assert not has_opened_wrong_item([None, {}])


def test_recovery_is_success_among_episodes_with_a_wrong_item():
    recovery = compute_recovery([(RIGHT, 1.0), (WRONG, 1.0), (WRONG, 0.0), (WRONG, 0.0), (RIGHT, 0.0)])
    assert (recovery.wrong, recovery.recovered) == (3, 1)
    assert recovery.rate == 1 / 3


def test_the_rate_is_not_a_number_without_mistakes():
    assert math.isnan(compute_recovery([(RIGHT, 1.0)]).rate)
