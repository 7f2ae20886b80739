from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.engine.stops import TextWatcher
from turngate.runtime.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["red blue green", 'buy["red"]'])


def watch(text: str, *stop: str) -> tuple[TextWatcher, list[str]]:
    watcher, pieces = TextWatcher(TOKENIZER, stop), []
    for token in TOKENIZER.encode(text):
        if watcher.push(token):
            break
        pieces.append(watcher.take())
    watcher.finish()
    return watcher, [*pieces, watcher.take()]


def test_text_ends_before_the_stop_string_even_inside_a_token():
    watcher, pieces = watch('red buy["red"] blue', '"r')
    assert watcher.is_stopped
    assert watcher.text == "red buy["
    assert "".join(pieces) == "red buy["


def test_text_that_may_become_a_stop_string_is_held_back_until_it_cannot():
    watcher, pieces = watch("red blue green", "blue blue")
    assert not watcher.is_stopped
    assert pieces == ["red", " ", "blue green", ""]


def test_the_earliest_of_several_stop_strings_wins():
    watcher, _ = watch("red blue green", "green", "blue")
    assert watcher.text == "red "


@given(st.text("ab ", max_size=12), st.lists(st.text("ab ", min_size=1, max_size=3), max_size=3))
def test_watched_text_equals_cutting_the_whole_text_at_the_first_stop(text, stops):
    watcher, pieces = watch(text, *stops)
    ends = [index + len(stop) for stop in stops if (index := text.find(stop)) >= 0]
    # Tokens of `text` are single characters or words of them, so the watcher sees the text grow in small pieces:
    # it stops at the first piece that completes any stop string, and cuts at the earliest start in what it has seen.
    if not ends:
        assert watcher.text == text
        assert not watcher.is_stopped
    else:
        assert watcher.is_stopped
        assert text.startswith(watcher.text)
        assert not any(stop in watcher.text for stop in stops)
    assert "".join(pieces) == watcher.text
