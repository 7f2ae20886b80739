"""Scores of a search tree."""

import math

import pytest

from turngate.runtime.search import uct_scores


def test_b5_4_means_are_divided_by_visits_once():
    scores = uct_scores([2.0, 1.0], [3, 1])
    assert scores == pytest.approx([2 / 3 + math.sqrt(2 * math.log(4) / 3), 1 + math.sqrt(2 * math.log(4))])


def test_an_action_never_tried_comes_first():
    assert uct_scores([0.0, 5.0], [0, 5])[0] == math.inf
