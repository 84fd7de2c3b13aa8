"""Proves that bytes, views and gathered rows that tables name are there; collects contradictions."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.columns import (
    Flags,
    Ints,
    codes,
    ints,
    lists,
    named_in_order,
    products,
    starts,
    sums,
)
from raymerge.merge_plan.plan import Plan

_REMEDY = (
    "Make the plan anew; if this comes again, it is a bug in raymerge: please report it with the recipe."
)


class Contradictions:
    """Contradictions in the order found."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def __bool__(self) -> bool:
        return bool(self._problems)

    def say(self, where: str, what: str) -> None:
        """One contradiction."""
        self._problems.append(Problem(f"plan, {where}", f"{what}.", _REMEDY))

    def flag(self, table: str, broken: Flags, what: str) -> None:
        """A rule that the flagged rows of a table ``[rows]`` break, if there are any."""
        count = int(np.count_nonzero(broken))
        if count:
            more = f" ({count - 1} more rows alike)" if count > 1 else ""
            self.say(f"table {table}, row {int(np.argmax(broken))}", what + more)

    def problems(self) -> tuple[Problem, ...]:
        """Everything found."""
        return tuple(self._problems)


def check_bytes(plan: Plan, name: str, found: Contradictions) -> None:
    """Bytes lie within a file of their source."""
    table = plan[name]
    source, offset, nbytes = (ints(table, column) for column in ("source", "offset", "nbytes"))
    outside = outside_files(plan, source, codes(table, "key"), offset, nbytes)
    found.flag(name, outside, "it is not within a file of its source")


def outside_files(plan: Plan, source: Ints, key: tuple[Ints, list[str]], offset: Ints, nbytes: Ints) -> Flags:
    """Whether bytes ``[n]`` are not within a file of their source; keys as ``codes`` gives them."""
    size = _file_sizes(plan, source, *key)
    return np.asarray(
        (offset < 0) | (nbytes < 0) | (offset > size) | (nbytes > size - offset), dtype=np.bool_
    )


def stored_bits(table: pa.Table) -> Ints:
    """Bits of an element of each read ``[rows]``."""
    dtype, words = codes(table, "dtype")
    return np.array([DType(word).bits for word in words], dtype=np.int64)[dtype]


def _file_sizes(plan: Plan, source: Ints, key: Ints, keys: list[str]) -> Ints:
    """Size of the file of each read; -1 where the source has no such file."""
    sources = plan.manifest["sources"]
    table = np.full((len(sources), max(len(keys), 1)), -1, dtype=np.int64)
    position = {name: index for index, name in enumerate(keys)}
    for index, entry in enumerate(sources):
        for name, nbytes, _ in entry["files"]:
            if name in position:
                table[index, position[name]] = nbytes
    return np.asarray(table[source, key], dtype=np.int64)


def check_views(
    name: str, table: pa.Table, shape: tuple[Ints, Ints], found: Contradictions, *, span: Ints, rank: Ints
) -> None:
    """Views of ``table`` stay within ``span`` elements ``[rows]``."""
    lengths, strides = lists(table, "view_strides")
    viewed = lengths > 0
    found.flag(name, viewed & (lengths != rank), "its view has another rank than its shape")
    offset = ints(table, "view_offset")
    found.flag(name, ~viewed & (offset != 0), "it has an offset and no view")
    if found or not viewed.any():
        return
    sizes = shape[1][np.repeat(viewed, shape[0])]
    reach = sums(lengths, np.maximum(sizes - 1, 0) * strides)
    empty = (products(*shape) == 0) & viewed
    beyond = (offset < 0) | (reach < 0) | ((offset + reach >= span) & ~empty)
    found.flag(name, viewed & beyond, "its view leaves its region")


_READ = ("source", "key", "offset", "nbytes", "dtype", "view_offset", "view_shape", "view_strides")
_LARGEST_SIDE = 1 << 40
"""No matrix has more rows or columns; sums of two of them stay far from overflowing."""


def check_assemblies(plan: Plan, found: Contradictions) -> None:
    """Check assemblies, terms, factors and runs, whose references to sources hold."""
    _check_sequence(plan, found)
    if found:
        return
    _check_sizes(plan, found)
    if found:
        return
    _check_terms(plan, found)
    _check_products(plan, found)
    _check_runs(plan, found)


