"""Proves from a plan's tables alone that it can be carried out: every byte made once, nothing unaccounted.

Used on every built plan, where a contradiction is a bug, and on every loaded one, where it may be damage. All
checks look at whole columns, so that a plan of 140,000 tensors is proved in about a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np
import pyarrow.compute as pc

from raymerge.architectures import declared_tie
from raymerge.checkpoints.files import is_companion
from raymerge.checkpoints.header import DATA_ALIGNMENT_NBYTES, METADATA_KEY, shard_names
from raymerge.checkpoints.json_files import parse_strict_json
from raymerge.checkpoints.views import row_major
from raymerge.dtypes import DType, config_name
from raymerge.errors import Problem
from raymerge.merge_plan.check_inputs import (
    Contradictions,
    check_assembled,
    check_assemblies,
    check_bytes,
    check_scales,
    check_taken,
    check_views,
    holds_view,
    of_expressions,
    smallest_packing,
    stored_bits,
)
from raymerge.merge_plan.dispositions import Disposition, Rule
from raymerge.merge_plan.expressions import COPY, Expression
from raymerge.merge_plan.plan import (
    FORMAT,
    SCHEMAS,
    Flags,
    Ints,
    Plan,
    codes,
    digest,
    gather,
    input_bytes,
    ints,
    joined_sums,
    lists,
    products,
    starts,
    sums,
)
from raymerge.methods import Access, BaseUse, find_method
from raymerge.storage.store import is_key

_LARGEST_TRIED = 1 << 28
# Elements of a row whose views are tried out, at a byte each. The largest fused expert known has 84 million.


class _Rows:
    """Columns that several checks need, of R rows, P parts and I inputs."""

    def __init__(self, plan: Plan) -> None:
        self.table, self.parts, self.inputs = plan["rows"], plan["parts"], plan["inputs"]
        self.is_flat = ints(self.table, "is_flat") == 1
        self.is_copy = of_expressions(plan, lambda each: each.is_copy) == 1
        self.num_elements, self.num_parts, self.num_inputs = (
            ints(self.table, name) for name in ("num_elements", "num_parts", "num_inputs")
        )
        index = np.arange(self.table.num_rows)
        self.row_of_part = np.repeat(index, self.num_parts)
        self.row_of_input = np.repeat(index, self.num_inputs)
        self.part_of_input = ints(self.table, "first_part")[self.row_of_input] + ints(self.inputs, "part")
        """``[I]``: index among all parts."""
        self.part_sizes = products(*lists(self.parts, "shape"))
        """``[P]``: elements of each part."""
        assembly = ints(self.inputs, "assembly")
        self.is_assembled = assembly >= 0
        self.is_strided = (lists(self.inputs, "view_strides")[0] > 0) | holds_view(plan)[assembly]
        """``[I]``: whether it, or what it is assembled of, lies within a fused tensor."""


def check_rows(plan: Plan, found: Contradictions) -> None:
    _check_runs(plan, found)
    if found:
        return
    rows = _Rows(plan)
    _check_tiling(plan, rows, found)
    _check_parts(plan, rows, found)
    _check_inputs(plan, rows, found)
    check_assembled(plan, rows.part_of_input, found)
    _check_copies(plan, rows, found)


def _check_runs(plan: Plan, found: Contradictions) -> None:
    """Parts and inputs are taken once each, in order, and each input belongs to a part of its row."""
    rows = plan["rows"]
    is_unread = of_expressions(plan, lambda each: each.is_unread) == 1
    check_taken(plan, found, "rows", "part", 1)
    check_taken(plan, found, "rows", "input", np.where(is_unread, 0, 1))
    if found:
        return
    wanted = of_expressions(plan, _num_sources)
    num_parts, num_inputs = ints(rows, "num_parts"), ints(rows, "num_inputs")
    found.flag("rows", num_inputs != num_parts * wanted, "it has inputs too many or too few")
    if found:
        return
    part = np.arange(num_inputs.sum()) - np.repeat(starts(num_inputs), num_inputs)
    found.flag(
        "inputs", ints(plan["inputs"], "part") != part // np.repeat(wanted, num_inputs), "part is wrong"
    )


def _num_sources(expression: Expression) -> int:
    """Inputs of each part, the base included."""
    sources = expression.bind(keys=(), shape=()).sources
    return 1 if expression.is_copy else len(sources) + expression.has_base


def _check_tiling(plan: Plan, rows: _Rows, found: Contradictions) -> None:
    """The rows, in file order, cover every tensor exactly once."""
    tensors = plan["tensors"]
    tensor, offset, nbytes = (ints(rows.table, name) for name in ("tensor", "offset", "nbytes"))
    shard = ints(rows.table, "shard")
    found.flag("rows", shard != ints(tensors, "shard")[tensor], "it is in another shard than its tensor")
    dtype, words = codes(tensors, "dtype")
    written = of_expressions(plan, lambda each: _number(_stored_dtype(each).value, words))
    found.flag("rows", written != dtype[tensor], "it is written in another dtype than its tensor's")
    bits = of_expressions(plan, lambda each: each.cast.bits)
    found.flag("rows", (rows.num_elements < 0) | (rows.num_elements * bits != nbytes * 8), "nbytes is wrong")
    known = of_expressions(plan, lambda each: len(each.content) if each.is_constant else -1)
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


def _stored_dtype(expression: Expression) -> DType:
    return expression.encode.format.code_dtype if expression.encode else expression.cast


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
    cut = (of_expressions(plan, _divides) == 0) & (rows.num_elements != whole)
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


_LENGTH_NBYTES = 8
_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = {dtype.value: dtype for dtype in DType}


def check_plan(plan: Plan) -> tuple[Problem, ...]:
    """What in a plan contradicts itself, or nothing.

    A plan that has problems of its own is incomplete by right; its dispositions are then checked for what
    they say, not for what is missing.
    """
    found = Contradictions()
    _check_form(plan, found)
    if not found:
        _check_references(plan, found)
    if not found:
        _check_tensors(plan, found)
        _check_shards(plan, found)
        _check_files(plan, found)
        _check_expressions(plan.expressions, found)
        _check_dispositions(plan, found)
        _check_config(plan, found)
    if not found:
        check_assemblies(plan, found)
    if not found:
        check_rows(plan, found)
    if not found:
        check_scales(plan, found)
    if not found:
        _check_segments(plan, found)
    if not found and digest(plan.manifest, plan.tables) != plan.digest:
        found.say("digest", "it is not that of the plan's values")
    return found.problems()


def _check_form(plan: Plan, found: Contradictions) -> None:
    """Tables with the columns that are known, and a manifest with the entries that are needed."""
    for name, schema in SCHEMAS.items():
        table = plan.tables.get(name)
        if table is None or not table.schema.equals(schema):
            found.say(f"table {name}", "it is missing or has other columns")
        elif any(column.null_count for column in table.columns):
            found.say(f"table {name}", "it holds nulls")
    try:
        _touch_manifest(plan)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        found.say("manifest", f"an entry is missing or of another kind ({error!r})")


def _touch_manifest(plan: Plan) -> None:
    manifest = plan.manifest
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}")
    for source in manifest["sources"]:
        if not isinstance(source["num_tensors"], int):
            raise TypeError("num_tensors")
        if not all(is_key(key) and isinstance(nbytes, int) for key, nbytes, _ in source["files"]):
            raise TypeError("files")
    manifest["sources"][manifest["donor"]]
    for expression in plan.expressions:
        if not isinstance(expression.method, str) or not isinstance(expression.settings, str):
            raise TypeError("expressions")
        float(expression.bind(keys=(), shape=()).position)
        len(expression.content if expression.is_constant else b"")
    for encoding in (*plan.encodings, *(each.encode for each in plan.expressions if each.encode is not None)):
        smallest_packing(encoding)
    manifest["config"].keys()
    if not all(isinstance(name, str) for name in manifest["left_out"]):
        raise TypeError("left_out")
    if not all(isinstance(manifest["tie"][name], str) for name in ("head", "embedding")):
        raise TypeError("tie")
    if manifest["tie"]["tied"] not in (True, False, None):
        raise TypeError("tied")
    manifest["recipe"].get("dtype"), manifest["recipe"].get("out_dtype")


def _check_references(plan: Plan, found: Contradictions) -> None:
    """Numbers that point at rows of other tables do point at one; texts are of the words that are known."""
    num_rows = {name: table.num_rows for name, table in plan.tables.items()}
    limits = {
        ("tensors", "shard"): num_rows["shards"],
        ("rows", "tensor"): num_rows["tensors"],
        ("rows", "shard"): num_rows["shards"],
        ("rows", "expression"): len(plan.manifest["expressions"]),
        ("inputs", "source"): len(plan.manifest["sources"]),
        ("scales", "encoding"): len(plan.manifest["encodings"]),
        ("terms", "source"): len(plan.manifest["sources"]),
        ("factors", "source"): len(plan.manifest["sources"]),
        ("segments", "shard"): num_rows["shards"],
        ("dispositions", "source"): len(plan.manifest["sources"]),
    }
    for (table, column), limit in limits.items():
        values = ints(plan[table], column)
        found.flag(table, (values < 0) | (values >= limit), f"{column} is not one of {limit}")
    words: Mapping[tuple[str, str], set[str]] = {
        ("tensors", "dtype"): set(_DTYPES),
        ("inputs", "dtype"): set(_DTYPES),
        ("terms", "dtype"): set(_DTYPES),
        ("factors", "dtype"): set(_DTYPES),
        ("dispositions", "disposition"): {each.value for each in Disposition},
        ("dispositions", "rule"): {each.value for each in Rule},
    }
    for (table, column), known in words.items():
        unknown = set(pc.unique(plan[table].column(column)).to_pylist()) - known
        if unknown:
            found.say(f"table {table}", f"{column} has unknown values {sorted(unknown)}")


def _check_tensors(plan: Plan, found: Contradictions) -> None:
    """Names once each, sizes as dtype and shape say, and no hole or overlap in any shard."""
    tensors, shards = plan["tensors"], plan["shards"]
    found.flag("tensors", _repeated(codes(tensors, "name")[0]), "it has the name of another one")
    dtype, words = codes(tensors, "dtype")
    bits = np.array([_DTYPES[word].bits for word in words], dtype=np.int64)[dtype]
    nbytes = ints(tensors, "nbytes")
    found.flag(
        "tensors", products(*lists(tensors, "shape")) * bits != nbytes * 8, "nbytes is not its shape's"
    )
    shard, offset = ints(tensors, "shard"), ints(tensors, "offset")
    order = np.lexsort((nbytes, offset, shard))
    shard, offset, nbytes = shard[order], offset[order], nbytes[order]
    begin = np.array([len(each) for each in shards.column("header").to_pylist()], dtype=np.int64)
    is_first = np.append(True, np.diff(shard) != 0)[: len(shard)]
    is_last = np.append(is_first[1:], True)[: len(shard)]
    reached = np.where(is_first, begin[shard], np.roll(offset + nbytes, 1))
    found.flag("tensors", _unordered(offset != reached, order), "it leaves a hole or overlaps in its shard")
    ends = ints(shards, "nbytes")[shard]
    found.flag("tensors", _unordered(is_last & (offset + nbytes != ends), order), "its shard ends elsewhere")
    missing = np.isin(np.arange(shards.num_rows), shard, invert=True)
    found.flag("shards", missing, "it holds no tensor")


def _check_shards(plan: Plan, found: Contradictions) -> None:
    """File names that loaders know, and headers that list exactly the tensors of the table."""
    names = tuple(plan["shards"].column("name").to_pylist())
    if names != shard_names(len(names)):
        found.say("table shards", f"the files are not called {', '.join(shard_names(len(names))[:2])} ...")
    headers = plan["shards"].column("header").to_pylist()
    expected: list[dict[str, object]] = [{} for _ in headers]
    columns = ("name", "dtype", "shape", "shard", "offset", "nbytes")
    for name, dtype, shape, shard, offset, nbytes in zip(
        *(plan["tensors"].column(column).to_pylist() for column in columns), strict=True
    ):
        begin = offset - len(headers[shard])
        expected[shard][name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + nbytes]}
    for name, header, entries in zip(names, headers, expected, strict=True):
        if not _header_lists(header, entries):
            found.say(f"shard {name}", "its header does not list the tensors of the plan")


def _check_files(plan: Plan, found: Contradictions) -> None:
    """Files beside the weights have names of companions, once each; nothing is written elsewhere."""
    names = plan["files"].column("name").to_pylist()
    strange = [name for name in names if not (_is_plain(name) and is_companion(name))]
    if strange or len(set(names)) < len(names):
        found.say("table files", f"{strange[:2] or 'a name twice'} cannot be written beside the weights")


def _is_plain(name: str) -> bool:
    """Whether it is a key, in its only spelling."""
    return is_key(name) and name != "." and PurePosixPath(name).as_posix() == name


def _header_lists(header: bytes, entries: Mapping[str, object]) -> bool:
    length = int.from_bytes(header[:_LENGTH_NBYTES], "little")
    if len(header) % DATA_ALIGNMENT_NBYTES or length != len(header) - _LENGTH_NBYTES:
        return False
    try:
        listed = parse_strict_json(header[_LENGTH_NBYTES:])
    except ValueError:
        return False
    return isinstance(listed, dict) and {k: v for k, v in listed.items() if k != METADATA_KEY} == entries


def _check_expressions(expressions: Sequence[Expression], found: Contradictions) -> None:
    """Methods that exist, told what they know, with a base where they need one."""
    for index, expression in enumerate(expressions):
        reason = _objection(expression)
        if reason:
            found.say(f"expression {index}", reason)


def _objection(expression: Expression) -> str | None:
    settings, encode = expression.bind(keys=(), shape=()), expression.encode
    if encode is not None and (expression.is_copy or expression.is_unread):
        return "what is not computed is encoded"
    if encode is not None and expression.cast is not encode.format.element_dtype:
        return f"its {encode.format.word} codes are {expression.cast.value}"
    if expression.method == COPY:
        plain = not settings.sources and not settings.values and not expression.has_base
        return None if plain else "a copy has settings"
    if expression.is_scales:
        plain = not settings.sources and not settings.values and not expression.has_base
        return None if plain else "scales have settings"
    if expression.is_constant:
        plain = not settings.sources and len(settings.values) == 1 and not expression.has_base
        return None if plain else "a constant has settings beside its bytes"
    method = find_method(expression.method)
    if method is None:
        return f"there is no method {expression.method!r}"
    if method.base is not BaseUse.OPTIONAL and expression.has_base != (method.base is BaseUse.REQUIRED):
        return f"{method.name} has a base too many or too few"
    if encode is None and not expression.cast.is_mergeable:
        return f"its result is written as {expression.cast.value} codes"
    if not 0 <= settings.position <= 1 or (settings.position and not method.positional):
        return f"{method.name} has the position {settings.position}"
    known = {parameter.name for parameter in method.parameters}
    unknown = sorted({*settings.values, *(name for each in settings.sources for name in each)} - known)
    if unknown:
        return f"{method.name} does not know {unknown}"
    return None if settings.sources else f"{method.name} has no sources"


def _check_dispositions(plan: Plan, found: Contradictions) -> None:
    """Each tensor of each source exactly once, and what is kept goes to a tensor of the output."""
    table = plan["dispositions"]
    source = ints(table, "source")
    name = codes(table, "name")[0]
    found.flag("dispositions", _repeated(source * (name.max(initial=0) + 1) + name), "it stands twice")
    if plan.problems:
        return
    counts = np.bincount(source, minlength=len(plan.manifest["sources"]))
    for index, entry in enumerate(plan.manifest["sources"]):
        if counts[index] != entry["num_tensors"]:
            what = f"{counts[index]} of its {entry['num_tensors']} tensors have a disposition"
            found.say(f"source {entry['name']}", what)
    dropped = pc.equal(table.column("disposition"), Disposition.DROPPED.value)
    known = pc.is_in(table.column("output"), value_set=plan["tensors"].column("name").combine_chunks())
    lost = pc.invert(pc.or_(known, dropped)).combine_chunks().to_numpy(zero_copy_only=False)
    found.flag("dispositions", lost, "its output is no tensor of the plan")


def _check_config(plan: Plan, found: Contradictions) -> None:
    """What the config says of dtype and tie is what the tensors are."""
    manifest = plan.manifest
    config, tie, recipe = manifest["config"], manifest["tie"], manifest["recipe"]
    if not config:
        # A merge of single files has none.
        return
    pair = [_content(plan, tie[each]) for each in ("head", "embedding")]
    declared = declared_tie(config)
    if tie["tied"] is not None and declared != tie["tied"]:
        found.say("config", f"it declares the tie {declared} and the plan says {tie['tied']}")
    if declared and all(pair) and pair[0] != pair[1]:
        found.say("config", "head and embedding differ, and it ties them")
    if tie["tied"] is False and not all(pair):
        found.say("config", "head and embedding are untied, and not both are written")
    wanted = recipe.get("out_dtype") or recipe.get("dtype")
    if wanted is None or plan.problems:
        return
    main = _main_dtype(plan)
    said = [config[key] for key in _DTYPE_KEYS if key in config]
    if main is not None and any(each != config_name(main) for each in said or [None]):
        found.say("config", f"its dtype is {said} and most bytes of the tensors are {config_name(main)}")


def _content(plan: Plan, name: str) -> list[int]:
    """The rows that make a tensor, each as the first row of its content; none for one that is not made."""
    tensor = pc.index(plan["tensors"].column("name"), name).as_py()
    rows = np.flatnonzero(ints(plan["rows"], "tensor") == tensor)
    first = ints(plan["rows"], "copy_of")[rows]
    found: list[int] = np.where(first < 0, rows, first).tolist()
    return found


def _main_dtype(plan: Plan) -> DType | None:
    dtype, words = codes(plan["tensors"], "dtype")
    totals = np.bincount(dtype, weights=ints(plan["tensors"], "nbytes"), minlength=len(words))
    sizes = {_DTYPES[word]: total for word, total in zip(words, totals, strict=True)}
    return max((d for d in sizes if d.is_mergeable), key=lambda each: sizes[each], default=None)


def _check_segments(plan: Plan, found: Contradictions) -> None:
    """Segments partition the rows in order, none in two shards, with the costs that the rows have."""
    table, rows = plan["segments"], plan["rows"]
    first, count, shard = (ints(table, name) for name in ("first_row", "num_rows", "shard"))
    expected = np.append(0, np.cumsum(count))
    if (count < 1).any() or not np.array_equal(first, expected[:-1]) or expected[-1] != rows.num_rows:
        found.say("table segments", "they do not take every row once, in order")
        return
    mixed = ints(rows, "shard") != np.repeat(shard, count)
    found.flag("rows", mixed, "its segment belongs to another shard")
    if len(first):
        costs = np.add.reduceat(_row_costs(plan), first)
        found.flag("segments", costs != ints(table, "cost"), "cost is not the bytes read and written")


def _row_costs(plan: Plan) -> Ints:
    rows = plan["rows"]
    read = np.append(0, np.cumsum(input_bytes(plan)))
    first, count = ints(rows, "first_input"), ints(rows, "num_inputs")
    own = read[first + count] - read[first]
    cost = ints(rows, "nbytes") + own + joined_sums(plan, own).astype(np.int64)
    is_made = (ints(rows, "copy_of") < 0) & (ints(rows, "made_with") < 0)
    return np.where(is_made, cost, 0)


def _repeated(values: Ints) -> Flags:
    """Whether an equal value stands before it ``[n]``."""
    result = np.ones(len(values), dtype=np.bool_)
    result[np.unique(values, return_index=True)[1]] = False
    return result


def _unordered(flags: Flags, order: Ints) -> Flags:
    result = np.zeros(len(flags), dtype=np.bool_)
    result[order] = flags
    return result
