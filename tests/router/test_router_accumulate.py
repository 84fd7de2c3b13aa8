"""Sums over tokens: what they are, and that they add up in whatever way texts are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 100), cut=st.integers(0, len(POSITIVE)))
def test_units_add_up(mode: str, *, seed: int, cut: int) -> None:
    schedule, runs = made(POSITIVE, seed=seed)
    every = summed(mode, schedule, runs)
    first, second = summed(mode, schedule, runs[:cut]), summed(mode, schedule, runs[cut:])
    for name, part in every.items():
        torch.testing.assert_close(first[name] + second[name], part, rtol=1e-12, atol=1e-12)


def test_one_vector_of_each_run_by_sign() -> None:
    schedule, runs = made(LENGTHS)
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "hidden": lambda hidden, _: hidden[-1],
        "hidden_last": lambda hidden, _: hidden[-1],
        "hidden_avg": lambda hidden, _: hidden.mean(0),
        "router_input": lambda _, router_input: router_input.mean(0),
    }
    for mode, take in ways.items():
        sums = summed(mode, schedule, runs)["sums"]
        for at, sign in enumerate((1, -1)):
            for expert in range(3):
                own = [
                    take(hidden.double(), router_input.double())
                    for use, hidden, router_input in runs
                    if use[:2] == (expert, sign)
                ]
                wanted = torch.stack(own).sum(0) if own else torch.zeros(WIDTH).double()
                torch.testing.assert_close(sums[at, expert], wanted)


def test_directions_have_no_lengths() -> None:
    schedule, runs = made(POSITIVE)
    longer = [(use, hidden, router_input * 50) for use, hidden, router_input in runs]
    found = summed("centroid", schedule, longer)["directions"]
    torch.testing.assert_close(found, summed("centroid", schedule, runs)["directions"], rtol=1e-6, atol=1e-6)
    tokens = torch.cat([each[2] for each in runs if each[0].expert == 0]).double()
    torch.testing.assert_close(
        found[0], (tokens / tokens.norm(dim=1, keepdim=True)).sum(0), rtol=1e-6, atol=0
    )


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
