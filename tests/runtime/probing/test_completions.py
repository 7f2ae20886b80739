import pytest

from turngate.runtime.probing.asking import Asker
from turngate.runtime.probing.completions import ask_completions


class Scripted(Asker):
    """Answers every question with one body."""

    def __init__(self, body):
        super().__init__("http://server/v1")
        self._body = body

    async def post(self, path, body):
        return self._answer(200, {}, self._body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3}}', "yes"),
        (b'{"choices": [{"text": "a"}]}', "yes"),
        (b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 11}}', "no"),  # read as the text "[5, 6, 7]"
        (b'{"choices": [{"text": "a", "prompt_token_ids": [1, 5, 6, 7]}]}', "no"),  # something was put before it
        (b'{"choices": [{"text": "a", "prompt_token_ids": [5, 6, 7]}]}', "yes"),
        (b'{"choices": [{}]}', "no"),
    ],
)
async def test_ids_that_were_read_as_something_else_are_noticed(body, expected):
    found, _ = await ask_completions(Scripted(body), "m", [5, 6, 7], alone=False)
    assert found["id_prompts"].verdict == expected
