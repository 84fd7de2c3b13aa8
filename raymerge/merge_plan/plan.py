"""The plan as data: what its tables hold, and the digest over their canonical values."""

from __future__ import annotations

import hashlib
import json
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.checkpoints.quantisation.formats import format_named
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.expressions import Expression

FORMAT = 7
"""Version of the tables' meaning; a plan of another version is not resumed."""

_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "list": pa.list_(pa.int64()),
}
_ROWS_AT_ONCE = 1 << 14
_READ = "source int32, key string, offset int64, nbytes int64, dtype string"
_VIEW = "view_offset int64, view_shape list, view_strides list"
_COLUMNS = {
    "tensors": "name string, dtype string, shape list, shard int32, offset int64, nbytes int64, "
    "check_finite bool",
    "ops": "tensor int32, shard int32, offset int64, nbytes int64, first_element int64, "
    "num_elements int64, expression int32, is_flat bool, copy_of int64, made_with int64, scales int64, "
    "tensor_scale int64, zero_points int64, joined_with list, also list, first_part int64, num_parts int32, "
    "first_input int64, num_inputs int32",
    "parts": "logical string, shape list, view_offset int64, view_strides list",
    "inputs": f"part int32, {_READ}, {_VIEW}, gather int64, scales int64",
    "scales": "encoding int32, columns int64, key string, offset int64, nbytes int64, tensor_key string, "
    "tensor_offset int64, zeros_key string, zeros_offset int64",
    "gathers": "num_rows int64, num_columns int64, real_rows int64, first_gather_input int64, "
    "num_gather_inputs int32, first_run int64, num_runs int64",
    "gather_inputs": f"{_READ}, {_VIEW}, num_rows int64, rank int64, scale double, transposed bool, "
    "first_factor int64, num_factors int32",
    "factors": _READ,
    "runs": "to_row int64, from_row int64, count int64, input int32",
    "segments": "first_op int64, num_ops int64, shard int32, cost int64",
    "shards": "name string, nbytes int64, header binary",
    "files": "name string, content binary",
    "dispositions": "source int32, name string, disposition string, rule string, output string",
}


def _schema(columns: str) -> pa.Schema:
    pairs = (column.split() for column in columns.split(", "))
    return pa.schema([(name, _TYPES[kind]) for name, kind in pairs])


SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType({name: _schema(c) for name, c in _COLUMNS.items()})
"""Columns of every table of a plan. No column holds nulls."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A merge, decided: every output byte with where it comes from. Execution decides nothing."""

    manifest: Mapping[str, Any]
    """Recipe, sources with their fingerprints, expressions, config, tie decision, notes; JSON values."""
    tables: Mapping[str, pa.Table]
    """``tensors``; the ``ops`` that make them, with ``parts`` and ``inputs``; ``gathers``, with
    ``gather_inputs``, their ``factors`` and ``runs``; ``segments``, ``shards``, ``dispositions``; and the
    ``files`` that are written beside the weights in place of the donor's."""
    problems: tuple[Problem, ...]
    digest: str

    def __getitem__(self, table: str) -> pa.Table:
        return self.tables[table]

    def columns(self, table: str, *names: str) -> Iterator[tuple[Any, ...]]:
        """Some columns of a table, row by row, as plain values, of which few are there at a time."""
        for batch in self.tables[table].select(names).to_batches(max_chunksize=_ROWS_AT_ONCE):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        return tuple(expression_from_json(each) for each in self.manifest["expressions"])

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """What codes that are read mean; scales point at these."""
        return tuple(encoding_from_json(each) for each in self.manifest["encodings"])

    def require(self) -> Plan:
        """This plan, if nothing stands in the way.

        Raises:
            PlanError: with every problem."""
        if self.problems:
            raise PlanError(self.problems)
        return self


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """The training checkpoint in whose files and chunks the tensors of the output are written, in place of
    the one shard that the tables have."""

    source: int
    """Its number among the sources."""
    drops_state: bool
    files: Mapping[str, int]
    """What is written, with sizes, by key: files with chunks of tensors, and what is copied beside them."""


def planned_layout(plan: Plan) -> PlannedLayout | None:
    """None for an output in safetensors."""
    layout = plan.manifest.get("layout")
    if layout is None:
        return None
    return PlannedLayout(layout["source"], layout["training_state"] == "drop", dict(layout["files"]))


