import random

import pytest
import safetensors.torch
import torch
from torch.nn import functional

from turngate.runtime.engine.model import ModelConfig, PolicyModel, squared_relu
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, PublishError

ROWS = [[random.Random(i).randrange(300) for _ in range(length)] for i, length in enumerate([50, 3, 120, 70, 1, 118])]


def reference_logits(model: PolicyModel, ids: list[int]) -> torch.Tensor:
    """The model written out for one sequence, one head and one position at a time."""
    config = model.config
    half = config.head_dim // 2
    frequency = config.rope_base ** (-torch.arange(half) / half)

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        angle, even, odd = position * frequency, x[0::2], x[1::2]
        turned = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], dim=1)
        return turned.flatten()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    x = model.embed.weight[ids]
    for layer in model.typed_layers:
        h = norm(x)
        raw = h @ layer.k.weight.T
        smeared = torch.cat([raw[:1], raw[1:] + layer.smear * raw[:-1]])
        keys = torch.stack([rotate(key, t) for t, key in enumerate(smeared)])
        values = h @ layer.v.weight.T
        mixed = []
        for t in range(len(ids)):
            queries = (layer.q.weight @ h[t]).view(config.heads, -1)
            weights = [((keys[: t + 1] @ rotate(q, t)) / config.head_dim**0.5).softmax(0) for q in queries]
            mixed.append(torch.cat([w @ values[: t + 1] for w in weights]))
        x = x + torch.stack(mixed) @ layer.out.weight.T
        x = x + (norm(x) @ layer.up.weight.T).relu().square() @ layer.down.weight.T
    return norm(x) @ model.embed.weight.T / config.width**0.5


def test_packed_log_probs_equal_the_model_written_out_by_hand(make_policy):
    model = make_policy()
    expected = [reference_logits(model, row)[:-1].log_softmax(-1) for row in ROWS]
    picked = [
        line.gather(1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0]
        for line, row in zip(expected, ROWS, strict=True)
    ]
    torch.testing.assert_close(model.score(pack(ROWS)).logprobs_M, torch.cat(picked), atol=2e-5, rtol=0)
    torch.testing.assert_close(model.logits(pack(ROWS)).log_softmax(-1), torch.cat(expected), atol=2e-5, rtol=0)


