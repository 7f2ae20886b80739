"""Golden numbers: every case of a vectors file, through the adapter of the function it names.

Expected keys that start with `wrong_` must differ from what the adapter returns under the same key; all others must
agree.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learners.vector_adapters import Case, Values, numbers, run


def is_close(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    if isinstance(got, Tensor):
        got = got.detach().tolist()
    if isinstance(expected, dict):
        return all(is_close(got[key], value, rtol, atol) for key, value in expected.items())
    if isinstance(expected, list):
        pairs = zip(got, expected, strict=True)
        return all(is_close(g, e, rtol, atol) for g, e in pairs)
    expected = numbers(expected)
    if isinstance(expected, str | bool) or expected is None:
        return bool(got == expected)
    if math.isnan(expected) or math.isinf(expected):
        return bool(got == expected or (math.isnan(got) and math.isnan(expected)))
    return abs(got - expected) <= atol + rtol * abs(expected)


def is_float64_only(case: Values) -> bool:
    """Log-ratios near the clamp, and logs whose exponentials leave float32."""
    flat = [abs(x) for x in leaves(numbers(list(case["inputs"].values()))) if isinstance(x, float) and math.isfinite(x)]
    return max(flat, default=0.0) > 15


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        file = json.loads(metafunc.config.getoption("--vectors").read_text())
        hint = file.get("float32_tolerance_hint", {"rtol": 2e-5, "atol": 2e-6})
        default = file.get("default_tolerance", {"rtol": 1e-9, "atol": 1e-12})
        cases = [
            pytest.param((c, torch.float64, c.get("tolerance", default)), id=f"{c['name']}-float64")
            for c in file["cases"]
        ]
        cases += [
            pytest.param((c, torch.float32, hint), id=f"{c['name']}-float32")
            for c in file["cases"]
            if not is_float64_only(c)
        ]
        metafunc.parametrize("golden", cases)


def test_vector_is_reproduced(golden: tuple[Values, torch.dtype, dict[str, float]]) -> None:
    case, dtype, tolerance = golden
    got, close = run(Case(case, dtype)), (tolerance["rtol"], tolerance["atol"])
    agreeing = {key: is_close(got[key], value, *close) for key, value in case["expected"].items()}
    if "negative control" in case.get("notes", ""):
        assert not all(agreeing.values()), f"{case['name']}: produced the forbidden numbers {case['expected']}"
        return
    wrong = [key for key, is_same in agreeing.items() if is_same == key.startswith("wrong_")]
    assert not wrong, {key: (got[key], case["expected"][key]) for key in wrong}


def test_vector_of_an_unknown_function_fails() -> None:
    case = Case({"fn": "no_such_function", "params": {}, "inputs": {}}, torch.float64)
    with pytest.raises(NotImplementedError, match="no_such_function"):
        run(case)


def test_vector_comparison_sees_a_wrong_digit() -> None:
    assert is_close(torch.tensor([1.0, 2.0]), [1.0, 2.0], 1e-9, 1e-12)
    assert not is_close(torch.tensor([1.0, 2.0]), [1.0, 2.00001], 1e-9, 1e-12)
    assert is_close([math.inf], ["Infinity"], 1e-9, 0.0)
    assert not is_close([math.inf], ["-Infinity"], 1e-9, 0.0)


def test_b2_12_a_case_with_everything_masked_has_loss_0_and_fractions_0() -> None:
    inputs = {"logp": [[-1.0]], "prox": [[-2.0]], "adv": [[1.0]], "mask": [[0]]}
    got = run(Case({"fn": "ppo_token+token_mean", "params": {}, "inputs": inputs}, torch.float64))
    assert is_close(got["loss"], 0.0, 0.0, 0.0)
    assert is_close(got["grad_logp"], [[0.0]], 0.0, 0.0)
    assert got["clip_frac_high"] == got["clip_frac_low"] == got["dual_frac"] == 0.0
