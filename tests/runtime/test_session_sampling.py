"""What is pinned goes before what an agent asks for."""

from turngate.runtime.session_sampling import allowed_sampling, why_not_trained
from turngate.runtime.types import Sampling

PINNED = Sampling(temperature=0.7, top_p=0.9, top_k=3, max_tokens=10, stop=("a",))
ASKED = Sampling(temperature=0.1, top_p=0.2, top_k=1, max_tokens=20, stop=("b",))


def test_the_agent_chooses_where_a_turn_ends_and_nothing_else():
    drawn = allowed_sampling(ASKED, PINNED, None)
    assert drawn == Sampling(temperature=0.7, top_p=0.9, top_k=3, max_tokens=20, stop=("b",))


def test_where_one_side_says_nothing_the_other_decides():
    assert allowed_sampling(None, PINNED, None) == PINNED
    assert allowed_sampling(ASKED, None, None) == ASKED
    assert allowed_sampling(None, None, None) == Sampling()


def test_no_request_may_draw_more_tokens_than_are_left():
    assert allowed_sampling(ASKED, None, 20).max_tokens == 20
    assert allowed_sampling(ASKED, None, 7).max_tokens == 7
    assert allowed_sampling(ASKED, None, -3).max_tokens == 1  # requests at once may have used up more


def test_only_draws_from_the_policy_itself_can_be_trained_on():
    assert why_not_trained(Sampling(max_tokens=3, stop=("a",))) == ""
    assert why_not_trained(None) == "nobody said how the reply was drawn"
    assert "temperature 0.1, top_p 0.2, top_k 1: expected 1, 1, 0" in why_not_trained(ASKED)