def test_scoring_few_tokens_gives_the_same_log_probs_and_gradients_as_scoring_all(make_policy):
    model = make_policy(value_head=True)
    rng = random.Random(0)
    masks = [bytes([0, *(rng.random() < 0.3 for _ in row[1:])]) for row in ROWS]
    few, everything = pack(ROWS, masks), pack(ROWS)
    chosen = torch.tensor([bool(flag) for mask in masks for flag in mask[1:]])
    results = []
    for packed, pick in ((few, slice(None)), (everything, chosen)):
        model.zero_grad()
        scores = model.score(packed, with_entropy=True)
        picked = [scores.logprobs_M[pick], scores.entropy_M[pick], scores.values_M[pick]]
        (picked[0].sum() + picked[1].sum() + picked[2].sum()).backward()
        results.append([*picked, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_sequence_scores_the_same_alone_and_packed_with_others(make_policy):
    model = make_policy()
    together = model.score(pack(ROWS)).logprobs_M.split([len(row) - 1 for row in ROWS])
    for row, packed in zip(ROWS, together, strict=True):
        torch.testing.assert_close(model.score(pack([row])).logprobs_M, packed, atol=1e-5, rtol=0)


def test_later_tokens_influence_nothing_before_them(make_policy):
    model = make_policy()
    changed = [*ROWS[0][:30], 7, *ROWS[0][31:]]
    before, after = model.score(pack([ROWS[0]])).logprobs_M, model.score(pack([changed])).logprobs_M
    torch.testing.assert_close(before[:29], after[:29], atol=1e-6, rtol=0)
    assert not torch.allclose(before[29:], after[29:])


def test_temperature_divides_the_logits(make_policy):
    model, packed = make_policy(), pack(ROWS)
    expected = (model.logits(packed) / 0.7).log_softmax(-1)
    scores = model.score(packed, temperature=0.7, with_entropy=True)
    torch.testing.assert_close(
        scores.logprobs_M, expected.gather(1, packed.targets_M[:, None])[:, 0], atol=2e-5, rtol=0
    )
    torch.testing.assert_close(scores.entropy_M, -(expected.exp() * expected).sum(-1), atol=2e-5, rtol=0)
    torch.testing.assert_close(model(packed, temperature=0.7).logprobs_M, scores.logprobs_M, atol=2e-5, rtol=0)
    with pytest.raises(ConfigError, match="temperature must be positive"):
        model.score(packed, temperature=0)


def test_squared_relu_has_the_gradient_of_its_definition():
    x = torch.tensor([-2.0, 0.0, 0.5, 3.0], requires_grad=True)
    squared_relu(x).backward(torch.tensor([1.0, 1.0, 1.0, 2.0]))
    assert x.grad.tolist() == [0.0, 0.0, 1.0, 12.0]


def test_a_fresh_model_has_unit_scale_embeddings_and_writes_nothing_yet():
    model = PolicyModel(ModelConfig(vocab_size=400))
    assert model.embed.weight.std().item() == pytest.approx(1, abs=0.02)
    assert model.typed_layers[0].out.weight.abs().max() == 0
    # Nearly a quarter of a million weights, as small as the demo needs.
    assert sum(p.numel() for p in model.parameters()) == 400 * 96 + 2 * (
        96 * (128 + 32 + 32) + 128 * 96 + 2 * 96 * 384 + 32
    )


def test_equal_seeds_make_equal_models_and_leave_the_global_generator_alone():
    state = torch.random.get_rng_state()
    a, b = (PolicyModel(ModelConfig(vocab_size=10), seed=3).embed.weight for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(a, PolicyModel(ModelConfig(vocab_size=10), seed=4).embed.weight)


def test_a_small_model_learns_to_copy_in_a_few_steps():
    """A wrong scale of logits or embeddings delays this tenfold."""
    rng = random.Random(0)
    model = PolicyModel(ModelConfig(vocab_size=100, width=64, head_dim=32, mlp_width=64))
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    accuracy = 0.0
    for _ in range(60):
        halves = [[rng.randrange(1, 100) for _ in range(12)] for _ in range(32)]
        rows = [[*half, 0, *half] for half in halves]
        packed = pack(rows, [bytes(14) + b"\1" * 11] * len(rows))
        logits = model.logits(packed)
        optimizer.zero_grad()
        functional.cross_entropy(logits, packed.targets_M).backward()
        optimizer.step()
        accuracy = (logits.argmax(-1) == packed.targets_M).float().mean().item()
    assert accuracy > 0.9


def test_a_saved_model_loads_with_the_same_config_and_weights(tmp_path, make_policy):
    model = make_policy(value_head=True)
    model.save(tmp_path)
    loaded = PolicyModel.load(tmp_path)
    assert loaded.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def bad_states(state: dict[str, torch.Tensor]):
    name = "layers.0.q.weight"
    yield {**state, name: state[name][:, :-1]}, r"this model's shapes: expected \(64, 32\), got \(64, 31\) \(layers.0.q"
    yield {**state, name: state[name] * float("nan")}, r"must be finite: got NaN or infinity \(layers.0.q.weight"
    yield {key: value for key, value in state.items() if key != name}, r"missing \['layers.0.q.weight'\]"
    yield {**state, "extra": state[name].clone()}, r"unknown \['extra'\]"


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path, make_policy):
    model, other = make_policy(), make_policy(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for state, message in bad_states({name: tensor.detach() for name, tensor in other.state_dict().items()}):
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "w")
        with pytest.raises(PublishError, match=message):
            model.load_weights(tmp_path / "w")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_folder_without_a_valid_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"readable config\.json"):
        PolicyModel.load(tmp_path)


@pytest.mark.parametrize("sizes", [{}, {"max_context": 1}, {"vocab_size": 1}, {"max_context": 1000, "vocab_size": 999}])
def test_weights_that_overflow_in_use_are_found(make_policy, sizes):
    model = make_policy(**sizes)
    model.check_overflow(where="here")
    with torch.no_grad():
        model.typed_layers[0].up.weight.mul_(1e24)  # finite, but not once it is squared
    if model.config.max_context > 1 < model.config.vocab_size:  # else nothing can be predicted
        with pytest.raises(PublishError, match=r"logits must be finite: the weights overflow \(here\)"):
            model.check_overflow(where="here")


@pytest.mark.parametrize(("name", "value"), [("width", 0), ("vocab_size", -1), ("head_dim", 3)])
def test_sizes_that_cannot_work_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        ModelConfig(**{"vocab_size": 10, name: value})
