"""What a merge method declares about itself, and what its kernel is given.

A method is tensors in, a tensor out: no files, names, logging, clocks or ambient randomness. What it
needs to know of a tensor beside its elements (parameters, random keys, shape) comes in ``Settings``.

Kernels that take bfloat16 as it is stored, and give it as it will be stored: a whole tile in one call.

Most merges are of bfloat16 into bfloat16. Going through a tile piece by piece, calls back and forth take
longer there than the arithmetic; and each of them asks for the lock that all of a worker's threads share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A run of elements of one logical tensor, from every input, in bfloat16 and on the processor."""

    words: NDArray[np.uint16]
    """Memory that holds the inputs."""
    places: NDArray[np.int64]
    """Where in it each input begins, ``[inputs]``; the base first where there is one."""
    count: int
    """Elements of the run."""
    start: int
    """Index of the first element within the logical tensor."""

    def part(self, first: int, count: int) -> Stored:
        """Some of the elements."""
        return replace(self, places=self.places + first, count=count, start=self.start + first)


@dataclass(frozen=True, slots=True)
class AnchoredSum:
    """``v_a - e (0 - v_a) - sum c_i (v_a - v_i)`` of the sources v, in this order, each step rounded."""

    coefficients: tuple[float, ...]
    """c, one for each source; that of the anchor does not count."""
    anchor: int
    """a."""
    excess: float
    """e; 0 for nothing of that kind."""


@runtime_checkable
class AnchoredKernel(Protocol):
    """What a kernel has besides when its result is such a sum, so that others may compute it."""

    def anchored(self, settings: Settings) -> AnchoredSum | None:
        """The sum that ``apply`` gives, bit for bit; None where these settings ask for something else."""


@runtime_checkable
class StoredKernel(Protocol):
    """What a kernel has beside ``observe`` and ``apply`` when it can do the same to stored elements.

    Bits are the same either way. Deltas are made of the base, which comes first, where the method takes them.
    """

    def observe_stored(self, state: Any, stored: Stored, settings: Settings, pass_index: int) -> bool:
        """Take in a tile; False, and nothing done, where these settings or this pass ask for pieces."""

    def apply_stored(self, stored: Stored, settings: Settings, state: Any, out: NDArray[np.uint16]) -> bool:
        """Write the result's elements into ``out`` ``[count]``, rounded; False as above. What is possible
        is so for all parts of a tensor, and shows with a part of no elements."""


# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not


BLOCK = 65_536
"""Elements; every tile of a TENSOR method starts at a multiple of it within its logical tensor."""

ROW_GROUP = 16
"""Rows; every tile of a ROW method starts at a multiple of it within its logical tensor, so that what is
summed over rows can be folded in groups that no tiling cuts."""

SAMPLE_RUNS, SAMPLE_LENGTH = 256, 512
"""A sample of a tensor: so many runs of so many elements at most, evenly spread over it."""

Value: TypeAlias = float | bool | int | None


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
    """The type of its value."""
    scope: Literal["global", "source"]
    """One value per tensor, or one per source and tensor."""
    doc: str
    """What it does, in a phrase."""
    default: Value = None
    """Value when the recipe gives none; None together with ``required=False`` means absent."""
    required: bool = False
    """Whether the recipe must give it."""
    minimum: float | None = None
    """Smallest value allowed."""
    maximum: float | None = None
    """Largest value allowed."""
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


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a kernel may depend on besides the elements."""

    values: Mapping[str, Value]
    """Global parameters by name, defaults filled in."""
    sources: tuple[Mapping[str, Value], ...]
    """Per-source parameters in recipe order, defaults filled in; the base is not among them."""
    keys: tuple[int, ...] = ()
    """One 64-bit random key per source; empty unless the method is random."""
    shape: tuple[int, ...] = ()
    """Shape of the logical tensor."""
    position: float = 0.0
    """Of a positional method: 0 at the first layer of the output, 1 at the last one, 0 outside layers."""

    @property
    def row_length(self) -> int:
        """Elements of a row: of the last dimension; 1 for a scalar and for rows without elements."""
        return max(1, self.shape[-1]) if self.shape else 1

    def number(self, name: str) -> float:
        """A global parameter that has a value, as a float."""
        return _number(self.values, name)

    def flag(self, name: str) -> bool:
        """A global switch."""
        return bool(self.values[name])

    def per_source(self, name: str) -> tuple[float, ...]:
        """A parameter of each source, as floats in recipe order."""
        return tuple(_number(source, name) for source in self.sources)


def _number(values: Mapping[str, Value], name: str) -> float:
    value = values[name]
    if value is None:
        raise ValueError(f"{name} has no value")
    return float(value)


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of elements of one logical tensor, from every input. Kernels never write into it."""

    base: torch.Tensor | None
    """float32 ``[n]``; None when the method uses no base."""
    sources: torch.Tensor
    """float32 ``[N, n]``, a row for each source in recipe order: weights, or deltas for ``Takes.DELTAS``. The
    elements of a row lie side by side."""
    start: int
    """Index of the first element within the logical tensor."""

    def require_base(self) -> torch.Tensor:
        """The base's elements.

        Raises:
            ValueError: the tile was made without a base.
        """
        if self.base is None:
            raise ValueError("this method needs the base's elements and the tile has none")
        return self.base