def check_assembled(plan: Plan, part_of_input: Ints, found: Contradictions) -> None:
    """Inputs that are assembled have the size of their part ``[inputs]``, and name their first term."""
    table, assemblies = plan["inputs"], plan["assemblies"]
    number = ints(table, "assembly")
    which = np.flatnonzero(number >= 0)
    if not len(which):
        return
    lengths, values = lists(plan["parts"], "shape")
    ends = starts(lengths) + lengths - 1
    part, own = part_of_input[which], number[which]
    columns = np.where(lengths[part] > 1, values[ends[part]], 1)
    sizes = _areas(ints(assemblies, "num_rows"), ints(assemblies, "num_columns"))[own]
    wrong = (columns != ints(assemblies, "num_columns")[own]) | (products(lengths, values)[part] != sizes)
    _flag(found, which, wrong, "its assembly has another shape than its part")
    named = table.select(_READ).take(which).to_pylist()
    terms = plan["terms"].select(_READ).take(ints(assemblies, "first_term")[own]).to_pylist()
    unlike = np.array([mine != first for mine, first in zip(named, terms, strict=True)], dtype=np.bool_)
    _flag(found, which, unlike, "it does not name the first term of its assembly")


def _flag(found: Contradictions, which: Ints, broken: Flags, what: str) -> None:
    flags = np.zeros(which[-1] + 1, dtype=np.bool_)
    flags[which[broken]] = True
    found.flag("inputs", flags, what)


def holds_view(plan: Plan) -> Flags:
    """Whether a term of an assembly lies within a fused tensor ``[assemblies + 1]``; last: no assembly."""
    viewed = lists(plan["terms"], "view_strides")[0] > 0
    counts = ints(plan["assemblies"], "num_terms")
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owner, weights=viewed, minlength=len(counts) + 1) > 0


def _check_sequence(plan: Plan, found: Contradictions) -> None:
    """Inputs name all assemblies, in order; what these are made of is taken once each, in order."""
    named = ints(plan["inputs"], "assembly")
    known = plan["assemblies"].num_rows
    found.flag("inputs", (named < -1) | (named >= known), f"assembly is not one of {known}")
    if not named_in_order(named, known):
        found.say("table assemblies", "inputs do not name every one of them, in order")
    for table, first_name, number, least, owned in (
        ("assemblies", "first_term", "num_terms", 1, "terms"),
        ("assemblies", "first_run", "num_runs", 0, "runs"),
        ("terms", "first_factor", "num_factors", 0, "factors"),
    ):
        counts = ints(plan[table], number)
        if (counts < least).any() or counts.sum() != plan[owned].num_rows:
            found.say(f"table {table}", f"{number} does not take every one of the {owned}")
        else:
            behind = ints(plan[table], first_name) != starts(counts)
            found.flag(table, behind, f"{first_name} is not behind the row before")


def _check_sizes(plan: Plan, found: Contradictions) -> None:
    """Rows, columns and padding of assemblies, and ranks of products, are sizes."""
    assemblies, terms = plan["assemblies"], plan["terms"]
    rows, columns, real = (ints(assemblies, name) for name in ("num_rows", "num_columns", "real_rows"))
    absurd = (rows < 0) | (columns < 1) | (rows > _LARGEST_SIDE) | (columns > _LARGEST_SIDE)
    found.flag("assemblies", absurd, "it has no such number of rows or columns")
    padding = (real < 0) | (real > rows) | ((real == 0) & (rows > 0))
    found.flag("assemblies", padding, "its padding is not behind rows of its own")
    stored, rank, count = (ints(terms, name) for name in ("num_rows", "rank", "num_factors"))
    found.flag("terms", (stored < 0) | (stored > _LARGEST_SIDE), "it has no such number of rows")
    is_product = count > 0
    wrong = np.where(is_product, (count < 2) | (count > 3) | (rank < 1) | (rank > _LARGEST_SIDE), rank != 0)
    found.flag("terms", wrong, "its rank and its factors do not make a product")
    scale = np.asarray(terms.column("scale").to_numpy(), dtype=np.float64)
    found.flag("terms", ~np.isfinite(scale) | (~is_product & (scale != 0)), "its scale is no number")
    transposed = ints(terms, "transposed") == 1
    found.flag("terms", transposed & (count != 2), "it is transposed and has no product, or a magnitude")


