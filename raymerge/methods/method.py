"""What a merge method declares about itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from raymerge.methods.kernel import BLOCK, ROW_GROUP, Kernel, Settings, Tile, Value
from raymerge.methods.reference import Reference


class Access(StrEnum):
    """How much of a logical tensor a kernel must see at once."""

    ELEMENT = "element"
    """Any run of elements by itself."""
    ROW = "row"
    """Whole groups of ROW_GROUP rows (runs along the last dimension; a vector is one row). Passes over the
    tensor may come first."""
    TENSOR = "tensor"
    """Statistics over the whole tensor, streamed in block-aligned tiles, then any block-aligned tile."""
    MATRIX = "matrix"
    """The whole tensor as one tile."""


class BaseUse(StrEnum):
    """What the method does with the recipe's ``base_model``."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    UNUSED = "unused"


class Takes(StrEnum):
    """What the executor hands over as sources."""

    WEIGHTS = "weights"
    """The tensors themselves."""
    DELTAS = "deltas"
    """Source minus base."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting of a method, as a recipe writes it."""

    name: str
    """The key in the recipe's ``parameters``."""
    kind: Literal["float", "bool", "int"]
    scope: Literal["global", "source"]
    """One value per tensor, or one per source and tensor."""
    doc: str
    default: Value = None
    """Value when the recipe gives none; None together with ``required=False`` means absent."""
    required: bool = False
    minimum: float | None = None
    """Smallest value allowed, and largest."""
    maximum: float | None = None
    effective: bool = True
    """False when it is accepted so that mergekit's recipes run, and changes nothing."""

    def coerce(self, value: float) -> float | bool | int:
        """The recipe's number as this parameter's type.

        Raises:
            ValueError: not of the kind, not finite, or out of range; the message is a sentence.
        """
        if not math.isfinite(value):
            raise ValueError(f"{self.name} must be a finite number, is {value}")
        if self.kind == "bool":
            return self._as_bool(value)
        if not self._in_range(value):
            raise ValueError(f"{self.name} must be {self._range()}, is {value}")
        return self._as_int(value) if self.kind == "int" else float(value)

    def _as_bool(self, value: float) -> bool:
        if value not in (0, 1):
            raise ValueError(f"{self.name} must be true or false, is {value}")
        return bool(value)

    def _as_int(self, value: float) -> int:
        if value != int(value):
            raise ValueError(f"{self.name} must be a whole number, is {value}")
        return int(value)

    def _in_range(self, value: float) -> bool:
        above = self.minimum is None or value >= self.minimum
        return above and (self.maximum is None or value <= self.maximum)

    def _range(self) -> str:
        if self.minimum is None:
            return f"at most {self.maximum:g}"
        if self.maximum is None:
            return f"at least {self.minimum:g}"
        return f"between {self.minimum:g} and {self.maximum:g}"


def no_objection(settings: Settings) -> str | None:
    """The check of a method that any settings suit."""
    return None


def never_identity(settings: Settings) -> int | None:
    """The identity of a method that always computes."""
    return None


@dataclass(frozen=True, slots=True)
class Method:
    """A merge method: what it needs, what it may be told, and its kernel."""

    name: str
    """As in the recipe's ``merge_method``."""
    summary: str
    """One sentence."""
    paper: str
    """arXiv id, or ``-``."""
    access: Access
    base: BaseUse
    takes: Takes
    kernel: Kernel
    reference: Reference
    """The same in float64, by itself: what audits and tests compare with."""
    parameters: tuple[Parameter, ...]
    """What a recipe may set, in the order of the documentation."""
    min_sources: int = 1
    """Fewest sources, the base not counted."""
    max_sources: int | None = None
    """Most sources, the base not counted; None for any number."""
    scratch: float = 1.0
    """Temporaries of ``apply`` and ``observe`` beside inputs and result, counted in float32 tiles of
    ``max(n, BLOCK)`` elements."""
    scratch_per_source: float = 0.0
    """The same, for each source."""
    state_bytes: int = 0
    """Bytes of statistics that the state holds for each source while a tensor is in work."""
    state_bytes_per_column: int = 0
    """The same, for each source and each element of a row; tables as long as a row count, too."""
    random: bool = False
    """Whether it draws on ``Settings.keys``."""
    positional: bool = False
    """Whether it asks for ``Settings.position``."""
    decomposes: bool = False
    """Whether it decomposes matrices, so that an element takes the longer the larger its matrix is."""
    bound_to_shape: bool = False
    """Whether settings are made for tensors of one shape, and may suit no other."""
    sampler: Callable[[Any, Tile, Settings], None] | None = None
    """Takes a sample of the tensor into the state before the first pass, run after run in one tile; called
    for tensors of more elements than a sample has. What it sees may spare passes and changes no choice; but
    sums may come in other parts than without, so it has to be called for a tensor always or never."""
    access_of: Callable[[Settings], Access] | None = None
    """Of a method whose access depends on its settings: what they ask for, never more than ``access``."""
    check: Callable[[Settings], str | None] = no_objection
    """A sentence on why these settings cannot be computed with, or None."""
    identity: Callable[[Settings], int | None] = never_identity
    """Index of the one source whose bytes are the result unchanged, or None: such a tensor can be copied."""

    def access_with(self, settings: Settings) -> Access:
        """How much it must see at once under these settings."""
        return self.access if self.access_of is None else self.access_of(settings)

    def granule(self, settings: Settings) -> int:
        """Elements: tiles start at multiples of it within a tensor of ``settings.shape``."""
        match self.access_with(settings):
            case Access.ELEMENT:
                return 1
            case Access.ROW:
                return ROW_GROUP * settings.row_length
            case Access.TENSOR:
                return BLOCK
            case Access.MATRIX:
                return max(1, math.prod(settings.shape))

    def parameter(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if parameter.name == name), None)
