from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def closed_loop() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "closed_loop.py"
    spec = importlib.util.spec_from_file_location("closed_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_chunk_of_many_tokens_counts_as_that_many_gaps(closed_loop: ModuleType) -> None:
    sample = closed_loop.Sample(sent=0.0, arrivals=[(1.0, 1), (1.4, 5), (1.5, 5), (2.4, 6)])
    assert sample.ttft == 1.0
    assert sample.tokens == 6
    assert sample.gaps() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.9])


def test_one_token_has_no_gap(closed_loop: ModuleType) -> None:
    assert closed_loop.Sample(sent=0.0, arrivals=[(1.0, 1)]).gaps() == []


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([], 50, None), ([3.0], 99, 3.0), ([1.0, 2.0, 3.0, 4.0], 50, 2.5), ([4.0, 0.0], 90, 3.6)],
)
def test_percentiles_interpolate(
    closed_loop: ModuleType, values: list[float], q: float, expected: float | None
) -> None:
    result = closed_loop.percentile(values, q)
    assert result == (None if expected is None else pytest.approx(expected))
