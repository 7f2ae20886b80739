import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.staleness import LagStats, StalenessLimit, capacity, lag_stats
from turngate.runtime.types import NO_VERSION


def test_capacity_follows_areal_equation_3() -> None:
    def free(version: int, accepted: int, running: int) -> int:
        return capacity(
            max_staleness=1, policy_version=version, batch_size=4, accepted=accepted, running=running, max_running=100
        )

    assert [free(0, 0, 0), free(0, 3, 5), free(0, 5, 5), free(1, 5, 5)] == [8, 0, -2, 2]


def test_capacity_is_one_batch_when_synchronous() -> None:
    assert capacity(max_staleness=0, policy_version=0, batch_size=16, accepted=0, running=0) == 16
    assert capacity(max_staleness=0, policy_version=0, batch_size=16, accepted=9, running=7) == 0


def test_capacity_after_a_restore_does_not_explode() -> None:
    # AReaL#1345: with accepted restarted at 0 it would be (1 + 10 + 1) * 4 = 48.
    assert capacity(max_staleness=1, policy_version=10, batch_size=4, accepted=40, running=0) == 8


def test_capacity_is_limited_by_what_may_run() -> None:
    assert capacity(max_staleness=4, policy_version=0, batch_size=8, accepted=0, running=5, max_running=6) == 1


def test_lag_counts_generated_tokens_only() -> None:
    versions = [NO_VERSION, 100, 100, NO_VERSION, 103, 102]
    assert lag_stats(versions, 110) == LagStats(lag_max=10, lag_mean=8.75, lag_min=7, span=3, lag_first=10)


def test_lag_of_no_tokens_is_zero() -> None:
    assert lag_stats([NO_VERSION], 5) == LagStats()


@pytest.mark.parametrize(("arguments", "says"), [({"max_staleness": -1}, "0 or more"), ({"late": "later"}, "'wait'")])
def test_limit_refuses_nonsense(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StalenessLimit(**arguments)
