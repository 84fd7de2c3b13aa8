"""What a merge method declares about itself, and the statistics that its kernel takes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from raymerge.deferred import torch
from raymerge.methods.kernel import BLOCK, ROW_GROUP, Kernel, Settings, Stored, StoredKernel, Tile, Value
from raymerge.methods.reference import Reference


class Access(StrEnum):
    """How much of a logical tensor a kernel must see at once."""

    ELEMENT = "element"
    """Any run of elements."""
    ROW = "row"
    """Whole groups of ROW_GROUP rows (runs along the last dimension; a vector is one row), possibly after
    passes."""
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
    DELTAS = "deltas"
    INTEGERS = "integers"
    """Whole numbers that become others, and are read and written as they are."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting of a method in a recipe's ``parameters``."""

    name: str
    kind: Literal["float", "bool", "int"]
    scope: Literal["global", "source"]
    """One value per tensor, or one per source and tensor."""
    doc: str
    default: Value = None
    """None together with ``required=False`` means absent."""
    required: bool = False
    minimum: float | None = None
    maximum: float | None = None
    effective: bool = True
    """False for parameters that are accepted for mergekit's recipes and change nothing."""

    @classmethod
    def switch(cls, name: str, doc: str, *, default: bool, effective: bool = True) -> Parameter:
        return cls(name, "bool", "global", doc, default, effective=effective)

    @classmethod
    def fraction(
        cls,
        name: str,
        doc: str,
        default: float,
        *,
        scope: Literal["global", "source"] = "source",
        effective: bool = True,
    ) -> Parameter:
        """From 0 to 1."""
        return cls(name, "float", scope, doc, default, minimum=0.0, maximum=1.0, effective=effective)

    def coerce(self, value: float) -> float | bool | int:
        """The recipe's number as this parameter's type.

        Raises ValueError with a sentence when it is of another type, not finite or out of range."""
        if not math.isfinite(value):
            raise ValueError(f"{self.name} must be a finite number, is {value}")
        if self.kind == "bool":
            if value not in (0, 1):
                raise ValueError(f"{self.name} must be true or false, is {value}")
            return bool(value)
        is_above = self.minimum is None or value >= self.minimum
        if not is_above or (self.maximum is not None and value > self.maximum):
            raise ValueError(f"{self.name} must be {self._range()}, is {value}")
        if self.kind == "float":
            return float(value)
        if value != int(value):
            raise ValueError(f"{self.name} must be a whole number, is {value}")
        return int(value)

    def _range(self) -> str:
        if self.minimum is None:
            return f"at most {self.maximum:g}"
        if self.maximum is None:
            return f"at least {self.minimum:g}"
        return f"between {self.minimum:g} and {self.maximum:g}"


LAMBDA = Parameter("lambda", "float", "global", "factor on the merged delta", default=1.0)
INT8_MASK = Parameter.switch("int8_mask", "mergekit's way to save memory", default=False, effective=False)


def delta_weight(default: float | None = None) -> Parameter:
    doc = "coefficient of the source's delta"
    return Parameter("weight", "float", "source", doc, default, required=default is None)


def nothing(settings: Settings) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A merge method: its needs, its parameters and its kernel."""

    name: str
    """As in the recipe's ``merge_method``."""
    summary: str
    paper: str = "-"
    """arXiv id, or ``-``."""
    access: Access
    base: BaseUse = BaseUse.UNUSED
    takes: Takes = Takes.WEIGHTS
    kernel: Kernel
    reference: Reference
    """The result in float64, independently of the kernel: for audits and tests."""
    parameters: tuple[Parameter, ...] = ()
    """In the order of the documentation."""
    min_sources: int = 1
    max_sources: int | None = None
    """The base not counted; None for any number."""
    scratch: float = 1.0
    """Temporaries of ``apply`` and ``observe`` beside inputs and result, in float32 tiles of ``max(n,
    BLOCK)`` elements."""
    scratch_per_source: float = 0.0
    """The same, for each source."""
    state_bytes: int = 0
    """Bytes of the state for each source while a tensor is merged."""
    state_bytes_per_column: int = 0
    """The same, for each source and each element of a row; tables as long as a row count, too."""
    random: bool = False
    positional: bool = False
    decomposes: bool = False
    """Whether it decomposes matrices: the time of an element grows with its matrix."""
    statistics: Literal["fisher"] | None = None
    """What a calibration collects for it: of each source one more input of the same shape, behind all
    sources. A tensor without them is a mean by ``weight``."""
    leaves_base: bool = False
    """Whether an unlisted base takes no part, although a source needs no parameters: it has no texts."""
    bound_to_shape: bool = False
    """Whether settings depend on the tensor's shape."""
    sampler: Callable[[Any, Tile, Settings], None] | None = None
    """Adds a sample of the tensor (runs in one tile) to the state before the first pass, for tensors larger
    than a sample. It may save passes and changes no selection; but it may regroup sums, so it must be called
    for a tensor always or never."""
    access_of: Callable[[Settings], Access] | None = None
    """For a method whose access depends on its settings; never more than ``access``."""
    kernel_of: Callable[[Settings], Kernel] | None = None
    """For a method that has several kernels, of which its settings choose; ``kernel`` is one of them."""
    check: Callable[[Settings], str | None] = nothing
    """A sentence on why these settings cannot be computed with, or None."""
    identity: Callable[[Settings], int | None] = nothing
    """Index of the source that is the unchanged result, so that it can be copied; or None."""

    def access_with(self, settings: Settings) -> Access:
        return self.access if self.access_of is None else self.access_of(settings)

    def kernel_with(self, settings: Settings) -> Kernel:
        return self.kernel if self.kernel_of is None else self.kernel_of(settings)

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


