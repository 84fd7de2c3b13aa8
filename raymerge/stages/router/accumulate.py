"""Sums over the tokens that a layer sees.

They are additive: those of several units add up to those of all.
"""

# ruff: noqa: ARG002 - an accumulator has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from raymerge.stages.router.readings import Schedule, Use

FLOOR = 1e-8
"""The least length that a vector is divided by."""

_TILE_TOKENS = 1024


class Accumulator(Protocol):
    """What the runs of one layer add up to."""

    def add(self, use: Use, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Take in a run that is for or against an expert: float32 ``[T, H]`` both."""

    def parts(self) -> Mapping[str, torch.Tensor]:
        """The sums by name, float64, with the shapes of ``part_shapes``; nothing may be added afterwards."""


def accumulator(mode: str, schedule: Schedule, hidden_size: int, device: torch.device) -> Accumulator:
    """Sums of nothing, for a gate mode that reads texts layer by layer."""
    if mode == "ridge":
        return _Moments(schedule, hidden_size, device)
    if mode == "centroid":
        return _Directions(schedule, hidden_size, device)
    return _Means(mode, schedule, hidden_size, device)


def part_shapes(mode: str, num_experts: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
    """The sums of a gate mode and their shapes; experts are the routed ones and then the shared ones."""
    match mode:
        case "ridge":
            return {"gram": (2, hidden_size, hidden_size), "means": (2, num_experts, hidden_size)}
        case "centroid":
            return {"directions": (num_experts, hidden_size)}
        case _:
            return {"sums": (2, num_experts, hidden_size)}


def work_nbytes(mode: str, num_experts: int, hidden_size: int) -> int:
    """Bytes of memory that the sums of one layer take at most, while they are made or made rows of.

    It is as much where the sums of several units are added.
    """
    sums = num_experts * hidden_size
    numbers = 12 * sums
    if mode == "ridge":
        # The matrices of both halves; then as many that are read to be added, or one half's with the penalty
        # and its factor; one more that the allocator may hold on to. And the tiles, with the tokens of a run
        # beside them.
        numbers += 5 * hidden_size**2 + 4 * _TILE_TOKENS * hidden_size
    return numbers * torch.float64.itemsize


class _Means:
    """Sums over runs of one vector a run: ``sums[0]`` of positive runs, ``sums[1]`` of negative ones."""

    def __init__(self, mode: str, schedule: Schedule, hidden_size: int, device: torch.device) -> None:
        self._mode = mode
        self._sums = torch.zeros(2, schedule.num_experts, hidden_size, dtype=torch.float64, device=device)

    def add(self, use: Use, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        match self._mode:
            case "router_input":
                vector = router_input.double().mean(0)
            case "hidden_avg":
                vector = hidden.double().mean(0)
            case _:
                vector = hidden[-1].double()
        self._sums[0 if use.sign > 0 else 1, use.expert] += vector

    def parts(self) -> Mapping[str, torch.Tensor]:
        return {"sums": self._sums}


class _Directions:
    """Sums of unit vectors over all tokens."""

    def __init__(self, schedule: Schedule, hidden_size: int, device: torch.device) -> None:
        self._sums = torch.zeros(schedule.num_experts, hidden_size, dtype=torch.float64, device=device)

    def add(self, use: Use, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        vectors = router_input.double()
        vectors /= vectors.norm(dim=1, keepdim=True).clamp_min_(FLOOR)
        self._sums[use.expert] += vectors.sum(0)

    def parts(self) -> Mapping[str, torch.Tensor]:
        return {"directions": self._sums}


class _Moments:
    """Sums of the router inputs by expert, and their Gram matrix in which every routed expert counts alike.

    Both by halves of the experts' texts, each token with the weight that it has in all: the halves add up to
    the means and the matrix of all texts.
    """

    def __init__(self, schedule: Schedule, hidden_size: int, device: torch.device) -> None:
        self._schedule = schedule
        self._gram = torch.zeros(2, hidden_size, hidden_size, dtype=torch.float64, device=device)
        self._means = torch.zeros(2, schedule.num_experts, hidden_size, dtype=torch.float64, device=device)
        self._tiles = [_Tile(gram) for gram in self._gram]

    def add(self, use: Use, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Add the run's router inputs, weighted so that every expert's tokens come to 1 in all."""
        weight = 1.0 / self._schedule.num_tokens[use.expert]
        for half, vectors in enumerate((router_input[: use.first], router_input[use.first :])):
            self._means[half, use.expert].add_(vectors.double().sum(0), alpha=weight)
            if use.expert < self._schedule.num_routed:
                self._tiles[half].add(vectors, (weight / self._schedule.num_routed) ** 0.5)

    def parts(self) -> Mapping[str, torch.Tensor]:
        for tile in self._tiles:
            tile.multiply()
        return {"gram": self._gram, "means": self._means}


class _Tile:
    """Gathers tokens on their way into a Gram matrix: not every short run goes through all of it."""

    def __init__(self, gram: torch.Tensor) -> None:
        self._gram = gram
        self._tokens = gram.new_empty(_TILE_TOKENS, gram.shape[1])
        self._filled = 0

    def add(self, vectors: torch.Tensor, factor: float) -> None:
        """Take in vectors ``[T, H]``, times the factor."""
        done = 0
        while done < vectors.shape[0]:
            count = min(vectors.shape[0] - done, _TILE_TOKENS - self._filled)
            place = self._tokens[self._filled : self._filled + count]
            place.copy_(vectors[done : done + count]).mul_(factor)
            done, self._filled = done + count, self._filled + count
            if self._filled == _TILE_TOKENS:
                self.multiply()

    def multiply(self) -> None:
        """Bring the matrix up to date."""
        tokens = self._tokens[: self._filled]
        self._gram.addmm_(tokens.T, tokens)
        self._filled = 0
