from pathlib import Path

import pytest

from turngate.runtime import weights
from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.weights import InFlight, check_in_flight, hand_over, move_endpoint


class Scripted:
    """A publisher that fails in turn with the given errors, then succeeds."""

    in_flight: InFlight = "continues"

    def __init__(self, *errors: PublishError) -> None:
        self.errors = list(errors)
        self.published = 0

    async def publish(self, path: Path, policy_version: int) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.published += 1

    async def served_version(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))


async def test_a_failure_that_may_pass_is_repeated() -> None:
    publisher = Scripted(*[PublishError("down")] * 3)
    await hand_over(publisher, Path("w"), 1)
    assert publisher.published == 1


async def test_one_that_lasts_is_raised() -> None:
    with pytest.raises(PublishError, match="down"):
        await hand_over(Scripted(*[PublishError("down")] * 4), Path("w"), 1)


async def test_a_refusal_is_not_repeated() -> None:
    publisher = Scripted(PublishRefused("shapes"))
    with pytest.raises(PublishRefused, match="shapes"):
        await hand_over(publisher, Path("w"), 1)
    assert publisher.errors == []


class Versioned:
    policy_version = 0


class Named(Versioned):
    model = "base"


def test_an_endpoint_moves_to_a_version_and_keeps_its_name_when_that_never_changes() -> None:
    endpoint = Named()
    move_endpoint(endpoint, Scripted(), 3)
    assert (endpoint.policy_version, endpoint.model) == (3, "base")


def test_an_endpoint_without_a_name_cannot_be_moved_to_one() -> None:
    publisher = Scripted()
    publisher.model = "policy-3"
    with pytest.raises(ConfigError, match="must name the model it asks for, to be moved to 'policy-3'"):
        move_endpoint(Versioned(), publisher, 3)


def test_what_a_publisher_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_flight must be one of 'pauses', 'restarts': got 'continues'"):
        check_in_flight("continues", ("pauses", "restarts"))
