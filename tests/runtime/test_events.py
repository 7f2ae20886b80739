"""Events: unheard they cost nothing, heard they arrive in order, and no listener can break the run."""

import asyncio

import pytest

from turngate.runtime.events import Event, Events, EventStream, RolloutStarted, WeightsPublished
from turngate.runtime.testing import run_virtual

FIRST, SECOND, THIRD = (WeightsPublished(version, 0.0) for version in (1, 2, 3))


def emit(events, event):
    getattr(events, Events.SLOTS[type(event)])(event)


def test_a_slot_is_none_until_somebody_listens_and_again_afterwards():
    events = Events()
    assert all(getattr(events, slot) is None for slot in Events.SLOTS.values())
    unsubscribe = events.subscribe(WeightsPublished, print)
    assert events.weights_published is not None
    assert events.rollout_started is None
    unsubscribe()
    unsubscribe()
    assert events.weights_published is None


def test_subscribers_are_called_in_the_order_they_came():
    events, heard = Events(), []
    events.subscribe(WeightsPublished, lambda event: heard.append(("a", event)))
    events.subscribe(WeightsPublished, lambda event: heard.append(("b", event)))
    emit(events, FIRST)
    assert heard == [("a", FIRST), ("b", FIRST)]


def test_a_failing_subscriber_is_logged_counted_and_harms_nobody(caplog):
    events = Events()
    heard: list[Event] = []

    def fail(event):
        raise ZeroDivisionError("bar")

    events.subscribe(WeightsPublished, fail)
    events.subscribe(WeightsPublished, heard.append)
    emit(events, FIRST)
    assert (heard, events.failures) == ([FIRST], 1)
    assert "ZeroDivisionError: bar" in caplog.text
    assert repr(events) == "<Events weights_published x2, 1 subscriber failures>"


def test_a_stream_yields_events_of_its_kinds_as_they_come():
    events = Events()
    stream = events.stream(WeightsPublished)

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(1, emit, events, FIRST)
        loop.call_later(2, emit, events, SECOND)
        loop.call_later(3, stream.close)
        return [(event, loop.time()) async for event in stream]

    assert run_virtual(main()) == [(FIRST, 1.0), (SECOND, 2.0)]
    assert events.weights_published is None


def test_a_slow_reader_loses_the_oldest_and_the_loss_is_counted():
    events = Events()
    stream = events.stream(size=2)
    for event in (FIRST, SECOND, THIRD):
        emit(events, event)
    stream.close()

    async def main():
        return [event async for event in stream]

    assert repr(stream) == "<EventStream 2 of 2 waiting, 1 dropped>"
    assert run_virtual(main()) == [SECOND, THIRD]


def test_a_cancelled_read_loses_nothing():
    stream = EventStream(4)

    async def main():
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(1)
        stream.put(FIRST)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        return await anext(stream)

    assert run_virtual(main()) == FIRST


def test_a_stream_of_all_kinds_hears_all():
    events = Events()
    stream = events.stream()
    emit(events, RolloutStarted("x", "g", 0, "t"))
    emit(events, FIRST)
    assert repr(stream) == "<EventStream 2 of 1024 waiting, 0 dropped>"
    with pytest.raises(ValueError, match="size must be positive"):
        events.stream(size=0)
