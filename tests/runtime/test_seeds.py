"""Streams that are equal by name and otherwise independent."""

import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.seeds import derive_seed, require_seed


def test_seeds_are_pinned_so_that_old_runs_can_be_repeated():
    assert derive_seed(0, "env") == 215025873539578648
    assert derive_seed(1, "sampler", 3) == 358008270548423225


def test_different_names_give_different_seeds():
    names = [
        (root, purpose, *ids) for root in (0, 1, -1) for purpose in ("a", "b") for ids in ((), (1,), ("1",), (1, 1))
    ]
    seeds = [derive_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_use_their_whole_range_evenly():
    seeds = [derive_seed(7, "turn", n) for n in range(4000)]
    ones = [sum(seed >> bit & 1 for seed in seeds) for bit in range(63)]
    assert min(ones) > 1850
    assert max(ones) < 2150


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.0, "1", True])
def test_what_cannot_seed_a_generator_is_refused_with_its_place(seed):
    with pytest.raises(ConfigError, match=r"seed must be a signed 64-bit integer: got .* \(here\)"):
        require_seed(seed, "here")


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
def test_every_signed_integer_of_64_bits_is_a_seed(seed):
    require_seed(seed, "here")
