"""Proves that bytes, views and gathered rows that tables name are there; collects contradictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymerge.checkpoints.quantisation.encoding import Encoding, QuantSpec
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import Expression, scales_part
from raymerge.merge_plan.plan import (
    Flags,
    Ints,
    Plan,
    codes,
    ints,
    last_values,
    lists,
    maxima,
    named_in_order,
    products,
    starts,
    sums,
)

_REMEDY = (
    "Make the plan anew; if this comes again, it is a bug in raymerge: please report it with the recipe."
)


class Contradictions:
    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def __bool__(self) -> bool:
        return bool(self._problems)

    def say(self, where: str, what: str) -> None:
        self._problems.append(Problem(f"plan, {where}", f"{what}.", _REMEDY))

    def flag(self, table: str, broken: Flags, what: str) -> None:
        """A rule that the flagged rows of a table ``[rows]`` break, if there are any."""
        count = int(np.count_nonzero(broken))
        if count:
            more = f" ({count - 1} more rows alike)" if count > 1 else ""
            self.say(f"table {table}, row {int(np.argmax(broken))}", what + more)

    def flag_some(self, table: str, which: Ints, broken: Flags, what: str) -> None:
        """A rule that was asked of some rows ``which`` of a table alone."""
        flags = np.zeros(which.max(initial=-1) + 1, dtype=np.bool_)
        flags[which[broken]] = True
        self.flag(table, flags, what)

    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._problems)


def check_bytes(plan: Plan, name: str, found: Contradictions) -> None:
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
    found.flag_some("inputs", which, wrong, "its assembly has another shape than its part")
    named = table.select(_READ).take(which).to_pylist()
    terms = plan["terms"].select(_READ).take(ints(assemblies, "first_term")[own]).to_pylist()
    unlike = np.array([mine != first for mine, first in zip(named, terms, strict=True)], dtype=np.bool_)
    found.flag_some("inputs", which, unlike, "it does not name the first term of its assembly")


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
    check_taken(plan, found, "assemblies", "term", 1)
    check_taken(plan, found, "assemblies", "run", 0)
    check_taken(plan, found, "terms", "factor", 0)


def check_taken(plan: Plan, found: Contradictions, table: str, owned: str, least: Ints | int) -> None:
    """Rows of ``table`` take all rows of the table of what they own, ``least`` at least, in order."""
    number = f"num_{owned}s"
    counts = ints(plan[table], number)
    if (counts < least).any() or counts.sum() != plan[f"{owned}s"].num_rows:
        found.say(f"table {table}", f"{number} does not take every one of the {owned}s")
    else:
        behind = ints(plan[table], f"first_{owned}") != starts(counts)
        found.flag(table, behind, f"first_{owned} is not behind the row before")


def of_expressions(plan: Plan, value: Callable[[Expression], int]) -> Ints:
    values = np.array([value(each) for each in plan.expressions], dtype=np.int64)
    return values[ints(plan["rows"], "expression")]


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
    return np.repeat(ints(plan["assemblies"], "num_columns"), ints(plan["assemblies"], "num_terms"))


def _areas(height: Ints, width: Ints) -> Ints:
    """Elements of matrices; -1 where it is no size below 2**62."""
    sides = np.stack([height, width], axis=1)
    return products(np.full(len(sides), 2, dtype=np.int64), sides.ravel())


_KINDS: Mapping[str, bool] = {"scales": False, "tensor_scale": True}
"""Columns of rows that name rows of scales, with whether these are the one scale of a matrix."""


def smallest_packing(encoding: Encoding) -> QuantSpec:
    """How the smallest matrix that an encoding is for is stored.

    Raises:
        ValueError: no matrix is stored so.
    """
    return encoding.packing((encoding.band, encoding.block[1] or 1))


def check_scales(plan: Plan, found: Contradictions) -> None:
    """Check scales that are read and made, of rows that fit in all else."""
    _check_named(plan, found)
    if not found:
        _check_read(plan, found)
    _check_tied(plan, found)
    _check_joined(plan, found)
    if not found:
        _check_codes(plan, found)
    if not found:
        _check_made(plan, found)


class _Bands(NamedTuple):
    """What the bands of some matrices take ``[n]``."""

    elements: Ints
    """Elements of a band; 0 where no matrix of so many columns is stored so."""
    scales_nbytes: Ints
    row_elements: Ints
    """Elements of the tensor of codes that a row of the matrix takes."""
    row_dimensions: Ints
    tensor_scale_nbytes: Ints
    """Bytes of the one scale of the whole matrix; 0 for none."""


def _bands(encodings: Sequence[Encoding], number: Ints, columns: Ints) -> _Bands:
    """The bands of matrices of these encodings and columns ``[n]``; each different pair is looked at once."""
    known = np.where((columns > 0) & (columns < _LARGEST_SIDE), columns, 0)
    pairs, inverse = np.unique(number * _LARGEST_SIDE + known, return_inverse=True)
    each = [_band(encodings[pair // _LARGEST_SIDE], pair % _LARGEST_SIDE) for pair in pairs.tolist()]
    found = np.array(each, dtype=np.int64).reshape(-1, len(_Bands._fields))
    return _Bands(*found.T[:, inverse])


def _band(encoding: Encoding, columns: int) -> tuple[int, ...]:
    try:
        packing = encoding.packing((encoding.band, columns)) if columns else None
    except ValueError:
        packing = None
    if packing is None or packing.band * columns > _LARGEST_SIDE:
        return (0,) * len(_Bands._fields)
    row = packing.codes_shape[1:]
    of_tensor = packing.tensor_scale_dtype
    whole = 0 if of_tensor is None else of_tensor.nbytes(1)
    return packing.band * columns, packing.scales_nbytes(packing.band), prod(row), len(row), whole


def _check_named(plan: Plan, found: Contradictions) -> None:
    """Inputs name all scales, in order, and these all encodings."""
    named, known = ints(plan["inputs"], "scales"), plan["scales"].num_rows
    found.flag("inputs", (named < -1) | (named >= known), f"scales is not one of {known}")
    if not named_in_order(named, known):
        found.say("table scales", "inputs do not name every one of them, in order")
    if not named_in_order(ints(plan["scales"], "encoding"), len(plan.manifest["encodings"])):
        found.say("manifest", "scales do not name every one of the encodings, in order")


class _Read(NamedTuple):
    which: Ints
    scales: Ints
    part: Ints
    """Index of the part among all parts."""
    row: Ints


def _check_read(plan: Plan, found: Contradictions) -> None:
    """Codes have scales for all of their bands, which lie within a file of the same source."""
    rows, inputs, table = plan["rows"], plan["inputs"], plan["scales"]
    row = np.repeat(np.arange(rows.num_rows), ints(rows, "num_inputs"))
    which = np.flatnonzero(ints(inputs, "scales") >= 0)
    row = row[which]
    part = ints(rows, "first_part")[row] + ints(inputs, "part")[which]
    read = _Read(which, ints(inputs, "scales")[which], part, row)
    encoding, columns, nbytes = (ints(table, name) for name in ("encoding", "columns", "nbytes"))
    bands = _bands(plan.encodings, encoding, columns)
    found.flag("scales", bands.elements == 0, "no matrix of so many columns is stored so")
    if found:
        return
    _check_files(plan, read, bands, found)
    _check_inputs(plan, read, found)
    count = (ints(inputs, "nbytes") * 8 // stored_bits(inputs))[read.which]
    elements, per_band = bands.elements[read.scales], bands.scales_nbytes[read.scales]
    found.flag_some("inputs", read.which, count % columns[read.scales] != 0, "its codes are no whole rows")
    wanted = -(-count // elements) * per_band
    found.flag_some(
        "inputs", read.which, nbytes[read.scales] != wanted, "its scales are not those of its codes"
    )
    _check_begins(plan, read, elements, found)
    found.flag_some(
        "inputs",
        read.which,
        _spans_matrices(plan, read.part, elements),
        "its bands are not those of its matrices",
    )
    _check_columns(plan, read, columns[read.scales], found)


def _check_files(plan: Plan, read: _Read, bands: _Bands, found: Contradictions) -> None:
    """Scales lie within a file of the source that their codes are read from."""
    table, source = plan["scales"].take(read.scales), ints(plan["inputs"], "source")[read.which]
    outside = outside_files(plan, source, codes(table, "key"), ints(table, "offset"), ints(table, "nbytes"))
    found.flag_some("inputs", read.which, outside, "its scales are not within a file of its source")
    place, key = ints(table, "tensor_offset"), codes(table, "tensor_key")
    nbytes = bands.tensor_scale_nbytes[read.scales]
    unnamed = np.array([not word for word in key[1]], dtype=np.bool_)[key[0]]
    outside = outside_files(plan, source, key, place, nbytes)
    wrong = np.where(nbytes > 0, outside, ~unnamed | (place != 0))
    found.flag_some(
        "inputs", read.which, wrong, "the scale of its whole tensor is not within a file of its source"
    )


def _check_inputs(plan: Plan, read: _Read, found: Contradictions) -> None:
    """What has scales are codes of their encoding, which arithmetic reads as they are stored."""
    dtype, words = codes(plan["inputs"], "dtype")
    of_codes = [each.format.element_dtype.value for each in plan.encodings]
    wanted = np.array([words.index(each) if each in words else -1 for each in of_codes], dtype=np.int64)
    encoding = ints(plan["scales"], "encoding")[read.scales]
    found.flag_some(
        "inputs",
        read.which,
        dtype[read.which] != wanted[encoding],
        "it is no codes of the encoding of its scales",
    )
    copied = (of_expressions(plan, lambda each: each.is_copy) == 1)[read.row]
    found.flag_some("inputs", read.which, copied, "a copy of bytes has scales")
    assembled = ints(plan["inputs"], "assembly")[read.which] >= 0
    found.flag_some("inputs", read.which, assembled, "it is made of rows of other tensors, and has scales")


def _check_begins(plan: Plan, read: _Read, elements: Ints, found: Contradictions) -> None:
    """Pieces of a cut tensor begin and end between bands, but for its end."""
    broken = _cuts_bands(plan, read.row, read.part, elements)
    found.flag_some("inputs", read.which, broken, "it is a piece that does not begin and end between bands")


def _cuts_bands(plan: Plan, row: Ints, part: Ints, elements: Ints) -> Flags:
    """Whether a row ``[n]`` begins or ends within a band of so many elements."""
    rows = plan["rows"]
    first, count, flat = (ints(rows, name)[row] for name in ("first_element", "num_elements", "is_flat"))
    whole = products(*lists(plan["parts"], "shape"))[part]
    within = (count % elements != 0) & (first + count != whole)
    return np.asarray((flat == 1) & ((first % elements != 0) | within), dtype=np.bool_)


def _spans_matrices(plan: Plan, part: Ints, elements: Ints) -> Flags:
    """Whether bands of so many elements would go from one matrix of a part ``[n]`` into the next one.

    They are counted through the whole part, but each matrix of a stack has its own.
    """
    lengths, sizes = lists(plan["parts"], "shape")
    whole, end = products(lengths, sizes)[part], (starts(lengths) + lengths)[part]
    stacked = lengths[part] > 2
    # No part need have dimensions.
    padded = np.append(sizes, 1)
    rows, columns = (padded[np.where(stacked, end - back, 0)] for back in (2, 1))
    matrix = rows * columns
    return np.asarray(stacked & (whole != matrix) & (matrix % elements != 0), dtype=np.bool_)


def _check_columns(plan: Plan, read: _Read, columns: Ints, found: Contradictions) -> None:
    """Scales count the columns that the codes have: of the part, or of the tensor that it lies within."""
    lengths, strides = lists(plan["inputs"], "view_strides")
    viewed = (lengths > 0)[read.which]
    own = last_values(*lists(plan["parts"], "shape"), default=1)[read.part]
    # Of a matrix within a tensor one stride is that of its rows, or of every other one of them.
    apart = maxima(lengths, strides)[read.which] % columns != 0
    wrong = np.where(viewed, apart, own != columns)
    found.flag_some("inputs", read.which, wrong, "its scales are those of other columns")


def _check_tied(plan: Plan, found: Contradictions) -> None:
    """Rows of scales and of codes that are made point at each other, and no others do."""
    rows = plan["rows"]
    named = {name: ints(rows, name) for name in ("made_with", *_KINDS)}
    index = np.arange(rows.num_rows)
    for name, values in named.items():
        found.flag("rows", (values < -1) | (values >= len(index)), f"{name} is not one of {len(index)}")
    if found:
        return
    made_with, made = named["made_with"], ints(rows, "copy_of") < 0
    is_scales = of_expressions(plan, lambda each: each.is_scales) == 1
    found.flag("rows", (made_with >= 0) != (is_scales & made), "made_with is not said of scales alone")
    of_matrix = of_expressions(plan, lambda each: each.is_tensor_scale)
    copies = lists(rows, "also")[0]
    for name, is_tensor_scale in _KINDS.items():
        own = named[name]
        makes = partial(_makes, is_tensor_scale=is_tensor_scale)
        wanted = (of_expressions(plan, makes) == 1) & made
        found.flag("rows", (own >= 0) != wanted, f"{name} is not said of codes alone")
        lost = (made_with >= 0) & (of_matrix == is_tensor_scale) & (own[made_with] != index)
        found.flag("rows", lost, "the row that it is made with does not name it as its scales")
        lost = (own >= 0) & (made_with[own] != index)
        found.flag("rows", lost, "its scales are made with another row")
        found.flag("rows", (own >= 0) & (copies[own] != copies), "its scales have other copies than it has")


def _check_joined(plan: Plan, found: Contradictions) -> None:
    """Rows that share the one scale of a matrix name each other, make such a scale, and are no copies."""
    rows = plan["rows"]
    lengths, others = lists(rows, "joined_with")
    if not len(others):
        return
    row = np.repeat(np.arange(rows.num_rows), lengths)
    if ((others < 0) | (others >= rows.num_rows)).any():
        found.say("table rows", f"joined_with names what is not one of {rows.num_rows}")
        return
    named = set(zip(row.tolist(), others.tolist(), strict=True))
    alone = [(other, own) not in named or own == other for own, other in zip(row, others, strict=True)]
    broken = np.array(alone, dtype=np.bool_)
    found.flag_some("rows", row, broken, "joined_with names one that does not name it")
    number, whole = ints(rows, "expression"), ints(rows, "tensor_scale")
    apart = (whole[row] < 0) | (whole[others] < 0)
    encodings = [each.encode for each in plan.expressions]
    apart |= [encodings[number[a]] != encodings[number[b]] for a, b in zip(row, others, strict=True)]
    found.flag_some("rows", row, apart, "it is joined with codes that cannot have the same scale")


def _makes(expression: Expression, *, is_tensor_scale: bool) -> bool:
    encode = expression.encode
    if encode is None:
        return False
    return encode.tensor_scale_dtype is not None if is_tensor_scale else encode.scales_nbytes(1) > 0


def _check_codes(plan: Plan, found: Contradictions) -> None:
    """Rows of codes are whole bands of matrices with the columns of their tensor."""
    which, bands = _encoded(plan)
    found.flag_some("rows", which, bands.elements == 0, "no matrix of so many columns is stored so")
    if found or not len(which):
        return
    rows, first = plan["rows"], starts(ints(plan["rows"], "num_parts"))
    broken = _cuts_bands(plan, which, first[which], bands.elements)
    found.flag_some("rows", which, broken, "it is a piece that does not begin and end between bands")
    spans = _spans_matrices(plan, first[which], bands.elements)
    found.flag_some("rows", which, spans, "its bands are not those of its matrices")
    lengths, sizes = lists(plan["tensors"], "shape")
    tensor = ints(rows, "tensor")[which]
    last = (starts(lengths) + lengths)[tensor] - 1
    flat = bands.row_dimensions > lengths[tensor]
    found.flag_some("rows", which, flat, "its tensor is no matrix of codes")
    if found:
        return
    width = sizes[last] * np.where(bands.row_dimensions > 1, sizes[last - 1], 1)
    found.flag_some("rows", which, width != bands.row_elements, "its tensor has other columns than it has")
    columns = _part_columns(plan)
    has_rows = lengths[tensor] > bands.row_dimensions
    height = np.where(has_rows, sizes[last - np.where(has_rows, bands.row_dimensions, 0)], 1)
    begin, count = (ints(rows, name)[which] for name in ("first_element", "num_elements"))
    part_of_one = (begin != 0) | (count != height * columns[first[which]])
    part_of_one &= bands.tensor_scale_nbytes > 0
    found.flag_some("rows", which, part_of_one, "it is not one matrix, as what shares one scale must be")
    owner = np.repeat(np.arange(rows.num_rows), ints(rows, "num_parts"))
    other = np.isin(owner, which) & (columns != columns[first[owner]])
    found.flag("parts", other, "it has other columns than the first part of its row")


def _check_made(plan: Plan, found: Contradictions) -> None:
    """Scales that are made are of the dtype that their codes name, and as many as their bands have."""
    encoded, bands = _encoded(plan)
    rows, expressions = plan["rows"], plan.expressions
    count, number, nbytes = (ints(rows, name) for name in ("num_elements", "expression", "nbytes"))
    cast = np.array([each.cast for each in expressions])
    per_band = -(-count[encoded] // bands.elements) * bands.scales_nbytes
    for name, is_tensor_scale in _KINDS.items():
        own = ints(rows, name)[encoded]
        has = own >= 0
        which, own = encoded[has], own[has]
        named = np.array([_scale_dtype(each, is_tensor_scale=is_tensor_scale) for each in expressions])
        other = cast[number[own]] != named[number[which]]
        found.flag_some("rows", own, other, "it is of another dtype than the scales of its codes")
        wanted = bands.tensor_scale_nbytes if is_tensor_scale else per_band
        wrong = nbytes[own] != wanted[has]
        found.flag_some("rows", own, wrong, "it is not as many scales as its codes have")
        _check_pairs(plan, which, own, found, is_tensor_scale=is_tensor_scale)


def _scale_dtype(expression: Expression, *, is_tensor_scale: bool) -> DType:
    """Dtype of the scales of an expression's codes; where it makes none, of its own bytes."""
    encode = expression.encode
    found = None
    if encode is not None:
        found = encode.tensor_scale_dtype if is_tensor_scale else encode.scale_dtype
    return found or expression.cast


