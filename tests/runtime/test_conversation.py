"""What was shown last, and whether a context goes on from there."""

from turngate.runtime.conversation import Shown, conversation_of, token_mode_of
from turngate.runtime.dialect import Dialect
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.types import Message

USER, SAID, MORE = Message("user", "hi"), Message("assistant", "yes"), Message("user", "and?")


def test_an_endpoint_that_keeps_nothing_is_its_own_conversation():
    endpoint = FakeEndpoint(["x"])
    assert conversation_of(endpoint) is endpoint
    assert token_mode_of(endpoint) == ""
    endpoint.dialect = Dialect(token_mode="tokens")
    assert token_mode_of(endpoint) == "tokens"


def test_an_endpoint_that_remembers_gives_a_new_conversation_each_time():
    class Remembers(FakeEndpoint):
        def conversation(self):
            return FakeEndpoint(["x"])

    endpoint = Remembers(["x"])
    assert conversation_of(endpoint) is not conversation_of(endpoint)


def test_a_context_goes_on_when_it_is_the_last_one_with_its_answer_and_more():
    shown = Shown()
    assert not shown.is_extended_by([USER])
    shown.add([USER], SAID, goes_on=False)
    assert shown.is_extended_by([USER, SAID, MORE])
    assert shown.is_extended_by((Message("user", "hi"), SAID, MORE))
    assert not shown.is_extended_by([USER, SAID])
    assert not shown.is_extended_by([USER, Message("assistant", "no"), MORE])
    assert not shown.is_extended_by([MORE, SAID, MORE])


def test_a_context_that_goes_on_twice_is_remembered_whole():
    shown = Shown()
    shown.add([USER], SAID, goes_on=False)
    shown.add([USER, SAID, MORE], SAID, goes_on=True)
    assert shown.is_extended_by([USER, SAID, MORE, SAID, MORE])
    shown.add([MORE], SAID, goes_on=False)
    assert shown.is_extended_by([MORE, SAID, MORE])
