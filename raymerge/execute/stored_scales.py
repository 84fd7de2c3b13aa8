"""Looks at stored scales before anything is written: what is no positive number would spoil a whole block.

Scales of blocks can be many (a sixteenth of all bytes in MXFP4). Here as many are looked at as takes seconds,
those of whole matrices first; workers find the rest where they read it, before it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.architectures.rules import quantisation_tables
from raymerge.checkpoints.quantisation.detect import is_activation_scale
from raymerge.checkpoints.quantisation.encoding import Encoding, Made
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import LARGEST
from raymerge.merge_plan.plan import Ints, Plan, RunReader, ints
from raymerge.merge_plan.tables import read_scales
from raymerge.storage.store import Range, ReadStore, coalesce

Bytes: TypeAlias = NDArray[np.uint8]
_MOST_BYTES = 256 << 20
_MOST_REQUESTS = 1 << 15
_MOST_FAR_REQUESTS = 256
_LOOKED_AT: tuple[Made, ...] = ("tensor_scale", "scales")
_GAP, _LIMIT = 64 << 10, 8 << 20
_MOST_CODES = 64 << 10
"""Bytes of a matrix's codes that are read where all its scales are 0; others are left to workers."""
_REPAIR = "Repair or replace that model; nothing was written."
_WIDE: Mapping[DType, tuple[str, int]] = {
    DType.F16: ("<u2", 0x7C00),
    DType.BF16: ("<u2", 0x7F80),
    DType.F32: ("<u4", 0x7F800000),
}
"""How to see the bits of floats, and those of the exponent."""


NOT_FINITE, NEGATIVE = "NaN or infinity", "a negative scale"


class Fault(NamedTuple):
    place: int
    words: str


def scale_fault(dtype: DType, stored: Bytes) -> Fault | None:
    """The first of some stored scales that is NaN, infinite or negative; None if all can be multiplied by."""
    if dtype in (DType.U8, DType.F8_E8M0):
        return _first(stored == 0xFF, NOT_FINITE)
    if dtype is DType.F8_E4M3:
        return _first((stored & 0x7F) == 0x7F, NOT_FINITE) or _first(stored > 0x80, NEGATIVE)
    kind, exponent = _WIDE[dtype]
    bits = stored.view(kind)
    sign = 1 << (8 * bits.itemsize - 1)
    return _first((bits & exponent) == exponent, NOT_FINITE) or _first(bits > sign, NEGATIVE)


def are_negative(dtype: DType, stored: Bytes) -> bool:
    """Whether any of some stored scales is; the same for NaN with a sign. Takes no memory."""
    if not stored.size or dtype in (DType.U8, DType.F8_E8M0):
        return False
    if dtype is DType.F8_E4M3:
        return int(stored.max()) > 0x80
    bits = stored.view(_WIDE[dtype][0])
    return int(bits.max()) > 1 << (8 * bits.itemsize - 1)


def are_zeros(dtype: DType, stored: Bytes) -> bool:
    """Whether all of some stored scales are 0, which exponents never are."""
    if dtype in (DType.U8, DType.F8_E8M0):
        return False
    width = dtype.bits // 8
    stored = stored.reshape(-1, width)
    return not bool(stored[:, :-1].any()) and not bool((stored[:, -1] & 0x7F).any())


def _first(is_so: NDArray[np.bool_], words: str) -> Fault | None:
    return Fault(int(is_so.argmax()), words) if is_so.any() else None


class _Stored(NamedTuple):
    """Scales of one input of an op."""

    source: int
    key: str
    range: Range
    dtype: DType
    what: Made | None
    input: int
    encoding: Encoding | None
    """None where it is a scale of what the model computes, and none of codes."""


def scale_problems(plan: Plan, stores: Sequence[ReadStore], names: Sequence[str]) -> Iterator[Problem]:
    """What is wrong with stored scales, as far as they are read in a few seconds; of a tensor the first."""
    reported: set[str] = set()
    batches = _looked_at(plan, stores) if len(plan["scales"]) else ()
    for batch in chain(batches, [_bounded(_of_activations(plan), stores)]):
        for each, data in _read(batch, stores):
            what = _wrong(each, data, plan, stores[each.source])
            where = f"{names[each.source]}: {_tensor_of(plan, each.input)}" if what else ""
            if what and where not in reported:
                reported.add(where)
                yield Problem(where, what, _REPAIR)


def _wrong(each: _Stored, data: Bytes, plan: Plan, store: ReadStore) -> str:
    """What is wrong with some scales, as a sentence; "" for nothing."""
    fault = scale_fault(each.dtype, data)
    if fault is not None:
        byte = each.range.offset + each.dtype.nbytes(fault.place)
        return f"the source holds {fault.words}, here first at byte {byte} of {each.key}."
    if not are_zeros(each.dtype, data):
        return ""
    if each.encoding is None:
        return f"a scale of what the model computes is 0, at byte {each.range.offset} of {each.key}."
    if each.encoding.format.has_two_scales and each.what == "tensor_scale":
        return f"what all scales of its blocks go with is 0, at byte {each.range.offset} of {each.key}."
    (row,) = plan["inputs"].slice(each.input, 1).to_pylist()
    codes = np.frombuffer(store.read(row["key"], row["offset"], min(row["nbytes"], _MOST_CODES)), np.uint8)
    if _mean_nothing(each.encoding, codes):
        return ""
    first = f"byte {each.range.offset} of {each.key}"
    return f"all scales of its codes are 0, from {first} on, and the codes are not."