def _check_pairs(
    plan: Plan, made: Ints, scales: Ints, found: Contradictions, *, is_tensor_scale: bool
) -> None:
    """Scales are those of the same matrix, and of pieces in the order of these, in one tensor."""
    number, words = codes(plan["parts"], "logical")
    part = starts(ints(plan["rows"], "num_parts"))
    names = zip(number[part[made]].tolist(), number[part[scales]].tolist(), strict=True)
    called = [scales_part(word, is_tensor_scale=is_tensor_scale) for word in words]
    other = np.array([words[own] != called[one] for one, own in names], dtype=np.bool_)
    found.flag_some("rows", scales, other, "it is called the scales of another matrix than its codes are")
    tensor = ints(plan["rows"], "tensor")
    same = np.diff(tensor[made]) == 0
    astray = same & ((np.diff(tensor[scales]) != 0) | (np.diff(scales) <= 0))
    found.flag_some("rows", scales[1:], astray, "it does not follow the scales of the piece before")


def _part_columns(plan: Plan) -> Ints:
    """Elements of a row of the tensor that each part lies in, be it as it is there or transposed."""
    own = last_values(*lists(plan["parts"], "shape"), default=1)
    apart = last_values(*lists(plan["parts"], "view_strides"), default=1)
    return np.where(apart > 1, apart, own)


def _encoded(plan: Plan) -> tuple[Ints, _Bands]:
    rows, expressions = plan["rows"], plan.expressions
    encodings = [each.encode for each in expressions if each.encode is not None]
    place = np.cumsum([each.encode is not None for each in expressions]) - 1
    encodes = np.array([each.encode is not None for each in expressions], dtype=np.bool_)
    number = ints(rows, "expression")
    which = np.flatnonzero(encodes[number])
    columns = _part_columns(plan)
    part = starts(ints(rows, "num_parts"))[which]
    return which, _bands(encodings, place[number[which]].astype(np.int64), columns[part])
