"""Proves the scales of a plan: those that codes are read with, and the rows of those that are made.

A matrix that is stored as codes with scales is taken by whole bands of rows, since the rows of a band share
scales. A row of codes makes its scales too, and the row of these is made by no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from raymerge.checkpoints.numbers import code_dtype
from raymerge.checkpoints.quantisation.encoding import Encoding, Packing
from raymerge.dtypes import DType
from raymerge.merge_plan.check_reads import Contradictions, outside_files, stored_bits
from raymerge.merge_plan.columns import (
    Flags,
    Ints,
    codes,
    ints,
    last_values,
    lists,
    maxima,
    named_in_order,
    products,
    starts,
)
from raymerge.merge_plan.expressions import Expression, scales_part
from raymerge.merge_plan.plan import Plan

_LARGEST_SIDE = 1 << 40
"""No matrix has as many columns; what is computed from them then stays far from overflowing."""
_KINDS: Mapping[str, bool] = {"scales": False, "tensor_scale": True}
"""Columns of rows that name rows of scales, with whether these are the one scale of a matrix."""


def smallest_packing(encoding: Encoding) -> Packing:
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
    """Bytes of its scales."""
    row_elements: Ints
    """Elements of the tensor of codes that a row of the matrix takes."""
    row_dimensions: Ints
    """Its last dimensions that these are."""
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
    """Inputs with scales ``[n]``."""

    which: Ints
    """Their numbers."""
    scales: Ints
    """Those of their scales."""
    part: Ints
    """Index of the part among all parts."""
    row: Ints
    """Index of the row."""


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
    _flag(found, read, count % columns[read.scales] != 0, "its codes are no whole rows")
    wanted = -(-count // elements) * per_band
    _flag(found, read, nbytes[read.scales] != wanted, "its scales are not those of its codes")
    _check_begins(plan, read, elements, found)
    _flag(found, read, _spans_matrices(plan, read.part, elements), "its bands are not those of its matrices")
    _check_columns(plan, read, columns[read.scales], found)


def _flag(found: Contradictions, read: _Read, broken: Flags, what: str) -> None:
    _flag_some(found, "inputs", read.which, broken, what)


def _flag_some(found: Contradictions, table: str, which: Ints, broken: Flags, what: str) -> None:
    """A rule that some of the rows of a table were asked for."""
    flags = np.zeros(which.max(initial=-1) + 1, dtype=np.bool_)
    flags[which[broken]] = True
    found.flag(table, flags, what)


def _check_files(plan: Plan, read: _Read, bands: _Bands, found: Contradictions) -> None:
    """Scales lie within a file of the source that their codes are read from."""
    table, source = plan["scales"].take(read.scales), ints(plan["inputs"], "source")[read.which]
    outside = outside_files(plan, source, codes(table, "key"), ints(table, "offset"), ints(table, "nbytes"))
    _flag(found, read, outside, "its scales are not within a file of its source")
    place, key = ints(table, "tensor_offset"), codes(table, "tensor_key")
    nbytes = bands.tensor_scale_nbytes[read.scales]
    unnamed = np.array([not word for word in key[1]], dtype=np.bool_)[key[0]]
    outside = outside_files(plan, source, key, place, nbytes)
    wrong = np.where(nbytes > 0, outside, ~unnamed | (place != 0))
    _flag(found, read, wrong, "the scale of its whole tensor is not within a file of its source")


def _check_inputs(plan: Plan, read: _Read, found: Contradictions) -> None:
    """What has scales are codes of their encoding, which arithmetic reads as they are stored."""
    dtype, words = codes(plan["inputs"], "dtype")
    of_codes = [code_dtype(smallest_packing(each)).value for each in plan.encodings]
    wanted = np.array([words.index(each) if each in words else -1 for each in of_codes], dtype=np.int64)
    encoding = ints(plan["scales"], "encoding")[read.scales]
    _flag(found, read, dtype[read.which] != wanted[encoding], "it is no codes of the encoding of its scales")
    is_copy = np.array([each.is_copy for each in plan.expressions], dtype=np.bool_)
    copied = is_copy[ints(plan["rows"], "expression")[read.row]]
    _flag(found, read, copied, "a copy of bytes has scales")
    assembled = ints(plan["inputs"], "assembly")[read.which] >= 0
    _flag(found, read, assembled, "it is made of rows of other tensors, and has scales")


def _check_begins(plan: Plan, read: _Read, elements: Ints, found: Contradictions) -> None:
    """Pieces of a cut tensor begin and end between bands, but for its end."""
    broken = _cuts_bands(plan, read.row, read.part, elements)
    _flag(found, read, broken, "it is a piece that does not begin and end between bands")


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
    _flag(found, read, wrong, "its scales are those of other columns")


def _check_tied(plan: Plan, found: Contradictions) -> None:
    """Rows of scales and of codes that are made point at each other, and no others do."""
    rows, expressions = plan["rows"], plan.expressions
    named = {name: ints(rows, name) for name in ("made_with", *_KINDS)}
    index = np.arange(rows.num_rows)
    for name, values in named.items():
        found.flag("rows", (values < -1) | (values >= len(index)), f"{name} is not one of {len(index)}")
    if found:
        return
    made_with, number, made = named["made_with"], ints(rows, "expression"), ints(rows, "copy_of") < 0
    is_scales = np.array([each.is_scales for each in expressions], dtype=np.bool_)[number]
    found.flag("rows", (made_with >= 0) != (is_scales & made), "made_with is not said of scales alone")
    of_matrix = np.array([each.is_tensor_scale for each in expressions], dtype=np.bool_)[number]
    copies = lists(rows, "also")[0]
    for name, is_tensor_scale in _KINDS.items():
        own = named[name]
        makes = [_makes(each.encode, is_tensor_scale=is_tensor_scale) for each in expressions]
        wanted = np.array(makes, dtype=np.bool_)[number] & made
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
    _flag_some(
        found, "rows", row, np.array(alone, dtype=np.bool_), "joined_with names one that does not name it"
    )
    number, whole = ints(rows, "expression"), ints(rows, "tensor_scale")
    apart = (whole[row] < 0) | (whole[others] < 0)
    encodings = [each.encode for each in plan.expressions]
    apart |= [encodings[number[a]] != encodings[number[b]] for a, b in zip(row, others, strict=True)]
    _flag_some(found, "rows", row, apart, "it is joined with codes that cannot have the same scale")


def _makes(encode: Encoding | None, *, is_tensor_scale: bool) -> bool:
    """Whether codes of an encoding have scales of this kind."""
    if encode is None:
        return False
    return encode.tensor_scale_dtype is not None if is_tensor_scale else encode.scales_nbytes(1) > 0


def _check_codes(plan: Plan, found: Contradictions) -> None:
    """Rows of codes are whole bands of matrices with the columns of their tensor."""
    which, bands = _encoded(plan)
    _flag_some(found, "rows", which, bands.elements == 0, "no matrix of so many columns is stored so")
    if found or not len(which):
        return
    rows, first = plan["rows"], starts(ints(plan["rows"], "num_parts"))
    broken = _cuts_bands(plan, which, first[which], bands.elements)
    _flag_some(found, "rows", which, broken, "it is a piece that does not begin and end between bands")
    spans = _spans_matrices(plan, first[which], bands.elements)
    _flag_some(found, "rows", which, spans, "its bands are not those of its matrices")
    lengths, sizes = lists(plan["tensors"], "shape")
    tensor = ints(rows, "tensor")[which]
    last = (starts(lengths) + lengths)[tensor] - 1
    flat = bands.row_dimensions > lengths[tensor]
    _flag_some(found, "rows", which, flat, "its tensor is no matrix of codes")
    if found:
        return
    width = sizes[last] * np.where(bands.row_dimensions > 1, sizes[last - 1], 1)
    _flag_some(found, "rows", which, width != bands.row_elements, "its tensor has other columns than it has")
    columns = _part_columns(plan)
    has_rows = lengths[tensor] > bands.row_dimensions
    height = np.where(has_rows, sizes[last - np.where(has_rows, bands.row_dimensions, 0)], 1)
    begin, count = (ints(rows, name)[which] for name in ("first_element", "num_elements"))
    part_of_one = (begin != 0) | (count != height * columns[first[which]])
    part_of_one &= bands.tensor_scale_nbytes > 0
    _flag_some(found, "rows", which, part_of_one, "it is not one matrix, as what shares one scale must be")
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
        _flag_some(found, "rows", own, other, "it is of another dtype than the scales of its codes")
        wanted = bands.tensor_scale_nbytes if is_tensor_scale else per_band
        wrong = nbytes[own] != wanted[has]
        _flag_some(found, "rows", own, wrong, "it is not as many scales as its codes have")
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
    _flag_some(found, "rows", scales, other, "it is called the scales of another matrix than its codes are")
    tensor = ints(plan["rows"], "tensor")
    same = np.diff(tensor[made]) == 0
    astray = same & ((np.diff(tensor[scales]) != 0) | (np.diff(scales) <= 0))
    _flag_some(found, "rows", scales[1:], astray, "it does not follow the scales of the piece before")


def _part_columns(plan: Plan) -> Ints:
    """Elements of a row of the tensor that each part lies in, be it as it is there or transposed."""
    own = last_values(*lists(plan["parts"], "shape"), default=1)
    apart = last_values(*lists(plan["parts"], "view_strides"), default=1)
    return np.where(apart > 1, apart, own)


def _encoded(plan: Plan) -> tuple[Ints, _Bands]:
    """The rows that are codes, and their bands."""
    rows, expressions = plan["rows"], plan.expressions
    encodings = [each.encode for each in expressions if each.encode is not None]
    place = np.cumsum([each.encode is not None for each in expressions]) - 1
    encodes = np.array([each.encode is not None for each in expressions], dtype=np.bool_)
    number = ints(rows, "expression")
    which = np.flatnonzero(encodes[number])
    columns = _part_columns(plan)
    part = starts(ints(rows, "num_parts"))[which]
    return which, _bands(encodings, place[number[which]].astype(np.int64), columns[part])
