"""Proves that ops make every byte of their tensors once, of bytes, views and scales that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymerge.checkpoints.dcp.store import ASSEMBLED, ASSEMBLED_NBYTES
from raymerge.checkpoints.quantisation.encoding import Encoding, Made, QuantSpec
from raymerge.checkpoints.views import row_major
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import MADE, Expression, made_part
from raymerge.merge_plan.plan import (
    Flags,
    Ints,
    Plan,
    codes,
    equal_texts,
    ints,
    last_values,
    lists,
    members_of_runs,
    reduced,
    starts,
    sums,
)
from raymerge.methods import Takes

_REMEDY = (
    "Make the plan anew; if this comes again, it is a bug in raymerge: please report it with the recipe."
)
_LARGEST_SIDE = 1 << 40
"""No matrix has more rows or columns; sums of two of them stay far from overflowing."""
_LARGEST_TRIED = 1 << 28
# Elements of an op whose views are tried out, at a byte each. The largest fused expert known has 84 million.


def contradiction(where: str, what: str) -> Problem:
    return Problem(f"plan, {where}", f"{what}.", _REMEDY)


class Columns:
    """A table's columns of numbers and switches, each an attribute: int64 ``[rows]``."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.lists: dict[str, tuple[Ints, Ints]] = {}
        """Of each column of lists their lengths ``[rows]`` and all their values in a row."""
        self._words: dict[str, tuple[Ints, list[str]]] = {}
        for field in table.schema:
            if pa.types.is_list(field.type):
                self.lists[field.name] = lists(table, field.name)
            elif pa.types.is_integer(field.type) or pa.types.is_boolean(field.type):
                setattr(self, field.name, ints(table, field.name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Ints: ...

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def numbers(self, name: str) -> Ints:
        """Equal texts of a column as one number each ``[rows]``."""
        return equal_texts(self.table, name)[0]

    def words(self, name: str) -> tuple[Ints, list[str]]:
        """A column of texts; see ``codes``."""
        if name not in self._words:
            self._words[name] = codes(self.table, name)
        return self._words[name]


def products(lengths: Ints, values: Ints) -> Ints:
    """Product of each list ``[rows]``; 1 for an empty one, -1 where it is no size below 2**62."""
    return reduced(lengths, values, start=1, multiply=True)


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


class Check:
    """The columns of a plan whose tables are complete, and what in them contradicts itself."""

    tensors: Columns
    ops: Columns
    parts: Columns
    inputs: Columns
    scales: Columns
    gathers: Columns
    gather_inputs: Columns
    factors: Columns
    runs: Columns
    segments: Columns
    shards: Columns
    files: Columns
    dispositions: Columns

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problems: list[Problem] = []
        self.expressions, self.encodings = plan.expressions, plan.encodings
        self.tables = {name: Columns(table) for name, table in plan.tables.items()}
        vars(self).update(self.tables)

    def run(self, *steps: Callable[[Check], None]) -> None:
        """Steps of which each counts on what those before it prove."""
        for step in steps:
            if not self.problems:
                step(self)

    def say(self, where: str, what: str) -> None:
        self.problems.append(contradiction(where, what))

    def flag(self, table: str, broken: Flags, what: str, *, of: Ints | None = None) -> None:
        """A rule that the flagged rows of a table ``[rows]`` break, if there are any; ``of``: the rows of it
        that alone were asked."""
        if of is not None:
            flags = np.zeros(of.max(initial=-1) + 1, dtype=np.bool_)
            flags[of[broken]] = True
            broken = flags
        count = int(np.count_nonzero(broken))
        if count:
            more = f" ({count - 1} more rows alike)" if count > 1 else ""
            self.say(f"table {table}, row {int(np.argmax(broken))}", what + more)

    def of_ops(self, value: Callable[[Expression], int]) -> Ints:
        """A number of each op's expression ``[ops]``."""
        return np.array([value(each) for each in self.expressions], dtype=np.int64)[self.ops.expression]

    @cached_property
    def is_copy(self) -> Flags:
        return np.equal(self.of_ops(lambda each: each.is_copy), 1)

    @cached_property
    def op_of_part(self) -> Ints:
        return np.repeat(np.arange(len(self.ops)), self.ops.num_parts)

    @cached_property
    def op_of_input(self) -> Ints:
        return np.repeat(np.arange(len(self.ops)), self.ops.num_inputs)

    @cached_property
    def part_of_input(self) -> Ints:
        """Index among all parts ``[inputs]``."""
        return self.ops.first_part[self.op_of_input] + self.inputs.part

    @cached_property
    def first_parts(self) -> Ints:
        return starts(self.ops.num_parts)

    @cached_property
    def part_sizes(self) -> Ints:
        """Elements of each part; -1 where its shape is not one of sizes."""
        return products(*self.parts.lists["shape"])

    @cached_property
    def last_sides(self) -> Ints:
        """The last dimension of each part; 1 without one."""
        return last_values(*self.parts.lists["shape"], default=1)

    @cached_property
    def gather_input_columns(self) -> Ints:
        return np.repeat(self.gathers.num_columns, self.gathers.num_gather_inputs)


# Ops -------------------------------------------------------------------------------------------------


def check_ops(check: Check) -> None:
    _check_ownership(check)
    if check.problems:
        return
    _check_tiling(check)
    _check_parts(check)
    _check_inputs(check)
    _check_gathered(check)
    _check_copies(check)


def _check_ownership(check: Check) -> None:
    """Parts and inputs are taken once each, in order, and each input belongs to a part of its op."""
    ops = check.ops
    _check_taken(check, "ops", "part", 1)
    _check_taken(check, "ops", "input", 1 - check.of_ops(lambda each: each.is_unread))
    if check.problems:
        return
    per_part = check.of_ops(_num_sources)
    check.flag("ops", ops.num_inputs != ops.num_parts * per_part, "it has inputs too many or too few")
    if check.problems:
        return
    position = np.arange(ops.num_inputs.sum()) - np.repeat(starts(ops.num_inputs), ops.num_inputs)
    part = position // np.repeat(per_part, ops.num_inputs)
    check.flag("inputs", check.inputs.part != part, "part is wrong")


def _check_taken(check: Check, table: str, owned: str, least: Ints | int) -> None:
    """Rows of ``table`` take all rows of the table of what they own, ``least`` at least, in order."""
    counts: Ints = getattr(check.tables[table], f"num_{owned}s")
    if (counts < least).any() or counts.sum() != len(check.tables[f"{owned}s"]):
        check.say(f"table {table}", f"num_{owned}s does not take every one of the {owned}s")
        return
    first: Ints = getattr(check.tables[table], f"first_{owned}")
    check.flag(table, first != starts(counts), f"first_{owned} is not behind the row before")


def _num_sources(expression: Expression) -> int:
    sources = expression.bind(keys=(), shape=()).sources
    return 1 if expression.is_copy else len(sources) + expression.has_base


def _check_tiling(check: Check) -> None:
    """The ops, in file order, cover every tensor exactly once."""
    tensors, ops = check.tensors, check.ops
    tensor, offset, nbytes, shard = ops.tensor, ops.offset, ops.nbytes, ops.shard
    check.flag("ops", shard != tensors.shard[tensor], "it is in another shard than its tensor")
    dtype, words = tensors.words("dtype")
    numbers = {word: number for number, word in enumerate(words)}
    written = check.of_ops(lambda each: numbers.get(_stored_dtype(each).value, -1))
    check.flag("ops", written != dtype[tensor], "it is written in another dtype than its tensor's")
    bits = check.of_ops(lambda each: each.cast.bits)
    count = ops.num_elements
    check.flag("ops", (count < 0) | (count * bits != nbytes * 8), "nbytes is wrong")
    known = check.of_ops(lambda each: len(each.content) if each.is_constant else -1)
    check.flag("ops", (known >= 0) & (known != nbytes), "it is not as long as the bytes that it consists of")
    first = np.append(True, np.diff(tensor) != 0)[: len(tensor)]
    last = np.append(first[1:], True)[: len(tensor)]
    reached = np.where(first, tensors.offset[tensor], np.roll(offset + nbytes, 1))
    check.flag("ops", offset != reached, "it leaves a hole or overlaps in its tensor")
    end = (tensors.offset + tensors.nbytes)[tensor]
    check.flag("ops", last & (offset + nbytes != end), "it is the last of a tensor that ends elsewhere")
    runs = np.bincount(tensor[first], minlength=len(tensors))
    check.flag("tensors", runs != 1, "its ops are missing or do not stand together")
    check.flag("ops", np.append(False, np.diff(shard) < 0)[: len(shard)], "it stands behind a later shard")


def _stored_dtype(expression: Expression) -> DType:
    return expression.encode.format.code_dtype if expression.encode else expression.cast


def _check_parts(check: Check) -> None:
    """Parts fill their op; the pieces of a cut tensor follow each other; views stay within the op."""
    ops, count = check.ops, len(check.ops)
    check.flag("parts", check.part_sizes < 0, "its shape is not one of sizes")
    views = check.parts.lists["view_strides"][0] > 0
    strided = np.bincount(check.op_of_part, weights=views, minlength=count) > 0
    reads_view = (check.inputs.lists["view_strides"][0] > 0) | _holds_view(check)[check.inputs.gather]
    read_strided = np.bincount(check.op_of_input, weights=reads_view, minlength=count) > 0
    plain = (ops.num_parts == 1) & ~strided & ~read_strided
    is_flat = ops.is_flat == 1
    check.flag("ops", is_flat != plain, "is_flat is wrong")
    check.flag("ops", check.is_copy & ~plain, "a copy of bytes has parts or views")
    filled = sums(ops.num_parts, check.part_sizes)
    is_padded = _are_padded(check)
    check.flag("ops", ~is_flat & ~is_padded & (filled != ops.num_elements), "its parts do not fill it")
    _check_pieces(check, is_flat)
    _check_views(check, "parts", "shape", span=ops.num_elements[check.op_of_part])
    if not check.problems:
        _check_coverage(check, is_flat | is_padded)


def _are_padded(check: Check) -> Flags:
    """Whether ops of codes are all rows of their one part, each with unused codes at its end."""
    ops, first, row = check.ops, check.first_parts, _padded_rows(check)
    encodes = check.of_ops(lambda each: each.encode is not None) == 1
    num_rows = check.part_sizes[first] // np.maximum(1, check.last_sides[first])
    is_whole = (num_rows * row[first] == ops.num_elements) & (check.parts.view_offset[first] == 0)
    return np.asarray((ops.num_parts == 1) & encodes & (row[first] > 0) & is_whole, dtype=np.bool_)


def _holds_view(check: Check) -> Flags:
    """Whether an input of a gather lies within a fused tensor ``[gathers + 1]``; last: no gather."""
    viewed, counts = check.gather_inputs.lists["view_strides"][0] > 0, check.gathers.num_gather_inputs
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owner, weights=viewed, minlength=len(counts) + 1) > 0


def _check_pieces(check: Check, is_flat: Flags) -> None:
    ops = check.ops
    first, tensor = ops.first_element, ops.tensor
    stop, whole = first + ops.num_elements, check.part_sizes[check.first_parts]
    goes_on = np.append(first[1:] == stop[:-1], False) & np.append(tensor[1:] == tensor[:-1], False)
    begins = np.append(True, goes_on[:-1] & (stop[:-1] < whole[:-1]))[: len(first)]
    begins[0:1] = False
    check.flag("ops", (first != 0) & (~is_flat | ~begins), "first_element does not go on from before")
    logical = check.parts.words("logical")[0][check.first_parts]
    for values in (whole, logical, ops.expression):
        other = np.append(False, values[1:] != values[:-1])[: len(values)]
        check.flag("ops", (first != 0) & other, "it goes on with another logical tensor or expression")
    ends = (stop == whole) | ((stop < whole) & goes_on)
    check.flag("ops", is_flat & ~ends, "the logical tensor is not made to its end")
    cut = (check.of_ops(lambda each: each.divides(())) == 0) & (ops.num_elements != whole)
    check.flag("ops", is_flat & cut, "it is a piece, and its method needs the whole tensor")


def _check_coverage(check: Check, is_flat: Flags) -> None:
    """The parts of an op that is not row-major are all of its elements, each once.

    Their sizes are known to add up, so that it is enough that no element is left out. The same few patterns
    stand for all experts of all layers, and each is tried once."""
    ops, tried = check.ops, dict[tuple[object, ...], bool]()
    broken = np.zeros(len(ops), dtype=np.bool_)
    columns = [check.parts.table.column(name) for name in ("view_offset", "shape", "view_strides")]
    for op in np.flatnonzero(~is_flat & (ops.num_elements <= _LARGEST_TRIED)):
        first, count = check.first_parts[op], ops.num_parts[op]
        views = [column.slice(first, count).to_pylist() for column in columns]
        pattern = (int(ops.num_elements[op]), repr(views))
        if pattern not in tried:
            tried[pattern] = _covers(pattern[0], zip(*views, strict=True))
        broken[op] = not tried[pattern]
    check.flag("ops", broken, "its parts leave elements out")


def _covers(num_elements: int, views: Iterable[tuple[int, list[int], list[int]]]) -> bool:
    seen = np.zeros(num_elements, dtype=np.bool_)
    for offset, shape, strides in views:
        np.lib.stride_tricks.as_strided(seen[offset:], shape, strides or row_major(tuple(shape)))[...] = True
    return bool(seen.all())


def _check_inputs(check: Check) -> None:
    """Inputs lie within their files, hold as many elements as their part, and are what they are used for."""
    ops, inputs, op = check.ops, check.inputs, check.op_of_input
    is_gathered = inputs.gather >= 0
    flat = (ops.is_flat == 1)[op]
    expected = np.where(flat, ops.num_elements[op], check.part_sizes[check.part_of_input])
    _check_stored(check, "inputs", expected, ("elements", "part"), asked=~is_gathered)
    dtype, words = inputs.words("dtype")
    copies = check.is_copy[op]
    written = np.array([each.cast for each in check.expressions])[ops.expression]
    read = np.array([DType(word) for word in words])[dtype] if len(dtype) else written[:0]
    check.flag("inputs", copies & (read != written[op]), "a copy of bytes reads another dtype")
    methods = (each.definition for each in check.expressions)
    of_integers = np.array([each is not None and each.takes is Takes.INTEGERS for each in methods], np.bool_)
    codes = _is_code(inputs) & (inputs.scales < 0) & ~of_integers[ops.expression][op]
    check.flag("inputs", codes & ~copies, "arithmetic reads codes")
    check.flag("inputs", copies & is_gathered, "a copy of bytes is gathered from rows")


def _check_stored(
    check: Check, name: str, expected: Ints, words: tuple[str, str], *, asked: Flags | bool = True
) -> None:
    """Reads lie within files, and hold ``expected`` elements ``[rows]`` where that is asked."""
    table = check.tables[name]
    _check_bytes(check, name)
    count, is_view = table.nbytes * 8 // _bits(table), table.lists["view_strides"][0] > 0
    wrong = asked & ~is_view & (table.nbytes * 8 != expected * _bits(table))
    check.flag(name, wrong, f"nbytes is not that of its {words[0]}")
    shape = table.lists["view_shape"]
    check.flag(name, (shape[0] > 0) != is_view, "a view has a shape or strides only")
    other = asked & is_view & (products(*shape) != expected)
    check.flag(name, other, f"its view has another size than its {words[1]}")
    _check_views(check, name, "view_shape", span=count)


def _check_bytes(check: Check, name: str) -> None:
    table = check.tables[name]
    outside = _outside_files(check, table.source, table.words("key"), table.offset, table.nbytes)
    check.flag(name, outside, "it is not within a file of its source")


def _outside_files(
    check: Check, source: Ints, key: tuple[Ints, list[str]], offset: Ints, nbytes: Ints
) -> Flags:
    """Whether bytes ``[n]`` are not within a file of their source; keys as ``codes`` gives them."""
    number, keys = key
    sources = check.plan.manifest["sources"]
    sizes = np.full((len(sources), max(len(keys), 1)), -1, dtype=np.int64)
    position = {name: index for index, name in enumerate(keys)}
    for index, entry in enumerate(sources):
        assembled = ASSEMBLED, entry.get(ASSEMBLED_NBYTES, -1), ""
        for name, size, _ in (*entry["files"], assembled):
            if name in position:
                sizes[index, position[name]] = size
    size = sizes[source, number]
    return np.asarray(
        (offset < 0) | (nbytes < 0) | (offset > size) | (nbytes > size - offset), dtype=np.bool_
    )


def _bits(table: Columns) -> Ints:
    """Bits of each read's elements ``[rows]``."""
    return _of_dtypes(table, lambda each: each.bits)


def _is_code(table: Columns) -> Flags:
    return np.equal(_of_dtypes(table, lambda each: each.is_mergeable), 0)


def _of_dtypes(table: Columns, value: Callable[[DType], int]) -> Ints:
    """A number of each row's dtype ``[rows]``."""
    dtype, words = table.words("dtype")
    return np.array([value(DType(word)) for word in words], dtype=np.int64)[dtype]


def _check_views(check: Check, name: str, column: str, *, span: Ints) -> None:
    """Views of ``table``, of the shapes in a column, stay within ``span`` elements ``[rows]``."""
    table = check.tables[name]
    shape, (lengths, strides) = table.lists[column], table.lists["view_strides"]
    viewed, offset = lengths > 0, table.view_offset
    check.flag(name, viewed & (lengths != shape[0]), "its view has another rank than its shape")
    check.flag(name, ~viewed & (offset != 0), "it has an offset and no view")
    if check.problems or not viewed.any():
        return
    sizes = shape[1][np.repeat(viewed, shape[0])]
    reach = sums(lengths, np.maximum(sizes - 1, 0) * strides)
    empty = (products(*shape) == 0) & viewed
    beyond = (offset < 0) | (reach < 0) | ((offset + reach >= span) & ~empty)
    check.flag(name, viewed & beyond, "its view leaves its region")


def _check_copies(check: Check) -> None:
    """A repeated op points at an earlier one of the same content, which names it, and at no copy."""
    ops, copy_of = check.ops, check.ops.copy_of
    index = np.arange(len(ops))
    check.flag("ops", (copy_of < -1) | (copy_of >= index), "copy_of is not an earlier op")
    if check.problems:
        return
    copies = index[copy_of >= 0]
    models = copy_of[copies]
    lengths, named = ops.lists["also"]
    agrees = np.array_equal(lengths, np.bincount(models, minlength=len(ops)))
    if not agrees or not np.array_equal(named, copies[np.argsort(models, kind="stable")]):
        check.say("table ops", "'also' does not name the ops that are copies of each op, in order")
    different = copy_of[models] >= 0
    counts = (ops.num_parts, ops.num_inputs)
    for values in (ops.nbytes, ops.num_elements, ops.first_element, ops.expression, *counts):
        different |= values[copies] != values[models]
    what = "it differs from the op that it is a copy of"
    check.flag("ops", different, what, of=copies)
    if not check.problems:
        check.flag("ops", _reads_differ(check, copies, models), what, of=copies)


def _reads_differ(check: Check, copies: Ints, models: Ints) -> Flags:
    """Whether an op reads other bytes than the one it is a copy of ``[copies]``; their counts agree."""
    inputs, first, counts = check.inputs, check.ops.first_input, check.ops.num_inputs[copies]
    mine, theirs = members_of_runs(first[copies], counts), members_of_runs(first[models], counts)
    unlike = np.zeros(len(mine), dtype=np.bool_)
    place = inputs.words("key")[0], inputs.source, inputs.offset, inputs.nbytes
    for values in (*place, inputs.gather, inputs.scales):
        unlike |= values[mine] != values[theirs]
    owner = np.repeat(np.arange(len(copies)), counts)
    return np.bincount(owner, weights=unlike, minlength=len(copies)) > 0


# Gathers -------------------------------------------------------------------------------------------

_READ = ("source", "key", "offset", "nbytes", "dtype", "view_offset", "view_shape", "view_strides")


def check_gathers(check: Check) -> None:
    _check_sequence(check)
    if check.problems:
        return
    _check_sizes(check)
    if check.problems:
        return
    expected = _areas(check.gather_inputs.num_rows, check.gather_input_columns)
    _check_stored(check, "gather_inputs", expected, ("rows", "rows"))
    check.flag("gather_inputs", _is_code(check.gather_inputs), "arithmetic reads codes")
    _check_products(check)
    _check_runs(check)


def _check_gathered(check: Check) -> None:
    """Inputs that are gathered have the size of their part ``[inputs]``, and name their first input."""
    gathers = check.gathers
    which = np.flatnonzero(check.inputs.gather >= 0)
    if not len(which):
        return
    part, own = check.part_of_input[which], check.inputs.gather[which]
    columns = np.where(check.parts.lists["shape"][0][part] > 1, check.last_sides[part], 1)
    sizes = _areas(gathers.num_rows, gathers.num_columns)[own]
    wrong = (columns != gathers.num_columns[own]) | (check.part_sizes[part] != sizes)
    check.flag("inputs", wrong, "its gather has another shape than its part", of=which)
    named = check.inputs.table.select(_READ).take(which).to_pylist()
    gather_inputs = check.gather_inputs.table.select(_READ).take(gathers.first_gather_input[own]).to_pylist()
    unlike = np.array(
        [mine != first for mine, first in zip(named, gather_inputs, strict=True)], dtype=np.bool_
    )
    check.flag("inputs", unlike, "it does not name the first input of its gather", of=which)


def _check_sequence(check: Check) -> None:
    """Inputs name all gathers, in order; what these are made of is taken once each, in order."""
    _check_named(check, "gather", "gathers")
    _check_taken(check, "gathers", "gather_input", 1)
    _check_taken(check, "gathers", "run", 0)
    _check_taken(check, "gather_inputs", "factor", 0)


def _check_named(check: Check, column: str, table: str) -> None:
    """Inputs name all rows of a table, in order."""
    named: Ints = getattr(check.inputs, column)
    known = len(check.tables[table])
    check.flag("inputs", (named < -1) | (named >= known), f"{column} is not one of {known}")
    if not named_in_order(named, known):
        check.say(f"table {table}", "inputs do not name every one of them, in order")


def _check_sizes(check: Check) -> None:
    """Rows, columns and padding of gathers, and ranks of products, are sizes."""
    gathers, gather_inputs = check.gathers, check.gather_inputs
    rows, columns, real = gathers.num_rows, gathers.num_columns, gathers.real_rows
    absurd = (rows < 0) | (columns < 1) | (rows > _LARGEST_SIDE) | (columns > _LARGEST_SIDE)
    check.flag("gathers", absurd, "it has no such number of rows or columns")
    padding = (real < 0) | (real > rows) | ((real == 0) & (rows > 0))
    check.flag("gathers", padding, "its padding is not behind rows of its own")
    stored, rank, count = gather_inputs.num_rows, gather_inputs.rank, gather_inputs.num_factors
    check.flag("gather_inputs", (stored < 0) | (stored > _LARGEST_SIDE), "it has no such number of rows")
    is_product = count > 0
    own = (count == 1) & (rank != check.gather_input_columns)
    wrong = np.where(is_product, (count > 3) | (rank < 1) | (rank > _LARGEST_SIDE) | own, rank != 0)
    check.flag("gather_inputs", wrong, "its rank and its factors do not make a product")
    scale = np.asarray(gather_inputs.table.column("scale").to_numpy(), dtype=np.float64)
    check.flag("gather_inputs", ~np.isfinite(scale) | (~is_product & (scale != 0)), "its scale is no number")
    transposed = (gather_inputs.transposed == 1) & (count != 2)
    check.flag("gather_inputs", transposed, "it is transposed and has no product, or a magnitude")


def _check_products(check: Check) -> None:
    """Factors lie within their files, are numbers, and have the shapes of up, down and magnitude; one alone
    is down."""
    gather_inputs, factors, counts = check.gather_inputs, check.factors, check.gather_inputs.num_factors
    _check_bytes(check, "factors")
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(starts(counts), counts)
    rows, columns = gather_inputs.num_rows[owner], check.gather_input_columns[owner]
    is_up = ((place == 0) & (counts > 1)[owner]) != (gather_inputs.transposed == 1)[owner]
    expected = np.where(place == 2, rows, _areas(gather_inputs.rank[owner], np.where(is_up, rows, columns)))
    check.flag("factors", factors.nbytes * 8 != expected * _bits(factors), "nbytes is not that of its shape")
    check.flag("factors", _is_code(factors), "arithmetic reads codes")


def _check_runs(check: Check) -> None:
    """Runs lie within the rows that they go to and come from; an input gives a row once."""
    gathers, runs = check.gathers, check.runs
    owner = np.repeat(np.arange(len(gathers)), gathers.num_runs)
    to, start, count, gather_input = runs.to_row, runs.from_row, runs.count, runs.input
    unknown = (gather_input < 0) | (gather_input >= gathers.num_gather_inputs[owner])
    check.flag("runs", unknown, "its gather has no such input")
    if unknown.any():
        return
    real, stored = (
        gathers.real_rows[owner],
        check.gather_inputs.num_rows[gathers.first_gather_input[owner] + gather_input],
    )
    check.flag("runs", (count < 1) | (to < 0) | (to > real - count), "it leaves its gather")
    check.flag("runs", (start < 0) | (start > stored - count), "it leaves its input")
    if check.problems:
        return
    same = np.diff(owner) == 0
    ahead = (np.diff(to) < 0) | ((np.diff(to) == 0) & (np.diff(gather_input) <= 0))
    check.flag("runs", np.append(False, same & ahead)[: len(to)], "it stands behind a later row or input")
    order = np.lexsort((to, gather_input, owner))
    again = (np.diff(owner[order]) == 0) & (np.diff(gather_input[order]) == 0)
    again &= (to + count)[order][:-1] > to[order][1:]
    check.flag("runs", again, "its input gives a row twice", of=order[1:])


def _areas(height: Ints, width: Ints) -> Ints:
    """Elements of matrices; -1 where it is no size below 2**62."""
    sides = np.stack([height, width], axis=1)
    return products(np.full(len(sides), 2, dtype=np.int64), sides.ravel())


# Scales -----------------------------------------------------------------------------------------------


def smallest_quant_spec(encoding: Encoding) -> QuantSpec:
    """How an encoding stores the smallest matrix. Raises ValueError: no matrix is stored so."""
    per_element = max(1, encoding.format.code_dtype.bits // encoding.format.code_bits)
    return encoding.quant_spec((encoding.cut_height, lcm(encoding.block[1] or 1, per_element)))


def check_scales(check: Check) -> None:
    """Check scales that are read and made, of ops that fit in all else."""
    _check_named(check, "scales", "scales")
    if not named_in_order(check.scales.encoding, len(check.encodings)):
        check.say("manifest", "scales do not name every one of the encodings, in order")
    check.run(_check_read)
    _check_tied(check)
    _check_joined(check)
    check.run(_check_codes, _check_made)


class _ScaleRows(NamedTuple):
    """What the scale rows of some matrices take ``[n]``."""

    elements: Ints
    """Elements of a scale row; 0 where no matrix of so many columns is stored so."""
    scales_nbytes: Ints
    num_elements: Ints
    """Elements of the tensor of codes that a row of the matrix takes."""
    num_dimensions: Ints
    tensor_scale_nbytes: Ints
    """Bytes of the one scale of the whole matrix; 0 for none."""
    cut_elements: Ints
    """Elements of the rows between whose runs a matrix may be cut."""
    zeros_nbytes: Ints
    """Bytes of the zero points of so many; 0 for none."""


def _scale_rows(encodings: Sequence[Encoding], number: Ints, columns: Ints) -> _ScaleRows:
    """The scale rows of matrices of these encodings and columns ``[n]``; each different pair is looked at
    once."""
    known = np.where((columns > 0) & (columns < _LARGEST_SIDE), columns, 0)
    pairs, inverse = np.unique(number * _LARGEST_SIDE + known, return_inverse=True)
    each = [_scale_row(encodings[pair // _LARGEST_SIDE], pair % _LARGEST_SIDE) for pair in pairs.tolist()]
    errors = np.array(each, dtype=np.int64).reshape(-1, len(_ScaleRows._fields))
    return _ScaleRows(*errors.T[:, inverse])


def _scale_row(encoding: Encoding, columns: int) -> tuple[int, ...]:
    try:
        quant_spec = encoding.quant_spec((encoding.scale_row_height, columns)) if columns else None
    except ValueError:
        quant_spec = None
    if quant_spec is None or quant_spec.scale_row_height * columns > _LARGEST_SIDE:
        return (0,) * len(_ScaleRows._fields)
    row, of_tensor = quant_spec.codes_shape[1:], quant_spec.tensor_scale_dtype
    whole = 0 if of_tensor is None else of_tensor.nbytes(1)
    return (
        quant_spec.scale_row_height * columns,
        quant_spec.scales_nbytes(quant_spec.scale_row_height),
        prod(row),
        len(row),
        whole,
        quant_spec.cut_height * columns,
        encoding.made_nbytes("zero_points", quant_spec.cut_height, columns),
    )


def _check_read(check: Check) -> None:
    """Codes have scales for all of their scale rows, which lie within a file of the same source."""
    inputs, scales = check.inputs, check.scales
    scale_rows = _scale_rows(check.encodings, scales.encoding, scales.columns)
    check.flag("scales", scale_rows.elements == 0, "no matrix of so many columns is stored so")
    if check.problems:
        return
    which = np.flatnonzero(inputs.scales >= 0)
    flag = partial(check.flag, "inputs", of=which)
    own, part, op = inputs.scales[which], check.part_of_input[which], check.op_of_input[which]
    scale_rows = _ScaleRows(*(values[own] for values in scale_rows))
    count, columns = (inputs.nbytes * 8 // _bits(inputs))[which], scales.columns[own]
    zeros = -(-count // scale_rows.cut_elements) * scale_rows.zeros_nbytes
    _check_scale_files(check, which, scale_rows.tensor_scale_nbytes, zeros)
    dtype, words = inputs.words("dtype")
    numbers = {word: number for number, word in enumerate(words)}
    of_codes = [numbers.get(each.format.element_dtype.value, -1) for each in check.encodings]
    other = dtype[which] != np.array(of_codes, dtype=np.int64)[scales.encoding[own]]
    flag(other, "it is no codes of the encoding of its scales")
    flag(check.is_copy[op], "a copy of bytes has scales")
    flag(inputs.gather[which] >= 0, "it is made of rows of other tensors, and has scales")
    flag(count % columns != 0, "its codes are no whole rows")
    expected = -(-count // scale_rows.elements) * scale_rows.scales_nbytes
    flag(scales.nbytes[own] != expected, "its scales are not those of its codes")
    broken = _cuts_scale_rows(check, op, part, scale_rows.cut_elements)
    flag(broken, "it is a piece that does not begin and end between scale rows")
    flag(
        _spans_matrices(check, part, scale_rows.cut_elements), "its scale rows are not those of its matrices"
    )
    lengths, strides = inputs.lists["view_strides"]
    # Of a matrix within a tensor one stride is that of its rows, or of every other one of them.
    apart = maxima(lengths, strides)[which] % columns != 0
    wrong = np.where((lengths > 0)[which], apart, check.last_sides[part] != columns)
    flag(wrong, "its scales are those of other columns")


def _check_scale_files(check: Check, which: Ints, of_matrix: Ints, zeros: Ints) -> None:
    """Scales and zero points lie within a file of the source that their codes are read from; given are bytes
    of the one scale of the whole matrix, and of the zero points."""
    table = Columns(check.scales.table.take(check.inputs.scales[which]))
    source = check.inputs.source[which]
    outside = _outside_files(check, source, table.words("key"), table.offset, table.nbytes)
    check.flag("inputs", outside, "its scales are not within a file of its source", of=which)
    for what, named, place, nbytes in (
        ("the scale of its whole tensor is", "tensor_key", table.tensor_offset, of_matrix),
        ("its zero points are", "zeros_key", table.zeros_offset, zeros),
    ):
        key = table.words(named)
        unnamed = np.array([not word for word in key[1]], dtype=np.bool_)[key[0]]
        outside = _outside_files(check, source, key, place, nbytes)
        wrong = np.where(nbytes > 0, outside, ~unnamed | (place != 0))
        check.flag("inputs", wrong, f"{what} not within a file of its source", of=which)


def _cuts_scale_rows(check: Check, op: Ints, part: Ints, elements: Ints) -> Flags:
    """Whether an op ``[n]`` begins or ends within a scale row of so many elements, but for its tensor's
    end."""
    ops = check.ops
    first, count = ops.first_element[op], ops.num_elements[op]
    within = (count % elements != 0) & (first + count != check.part_sizes[part])
    return np.asarray((ops.is_flat[op] == 1) & ((first % elements != 0) | within), dtype=np.bool_)


def _spans_matrices(check: Check, part: Ints, elements: Ints) -> Flags:
    """Whether scale rows of so many elements would go from one matrix of a part ``[n]`` into the next one.

    They are counted through the whole part, but each matrix of a stack has its own."""
    lengths, sizes = check.parts.lists["shape"]
    whole, end = check.part_sizes[part], (starts(lengths) + lengths)[part]
    stacked = lengths[part] > 2
    # No part need have dimensions.
    padded = np.append(sizes, 1)
    rows, columns = (padded[np.where(stacked, end - back, 0)] for back in (2, 1))
    matrix = rows * columns
    return np.asarray(stacked & (whole != matrix) & (matrix % elements != 0), dtype=np.bool_)


def _check_tied(check: Check) -> None:
    """Ops of scales and of codes that are made point at each other, and no others do."""
    ops, index = check.ops, np.arange(len(check.ops))
    named: dict[str, Ints] = {name: getattr(ops, name) for name in ("made_with", *MADE)}
    for name, values in named.items():
        check.flag("ops", (values < -1) | (values >= len(index)), f"{name} is not one of {len(index)}")
    if check.problems:
        return
    made_with, made = named["made_with"], ops.copy_of < 0
    is_scales = check.of_ops(lambda each: each.is_scales) == 1
    check.flag("ops", (made_with >= 0) != (is_scales & made), "made_with is not said of scales alone")
    copies = ops.lists["also"][0]
    for name in MADE:
        own = named[name]
        makes = [each.made_dtype(name) is not None for each in check.expressions]
        expected = np.array(makes, dtype=np.bool_)[ops.expression] & made
        check.flag("ops", (own >= 0) != expected, f"{name} is not said of codes alone")
        is_such = np.array([each.method == name for each in check.expressions], np.bool_)[ops.expression]
        lost = (made_with >= 0) & is_such & (own[made_with] != index)
        check.flag("ops", lost, "the op that it is made with does not name it as its scales")
        lost = (own >= 0) & (made_with[own] != index)
        check.flag("ops", lost, "its scales are made with another op")
        check.flag("ops", (own >= 0) & (copies[own] != copies), "its scales have other copies than it has")


def _check_joined(check: Check) -> None:
    """Ops that share the one scale of a matrix name each other, make such a scale, and are no copies."""
    ops = check.ops
    lengths, others = ops.lists["joined_with"]
    if not len(others):
        return
    op = np.repeat(np.arange(len(ops)), lengths)
    if ((others < 0) | (others >= len(ops))).any():
        check.say("table ops", f"joined_with names what is not one of {len(ops)}")
        return
    named = set(zip(op.tolist(), others.tolist(), strict=True))
    alone = [(other, own) not in named or own == other for own, other in zip(op, others, strict=True)]
    broken = np.array(alone, dtype=np.bool_)
    check.flag("ops", broken, "joined_with names one that does not name it", of=op)
    apart = (ops.tensor_scale[op] < 0) | (ops.tensor_scale[others] < 0)
    encodings = [check.expressions[number].encode for number in ops.expression]
    apart |= [encodings[a] != encodings[b] for a, b in zip(op, others, strict=True)]
    check.flag("ops", apart, "it is joined with codes that cannot have the same scale", of=op)


def _check_codes(check: Check) -> None:
    """Ops of codes are whole scale rows of matrices with the columns of their tensor."""
    which, scale_rows = _encoded(check)
    flag = partial(check.flag, "ops", of=which)
    flag(scale_rows.elements == 0, "no matrix of so many columns is stored so")
    if check.problems or not len(which):
        return
    ops, first = check.ops, check.first_parts[which]
    broken = _cuts_scale_rows(check, which, first, scale_rows.cut_elements)
    flag(broken, "it is a piece that does not begin and end between scale rows")
    flag(
        _spans_matrices(check, first, scale_rows.cut_elements), "its scale rows are not those of its matrices"
    )
    lengths, sizes = check.tensors.lists["shape"]
    tensor = ops.tensor[which]
    last = (starts(lengths) + lengths)[tensor] - 1
    flag(scale_rows.num_dimensions > lengths[tensor], "its tensor is no matrix of codes")
    if check.problems:
        return
    width = sizes[last] * np.where(scale_rows.num_dimensions > 1, sizes[last - 1], 1)
    flag(width != scale_rows.num_elements, "its tensor has other columns than it has")
    columns, has_rows = _part_columns(check), lengths[tensor] > scale_rows.num_dimensions
    height = np.where(has_rows, sizes[last - np.where(has_rows, scale_rows.num_dimensions, 0)], 1)
    is_part = (ops.first_element[which] != 0) | (ops.num_elements[which] != height * columns[first])
    stacks = np.array([_scales_stack(each) for each in check.expressions], dtype=np.bool_)[ops.expression]
    is_part = np.where(stacks[which], ops.nbytes[which] != check.tensors.nbytes[tensor], is_part)
    is_part &= scale_rows.tensor_scale_nbytes > 0
    flag(is_part, "it is not one matrix, or one stack, as what shares one scale must be")
    owner = check.op_of_part
    other = np.isin(owner, which) & (columns != columns[check.first_parts[owner]])
    check.flag("parts", other, "it has other columns than the first part of its op")


def _scales_stack(expression: Expression) -> bool:
    return expression.encode is not None and expression.encode.format.scales_stack


def _check_made(check: Check) -> None:
    """Scales that are made are of the dtype that their codes name, and as many as their scale rows have."""
    encoded, scale_rows = _encoded(check)
    ops = check.ops
    cast = np.array([each.cast for each in check.expressions])
    count = ops.num_elements[encoded]
    expected: Mapping[Made, Ints] = {
        "scales": -(-count // scale_rows.elements) * scale_rows.scales_nbytes,
        "tensor_scale": scale_rows.tensor_scale_nbytes,
        "zero_points": -(-count // scale_rows.cut_elements) * scale_rows.zeros_nbytes,
    }
    for name in MADE:
        own: Ints = getattr(ops, name)[encoded]
        has = own >= 0
        which, own = encoded[has], own[has]
        named = np.array([each.made_dtype(name) or each.cast for each in check.expressions])
        other = cast[ops.expression[own]] != named[ops.expression[which]]
        check.flag("ops", other, "it is of another dtype than the scales of its codes", of=own)
        other = ops.nbytes[own] != expected[name][has]
        check.flag("ops", other, "it is not as many scales as its codes have", of=own)
        _check_pairs(check, which, own, name)


def _check_pairs(check: Check, made: Ints, scales: Ints, what: Made) -> None:
    """Scales are those of the same matrix, and of pieces in the order of these, in one tensor."""
    logical, part, tensor = check.parts.table.column("logical"), check.first_parts, check.ops.tensor
    # Whole columns, as a text of its own for each of a million parts takes much more.
    called = pc.binary_join_element_wise(logical.take(pa.array(part[made])), made_part("", what), "")
    differ = pc.not_equal(logical.take(pa.array(part[scales])), called)
    other = np.asarray(differ.combine_chunks().to_numpy(zero_copy_only=False))
    check.flag("ops", other, "it is called the scales of another matrix than its codes are", of=scales)
    same = np.diff(tensor[made]) == 0
    astray = same & ((np.diff(tensor[scales]) != 0) | (np.diff(scales) <= 0))
    check.flag("ops", astray, "it does not follow the scales of the piece before", of=scales[1:])


def _part_columns(check: Check) -> Ints:
    """Elements of a row of the tensor that each part lies in, be it as it is there or transposed."""
    apart = last_values(*check.parts.lists["view_strides"], default=1)
    padded = _padded_rows(check)
    return np.where(apart > 1, apart, np.where(padded > 0, padded, check.last_sides))


def _padded_rows(check: Check) -> Ints:
    """Elements of a row of the tensor, of parts that leave out the end of each row; 0 of others."""
    lengths, strides = check.parts.lists["view_strides"]
    apart, first = last_values(lengths, strides, default=1), np.append(strides, 0)[starts(lengths)]
    is_padded = (lengths == 2) & (apart == 1) & (first % np.maximum(1, check.last_sides) != 0)
    return np.where(is_padded, first, 0)


def _encoded(check: Check) -> tuple[Ints, _ScaleRows]:
    encodings = [each.encode for each in check.expressions if each.encode is not None]
    encodes = np.array([each.encode is not None for each in check.expressions], dtype=np.bool_)
    place, number = np.cumsum(encodes) - 1, check.ops.expression
    which = np.flatnonzero(encodes[number])
    columns = _part_columns(check)[check.first_parts[which]]
    return which, _scale_rows(encodings, place[number[which]].astype(np.int64), columns)
