"""The memory contract: what a worker needs for every op of a plan, and how its tiles are cut.

A worker has one segment in each of its *lanes*. A lane has its share of the worker's budget, and holds of it

- a buffer of stored bytes: the load that is read, then computed;
- a buffer of finished bytes: filled, then written;
- what computing takes: float32 inputs, result and temporaries of one *piece* at a time, and statistics.

A piece is what a kernel is given at once. On a processor it is a BLOCK of a tile, so that it stays in the
cache; where an op cannot be streamed (rows gathered by token, whole matrices) it is the whole tile. An op
whose logical tensors lie across each other (views) is one tile, and computed in pieces of one after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import Expression, Scales, group_multiple
from raymerge.merge_plan.plan import (
    Ints,
    Plan,
    codes,
    ints,
    last_values,
    lists,
    numbered,
    numbered_runs,
    repeated_inputs,
    starts,
    sums,
)
from raymerge.merge_plan.tables import read_scales, read_view
from raymerge.methods import BLOCK, ROW_GROUP, SAMPLE_LENGTH, SAMPLE_RUNS, Access, Method
from raymerge.storage.local.buffers import ALIGNMENT
from raymerge.storage.local.store import BOUNCE_BYTES
from raymerge.units import format_size

HOLE_MOST = 64 << 10
"""Bytes between two wanted rows of a file that are read along, rather than by a request of their own."""
REQUEST_MOST = 1 << 20
"""Bytes of the largest request that reads such holes."""
MOST_TOGETHER = 4
"""Requests of one load to servers that are under way at once."""
FAR_LANE_BYTES = 3 * MOST_TOGETHER << 20
"""Bytes that a lane takes, beside its budget, to read from servers: measured, 2.3 MiB for each request."""
FAR_BYTES = 24 << 20
"""Bytes that a worker takes for the clients of servers, whatever it reads: measured, 18 MiB."""
_RUN_NBYTES = 64
"""Bytes of a run in the arrays that runs are looked up in."""
_MOVE_NBYTES = 384
"""Bytes of a run of rows on its way through a tile."""


@dataclass(frozen=True, slots=True)
class GatherNeed:
    """What gathering one input takes; equal for gathers of equal sizes."""

    columns: int
    stored_per_element: float
    """Stored bytes for each element, of all inputs."""
    whole_bytes: int
    """Stored bytes where it is made at once, of all inputs."""
    largest_input: int
    """Elements of the largest input that is unpacked at once."""
    widest: float
    """Bytes of a stored element of the widest input."""
    fixed_bytes: int
    """Bytes that live whatever the tile: factors, groups of rows, runs, and rows cut by a tile's ends."""
    is_padded: bool
    per_element: float
    """Bytes of bookkeeping for each element of a tile."""

    @property
    def overlap(self) -> float:
        """What all tiles hold together, in times of the stored bytes: each has the rows at its ends whole."""
        return 1 + 2 * self.columns / BLOCK

    def placed_per_element(self, num_elements: int, *, is_flat: bool) -> float:
        """Bytes of one input's rows, as stored and in float32, before they go to their places."""
        if is_flat:
            return 4 + self.per_element
        return (4 + self.widest) * self.largest_input / max(1, num_elements) + self.per_element


def gather_need(
    gather: Mapping[str, Any],
    gather_inputs: Sequence[Mapping[str, Any]],
    factors: Sequence[Mapping[str, Any]],
) -> GatherNeed:
    rows, columns = gather["num_rows"], gather["num_columns"]
    widths = [DType(gather_input["dtype"]).bits / 8 for gather_input in gather_inputs]
    # Of one that lies within a fused tensor all of it is read and unpacked.
    sizes = [each["num_rows"] if each["view_strides"] else rows for each in gather_inputs]
    whole = sum(
        each["nbytes"] if each["view_strides"] else int(width * columns * rows)
        for each, width in zip(gather_inputs, widths, strict=True)
    )
    # A tile's ends may cut a row each: raw bytes of two tiles, the rows in float32, and the sum of inputs.
    ends = 2 * columns * (2 * sum(widths) + 4 + 4)
    ends += REQUEST_MOST + _RUN_NBYTES * gather["num_runs"] + 2 * _MOVE_NBYTES * len(gather_inputs)
    return GatherNeed(
        columns=columns,
        stored_per_element=sum(widths),
        whole_bytes=whole,
        largest_input=max(sizes) * columns,
        widest=max(widths),
        fixed_bytes=int(ends) + _product_bytes(columns, gather_inputs, factors) + _padding_bytes(gather),
        is_padded=gather["real_rows"] < rows,
        per_element=_MOVE_NBYTES * len(gather_inputs) / columns,
    )


