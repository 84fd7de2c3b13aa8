"""What an adapter that was made holds, and what it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The factors of one module."""

    name: str
    """Its path in the model."""
    rank: int
    """Rank of its factors."""
    kept: float
    """Sum of the squared singular values that the factors say."""
    total: float
    """Sum of all squared singular values: the squared length of the change."""

    @property
    def energy(self) -> float:
        """Share of the change's squared length that the factors say; 1 for no change."""
        return self.kept / self.total if self.total else 1.0


OnModule: TypeAlias = Callable[[ModuleReport, int], None]
"""Told of each module with factors as it is done, with the number of those that may come in all."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A change that is not in the adapter."""

    name: str
    """The tensor."""
    reason: str
    """Why."""
    total: float
    """Squared length of the change; 0 where its elements are no plain floats."""


@dataclass(frozen=True, slots=True)
class Extraction:
    """What became of the difference of two models."""

    output: str
    """The adapter's directory."""
    nbytes: int
    """Size of its weights file."""
    modules: tuple[ModuleReport, ...]
    """The modules that have factors."""
    saved: tuple[str, ...]
    """Modules that are in it whole."""
    biases: tuple[str, ...]
    """Biases that are in it beside factors."""
    left_out: tuple[LeftOut, ...]
    """Changed tensors that are not in it."""
    num_unchanged: int
    """Modules that are equal in both models."""
    relative_error: float
    """Length of what the adapter does not say of the difference, over the length of the difference."""
    notes: tuple[str, ...]
    """What is worth knowing before the adapter is used."""


@dataclass(frozen=True, slots=True)
class Combination:
    """What became of a merge of adapters."""

    output: str
    """The new adapter's directory."""
    nbytes: int
    """Size of its weights file."""
    modules: tuple[ModuleReport, ...]
    """Its modules that have factors."""
    saved: tuple[str, ...]
    """Tensors that take the place of the model's."""
    relative_error: float
    """Length of what its factors do not say of the merged change, over the length of that change."""
    notes: tuple[str, ...]
    """What is worth knowing of it."""


def relative_error(missing: float, total: float) -> float:
    """Ratio of two lengths, from their squares; 0 for no length."""
    return math.sqrt(max(0.0, missing) / total) if total else 0.0