def _mean_nothing(encoding: Encoding, codes: Bytes) -> bool:
    """Whether all codes are 0, so that no scale would make a difference."""
    if encoding.format.zero_points is not None:
        return False
    is_zero = np.array(encoding.format.reference.elements) == 0
    if encoding.format.code_bits == 8:
        return bool(is_zero[codes].all())
    return bool(is_zero[codes & 15].all() and is_zero[codes >> 4].all())


def _looked_at(plan: Plan, stores: Sequence[ReadStore]) -> Iterator[list[_Stored]]:
    """Of scales of whole matrices and of blocks as many as can be read in a few seconds."""
    own, source = ints(plan["inputs"], "scales"), ints(plan["inputs"], "source")
    which = np.flatnonzero(own >= 0)
    _, first = np.unique(source[which] * len(plan["scales"]) + own[which], return_index=True)
    inputs = which[np.sort(first)]
    for what in _LOOKED_AT:
        yield _bounded(_of_inputs(plan, inputs, what), stores)


def _bounded(scales: Iterable[_Stored], stores: Sequence[ReadStore]) -> list[_Stored]:
    some, nbytes, far = list[_Stored](), 0, 0
    for each in scales:
        nbytes, far = nbytes + each.range.nbytes, far + stores[each.source].is_far
        if nbytes > _MOST_BYTES or far > _MOST_FAR_REQUESTS or len(some) >= _MOST_REQUESTS:
            break
        some.append(each)
    return some


def _of_activations(plan: Plan) -> Iterator[_Stored]:
    """Scales of inputs, outputs, cached keys and values, of which the largest is taken or one is copied."""
    is_quantised = bool(quantisation_tables(plan.manifest["config"]))
    chosen = [each.method == LARGEST or (each.is_copy and is_quantised) for each in plan.expressions]
    if not any(chosen):
        return
    names = plan["tensors"].column("name").to_pylist()
    is_scale = np.array([is_activation_scale(each) for each in names], dtype=np.bool_)
    ops, inputs = plan["ops"], RunReader(plan["inputs"], "source", "key", "offset", "nbytes", "dtype")
    which = is_scale[ints(ops, "tensor")] & np.array(chosen)[ints(ops, "expression")]
    first, count = ints(ops, "first_input")[which], ints(ops, "num_inputs")[which]
    seen: set[tuple[int, str, int]] = set()
    for start, number in zip(first.tolist(), count.tolist(), strict=True):
        for place, row in enumerate(inputs.read(start, number), start):
            dtype, stored = DType(row.dtype), (row.source, row.key, row.offset)
            if dtype in _WIDE and stored not in seen:
                seen.add(stored)
                yield _Stored(row.source, row.key, Range(row.offset, row.nbytes), dtype, None, place, None)


def _of_inputs(plan: Plan, inputs: Ints, what: Made) -> Iterator[_Stored]:
    encodings, rows = plan.encodings, RunReader(plan["scales"])
    own, source = ints(plan["inputs"], "scales")[inputs], ints(plan["inputs"], "source")[inputs]
    dtypes = [each.made_dtype(what) for each in encodings]
    has = np.array([dtype is not None for dtype in dtypes], dtype=np.bool_)
    named = ints(plan["scales"], "encoding")[own]
    for place in np.flatnonzero(has[named]).tolist():
        scales, dtype = read_scales(rows.row(int(own[place])), encodings), dtypes[named[place]]
        key, run = scales.key, Range(scales.offset, scales.nbytes)
        if what == "tensor_scale":
            key, run = scales.tensor_key, Range(scales.tensor_offset, scales.tensor_nbytes)
        if dtype is not None and key:
            yield _Stored(int(source[place]), key, run, dtype, what, int(inputs[place]), scales.encoding)


def _read(batch: Sequence[_Stored], stores: Sequence[ReadStore]) -> Iterator[tuple[_Stored, Bytes]]:
    """Scales with their bytes; those that lie near each other by one request."""
    ordered = sorted(batch, key=lambda each: (each.source, each.key))
    for (source, key), group in groupby(ordered, key=lambda each: (each.source, each.key)):
        members = list(group)
        for extent in coalesce([each.range for each in members], gap=_GAP, limit=_LIMIT):
            data = np.frombuffer(stores[source].read(key, extent.offset, extent.nbytes), np.uint8)
            for member in extent.members:
                begin = members[member].range.offset - extent.offset
                yield members[member], data[begin : begin + members[member].range.nbytes]


def _tensor_of(plan: Plan, number: int) -> str:
    """The tensor that an input's op makes."""
    op = int(np.searchsorted(ints(plan["ops"], "first_input"), number, side="right")) - 1
    tensor = int(ints(plan["ops"], "tensor")[op])
    return str(plan["tensors"].column("name")[tensor].as_py())
