import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.probing.asking import Answer
from turngate.runtime.probing.distribution import alternatives, judge_temperature, judge_truncation


def reply(top, sampled=-1.0, **more):
    listed = [{"token": name, "logprob": value, **more.get(name, {})} for name, value in top]
    content = [{"token": "x", "logprob": sampled, "top_logprobs": listed}]
    return Answer(200, body={"choices": [{"logprobs": {"content": content}}]})


def heated(top, temperature, shift):
    return [(name, value / temperature + shift) for name, value in top]


TOP = [("a", -0.5), ("b", -1.5), ("c", -4.0)]


@given(
    st.lists(st.floats(-20, 0), min_size=2, max_size=20).filter(lambda v: max(v) - min(v) > 0.5),
    st.floats(0.25, 4).filter(lambda t: abs(t - 1) > 0.2),
    st.floats(-3, 3),
    st.randoms(use_true_random=False),
)
def test_scaled_and_unscaled_logprobs_are_told_apart_whatever_the_normaliser_and_the_order(values, hot, shift, random):
    top = [(str(index), value) for index, value in enumerate(values)]
    other = random.sample(top, len(top))
    assert judge_temperature(reply(top), reply(heated(other, hot, shift)), hot).verdict != "no"
    assert judge_temperature(reply(top), reply(heated(other, 1.0, shift)), hot).verdict != "yes"


def test_rounding_as_of_bf16_does_not_hide_the_difference():
    noisy = [("a", -0.5 / 2 + 0.03), ("b", -1.5 / 2 - 0.03), ("c", -4.0 / 2 + 0.02)]
    assert judge_temperature(reply(TOP), reply(noisy), 2.0).verdict == "yes"


def test_alternatives_that_hardly_differ_show_nothing():
    flat = [("a", -3.0), ("b", -3.01)]
    assert judge_temperature(reply(flat), reply(heated(flat, 2.0, 0)), 2.0).verdict == "unknown"


def test_what_fits_neither_is_unknown():
    assert judge_temperature(reply(TOP), reply(heated(TOP, 1.33, 0)), 2.0).verdict == "unknown"
    assert judge_temperature(reply(TOP), reply([("a", -1.0), ("z", -2.0)]), 2.0).verdict == "unknown"


def test_names_that_several_tokens_share_and_tokens_that_cannot_be_drawn_are_left_out():
    top = [("a", -1.0), ("\ufffd", -2.0), ("\ufffd", -3.0), ("b", -9999.0), ("c", None), ("d", -4.0)]
    assert alternatives(reply(top)) == {"a": -1.0, "d": -4.0}


def test_bytes_tell_apart_tokens_that_read_the_same():
    content = [{"token": "\ufffd", "logprob": -float(b), "bytes": [b]} for b in (1, 2)]
    answer = Answer(200, body={"choices": [{"logprobs": {"content": [{"top_logprobs": content}]}}]})
    assert sorted(alternatives(answer).values()) == [-2.0, -1.0]


def test_alternatives_of_text_completions_are_read_too():
    answer = Answer(200, body={"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0, "b": -9999.0, "c": "x"}]}}]})
    assert alternatives(answer) == {"a": -1.0}


@pytest.mark.parametrize(
    ("sampled", "best_at_one", "expected"),
    [
        (0.0, -0.5, "yes"),
        (-1e-5, -0.5, "yes"),
        (-0.5, -0.5, "no"),
        (-0.9, -0.5, "no"),  # as at the reply's own temperature
        (-3.0, -0.5, "unknown"),
        (0.0, -0.001, "unknown"),  # it would be near 0 anyhow
    ],
)
def test_a_token_that_was_the_only_one_left_has_probability_one(sampled, best_at_one, expected):
    at_one, hot = reply([("a", best_at_one), ("b", -4.0)]), reply([("a", min(-0.9, 0.0)), ("b", -2.0)])
    if best_at_one > -0.01:
        hot = reply([("a", -0.01)])
    assert judge_truncation(at_one, hot, reply([], sampled)).verdict == expected
