"""Proves the rows of a plan: that they tile every tensor, and that their parts and inputs fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raymerge.checkpoints.views import row_major
from raymerge.dtypes import DType
from raymerge.merge_plan.checks.bytes import Contradictions, check_bytes, check_views, stored_bits
from raymerge.merge_plan.checks.gathers import check_assembled, holds_view
from raymerge.merge_plan.columns import Flags, Ints, codes, gather, ints, lists, products, starts, sums
from raymerge.merge_plan.expressions import Expression
from raymerge.merge_plan.plan import Plan
from raymerge.methods import Access, find_method

_LARGEST_TRIED = 1 << 28
# Elements of a row whose views are tried out, at a byte each. The largest fused expert known has 84 million.


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns that several checks need. R rows, P parts, I inputs."""

    table: pa.Table
    """The rows."""
    parts: pa.Table
    """Their parts."""
    inputs: pa.Table
    """Their inputs."""
    is_flat: Flags
    """``[R]``."""
    is_copy: Flags
    """``[R]``: whether the bytes are moved unread."""
    num_elements: Ints
    """``[R]``."""
    num_parts: Ints
    """``[R]``."""
    num_inputs: Ints
    """``[R]``."""
    row_of_part: Ints
    """``[P]``."""
    row_of_input: Ints
    """``[I]``."""
    part_of_input: Ints
    """``[I]``: index among all parts."""
    part_sizes: Ints
    """``[P]``: elements of each part."""
    is_assembled: Flags
    """``[I]``: whether it is made of rows of other tensors."""
    is_strided: Flags
    """``[I]``: whether it, or what it is assembled of, lies within a fused tensor."""


def check_rows(plan: Plan, found: Contradictions) -> None:
    """Check rows, parts and inputs, whose references to other tables hold."""
    _check_runs(plan, found)
    if found:
        return
    rows = _rows(plan)
    _check_tiling(plan, rows, found)
    _check_parts(plan, rows, found)
    _check_inputs(plan, rows, found)
    check_assembled(plan, rows.part_of_input, found)
    _check_copies(plan, rows, found)


def _check_runs(plan: Plan, found: Contradictions) -> None:
    """Parts and inputs are taken once each, in order, and each input belongs to a part of its row."""
    rows = plan["rows"]
    is_unread = np.array([each.is_unread for each in plan.expressions], dtype=np.bool_)
    is_unread = is_unread[ints(rows, "expression")]
    for table, first, number in (
        ("parts", "first_part", "num_parts"),
        ("inputs", "first_input", "num_inputs"),
    ):
        counts = ints(rows, number)
        least = np.where(is_unread & (table == "inputs"), 0, 1)
        if (counts < least).any() or counts.sum() != plan[table].num_rows:
            found.say("table rows", f"{number} does not take every one of the {table}")
        else:
            found.flag("rows", ints(rows, first) != starts(counts), f"{first} is not behind the row before")
    if found:
        return
    sources = np.array(
        [len(each.bind(keys=(), shape=()).sources) + each.has_base for each in plan.expressions],
        dtype=np.int64,
    )
    per_part = np.array([1 if e.is_copy else n for e, n in zip(plan.expressions, sources, strict=True)])
    wanted = per_part.astype(np.int64)[ints(rows, "expression")]
    num_parts, num_inputs = ints(rows, "num_parts"), ints(rows, "num_inputs")
    found.flag("rows", num_inputs != num_parts * wanted, "it has inputs too many or too few")
    if found:
        return
    part = np.arange(num_inputs.sum()) - np.repeat(starts(num_inputs), num_inputs)
    found.flag(
        "inputs", ints(plan["inputs"], "part") != part // np.repeat(wanted, num_inputs), "part is wrong"
    )