class Kernel(Protocol):
    """The arithmetic of a method. Stateless itself: statistics live in the state that ``begin`` makes."""

    def passes(self, settings: Settings) -> int:
        """Statistics passes over the whole tensor that ``apply`` needs before it, as a rule."""

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Any:
        """The state of one tensor's statistics; asked for only when there are passes."""

    def observe(self, state: Any, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Take in one tile; tiles come in order and cover the tensor exactly once per pass."""

    def conclude(self, state: Any, settings: Settings, pass_index: int) -> bool:
        """End a pass; whether one more is needed, beyond those that ``passes`` foresees."""

    def apply(self, tile: Tile, settings: Settings, state: Any) -> torch.Tensor:
        """The result's elements for this tile, float32 ``[n]``, on the tile's device; ``state`` is None
        when there were no passes."""


class SinglePass:
    """The statistics half of a kernel that needs no statistics."""

    def passes(self, settings: Settings) -> int:
        """None: the tensor streams once."""
        return 0

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> None:
        """Nothing to keep."""

    def observe(self, state: None, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Nothing to learn from a tile."""

    def observe_stored(self, state: None, stored: Stored, settings: Settings, pass_index: int) -> bool:
        """Nothing to learn."""
        return False

    def conclude(self, state: None, settings: Settings, pass_index: int) -> bool:
        """Nothing to end."""
        return False


class KernelBySettings(ABC):
    """A kernel that is one of several, which the settings choose."""

    @abstractmethod
    def chosen(self, settings: Settings) -> Kernel:
        """The kernel for these settings."""

    def passes(self, settings: Settings) -> int:
        """As the chosen one."""
        return self.chosen(settings).passes(settings)

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Any:
        """As the chosen one."""
        return self.chosen(settings).begin(settings, num_elements, device)

    def observe(self, state: Any, tile: Tile, settings: Settings, pass_index: int) -> None:
        """As the chosen one."""
        self.chosen(settings).observe(state, tile, settings, pass_index)

    def conclude(self, state: Any, settings: Settings, pass_index: int) -> bool:
        """As the chosen one."""
        return self.chosen(settings).conclude(state, settings, pass_index)

    def apply(self, tile: Tile, settings: Settings, state: Any) -> torch.Tensor:
        """As the chosen one."""
        return self.chosen(settings).apply(tile, settings, state)

    def observe_stored(self, state: Any, stored: Stored, settings: Settings, pass_index: int) -> bool:
        """As the chosen one, where it can."""
        kernel = self.chosen(settings)
        return isinstance(kernel, StoredKernel) and kernel.observe_stored(state, stored, settings, pass_index)

    def apply_stored(self, stored: Stored, settings: Settings, state: Any, out: NDArray[np.uint16]) -> bool:
        """As the chosen one, where it can."""
        kernel = self.chosen(settings)
        return isinstance(kernel, StoredKernel) and kernel.apply_stored(stored, settings, state, out)


Floats: TypeAlias = NDArray[np.float64]

DOUBT = 2.0**-20
"""Share of a magnitude that some float32 operations may lose: sixteen roundings."""

_MAX_BLOCK = 1 << 18
"""Elements of a block at most: longer ones are no faster."""


class Elements(Protocol):
    """The elements of one logical tensor, in its row-major order."""

    @property
    def held(self) -> int:
        """Bytes of memory that it takes beside the run in hand."""

    def read(self, start: int, stop: int) -> tuple[Floats, Floats | None]:
        """A run of elements ``[n]``, and by how much each may differ from what float32 arithmetic has there.

        None where they are float32 numbers, exactly.
        """


@dataclass(frozen=True, slots=True)
class Block:
    """A run of elements of one logical tensor, from every input, in float64."""

    start: int
    """Index of its first element."""
    base: Floats | None
    """``[n]``; None without a base."""
    sources: Floats
    """``[N, n]``: weights, or deltas rounded to float32, as a merge takes them."""
    doubts: Floats | None
    """``[N, n]``: by how much the sources may differ from a merge's; None where they are equal."""
    base_doubt: Floats | None = None
    """``[n]``, the same of the base."""

    @property
    def indices(self) -> NDArray[np.int64]:
        """Indices of its elements."""
        return np.arange(self.start, self.start + self.sources.shape[1], dtype=np.int64)

    @property
    def largest(self) -> Floats:
        """The largest magnitude of any input, for each element."""
        largest = np.abs(self.sources).max(0, initial=0.0)
        return largest if self.base is None else np.asarray(np.maximum(largest, np.abs(self.base)))

    @property
    def input_doubt(self) -> Floats | float:
        """The largest doubt of any input, for each element."""
        found: Floats | float = 0.0 if self.doubts is None else self.doubts.max(0)
        return found if self.base_doubt is None else np.maximum(found, self.base_doubt)


@dataclass(slots=True)
class Expected:
    """What a run of elements should be."""

    values: Floats
    """``[n]``."""
    doubt: Floats
    """``[n]``: how far float32 arithmetic may be from that before it is rounded to what is stored. Infinite
    where nothing can be said."""
    others: list[tuple[NDArray[np.int64], Floats]] = field(default_factory=list)
    """What some of them, by their places in the run, may be as well: they lie so near a threshold that
    float32 arithmetic may see them on its other side."""


class LogicalTensor:
    """A logical tensor that can be read a block at a time."""

    def __init__(
        self, inputs: Sequence[Elements], settings: Settings, *, has_base: bool, takes_deltas: bool, room: int
    ) -> None:
        """
        Args:
            inputs: the base first where there is one.
            settings: parameters, keys and shape.
            has_base: whether there is one.
            takes_deltas: whether sources are differences to it.
            room: bytes of memory that a pass over the tensor may take.
        """
        self.settings = settings
        """Parameters, keys and shape."""
        self.num_elements = math.prod(settings.shape)
        """Its elements."""
        self.num_sources = len(inputs) - has_base
        """Sources, the base not counted."""
        self.room = room
        """Bytes of memory that a pass over it may take."""
        self._inputs = inputs
        self._has_base = has_base
        self._takes_deltas = takes_deltas

    @property
    def row_length(self) -> int:
        """Elements of a row."""
        return self.settings.row_length

    @property
    def held(self) -> int:
        """Bytes of memory that its inputs take beside the block in hand."""
        return sum(each.held for each in self._inputs)

    def block(self, start: int, stop: int) -> Block:
        """A run of elements."""
        found = [each.read(start, stop) for each in self._inputs]
        values = np.stack([value for value, _ in found])
        is_exact = all(doubt is None for _, doubt in found)
        doubts = None
        if not is_exact:
            doubts = np.stack([np.zeros_like(value) if doubt is None else doubt for value, doubt in found])
        if not self._has_base:
            return Block(start, None, values, doubts)
        base, sources = values[0], values[1:]
        if self._takes_deltas:
            # Part of the definition: arithmetic is float32, and begins with the difference.
            sources = (sources - base).astype(np.float32).astype(np.float64)
        if doubts is None:
            return Block(start, base, sources, None)
        own = doubts[1:] + doubts[0] if self._takes_deltas else doubts[1:]
        return Block(start, base, sources, own, doubts[0])

    def blocks(self) -> Iterator[Block]:
        """The whole tensor, in whole rows where these are not too long for the memory."""
        length = self.block_length(whole_rows=True)
        for start in range(0, self.num_elements, length):
            yield self.block(start, min(start + length, self.num_elements))

    def block_length(self, *, whole_rows: bool) -> int:
        """Elements that may be in hand at once."""
        most = max(1, min(_MAX_BLOCK, self.room // self._element_bytes))
        return max(1, most // self.row_length) * self.row_length if whole_rows else most

    @property
    def needed(self) -> int:
        """Bytes of memory that all of it would take at once."""
        return self.num_elements * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        """Bytes of an element in hand: inputs as stored and in float64, and what is computed of them."""
        return 8 * (6 * len(self._inputs) + 20)


class Undecided(Exception):  # noqa: N818 - says why there is no answer, and is no error of anybody
    """What a tensor should be hangs on rounding."""


@dataclass(frozen=True, slots=True)
class Reference:
    """How a method's result is recomputed in float64, for audits and tests.

    Written from the paper's formula in numpy alone: it shares no arithmetic with the kernel.
    """

    prepare: Callable[[LogicalTensor], Callable[[Block], Expected]]
    """Looks at as much of the tensor as the formula has to know of it, and makes the formula of its blocks.
    Raises Undecided where the result hangs on rounding."""
    by_row: bool = False
    """Whether blocks must be whole rows."""
    whole: bool = False
    """Whether it holds a whole matrix at once; never a vector, which has nothing to be decomposed."""

    def holds_whole(self, settings: Settings) -> bool:
        """Whether it holds the whole tensor at once under these settings."""
        return self.whole and len(settings.shape) > 1


def elementwise(formula: Callable[[LogicalTensor, Block], Expected]) -> Reference:
    """The reference of a formula that needs to know nothing of the rest of the tensor."""
    return Reference(partial(partial, formula))


def no_objection(settings: Settings) -> str | None:  # noqa: ARG001
    """The check of a method that any settings suit."""
    return None


def never_identity(settings: Settings) -> int | None:  # noqa: ARG001
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
    """How much it must see at once."""
    base: BaseUse
    """What it does with ``base_model``."""
    takes: Takes
    """What it gets as sources."""
    kernel: Kernel
    """Its arithmetic."""
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
        """The parameter of that name, or None."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)
