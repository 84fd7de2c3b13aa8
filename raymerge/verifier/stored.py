"""Elements of logical tensors as stored, read in runs as float64: from a plain range, a view into a fused
tensor, codes with scales, or rows of several matrices with the products of adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.checkpoints.views import View
from raymerge.merge_plan.expressions import GatherInput, Product, Read, Scales
from raymerge.merge_plan.jobs import GatheredInput, Input, OpJob
from raymerge.methods import DOUBT, Elements
from raymerge.storage.store import ReadStore
from raymerge.verifier import numbers as numeric

Run: TypeAlias = Callable[[int, int], numeric.Floats]
"""Elements in stored order, from the first up to a stop."""
_CHUNK = 1 << 20
"""Codes processed at once where a whole matrix is read."""


class Reader:
    def __init__(self, stores: Sequence[ReadStore]) -> None:
        self._stores = stores
        self.nbytes = 0

    def read(self, store: int, key: str, offset: int, nbytes: int) -> numeric.Bytes:
        self.nbytes += nbytes
        return np.frombuffer(self._stores[store].read(key, offset, nbytes), np.uint8)


class Coded:
    """Codes with scales, read by whole rows."""

    def __init__(self, read: Read, scales: Scales, reader: Reader) -> None:
        self._read, self._scales, self._reader = read, scales, reader
        self.encoding, self.columns = scales.encoding, scales.columns
        self.width = scales.encoding.block[1] or scales.columns
        """Columns that share a scale."""
        self.total = _num_stored(read)

    def read(self, start: int, stop: int) -> numeric.Floats:
        together = self.encoding.format.rows_of_codes
        unit = together * self.columns
        first, last = start // unit * together, -(-stop // unit) * together
        codes = self.codes(first * self.columns, (last - first) * self.columns)
        zeros = self._row_zeros(first, last)
        steps = self._row_steps(first, last)
        decoded = numeric.coded_numbers(self.encoding, codes, steps, zeros, columns=self.columns).reshape(-1)
        return decoded[start - first * self.columns : stop - first * self.columns]

    def codes(self, first: int, count: int) -> numeric.Bytes:
        """Codes of a run of elements; ``first`` counts from the start of the matrix."""
        bits = self._read.dtype.bits
        return self._reader.read(
            self._read.source, self._read.key, self._read.offset + first * bits // 8, count * bits // 8
        )

    def steps(self, start: int, stop: int) -> numeric.Floats:
        return self._of_rows(self._row_steps, start, stop)

    def zeros(self, start: int, stop: int) -> numeric.Floats:
        """Elements that stand for 0, for each code of a run; only where the format has zero points."""

        def rows(first: int, stop: int) -> numeric.Floats:
            zeros = self._row_zeros(first, stop)
            assert zeros is not None
            return zeros

        return self._of_rows(rows, start, stop)

    def _of_rows(self, rows: Run, start: int, stop: int) -> numeric.Floats:
        first = start // self.columns
        by_block = rows(first, -(-stop // self.columns))
        values = numeric.spread(by_block, self.width, self.columns).reshape(-1)
        return values[start - first * self.columns : stop - first * self.columns]

    def _row_zeros(self, first: int, stop: int) -> numeric.Floats | None:
        """Elements that stand for 0 in some rows: ``[rows, blocks]``; None where the format has none."""
        scales, form = self._scales, self.encoding.format
        if form.zero_points is None:
            return None
        begin = first // form.rows_of_zeros * form.rows_of_zeros
        offset, nbytes = scales.zeros_of(begin * self.columns, (stop - begin) * self.columns)
        stored = self._reader.read(self._read.source, scales.zeros_key, offset, nbytes)
        zeros = numeric.zero_elements(form, stored, -(-self.columns // self.width))
        return zeros[first - begin : stop - begin]

    def _row_steps(self, first: int, stop: int) -> numeric.Floats:
        """Factors of the codes of some rows: ``[rows, blocks]``."""
        begin = first // self.encoding.scale_row_height * self.encoding.scale_row_height
        stored = self.scales(begin * self.columns, (stop - begin) * self.columns)
        rows = first - begin, stop - begin
        return numeric.code_steps(self.encoding, stored, self.tensor_scale, rows=rows, columns=self.columns)

    def scales(self, first: int, count: int) -> numeric.Bytes:
        """Scales of a run of elements that begins at a unit; empty where the only one is the matrix's."""
        offset, nbytes = self._scales.of(first, count)
        if not nbytes:
            return np.empty(0, np.uint8)
        return self._reader.read(self._read.source, self._scales.key, offset, nbytes)

    @cached_property
    def tensor_scale(self) -> numeric.Bytes:
        """The one scale of the matrix; empty where there is none."""
        scales = self._scales
        if not scales.tensor_nbytes:
            return np.empty(0, np.uint8)
        return self._reader.read(
            self._read.source, scales.tensor_key, scales.tensor_offset, scales.tensor_nbytes
        )


