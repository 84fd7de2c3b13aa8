"""Assemblies as rows of the plan's tables, each distinct one once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.columns import Flags, Ints, codes, ints, lists, sums
from raymerge.merge_plan.expressions import Assembly, Product, Read, Term
from raymerge.merge_plan.plan import Plan


class AssemblyNumbers:
    """Numbers assemblies in the order in which inputs name them."""

    def __init__(self) -> None:
        self._numbers: dict[Assembly, int] = {}
        # The pieces of a cut tensor share one object: its runs, maybe 100,000, are then not hashed again.
        self._known: dict[int, int] = {}

    def number(self, assembly: Assembly | None) -> int:
        """Number of an assembly, which must live on; -1 for none."""
        if assembly is None:
            return -1
        known = self._known.get(id(assembly))
        if known is None:
            known = self._numbers.setdefault(assembly, len(self._numbers))
            self._known[id(assembly)] = known
        return known

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """Rows of the tables ``assemblies``, ``terms``, ``factors`` and ``runs``."""
        tables: dict[str, list[tuple[Any, ...]]] = {"assemblies": [], "terms": [], "factors": [], "runs": []}
        for assembly in self._numbers:
            places = (len(tables["terms"]), len(assembly.terms), len(tables["runs"]), len(assembly.runs))
            sizes = (assembly.num_rows, assembly.num_columns, assembly.real_rows)
            tables["assemblies"].append((*sizes, *places))
            for term in assembly.terms:
                factors = term.product.factors if term.product is not None else ()
                tables["terms"].append(_term_row(term, len(tables["factors"]), len(factors)))
                tables["factors"] += [_place(factor) for factor in factors]
            tables["runs"] += assembly.runs
        return tables


def _term_row(term: Term, first_factor: int, num_factors: int) -> tuple[Any, ...]:
    view, product = term.read.view, term.product
    viewed = (view.offset, list(view.shape), list(view.strides)) if view else (0, [], [])
    added = (product.rank, product.scale, product.transposed) if product else (0, 0.0, False)
    return (*_place(term.read), *viewed, term.num_rows, *added, first_factor, num_factors)


def _place(read: Read) -> tuple[Any, ...]:
    return (read.source, read.key, read.offset, read.nbytes, read.dtype.value)


def read_term(row: Mapping[str, Any], factors: Sequence[Mapping[str, Any]]) -> Term:
    """A term from its row of ``terms`` and its rows of ``factors``."""
    found = _read(row, read_view(row["view_offset"], row["view_shape"], row["view_strides"]))
    if not factors:
        return Term(found, row["num_rows"])
    up, down, *magnitude = (_read(each, None) for each in factors)
    product = Product(
        up, down, row["rank"], row["scale"], row["transposed"], magnitude[0] if magnitude else None
    )
    return Term(found, row["num_rows"], product)


def _read(row: Mapping[str, Any], view: View | None) -> Read:
    return Read(0, row["source"], row["key"], row["offset"], row["nbytes"], DType(row["dtype"]), view)


def read_view(offset: int, shape: Sequence[int], strides: Sequence[int]) -> View | None:
    """A view from its columns in a table, where there is one."""
    return View(offset, tuple(shape), tuple(strides)) if strides else None


def input_bytes(plan: Plan) -> Ints:
    """Bytes that each input is read from for its row ``[inputs]``, as ``Read.bytes_for`` counts them; 0 for
    those that another part of the row is made of too."""
    rows = plan["rows"]
    num_elements = np.repeat(ints(rows, "num_elements"), ints(rows, "num_inputs"))
    number, found = ints(plan["inputs"], "assembly"), ints(plan["inputs"], "nbytes")
    scales = ints(plan["inputs"], "scales")
    found[scales >= 0] += _scales_bytes(plan)[scales[scales >= 0]]
    which = number >= 0
    own = number[which]
    height, columns = (ints(plan["assemblies"], name)[own] for name in ("num_rows", "num_columns"))
    per_row = _assembly_bytes(plan)[own] // np.maximum(1, height)
    found[which] = np.minimum(height, -(-num_elements[which] // columns)) * per_row
    found[repeated_inputs(plan)] = 0
    return found


def joined_sums(plan: Plan, of_rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """What the rows have together that each row shares the scale of a matrix with ``[rows]``."""
    lengths, others = lists(plan["rows"], "joined_with")
    owners = np.repeat(np.arange(len(lengths)), lengths)
    # Tables that are damaged may name rows that are not there, which another check tells of.
    real = (others >= 0) & (others < len(lengths))
    sums = np.bincount(owners[real], weights=of_rows[others[real]], minlength=len(lengths))
    return sums.astype(np.float64)


def repeated_inputs(plan: Plan) -> Flags:
    """Whether each input is the bytes of that of the part before ``[inputs]``; as ``repeated_reads``."""
    rows, inputs = plan["rows"], plan["inputs"]
    num_parts, num_inputs = ints(rows, "num_parts"), ints(rows, "num_inputs")
    per_part = np.repeat(num_inputs // np.maximum(1, num_parts), num_inputs)
    later = np.flatnonzero(ints(inputs, "part") > 0)
    before = later - per_part[later]
    columns = [
        codes(inputs, "key")[0],
        *(ints(inputs, name) for name in ("source", "offset", "nbytes", "scales")),
    ]
    same = ints(inputs, "assembly")[later] < 0
    for column in columns:
        same &= column[later] == column[before]
    found = np.zeros(inputs.num_rows, dtype=np.bool_)
    found[later[same]] = True
    return found


def _scales_bytes(plan: Plan) -> Ints:
    """Bytes of each run of scales with the one scale of their matrix ``[scales]``."""
    dtypes = [each.tensor_scale_dtype for each in plan.encodings]
    of_matrix = np.array([0 if dtype is None else dtype.nbytes(1) for dtype in dtypes], dtype=np.int64)
    return ints(plan["scales"], "nbytes") + of_matrix[ints(plan["scales"], "encoding")]


def _assembly_bytes(plan: Plan) -> Ints:
    """Bytes of everything that an assembly is made of ``[assemblies]``."""
    factors = sums(ints(plan["terms"], "num_factors"), ints(plan["factors"], "nbytes"))
    return sums(ints(plan["assemblies"], "num_terms"), ints(plan["terms"], "nbytes") + factors)
