"""Proves from a plan's tables alone that it can be carried out: every byte made once, nothing unaccounted.

Used on every built plan, where a contradiction is a bug, and on every loaded one, where it may be damage. All
checks look at whole columns, so that a plan of 140,000 tensors is proved in about a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import numpy as np
import pyarrow.compute as pc

from raymerge.architectures.roles import declared_tie
from raymerge.architectures.rules import sections
from raymerge.checkpoints.components import directory_of
from raymerge.checkpoints.dcp.metadata import METADATA_FILE
from raymerge.checkpoints.dcp.store import ASSEMBLED_NBYTES
from raymerge.checkpoints.files import RECORD_DIRECTORY, is_companion
from raymerge.checkpoints.header import DATA_ALIGNMENT_NBYTES, METADATA_KEY, shard_names, shards_by_stem
from raymerge.checkpoints.json_files import parse_strict_json
from raymerge.dtypes import DType, config_name
from raymerge.errors import Problem
from raymerge.merge_plan.check_ops import (
    Check,
    check_gathers,
    check_ops,
    check_scales,
    contradiction,
    products,
    smallest_quant_spec,
)
from raymerge.merge_plan.dispositions import Rule, Use
from raymerge.merge_plan.expressions import Expression
from raymerge.merge_plan.plan import (
    FORMAT,
    SCHEMAS,
    Flags,
    Ints,
    Plan,
    digest,
    joined_sums,
    op_bytes,
    planned_layout,
)
from raymerge.methods import BaseUse, Takes, find_method
from raymerge.storage.store import is_key

_LENGTH_NBYTES = 8
_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = {dtype.value: dtype for dtype in DType}


def check_plan(plan: Plan) -> tuple[Problem, ...]:
    """What in a plan contradicts itself, or nothing.

    A plan that has problems of its own is incomplete by right; its dispositions are then checked for what
    they say, not for what is missing."""
    broken = tuple(_form_problems(plan))
    if broken:
        return broken
    check = Check(plan)
    steps = (check_gathers, check_ops, check_scales, _check_segments, _check_digest)
    check.run(_check_references, _check_tables, *steps)
    return tuple(check.problems)


def _check_tables(check: Check) -> None:
    of_outputs = (_check_tensors, _check_shards, _check_files, _check_expressions)
    for step in (*of_outputs, _check_dispositions, _check_config):
        step(check)


def _form_problems(plan: Plan) -> Iterator[Problem]:
    """Tables without the columns that are known, and a manifest without the entries that are needed."""
    for name, schema in SCHEMAS.items():
        table = plan.tables.get(name)
        if table is None or not table.schema.equals(schema):
            yield contradiction(f"table {name}", "it is missing or has other columns")
        elif any(column.null_count for column in table.columns):
            yield contradiction(f"table {name}", "it holds nulls")
    try:
        _touch_manifest(plan)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        yield contradiction("manifest", f"an entry is missing or of another kind ({error!r})")


def _touch_manifest(plan: Plan) -> None:
    manifest = plan.manifest
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}")
    for source in manifest["sources"]:
        if not isinstance(source["num_tensors"], int):
            raise TypeError("num_tensors")
        assembled = source.get(ASSEMBLED_NBYTES, 0)
        are_files = (is_key(key) and isinstance(nbytes, int) for key, nbytes, _ in source["files"])
        if not isinstance(assembled, int) or not all(are_files):
            raise TypeError("files")
    manifest["sources"][manifest["donor"]]
    expressions = plan.expressions
    for expression in expressions:
        if not isinstance(expression.method, str) or not isinstance(expression.settings, str):
            raise TypeError("expressions")
        float(expression.bind(keys=(), shape=()).position)
        len(expression.content if expression.is_constant else b"")
    for encoding in (*plan.encodings, *(each.encode for each in expressions if each.encode is not None)):
        smallest_quant_spec(encoding)
    manifest["config"].keys()
    if not all(isinstance(name, str) for name in manifest["left_out"]):
        raise TypeError("left_out")
    if not all(isinstance(manifest["tie"][name], str) for name in ("head", "embedding")):
        raise TypeError("tie")
    if manifest["tie"]["tied"] not in (True, False, None):
        raise TypeError("tied")
    _touch_layout(plan)
    manifest["recipe"].get("dtype"), manifest["recipe"].get("out_dtype")


def _touch_layout(plan: Plan) -> None:
    layout = planned_layout(plan)
    if layout is None:
        return
    if not all(is_key(key) and isinstance(nbytes, int) for key, nbytes in layout.files.items()):
        raise TypeError("layout")
    if len(plan["shards"]) != 1 or not layout.files or layout.source < 0:
        raise ValueError("layout")
    plan.manifest["sources"][layout.source]


def _check_references(check: Check) -> None:
    """Numbers that point at rows of other tables do point at one; texts are of the words that are known."""
    sources, shards = len(check.plan.manifest["sources"]), len(check.shards)
    limits = {
        ("tensors", "shard"): shards,
        ("ops", "tensor"): len(check.tensors),
        ("ops", "shard"): shards,
        ("ops", "expression"): len(check.expressions),
        ("inputs", "source"): sources,
        ("scales", "encoding"): len(check.encodings),
        ("gather_inputs", "source"): sources,
        ("factors", "source"): sources,
        ("segments", "shard"): shards,
        ("dispositions", "source"): sources,
    }
    for (table, column), limit in limits.items():
        values: Ints = getattr(check.tables[table], column)
        check.flag(table, (values < 0) | (values >= limit), f"{column} is not one of {limit}")
    words: Mapping[tuple[str, str], set[str]] = {
        **{(table, "dtype"): set(_DTYPES) for table in ("tensors", "inputs", "gather_inputs", "factors")},
        ("dispositions", "disposition"): {each.value for each in Use},
        ("dispositions", "rule"): {each.value for each in Rule},
    }
    for (table, column), known in words.items():
        unknown = set(check.tables[table].words(column)[1]) - known
        if unknown:
            check.say(f"table {table}", f"{column} has unknown values {sorted(unknown)}")


def _check_tensors(check: Check) -> None:
    """Names once each, sizes as dtype and shape say, and no hole or overlap in any shard."""
    tensors, shards = check.tensors, check.shards
    check.flag("tensors", _repeated(tensors.numbers("name")), "it has the name of another one")
    dtype, words = tensors.words("dtype")
    bits = np.array([_DTYPES[word].bits for word in words], dtype=np.int64)[dtype]
    wrong = products(*tensors.lists["shape"]) * bits != tensors.nbytes * 8
    check.flag("tensors", wrong, "nbytes is not its shape's")
    order = np.lexsort((tensors.nbytes, tensors.offset, tensors.shard))
    shard, offset, nbytes = tensors.shard[order], tensors.offset[order], tensors.nbytes[order]
    begin = pc.binary_length(shards.table.column("header")).to_numpy().astype(np.int64)
    is_first = np.append(True, np.diff(shard) != 0)[: len(shard)]
    is_last = np.append(is_first[1:], True)[: len(shard)]
    reached = np.where(is_first, begin[shard], np.roll(offset + nbytes, 1))
    check.flag("tensors", offset != reached, "it leaves a hole or overlaps in its shard", of=order)
    ends = is_last & (offset + nbytes != shards.nbytes[shard])
    check.flag("tensors", ends, "its shard ends elsewhere", of=order)
    missing = np.isin(np.arange(len(shards)), shard, invert=True)
    check.flag("shards", missing, "it holds no tensor")


def _check_shards(check: Check) -> None:
    """File names that loaders know, and headers that list exactly the tensors of the table."""
    names = tuple(check.shards.table.column("name").to_pylist())
    groups = shards_by_stem(names)
    usual = [name for stem, own in groups.items() for name in shard_names(len(own), stem)]
    strange = [name for name in names if not _is_plain(name) or name.split("/")[0] == RECORD_DIRECTORY]
    if list(names) != usual or strange:
        check.say("table shards", f"the files are not called {', '.join((strange or usual)[:2])} ...")
    order = np.argsort(check.tensors.shard, kind="stable")
    begins = np.searchsorted(check.tensors.shard[order], np.arange(len(names) + 1))
    listed = check.tensors.table.select(["name", "dtype", "shape", "offset", "nbytes"])
    headers = check.shards.table.column("header")
    # One shard after the other: all headers of a plan take much more memory as values than as text.
    for number, name in enumerate(names):
        header, entries = headers[number].as_py(), dict[str, object]()
        directory = directory_of(name)
        rows = listed.take(order[begins[number] : begins[number + 1]])
        for tensor, dtype, shape, offset, nbytes in zip(
            *(column.to_pylist() for column in rows.columns), strict=True
        ):
            begin = offset - len(header)
            entries[tensor.removeprefix(directory)] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [begin, begin + nbytes],
            }
        if not _header_lists(header, entries):
            check.say(f"shard {name}", "its header does not list the tensors of the plan")


def _header_lists(header: bytes, entries: Mapping[str, object]) -> bool:
    length = int.from_bytes(header[:_LENGTH_NBYTES], "little")
    if len(header) % DATA_ALIGNMENT_NBYTES or length != len(header) - _LENGTH_NBYTES:
        return False
    try:
        listed = parse_strict_json(header[_LENGTH_NBYTES:])
    except ValueError:
        return False
    return isinstance(listed, dict) and {k: v for k, v in listed.items() if k != METADATA_KEY} == entries


def _check_files(check: Check) -> None:
    """Files beside the weights have names of companions, once each; nothing is written elsewhere."""
    names, layout = check.plan["files"].column("name").to_pylist(), planned_layout(check.plan)
    # That of a training checkpoint is made anew where the state of the training is left out.
    made_anew = () if layout is None else (METADATA_FILE,)
    strange = [name for name in names if not (_is_plain(name) and (is_companion(name) or name in made_anew))]
    copied = () if layout is None else layout.files
    strange += [key for key in copied if not _is_plain(key) or key.split("/")[0] == RECORD_DIRECTORY]
    if strange or len(set(names)) < len(names):
        check.say("table files", f"{strange[:2] or 'a name twice'} cannot be written beside the weights")


def _is_plain(name: str) -> bool:
    """Whether it is a key, in its only spelling."""
    return is_key(name) and name != "." and PurePosixPath(name).as_posix() == name


def _check_expressions(check: Check) -> None:
    """Methods that exist, told what they know, with a base where they need one."""
    for index, expression in enumerate(check.expressions):
        reason = _objection(expression)
        if reason:
            check.say(f"expression {index}", reason)


def _objection(expression: Expression) -> str | None:
    settings, encode = expression.bind(keys=(), shape=()), expression.encode
    if encode is not None and (expression.is_copy or expression.is_unread):
        return "what is not computed is encoded"
    if encode is not None and expression.cast is not encode.format.element_dtype:
        return f"its {encode.format.word} codes are {expression.cast.value}"
    if expression.is_constant:
        plain = not settings.sources and len(settings.values) == 1 and not expression.has_base
        return None if plain else "a constant has settings beside its bytes"
    if expression.is_copy or expression.is_scales:
        plain = not settings.sources and not settings.values and not expression.has_base
        return None if plain else f"{'a copy has' if expression.is_copy else 'scales have'} settings"
    method = find_method(expression.method)
    if method is None:
        return f"there is no method {expression.method!r}"
    if method.base is not BaseUse.OPTIONAL and expression.has_base != (method.base is BaseUse.REQUIRED):
        return f"{method.name} has a base too many or too few"
    if encode is None and expression.cast.is_mergeable == (method.takes is Takes.INTEGERS):
        return f"its result is written as {expression.cast.value} codes"
    if not 0 <= settings.position <= 1 or (settings.position and not method.positional):
        return f"{method.name} has the position {settings.position}"
    known = {parameter.name for parameter in method.parameters}
    unknown = sorted({*settings.values, *(name for each in settings.sources for name in each)} - known)
    if unknown:
        return f"{method.name} does not know {unknown}"
    return None if settings.sources else f"{method.name} has no sources"


def _check_dispositions(check: Check) -> None:
    """Each tensor of each source exactly once, and what is kept goes to a tensor of the output."""
    columns = check.tables["dispositions"]
    table, source, name = columns.table, columns.source, columns.numbers("name")
    repeated = _repeated(source * (name.max(initial=0) + 1) + name)
    check.flag("dispositions", repeated, "it stands twice")
    if check.plan.problems:
        return
    sources = check.plan.manifest["sources"]
    counts = np.bincount(source, minlength=len(sources))
    for index, entry in enumerate(sources):
        if counts[index] != entry["num_tensors"]:
            what = f"{counts[index]} of its {entry['num_tensors']} tensors have a disposition"
            check.say(f"source {entry['name']}", what)
    dropped = pc.equal(table.column("disposition"), Use.DROPPED.value)
    outputs = check.tensors.table.column("name").combine_chunks()
    known = pc.is_in(table.column("output"), value_set=outputs)
    is_state = pc.equal(table.column("rule"), Rule.TRAINING_STATE.value)
    nowhere = pc.or_(dropped, is_state)
    lost = pc.invert(pc.or_(known, nowhere)).combine_chunks().to_numpy(zero_copy_only=False)
    check.flag("dispositions", lost, "its output is no tensor of the plan")


def _check_config(check: Check) -> None:
    """What the config says of dtype and tie is what the tensors are."""
    manifest = check.plan.manifest
    config, tie, recipe = manifest["config"], manifest["tie"], manifest["recipe"]
    if not config:
        # A merge of single files has none.
        return
    pair = [_content(check, tie[each]) for each in ("head", "embedding")]
    declared = declared_tie(config)
    if tie["tied"] is not None and declared != tie["tied"]:
        check.say("config", f"it declares the tie {declared} and the plan says {tie['tied']}")
    if declared and all(pair) and pair[0] != pair[1]:
        check.say("config", "head and embedding differ, and it ties them")
    if tie["tied"] is False and not all(pair):
        check.say("config", "head and embedding are untied, and not both are written")
    asked = recipe.get("out_dtype") or recipe.get("dtype")
    if asked is None or check.plan.problems:
        return
    main = _main_dtype(check)
    declared_dtypes = [each[key] for _, each in sections(config) for key in _DTYPE_KEYS if key in each]
    if main is not None and any(each != config_name(main) for each in declared_dtypes or [None]):
        what = f"its dtype is {declared_dtypes} and most bytes of the tensors are {config_name(main)}"
        check.say("config", what)


def _content(check: Check, name: str) -> list[int]:
    """The ops that make a tensor, each as the first op of its content; none for one that is not made."""
    tensor = pc.index(check.tensors.table.column("name"), name).as_py()
    ops = np.flatnonzero(check.ops.tensor == tensor)
    first = check.ops.copy_of[ops]
    contents: list[int] = np.where(first < 0, ops, first).tolist()
    return contents


def _main_dtype(check: Check) -> DType | None:
    dtype, words = check.tensors.words("dtype")
    totals = np.bincount(dtype, weights=check.tensors.nbytes, minlength=len(words))
    sizes = {_DTYPES[word]: total for word, total in zip(words, totals, strict=True)}
    return max((d for d in sizes if d.is_mergeable), key=lambda each: sizes[each], default=None)


def _check_segments(check: Check) -> None:
    """Segments partition the ops in order, none in two shards, with the costs that the ops have."""
    segments, ops = check.segments, check.ops
    first, count = segments.first_op, segments.num_ops
    expected = np.append(0, np.cumsum(count))
    if (count < 1).any() or not np.array_equal(first, expected[:-1]) or expected[-1] != len(ops):
        check.say("table segments", "they do not take every op once, in order")
        return
    check.flag("ops", ops.shard != np.repeat(segments.shard, count), "its segment belongs to another shard")
    if len(first):
        costs = np.add.reduceat(_op_costs(check), first)
        check.flag("segments", costs != segments.cost, "cost is not the bytes read and written")


def _op_costs(check: Check) -> Ints:
    ops = check.ops
    own = op_bytes(check.plan)
    cost = ops.nbytes + own + joined_sums(check.plan, own).astype(np.int64)
    return np.where((ops.copy_of < 0) & (ops.made_with < 0), cost, 0)


def _check_digest(check: Check) -> None:
    if digest(check.plan.manifest, check.plan.tables) != check.plan.digest:
        check.say("digest", "it is not that of the plan's values")


def _repeated(values: Ints) -> Flags:
    """Whether an equal value stands before it ``[n]``."""
    result = np.ones(len(values), dtype=np.bool_)
    result[np.unique(values, return_index=True)[1]] = False
    return result
