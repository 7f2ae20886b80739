"""What all publishers to servers share, against a control in memory."""

import asyncio
import math

import pytest

from tests.runtime.publishers.conftest import canary
from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.publishers.checked import CheckedPublisher


class Control:
    """A server in memory: answers like the last version it was given, moved by `off` nats."""

    in_flight = "restarts"
    model: str | None = None

    def __init__(self):
        self.served, self.before = 0.0, 0.0
        self.off = 0.0
        self.failures: list[PublishError] = []
        self.kept = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def serve(self, path, policy_version):
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.before, self.served = self.served, float(policy_version)

    async def keep(self):
        self.kept += 1

    async def undo(self):
        self.served = self.before
        return "undone"

    async def served_version(self):
        return int(self.served)

    async def score(self, token_ids, *, timeout_s=60.0):
        return [0.0, *(logprob - self.off for logprob in canary(self.served).logprobs)]

    async def is_exact(self):
        return False


def publisher(control, **settings):
    defaults = {"timeout_s": 5.0, "attempts": 3, "retry_delay_s": 0.0, "canary_tolerance": "auto"}
    return CheckedPublisher(control, **{**defaults, **settings})


async def test_an_attempt_that_fails_is_repeated_within_the_limit(weights):
    control = Control()
    control.failures = [PublishError("down"), PublishError("down")]
    await publisher(control).publish(weights(1), 1)
    control.failures = [PublishError("down")] * 3
    with pytest.raises(PublishError, match=r"policy version 2.*down, 3 attempts"):
        await publisher(control).publish(weights(2), 2)


async def test_a_refusal_is_raised_at_once(weights):
    control = Control()
    control.failures = [PublishRefused("shapes"), PublishRefused("shapes")]
    with pytest.raises(PublishRefused, match="shapes"):
        await publisher(control).publish(weights(1), 1)
    assert len(control.failures) == 1


async def test_one_deadline_bounds_it_all(weights):
    control = Control()
    control.gate.clear()
    with pytest.raises(PublishError, match=r"within 0\.05 s.*either version"):
        await publisher(control, timeout_s=0.05).publish(weights(1), 1)


async def test_disagreement_is_undone_and_nothing_of_before_is_forgotten(weights):
    control = Control()
    control.off = 0.5
    with pytest.raises(PublishRefused, match="undone"):
        await publisher(control).publish(weights(1), 1)
    assert (control.served, control.kept) == (0.0, 0)


async def test_later_agreement_is_judged_by_the_first(weights):
    control = Control()
    control.off = 0.03
    checked = publisher(control)
    await checked.publish(weights(1), 1)
    assert checked.canary_tolerance == pytest.approx(0.15)
    control.off = 0.16
    with pytest.raises(PublishRefused, match=r"within 0\.15"):
        await checked.publish(weights(2), 2)


@pytest.mark.parametrize("tolerance", [1.0, math.inf])
async def test_the_tolerance_can_be_set_or_the_check_left_out(weights, tolerance):
    control = Control()
    control.off = 0.9
    await publisher(control, canary_tolerance=tolerance).publish(weights(1), 1)
    assert control.served == 1.0


async def test_weights_without_a_canary_are_published_unchecked(weights, tmp_path):
    from safetensors.numpy import save_file

    control = Control()
    control.off = 5.0
    save_file({}, tmp_path / "plain.safetensors")
    await publisher(control).publish(tmp_path / "plain.safetensors", 1)
    assert await publisher(control).is_serving(tmp_path / "plain.safetensors")


async def test_gateways_can_see_that_weights_are_changing(weights):
    control = Control()
    control.gate.clear()
    checked = publisher(control)
    assert not checked.is_switching
    publication = asyncio.create_task(checked.publish(weights(1), 1))
    while not checked.is_switching:  # noqa: ASYNC110 - a flag, and a few turns of the loop
        await asyncio.sleep(0)
    control.gate.set()
    await publication
    assert not checked.is_switching


async def test_publications_take_turns(weights):
    control = Control()
    checked = publisher(control)
    await asyncio.gather(*(checked.publish(weights(version), version) for version in (1, 2, 3)))
    assert control.served == 3.0


def test_limits_that_cannot_work_are_refused():
    for settings in ({"timeout_s": 0}, {"attempts": 0}, {"retry_delay_s": -1}):
        with pytest.raises(ConfigError, match="publisher limits"):
            publisher(Control(), **settings)
    for tolerance in (0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="canary_tolerance"):
            publisher(Control(), canary_tolerance=tolerance)


async def test_weights_count_as_served_while_they_are_checked_and_not_once_they_were_taken_back(weights):
    control = Control()
    checked = publisher(control)
    seen: list[int | None] = []
    score = control.score

    async def watched(token_ids, *, timeout_s=60.0):
        seen.append(checked.serving_version)
        return await score(token_ids, timeout_s=timeout_s)

    control.score = watched
    await checked.publish(weights(1), 1)
    assert (seen, checked.serving_version) == ([1], 1)
    control.off = 1.0
    with pytest.raises(PublishError, match="undone"):
        await checked.publish(weights(2), 2)
    assert (seen, checked.serving_version) == ([1, 2], None)


async def test_servers_whose_requests_name_a_version_keep_theirs_until_they_do(weights):
    control = Control()
    control.model = "policy-1"
    checked = publisher(control)
    await checked.publish(weights(1), 1)
    assert checked.serving_version is None
