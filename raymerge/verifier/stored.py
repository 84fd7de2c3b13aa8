"""Elements of logical tensors as stored, read in runs as float64: from a plain range, a view into a fused
tensor, codes with scales, or rows of several matrices with the products of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.expressions import Assembly, Expression, Part, Product, Read, Scales, Term
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.tables import read_scales, read_term, read_view
from raymerge.methods import DOUBT, Elements
from raymerge.storage.store import ReadStore
from raymerge.verifier.numbers import (
    Bytes,
    Floats,
    code_magnitudes,
    code_steps,
    coded_numbers,
    least_peaks,
    plain_numbers,
    scale_numbers,
)

Run: TypeAlias = Callable[[int, int], Floats]
"""Elements in stored order, from the first up to a stop."""


class Reader:
    def __init__(self, stores: Sequence[ReadStore]) -> None:
        self._stores = stores
        self.nbytes = 0

    def read(self, store: int, key: str, offset: int, nbytes: int) -> Bytes:
        self.nbytes += nbytes
        return np.frombuffer(self._stores[store].read(key, offset, nbytes), np.uint8)


_CHUNK = 1 << 20


class Coded:
    def __init__(self, read: Read, scales: Scales, reader: Reader) -> None:
        self._read, self._scales, self._reader = read, scales, reader
        self._tensor_scale: Bytes | None = None
        self.encoding, self.columns = scales.encoding, scales.columns
        self.total = read.nbytes * 8 // read.dtype.bits

    def read(self, start: int, stop: int) -> Floats:
        rows = start // self.columns, -(-stop // self.columns)
        first, num_rows = rows[0] * self.columns, rows[1] - rows[0]
        codes = self.codes(first, num_rows * self.columns)
        found = coded_numbers(self.encoding, codes, self.steps(*rows)).reshape(-1)
        return found[start - first : stop - first]

    def codes(self, first: int, count: int) -> Bytes:
        """Codes of a run of elements; ``first`` counts from the start of the matrix."""
        bits = self._read.dtype.bits
        return self._reader.read(
            self._read.source, self._read.key, self._read.offset + first * bits // 8, count * bits // 8
        )

    def steps(self, first: int, stop: int) -> Floats:
        """Factors of the codes of some rows: ``[rows, columns]``."""
        begin = first // self.encoding.band * self.encoding.band
        stored = self.scales(begin * self.columns, (stop - begin) * self.columns)
        whole = self.tensor_scale()
        return code_steps(
            self.encoding, stored, whole, rows=(first - begin, stop - begin), columns=self.columns
        )

    def steps_of(self, start: int, stop: int) -> Floats:
        first = start // self.columns
        steps = self.steps(first, -(-stop // self.columns)).reshape(-1)
        return steps[start - first * self.columns : stop - first * self.columns]

    def scales(self, first: int, count: int) -> Bytes:
        """Scales of a run of elements that begins at a unit; empty where the only one is the matrix's."""
        offset, nbytes = self._scales.of(first, count)
        if not nbytes:
            return np.empty(0, np.uint8)
        return self._reader.read(self._read.source, self._scales.key, offset, nbytes)

    def tensor_scale(self) -> Bytes:
        """The one scale of the matrix; empty where there is none."""
        if self._tensor_scale is None:
            scales = self._scales
            self._tensor_scale = np.empty(0, np.uint8)
            if scales.tensor_nbytes:
                self._tensor_scale = self._reader.read(
                    self._read.source, scales.tensor_key, scales.tensor_offset, scales.tensor_nbytes
                )
        return self._tensor_scale


