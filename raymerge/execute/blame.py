"""Finds which stored value made a tile's result NaN or infinite."""

from __future__ import annotations

from raymerge.execute.assembled import AssembledInput, Input, RawInput, RawRows, Taken
from raymerge.execute.finite import first_non_finite
from raymerge.execute.steps import Step
from raymerge.planner.expressions import Read, Term


def non_finite_byte(step: Step, source: Input, raw: RawInput) -> tuple[Read, int] | None:
    """The first NaN or infinity of an input's bytes for a tile: whose it is, and at which byte of its file.

    None where all of them are finite.
    """
    if isinstance(source, AssembledInput):
        return _in_rows(source, raw) if isinstance(raw, RawRows) else None
    if isinstance(raw, RawRows):
        return None
    found = first_non_finite(raw.numpy(), source.dtype)
    return None if found is None else (source, step.span(source)[0] + source.dtype.nbytes(found))


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
