"""What a worker needs to assemble an input from rows of stored matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.dtypes import DType
from raymerge.merge_plan.plan import Plan
from raymerge.methods import BLOCK, ROW_GROUP

HOLE_MOST = 64 << 10
"""Bytes between two wanted rows of a file that are read along, rather than by a request of their own."""
REQUEST_MOST = 1 << 20
"""Bytes of the largest request that reads such holes."""
_RUN_NBYTES = 64
"""Bytes of a run in the arrays that runs are looked up in."""
_MOVE_NBYTES = 384
"""Bytes of a run of rows on its way through a tile."""


def group_multiple(columns: int) -> int:
    """Elements of the fewest whole groups of rows that are a BLOCK at least."""
    group = ROW_GROUP * columns
    return -(-BLOCK // group) * group


@dataclass(frozen=True, slots=True)
class AssemblyNeed:
    """What assembling one input takes; equal for assemblies of equal sizes."""

    columns: int
    """Elements of a row."""
    stored_per_element: float
    """Stored bytes for each element, of all terms."""
    whole_bytes: int
    """Stored bytes where it is made at once, of all terms."""
    largest_term: int
    """Elements of the largest term that is unpacked at once."""
    widest: float
    """Bytes of a stored element of the widest term."""
    fixed_bytes: int
    """Bytes that live whatever the tile: factors, groups of rows, runs, and rows cut by a tile's ends."""
    is_padded: bool
    """Whether it has rows that are the mean of the others."""
    per_element: float
    """Bytes of bookkeeping for each element of a tile."""

    @property
    def overlap(self) -> float:
        """What all tiles hold together, in times of the stored bytes: each has the rows at its ends whole."""
        return 1 + 2 * self.columns / BLOCK

    def raw_bytes(self, num_elements: int, *, is_flat: bool) -> float:
        """Stored bytes that a row of so many elements is made of."""
        return self.stored_per_element * num_elements if is_flat else self.whole_bytes

    def placed_per_element(self, num_elements: int, *, is_flat: bool) -> float:
        """Bytes of one term's rows, as stored and in float32, before they go to their places."""
        if is_flat:
            return 4 + self.per_element
        return (4 + self.widest) * self.largest_term / max(1, num_elements) + self.per_element


def assembly_need(
    assembly: Mapping[str, Any], terms: Sequence[Mapping[str, Any]], factors: Sequence[Mapping[str, Any]]
) -> AssemblyNeed:
    """The need of one assembly from its rows of the plan's tables."""
    rows, columns = assembly["num_rows"], assembly["num_columns"]
    widths = [DType(term["dtype"]).bits / 8 for term in terms]
    viewed = [bool(term["view_strides"]) for term in terms]
    sizes = [term["num_rows"] if view else rows for term, view in zip(terms, viewed, strict=True)]
    whole = [
        term["nbytes"] if view else int(width * columns * rows)
        for term, width, view in zip(terms, widths, viewed, strict=True)
    ]
    # A tile's ends may cut a row each: raw bytes of two tiles, the rows in float32, and the sum of terms.
    ends = 2 * columns * (2 * sum(widths) + 4 + 4)
    ends += REQUEST_MOST + _RUN_NBYTES * assembly["num_runs"] + 2 * _MOVE_NBYTES * len(terms)
    return AssemblyNeed(
        columns=columns,
        stored_per_element=sum(widths),
        whole_bytes=sum(whole),
        largest_term=max(sizes) * columns,
        widest=max(widths),
        fixed_bytes=int(ends) + _product_bytes(columns, terms, factors) + _padding_bytes(assembly),
        is_padded=assembly["real_rows"] < rows,
        per_element=_MOVE_NBYTES * len(terms) / columns,
    )


def _product_bytes(
    columns: int, terms: Sequence[Mapping[str, Any]], factors: Sequence[Mapping[str, Any]]
) -> int:
    """Factors as stored and in float32; of a group of rows the product, the sum, and both in float64."""
    held: int = sum(
        each["nbytes"] + 4 * (each["nbytes"] * 8 // DType(each["dtype"]).bits) for each in factors
    )
    rank = max((term["rank"] for term in terms), default=0)
    return held + (ROW_GROUP * (32 * columns + 8 * rank) if rank else 0)


def _padding_bytes(assembly: Mapping[str, Any]) -> int:
    """Sum and mean of all rows, and a group of rows in float64."""
    if assembly["real_rows"] == assembly["num_rows"]:
        return 0
    columns: int = assembly["num_columns"]
    return columns * (8 * ROW_GROUP + 32)


def assembly_needs(plan: Plan) -> list[AssemblyNeed]:
    """The need of every assembly of a plan, in order."""
    terms, factors = plan["terms"].to_pylist(), plan["factors"].to_pylist()
    return [
        assembly_need(each, own, _factors_of(own, factors))
        for each in plan["assemblies"].to_pylist()
        for own in (terms[each["first_term"] : each["first_term"] + each["num_terms"]],)
    ]


def _factors_of(
    terms: Sequence[Mapping[str, Any]], factors: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    first = terms[0]["first_factor"]
    return factors[first : first + sum(term["num_factors"] for term in terms)]
