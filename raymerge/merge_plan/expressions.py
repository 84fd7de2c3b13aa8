"""What is computed for an output: the method with its plain numbers, and the reads that feed it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.quantisation.encoding import Encoding, Made, QuantSpec
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.methods import BLOCK, ROW_GROUP, Access, Method, Settings, Takes, find_method

COPY = "copy"
CONSTANT = "constant"
MADE: Mapping[Made, str] = MappingProxyType(
    {"scales": "scales", "tensor_scale": "scale", "zero_points": "zero points"}
)
"""What is made with codes, which names the expressions of it, and what it is called there."""

_BYTES = "bytes"


@dataclass(frozen=True)
class Expression:
    """A short list of operations: read, subtract, method, cast. A copy moves bytes and computes nothing; a
    constant has its bytes in its settings."""

    method: str
    """Method name, or ``copy``, ``constant`` or one of ``MADE``."""
    has_base: bool
    """Whether the first read of each part is the base."""
    settings: str
    """Canonical JSON of the settings: ``{"sources": [...], "values": {...}}``, of a positional method
    ``"position"`` too, and of whole numbers that become others ``"numbers"``."""
    cast: DType
    """Dtype of the output's bytes; where they are codes, that of one code."""
    encode: Encoding | None = None
    """How numbers become codes with scales; None where they are written as they are."""

    @cached_property
    def is_scales(self) -> bool:
        """Whether the bytes are made with those of other ops."""
        return self.method in MADE

    @cached_property
    def is_copy(self) -> bool:
        return self.method == COPY

    @cached_property
    def is_constant(self) -> bool:
        return self.method == CONSTANT

    @cached_property
    def is_unread(self) -> bool:
        return self.is_constant or self.is_scales

    def made_dtype(self, what: Made) -> DType | None:
        """Dtype of what is made with its codes; None where it is not."""
        return None if self.encode is None else self.encode.made_dtype(what)

    @cached_property
    def content(self) -> bytes:
        return bytes.fromhex(self._numbers["values"][_BYTES])

    @cached_property
    def _numbers(self) -> Mapping[str, Any]:
        decoded: Mapping[str, Any] = json.loads(self.settings)
        return decoded

    @cached_property
    def definition(self) -> Method | None:
        """The method; None for copies and for what is not computed."""
        return find_method(self.method)

    def bind(self, *, keys: tuple[int, ...], shape: tuple[int, ...]) -> Settings:
        decoded = self._numbers
        return Settings(
            values=decoded["values"],
            sources=tuple(decoded["sources"]),
            keys=keys,
            shape=shape,
            position=decoded.get("position", 0.0),
            numbers=tuple(decoded.get("numbers", ())),
        )

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Whether any run of the elements can be made by itself; not where codes share one scale."""
        if self.is_copy or self.is_unread:
            return True
        if self.encode is not None and self.encode.tensor_scale_dtype is not None:
            return False
        method, settings = self.definition, self.bind(keys=(), shape=shape)
        return method is not None and method.access_with(settings) is Access.ELEMENT

    def text(self) -> str:
        """Post-order text: ``read* subtract ties {...} cast BF16``."""
        if self.is_copy:
            return "read copy"
        if self.is_scales:
            words = self.method.replace("_", " ")
            return "scale of all codes" if self.method == "tensor_scale" else f"{words} of codes"
        if self.is_constant:
            return f"bytes {self.content.hex()}"
        method = self.definition
        deltas = "subtract " if method is not None and method.takes is Takes.DELTAS else ""
        reads = "read(base) " if self.has_base else ""
        written = f"encode {self.encode.format.word}" if self.encode else f"cast {self.cast.value}"
        return f"{reads}read(sources) {deltas}{self.method} {self.settings} {written}"


def make_expression(
    method: Method, settings: Settings, *, has_base: bool, cast: DType, encode: Encoding | None = None
) -> Expression:
    numbers: dict[str, Any] = {
        "sources": [dict(s) for s in settings.sources],
        "values": dict(settings.values),
    }
    if method.positional:
        numbers["position"] = settings.position
    if settings.numbers:
        numbers["numbers"] = list(settings.numbers)
    text = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
    return Expression(method.name, has_base, text, cast, encode)


_NOTHING = '{"sources":[],"values":{}}'
# One for each dtype: plans have a hundred thousand ops of one expression.
_COPIES: Mapping[DType, Expression] = MappingProxyType(
    {dtype: Expression(COPY, False, _NOTHING, dtype) for dtype in DType}
)
_MADE: Mapping[tuple[DType, Made], Expression] = MappingProxyType(
    {(dtype, what): Expression(what, False, _NOTHING, dtype) for dtype in DType for what in MADE}
)


def copy_expression(dtype: DType) -> Expression:
    return _COPIES[dtype]


def constant_expression(dtype: DType, content: bytes) -> Expression:
    """The expression of bytes that are known when the plan is made."""
    settings = {"sources": [], "values": {_BYTES: content.hex()}}
    return Expression(CONSTANT, False, json.dumps(settings, separators=(",", ":")), dtype)


def conversion_expression(dtype: DType, encode: Encoding | None = None) -> Expression:
    """The expression of one source's values written in another dtype or format."""
    return Expression("passthrough", False, '{"sources":[{}],"values":{}}', dtype, encode)


