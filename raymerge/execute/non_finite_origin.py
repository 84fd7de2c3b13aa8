"""Finds the source value that made a result NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.execute.decoding import numbers
from raymerge.execute.non_finite import NOT_FINITE, first_non_finite, scale_fault
from raymerge.execute.reading import Load, Raw, RawCodes, RawInput, RawRows, TileJob
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import Input, OpJob


class StoredByte(NamedTuple):
    source: int
    key: str
    byte: int
    what: str = NOT_FINITE


def find_cause(op: OpJob, loads: Iterable[tuple[Load, Sequence[Raw]]], names: Mapping[int, str]) -> Problem:
    for load, raws in loads:
        for tile, raw in zip(load.tiles, raws, strict=True):
            for each, held in zip(op.inputs, raw, strict=True):
                byte = _non_finite_byte(tile, each, held)
                if byte is not None:
                    return Problem(
                        f"{names[byte.source]}: {op.tensor}",
                        f"the source holds {byte.what}, here first at byte {byte.byte} of {byte.key}.",
                        "Repair or replace that model; nothing was published.",
                    )
    # Codes can hold whatever float32 can: their scales are made to fit.
    cast = DType.F32 if op.expression.encode is not None else op.expression.cast
    wider = "a wider out_dtype (bfloat16, float32) or " if cast is DType.F16 else ""
    return Problem(
        op.tensor,
        f"the sources are finite, but the merged values do not fit {cast.value}.",
        f"Use {wider}smaller weights; nothing was published.",
    )


def _non_finite_byte(tile: TileJob, source: Input, raw: RawInput) -> StoredByte | None:
    """The first NaN or infinity of an input's bytes for a tile; None where all of them are finite."""
    if isinstance(raw, RawRows):
        return _in_rows(raw)
    if isinstance(raw, RawCodes):
        return _in_codes(tile, raw)
    assert isinstance(source, Read)
    first = first_non_finite(raw.numpy(), source.dtype)
    return None if first is None else _at(source, tile.span(source)[0] + source.dtype.nbytes(first))


def _in_codes(tile: TileJob, raw: RawCodes) -> StoredByte | None:
    """A scale that is not finite, or negative, or else a code that makes no finite number with its scale."""
    source, scales = raw.read, raw.layout
    stored = (
        (scales.encoding.tensor_scale_dtype, raw.tensor_scale, scales.tensor_key, scales.tensor_offset),
        (scales.encoding.scale_dtype, raw.scales, scales.key, tile.scales_span(scales)[0]),
    )
    for dtype, data, key, offset in stored:
        fault = None if dtype is None else scale_fault(dtype, data.numpy())
        if dtype is not None and fault is not None:
            return StoredByte(source.source, key, offset + dtype.nbytes(fault.place), fault.words)
    values = numbers(raw, in_order=False).view(torch.uint8)
    first = first_non_finite(values.numpy(), DType.F32)
    if first is None:
        return None
    # Several codes may lie in one byte. In FP8 alone one of them may itself be no number.
    byte = first * source.dtype.bits // 8
    is_nan = scales.encoding.format.is_fp8 and (int(raw.codes[byte]) & 0x7F) == 0x7F
    found = _at(source, tile.span(source)[0] + byte)
    return found if is_nan else found._replace(what="codes with scales that make numbers beyond float32")


def _in_rows(raw: RawRows) -> StoredByte | None:
    for number, gather_input in enumerate(raw.source.inputs):
        first = first_non_finite(raw.stored[number].numpy(), gather_input.read.dtype)
        if first is not None:
            place = first
            if gather_input.read.view is None:
                row, column = divmod(first, raw.source.num_columns)
                place = raw.taken[number].stored_row(row) * raw.source.num_columns + column
            return _at(gather_input.read, gather_input.read.offset + gather_input.read.dtype.nbytes(place))
        for factor, data in zip(gather_input.factors, raw.factors[number], strict=True):
            first = first_non_finite(data.numpy(), factor.dtype)
            if first is not None:
                return _at(factor, factor.offset + factor.dtype.nbytes(first))
    return None


def _at(read: Read, byte: int) -> StoredByte:
    return StoredByte(read.source, read.key, byte)