def weight_files(plan: Plan) -> Mapping[str, int]:
    """The files that hold the tensors of the output, and what belongs to these, with their sizes."""
    layout = planned_layout(plan)
    return dict(plan.columns("shards", "name", "nbytes")) if layout is None else layout.files


def make_plan(
    manifest: Mapping[str, Any], tables: Mapping[str, pa.Table], problems: Sequence[Problem]
) -> Plan:
    return Plan(manifest, tables, tuple(problems), digest(manifest, tables))


def digest(manifest: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> str:
    """Hex blake2b over canonical values; independent of how Arrow chunks or encodes them.

    The recipe counts by what it says: its comments and layout change no byte of a tensor."""
    content = {key: value for key, value in manifest.items() if key != "recipe_text"}
    hasher = hashlib.blake2b(digest_size=20)
    hasher.update(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tables):
        table = tables[name]
        for field in table.schema:
            hasher.update(f"\0{name}.{field.name}:{field.type}:{table.num_rows}\0".encode())
            if table.num_rows:
                _hash_column(hasher, table.column(field.name), field.type)
    return hasher.hexdigest()


def expression_to_json(expression: Expression) -> dict[str, Any]:
    return {
        "method": expression.method,
        "has_base": expression.has_base,
        "settings": expression.settings,
        "cast": expression.cast.value,
        "encode": None if expression.encode is None else encoding_to_json(expression.encode),
    }


def expression_from_json(data: Mapping[str, Any]) -> Expression:
    encode = None if data["encode"] is None else encoding_from_json(data["encode"])
    return Expression(data["method"], data["has_base"], data["settings"], DType(data["cast"]), encode)


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    return {
        "format": encoding.format.name,
        "block": list(encoding.block),
        "scale_dtype": encoding.scale_dtype.value,
        "power_of_two": encoding.power_of_two,
    }


def encoding_from_json(data: Mapping[str, Any]) -> Encoding:
    rows, columns = data["block"]
    scale_dtype = DType(data["scale_dtype"])
    return Encoding(format_named(data["format"]), (rows, columns), scale_dtype, data["power_of_two"])


def _hash_column(hasher: hashlib.blake2b, column: pa.ChunkedArray, kind: pa.DataType) -> None:
    array = column.combine_chunks()
    if pa.types.is_list(kind):
        hasher.update(np.asarray(pc.list_value_length(array), dtype=np.int64).tobytes())
        array, kind = array.flatten(), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        # Lengths, then all characters in a row: the same for every offset that Arrow may keep.
        hasher.update(np.asarray(pc.binary_length(array), dtype=np.int64).tobytes())
        hasher.update(_characters(array))
        return
    width = np.float64 if pa.types.is_floating(kind) else np.int64
    hasher.update(np.asarray(array.to_numpy(zero_copy_only=False)).astype(width).tobytes())


def _characters(array: pa.Array) -> memoryview:
    _, ends, data = array.buffers()
    if data is None or not len(array):
        return memoryview(b"")
    bounds = np.frombuffer(ends, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(data)[int(bounds[0]) : int(bounds[-1])]


Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class RunReader:
    """Some columns of a table, or all, made ready once, so that many short runs of its rows are read quickly:
    as tuples of plain values in the order of the columns, which are their fields."""

    def __init__(self, table: pa.Table, *columns: str) -> None:
        names = columns or table.column_names
        self._columns: Sequence[pa.Array] = [table.column(name).combine_chunks() for name in names]
        self._record: Any = namedtuple("Record", names)  # type: ignore[misc]

    def read(self, first: int, count: int) -> Iterator[Any]:
        return map(self._record, *[column.slice(first, count).to_pylist() for column in self._columns])

    def row(self, index: int) -> Any:
        return self._record(*[column[index].as_py() for column in self._columns])


def ints(table: pa.Table, column: str) -> Ints:
    """A column of numbers or switches as int64 ``[rows]``."""
    array = table.column(column).combine_chunks()
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(np.int64)


def equal_texts(table: pa.Table, column: str) -> tuple[Ints, pa.Array]:
    """A column of texts as numbers ``[rows]`` of distinct texts, and those texts."""
    encoded = table.column(column).combine_chunks().dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False)).astype(np.int64), encoded.dictionary


