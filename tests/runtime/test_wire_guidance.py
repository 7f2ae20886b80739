"""Guided tokens from the server to the record."""

import msgspec
import pytest
import torch

from turngate.envs.base import End, Observation, Step, Task
from turngate.runtime import Limits, Runtime
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.errors import ConfigError, MalformedReply
from turngate.runtime.testing import FakeTransport
from turngate.runtime.testing.endpoints import fake_reply
from turngate.runtime.transport import Reply
from turngate.runtime.types import Message, Sampling, TokenGuidance

TOKENIZER = Tokenizer([])
GUIDED = Sampling(max_tokens=5, guidance=TokenGuidance(beta=4.0, top_k=6))
ASK = [Message("user", "hi")]


class Talk:
    """Listens to three turns."""

    async def reset(self, task, seed):
        self.turns = 0
        return Observation("hello")

    async def step(self, action):
        self.turns += 1
        return Step(Observation("go on"), {"outcome": 1.0}, End.success if self.turns == 3 else None)

    async def aclose(self): ...


def models():
    sizes = {"vocab_size": len(TOKENIZER), "width": 32, "layers": 1, "heads": 2, "head_dim": 16}
    made = [PolicyModel(ModelConfig(**sizes)), PolicyModel(ModelConfig(**sizes, value_head=True), seed=1)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in [w for model in made for w in model.parameters()]:
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return made


async def play(tmp_path, *, renderer=False):
    policy, critic = models()
    critic.save(tmp_path / "critic")
    policy.save(tmp_path / "policy")
    TOKENIZER.save(tmp_path / "policy" / "tokenizer.json")
    async with Engine.start(tmp_path / "policy", critic=tmp_path / "critic", value_version=4, mode="thread") as engine:
        endpoint = engine.endpoint
        if renderer:
            dialect = Dialect(token_mode="tokens", guidance=True)
            endpoint = Endpoint(
                engine.url + "/v1", model="policy", dialect=dialect, renderer=EngineRenderer(tmp_path / "policy")
            )
        runtime = Runtime(endpoint, sampling=GUIDED, limits=Limits(max_turns=3))
        trajectory = await runtime.rollout(Talk, Task("t"))
        base = await engine.endpoint.score(list(trajectory.segments[-1].ids()))
        if renderer:
            await endpoint.aclose()
    return trajectory, base


@pytest.mark.parametrize("renderer", [False, True])
async def test_the_record_holds_guided_log_probs_and_the_policys_own_beside_them(tmp_path, renderer):
    trajectory, base = await play(tmp_path, renderer=renderer)
    assert trajectory.end is End.success, trajectory.error
    segment = trajectory.segments[-1]
    for turn in trajectory.turns:
        told = turn.guided_tokens
        assert (told.beta, told.top_k, told.tail, told.value_version) == (4.0, 6, "base", 4)
        if turn.segment == len(trajectory.segments) - 1:
            place = slice(turn.start, turn.start + turn.length)
            assert list(told.base_values()) == pytest.approx(base[place], abs=1e-4)
            assert list(segment.logprob_values()[place]) != pytest.approx(base[place], abs=1e-3)
    again = msgspec.json.decode(msgspec.json.encode(trajectory), type=type(trajectory))
    assert again == trajectory


async def test_a_server_that_is_not_known_to_guide_is_not_asked_to():
    endpoint = Endpoint("http://server/v1", model="m", transport=FakeTransport())
    with pytest.raises(ConfigError, match="token guidance needs a server that draws tokens by values"):
        await endpoint.complete(ASK, GUIDED)


async def test_a_server_that_ignores_guidance_is_noticed():
    reply = Reply(200, {}, msgspec.json.encode(fake_reply({"messages": [], "model": "m"}, "x")))
    endpoint = Endpoint("http://server/v1", model="m", dialect=Dialect(guidance=True), transport=FakeTransport(reply))
    with pytest.raises(MalformedReply, match="guided tokens must come with their log-probs under the policy"):
        await endpoint.complete(ASK, GUIDED)


def guided_reply(text, **fields):
    reply = fake_reply({"messages": [], "model": "m"}, text)
    reply["choices"][0] |= {"base_logprobs": [-1.0] * len(reply["choices"][0]["token_ids"]), **fields}
    return Reply(200, {}, msgspec.json.encode(reply | {"value_version": 9}))


async def asked(reply):
    endpoint = Endpoint("http://server/v1", model="m", dialect=Dialect(guidance=True), transport=FakeTransport(reply))
    return (await endpoint.complete(ASK, GUIDED)).guided_tokens


async def test_a_critic_replaced_while_a_turn_is_sampled_is_told_token_by_token():
    count = len(msgspec.json.decode(guided_reply("abcd").body)["choices"][0]["token_ids"])
    versions = [3, 3, *[7] * (count - 2)]
    told = await asked(guided_reply("abcd", value_versions=versions))
    assert (told.value_version, list(memoryview(told.value_versions).cast("i"))) == (3, versions)
    for fields in ({"value_versions": [7] * count}, {}):
        told = await asked(guided_reply("abcd", **fields))
        assert (told.value_version, told.value_versions) == (7 if fields else 9, b"")
    with pytest.raises(MalformedReply, match="value versions must be per token"):
        await asked(guided_reply("abcd", value_versions=versions[:-1]))


@pytest.mark.parametrize("fields", [{"beta": -1.0}, {"beta": float("inf")}, {"beta": 1.0, "top_k": 0}])
def test_guidance_that_cannot_work_is_refused(fields):
    with pytest.raises(ConfigError, match="TokenGuidance"):
        TokenGuidance(**fields)


async def test_what_was_asked_for_is_recorded_and_every_token_has_its_log_prob_under_the_policy():
    count = len(msgspec.json.decode(guided_reply("abcd").body)["choices"][0]["token_ids"])
    with pytest.raises(MalformedReply, match=f"expected {count}, got {count - 1}"):
        await asked(guided_reply("abcd", base_logprobs=[-1.0] * (count - 1)))
    dialect, transport = Dialect(guidance=True), FakeTransport(guided_reply("abcd"))
    endpoint = Endpoint("http://server/v1", model="m", dialect=dialect, transport=transport)
    guidance = TokenGuidance(beta=2.0, top_k=3, tail="zero")
    told = (await endpoint.complete(ASK, Sampling(guidance=guidance))).guided_tokens
    assert (told.beta, told.top_k, told.tail) == (2.0, 3, "zero")
    assert transport.requests[0][1]["guidance"] == {"beta": 2.0, "top_k": 3, "tail": "zero"}
