"""What both servers require of requests."""

import pytest

from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.openai_api.sampling_fields import SamplingFields, check_sampling, prompts_of


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "n", "seed", "stop"])
def test_values_that_nothing_can_be_drawn_by_are_named(field):
    wrong = {"temperature": -0.1, "top_p": 0.0, "top_k": -2, "n": 0, "seed": 2**63, "stop": ["a", ""]}
    with pytest.raises(RequestError, match=f"{field} must") as caught:
        check_sampling(SamplingFields(**{field: wrong[field]}))
    assert (caught.value.status, caught.value.param) == (400, field)


def test_values_at_their_bounds_are_taken():
    check_sampling(SamplingFields(temperature=0, top_p=1, top_k=-1, n=1024, seed=-(2**63), stop="x"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompt_is_texts_or_ids(prompt, expected):
    assert prompts_of(prompt) == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], ["a", [1]]])
def test_prompt_of_mixed_kinds_is_refused(prompt):
    with pytest.raises(RequestError) as caught:
        prompts_of(prompt)
    assert caught.value.param == "prompt"