def codes(table: pa.Table, column: str) -> tuple[Ints, list[str]]:
    """As ``equal_texts``, with texts in Python: these take much more, where all are distinct."""
    numbers, texts = equal_texts(table, column)
    return numbers, texts.to_pylist()


def lists(table: pa.Table, column: str) -> tuple[Ints, Ints]:
    """A column of lists as their lengths ``[rows]`` and all their values in a row."""
    array = table.column(column).combine_chunks()
    lengths = np.asarray(pc.list_value_length(array).to_numpy(zero_copy_only=False)).astype(np.int64)
    return lengths, np.asarray(array.flatten().to_numpy(zero_copy_only=False)).astype(np.int64)


def sums(lengths: Ints, values: Ints) -> Ints:
    """Sum of each list ``[rows]``; 0 for an empty one, -1 where it is no size below 2**62."""
    return reduced(lengths, values, start=0, multiply=False)


def last_values(lengths: Ints, values: Ints, *, default: int) -> Ints:
    """Last value of each list ``[rows]``; ``default`` for an empty one."""
    result = np.full(len(lengths), default, dtype=np.int64)
    some = lengths > 0
    result[some] = values[(starts(lengths) + lengths)[some] - 1]
    return result


def starts(counts: Ints) -> Ints:
    """Where each of some consecutive runs begins ``[rows]``, from their lengths."""
    return np.asarray(np.cumsum(counts) - counts, dtype=np.int64)


def numbered(*columns: Ints) -> tuple[Ints, Ints]:
    """Equal rows of some columns as one number each ``[rows]``, from 0 on in order of first use, and the
    first row of each number."""
    numbers = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        own, count = _first_uses(column)
        numbers, _ = _first_uses(numbers * count + own)
    return numbers, np.asarray(np.unique(numbers, return_index=True)[1], dtype=np.int64)


def numbered_runs(first: Ints, counts: Ints, values: Ints) -> Ints:
    """Equal runs of some values as one number each ``[runs]``, from their first places and lengths."""
    numbers, position = np.zeros(len(counts), dtype=np.int64), 0
    longer = np.flatnonzero(counts > 0)
    while len(longer):
        numbers[longer] = numbered(numbers[longer], values[first[longer] + position])[0]
        position += 1
        longer = longer[counts[longer] > position]
    return numbered(counts, numbers)[0]


def _first_uses(values: Ints) -> tuple[Ints, int]:
    """Each value as the number of its first use ``[rows]``, and how many there are."""
    encoded = pa.array(values).dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(), dtype=np.int64), len(encoded.dictionary)


def members_of_runs(first: Ints, counts: Ints) -> Ints:
    """The numbers of all members of some runs, run after run, from their first members and lengths."""
    return np.asarray(np.arange(counts.sum()) + np.repeat(first - starts(counts), counts), dtype=np.int64)


def reduced(lengths: Ints, values: Ints, *, start: int, multiply: bool) -> Ints:
    # Sizes of a file are below 2**63, but what a changed table says need not be: floats tell what overflows.
    result = np.full(len(lengths), start, dtype=np.int64)
    some = lengths > 0
    if not some.any():
        return result
    operation = np.multiply if multiply else np.add
    first = starts(lengths)[some]
    rough = operation.reduceat(values.astype(np.float64), first)
    exact = operation.reduceat(values, first)
    negative = np.minimum.reduceat(values, first) < 0
    result[some] = np.where(negative | (np.abs(rough) > 2.0**62), -1, exact)
    return result


