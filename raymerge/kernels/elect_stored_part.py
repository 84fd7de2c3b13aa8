"""The merges of ``raymerge.kernels.elect``, of bfloat16 as it is stored.

A chunk of every input is widened, merged by the loops there and rounded, before the next one is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.bf16 import CHUNK, load_deltas, narrow
from raymerge.kernels.elect import Cuts, Picks, Rows, Sum, merge_factors, merge_picked, write_selected
from raymerge.kernels.hashes import fill_numbers
from raymerge.kernels.jit import compiled
from raymerge.kernels.ranks import thin_rows
from raymerge.kernels.sums import add_squares


class Inputs(NamedTuple):
    """A run of elements of base and sources."""

    words: NDArray[np.uint16]
    """Memory that holds them."""
    places: NDArray[np.int64]
    """Where in it each of them begins, ``[1 + N]``."""
    start: int
    """Index of the first element within the logical tensor."""


class Ranked(NamedTuple):
    """What becomes of the elements of each delta, by their ranks in their rows."""

    words: NDArray[np.uint64]
    """The two words of the key, ``[N, 2]``."""
    tables: NDArray[np.int64]
    """As ``ranks.thin_rows`` takes them, ``[tables, row length]``."""
    chosen: NDArray[np.int64]
    """For each delta, which of the tables is its; -1 for none, ``[N]``."""
    factors: NDArray[np.float32]
    """What the elements of a delta without a table are multiplied by, ``[N]``."""


@compiled
def merge_picked_stored(inputs: Inputs, picks: Picks, how: Sum, out: NDArray[np.uint16]) -> None:
    """Write what ``elect.merge_picked`` makes of the deltas, rounded; ``out`` is ``[n]``."""
    rows, merged = np.empty((inputs.places.size, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    deltas = Rows(rows[1:].reshape(-1), CHUNK)
    for begin in range(0, out.size, CHUNK):
        size = min(CHUNK, out.size - begin)
        load_deltas(inputs.words, inputs.places, begin, size, rows)
        merge_picked(rows[0, :size], deltas, picks, inputs.start + begin, how, merged[:size])
        narrow(merged[:size], out[begin : begin + size])


@compiled
def merge_ranked_stored(inputs: Inputs, ranked: Ranked, how: Sum, out: NDArray[np.uint16]) -> None:
    """Write what ``elect.merge_factors`` makes of deltas thinned by rank, rounded; ``out`` is whole rows."""
    length, num_sources = ranked.tables.shape[1], how.coefficients.size
    chunk = max(1, CHUNK // length) * length
    rows, merged = np.empty((1 + num_sources, chunk), np.float32), np.empty(chunk, np.float32)
    factors = np.empty((num_sources, chunk), np.float32)
    deltas, thinned = Rows(rows[1:].reshape(-1), chunk), Rows(factors.reshape(-1), chunk)
    for begin in range(0, out.size, chunk):
        size = min(chunk, out.size - begin)
        load_deltas(inputs.words, inputs.places, begin, size, rows)
        for source in range(num_sources):
            row = rows[1 + source, :size]
            write_factors(row, ranked, source, inputs.start + begin, factors[source, :size])
        merge_factors(rows[0, :size], deltas, thinned, how, merged[:size])
        narrow(merged[:size], out[begin : begin + size])


@compiled
def write_factors(
    delta: NDArray[np.float32], ranked: Ranked, source: int, start: int, out: NDArray[np.float32]
) -> None:
    """What each element of some rows of a delta is multiplied by."""
    table = ranked.chosen[source]
    if table < 0:
        out[:] = ranked.factors[source]
        return
    fill_numbers(ranked.words[source, 0], ranked.words[source, 1], start, out.view(np.int32))
    thin_rows(delta, ranked.tables[table], out)


@compiled
def add_squares_stored(
    inputs: Inputs, size: int, cuts: Cuts, selects: bool, squares: NDArray[np.float64]
) -> None:
    """Add up the squares of each delta, piece after piece.

    Args:
        inputs: the first element begins a piece of the tensor.
        size: elements of each input.
        cuts: as ``elect.write_selected`` takes them.
        selects: whether only those count that it would select.
        squares: ``[N]``, added to.
    """
    rows = np.empty((inputs.places.size, CHUNK), np.float32)
    chosen = np.empty((squares.size, CHUNK if selects else 0), np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(inputs.words, inputs.places, begin, length, rows)
        if selects:
            # What lies behind a short chunk is of no matter.
            write_selected(Rows(rows[1:].reshape(-1), CHUNK), cuts, inputs.start + begin, chosen)
        for source in range(squares.size):
            row = chosen[source, :length] if selects else rows[1 + source, :length]
            squares[source] = add_squares(squares[source], row)
