"""Sums over the tokens that a layer sees.

They are additive: those of several units add up to those of all.
"""

# ruff: noqa: ARG002 - an accumulator has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from raymerge.router.readings import Schedule

FLOOR = 1e-8
"""The least length that a vector is divided by."""

_TILE_TOKENS = 1024
_FLOAT64 = 8


class Accumulator(Protocol):
    """What the runs of one layer add up to."""

    def add(self, expert: int, sign: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Take in a run that is for (1) or against (-1) an expert: float32 ``[T, H]`` both."""

    def parts(self) -> Mapping[str, torch.Tensor]:
        """The sums by name, float64, with the shapes of ``part_shapes``; nothing may be added afterwards."""


def accumulator(mode: str, plan: Schedule, hidden_size: int, device: torch.device) -> Accumulator:
    """Sums of nothing, for a gate mode that reads texts layer by layer."""
    if mode == "ridge":
        return _Moments(plan, hidden_size, device)
    if mode == "centroid":
        return _Directions(plan, hidden_size, device)
    return _Means(mode, plan, hidden_size, device)


def part_shapes(mode: str, num_experts: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
    """The sums of a gate mode and their shapes; experts are the routed ones and then the shared ones."""
    match mode:
        case "ridge":
            return {"gram": (hidden_size, hidden_size), "means": (num_experts, hidden_size)}
        case "centroid":
            return {"directions": (num_experts, hidden_size)}
        case _:
            return {"sums": (2, num_experts, hidden_size)}


def work_nbytes(mode: str, num_experts: int, hidden_size: int) -> int:
    """Bytes of memory that the sums of one layer, and making rows of them, take at most."""
    sums = num_experts * hidden_size * _FLOAT64
    if mode != "ridge":
        return 8 * sums
    # The matrix, the same with the penalty, its factor, and a tile with its weights laid in.
    return 8 * sums + 3 * hidden_size**2 * _FLOAT64 + 3 * _TILE_TOKENS * hidden_size * _FLOAT64


class _Means:
    """Sums over runs of one vector a run: ``sums[0]`` of positive runs, ``sums[1]`` of negative ones."""

    def __init__(self, mode: str, plan: Schedule, hidden_size: int, device: torch.device) -> None:
        self._mode = mode
        self._sums = torch.zeros(2, plan.num_experts, hidden_size, dtype=torch.float64, device=device)

    def add(self, expert: int, sign: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Add the run's vector."""
        match self._mode:
            case "router_input":
                vector = router_input.double().mean(0)
            case "hidden_avg":
                vector = hidden.double().mean(0)
            case _:
                vector = hidden[-1].double()
        self._sums[0 if sign > 0 else 1, expert] += vector

    def parts(self) -> Mapping[str, torch.Tensor]:
        """The sums."""
        return {"sums": self._sums}


class _Directions:
    """Sums of unit vectors over all tokens."""

    def __init__(self, plan: Schedule, hidden_size: int, device: torch.device) -> None:
        self._sums = torch.zeros(plan.num_experts, hidden_size, dtype=torch.float64, device=device)

    def add(self, expert: int, sign: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Add the directions of the run's router inputs."""
        vectors = router_input.double()
        vectors /= vectors.norm(dim=1, keepdim=True).clamp_min_(FLOOR)
        self._sums[expert] += vectors.sum(0)

    def parts(self) -> Mapping[str, torch.Tensor]:
        """The sums."""
        return {"directions": self._sums}


class _Moments:
    """Means of the router inputs by expert, and their Gram matrix in which every routed expert counts alike.

    Tokens are gathered into tiles, so that many short runs do not each go through the whole matrix.
    """

    def __init__(self, plan: Schedule, hidden_size: int, device: torch.device) -> None:
        self._plan = plan
        self._gram = torch.zeros(hidden_size, hidden_size, dtype=torch.float64, device=device)
        self._means = torch.zeros(plan.num_experts, hidden_size, dtype=torch.float64, device=device)
        self._tile = torch.empty(_TILE_TOKENS, hidden_size, dtype=torch.float64, device=device)
        self._filled = 0

    def add(self, expert: int, sign: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Add the run's router inputs, weighted so that every expert's tokens come to 1 in all."""
        weight = 1.0 / self._plan.num_tokens[expert]
        self._means[expert].add_(router_input.double().sum(0), alpha=weight)
        if expert < self._plan.num_routed:
            self._gather(router_input, (weight / self._plan.num_routed) ** 0.5)

    def parts(self) -> Mapping[str, torch.Tensor]:
        """The matrix and the means."""
        self._multiply()
        return {"gram": self._gram, "means": self._means}

    def _gather(self, vectors: torch.Tensor, factor: float) -> None:
        done = 0
        while done < vectors.shape[0]:
            count = min(vectors.shape[0] - done, _TILE_TOKENS - self._filled)
            place = self._tile[self._filled : self._filled + count]
            place.copy_(vectors[done : done + count]).mul_(factor)
            done, self._filled = done + count, self._filled + count
            if self._filled == _TILE_TOKENS:
                self._multiply()

    def _multiply(self) -> None:
        tile = self._tile[: self._filled]
        self._gram.addmm_(tile.T, tile)
        self._filled = 0