def _rows(plan: Plan) -> _Rows:
    rows, parts, inputs = plan["rows"], plan["parts"], plan["inputs"]
    num_parts, num_inputs = ints(rows, "num_parts"), ints(rows, "num_inputs")
    index = np.arange(rows.num_rows)
    row_of_input = np.repeat(index, num_inputs)
    assembly = ints(inputs, "assembly")
    is_copy = np.array([each.is_copy for each in plan.expressions], dtype=np.bool_)
    return _Rows(
        table=rows,
        parts=parts,
        inputs=inputs,
        is_flat=ints(rows, "is_flat") == 1,
        is_copy=is_copy[ints(rows, "expression")],
        num_elements=ints(rows, "num_elements"),
        num_parts=num_parts,
        num_inputs=num_inputs,
        row_of_part=np.repeat(index, num_parts),
        row_of_input=row_of_input,
        part_of_input=ints(rows, "first_part")[row_of_input] + ints(inputs, "part"),
        part_sizes=products(*lists(parts, "shape")),
        is_assembled=assembly >= 0,
        is_strided=(lists(inputs, "view_strides")[0] > 0) | holds_view(plan)[assembly],
    )


def _check_tiling(plan: Plan, rows: _Rows, found: Contradictions) -> None:
    """The rows, in file order, cover every tensor exactly once."""
    tensors = plan["tensors"]
    tensor, offset, nbytes = (ints(rows.table, name) for name in ("tensor", "offset", "nbytes"))
    shard = ints(rows.table, "shard")
    found.flag("rows", shard != ints(tensors, "shard")[tensor], "it is in another shard than its tensor")
    dtype, words = codes(tensors, "dtype")
    expression = ints(rows.table, "expression")
    written = [(each.encode.code_dtype if each.encode else each.cast).value for each in plan.expressions]
    casts = np.array([_number(word, words) for word in written], dtype=np.int64)
    found.flag("rows", casts[expression] != dtype[tensor], "it is written in another dtype than its tensor's")
    bits = np.array([each.cast.bits for each in plan.expressions], dtype=np.int64)[expression]
    found.flag("rows", (rows.num_elements < 0) | (rows.num_elements * bits != nbytes * 8), "nbytes is wrong")
    known = np.array([len(each.content) if each.is_constant else -1 for each in plan.expressions])
    known = known.astype(np.int64)[expression]
    found.flag("rows", (known >= 0) & (known != nbytes), "it is not as long as the bytes that it consists of")
    first = np.append(True, np.diff(tensor) != 0)[: len(tensor)]
    last = np.append(first[1:], True)[: len(tensor)]
    reached = np.where(first, ints(tensors, "offset")[tensor], np.roll(offset + nbytes, 1))
    found.flag("rows", offset != reached, "it leaves a hole or overlaps in its tensor")
    end = (ints(tensors, "offset") + ints(tensors, "nbytes"))[tensor]
    found.flag("rows", last & (offset + nbytes != end), "it is the last of a tensor that ends elsewhere")
    runs = np.bincount(tensor[first], minlength=tensors.num_rows)
    found.flag("tensors", runs != 1, "its rows are missing or do not stand together")
    found.flag("rows", np.append(False, np.diff(shard) < 0)[: len(shard)], "it stands behind a later shard")


def _number(word: str, words: list[str]) -> int:
    return words.index(word) if word in words else -1


def _check_parts(plan: Plan, rows: _Rows, found: Contradictions) -> None:
    """Parts fill their row; the pieces of a cut tensor follow each other; views stay within the row."""
    found.flag("parts", rows.part_sizes < 0, "its shape is not one of sizes")
    lengths = lists(rows.parts, "view_strides")[0]
    strided = np.bincount(rows.row_of_part, weights=lengths > 0, minlength=len(rows.num_parts)) > 0
    read_strided = np.bincount(rows.row_of_input, weights=rows.is_strided, minlength=len(rows.num_parts)) > 0
    plain = (rows.num_parts == 1) & ~strided & ~read_strided
    found.flag("rows", rows.is_flat != plain, "is_flat is wrong")
    found.flag("rows", rows.is_copy & ~plain, "a copy of bytes has parts or views")
    filled = sums(rows.num_parts, rows.part_sizes)
    found.flag("rows", ~rows.is_flat & (filled != rows.num_elements), "its parts do not fill it")
    _check_pieces(plan, rows, found)
    span = rows.num_elements[rows.row_of_part]
    shape = lists(rows.parts, "shape")
    check_views("parts", rows.parts, shape, found, span=span, rank=shape[0])
    if not found:
        _check_coverage(rows, found)


