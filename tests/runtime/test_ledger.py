import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.ledger import Ledger, LedgerTotals


def test_a_rollout_is_counted_once_from_draw_to_train() -> None:
    ledger = Ledger()
    ledger.draw("a")
    ledger.start("a")
    ledger.finish("a")
    ledger.admit(["a"])
    ledger.train(["a"])
    assert ledger.totals() == LedgerTotals(drawn=1, trained=1)
    ledger.check()


def test_a_dropped_rollout_is_counted_under_its_reason() -> None:
    ledger = Ledger()
    for name in "ab":
        ledger.draw(name)
    ledger.start("b")
    ledger.drop(["a"], "cancelled")
    ledger.drop(["b"], "env_error")
    assert ledger.totals() == LedgerTotals(drawn=2, dropped={"cancelled": 1, "env_error": 1})


def test_training_twice_is_an_error() -> None:
    ledger = Ledger()
    ledger.draw("a")
    ledger.start("a")
    ledger.finish("a")
    ledger.admit(["a"])
    ledger.train(["a"])
    with pytest.raises(RuntimeError, match="a must be admitted: it is not live"):
        ledger.train(["a"])


def test_skipping_a_stage_is_an_error() -> None:
    ledger = Ledger()
    ledger.draw("a")
    with pytest.raises(RuntimeError, match="must be running: it is queued"):
        ledger.finish("a")


def test_what_was_live_before_a_restart_counts_as_interrupted() -> None:
    ledger = Ledger(LedgerTotals(drawn=10, trained=4, dropped={"stale": 1}, live={"running": 3, "admitted": 2}))
    ledger.check()
    assert ledger.dropped["interrupted"] == 5
    assert not ledger.live


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["draw", "start", "finish", "admit", "train", "drop"]))))
def test_the_accounts_balance_after_any_calls(calls: list[tuple[int, str]]) -> None:
    ledger = Ledger()
    for number, verb in calls:
        name = str(number)
        try:
            match verb:
                case "drop":
                    ledger.drop([name], "why")
                case "admit" | "train":
                    getattr(ledger, verb)([name])
                case _:
                    getattr(ledger, verb)(name)
        except RuntimeError:
            pass  # refused, and nothing may have changed
        ledger.check()
