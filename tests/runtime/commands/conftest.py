"""A toy server that runs in a thread, since commands bring an event loop of their own."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from turngate.runtime.testing.fake_server import FakeServer, Traits


@pytest.fixture
def serve():
    """Return a function that starts a server with the given traits; all stop when the test ends."""
    stops, threads = [], []

    def start(**traits):
        ready: Future[Any] = Future()

        async def run():
            async with FakeServer(Traits(**traits)) as server:
                stop = asyncio.Event()
                ready.set_result((server, asyncio.get_running_loop(), stop))
                await stop.wait()

        threads.append(threading.Thread(target=asyncio.run, args=(run(),)))
        threads[-1].start()
        server, loop, stop = ready.result(10)
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        return server

    yield start
    for stop, thread in zip(stops, threads, strict=True):
        stop()
        thread.join(10)
