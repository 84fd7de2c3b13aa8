"""Codes with scales, in the order in which they are stored: their numbers, and whether scales suit them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.merge_plan.expressions import Read, Scales
from raymerge.verifier.numbers import (
    Bytes,
    Floats,
    code_magnitudes,
    code_steps,
    coded_numbers,
    least_peaks,
    scale_numbers,
)
from raymerge.verifier.reader import Reader

_CHUNK = 1 << 20
"""Codes that are looked at together where all of a matrix are."""


class Coded:
    """Codes with scales; whole rows are read."""

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
        """The codes of a run of elements, from the first of the matrix on if that is before the row."""
        bits = self._read.dtype.bits
        return self._reader.read(
            self._read.source, self._read.key, self._read.offset + first * bits // 8, count * bits // 8
        )

    def steps(self, first: int, stop: int) -> Floats:
        """What some rows of codes are multiplied by: ``[rows, columns]``."""
        begin = first // self.encoding.band * self.encoding.band
        stored = self.scales(begin * self.columns, (stop - begin) * self.columns)
        whole = self.tensor_scale()
        return code_steps(
            self.encoding, stored, whole, rows=(first - begin, stop - begin), columns=self.columns
        )

    def scales(self, first: int, count: int) -> Bytes:
        """Those of a run of elements that begins at a unit; nothing where the only one is the matrix's."""
        offset, nbytes = self._scales.of(first, count)
        if not nbytes:
            return np.empty(0, np.uint8)
        return self._reader.read(self._read.source, self._scales.key, offset, nbytes)

    def tensor_scale(self) -> Bytes:
        """The one scale of the matrix; nothing where there is none."""
        if self._tensor_scale is None:
            scales = self._scales
            self._tensor_scale = np.empty(0, np.uint8)
            if scales.tensor_nbytes:
                self._tensor_scale = self._reader.read(
                    self._read.source, scales.tensor_key, scales.tensor_offset, scales.tensor_nbytes
                )
        return self._tensor_scale


class Steps:
    """What codes are multiplied by."""

    def __init__(self, codes: Coded) -> None:
        self._codes = codes

    def read(self, start: int, stop: int) -> Floats:
        columns = self._codes.columns
        first = start // columns
        steps = self._codes.steps(first, -(-stop // columns)).reshape(-1)
        return steps[start - first * columns : stop - first * columns]


class Blocks:
    """The blocks of codes: how far the codes of each reach, and where the farthest is."""

    def __init__(self, codes: Coded, *, first: int, total: int, is_joined: bool) -> None:
        self._is_joined = is_joined
        self._codes, self._first, self._total = codes, first, total
        self._height, self._width = codes.encoding.band, codes.encoding.block[1] or codes.columns
        self._band: tuple[int, NDArray[np.float32]] = -1, np.empty(0, np.float32)
        self._of_all: tuple[float, int] | None = None
        self._largest: float | None = None

    def filled(self, band: int) -> NDArray[np.bool_]:
        """Of a band, whether each block's codes reach as far as they do under a scale made for it."""
        encoding = self._codes.encoding
        if encoding.format is Format.FP8_TENSOR:
            assert encoding.tensor_scale_dtype is not None
            whole = scale_numbers(encoding.tensor_scale_dtype, self._codes.tensor_scale())[:1]
            return np.asarray(self._farthest()[0] >= least_peaks(encoding, whole))
        first = band * self._height * self._codes.columns
        count = min(self._height * self._codes.columns, self._codes.total - first)
        scales = scale_numbers(encoding.scale_dtype, self._codes.scales(first, count))
        least = least_peaks(encoding, scales)
        if encoding.format is Format.NVFP4 and not self._is_joined and self._largest_scale() < 1:
            # The matrix's scale is such that blocks have scales of 2 and more: the smallest of all stands for
            # smaller ones only where there are such.
            least = np.maximum(least, 4.0)
        peaks = self._rows_of(band).max(0)
        return np.asarray(np.maximum.reduceat(peaks, np.arange(0, len(peaks), self._width)) >= least)

    def peaks(self, start: int, stop: int) -> list[int]:
        """Places of a largest element of every block that a run of stored elements touches."""
        if self._codes.encoding.format is Format.FP8_TENSOR:
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
        """Of the blocks of a run of stored elements; for each element, as 1 and 0."""
        columns, found = self._codes.columns, np.empty(stop - start)
        unit = self._height * columns
        for band in range(start // unit, -(-stop // unit)):
            begin, end = max(start, band * unit), min(stop, (band + 1) * unit)
            row = self.filled(band).repeat(self._width)[:columns]
            found[begin - start : end - start] = row[np.arange(begin, end) % columns]
        return found

    def _rows_of(self, band: int) -> NDArray[np.float32]:
        """The magnitudes of the elements of a band ``[rows, columns]``."""
        if self._band[0] != band:
            unit = self._height * self._codes.columns
            codes = self._codes.codes(band * unit, min(unit, self._codes.total - band * unit))
            found = code_magnitudes(self._codes.encoding.format, codes)
            self._band = band, found.reshape(-1, self._codes.columns)
        return self._band[1]

    def _farthest(self) -> tuple[float, int]:
        """The largest magnitude of any element of the matrix, and the index of one that has it."""
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
        """Of the scales of all blocks of the matrix."""
        if self._largest is None:
            stored = self._codes.scales(-self._first, self._total)
            self._largest = float(scale_numbers(self._codes.encoding.scale_dtype, stored).max())
        return self._largest


class Filled:
    """Whether the codes of an element's block reach far enough, as 1 and 0."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def read(self, start: int, stop: int) -> Floats:
        return self._blocks.are_filled(start, stop)
