"""Sums over tokens: shapes, Gram matrices, halves and tiles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from raymerge.stages.router.gates import accumulator, part_shapes, work_nbytes
from raymerge.stages.router.prompts import Schedule, TokenRun, Use, make_schedule

WIDTH = 6
CPU = torch.device("cpu")
MODES = ("hidden", "hidden_last", "hidden_avg", "router_input", "centroid", "ridge")

Run = tuple[Use, torch.Tensor, torch.Tensor]
"""What it counts towards, hidden states and router inputs."""


def made(lengths: Sequence[tuple[int, int, int]], *, seed: int = 0) -> tuple[Schedule, list[Run]]:
    """Random states for runs of (expert, sign, length), of two routed experts and a shared one."""
    chance = torch.Generator().manual_seed(seed)
    runs = [TokenRun(e, sign, (number,) * n) for number, (e, sign, n) in enumerate(lengths)]
    schedule = make_schedule(runs, "hidden", num_routed=2, num_shared=1)
    uses = [use for unit in schedule.units for reading in unit for use in reading.uses]
    states = [
        (use, torch.randn(n, WIDTH, generator=chance), torch.randn(n, WIDTH, generator=chance))
        for use, (_, _, n) in zip(uses, lengths, strict=True)
    ]
    return schedule, states


def summed(mode: str, schedule: Schedule, runs: Sequence[Run]) -> dict[str, torch.Tensor]:
    sums = accumulator(mode, schedule, WIDTH, CPU)
    for use, hidden, router_input in runs:
        sums.add(use, hidden, router_input)
    return dict(sums.parts())


LENGTHS = ((0, 1, 5), (1, 1, 3), (0, -1, 4), (2, 1, 2), (0, 1, 1), (1, -1, 2))
POSITIVE = tuple(each for each in LENGTHS if each[1] > 0)


@pytest.mark.parametrize("mode", MODES)
def test_parts_are_float64_of_the_shapes_that_are_told(mode: str) -> None:
    schedule, runs = made(POSITIVE)
    parts = summed(mode, schedule, runs)
    assert {name: tuple(part.shape) for name, part in parts.items()} == part_shapes(mode, 3, WIDTH)
    assert all(part.dtype == torch.float64 for part in parts.values())
    nbytes = sum(part.numel() * 8 for part in parts.values())
    assert nbytes <= work_nbytes(mode, 3, WIDTH)


def test_a_vector_of_zeros_has_no_direction() -> None:
    schedule, runs = made([(0, 1, 2), (1, 1, 1)])
    zeros = [(use, hidden, torch.zeros_like(router_input)) for use, hidden, router_input in runs]
    assert torch.equal(summed("centroid", schedule, zeros)["directions"], torch.zeros(3, WIDTH).double())


def test_every_expert_counts_alike_in_the_gram_matrix_and_shared_ones_not_at_all() -> None:
    schedule, runs = made(POSITIVE)
    parts = summed("ridge", schedule, runs)
    tokens = [torch.cat([each[2] for each in runs if each[0].expert == e]).double() for e in range(3)]
    gram = sum(each.T @ each / len(each) for each in tokens[:2])
    assert isinstance(gram, torch.Tensor)
    torch.testing.assert_close(parts["gram"].sum(0), gram / 2)
    torch.testing.assert_close(parts["means"].sum(0), torch.stack([each.mean(0) for each in tokens]))


def test_halves_are_kept_apart() -> None:
    schedule, runs = made(((0, 1, 4), (0, 1, 7), (1, 1, 6)))
    assert [use.first for use, *_ in runs] == [0, 7, 3]
    parts = summed("ridge", schedule, runs)
    short, long, only = (each[2].double() for each in runs)
    halves = (long / 11, only[:3] / 6), (short / 11, only[3:] / 6)
    for half, (first, second) in enumerate(halves):
        wanted = torch.stack([first.sum(0), second.sum(0)])
        torch.testing.assert_close(parts["means"][half, :2], wanted)
        gram = (first.T @ first * 11 + second.T @ second * 6) / 2
        torch.testing.assert_close(parts["gram"][half], gram)
    torch.testing.assert_close(schedule.shares, torch.tensor([[7 / 11, 0.5], [4 / 11, 0.5]]).double())


@pytest.mark.parametrize("lengths", [(1024, 1), (1, 1024, 1023), (3000, 7), (1025,)])
def test_tiles_do_not_lose_tokens(lengths: tuple[int, ...]) -> None:
    schedule, runs = made([(0, 1, length) for length in lengths])
    tokens = torch.cat([each[2] for each in runs]).double()
    wanted = tokens.T @ tokens / len(tokens) / 2
    torch.testing.assert_close(summed("ridge", schedule, runs)["gram"].sum(0), wanted)