def _check_coverage(rows: _Rows, found: Contradictions) -> None:
    """The parts of a row that is not row-major are all of its elements, each once.

    Their sizes are known to add up, so that it is enough that no element is left out. The same few patterns
    stand for all experts of all layers, and each is tried once.
    """
    tried: dict[tuple[object, ...], bool] = {}
    first = starts(rows.num_parts)
    broken = np.zeros(len(first), dtype=np.bool_)
    columns = [rows.parts.column(name) for name in ("view_offset", "shape", "view_strides")]
    for row in np.flatnonzero(~rows.is_flat & (rows.num_elements <= _LARGEST_TRIED)):
        views = [column.slice(first[row], rows.num_parts[row]).to_pylist() for column in columns]
        pattern = (int(rows.num_elements[row]), repr(views))
        if pattern not in tried:
            tried[pattern] = _covers(pattern[0], zip(*views, strict=True))
        broken[row] = not tried[pattern]
    found.flag("rows", broken, "its parts leave elements out")


def _covers(num_elements: int, views: Iterable[tuple[int, list[int], list[int]]]) -> bool:
    seen = np.zeros(num_elements, dtype=np.bool_)
    for offset, shape, strides in views:
        np.lib.stride_tricks.as_strided(seen[offset:], shape, strides or row_major(tuple(shape)))[...] = True
    return bool(seen.all())


def _check_pieces(plan: Plan, rows: _Rows, found: Contradictions) -> None:
    first = ints(rows.table, "first_element")
    stop = first + rows.num_elements
    whole = rows.part_sizes[starts(rows.num_parts)]
    tensor = ints(rows.table, "tensor")
    goes_on = np.append(first[1:] == stop[:-1], False) & np.append(tensor[1:] == tensor[:-1], False)
    begins = np.append(True, goes_on[:-1] & (stop[:-1] < whole[:-1]))[: len(first)]
    begins[0:1] = False
    found.flag("rows", (first != 0) & (~rows.is_flat | ~begins), "first_element does not go on from before")
    logical = codes(rows.parts, "logical")[0][starts(rows.num_parts)]
    for values in (whole, logical, ints(rows.table, "expression")):
        other = np.append(False, values[1:] != values[:-1])[: len(values)]
        found.flag("rows", (first != 0) & other, "it goes on with another logical tensor or expression")
    ends = (stop == whole) | ((stop < whole) & goes_on)
    found.flag("rows", rows.is_flat & ~ends, "the logical tensor is not made to its end")
    whole_only = np.array([not _divides(each) for each in plan.expressions], dtype=np.bool_)
    cut = whole_only[ints(rows.table, "expression")] & (rows.num_elements != whole)
    found.flag("rows", rows.is_flat & cut, "it is a piece, and its method needs the whole tensor")


def _divides(expression: Expression) -> bool:
    method = find_method(expression.method)
    settings = expression.bind(keys=(), shape=())
    if expression.is_copy or expression.is_unread:
        return True
    return method is not None and method.access_with(settings) is Access.ELEMENT


