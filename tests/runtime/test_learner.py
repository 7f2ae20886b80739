"""What a learner may say of its needs, and that training hears it."""

import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.learner import check_learner
from turngate.runtime.testing.learner import CountingLearner
from turngate.runtime.types import Sampling


class Fussy(CountingLearner):
    """Takes greedy rollouts of the newest policy only."""

    sampling = Sampling(temperature=0)

    def check_staleness(self, max_staleness: int) -> None:
        if max_staleness > 0:
            raise ConfigError("name a correction")


def test_a_learner_that_says_nothing_takes_everything() -> None:
    check_learner(CountingLearner(), Sampling(top_k=5), 9)


def test_a_learner_hears_how_old_its_data_may_be() -> None:
    check_learner(Fussy(), Sampling(temperature=0), 0)
    with pytest.raises(ConfigError, match="name a correction"):
        check_learner(Fussy(), Sampling(temperature=0), 1)


def test_a_learner_that_takes_another_sampling_for_granted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"it expects temperature 0\.0, the runtime samples at 1\.0"):
        check_learner(Fussy(), Sampling(), 0)
