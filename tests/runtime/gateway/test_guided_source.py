"""Replies that are chosen among the server's own, without a network."""

import asyncio
import itertools

import msgspec
import pytest

from tests.runtime.gateway.doors import HI, TOOLS
from tests.runtime.test_base_draw import MODES, answers
from turngate.envs.base import Task
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.gateway.config import GatewayConfig
from turngate.runtime.gateway.exchange import Exchange
from turngate.runtime.gateway.guests import Guests
from turngate.runtime.gateway.steering import Steering
from turngate.runtime.gateway.works import Works
from turngate.runtime.guidance import Guidance
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing import FakeTransport, cancel_at_every_tick, run_virtual
from turngate.runtime.testing.endpoints import fake_reply
from turngate.runtime.transport import Reply


async def longest(point, candidates):
    await asyncio.sleep(0)
    return [float(len(one.text)) for one in candidates]


def works_of(transport, mode="server", q=longest, **settings):
    endpoint = Endpoint("http://x/v1", model="base", transport=transport, max_retries=0, **MODES[mode])
    guidance = Guidance(q, **{"beta": 50.0, "draws": 3, **settings})
    config = GatewayConfig()
    session = SessionTable(endpoint).create(Task("t"), seed=1)
    guest = Guests(config).of(session)
    return Works(endpoint, Steering(endpoint, guidance, config), timeout_s=60.0), guest, endpoint, guidance


def asked(**options):
    return msgspec.json.encode({"model": "base@guided", "messages": HI, **options})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"stream": True}, {"n": 2}, {"tools": TOOLS}])
def test_a_guided_reply_cancelled_at_any_tick_leaves_nothing_behind(mode, options):
    state = {}

    async def play():
        state["works"] = works, guest, endpoint, _ = works_of(answers(), mode)
        exchange = state["exchange"] = Exchange("key", "digest")
        await works.chat(guest, asked(**options), "").answer(exchange)
        assert exchange.is_done
        exchange.delivered()
        assert guest.session.turns == options.get("n", 1)
        state["made"] = endpoint.statistics().completed

    def check(tick):
        _, guest, endpoint, _ = state["works"]
        assert endpoint.statistics().in_flight == 0
        assert guest.session.turns == 0

    assert cancel_at_every_tick(play, check) > 3
    assert state["made"] == 3 * options.get("n", 1)


@pytest.mark.parametrize("at", range(3))
def test_a_draw_that_fails_is_told_apart_from_the_reply_that_the_base_gives(at):
    numbers = itertools.count()

    def serve(path, request):
        if (number := next(numbers)) == at:
            return Reply(500, {}, b"down")
        return Reply(200, {}, msgspec.json.encode(fake_reply(request, "a" * (number + 1))))

    async def play():
        works, guest, _, _ = works_of(FakeTransport(serve))
        exchange = Exchange("key", "digest")
        await works.chat(guest, asked(), "").answer(exchange)
        exchange.delivered()
        return exchange, guest.session.seal()

    if at == 0:
        with pytest.raises(RequestError, match="the upstream must answer: got status 500"):
            run_virtual(play())
        return
    exchange, trajectory = run_virtual(play())
    (turn,) = trajectory.turns
    assert msgspec.json.decode(exchange.pieces[0])["choices"][0]["message"]["content"] == turn.text == "a"
    assert turn.decision.fallback == "a draw failed: EndpointError"
    assert len(turn.decision.candidates) == 2


def test_prompts_of_ids_are_on_the_record_where_the_server_does_not_repeat_them():
    def serve(path, request):
        ids = [*b"said", 260]
        logprobs = {"tokens": [f"token_id:{one}" for one in ids], "token_logprobs": [-0.5] * len(ids)}
        choice = {"text": "said", "finish_reason": "stop", "logprobs": logprobs}
        return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))

    async def play(prompt):
        works, guest, _, _ = works_of(FakeTransport(serve))
        exchange = Exchange("key", "digest")
        await works.text(guest, asked(prompt=prompt, max_tokens=8), "").answer(exchange)
        exchange.delivered()
        return guest.session.seal()

    for prompt, known in (([1, 2, 3], [[1, 2, 3]]), ([[4, 5], [6]], [[4, 5], [6]])):
        trajectory = run_virtual(play(prompt))
        assert [list(segment.ids())[:-5] for segment in trajectory.segments] == known
        assert all(turn.decision is not None for turn in trajectory.turns)