# Statistics ----------------------------------------------------------------------------------------

SAMPLE_RUNS, SAMPLE_LENGTH = 256, 512
"""The largest sample of a tensor: runs, evenly spread, and elements of each."""

# A sample is one element of so many, in runs of no fewer elements than that.
_ONE_IN, _SHORTEST_RUN = 16, 64


def sample_runs(num_elements: int) -> tuple[tuple[int, int], ...]:
    """First element and length of each run of a sample; none for a tensor no longer than the largest sample.
    They depend on the tensor's length alone, and so do results."""
    if num_elements <= SAMPLE_RUNS * SAMPLE_LENGTH:
        return ()
    step, length = _spacing(num_elements)
    return tuple((run * step, length) for run in range(SAMPLE_RUNS))


def _spacing(num_elements: int) -> tuple[int, int]:
    """Elements from the start of one run to that of the next, and in a run. Small tensors have smaller
    samples, which must not cost more than they save."""
    length = min(SAMPLE_LENGTH, max(_SHORTEST_RUN, num_elements // (_ONE_IN * SAMPLE_RUNS)))
    return (num_elements - length) // (SAMPLE_RUNS - 1), length


def sampled(values: torch.Tensor, num_elements: int) -> torch.Tensor:
    step, length = (each * (values.shape[-1] // num_elements) for each in _spacing(num_elements))
    return values.unfold(-1, length, step)[..., :SAMPLE_RUNS, :].flatten(-2)


def sample_of(whole: Tile) -> Tile:
    num_elements = whole.sources.shape[1]
    base = None if whole.base is None else sampled(whole.base, num_elements)
    return Tile(base, sampled(whole.sources, num_elements), 0)


def gather(
    method: Method,
    settings: Settings,
    num_elements: int,
    device: torch.device,
    *,
    tiles: Callable[[], Iterable[Tile | Stored]],
    sample: Callable[[], Tile] | None,
) -> Any:
    """The state that ``apply`` needs; None for a method without passes.

    ``tiles`` is called for each pass and gives all tiles of the tensor in order; to a ``StoredKernel`` they
    may come as stored. ``sample`` gives the tensor's ``sample_runs`` as one tile; it is called only for a
    method that takes a sample, of a tensor that has one. None where a sample cannot be had."""
    gathering = Gathering(method, (settings,), num_elements, device)
    if sample is not None and gathering.takes_sample:
        gathering.add_sample(sample())
    while not gathering.is_done:
        for tile in tiles():
            gathering.observe(tile)
        gathering.end_pass()
    return gathering.states[0]


class Gathering:
    """The statistics of one tensor, pass by pass, for settings with which tiles are observed alike."""

    def __init__(
        self, method: Method, settings: Sequence[Settings], num_elements: int, device: torch.device
    ) -> None:
        self._kernel = method.kernel_with(settings[0])
        self._sampler = method.sampler if sample_runs(num_elements) else None
        self._settings = tuple(settings)
        self._usual = self._kernel.passes(settings[0])
        self._index = 0
        self._wants_more = False
        self._state = self._kernel.begin(settings[0], num_elements, device) if self._usual else None
        self.states: tuple[Any, ...] = (self._state,) * len(settings)
        """One for each of the settings, for ``apply`` once it is done; None for a method without passes."""

    @property
    def takes_sample(self) -> bool:
        return self._usual > 0 and self._sampler is not None

    @property
    def is_done(self) -> bool:
        return self._index >= self._usual and not self._wants_more

    def add_sample(self, sample: Tile) -> None:
        assert self._sampler is not None
        self._sampler(self._state, sample, self._settings[0])

    def observe(self, tile: Tile | Stored) -> None:
        if isinstance(tile, Tile):
            self._kernel.observe(self._state, tile, self._settings[0], self._index)
        elif isinstance(self._kernel, StoredKernel):
            self._kernel.observe_stored(self._state, tile, self._settings[0], self._index)

    def end_pass(self) -> None:
        others = self._settings[1:]
        before = [copy(self._state) for _ in others]
        self._wants_more = self._kernel.conclude(self._state, self._settings[0], self._index)
        if self._kernel.concludes_each:
            for state, settings in zip(before, others, strict=True):
                self._kernel.conclude(state, settings, self._index)
            self.states = (self._state, *before)
        else:
            self.states = (self._state, *[copy(self._state) for _ in others])
        self._index += 1
