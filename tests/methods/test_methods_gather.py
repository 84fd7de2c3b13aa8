"""Where the runs of a sample lie, and that the elements there are taken."""

from __future__ import annotations

import pytest
import torch

from raymerge.methods import BLOCK, SAMPLE_LENGTH, SAMPLE_RUNS, Tile, sample_of, sample_runs, sampled

MOST = SAMPLE_RUNS * SAMPLE_LENGTH
SIZES = [MOST + 1, MOST + 255, 8 * BLOCK, 16 * MOST - 1, 16 * MOST, 20 * MOST + 77]


@pytest.mark.parametrize("size", SIZES)
def test_runs_are_alike_and_spread_over_the_tensor(size: int) -> None:
    runs = sample_runs(size)
    firsts, (length, *others) = [first for first, _ in runs], [count for _, count in runs]
    assert len(runs) == SAMPLE_RUNS
    assert set(others) == {length}
    assert firsts[0] == 0
    assert size - SAMPLE_RUNS < firsts[-1] + length <= size
    assert length <= firsts[1] == firsts[-1] / (SAMPLE_RUNS - 1)


def test_of_a_small_tensor_less_is_seen() -> None:
    seen = [SAMPLE_RUNS * sample_runs(size)[0][1] for size in SIZES]
    assert seen == sorted(seen)
    assert seen[0] < MOST / 4
    assert seen[-3] < MOST == seen[-2] == seen[-1]
    assert sample_runs(MOST) == sample_runs(0) == ()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_taken_lies_in_the_runs(size: int) -> None:
    values = torch.arange(2.0 * size).view(2, size)
    whole = Tile(values[0].neg(), values, 0)
    expected = torch.cat([torch.arange(first, first + count) for first, count in sample_runs(size)])
    sample = sample_of(whole)
    assert torch.equal(sample.require_base(), -expected.float())
    assert torch.equal(sample.sources, torch.stack([expected, expected + size]).float())
    stored = values[0].to(torch.int32)
    assert torch.equal(sampled(stored.view(torch.uint8), size).view(torch.int32), expected.int())
