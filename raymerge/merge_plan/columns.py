"""The columns of a plan's tables: as numpy arrays for checks of all rows at once, or a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class RunReader:
    """Some columns of a table, made ready once, so that many short runs of its rows are read quickly."""

    def __init__(self, table: pa.Table, *columns: str) -> None:
        self._columns: Sequence[pa.Array] = [table.column(name).combine_chunks() for name in columns]

    def read(self, first: int, count: int) -> Iterator[tuple[Any, ...]]:
        """The rows from ``first`` on, ``count`` of them, as plain values in the order of the columns."""
        return zip(*(column.slice(first, count).to_pylist() for column in self._columns), strict=True)

    def row(self, index: int) -> tuple[Any, ...]:
        """One row."""
        return tuple(column[index].as_py() for column in self._columns)


def ints(table: pa.Table, column: str) -> Ints:
    """A column of numbers or switches as int64 ``[rows]``."""
    array = table.column(column).combine_chunks()
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(np.int64)


def codes(table: pa.Table, column: str) -> tuple[Ints, list[str]]:
    """A column of texts as numbers ``[rows]`` of distinct texts, and those texts."""
    encoded = table.column(column).combine_chunks().dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False)).astype(
        np.int64
    ), encoded.dictionary.to_pylist()


def lists(table: pa.Table, column: str) -> tuple[Ints, Ints]:
    """A column of lists as their lengths ``[rows]`` and all their values in a row."""
    array = table.column(column).combine_chunks()
    lengths = np.asarray(pc.list_value_length(array).to_numpy(zero_copy_only=False)).astype(np.int64)
    return lengths, np.asarray(array.flatten().to_numpy(zero_copy_only=False)).astype(np.int64)


def products(lengths: Ints, values: Ints) -> Ints:
    """Product of each list ``[rows]``; 1 for an empty one, -1 where it is no size below 2**62."""
    return _reduced(lengths, values, start=1, multiply=True)


def sums(lengths: Ints, values: Ints) -> Ints:
    """Sum of each list ``[rows]``; 0 for an empty one, -1 where it is no size below 2**62."""
    return _reduced(lengths, values, start=0, multiply=False)


def last_values(lengths: Ints, values: Ints, *, default: int) -> Ints:
    """Last value of each list ``[rows]``; ``default`` for an empty one."""
    result = np.full(len(lengths), default, dtype=np.int64)
    some = lengths > 0
    result[some] = values[(starts(lengths) + lengths)[some] - 1]
    return result


def maxima(lengths: Ints, values: Ints) -> Ints:
    """Largest value of each list ``[rows]``; 0 for an empty one."""
    result = np.zeros(len(lengths), dtype=np.int64)
    some = lengths > 0
    if some.any():
        result[some] = np.maximum.reduceat(values, starts(lengths)[some])
    return result


def named_in_order(named: Ints, known: int) -> bool:
    """Whether some numbers, but for those below 0, are all from 0 to ``known``, in order of first use."""
    values, first = np.unique(named[named >= 0], return_index=True)
    return np.array_equal(values, np.arange(known)) and not bool((np.diff(first) < 0).any())


def starts(counts: Ints) -> Ints:
    """Where each of some consecutive runs begins ``[rows]``, from their lengths."""
    return np.asarray(np.cumsum(counts) - counts, dtype=np.int64)


def gather(first: Ints, counts: Ints) -> Ints:
    """The numbers of all members of some runs, run after run, from their first members and lengths."""
    return np.asarray(np.arange(counts.sum()) + np.repeat(first - starts(counts), counts), dtype=np.int64)


def _reduced(lengths: Ints, values: Ints, *, start: int, multiply: bool) -> Ints:
    # Sizes of a file are below 2**63, but what a changed table says need not be: floats tell what overflows.
    result = np.full(len(lengths), start, dtype=np.int64)
    some = lengths > 0
    if not some.any():
        return result
    operation = np.multiply if multiply else np.add
    first = starts(lengths)[some]
    rough = operation.reduceat(values.astype(np.float64), first)
    exact = operation.reduceat(values, first)
    negative = np.minimum.reduceat(values, first) < 0
    result[some] = np.where(negative | (np.abs(rough) > 2.0**62), -1, exact)
    return result
