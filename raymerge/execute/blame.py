"""Finds which stored value made a row NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.execute.assembled import AssembledInput, Input, Raw, RawInput, RawRows, Taken
from raymerge.execute.finite import first_non_finite
from raymerge.execute.jobs import RowJob
from raymerge.execute.tiles import Load, TileJob
from raymerge.planner.expressions import Read, Term


def find_cause(row: RowJob, loads: Iterable[tuple[Load, Sequence[Raw]]], names: Sequence[str]) -> Problem:
    """Why a row is not finite.

    Args:
        row: the row.
        loads: all that it was made of, read again.
        names: the names of the sources.
    """
    for load, raws in loads:
        for tile, raw in zip(load.tiles, raws, strict=True):
            for each, held in zip(row.inputs, raw, strict=True):
                found = non_finite_byte(tile, each, held)
                if found is not None:
                    source, place = found
                    return Problem(
                        f"{names[source.source]}: {row.tensor}",
                        f"the source holds NaN or infinity, here first at byte {place} of {source.key}.",
                        "Repair or replace that model; nothing was published.",
                    )
    cast = row.expression.cast
    wider = "a wider out_dtype (bfloat16, float32) or " if cast is DType.F16 else ""
    return Problem(
        row.tensor,
        f"the sources are finite, but the merged values do not fit {cast.value}.",
        f"Use {wider}smaller weights; nothing was published.",
    )


def non_finite_byte(tile: TileJob, source: Input, raw: RawInput) -> tuple[Read, int] | None:
    """The first NaN or infinity of an input's bytes for a tile: whose it is, and at which byte of its file.

    None where all of them are finite.
    """
    if isinstance(source, AssembledInput):
        return _in_rows(source, raw) if isinstance(raw, RawRows) else None
    if isinstance(raw, RawRows):
        return None
    found = first_non_finite(raw.numpy(), source.dtype)
    return None if found is None else (source, tile.span(source)[0] + source.dtype.nbytes(found))


def _in_rows(source: AssembledInput, raw: RawRows) -> tuple[Read, int] | None:
    for number, term in enumerate(source.terms):
        found = first_non_finite(raw.stored[number].numpy(), term.read.dtype)
        if found is not None:
            place = _element(term, raw.taken[number], found, source.num_columns)
            return term.read, term.read.offset + term.read.dtype.nbytes(place)
        factors = term.product.factors if term.product is not None else ()
        for factor, data in zip(factors, raw.factors[number], strict=True):
            found = first_non_finite(data.numpy(), factor.dtype)
            if found is not None:
                return factor, factor.offset + factor.dtype.nbytes(found)
    return None


def _element(term: Term, taken: Taken, found: int, num_columns: int) -> int:
    """Element of the stored tensor that lies at an index of the bytes read."""
    if term.read.view is not None:
        return found
    row, column = divmod(found, num_columns)
    return taken.stored_row(row) * num_columns + column
