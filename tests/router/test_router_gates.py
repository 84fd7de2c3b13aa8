"""Lengths of rows, and random rows."""

from __future__ import annotations

import math

import pytest
import torch

from raymerge.stages.router.gates import unit
from raymerge.stages.router.work import random_rows


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_units_have_length_one_and_nothing_stays_nothing() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]], dtype=torch.float64)
    assert torch.equal(unit(vectors), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.1, 0.0]], dtype=torch.float64))


def test_normal_rows() -> None:
    rows = random_rows("random", 0, "router.0", (64, 1024)).double()
    assert rows.shape == (64, 1024)
    assert float(rows.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(rows.std()) == pytest.approx(1.0, abs=0.02)
    products = rows @ rows.T / 1024
    products.fill_diagonal_(0)
    assert float(products.abs().max()) < 0.2


def test_uniform_rows() -> None:
    rows = random_rows("uniform_random", 0, "router.0", (64, 1024)).double()
    limit = 1 / math.sqrt(1024)
    assert float(rows.abs().max()) <= limit
    assert float(rows.mean()) == pytest.approx(0.0, abs=limit * 0.02)
    assert float(rows.std()) == pytest.approx(limit / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("mode", ["random", "uniform_random"])
def test_random_rows_are_a_function_of_seed_and_name(mode: str) -> None:
    def rows(seed: int, name: str) -> torch.Tensor:
        return random_rows(mode, seed, name, (4, 8))

    first = rows(0, "router.0")
    assert torch.equal(rows(0, "router.0"), first)
    for other in ((1, "router.0"), (0, "router.1"), (0, "shared_gate.0")):
        assert not torch.isin(rows(*other), first).any()