def input_bytes(plan: Plan) -> Ints:
    """Bytes that each input is read from for its op ``[inputs]``, as ``Read.bytes_for`` counts them; 0 for
    those that another part of the op is made of too."""
    ops = plan["ops"]
    num_elements = np.repeat(ints(ops, "num_elements"), ints(ops, "num_inputs"))
    number, nbytes = ints(plan["inputs"], "gather"), ints(plan["inputs"], "nbytes")
    scales = ints(plan["inputs"], "scales")
    dtypes = [each.tensor_scale_dtype for each in plan.encodings]
    of_matrix = np.array([0 if dtype is None else dtype.nbytes(1) for dtype in dtypes], dtype=np.int64)
    of_scales = ints(plan["scales"], "nbytes") + of_matrix[ints(plan["scales"], "encoding")]
    of_scales += _zeros_nbytes(plan)
    nbytes[scales >= 0] += of_scales[scales[scales >= 0]]
    which = number >= 0
    own = number[which]
    height, columns = (ints(plan["gathers"], name)[own] for name in ("num_rows", "num_columns"))
    factors = sums(ints(plan["gather_inputs"], "num_factors"), ints(plan["factors"], "nbytes"))
    whole = sums(ints(plan["gathers"], "num_gather_inputs"), ints(plan["gather_inputs"], "nbytes") + factors)
    per_row = whole[own] // np.maximum(1, height)
    nbytes[which] = np.minimum(height, -(-num_elements[which] // columns)) * per_row
    nbytes[repeated_inputs(plan)] = 0
    return nbytes


def _zeros_nbytes(plan: Plan) -> Ints:
    """Bytes of the zero points that each of the scales is read with ``[scales]``."""
    result = np.zeros(len(plan["scales"]), dtype=np.int64)
    encodings, named = plan.encodings, ints(plan["scales"], "encoding")
    with_zeros = [number for number, each in enumerate(encodings) if each.format.zero_points is not None]
    which = np.isin(named, with_zeros)
    read = (ints(plan["scales"], name)[which].tolist() for name in ("encoding", "nbytes", "columns"))
    result[which] = [encodings[own].zero_points_nbytes(*size) for own, *size in zip(*read, strict=True)]
    return result


def makers(plan: Plan) -> Ints:
    """The op that is carried out to make the bytes of each ``[ops]``: itself, the first of equal content, or
    the codes that scales come with."""
    copy_of, made_with = ints(plan["ops"], "copy_of"), ints(plan["ops"], "made_with")
    first = np.where(copy_of >= 0, copy_of, np.arange(len(copy_of)))
    return np.where(made_with[first] >= 0, made_with[first], first)


def made_bytes(plan: Plan) -> Ints:
    """Bytes that each op makes when it is carried out, with scales that come with it ``[ops]``."""
    nbytes = ints(plan["ops"], "nbytes") * (ints(plan["ops"], "copy_of") < 0)
    made = np.zeros(len(nbytes), dtype=np.int64)
    np.add.at(made, makers(plan), nbytes)
    return made


def op_bytes(plan: Plan) -> Ints:
    """Bytes that each op is read from ``[ops]``, also one that another op writes."""
    read = np.append(0, np.cumsum(input_bytes(plan)))
    first, count = ints(plan["ops"], "first_input"), ints(plan["ops"], "num_inputs")
    return np.asarray(read[first + count] - read[first], dtype=np.int64)


def joined_sums(plan: Plan, of_ops: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """What the ops have together that each op shares the scale of a matrix with ``[ops]``."""
    lengths, others = lists(plan["ops"], "joined_with")
    owners = np.repeat(np.arange(len(lengths)), lengths)
    # Tables that are damaged may name ops that are not there, which another check tells of.
    real = (others >= 0) & (others < len(lengths))
    sums = np.bincount(owners[real], weights=of_ops[others[real]], minlength=len(lengths))
    return sums.astype(np.float64)


def repeated_inputs(plan: Plan) -> Flags:
    """Whether each input is the bytes of that of the part before ``[inputs]``; as ``repeated_reads``."""
    ops, inputs = plan["ops"], plan["inputs"]
    num_parts, num_inputs = ints(ops, "num_parts"), ints(ops, "num_inputs")
    per_part = np.repeat(num_inputs // np.maximum(1, num_parts), num_inputs)
    later = np.flatnonzero(ints(inputs, "part") > 0)
    before = later - per_part[later]
    columns = [
        codes(inputs, "key")[0],
        *(ints(inputs, name) for name in ("source", "offset", "nbytes", "scales")),
    ]
    same = ints(inputs, "gather")[later] < 0
    for column in columns:
        same &= column[later] == column[before]
    repeated = np.zeros(inputs.num_rows, dtype=np.bool_)
    repeated[later[same]] = True
    return repeated
