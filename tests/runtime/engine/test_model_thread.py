import asyncio

import pytest

from turngate.runtime.engine.generation import Generation, choice_seed
from turngate.runtime.engine.model_thread import ModelThread
from turngate.runtime.engine.request import Finished, Progress, Request
from turngate.runtime.errors import EndpointError, PublishError
from turngate.runtime.openai_api.refusals import RequestError


@pytest.fixture
async def thread(fake_batcher):
    thread = ModelThread(fake_batcher)
    thread.start()
    yield thread
    await thread.stop()
    assert not thread._thread.is_alive()


def request(**fields) -> Request:
    return Request(prompt_ids=[1, 2, 3], **fields)


async def test_request_finishes_with_what_the_batcher_says(thread):
    with Generation(thread, [request(max_tokens=2)]) as generation:
        (finished,) = await generation.finished()
    assert finished.finish_reason == "length"
    assert len(finished.token_ids) == 2
    assert thread.open == 0


async def test_several_requests_keep_their_order(thread):
    requests = [request(max_tokens=length) for length in (3, 1, 2)]
    with Generation(thread, requests) as generation:
        finished = await generation.finished()
    assert [len(one.token_ids) for one in finished] == [3, 1, 2]


async def test_stream_reports_every_step_before_the_end(thread):
    with Generation(thread, [request(max_tokens=3, stream=True)]) as generation:
        kinds = [type(report) async for _, report in generation.reports()]
    assert kinds == [Progress, Progress, Progress, Finished]


async def test_leaving_cancels_what_is_unfinished(thread, fake_batcher):
    fake_batcher.is_paused = True
    with Generation(thread, [request(), request()]):
        assert thread.open == 2
    assert thread.open == 0
    assert await thread.call(lambda batcher: len(batcher.running)) == 0
    assert fake_batcher.cancelled == [1, 2]


async def test_cancelled_waiter_frees_its_slots(thread, fake_batcher):
    fake_batcher.is_paused = True

    async def wait() -> None:
        with Generation(thread, [request()]) as generation:
            await generation.finished()

    task = asyncio.create_task(wait())
    assert await thread.call(lambda batcher: len(batcher.running)) == 0  # nothing was submitted yet
    assert await thread.call(lambda batcher: len(batcher.running)) == 1
    task.cancel()
    await asyncio.wait({task})
    assert await thread.call(lambda batcher: len(batcher.running)) == 0


async def test_rejection_names_the_field_and_spares_the_siblings_slots(thread, fake_batcher):
    fake_batcher.is_paused = True
    with pytest.raises(RequestError) as caught:
        with Generation(thread, [request(), request(seed=666)]) as generation:
            await generation.finished()
    assert (caught.value.status, caught.value.param) == (400, "seed")
    assert await thread.call(lambda batcher: len(batcher.running)) == 0


async def test_full_queue_is_answered_with_429_and_a_time_to_retry(thread, fake_batcher, monkeypatch):
    fake_batcher.is_paused = True
    fake_batcher.running = {-i: (request(), []) for i in range(1, 128 + 8192 + 1)}
    with pytest.raises(RequestError) as caught:
        with Generation(thread, [request()]) as generation:
            await generation.finished()
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)


async def test_broken_batcher_fails_everything_open_and_to_come(thread, fake_batcher):
    fake_batcher.step_error = ZeroDivisionError("no luck")
    for _ in range(2):
        with pytest.raises(RequestError, match="ZeroDivisionError: no luck") as caught:
            with Generation(thread, [request(), request()]) as generation:
                await generation.finished()
        assert caught.value.status == 500
    assert "no luck" in await thread.failed()
    with pytest.raises(EndpointError, match="no luck"):
        await thread.call(lambda batcher: None)


async def test_call_raises_what_the_function_raised_and_the_thread_lives_on(thread):
    def refuse(batcher):
        raise PublishError("bad weights")

    with pytest.raises(PublishError, match="bad weights"):
        await thread.call(refuse)
    assert await thread.call(lambda batcher: batcher.policy_version) == 0


async def test_stop_fails_what_waits(fake_batcher):
    thread = ModelThread(fake_batcher)
    thread.start()
    fake_batcher.is_paused = True
    with Generation(thread, [request()]) as generation:
        await thread.stop()
        with pytest.raises(RequestError, match="stopping"):
            await generation.finished()
    assert not thread._thread.is_alive()


async def test_idle_thread_does_not_step(thread, fake_batcher):
    with Generation(thread, [request(max_tokens=2)]) as generation:
        await generation.finished()
    await thread.call(lambda batcher: None)
    assert fake_batcher.steps == 2


async def test_outcomes_of_one_step_wake_the_loop_once(thread, fake_batcher):
    fake_batcher.is_paused = True
    wakes: list = []
    post = thread._post

    def count(callback, *args):
        wakes.append(callback)
        post(callback, *args)

    thread._post = count
    with Generation(thread, [request(max_tokens=1) for _ in range(50)]) as generation:
        await thread.call(lambda batcher: setattr(batcher, "is_paused", False))
        await generation.finished()
    assert len([wake for wake in wakes if wake == thread._deliver]) == 1


def test_choices_of_one_seed_differ_and_repeat():
    seeds = [choice_seed(5, choice) for choice in range(8)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 8
    assert seeds == [choice_seed(5, choice) for choice in range(8)]
    assert choice_seed(None, 3) is None
