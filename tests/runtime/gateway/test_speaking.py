from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.gateway.speaking import Speaker
from turngate.runtime.testing.renderers import PAIR, FakeRenderer


@given(st.text(max_size=40), st.data())
def test_what_is_said_along_the_way_and_the_rest_are_the_whole(text, data):
    ids = [*text.encode(), 260]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    speaker = Speaker(FakeRenderer(), ())
    said = [speaker.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(said) + speaker.rest(text) == text


def test_characters_are_said_when_all_their_bytes_are_there():
    speaker = Speaker(FakeRenderer(), ())
    first, *others = "é".encode()
    assert [speaker.push([first]), speaker.push(others), speaker.push([PAIR])] == ["", "é", "ab"]


def test_what_may_become_a_stop_string_is_held_back_and_a_stop_string_is_not_said():
    speaker = Speaker(FakeRenderer(), ("END", "\n\n"))
    said = [speaker.push(piece.encode()) for piece in ("a", "\n", "b E", "x", " EN", "D tail")]
    assert said == ["a", "", "\nb ", "Ex", " ", ""]
    assert speaker.rest("a\nb Ex ") == ""


def test_a_text_that_reads_otherwise_when_it_is_whole_goes_on_after_what_is_the_same():
    speaker = Speaker(FakeRenderer(), ())
    assert speaker.push(b"well ") == "well "
    assert speaker.rest("well, then") == ", then"


def test_long_replies_are_read_again_ever_more_seldom():
    renderer = FakeRenderer()
    calls = 0
    parse = renderer.parse

    def counted(*arguments, **options):
        nonlocal calls
        calls += 1
        return parse(*arguments, **options)

    renderer.parse = counted
    speaker = Speaker(renderer, ())
    for _ in range(4000):
        speaker.push(b"x")
    assert calls < 150


def test_ids_that_nobody_knows_are_not_spoken():
    speaker = Speaker(EngineRenderer(Tokenizer.train(["hi"], 266)), ())
    assert [speaker.push([ord("a")]), speaker.push([10**6]), speaker.push([ord("b")])] == ["a", "", ""]