def _check_inputs(plan: Plan, rows: _Rows, found: Contradictions) -> None:
    """Inputs lie within their files, and hold as many elements as their part."""
    inputs = rows.inputs
    check_bytes(plan, "inputs", found)
    nbytes, bits, whole = ints(inputs, "nbytes"), stored_bits(inputs), ~rows.is_assembled
    flat = rows.is_flat[rows.row_of_input]
    wanted = np.where(flat, rows.num_elements[rows.row_of_input], rows.part_sizes[rows.part_of_input])
    is_view = lists(inputs, "view_strides")[0] > 0
    found.flag(
        "inputs", whole & ~is_view & (nbytes * 8 != wanted * bits), "nbytes is not that of its elements"
    )
    shape = lists(inputs, "view_shape")
    found.flag("inputs", (shape[0] > 0) != is_view, "a view has a shape or strides only")
    found.flag(
        "inputs", whole & is_view & (products(*shape) != wanted), "its view has another size than its part"
    )
    check_views("inputs", inputs, shape, found, span=nbytes * 8 // bits, rank=shape[0])
    _check_dtypes(plan, rows, found)


def _check_dtypes(plan: Plan, rows: _Rows, found: Contradictions) -> None:
    """Copies read what they write, arithmetic reads numbers."""
    dtype, words = codes(rows.inputs, "dtype")
    written = np.array([DType(each.cast) for each in plan.expressions])[ints(rows.table, "expression")]
    read = np.array([DType(word) for word in words])[dtype] if len(dtype) else written[:0]
    changed = rows.is_copy[rows.row_of_input] & (read != written[rows.row_of_input])
    found.flag("inputs", changed, "a copy of bytes reads another dtype")
    codes_read = np.array([not DType(word).is_mergeable for word in words], dtype=np.bool_)[dtype]
    codes_read &= ints(rows.inputs, "scales") < 0
    found.flag("inputs", codes_read & ~rows.is_copy[rows.row_of_input], "arithmetic reads codes")
    copied = rows.is_copy[rows.row_of_input] & rows.is_assembled
    found.flag("inputs", copied, "a copy of bytes is assembled of rows")


def _check_copies(plan: Plan, rows: _Rows, found: Contradictions) -> None:
    """A repeated row points at an earlier one of the same content, which names it, and at no copy."""
    copy_of = ints(rows.table, "copy_of")
    index = np.arange(len(copy_of))
    found.flag("rows", (copy_of < -1) | (copy_of >= index), "copy_of is not an earlier row")
    if found:
        return
    copies = index[copy_of >= 0]
    models = copy_of[copies]
    order = np.argsort(models, kind="stable")
    lengths, named = lists(rows.table, "also")
    agrees = np.array_equal(lengths, np.bincount(models, minlength=len(copy_of)))
    if not agrees or not np.array_equal(named, copies[order]):
        found.say("table rows", "'also' does not name the rows that are copies of each row, in order")
    different = copy_of[models] >= 0
    for column in ("nbytes", "num_elements", "first_element", "expression", "num_parts", "num_inputs"):
        values = ints(rows.table, column)
        different |= values[copies] != values[models]
    _flag_copies(found, copies, different, index)
    if not found:
        _flag_copies(found, copies, _reads_differ(plan, rows, copies, models), index)


def _flag_copies(found: Contradictions, copies: Ints, different: Flags, index: Ints) -> None:
    found.flag("rows", np.isin(index, copies[different]), "it differs from the row that it is a copy of")


def _reads_differ(plan: Plan, rows: _Rows, copies: Ints, models: Ints) -> Flags:
    """Whether a row reads other bytes than the one it is a copy of ``[copies]``; their counts agree."""
    first, counts = ints(rows.table, "first_input"), rows.num_inputs[copies]
    mine, theirs = gather(first[copies], counts), gather(first[models], counts)
    unlike = np.zeros(len(mine), dtype=np.bool_)
    key = codes(plan["inputs"], "key")[0]
    for values in (
        key,
        *(ints(plan["inputs"], name) for name in ("source", "offset", "nbytes", "assembly", "scales")),
    ):
        unlike |= values[mine] != values[theirs]
    owner = np.repeat(np.arange(len(copies)), counts)
    return np.bincount(owner, weights=unlike, minlength=len(copies)) > 0