def _product_bytes(
    columns: int, gather_inputs: Sequence[Mapping[str, Any]], factors: Sequence[Mapping[str, Any]]
) -> int:
    """Factors as stored and in float32; of a group of rows the product, the sum, and both in float64."""
    held: int = sum(
        each["nbytes"] + 4 * (each["nbytes"] * 8 // DType(each["dtype"]).bits) for each in factors
    )
    rank = max((gather_input["rank"] for gather_input in gather_inputs), default=0)
    return held + (ROW_GROUP * (32 * columns + 8 * rank) if rank else 0)


def _padding_bytes(gather: Mapping[str, Any]) -> int:
    """Sum and mean of all rows, and a group of rows in float64."""
    if gather["real_rows"] == gather["num_rows"]:
        return 0
    columns: int = gather["num_columns"]
    return columns * (8 * ROW_GROUP + 32)


def gather_needs(plan: Plan) -> list[GatherNeed]:
    gather_inputs, factors = plan["gather_inputs"].to_pylist(), plan["factors"].to_pylist()
    needs = []
    for each in plan["gathers"].to_pylist():
        own = gather_inputs[each["first_gather_input"] :][: each["num_gather_inputs"]]
        count = sum(gather_input["num_factors"] for gather_input in own)
        needs.append(gather_need(each, own, factors[own[0]["first_factor"] :][:count]))
    return needs


LOAD_MOST = 16 << 20
"""Stored bytes that are read at once; more only costs cache. An op that is read once for several passes may
be more."""
WRITE_MOST = 4 << 20
"""Finished bytes that are written at once."""
TILE_MOST = 1 << 20
"""Elements of the largest tile of an op that is not computed in pieces."""
_CODES_PIECE = 1 << 18
"""Elements of a piece of an op with codes: whole scale rows, at least one. Several calls go into each."""
READ_MARGIN = 12288
"""Bytes by which what is read of an input may be more than what is wanted: it is read in whole blocks."""

_GPU_PIECE = 1 << 22
"""Elements that keep a GPU busy for much longer than it takes to tell it what to do."""
_GPU_WORK = 256 << 20
"""Bytes of its memory that computing such a piece may take; with less, ties took three times as long."""
_GPU_BESIDE = 28
"""Bytes that a GPU takes for each element of a piece, beside what a processor does: two 8-byte temporaries
are of all elements, not of a quarter, codecs have temporaries where the processor has loops, and the result
of the piece before is still there."""

_LOAD_SHARE, _WRITE_SHARE = 8, 16
_DECODING, _ENCODING = 8, 6
"""Bytes of temporaries for an element: of an input that is decoded before its view is taken, and of codes
with scales until they are handed over, with the numbers that they are decoded to for the error report."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane's share of a worker's budget, and its buffers."""

    budget: int
    outputs: int = 1
    """Plans that are carried out together."""
    block_bytes: int = 0
    """Of the buffer of each of several plans for what is written; 0: the usual share."""

    @property
    def load_bytes(self) -> int:
        """Bytes of the buffer for what is read; it grows for larger loads."""
        return min(LOAD_MOST, _whole_pages(self.budget // _LOAD_SHARE))

    @property
    def write_bytes(self) -> int:
        """Bytes of each plan's buffer for what is written."""
        return self.block_bytes or min(WRITE_MOST, _whole_pages(self.budget // _WRITE_SHARE))

    @property
    def all_write_bytes(self) -> int:
        return self.outputs * self.write_bytes

    def load_limit(self, need: Need, piece: int) -> int:
        """Bytes that a load may have while pieces of so many elements are computed."""
        return self.budget - self.all_write_bytes - need.work_bytes(piece)

    def peak(self, need: Need, elements: int) -> int:
        """Bytes in use while tiles of so many elements are made."""
        load = max(self.load_bytes, need.load_bytes(elements))
        return self.all_write_bytes + need.work_bytes(need.piece_of(elements)) + load

    @property
    def on_gpu(self) -> Lane:
        """What a lane asks for that computes on a GPU: page-locked memory may be twice as much as that."""
        return Lane(self.budget // 2, self.outputs, _whole_pages(self.block_bytes // 2))

    def gpu_peak(self, need: Need, num_elements: int, *, passes: int) -> int:
        """Bytes of a GPU's memory in use while an op is made; of several loads, one arrives while another is
        computed."""
        if not need.work_per_element:
            return 0
        lane, whole = self.on_gpu, max(1, num_elements)
        elements = tiling(need, num_elements, lane, passes=passes).elements
        load = max(lane.load_bytes, need.load_bytes(elements))
        need = need.on_gpu
        return load * min(2, -(-whole // elements)) + need.work_bytes(need.piece_of(elements))


@dataclass(frozen=True, slots=True)
class Need:
    stored_per_element: float
    work_per_element: float
    """Bytes that live while a piece is computed, for each of its elements."""
    scratch_per_element: float
    """The part of them that the method's temporaries take: never less than for a piece of BLOCK elements."""
    read_margin: int
    """Bytes that reading a tile may take beside the stored bytes."""
    fixed_bytes: int
    """Bytes of statistics, held whatever the tile."""
    least_elements: int
    """Elements of the smallest tile that the op can be cut into."""
    unit: int = BLOCK
    """Elements that tiles are multiples of, but for a last one."""
    piece: int = BLOCK
    """Most elements of a piece; 0: a tile is one piece."""
    in_place: bool = False
    """Whether results take the place of the first input's bytes, element by element."""

    @property
    def on_gpu(self) -> Need:
        """With pieces as large as a GPU wants them; tiles stay as they are, since the host reads them."""
        work = self.work_per_element + _GPU_BESIDE
        most = min(_GPU_PIECE, int(_GPU_WORK / work)) // self.unit * self.unit
        return replace(self, work_per_element=work, piece=max(self.piece, most) if self.piece else 0)

    def piece_of(self, elements: int) -> int:
        return min(elements, self.piece) if self.piece else elements

    def load_bytes(self, elements: int) -> int:
        """Bytes of a tile as it is read; whole pages, as buffers are."""
        nbytes = math.ceil(self.stored_per_element * elements) + self.read_margin
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def work_bytes(self, piece: int) -> int:
        """Bytes that computing a piece of so many elements takes."""
        short = max(0, BLOCK - piece)
        return math.ceil(self.work_per_element * piece + self.scratch_per_element * short) + self.fixed_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest lane that the op can be made in."""
        elements = max(1, self.least_elements)
        load, work = self.load_bytes(elements), self.work_bytes(self.piece_of(elements))
        in_share = _least_budget(load, work, 1 - 1 / _WRITE_SHARE)
        return math.ceil(min(in_share, _least_budget(load, work + WRITE_MOST, 1.0)))


def _least_budget(load: int, beside: int, share: float) -> float:
    """The least budget that a share of holds the load buffer, with at least so many bytes, and what is beside
    it. The buffer is a share of the whole budget, up to a limit."""
    in_share = max((load + beside) / share, beside / (share - 1 / _LOAD_SHARE)) + 1
    return min(in_share, (max(load, LOAD_MOST) + beside) / share)


def _whole_pages(nbytes: int) -> int:
    return nbytes // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, slots=True)
class InputNeed:
    dtype: DType
    """How it is stored; of a gathered one its first input."""
    nbytes: int
    """Bytes read; of a gathered one its first input's."""
    gather: GatherNeed | None = None
    scales: Scales | None = None
    view: View | None = None
    """Where its elements lie in what is read; None: row-major, all of it."""
    is_repeated: bool = False
    """Whether its bytes are those of the part before, which are read once."""

    def kept_bytes(self, num_elements: int, *, is_flat: bool) -> float:
        """Stored bytes of it that all tiles of an op of so many elements hold together."""
        if self.gather is None:
            return self.nbytes + (0 if self.scales is None else self.scales.read_nbytes)
        if not is_flat:
            return self.gather.whole_bytes
        return self.gather.overlap * (self.gather.stored_per_element * num_elements)


class PartSize(NamedTuple):
    """One logical tensor of an op that is not row-major."""

    shape: tuple[int, ...]
    view: View | None
    """Where its elements lie within the op; None: all of it, row-major."""


@dataclass(frozen=True, slots=True)
class OpSize:
    num_elements: int
    num_parts: int
    columns: int
    """Elements of a logical row, summed over its parts."""
    num_dimensions: int
    is_flat: bool
    """Whether tiles may be cut; otherwise the op is one tile."""
    parts: tuple[PartSize, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """A shape of so many dimensions, elements and columns: methods decide by it on access and passes."""
        if self.num_dimensions < 2:
            return (self.num_elements,) * self.num_dimensions
        ones = (1,) * (self.num_dimensions - 2)
        return (*ones, self.num_elements // max(1, self.columns), self.columns)


def op_need(expression: Expression, inputs: Sequence[InputNeed], size: OpSize) -> Need:
    num_elements, is_flat = size.num_elements, size.is_flat
    read = [each for each in inputs if not each.is_repeated]
    stored = sum(each.kept_bytes(num_elements, is_flat=is_flat) for each in read) / max(1, num_elements)
    packed = [each.scales for each in inputs if each.scales is not None]
    beside = sum((each.nbytes > 0) + (each.tensor_nbytes > 0) + (each.zeros_nbytes > 0) for each in packed)
    margin = READ_MARGIN * (len(inputs) + beside)
    method = expression.definition
    if expression.is_copy or method is None:
        return Need(stored, 0, 0, margin, 0, min(num_elements, BLOCK))
    if size.parts and _goes_in_pieces(expression, method, inputs, size.parts):
        return _need_in_pieces(expression, method, inputs, size, Need(stored, 0, 0, margin, 0, num_elements))
    per_part = len(inputs) // size.num_parts
    scratch = 4 * (method.scratch + method.scratch_per_source * per_part)
    gathers = [each.gather for each in inputs if each.gather is not None]
    out = expression.cast.bits / 8
    # Float32 inputs and the result, and a part of it as it is written.
    work = 4 * per_part + scratch + 4 + out
    if packed and not is_flat:
        work += _DECODING
    if expression.encode is not None:
        work += _ENCODING
    if gathers or not is_flat:
        # A view is gathered in its stored dtype before it is widened, and so are rows before they are placed;
        # the result is placed in its op.
        placed = [each.placed_per_element(num_elements, is_flat=is_flat) for each in gathers]
        work += max(each.dtype.bits / 8 for each in inputs) + max(placed, default=0) + 4
    state = method.state_bytes * len(inputs) + method.state_bytes_per_column * per_part * size.columns
    fixed = state + sum(each.fixed_bytes for each in gathers) + _sample_bytes(method, per_part, stored, size)
    unit = _unit(expression, method, size, gathers)
    scale_rows = [each.unit for each in packed]
    if expression.encode is not None:
        scale_rows.append(expression.encode.cut_height * size.columns // size.num_parts)
    if is_flat and scale_rows:
        is_elementwise = method.access_with(expression.bind(keys=(), shape=size.shape)) is Access.ELEMENT
        unit = math.lcm(1 if is_elementwise else unit, *scale_rows)
    usual = _CODES_PIECE if scale_rows else BLOCK
    piece = 0 if gathers or not is_flat else max(1, usual // unit) * unit
    return Need(stored, work, scratch, margin, fixed, min(num_elements, unit), unit, piece)


def _goes_in_pieces(
    expression: Expression, method: Method, inputs: Sequence[InputNeed], parts: Sequence[PartSize]
) -> bool:
    """Whether an op that is read whole can be computed piece by piece: not if a piece is a matrix, and not if
    codes would have to be taken out of the middle of rows."""
    settings = expression.bind(keys=(), shape=parts[0].shape)
    if method.access_with(settings) is Access.MATRIX or any(each.gather is not None for each in inputs):
        return False
    columns = parts[0].shape[-1] if parts[0].shape else 1
    coded = [
        (each.view, each.scales.encoding, each.scales.columns) for each in inputs if each.scales is not None
    ]
    if expression.encode is not None:
        coded += [(part.view, expression.encode, columns) for part in parts]
    return all(
        columns > 0
        and encoding.cut_height == 1
        and encoding.tensor_scale_dtype is None
        and width == columns
        and (view is None or view.has_whole_rows)
        for view, encoding, width in coded
    )


def _need_in_pieces(
    expression: Expression, method: Method, inputs: Sequence[InputNeed], size: OpSize, read: Need
) -> Need:
    """The need of an op that is read whole and computed in pieces of its parts, one after the other."""
    per_part, encode = len(inputs) // size.num_parts, expression.encode
    settings = expression.bind(keys=(), shape=size.parts[0].shape)
    access, columns = method.access_with(settings), settings.row_length
    is_coded = encode is not None or any(each.scales is not None for each in inputs)
    unit = BLOCK if access is Access.ELEMENT and not is_coded else method.granule(settings)
    unit = math.lcm(unit, columns) if is_coded else unit
    scratch = 4 * (method.scratch + method.scratch_per_source * per_part)
    # Float32 inputs and the result, and a part of both as they are stored.
    work = 4 * per_part + scratch + 4 + expression.cast.bits / 8 + max(each.dtype.bits / 8 for each in inputs)
    work += _DECODING * any(each.scales is not None for each in inputs) + _ENCODING * (encode is not None)
    state = per_part * (method.state_bytes + method.state_bytes_per_column * columns)
    in_place = encode is None and _takes_places(expression, inputs[::per_part], size)
    made = 0 if in_place else expression.cast.nbytes(size.num_elements)
    if encode is not None:
        made += size.num_elements // columns * encode.scales_nbytes(columns)
    piece = max(1, _CODES_PIECE // unit) * unit
    return replace(
        read,
        work_per_element=work,
        scratch_per_element=scratch,
        fixed_bytes=state + made,
        unit=unit,
        piece=piece,
        in_place=in_place,
    )


def _takes_places(expression: Expression, first: Sequence[InputNeed], size: OpSize) -> bool:
    """Whether each element of the result has the place that it has in the first input, and is as wide."""
    bits = expression.cast.bits
    return first[0].nbytes * 8 == size.num_elements * bits and all(
        each.scales is None
        and each.dtype.bits == bits
        and each.view == part.view
        and each.is_repeated == (n > 0)
        for n, (each, part) in enumerate(zip(first, size.parts, strict=True))
    )


def _sample_bytes(method: Method, per_part: int, stored: float, size: OpSize) -> int:
    """Bytes of a sample as stored, in float32, and of what is made of it."""
    elements = SAMPLE_RUNS * SAMPLE_LENGTH
    if method.sampler is None or size.num_elements // size.num_parts <= elements:
        return 0
    return math.ceil((stored + 4 * (2 * per_part + 2)) * elements)


def _unit(expression: Expression, method: Method, size: OpSize, gathers: Sequence[GatherNeed]) -> int:
    if not size.is_flat:
        return max(1, size.num_elements)
    settings = expression.bind(keys=(), shape=size.shape)
    columns = max((each.columns for each in gathers), default=0)
    match method.access_with(settings):
        case Access.ELEMENT:
            return group_multiple(columns) if columns else BLOCK
        case Access.TENSOR:
            padded = max((each.columns for each in gathers if each.is_padded), default=0)
            return BLOCK * -(-ROW_GROUP * padded // BLOCK) if padded else BLOCK
        case Access.ROW | Access.MATRIX:
            return method.granule(settings)


@dataclass(frozen=True, slots=True)
class Tiling:
    elements: int
    """Elements of a tile: a multiple of the op's unit, or the whole of a smaller op."""
    peak: int

    def is_whole(self, num_elements: int) -> bool:
        """Whether an op of so many elements is one tile, read once for all passes."""
        return self.elements >= num_elements


def tiling(need: Need, num_elements: int, lane: Lane, *, passes: int) -> Tiling:
    """Cut an op so that it fits a lane; where there are passes before the last one, whole if that fits."""
    least = max(1, min(num_elements, need.least_elements))
    whole = max(1, num_elements)
    if passes and lane.peak(need, whole) <= lane.budget:
        return Tiling(whole, lane.peak(need, whole))
    elements = max(least, min(whole, _affordable(need, lane) // need.unit * need.unit))
    return Tiling(elements, lane.peak(need, elements))


def _affordable(need: Need, lane: Lane) -> int:
    stored = max(need.stored_per_element, 1e-9)
    if need.piece and lane.load_limit(need, need.piece) >= lane.load_bytes:
        return int((lane.load_bytes - need.read_margin - ALIGNMENT) / stored)
    # The tile is one piece, perhaps since a full one does not fit beside the buffer.
    spare = lane.budget - lane.all_write_bytes - need.fixed_bytes
    spare -= math.ceil(need.scratch_per_element * BLOCK)
    fitting = (spare - need.read_margin - ALIGNMENT) / (stored + need.work_per_element)
    # The buffer has a usual load's length even where a tile is shorter.
    beside = (spare - lane.load_bytes) / max(need.work_per_element, 1e-9)
    return int(min(TILE_MOST, fitting, beside, lane.load_bytes / stored))


def expression_passes(expression: Expression, shape: tuple[int, ...] = ()) -> int:
    """Passes that an expression makes over inputs of a shape before the last one: for statistics, and for the
    one scale of all codes."""
    method = expression.definition
    if expression.is_copy or method is None:
        return 0
    shares = expression.encode is not None and expression.encode.tensor_scale_dtype is not None
    settings = expression.bind(keys=(), shape=shape)
    return method.kernel_with(settings).passes(settings) + shares


_BESIDE = 2
"""Segments beside those that are computed: one is read, one is written."""


def lanes_of(threads: int) -> int:
    """The lanes of a worker: while some compute, others read and write."""
    return threads + _BESIDE


SMALLEST_BUDGET = 16 << 20
"""No worker is run with less, in bytes."""
LEAST_BLOCK = 256 << 10
"""Bytes of the smallest buffer for what one of several plans writes."""
SMALLEST_LANE = 1 << 20
"""Bytes: in the shares of a smaller one nothing is read or written at once that is worth the asking."""


def too_little_memory(option: str, budget: int, least: int, what: str) -> Problem:
    return Problem(
        option,
        f"{format_size(budget)} a worker are too little for {what}.",
        f"The smallest budget that works is {least} bytes ({format_size(least)}).",
    )


@dataclass(frozen=True, slots=True)
class Projection:
    """Peak memory of a plan under a budget, beyond an idle worker."""

    budget: int
    lanes: int
    peak: int
    tensor: str
    least_budget: int
    """Smallest budget, in bytes, that this plan can be run with."""
    least_tensor: str
    least_method: str
    shared: int = 0
    """Bytes of the budget that are no lane's: for writing what goes to several places."""
    beside: int = 0
    """Bytes that each lane takes besides its share of the budget, for what it asks of servers."""
    upload: int = 0
    """The part of ``beside`` that each plan takes for its own upload."""
    apart: int = 0
    """Bytes that a worker takes besides its lanes, to ask servers anything."""
    gpu_peak: int = 0
    """Bytes of its memory that a GPU will use at most, where one computes."""
    least_lane: int = 0
    """Bytes of the smallest lane that every op can be made in."""
    outputs: int = 1
    """Plans that are carried out together, each with a buffer of its own for finished bytes in every lane."""

    @property
    def most_outputs(self) -> int:
        """Plans like this one that can be carried out together: beside what one needs, their buffers may have
        half of a lane, and what is left of it when each has its upload."""
        whole = (self.budget - self.shared) // self.lanes + self.upload
        by_half = whole // (2 * LEAST_BLOCK + self.upload)
        return max(1, min(by_half, (whole - self._least_share) // (LEAST_BLOCK + self.upload)))

    @property
    def _least_share(self) -> int:
        return max(SMALLEST_LANE, self.least_lane)

    def together(self, outputs: int) -> Projection:
        """The projection of so many plans that need no more than this one; they take what they are given."""
        if outputs == 1:
            return self
        uploads = (outputs - 1) * self.upload
        budget, more = self.budget - self.lanes * uploads, max(0, self.peak - self.budget)
        return replace(self, outputs=outputs, budget=budget, peak=budget + more, beside=self.beside + uploads)

    @property
    def whole_peak(self) -> int:
        """Bytes that a worker will use at most, with what goes to servers and comes from them."""
        return self.peak + self.lanes * self.beside + self.apart

    def shortage(self, option: str = "--memory", *, given: int | None = None) -> Problem | None:
        """What there is to say if the budget is too small for the plan; ``given`` are the bytes that a worker
        was given for all that it does, None: the budget, and what comes beside it."""
        if self.budget >= self.least_budget:
            return None
        what = f"{self.least_tensor} with {self.least_method}"
        if self.least_budget <= SMALLEST_BUDGET:
            what = "any merge that speaks to servers" if self.beside else "any merge"
        whole = self.budget + self.lanes * self.beside + self.apart if given is None else given
        least = self.least_budget + self.beside + self.apart
        return too_little_memory(option, whole, least, what)

    @property
    def lane(self) -> Lane:
        alone = Lane((self.budget - self.shared) // self.lanes)
        if self.outputs == 1:
            return alone
        spare = min(alone.budget // 2, alone.budget - self._least_share)
        block = min(alone.write_bytes, _whole_pages(spare // self.outputs))
        return Lane(alone.budget, self.outputs, max(LEAST_BLOCK, block))


def project(plan: Plan, budget: int, *, lanes: int = 1) -> Projection:
    """Peak memory of a plan under a budget, and the smallest budget it can be run with; with fewer lanes
    where the budget does not hold so many, or the plan has not as many segments."""
    names = plan["tensors"].column("name")
    kinds = op_kinds(plan).kinds
    least, least_tensor, least_method = max(
        ((each.need.least_bytes, each.tensor, each.expression.method) for each in kinds),
        default=(0, 0, ""),
        key=lambda each: each[0],
    )
    shared = BOUNCE_BYTES if (ints(plan["ops"], "copy_of") >= 0).any() else 0
    most = (budget - shared) // max(SMALLEST_LANE, least)
    lanes = max(1, min(lanes, most, plan["segments"].num_rows))
    lane = Lane((budget - shared) // lanes)
    peak, peak_tensor = max(
        ((each.tiling(lane).peak, each.tensor) for each in kinds), default=(0, 0), key=lambda each: each[0]
    )
    gpu_peak = max(
        (lane.gpu_peak(each.need, each.num_elements, passes=each.passes) for each in kinds), default=0
    )
    named = len(names) > 0
    return Projection(
        budget,
        lanes,
        peak * lanes + shared,
        names[peak_tensor].as_py() if named else "",
        max(least + shared, SMALLEST_BUDGET),
        names[least_tensor].as_py() if named else "",
        least_method,
        shared,
        gpu_peak=gpu_peak * lanes,
        least_lane=least,
    )


class OpKind(NamedTuple):
    """What ops have in common that need the same memory."""

    tensor: int
    """The tensor of the first of them."""
    num_elements: int
    need: Need
    expression: Expression
    passes: int
    """Passes over all inputs before the last one."""

    def tiling(self, lane: Lane) -> Tiling:
        return tiling(self.need, self.num_elements, lane, passes=self.passes)


@dataclass(frozen=True, slots=True, eq=False)
class OpKinds:
    kinds: tuple[OpKind, ...]
    numbers: Ints
    """The kind of each op ``[ops]``; -1 for scales that are made with their codes."""

    def read_again(self, lane: Lane) -> Ints:
        """How often a lane reads each op again, since passes need it whole and it does not fit ``[ops]``."""
        again = [0 if each.tiling(lane).is_whole(each.num_elements) else each.passes for each in self.kinds]
        return np.array([*again, 0], dtype=np.int64)[self.numbers]


def op_kinds(plan: Plan) -> OpKinds:
    """The kinds of a plan's ops, in the order of the first op of each; looks at whole columns."""
    ops, expressions = plan["ops"], plan.expressions
    input_numbers, input_needs = _input_needs(plan)
    part_numbers, part_sizes = _part_sizes(plan["parts"], "shape")
    tensor, which, num_elements, num_parts, is_flat, first_part, first_input, num_inputs = (
        ints(ops, name)
        for name in (
            *("tensor", "expression", "num_elements", "num_parts", "is_flat"),
            *("first_part", "first_input", "num_inputs"),
        )
    )
    # Of a row-major op it does not matter how many elements lie in each row of which part.
    loose_parts = num_parts * (1 - is_flat)
    sizes = (num_elements, num_parts, *_shapes(plan), is_flat)
    inputs = numbered_runs(first_input, num_inputs, input_numbers)
    parts = numbered_runs(first_part, loose_parts, part_numbers)
    is_made = np.array([not each.is_scales for each in expressions], dtype=np.bool_)[which]
    own, firsts = numbered(*(column[is_made] for column in (which, *sizes, inputs, parts)))
    numbers = np.full(len(which), -1, dtype=np.int64)
    numbers[is_made] = own
    kinds = []
    for op in np.flatnonzero(is_made)[firsts].tolist():
        count, several, width, rank, flat = (int(column[op]) for column in sizes)
        placed = part_numbers[first_part[op] :][: loose_parts[op]].tolist()
        size = OpSize(count, several, width, rank, bool(flat), tuple(part_sizes[each] for each in placed))
        read = input_numbers[first_input[op] :][: num_inputs[op]].tolist()
        expression = expressions[which[op]]
        need = op_need(expression, [input_needs[each] for each in read], size)
        passes = expression_passes(expression, size.shape)
        kinds.append(OpKind(int(tensor[op]), count, need, expression, passes))
    return OpKinds(tuple(kinds), numbers)


def _input_needs(plan: Plan) -> tuple[Ints, list[InputNeed]]:
    """The need of each input as a number ``[inputs]``, and the distinct needs."""
    inputs, known = plan["inputs"], dict[GatherNeed, int]()
    of_gathers = [known.setdefault(each, len(known)) for each in gather_needs(plan)]
    of_scales, scales = _sized_scales(plan)
    of_views, views = _part_sizes(inputs, "view_shape")
    dtypes, words = codes(inputs, "dtype")
    columns = (
        *(dtypes, ints(inputs, "nbytes")),
        np.array([*of_gathers, -1], dtype=np.int64)[ints(inputs, "gather")],
        np.append(of_scales, -1)[ints(inputs, "scales")],
        *(of_views, repeated_inputs(plan).astype(np.int64)),
    )
    numbers, firsts = numbered(*columns)
    rows, gathers = zip(*(column[firsts].tolist() for column in columns), strict=True), list(known)
    needs = [
        InputNeed(
            DType(words[dtype]),
            nbytes,
            gathers[gather] if gather >= 0 else None,
            scales[own] if own >= 0 else None,
            views[view].view,
            bool(is_repeated),
        )
        for dtype, nbytes, gather, own, view, is_repeated in rows
    ]
    return numbers, needs


def _sized_scales(plan: Plan) -> tuple[Ints, list[Scales]]:
    """What memory hangs on of each row of scales as a number ``[scales]``, and the distinct scales."""
    table, encodings = plan["scales"], plan.encodings
    numbers, firsts = numbered(*(ints(table, name) for name in ("encoding", "columns", "nbytes")))
    rows = table.take(firsts).to_pylist()
    return numbers, [_sized(read_scales(tuple(row.values()), encodings)) for row in rows]


def _sized(scales: Scales) -> Scales:
    """Scales by what memory hangs on, so that those of equal tensors are equal."""
    return scales._replace(key="", offset=0, tensor_key="", tensor_offset=0, zeros_key="", zeros_offset=0)


def _part_sizes(table: pa.Table, shape: str) -> tuple[Ints, list[PartSize]]:
    """The shape and view of each row as a number ``[rows]``, and the distinct ones."""
    runs = [lists(table, name) for name in (shape, "view_strides")]
    numbers, firsts = numbered(
        ints(table, "view_offset"),
        *(numbered_runs(starts(lengths), lengths, values) for lengths, values in runs),
    )
    chosen = table.select(["view_offset", shape, "view_strides"]).take(firsts)
    rows = zip(*(column.to_pylist() for column in chosen.columns), strict=True)
    return numbers, [PartSize(tuple(each[1]), read_view(*each)) for each in rows]


def _shapes(plan: Plan) -> tuple[Ints, Ints]:
    """Of each op ``[ops]``: elements of a logical row, summed over its parts, and the dimensions of the
    parts."""
    lengths, sizes = lists(plan["parts"], "shape")
    columns = np.maximum(1, last_values(lengths, sizes, default=1))
    first = ints(plan["ops"], "first_part")
    return sums(ints(plan["ops"], "num_parts"), columns), lengths[first]