def _check_terms(plan: Plan, found: Contradictions) -> None:
    """Terms lie within their files, are numbers, and have as many elements as rows and columns make."""
    terms = plan["terms"]
    check_bytes(plan, "terms", found)
    bits, nbytes = stored_bits(terms), ints(terms, "nbytes")
    wanted = _areas(ints(terms, "num_rows"), _columns(plan))
    is_view = lists(terms, "view_strides")[0] > 0
    found.flag("terms", ~is_view & (nbytes * 8 != wanted * bits), "nbytes is not that of its rows")
    shape = lists(terms, "view_shape")
    found.flag("terms", (shape[0] > 0) != is_view, "a view has a shape or strides only")
    found.flag("terms", is_view & (products(*shape) != wanted), "its view has another size than its rows")
    check_views("terms", terms, shape, found, span=nbytes * 8 // bits, rank=shape[0])
    _check_numbers(plan, "terms", found)


def _check_products(plan: Plan, found: Contradictions) -> None:
    """Factors lie within their files, are numbers, and have the shapes of up, down and magnitude."""
    terms, factors = plan["terms"], plan["factors"]
    check_bytes(plan, "factors", found)
    counts = ints(terms, "num_factors")
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(starts(counts), counts)
    rows, rank, columns = ints(terms, "num_rows")[owner], ints(terms, "rank")[owner], _columns(plan)[owner]
    is_up = (place == 0) != (ints(terms, "transposed") == 1)[owner]
    wanted = np.where(place == 2, rows, _areas(rank, np.where(is_up, rows, columns)))
    wrong = ints(factors, "nbytes") * 8 != wanted * stored_bits(factors)
    found.flag("factors", wrong, "nbytes is not that of its shape")
    _check_numbers(plan, "factors", found)


def _check_numbers(plan: Plan, name: str, found: Contradictions) -> None:
    dtype, words = codes(plan[name], "dtype")
    is_code = np.array([not DType(word).is_mergeable for word in words], dtype=np.bool_)[dtype]
    found.flag(name, is_code, "arithmetic reads codes")


def _check_runs(plan: Plan, found: Contradictions) -> None:
    """Runs lie within the rows that they go to and come from; a term gives a row once."""
    assemblies, runs = plan["assemblies"], plan["runs"]
    counts = ints(assemblies, "num_runs")
    owner = np.repeat(np.arange(len(counts)), counts)
    to, start, count, term = (ints(runs, name) for name in ("to_row", "from_row", "count", "term"))
    unknown = (term < 0) | (term >= ints(assemblies, "num_terms")[owner])
    found.flag("runs", unknown, "its assembly has no such term")
    if unknown.any():
        return
    real = ints(assemblies, "real_rows")[owner]
    stored = ints(plan["terms"], "num_rows")[ints(assemblies, "first_term")[owner] + term]
    found.flag("runs", (count < 1) | (to < 0) | (to > real - count), "it leaves its assembly")
    found.flag("runs", (start < 0) | (start > stored - count), "it leaves its term")
    if found:
        return
    same = np.diff(owner) == 0
    ahead = (np.diff(to) < 0) | ((np.diff(to) == 0) & (np.diff(term) <= 0))
    found.flag("runs", np.append(False, same & ahead)[: len(to)], "it stands behind a later row or term")
    order = np.lexsort((to, term, owner))
    again = (np.diff(owner[order]) == 0) & (np.diff(term[order]) == 0)
    again &= (to + count)[order][:-1] > to[order][1:]
    broken = np.zeros(len(to), dtype=np.bool_)
    broken[order[1:]] = again
    found.flag("runs", broken, "its term gives a row twice")


def _columns(plan: Plan) -> Ints:
    """Columns of each term ``[terms]``."""
    return np.repeat(ints(plan["assemblies"], "num_columns"), ints(plan["assemblies"], "num_terms"))


def _areas(height: Ints, width: Ints) -> Ints:
    """Elements of matrices; -1 where it is no size below 2**62."""
    sides = np.stack([height, width], axis=1)
    return products(np.full(len(sides), 2, dtype=np.int64), sides.ravel())
