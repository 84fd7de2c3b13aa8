"""What is computed for an output: the method with its plain numbers, and the reads that feed it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.methods import Method, Settings, Takes, find_method

COPY = "copy"


@dataclass(frozen=True, slots=True)
class Expression:
    """A short list of operations: read, subtract, method, cast. A copy moves bytes and computes nothing."""

    method: str
    """Method name, or ``copy``."""
    has_base: bool
    """Whether the first read of each part is the base."""
    settings: str
    """Canonical JSON of the settings: ``{"sources": [...], "values": {...}}``."""
    cast: DType
    """Dtype of the output's bytes."""

    @property
    def is_copy(self) -> bool:
        """Whether the bytes are moved unread."""
        return self.method == COPY

    def bind(self, *, keys: tuple[int, ...], shape: tuple[int, ...]) -> Settings:
        """The settings as a kernel takes them, for one logical tensor."""
        decoded: Mapping[str, Any] = json.loads(self.settings)
        return Settings(values=decoded["values"], sources=tuple(decoded["sources"]), keys=keys, shape=shape)

    def text(self) -> str:
        """Post-order text: ``read* subtract ties {...} cast BF16``."""
        if self.is_copy:
            return "read copy"
        method = find_method(self.method)
        deltas = "subtract " if method is not None and method.takes is Takes.DELTAS else ""
        reads = "read(base) " if self.has_base else ""
        return f"{reads}read(sources) {deltas}{self.method} {self.settings} cast {self.cast.value}"


def make_expression(method: Method, settings: Settings, *, has_base: bool, cast: DType) -> Expression:
    """The expression of a method applied with these settings."""
    numbers = {"sources": [dict(s) for s in settings.sources], "values": dict(settings.values)}
    return Expression(method.name, has_base, json.dumps(numbers, sort_keys=True, separators=(",", ":")), cast)


def copy_expression(dtype: DType) -> Expression:
    """The expression of bytes that pass untouched."""
    return Expression(COPY, False, '{"sources":[],"values":{}}', dtype)


def conversion_expression(dtype: DType) -> Expression:
    """The expression of one source's values written in another dtype."""
    return Expression("passthrough", False, '{"sources":[{}],"values":{}}', dtype)


@dataclass(frozen=True, slots=True)
class Read:
    """One source's bytes for one part of a row."""

    part: int
    """Position of the part in the row."""
    source: int
    """Index of the source."""
    key: str
    """File of the source."""
    offset: int
    """First byte in that file."""
    nbytes: int
    """Bytes to read."""
    dtype: DType
    """How they are stored."""
    view: View | None
    """Where the logical elements lie within these bytes, in elements; None: row-major, all of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One logical tensor within a row."""

    logical: str
    """Its canonical name, by which chance is drawn."""
    shape: tuple[int, ...]
    """Logical shape."""
    view: View | None
    """Where its elements lie within the row; None: the row is this part, row-major."""


@dataclass(frozen=True, slots=True)
class Row:
    """A contiguous run of an output tensor that is made at once or in tiles."""

    num_elements: int
    """Elements in the run."""
    expression: Expression
    """What is computed."""
    parts: tuple[Part, ...]
    """Its logical tensors."""
    reads: tuple[Read, ...]
    """Their bytes, by part, the base first where there is one."""

    @property
    def is_flat(self) -> bool:
        """Whether every element of output and inputs lies in the same order, so that any tile may be cut."""
        return len(self.parts) == 1 and self.parts[0].view is None and all(r.view is None for r in self.reads)

    @property
    def nbytes(self) -> int:
        """Bytes of the run in the output."""
        return self.expression.cast.nbytes(self.num_elements)

    def content(self) -> tuple[object, ...]:
        """Equal contents give equal bytes; unequal ones may."""
        method = find_method(self.expression.method)
        drawn = method is not None and method.random
        names = tuple(part.logical for part in self.parts) if drawn else ()
        return (self.expression, self.num_elements, self.reads, tuple(p.view for p in self.parts), names)


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the output checkpoint."""

    name: str
    """Output name."""
    dtype: DType
    """Dtype in the file."""
    shape: tuple[int, ...]
    """Shape in the file."""
    rows: tuple[Row, ...]
    """Its runs in order; together they are the whole tensor."""
    check_finite: bool
    """Whether NaN or infinity in it is an error (not so for recomputed buffers)."""