class Blocks:
    """How far the codes of each block reach, and where the farthest is."""

    def __init__(self, codes: Coded, joined: Sequence[Coded] = ()) -> None:
        """``joined``: other matrices that share the one scale."""
        self._codes, self._joined = codes, joined
        self._unit = codes.encoding.scale_row_height * codes.columns
        self._scale_row: tuple[int, NDArray[np.float32]] = -1, np.empty(0, np.float32)

    def _filled(self, first: int, stop: int) -> NDArray[np.bool_]:
        """Whether each block of some scale rows has codes as large as its scale is made for:
        ``[scale rows, blocks]``."""
        encoding = self._codes.encoding
        if encoding.format.tensor_scale == "only":
            assert encoding.tensor_scale_dtype is not None
            whole = numeric.scale_numbers(encoding.tensor_scale_dtype, self._codes.tensor_scale)[:1]
            is_filled = self._farthest_joined >= numeric.least_peaks(encoding, whole)
            return np.full((stop - first, 1), bool(is_filled[0]))
        rows = self._rows(first, stop)
        stored = self._codes.scales(first * self._unit, rows.size)
        least = numeric.least_peaks(encoding, numeric.scale_numbers(encoding.scale_dtype, stored))
        least = least.reshape(stop - first, -1)
        if encoding.format.has_two_scales and not self._joined and self._largest_scale < 1:
            # The matrix's scale is such that blocks have scales of 2 and more: the smallest of all stands for
            # smaller ones only where there are such.
            least = np.maximum(least, 4.0)
        lefts = np.arange(0, rows.shape[1], self._codes.width)
        # A last scale row of fewer rows is filled up with zeros, which reach nowhere.
        by_scale_row = np.zeros((stop - first, self._unit), np.float32)
        by_scale_row.reshape(-1)[: rows.size] = rows.reshape(-1)
        cubes = by_scale_row.reshape(stop - first, -1, rows.shape[1])
        if encoding.format.zero_points is not None:
            above, below = cubes.max(1).clip(min=0), cubes.min(1).clip(max=0)
            span = np.maximum.reduceat(above, lefts, axis=1) - np.minimum.reduceat(below, lefts, axis=1)
            return np.asarray(span >= least)
        return np.asarray(np.maximum.reduceat(np.abs(cubes).max(1), lefts, axis=1) >= least)

    def peaks(self, start: int, stop: int) -> list[int]:
        """Indices of a largest element of every block that a run of stored elements touches."""
        if self._codes.encoding.format.tensor_scale == "only":
            return [self._farthest[1]]
        positions, columns, width = list[int](), self._codes.columns, self._codes.width
        for scale_row, begin, end in self._scale_rows(start, stop):
            first, last = 0, -(-columns // width)
            if begin // columns == (end - 1) // columns:
                first, last = begin % columns // width, (end - 1) % columns // width + 1
            sizes = np.abs(self._rows_of(scale_row)[:, first * width : last * width])
            # Beside a last block that is cut off lies what is no element.
            sizes = np.pad(sizes, ((0, 0), (0, -sizes.shape[1] % width)), constant_values=-1)
            by_block = sizes.reshape(len(sizes), -1, width).swapaxes(0, 1).reshape(last - first, -1)
            rows, inside = np.divmod(by_block.argmax(1), width)
            places = rows * columns + np.arange(first, last) * width + inside
            positions += (scale_row * self._unit + places).tolist()
        return positions

    def are_filled(self, start: int, stop: int) -> numeric.Floats:
        """For each element of a run, 1 if its block is filled, else 0."""
        columns, unit, filled = self._codes.columns, self._unit, [np.empty(0)]
        first, last, at_once = start // unit, -(-stop // unit), max(1, _CHUNK // unit)
        for begin in range(first, last, at_once):
            end = min(begin + at_once, last)
            rows = numeric.spread(self._filled(begin, end), self._codes.width, columns)
            elements = rows.repeat(unit // columns, axis=0).reshape(-1)
            run = slice(max(start - begin * unit, 0), stop - begin * unit)
            filled.append(elements[run].astype(np.float64))
        return np.concatenate(filled)

    def _scale_rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The scale rows of a run, each with the first and the stop of its elements there."""
        for scale_row in range(start // self._unit, -(-stop // self._unit)):
            first = scale_row * self._unit
            yield scale_row, max(start - first, 0), min(stop - first, self._unit)

    def _rows_of(self, scale_row: int) -> NDArray[np.float32]:
        """A scale row's elements, less those for 0: ``[rows, columns]``."""
        if self._scale_row[0] != scale_row:
            self._scale_row = scale_row, self._rows(scale_row, scale_row + 1)
        return self._scale_row[1]

    def _rows(self, first: int, stop: int) -> NDArray[np.float32]:
        """Elements of some scale rows, less those for 0: ``[rows, columns]``."""
        begin, end = first * self._unit, min(stop * self._unit, self._codes.total)
        form, codes = self._codes.encoding.format, self._codes.codes(begin, end - begin)
        elements = numeric.code_elements(form, codes, self._codes.columns)
        if form.zero_points is not None:
            elements = elements - self._codes.zeros(begin, end).astype(np.float32)
        return elements.reshape(-1, self._codes.columns)

    @cached_property
    def _farthest(self) -> tuple[float, int]:
        """The largest magnitude in the matrix, and the index of an element that has it."""
        farthest = -1.0, 0
        for begin in range(0, self._codes.total, _CHUNK):
            codes = self._codes.codes(begin, min(_CHUNK, self._codes.total - begin))
            sizes = np.abs(numeric.code_elements(self._codes.encoding.format, codes, self._codes.columns))
            place = int(sizes.argmax())
            if not float(sizes[place]) <= farthest[0]:
                farthest = float(sizes[place]), begin + place
        return farthest

    @cached_property
    def _farthest_joined(self) -> float:
        """The largest magnitude of all matrices that have this one scale."""
        whole = self._codes.tensor_scale
        alike = (each for each in self._joined if np.array_equal(each.tensor_scale, whole))
        return max([self._farthest[0], *(Blocks(each)._farthest[0] for each in alike)])

    @cached_property
    def _largest_scale(self) -> float:
        dtype, total = self._codes.encoding.scale_dtype, self._codes.total
        step = -(-_CHUNK // self._unit) * self._unit
        runs = (self._codes.scales(first, min(step, total - first)) for first in range(0, total, step))
        return max(float(numeric.scale_numbers(dtype, run).max()) for run in runs)


def elements_of(read: Input, reader: Reader, *, first: int = 0, exact: bool = False) -> Elements:
    """The elements of an input.

    ``first``: index of the first stored element within the logical tensor. ``exact``: keep float64 instead of
    rounding to float32."""
    if isinstance(read, GatheredInput):
        return _Gathered(read, reader)
    if read.scales is not None:
        return logical(Coded(read, read.scales, reader).read, read, first)
    width = read.dtype.nbytes(1)

    def numbers(start: int, stop: int) -> numeric.Floats:
        raw = reader.read(read.source, read.key, read.offset + start * width, (stop - start) * width)
        return numeric.plain_numbers(read.dtype, raw, exact=exact)

    return logical(numbers, read, first)


def logical(run: Run, read: Read, first: int) -> Elements:
    """Stored elements in logical order; ``first`` as for ``elements_of``."""
    offset = stored_offset(read, first)
    if offset is not None:
        return _Contiguous(run, offset)
    assert read.view is not None
    return _Viewed(run, read.view, _num_stored(read))


def stored_offset(read: Read, first: int) -> int | None:
    """Where the logical tensor begins among the stored elements, of which ``first`` go before; None where
    they lie in another order."""
    if read.view is None:
        return -first
    return read.view.offset if read.view.is_flat else None


def _num_stored(read: Read) -> int:
    return read.nbytes * 8 // read.dtype.bits


class _Contiguous:
    held = 0

    def __init__(self, stored: Run, offset: int) -> None:
        self._stored, self._offset = stored, offset

    def read(self, start: int, stop: int) -> tuple[numeric.Floats, None]:
        return self._stored(self._offset + start, self._offset + stop), None


class _Viewed:
    """Elements in between others, which are all read for them."""

    def __init__(self, stored: Run, view: View, total: int) -> None:
        self._stored, self._view, self._total = stored, view, total
        self.held = 8 * (total + view.num_elements)

    def read(self, start: int, stop: int) -> tuple[numeric.Floats, None]:
        return self._all[start:stop], None

    @cached_property
    def _all(self) -> numeric.Floats:
        flat, strides = self._stored(0, self._total), [8 * stride for stride in self._view.strides]
        elements = np.lib.stride_tricks.as_strided(flat[self._view.offset :], self._view.shape, strides)
        return elements.reshape(-1)


class _Gathered:
    """Rows of several matrices: the mean of those that supply a row, zeros where none does, and padding."""

    def __init__(self, gather: GatheredInput, reader: Reader) -> None:
        self._gather = gather
        self._inputs = [
            _InputRows(gather_input, gather.num_columns, reader) for gather_input in gather.inputs
        ]
        self.held = sum(gather_input.held for gather_input in self._inputs)

    def read(self, start: int, stop: int) -> tuple[numeric.Floats, numeric.Floats | None]:
        columns = self._gather.num_columns
        first, last = start // columns, -(-stop // columns)
        values, doubts = self._rows(first, last)
        run = slice(start - first * columns, stop - first * columns)
        return values.reshape(-1)[run], doubts.reshape(-1)[run] if doubts.any() else None

    def _rows(self, first: int, last: int) -> tuple[numeric.Floats, numeric.Floats]:
        """Rows and their doubts, float64 ``[rows, columns]`` each."""
        real = min(last, self._gather.real_rows)
        values, doubts = np.zeros((2, last - first, self._gather.num_columns))
        counts = np.zeros(last - first, dtype=np.int64)
        for to_row, from_row, count, number in self._gather.runs.T.tolist():
            begin, end = max(to_row, first), min(to_row + count, real)
            if begin < end:
                own = slice(begin - first, end - first)
                part, doubt = self._inputs[number].rows(begin - to_row + from_row, end - to_row + from_row)
                values[own] += part
                doubts[own] += doubt
                counts[own] += 1
        several = counts > 1
        doubts[several] += DOUBT * np.abs(values[several])
        values /= np.maximum(counts, 1)[:, None]
        if real < last:
            values[max(0, real - first) :], doubts[max(0, real - first) :] = self._mean
        return values, doubts

    @cached_property
    def _mean(self) -> tuple[numeric.Floats, numeric.Floats]:
        """The mean of all rows but padding, and its doubt."""
        real, total, doubt = self._gather.real_rows, np.zeros(self._gather.num_columns), 0.0
        for first in range(0, real, 1024):
            values, doubts = self._rows(first, min(first + 1024, real))
            total += values.sum(0)
            doubt = max(doubt, float(doubts.max(initial=0.0)), DOUBT * float(np.abs(values).max()))
        return total / max(1, real), np.full(total.shape, doubt)


class _InputRows:
    """Rows of a stored matrix, with the addition ``scale * up @ down`` and DoRA's magnitudes."""

    def __init__(self, gather_input: GatherInput, columns: int, reader: Reader) -> None:
        self._elements, self._columns = elements_of(gather_input.read, reader), columns
        self._product, self.held = gather_input.product, self._elements.held
        if gather_input.product is not None:
            product, rank = gather_input.product, gather_input.product.rank
            factors = [_whole(each, reader) for each in product.factors]
            left = None if product.up is None else factors.pop(0).reshape(-1, rank)
            right, *self._magnitude = factors
            self._left, self._right = left, right.reshape(rank, -1)
            if left is not None and product.transposed:
                self._left, self._right = self._right.T, left.T
            self.held += sum(each.nbytes for each in (*factors, left) if each is not None)

    def rows(self, first: int, stop: int) -> tuple[numeric.Floats, numeric.Floats | float]:
        """Rows ``[rows, columns]``, and the possible error of each element."""
        numbers, _ = self._elements.read(first * self._columns, stop * self._columns)
        rows = numbers.reshape(stop - first, self._columns)
        return (rows, 0.0) if self._product is None else self._added(self._product, rows, first)

    def _added(
        self, product: Product, rows: numeric.Floats, first: int
    ) -> tuple[numeric.Floats, numeric.Floats]:
        left = rows if self._left is None else self._left[first : first + len(rows)]
        values = rows + product.scale * (left @ self._right)
        # A product adds up as many terms as its rank.
        terms = DOUBT * max(1, left.shape[1] // 16)
        doubts = terms * (np.abs(rows) + abs(product.scale) * (np.abs(left) @ np.abs(self._right)))
        if not self._magnitude:
            return values, doubts
        lengths = np.sqrt((values**2).sum(1))
        magnitudes = self._magnitude[0][first : first + len(rows)]
        factors = np.divide(magnitudes, lengths, out=np.zeros_like(lengths), where=lengths > 0)[:, None]
        return values * factors, (doubts + DOUBT * np.abs(values)) * np.abs(factors)


def _whole(read: Read, reader: Reader) -> numeric.Floats:
    return numeric.plain_numbers(read.dtype, reader.read(read.source, read.key, read.offset, read.nbytes))


def sources_of(op: OpJob) -> set[int]:
    reads: list[Read] = []
    for each in op.inputs:
        gather_inputs = () if isinstance(each, Read) else each.inputs
        reads += (
            [each] if isinstance(each, Read) else [r for t in gather_inputs for r in (t.read, *t.factors)]
        )
    return {read.source for read in reads}


def as_input(op: OpJob, view: View | None) -> Read:
    """The bytes of an op as an input, through a view where one part of it is meant; of codes with the scales
    that were made with them."""
    (key, offset), expression, scales = op.places[0], op.expression, None
    if expression.encode is not None:
        none = "", 0
        made = op.scales, op.tensor_scale, op.zero_points
        own, whole, zeros = (none if each is None else each.places[0] for each in made)
        nbytes = 0 if op.scales is None else op.scales.nbytes
        scales = Scales(expression.encode, op.parts[0].columns, *own, nbytes, *whole, *zeros)
    return Read(0, 0, key, offset, op.nbytes, expression.cast, view, scales=scales)
