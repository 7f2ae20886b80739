"""The running example, token by token: find a red hiking backpack under $80 that is rated at least four stars.

The agent opens a wrong item, goes back, finds one for $69 with 4.5 stars, selects red and buys it. New weights are
published after its third turn. Once the model sees the whole history, once a context function drops early turns; once
from a fake endpoint, once through the real client over HTTP.
"""

import asyncio

import pytest

from turngate.envs.base import End
from turngate.envs.shopping import ShoppingEnv, has_opened_wrong_item, running_example
from turngate.runtime.context import full, token_budget
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.events import Events, TurnFinished
from turngate.runtime.rollout import run_rollout
from turngate.runtime.testing import FakeEndpoint, HostileServer, render_ids, run_virtual
from turngate.runtime.testing.endpoints import fake_logprob
from turngate.runtime.testing.hostile import answer
from turngate.runtime.types import NO_TURN, NO_VERSION, Message

ACTIONS = (
    'search["hiking backpack"]',
    'click["item_6"]',
    "back",
    'click["item_3"]',
    'select["red"]',
    'buy["item_3"]',
)
VERSIONS = (0, 0, 0, 1, 1, 1)
"""Policy version of each turn's tokens."""
END = 260


def count_ids(message):
    return len(render_ids([message], add_generation_prompt=False))


def play_fake(context):
    endpoint = FakeEndpoint(ACTIONS)

    def publish(event):
        endpoint.policy_version = VERSIONS[min(event.turn.index + 1, 5)]

    events = Events()
    events.subscribe(TurnFinished, publish)
    return run_virtual(run_rollout(ShoppingEnv, running_example(), endpoint, context=context, seed=1, events=events))


def play_over_http(context):
    def with_version(version):
        return lambda reply: reply["choices"][0].update(
            policy_versions=[version] * len(reply["choices"][0]["token_ids"])
        )

    async def main():
        behaviours = [answer(text, with_version(version)) for text, version in zip(ACTIONS, VERSIONS, strict=True)]
        async with HostileServer(*behaviours) as server, Endpoint(server.url, model="shopper") as endpoint:
            return await run_rollout(ShoppingEnv, running_example(), endpoint, context=context, seed=1)

    return asyncio.run(main())


def expected_segment(history, turns, first_kept):
    """Build the five arrays of a segment that holds `turns`, whose context begins at turn `first_kept`."""
    head, rest = list(history[:1]), history[1:]
    messages = head + list(rest[2 * first_kept : 2 * turns[0]])
    ids = render_ids(messages)
    arrays: list[list[float]] = [
        [*ids],
        [0] * len(ids),
        [0.0] * len(ids),
        [NO_VERSION] * len(ids),
        [NO_TURN] * len(ids),
    ]
    for turn in turns:
        if turn != turns[0]:
            context = [257, *rest[2 * turn - 1].content.encode(), END, 258]
            for array, value in zip(arrays, (None, 0, 0.0, NO_VERSION, NO_TURN), strict=True):
                array += context if value is None else [value] * len(context)
        sampled = [*ACTIONS[turn].encode(), END]
        arrays[0] += sampled
        arrays[1] += [1] * len(sampled)
        arrays[2] += [fake_logprob(i) for i in sampled]
        arrays[3] += [VERSIONS[turn]] * len(sampled)
        arrays[4] += [turn] * len(sampled)
    return arrays


def arrays_of(segment):
    return [
        list(segment.ids()),
        list(segment.policy_mask),
        list(segment.logprob_values()),
        list(segment.version_values()),
        list(segment.turn_values()),
    ]


def check_story(trajectory):
    assert (trajectory.end, trajectory.reward, trajectory.error) == (End.success, 1.0, "")
    assert [turn.text for turn in trajectory.turns] == list(ACTIONS)
    assert trajectory.turns[1].observation == "Price: $58. Rating: 4.8. Available colors: blue, black."
    assert trajectory.turns[3].observation == "Price: $69. Rating: 4.5. Available colors: red, blue."
    assert trajectory.turns[5].observation == "Bought item_3."
    assert has_opened_wrong_item(turn.state for turn in trajectory.turns)
    assert [turn.rewards for turn in trajectory.turns[:5]] == [{}] * 5
    assert (trajectory.version_range(), trajectory.trainable) == ((0, 1), True)
    assert trajectory.messages[0] == Message("user", "Find a red hiking backpack under $80, rated at least four stars.")


@pytest.mark.parametrize("play", [play_fake, play_over_http])
def test_with_the_whole_history_the_episode_is_one_segment(play):
    trajectory = play(full())
    check_story(trajectory)
    (segment,) = trajectory.segments
    assert arrays_of(segment) == expected_segment(trajectory.messages, range(6), first_kept=0)
    assert {turn.segment for turn in trajectory.turns} == {0}


@pytest.mark.parametrize("play", [play_fake, play_over_http])
def test_with_early_turns_dropped_it_is_two_segments_that_train_every_token_once(play):
    # The budget is exceeded once, before the fourth turn; then the first two turns go.
    context = token_budget(400, count_ids, cut_to=210)
    trajectory = play(context)
    check_story(trajectory)
    first, second = trajectory.segments
    assert arrays_of(first) == expected_segment(trajectory.messages, range(3), first_kept=0)
    assert arrays_of(second) == expected_segment(trajectory.messages, range(3, 6), first_kept=2)
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 0, 1, 1, 1]
    trained = [turn for segment in (first, second) for turn in segment.turn_values() if turn != NO_TURN]
    assert trained == [turn for turn, text in enumerate(ACTIONS) for _ in [*text.encode(), END]]
