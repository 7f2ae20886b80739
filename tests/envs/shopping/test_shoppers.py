"""The expert never fails; the noisy shopper makes each kind of mistake and leaves room to improve."""

import random

import pytest

from turngate.envs.base import End
from turngate.envs.shopping import EXPERT, NOISY, Noise, Shop, Shopper, compute_recovery, held_out_tasks, run_shopper
from turngate.envs.shopping.tasks import running_example

TASKS = held_out_tasks(500, 7)


def play(noise):
    return [run_shopper(task, seed, noise) for seed, task in enumerate(TASKS)]


def success(episodes):
    return sum(episode.end is End.success for episode in episodes) / len(episodes)


def actions(episodes):
    return [text for episode in episodes for role, text in episode.dialogue if role == "assistant"]


def test_the_expert_always_succeeds_without_an_invalid_action():
    episodes = play(EXPERT)
    assert success(episodes) == 1.0
    assert all(episode.states[-1]["invalid"] == 0 for episode in episodes)
    assert max(len(episode.states) for episode in episodes) <= 12


def test_the_expert_recovers_from_wrong_items():
    recovery = compute_recovery((episode.states, float(episode.end is End.success)) for episode in play(EXPERT))
    assert recovery.wrong > 250
    assert recovery.rate == 1.0


def test_a_shopper_who_notices_nothing_succeeds_by_luck_only():
    assert 0.35 < success(play(Noise(miss=1.0))) < 0.52


def test_the_noisy_shopper_leaves_room_to_improve():
    episodes = play(NOISY)
    assert 0.52 < success(episodes) < 0.70
    recovery = compute_recovery((episode.states, float(episode.end is End.success)) for episode in episodes)
    assert 0.33 < recovery.rate < 0.53


def test_the_noisy_shopper_meets_refusals_and_repairs_them():
    episodes = play(NOISY)
    refused = [episode for episode in episodes if episode.states[-1]["invalid"]]
    assert 0.1 < len(refused) / len(episodes) < 0.3
    assert success(refused) > 0.4


def test_each_kind_of_noise_shows():
    assert all(len(first_search(episode).split()) <= 2 for episode in play(Noise(vague=1.0)))
    assert all(len(first_search(episode).split()) >= 3 for episode in play(EXPERT))
    assert not any(text.startswith("select") for text in actions(play(Noise(hasty=1.0))))
    colors = [text for text in actions(play(Noise(wrong_color=1.0))) if text.startswith("select")]
    assert len(colors) > 1.3 * len(TASKS)  # the wrong one, and then the right one
    assert decoys_opened(Noise(decoy=1.0)) > 0.3 > 0.0 == decoys_opened(EXPERT)
    assert mean_opened(Noise(doubt=0.5)) > mean_opened(EXPERT) + 0.2


def first_search(episode):
    return episode.dialogue[1][1].removeprefix('search["').removesuffix('"]')


def decoys_opened(noise):
    """Mean number of turns with a decoy's page open."""
    pages = [state["violates"] for episode in play(noise) for state in episode.states]
    return sum("use" in page or "category" in page for page in pages) / len(TASKS)


def mean_opened(noise):
    return sum(len(episode.states[-1]["opened"]) for episode in play(noise)) / len(TASKS)


def test_every_kind_of_noise_but_vagueness_and_slips_put_right_costs_success():
    assert success(play(Noise(hasty=1.0))) == 0.0
    assert success(play(Noise(invalid=0.5))) < 0.7
    assert success(play(Noise(decoy=1.0))) < 1.0
    assert success(play(Noise(wrong_color=0.5))) > 0.97
    assert success(play(Noise(vague=1.0))) > 0.97


@pytest.mark.parametrize(
    "before", [(), ("search",), ("search", "click"), ("search", "click", "select"), ("search", "click", "back")]
)
def test_nonsense_is_always_refused(before):
    """Otherwise demonstrations would hold mistakes without their repairs."""
    shop = Shop(running_example(), 6)
    texts = {
        "search": 'search["hiking backpack"]',
        "click": 'click["item_3"]',
        "select": 'select["red"]',
        "back": "back",
    }
    observation = ([running_example().prompt] + [shop.act(texts[verb]).observation.text for verb in before])[-1]
    state = shop.to_bytes()
    shopper = Shopper(Noise(invalid=1.0), random.Random(0))
    for _ in range(300):
        step = Shop.restored(state, 0).act(shopper._nonsense(observation))
        assert not step.valid


def test_a_shopper_reads_only_what_an_agent_would_read():
    shopper = Shopper(EXPERT, random.Random(0))
    assert shopper.act(running_example().prompt) == 'search["red hiking backpack"]'
    listing = "Results: item_5 Vesk hiking jacket; item_1 Kelvo hiking backpack; item_3 Tarnix hiking backpack."
    assert shopper.act(listing) == 'click["item_1"]'
    assert shopper.act("Price: $95. Rating: 4.7. Available colors: red, black.") == "back"
    assert shopper.act(listing) == 'click["item_3"]'
    assert shopper.act("Price: $69. Rating: 4.5. Available colors: red, blue.") == 'select["red"]'
    assert shopper.act("Invalid: no such color.") == 'select["red"]'
    assert shopper.act("Red selected. Price: $69.") == 'buy["item_3"]'


@pytest.mark.parametrize(
    "page",
    [
        "Price: $80. Rating: 4.5. Available colors: red, blue.",
        "Price: $69. Rating: 3.9. Available colors: red, blue.",
        "Price: $69. Rating: 4.5. Available colors: green, blue.",
    ],
)
def test_the_expert_walks_away_from_every_kind_of_fault(page):
    shopper = Shopper(EXPERT, random.Random(0))
    shopper.act(running_example().prompt)
    shopper.act("Results: item_1 Kelvo hiking backpack.")
    assert shopper.act(page) == "back"
