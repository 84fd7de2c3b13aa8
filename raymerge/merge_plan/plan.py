"""The plan as data: what its tables hold, and the digest over their canonical values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymerge.checkpoints.quantisation.encoding import Encoding, Format
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.expressions import Expression

FORMAT = 4
"""Version of the tables' meaning; a plan of another version is not resumed."""

_LIST = pa.list_(pa.int64())

SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "tensors": pa.schema(
            [
                ("name", pa.string()),
                ("dtype", pa.string()),
                ("shape", _LIST),
                ("shard", pa.int32()),
                ("offset", pa.int64()),
                ("nbytes", pa.int64()),
                ("check_finite", pa.bool_()),
            ]
        ),
        "rows": pa.schema(
            [
                ("tensor", pa.int32()),
                ("shard", pa.int32()),
                ("offset", pa.int64()),
                ("nbytes", pa.int64()),
                ("first_element", pa.int64()),
                ("num_elements", pa.int64()),
                ("expression", pa.int32()),
                ("is_flat", pa.bool_()),
                ("copy_of", pa.int64()),
                ("made_with", pa.int64()),
                ("scales", pa.int64()),
                ("tensor_scale", pa.int64()),
                ("joined_with", _LIST),
                ("also", _LIST),
                ("first_part", pa.int64()),
                ("num_parts", pa.int32()),
                ("first_input", pa.int64()),
                ("num_inputs", pa.int32()),
            ]
        ),
        "parts": pa.schema(
            [("logical", pa.string()), ("shape", _LIST), ("view_offset", pa.int64()), ("view_strides", _LIST)]
        ),
        "inputs": pa.schema(
            [
                ("part", pa.int32()),
                ("source", pa.int32()),
                ("key", pa.string()),
                ("offset", pa.int64()),
                ("nbytes", pa.int64()),
                ("dtype", pa.string()),
                ("view_offset", pa.int64()),
                ("view_shape", _LIST),
                ("view_strides", _LIST),
                ("assembly", pa.int64()),
                ("scales", pa.int64()),
            ]
        ),
        "scales": pa.schema(
            [
                ("encoding", pa.int32()),
                ("columns", pa.int64()),
                ("key", pa.string()),
                ("offset", pa.int64()),
                ("nbytes", pa.int64()),
                ("tensor_key", pa.string()),
                ("tensor_offset", pa.int64()),
            ]
        ),
        "assemblies": pa.schema(
            [
                ("num_rows", pa.int64()),
                ("num_columns", pa.int64()),
                ("real_rows", pa.int64()),
                ("first_term", pa.int64()),
                ("num_terms", pa.int32()),
                ("first_run", pa.int64()),
                ("num_runs", pa.int64()),
            ]
        ),
        "terms": pa.schema(
            [
                ("source", pa.int32()),
                ("key", pa.string()),
                ("offset", pa.int64()),
                ("nbytes", pa.int64()),
                ("dtype", pa.string()),
                ("view_offset", pa.int64()),
                ("view_shape", _LIST),
                ("view_strides", _LIST),
                ("num_rows", pa.int64()),
                ("rank", pa.int64()),
                ("scale", pa.float64()),
                ("transposed", pa.bool_()),
                ("first_factor", pa.int64()),
                ("num_factors", pa.int32()),
            ]
        ),
        "factors": pa.schema(
            [
                ("source", pa.int32()),
                ("key", pa.string()),
                ("offset", pa.int64()),
                ("nbytes", pa.int64()),
                ("dtype", pa.string()),
            ]
        ),
        "runs": pa.schema(
            [("to_row", pa.int64()), ("from_row", pa.int64()), ("count", pa.int64()), ("term", pa.int32())]
        ),
        "segments": pa.schema(
            [("first_row", pa.int64()), ("num_rows", pa.int64()), ("shard", pa.int32()), ("cost", pa.int64())]
        ),
        "shards": pa.schema([("name", pa.string()), ("nbytes", pa.int64()), ("header", pa.binary())]),
        "files": pa.schema([("name", pa.string()), ("content", pa.binary())]),
        "dispositions": pa.schema(
            [
                ("source", pa.int32()),
                ("name", pa.string()),
                ("disposition", pa.string()),
                ("rule", pa.string()),
                ("output", pa.string()),
            ]
        ),
    }
)
"""Columns of every table of a plan. No column holds nulls."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A merge, decided: every output byte with where it comes from. Execution decides nothing."""

    manifest: Mapping[str, Any]
    """Recipe, sources with their fingerprints, expressions, config, tie decision, notes; JSON values."""
    tables: Mapping[str, pa.Table]
    """``tensors``; their ``rows`` with ``parts`` and ``inputs``; the ``assemblies`` of inputs with ``terms``,
    their ``factors`` and ``runs``; ``segments``, ``shards``, ``dispositions``; and the ``files`` that are
    written beside the weights in place of the donor's."""
    problems: tuple[Problem, ...]
    """What stands in the way; an executable plan has none."""
    digest: str
    """Hex digest over the manifest's canonical JSON and the tables' values."""

    def __getitem__(self, table: str) -> pa.Table:
        return self.tables[table]

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Expressions that rows point at."""
        return tuple(expression_from_json(each) for each in self.manifest["expressions"])

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """What codes that are read mean; scales point at these."""
        return tuple(encoding_from_json(each) for each in self.manifest["encodings"])

    def require(self) -> Plan:
        """This plan, if nothing stands in the way.

        Raises:
            PlanError: with every problem.
        """
        if self.problems:
            raise PlanError(self.problems)
        return self


def make_plan(
    manifest: Mapping[str, Any], tables: Mapping[str, pa.Table], problems: Sequence[Problem]
) -> Plan:
    """A plan with its digest."""
    return Plan(manifest, tables, tuple(problems), digest(manifest, tables))


def digest(manifest: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> str:
    """Hex blake2b over canonical values; independent of how Arrow chunks or encodes them.

    The recipe counts by what it says: its comments and layout change no byte of a tensor.
    """
    said = {key: value for key, value in manifest.items() if key != "recipe_text"}
    hasher = hashlib.blake2b(digest_size=20)
    hasher.update(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tables):
        table = tables[name]
        for field in table.schema:
            hasher.update(f"\0{name}.{field.name}:{field.type}:{table.num_rows}\0".encode())
            _hash_column(hasher, table.column(field.name), field.type)
    return hasher.hexdigest()


def expression_to_json(expression: Expression) -> dict[str, Any]:
    """JSON form of an expression."""
    return {
        "method": expression.method,
        "has_base": expression.has_base,
        "settings": expression.settings,
        "cast": expression.cast.value,
        "encode": None if expression.encode is None else encoding_to_json(expression.encode),
    }


def expression_from_json(data: Mapping[str, Any]) -> Expression:
    """Inverse of ``expression_to_json``."""
    encode = None if data["encode"] is None else encoding_from_json(data["encode"])
    return Expression(data["method"], data["has_base"], data["settings"], DType(data["cast"]), encode)


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    """JSON form of an encoding."""
    return {
        "format": encoding.format.value,
        "block": list(encoding.block),
        "scale_dtype": encoding.scale_dtype.value,
        "power_of_two": encoding.power_of_two,
    }


def encoding_from_json(data: Mapping[str, Any]) -> Encoding:
    """Inverse of ``encoding_to_json``."""
    rows, columns = data["block"]
    scale_dtype = DType(data["scale_dtype"])
    return Encoding(Format(data["format"]), (rows, columns), scale_dtype, data["power_of_two"])


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
    """The bytes of all texts of an array in a row."""
    _, ends, data = array.buffers()
    if data is None or not len(array):
        return memoryview(b"")
    bounds = np.frombuffer(ends, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(data)[int(bounds[0]) : int(bounds[-1])]
