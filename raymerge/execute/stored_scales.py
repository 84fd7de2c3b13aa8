"""Looks at stored scales before anything is written: what is no positive number would spoil a whole block.

Scales of blocks can be many (a sixteenth of all bytes in MXFP4). Here as many are looked at as takes seconds,
those of whole matrices first; workers find the rest where they read it, before it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.architectures.rules import quantisation_tables
from raymerge.checkpoints.quantisation.detect import is_activation_scale
from raymerge.checkpoints.quantisation.encoding import SPELL_RIGHT, Encoding, Format, Made
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError, Problem
from raymerge.execute.non_finite import are_zeros, scale_fault
from raymerge.merge_plan.plan import Ints, Plan, RunReader, ints
from raymerge.merge_plan.tables import read_scales
from raymerge.methods.internal import LARGEST
from raymerge.storage.store import ReadStore, num_readers, read_together

Bytes: TypeAlias = NDArray[np.uint8]
_MOST_BYTES = 256 << 20
_MOST_REQUESTS = 1 << 15
_MOST_FAR_REQUESTS = 256
_LOOKED_AT: tuple[Made, ...] = ("tensor_scale", "scales")
_PIECE = 16 << 10
"""Bytes of codes that are read at their begin, middle and end where all of their scales are 0. Others are
never looked at, since they mean 0 whatever they are."""
_REQUEST, _TOGETHER = 8 << 20, 128 << 20
"""Bytes of scales that are read by a request, and at a time: the driver is to have little memory."""
_REPAIR = "Repair or replace that model; nothing was written."


class _Stored(NamedTuple):
    """Scales of one input of an op."""

    source: int
    key: str
    offset: int
    nbytes: int
    dtype: DType
    what: Made | None
    input: int
    encoding: Encoding | None
    """None where it is a scale of what the model computes, and none of codes."""

    @property
    def place(self) -> str:
        return f"byte {self.offset} of {self.key}"

    @property
    def two_scale_format(self) -> Format | None:
        """The format of a matrix whose one scale it is beside those of blocks; None for other scales."""
        form = None if self.encoding is None or self.what != "tensor_scale" else self.encoding.format
        return form if form is not None and form.has_two_scales else None


def check_scales(plan: Plan, stores: Sequence[ReadStore], names: Sequence[str]) -> None:
    """Raises NonFiniteError with all that is wrong with stored scales, as far as they are read in a few
    seconds."""
    if problems := tuple(scale_problems(plan, stores, names)):
        raise NonFiniteError(problems)


def scale_problems(plan: Plan, stores: Sequence[ReadStore], names: Sequence[str]) -> Iterator[Problem]:
    """What is wrong with stored scales, as far as they are read in a few seconds; of a tensor the first."""
    reported: set[str] = set()
    of_matrices: dict[tuple[int, Format], dict[str, float]] = {}
    batches = _looked_at(plan, stores) if len(plan["scales"]) else ()
    for each, data in _read(chain(batches, [_bounded(_of_activations(plan), stores)]), stores):
        what = _wrong(each, data, plan, stores[each.source])
        where = f"{names[each.source]}: {_tensor_of(plan, each.input)}" if what else ""
        if what and where not in reported:
            reported.add(where)
            yield Problem(where, what, _REPAIR)
        if not what and (form := each.two_scale_format) is not None:
            own = of_matrices.setdefault((each.source, form), {})
            own[f"the scale at {each.place}"] = float(data.view("<f4")[0])
    for (source, form), values in of_matrices.items():
        if sentence := form.misspelt(values):
            yield Problem(names[source], sentence, SPELL_RIGHT)


def _wrong(each: _Stored, data: Bytes, plan: Plan, store: ReadStore) -> str:
    """What is wrong with some scales, as a sentence; "" for nothing."""
    fault = scale_fault(each.dtype, data)
    if fault is not None:
        byte = each.offset + each.dtype.nbytes(fault.place)
        return f"the source holds {fault.words}, here first at byte {byte} of {each.key}."
    if not are_zeros(each.dtype, data):
        return ""
    if each.encoding is None:
        return f"a scale of what the model computes is 0, at {each.place}."
    if each.two_scale_format is not None:
        return f"what all scales of its blocks go with is 0, at {each.place}."
    (row,) = plan["inputs"].slice(each.input, 1).to_pylist()
    nbytes, last = min(row["nbytes"], _PIECE), max(0, row["nbytes"] - _PIECE)
    pieces = (store.read(row["key"], row["offset"] + start, nbytes) for start in sorted({0, last // 2, last}))
    if all(_mean_nothing(each.encoding, np.frombuffer(piece, np.uint8)) for piece in pieces):
        return ""
    return f"all scales of its codes are 0, from {each.place} on, and the codes are not."


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
        nbytes, far = nbytes + each.nbytes, far + stores[each.source].is_far
        if nbytes > _MOST_BYTES or far > _MOST_FAR_REQUESTS or len(some) >= _MOST_REQUESTS:
            break
        some.append(each)
    return some


def _of_activations(plan: Plan) -> Iterator[_Stored]:
    """Scales of inputs, outputs, cached keys and values, of which the largest is taken or one is copied."""
    is_quantised = bool(quantisation_tables(plan.manifest["config"]))
    chosen = [each.method == LARGEST.name or (each.is_copy and is_quantised) for each in plan.expressions]
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
            if dtype.is_mergeable and stored not in seen:
                seen.add(stored)
                yield _Stored(row.source, row.key, row.offset, row.nbytes, dtype, None, place, None)


def _of_inputs(plan: Plan, inputs: Ints, what: Made) -> Iterator[_Stored]:
    encodings, rows = plan.encodings, RunReader(plan["scales"])
    own, source = ints(plan["inputs"], "scales")[inputs], ints(plan["inputs"], "source")[inputs]
    dtypes = [each.made_dtype(what) for each in encodings]
    has = np.array([dtype is not None for dtype in dtypes], dtype=np.bool_)
    named = ints(plan["scales"], "encoding")[own]
    for place in np.flatnonzero(has[named]).tolist():
        scales, dtype = read_scales(rows.row(int(own[place])), encodings), dtypes[named[place]]
        stored = scales.key, scales.offset, scales.nbytes
        if what == "tensor_scale":
            stored = scales.tensor_key, scales.tensor_offset, scales.tensor_nbytes
        if dtype is not None and stored[0]:
            yield _Stored(int(source[place]), *stored, dtype, what, int(inputs[place]), scales.encoding)


def _read(
    batches: Iterable[Sequence[_Stored]], stores: Sequence[ReadStore]
) -> Iterator[tuple[_Stored, Bytes]]:
    """Scales with their bytes, each batch by source."""
    for batch in batches:
        for source, store in enumerate(stores):
            own = [each for each in batch if each.source == source]
            largest = max([_REQUEST, *(each.nbytes for each in own)])
            readers = max(1, min(num_readers(store), _TOGETHER // largest))
            for each, data in read_together(store, own, readers=readers, limit=_REQUEST):
                yield each, np.frombuffer(data, np.uint8)


def _tensor_of(plan: Plan, number: int) -> str:
    """The tensor that an input's op makes."""
    op = int(np.searchsorted(ints(plan["ops"], "first_input"), number, side="right")) - 1
    tensor = int(ints(plan["ops"], "tensor")[op])
    return str(plan["tensors"].column("name")[tensor].as_py())