def made_expression(dtype: DType, what: Made) -> Expression:
    """The expression of what is made with codes, and not by itself."""
    return _MADE[dtype, what]


def made_part(logical: str, what: Made) -> str:
    """What the scales of a logical tensor are called where they are made with its codes."""
    return f"{logical} {MADE[what]}"


class Scales(NamedTuple):
    """What makes numbers of codes: the scales of their blocks."""

    encoding: Encoding
    columns: int
    """Columns of the matrix that the codes are rows of."""
    key: str
    offset: int
    """First byte in that file: of the scales of the first row that is read."""
    nbytes: int
    tensor_key: str = ""
    """File of the one scale of the whole tensor; "" where there is none."""
    tensor_offset: int = 0
    zeros_key: str = ""
    """File of the zero points of the blocks; "" where there are none."""
    zeros_offset: int = 0

    @property
    def tensor_nbytes(self) -> int:
        return self.encoding.tensor_scale_nbytes

    @property
    def zeros_nbytes(self) -> int:
        return self.encoding.zero_points_nbytes(self.nbytes, self.columns)

    @property
    def read_nbytes(self) -> int:
        whole = self.nbytes + self.encoding.tensor_scale_nbytes
        return whole if self.encoding.format.zero_points is None else whole + self.zeros_nbytes

    @property
    def unit(self) -> int:
        """Elements that scales and zero points are read for together."""
        return self.encoding.cut_height * self.columns

    def of(self, first: int, count: int) -> tuple[int, int]:
        """First byte and number of bytes of the scales of a run of elements that begins at a unit."""
        return self._run("scales", self.offset, first, count)

    def zeros_of(self, first: int, count: int) -> tuple[int, int]:
        return self._run("zero_points", self.zeros_offset, first, count)

    def _run(self, what: Made, offset: int, first: int, count: int) -> tuple[int, int]:
        begin = self.encoding.made_nbytes(what, first // self.columns, self.columns)
        end = self.encoding.made_nbytes(what, -(-(first + count) // self.columns), self.columns)
        return offset + begin, end - begin

    def part(self, first: int, count: int) -> Scales:
        """Those of a run of elements that begins at a unit."""
        (offset, nbytes), (zeros_offset, _) = self.of(first, count), self.zeros_of(first, count)
        return self._replace(offset=offset, nbytes=nbytes, zeros_offset=zeros_offset)


class Read(NamedTuple):
    """One source's bytes for one part of an op."""

    part: int
    source: int
    key: str
    offset: int
    nbytes: int
    dtype: DType
    view: View | None
    """Where the logical elements lie within these bytes, in elements; None: row-major, all of them."""
    gather: Gather | None = None
    """What the input is gathered from; the other fields then name the bytes of its first input. None: the
    input is these bytes."""
    scales: Scales | None = None
    """What makes numbers of these bytes where they are codes; None: they are numbers."""

    @property
    def is_row_major(self) -> bool:
        """Whether its elements lie in logical order, so that any run of them can be read by itself."""
        if self.gather is None:
            return self.view is None
        return self.view is None and all(
            gather_input.read.view is None for gather_input in self.gather.inputs
        )

    def has_bytes_of(self, other: Read) -> bool:
        """Whether it is made of the same bytes, whatever is taken of them."""
        if self.gather is not None or other.gather is not None:
            return False
        mine = self.source, self.key, self.offset, self.nbytes, self.scales
        return mine == (other.source, other.key, other.offset, other.nbytes, other.scales)

    def bytes_for(self, num_elements: int) -> int:
        """Bytes to read for an op of so many elements."""
        if self.gather is not None:
            return self.gather.bytes_for(num_elements)
        return self.nbytes + (self.scales.read_nbytes if self.scales is not None else 0)


@dataclass(frozen=True, slots=True)
class Product:
    """An addition ``scale * up @ down`` to a stored matrix ``[rows, columns]``, and DoRA's magnitude.

    LoRA: arXiv 2106.09685; DoRA: arXiv 2402.09353; RegMean: arXiv 2212.09849."""

    up: Read | None
    """``[rows, rank]``, or ``[columns, rank]`` where transposed; None for the stored matrix itself."""
    down: Read
    """``[rank, columns]``, or ``[rank, rows]`` where transposed."""
    rank: int
    """Columns of ``up`` and rows of ``down``."""
    scale: float
    transposed: bool = False
    """Whether the transpose of ``up @ down`` is added: to embeddings, to matrices stored ``[in, out]``."""
    magnitude: Read | None = None
    """``[rows]``: each row of the sum is given this length. Only where not transposed."""

    @property
    def factors(self) -> tuple[Read, ...]:
        return tuple(each for each in (self.up, self.down, self.magnitude) if each is not None)


@dataclass(frozen=True, slots=True)
class GatherInput:
    read: Read
    """The whole matrix, with its view where it lies within a fused tensor."""
    num_rows: int
    """Its rows; it has as many columns as the gather."""
    product: Product | None = None
    """What is added to it before rows are taken."""

    @property
    def factors(self) -> tuple[Read, ...]:
        return () if self.product is None else self.product.factors


@dataclass(frozen=True, slots=True)
class Gather:
    """A matrix made of rows of stored ones.

    A row that several inputs give is their mean; one that none gives is zeros."""

    num_rows: int
    num_columns: int
    """Its columns; 1 for a vector whose elements are taken one by one."""
    inputs: tuple[GatherInput, ...]
    """What rows are taken from; the first one stands for all in messages."""
    runs: tuple[tuple[int, int, int, int], ...]
    """``(to_row, from_row, count, input)`` each, by ``to_row`` and then ``input``; an input gives a row once
    at most."""
    real_rows: int
    """Rows from here on are padding: the mean of all rows before."""

    @property
    def is_padded(self) -> bool:
        return self.real_rows < self.num_rows

    @property
    def nbytes(self) -> int:
        return sum(
            read.nbytes for gather_input in self.inputs for read in (gather_input.read, *gather_input.factors)
        )

    def bytes_for(self, num_elements: int) -> int:
        """Bytes to read for an op of so many elements: for the rows that they lie in, the average of all."""
        rows = min(self.num_rows, -(-num_elements // self.num_columns))
        return rows * (self.nbytes // max(1, self.num_rows))


def gathered(part: int, gather: Gather) -> Read:
    return gather.inputs[0].read._replace(part=part, gather=gather)


def group_multiple(columns: int) -> int:
    """Elements of the fewest whole groups of rows that are a BLOCK at least."""
    group = ROW_GROUP * columns
    return -(-BLOCK // group) * group


class Part(NamedTuple):
    logical: str
    """Its canonical name, by which chance is drawn."""
    shape: tuple[int, ...]
    view: View | None
    """Where its elements lie within the op; None: the op is this part, row-major."""

    @property
    def columns(self) -> int:
        """Of a matrix, elements of a row of the tensor that it lies in."""
        return self.shape[-1] if self.view is None else self.view.columns


class Op(NamedTuple):
    """A contiguous run of an output tensor that is made at once or in tiles."""

    num_elements: int
    expression: Expression
    parts: tuple[Part, ...]
    reads: tuple[Read, ...]
    """Their bytes, by part, the base first where there is one."""

    @property
    def is_flat(self) -> bool:
        """Whether every element of output and inputs lies in the same order, so that any tile may be cut."""
        return len(self.parts) == 1 and self.parts[0].view is None and all(r.is_row_major for r in self.reads)

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.expression.cast.bits // 8

    @property
    def read_bytes(self) -> int:
        count, reads = self.num_elements, self.reads
        if len(self.parts) > 1:
            repeated = repeated_reads(reads, len(self.parts))
            reads = tuple(read for read, again in zip(reads, repeated, strict=True) if not again)
        return sum([read.bytes_for(count) for read in reads])

    @property
    def cost(self) -> int:
        return self.read_bytes + self.nbytes

    def content(self) -> tuple[object, ...]:
        """Equal contents give equal bytes; unequal ones may."""
        method = self.expression.definition
        drawn = method is not None and method.random
        names = tuple(part.logical for part in self.parts) if drawn else ()
        return (self.expression, self.num_elements, self.reads, tuple(p.view for p in self.parts), names)


def repeated_reads(reads: Sequence[object], num_parts: int) -> list[bool]:
    """Of each input of an op whether it is the bytes of that of the part before: then they are read once.
    Only of a ``Read`` is known where its bytes are."""
    if num_parts < 2:
        return [False] * len(reads)
    per_part = len(reads) // num_parts
    repeated = [False] * per_part
    for before, read in zip(reads, reads[per_part:], strict=False):
        repeated.append(isinstance(before, Read) and isinstance(read, Read) and read.has_bytes_of(before))
    return repeated[: len(reads)]


@dataclass(frozen=True, slots=True)
class QuantisedOutput:
    """The stored tensors that an output of codes with scales becomes."""

    quant_spec: QuantSpec
    codes: str
    scales: str
    """Name of the tensor of scales that are made with the codes; "" for none, and where they are copied."""
    others: tuple[Output, ...] = ()
    tensor_scale: TensorSpec | None = None
    """The tensor of the one scale of each matrix, where that is made with the codes."""
    zero_points: str = ""
    """Name of the tensor of zero points that are made with the codes; "" for none."""
    joined: str = ""
    """The matrix that servers join this one to; those of one are made with the same scale. "" for none."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all of them, the codes first; "" for parts that it lacks."""
        of_matrix = "" if self.tensor_scale is None else self.tensor_scale.name
        return (self.codes, self.scales, of_matrix, self.zero_points, *[each.name for each in self.others])


class Output(NamedTuple):
    name: str
    dtype: DType
    shape: tuple[int, ...]
    ops: tuple[Op, ...]
    """Its runs in order; together they are the whole tensor."""
    check_finite: bool
    """Whether NaN or infinity in it is an error (not so for recomputed buffers)."""
    packed: QuantisedOutput | None = None
    """How it is stored where it is codes with scales: name, dtype and shape are then those of the numbers."""
    scales_of: str = ""
    """The tensor of codes that these are made with: each op with that one's op; "" for none."""
    made: Made = "scales"
    """Which of what is made with those codes this is."""
    joined: str = ""
    """Of codes: outputs with the same word here share the one scale of their matrices; "" for none."""