class Blocks:
    """How far the codes of each block reach, and where the farthest is."""

    def __init__(self, codes: Coded, *, first: int, total: int, is_joined: bool) -> None:
        self._is_joined = is_joined
        self._codes, self._first, self._total = codes, first, total
        self._height, self._width = codes.encoding.band, codes.encoding.block[1] or codes.columns
        self._band: tuple[int, NDArray[np.float32]] = -1, np.empty(0, np.float32)
        self._of_all: tuple[float, int] | None = None
        self._largest: float | None = None

    def filled(self, band: int) -> NDArray[np.bool_]:
        """Whether each block of a band has codes as large as its scale is made for."""
        encoding = self._codes.encoding
        if encoding.format.tensor_scale == "only":
            assert encoding.tensor_scale_dtype is not None
            whole = scale_numbers(encoding.tensor_scale_dtype, self._codes.tensor_scale())[:1]
            return np.asarray(self._farthest()[0] >= least_peaks(encoding, whole))
        first = band * self._height * self._codes.columns
        count = min(self._height * self._codes.columns, self._codes.total - first)
        scales = scale_numbers(encoding.scale_dtype, self._codes.scales(first, count))
        least = least_peaks(encoding, scales)
        if encoding.format.tensor_scale == "divisor" and not self._is_joined and self._largest_scale() < 1:
            # The matrix's scale is such that blocks have scales of 2 and more: the smallest of all stands for
            # smaller ones only where there are such.
            least = np.maximum(least, 4.0)
        peaks = self._rows_of(band).max(0)
        return np.asarray(np.maximum.reduceat(peaks, np.arange(0, len(peaks), self._width)) >= least)

    def peaks(self, start: int, stop: int) -> list[int]:
        """Indices of a largest element of every block that a run of stored elements touches."""
        if self._codes.encoding.format.tensor_scale == "only":
            place = self._farthest()[1] - self._first
            return [place] if 0 <= place < self._codes.total else []
        found, columns, unit = list[int](), self._codes.columns, self._height * self._codes.columns
        for band in range(start // unit, -(-stop // unit)):
            rows = self._rows_of(band)
            begin, end = max(start - band * unit, 0), min(stop - band * unit, rows.size)
            is_row = end - begin >= columns or begin // columns != (end - 1) // columns
            lefts = range(0, columns, self._width)
            if not is_row:
                touched = (begin % columns) // self._width, (end - 1) % columns // self._width + 1
                lefts = range(touched[0] * self._width, touched[1] * self._width, self._width)
            for left in lefts:
                part = rows[:, left : left + self._width]
                row, column = divmod(int(part.argmax()), part.shape[1])
                found.append(band * unit + row * columns + left + column)
        return found

    def are_filled(self, start: int, stop: int) -> Floats:
        """For each element of a run, 1 if its block is filled, else 0."""
        columns, found = self._codes.columns, np.empty(stop - start)
        unit = self._height * columns
        for band in range(start // unit, -(-stop // unit)):
            begin, end = max(start, band * unit), min(stop, (band + 1) * unit)
            row = self.filled(band).repeat(self._width)[:columns]
            found[begin - start : end - start] = row[np.arange(begin, end) % columns]
        return found

    def _rows_of(self, band: int) -> NDArray[np.float32]:
        """The magnitudes of a band's elements ``[rows, columns]``."""
        if self._band[0] != band:
            unit = self._height * self._codes.columns
            codes = self._codes.codes(band * unit, min(unit, self._codes.total - band * unit))
            found = code_magnitudes(self._codes.encoding.format, codes)
            self._band = band, found.reshape(-1, self._codes.columns)
        return self._band[1]

    def _farthest(self) -> tuple[float, int]:
        """The largest magnitude in the matrix, and the index of an element that has it."""
        if self._of_all is None:
            found = -1.0, 0
            for begin in range(0, self._total, _CHUNK):
                codes = self._codes.codes(begin - self._first, min(_CHUNK, self._total - begin))
                sizes = code_magnitudes(self._codes.encoding.format, codes)
                place = int(sizes.argmax())
                if not float(sizes[place]) <= found[0]:
                    found = float(sizes[place]), begin + place
            self._of_all = found
        return self._of_all

    def _largest_scale(self) -> float:
        if self._largest is None:
            stored = self._codes.scales(-self._first, self._total)
            self._largest = float(scale_numbers(self._codes.encoding.scale_dtype, stored).max())
        return self._largest


def elements_of(read: Read, reader: Reader, *, first: int = 0, exact: bool = False) -> Elements:
    """The elements of an input.

    ``first``: index of its first element within the logical tensor. ``exact``: keep float64 instead of
    rounding to float32.
    """
    if read.assembly is not None:
        return _Assembled(read.assembly, reader)
    if read.scales is not None:
        return _logical(Coded(read, read.scales, reader).read, read, first)
    return _logical(_plain(read, reader, exact=exact), read, first)


class CodeFacts:
    """Factors of an output's codes, and whether their blocks are filled."""

    def __init__(
        self, read: Read, scales: Scales, reader: Reader, *, first: int, total: int, is_joined: bool = False
    ) -> None:
        """``first``: index of the first element within the logical tensor, of ``total`` elements.
        ``is_joined``: whether other matrices share the one scale.
        """
        codes, view = Coded(read, scales, reader), read.view
        size = total if view is None else codes.total
        self._blocks = Blocks(codes, first=first, total=size, is_joined=is_joined)
        self.steps = _logical(codes.steps_of, read, first)
        self.is_filled = _logical(self._blocks.are_filled, read, first)
        """1 where the codes of an element's block are as large as its scale is made for."""
        self._shift: int | None = -first if view is None else view.offset if view.is_flat else None
        self.width = scales.encoding.block[1] or scales.columns

    def peaks(self, start: int, stop: int) -> list[int]:
        """Indices of a largest element of every block that a run touches, if in the row.

        Empty where elements are not in logical order.
        """
        if self._shift is None:
            return []
        return [place - self._shift for place in self._blocks.peaks(start + self._shift, stop + self._shift)]


def _plain(read: Read, reader: Reader, *, exact: bool) -> Run:
    width = read.dtype.nbytes(1)

    def numbers(start: int, stop: int) -> Floats:
        raw = reader.read(read.source, read.key, read.offset + start * width, (stop - start) * width)
        return plain_numbers(read.dtype, raw, exact=exact)

    return numbers


def _logical(run: Run, read: Read, first: int) -> Elements:
    return _Shifted(run, first) if read.view is None else _Viewed(run, read.view, read)


class _Shifted:
    held = 0

    def __init__(self, stored: Run, first: int) -> None:
        self._stored, self._first = stored, first

    def read(self, start: int, stop: int) -> tuple[Floats, None]:
        return self._stored(start - self._first, stop - self._first), None


class _Viewed:
    """Elements among those of others: read whole unless contiguous."""

    def __init__(self, stored: Run, view: View, read: Read) -> None:
        self._stored, self._view = stored, view
        self._total = read.nbytes * 8 // read.dtype.bits
        self._all: Floats | None = None
        self.held = 0 if view.is_flat else 8 * (self._total + view.num_elements)

    def read(self, start: int, stop: int) -> tuple[Floats, None]:
        if self._view.is_flat:
            return self._stored(self._view.offset + start, self._view.offset + stop), None
        if self._all is None:
            self._all = strided(self._stored(0, self._total), self._view).reshape(-1)
        return self._all[start:stop], None


def strided(flat: Floats, view: View) -> Floats:
    strides = [8 * stride for stride in view.strides]
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, strides, writeable=False)


class _Assembled:
    """Rows of several matrices: the mean of those that supply a row, zeros where none does, and padding."""

    def __init__(self, assembly: Assembly, reader: Reader) -> None:
        self._assembly = assembly
        self._terms = [_TermRows(term, assembly.num_columns, reader) for term in assembly.terms]
        self._padding: tuple[Floats, Floats] | None = None
        self.held = sum(term.held for term in self._terms)

    def read(self, start: int, stop: int) -> tuple[Floats, Floats | None]:
        columns = self._assembly.num_columns
        first, last = start // columns, -(-stop // columns)
        values, doubts = self._rows(first, last)
        run = slice(start - first * columns, stop - first * columns)
        return values.reshape(-1)[run], doubts.reshape(-1)[run] if doubts.any() else None

    def _rows(self, first: int, last: int) -> tuple[Floats, Floats]:
        """Rows and their doubts, float64 ``[rows, columns]`` each."""
        real = min(last, self._assembly.real_rows)
        values, doubts = np.zeros((2, last - first, self._assembly.num_columns))
        counts = np.zeros(last - first, dtype=np.int64)
        for to_row, from_row, count, number in self._assembly.runs:
            begin, end = max(to_row, first), min(to_row + count, real)
            if begin < end:
                own = slice(begin - first, end - first)
                found, doubt = self._terms[number].rows(begin - to_row + from_row, end - to_row + from_row)
                values[own] += found
                doubts[own] += doubt
                counts[own] += 1
        several = counts > 1
        doubts[several] += DOUBT * np.abs(values[several])
        values /= np.maximum(counts, 1)[:, None]
        if real < last:
            values[max(0, real - first) :], doubts[max(0, real - first) :] = self._mean()
        return values, doubts

    def _mean(self) -> tuple[Floats, Floats]:
        """The mean of all rows but padding, and its doubt."""
        if self._padding is None:
            real, total, doubt = self._assembly.real_rows, np.zeros(self._assembly.num_columns), 0.0
            for first in range(0, real, 1024):
                values, doubts = self._rows(first, min(first + 1024, real))
                total += values.sum(0)
                doubt = max(doubt, float(doubts.max(initial=0.0)), DOUBT * float(np.abs(values).max()))
            self._padding = total / max(1, real), np.full(total.shape, doubt)
        return self._padding


class _TermRows:
    def __init__(self, term: Term, columns: int, reader: Reader) -> None:
        self._elements = elements_of(term.read, reader)
        self._columns = columns
        self._product = None if term.product is None else _LowRank(term.product, reader)
        self.held = self._elements.held + (0 if self._product is None else self._product.held)

    def rows(self, first: int, stop: int) -> tuple[Floats, Floats | float]:
        """Rows ``[rows, columns]``, and the possible error of each element."""
        found, _ = self._elements.read(first * self._columns, stop * self._columns)
        rows = found.reshape(stop - first, self._columns)
        return (rows, 0.0) if self._product is None else self._product.added(rows, first)


class _LowRank:
    """A low-rank addition ``scale * up @ down``, and DoRA's magnitudes."""

    def __init__(self, product: Product, reader: Reader) -> None:
        up, down, *magnitude = (_whole(each, reader) for each in product.factors)
        left, right = up.reshape(-1, product.rank), down.reshape(product.rank, -1)
        self._left, self._right = (right.T, left.T) if product.transposed else (left, right)
        self._scale = product.scale
        self._magnitude = magnitude[0] if magnitude else None
        self.held = up.nbytes + down.nbytes

    def added(self, rows: Floats, first: int) -> tuple[Floats, Floats]:
        left = self._left[first : first + len(rows)]
        values = rows + self._scale * (left @ self._right)
        # A product adds up as many terms as its rank.
        terms = DOUBT * max(1, left.shape[1] // 16)
        doubts = terms * (np.abs(rows) + abs(self._scale) * (np.abs(left) @ np.abs(self._right)))
        if self._magnitude is None:
            return values, doubts
        lengths = np.sqrt((values**2).sum(1))
        wanted = self._magnitude[first : first + len(rows)]
        factors = np.divide(wanted, lengths, out=np.zeros_like(lengths), where=lengths > 0)[:, None]
        return values * factors, (doubts + DOUBT * np.abs(values)) * np.abs(factors)


def _whole(read: Read, reader: Reader) -> Floats:
    return plain_numbers(read.dtype, reader.read(read.source, read.key, read.offset, read.nbytes))


class Place(NamedTuple):
    key: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanRow:
    index: int
    tensor: str
    expression: Expression
    first_element: int
    """Index of its first element within the logical tensor."""
    num_elements: int
    place: Place
    made_by: int
    """The row whose receipt has its digest: itself, or the first one of the same content."""
    made_for: str
    parts: tuple[Part, ...]
    reads: tuple[Read, ...]
    """Inputs by part, the base first if there is one."""
    scales: Scales | None
    """Scales made with its codes, as places of the output; None for plain bytes."""
    is_joined: bool
    """Whether it shares its matrix's one scale with other rows, which may hold larger numbers."""

    @property
    def is_made(self) -> bool:
        return self.made_by == self.index

    @property
    def sources(self) -> frozenset[int]:
        terms = (term for read in self.reads if read.assembly is not None for term in read.assembly.terms)
        deep = {
            each.source
            for term in terms
            for each in (term.read, *(term.product.factors if term.product is not None else ()))
        }
        return frozenset({*(read.source for read in self.reads), *deep})

    def reads_of(self, part: int) -> tuple[Read, ...]:
        return tuple(read for read in self.reads if read.part == part)


class PlanRows:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._expressions: Sequence[Expression] = plan.expressions
        self._encodings = plan.encodings
        self._shards: Sequence[str] = plan["shards"].column("name").to_pylist()

    def _read(self, table: str, first: int, count: int = 1) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._plan[table].slice(first, count).to_pylist()
        return rows

    def segment(self, number: int) -> Iterator[PlanRow]:
        (segment,) = self._read("segments", number)
        rows = self._read("rows", segment["first_row"], segment["num_rows"])
        for index, row in enumerate(rows, segment["first_row"]):
            yield self._row(index, row)

    def _row(self, index: int, row: Mapping[str, Any]) -> PlanRow:
        (tensor,) = self._read("tensors", row["tensor"])
        expression = self._expressions[row["expression"]]
        parts = tuple(self._parts(row))
        made_by = index if row["copy_of"] < 0 else row["copy_of"]
        return PlanRow(
            index=index,
            tensor=tensor["name"],
            expression=expression,
            first_element=row["first_element"],
            num_elements=row["num_elements"],
            place=self._place(row),
            made_by=made_by,
            made_for=tensor["name"] if made_by == index else self._tensor_of(made_by),
            parts=parts,
            reads=tuple(self._reads(row)),
            scales=self._scales_made(row, expression, parts),
            is_joined=bool(row["joined_with"]),
        )

    def _tensor_of(self, index: int) -> str:
        (row,) = self._read("rows", index)
        (tensor,) = self._read("tensors", row["tensor"])
        return str(tensor["name"])

    def _place(self, row: Mapping[str, Any]) -> Place:
        return Place(self._shards[row["shard"]], row["offset"], row["nbytes"])

    def _parts(self, row: Mapping[str, Any]) -> Iterator[Part]:
        for part in self._read("parts", row["first_part"], row["num_parts"]):
            shape = tuple(part["shape"])
            yield Part(part["logical"], shape, read_view(part["view_offset"], shape, part["view_strides"]))

    def _reads(self, row: Mapping[str, Any]) -> Iterator[Read]:
        for each in self._read("inputs", row["first_input"], row["num_inputs"]):
            scales = None
            if each["scales"] >= 0:
                (found,) = self._read("scales", each["scales"])
                scales = read_scales(list(found.values()), self._encodings)
            yield Read(
                each["part"],
                each["source"],
                each["key"],
                each["offset"],
                each["nbytes"],
                DType(each["dtype"]),
                read_view(each["view_offset"], each["view_shape"], each["view_strides"]),
                assembly=self._assembly(each["assembly"]),
                scales=scales,
            )

    def _assembly(self, number: int) -> Assembly | None:
        if number < 0:
            return None
        (row,) = self._read("assemblies", number)
        terms = self._read("terms", row["first_term"], row["num_terms"])
        runs = self._read("runs", row["first_run"], row["num_runs"])
        factors = [self._read("factors", term["first_factor"], term["num_factors"]) for term in terms]
        return Assembly(
            num_rows=row["num_rows"],
            num_columns=row["num_columns"],
            terms=tuple(read_term(term, own) for term, own in zip(terms, factors, strict=True)),
            runs=tuple((run["to_row"], run["from_row"], run["count"], run["term"]) for run in runs),
            real_rows=row["real_rows"],
        )

    def _scales_made(
        self, row: Mapping[str, Any], expression: Expression, parts: Sequence[Part]
    ) -> Scales | None:
        """The scales written with a row of codes, described like those of an input."""
        if expression.encode is None:
            return None
        own, whole = (
            self._place(*self._read("rows", row[kind])) if row[kind] >= 0 else Place("", 0, 0)
            for kind in ("scales", "tensor_scale")
        )
        return Scales(expression.encode, parts[0].columns, *own, whole.key, whole.offset)


def written(row: PlanRow, view: View | None) -> Read:
    """The bytes of a row as an input, through a view where one part of it is meant."""
    place = row.place
    return Read(0, 0, place.key, place.offset, place.nbytes, row.expression.cast, view, scales=row.scales)
