import math

import numpy as np
import pytest
import torch

from turngate.runtime.engine.sampler import SamplingRows, draw, raw_logprobs, top_logprobs, uniforms


def rows_with(count: int, **settings) -> SamplingRows:
    rows = SamplingRows(count)
    rows.seed[:] = np.arange(count)
    for name, value in settings.items():
        getattr(rows, name)[:] = value
    return rows


def draws(logits: list[float], count: int = 4000, **settings):
    return draw(torch.tensor([logits] * count, dtype=torch.float64), rows_with(count, **settings), 0, count)


def shares(drawn, vocabulary: int) -> list[float]:
    return (np.bincount(drawn.tokens_B, minlength=vocabulary) / len(drawn.tokens_B)).tolist()


def test_uniforms_are_the_known_outputs_of_splitmix64():
    # First outputs of splitmix64 seeded with the mixed seed, computed with Python integers.
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    seeds, indices = [0, 1, 2**63, mask], [0, 1, 5, 1000]
    expected = [
        ((mix((mix(s ^ 0xD1B54A32D192ED03) + 0x9E3779B97F4A7C15 * (i + 1)) & mask) >> 12) + 0.5) / 2**52
        for s, i in zip(seeds, indices, strict=True)
    ]
    assert uniforms(np.array(seeds, dtype=np.uint64), np.array(indices)).tolist() == expected


def test_uniforms_are_spread_evenly_over_seeds_and_over_positions():
    for seeds, indices in ((np.arange(10_000), np.zeros(10_000)), (np.zeros(10_000), np.arange(10_000))):
        numbers = uniforms(seeds.astype(np.uint64), indices.astype(np.int64))
        assert 0 < numbers.min() < numbers.max() < 1
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        # 500 expected a bin, standard deviation 22.
        assert np.abs(counts - 500).max() < 110
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


def test_tokens_are_drawn_in_proportion_to_their_probability():
    drawn = draws([math.log(0.5), math.log(0.3), -math.inf, math.log(0.2)])
    assert shares(drawn, 4) == pytest.approx([0.5, 0.3, 0, 0.2], abs=0.03)
    assert drawn.logprobs_B.tolist() == pytest.approx(
        [[math.log(0.5), math.log(0.3), 0, math.log(0.2)][t] for t in drawn.tokens_B]
    )


def test_temperature_sharpens_the_distribution_and_its_log_probs():
    drawn = draws([math.log(0.6), math.log(0.4)], temperature=0.5)
    total = 0.36 + 0.16
    assert shares(drawn, 2) == pytest.approx([0.36 / total, 0.16 / total], abs=0.03)
    assert set(np.round(drawn.logprobs_B, 9)) == {round(math.log(p / total), 9) for p in (0.36, 0.16)}


def test_top_k_renormalises_over_the_k_likeliest():
    drawn = draws([math.log(p) for p in (0.1, 0.4, 0.2, 0.3)], top_k=2)
    assert shares(drawn, 4) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert set(np.round(drawn.logprobs_B, 9)) == {round(math.log(4 / 7), 9), round(math.log(3 / 7), 9)}


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_renormalises():
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert shares(draws(logits, top_p=0.69), 4) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert shares(draws(logits, top_p=0.71), 4) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.03)
    drawn = draws(logits, top_p=1e-9)
    assert set(drawn.tokens_B) == {1}
    assert set(drawn.logprobs_B) == {0.0}


def test_top_p_acts_on_what_top_k_left_after_temperature():
    # Tempered by 2: square roots 0.632, 0.548, 0.447, 0.316; the two best renormalise to 0.536 and 0.464.
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(draws(logits, 500, temperature=2.0, top_k=2, top_p=0.53).tokens_B) == {0}
    assert set(draws(logits, 500, temperature=2.0, top_k=2, top_p=0.54).tokens_B) == {0, 1}


def test_greedy_takes_the_likeliest_lowest_id_and_reports_the_models_log_prob():
    drawn = draws([0.0, 2.0, 2.0], 3, temperature=0.0, top_p=0.1, top_k=1)
    assert drawn.tokens_B.tolist() == [1, 1, 1]
    assert drawn.logprobs_B[0] == pytest.approx(2 - math.log(1 + 2 * math.exp(2)))


def test_a_temperature_of_nearly_nothing_is_greedy_and_finite():
    drawn = draws([0.0, 1.0], 5, temperature=1e-320)
    assert drawn.tokens_B.tolist() == [1] * 5
    assert drawn.logprobs_B.tolist() == [0.0] * 5


def test_rows_with_different_settings_draw_as_they_would_alone():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 50, generator=generator)
    rows = rows_with(60)
    rows.temperature[:] = np.resize([1.0, 0.0, 0.7], 60)
    rows.top_p[:] = np.resize([1.0, 0.8], 60)
    rows.top_k[:] = np.resize([0, 0, 0, 0, 5], 60)
    together = draw(logits, rows, 0, 60)
    for line in range(60):
        alone = draw(logits[line : line + 1], rows, line, line + 1)
        assert alone.tokens_B[0] == together.tokens_B[line]
        assert alone.logprobs_B[0] == pytest.approx(together.logprobs_B[line], abs=1e-12)


def test_each_row_moves_with_all_its_settings():
    rows = rows_with(3, temperature=[0.1, 0.2, 0.3], top_p=[0.4, 0.5, 0.6], top_k=[1, 2, 3], index=[7, 8, 9])
    rows.move(2, 0)
    assert (rows.temperature[0], rows.top_p[0], rows.top_k[0], rows.seed[0], rows.index[0]) == (0.3, 0.6, 3, 2, 9)


def test_alternatives_are_the_likeliest_of_the_distribution_drawn_from():
    drawn = draws([math.log(p) for p in (0.1, 0.4, 0.2, 0.3)], 1, top_k=2)
    found = top_logprobs(drawn.distribution_BV[0], 3)
    assert [token for token, _ in found] == [1, 3]
    assert [value for _, value in found] == pytest.approx([math.log(4 / 7), math.log(3 / 7)])


def test_raw_log_probs_are_the_models_own():
    assert raw_logprobs(torch.tensor([[0.0, math.log(3)]])).exp().tolist()[0] == pytest.approx([0.25, 0.75])


def test_logits_that_overflowed_are_an_error():
    with pytest.raises(FloatingPointError, match="logits must be finite"):
        draws([math.nan, 0.0], 1)
