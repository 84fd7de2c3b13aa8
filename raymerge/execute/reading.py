"""Cuts a segment's ops into tiles, and reads these from sources in loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.merge_plan import memory
from raymerge.merge_plan.expressions import GatherInput, Read, Scales
from raymerge.merge_plan.jobs import GatheredInput, OpJob, Taken
from raymerge.methods import ROW_GROUP, sample_runs
from raymerge.storage.local.buffers import buffer_nbytes
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.store import Extent, Range, ReadStore, coalesce


@dataclass(frozen=True, slots=True, eq=False)
class RawRows:
    """The bytes of what a tile takes of a gathered input."""

    source: GatheredInput
    num_rows: int
    """Rows of the window that the tile lies in."""
    first_row: int
    begin: int
    """The tile's first element within the window."""
    count: int
    taken: tuple[Taken, ...]
    stored: tuple[torch.Tensor, ...]
    """Its bytes for each input: uint8, on the host; the whole region of an input that lies in a fused
    tensor."""
    factors: tuple[tuple[torch.Tensor, ...], ...]
    """Bytes of the factors of each gather input's product, the same for every tile of an op."""


@dataclass(frozen=True, slots=True, eq=False)
class RawCodes:
    """The bytes of what a tile takes of an input that is stored as codes with scales."""

    read: Read
    layout: Scales
    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    """The one scale of their matrix, uint8; empty where there is none."""
    zero_points: torch.Tensor
    """uint8; empty where there are none."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scales, self.tensor_scale, self.zero_points

    @property
    def all_scales(self) -> Iterator[tuple[DType, torch.Tensor]]:
        encoding = self.layout.encoding
        stored = (encoding.scale_dtype, self.scales), (encoding.tensor_scale_dtype, self.tensor_scale)
        return ((dtype, data) for dtype, data in stored if dtype is not None)

    @property
    def count(self) -> int:
        return self.codes.numel() * 8 // self.read.dtype.bits


RawInput: TypeAlias = torch.Tensor | RawCodes | RawRows
"""What a tile takes of an input: uint8 bytes on the host."""

Raw: TypeAlias = Sequence[RawInput]
"""One for each input of a part, or of an op."""


@dataclass(frozen=True, slots=True)
class TileJob:
    """A run of elements of one op that is read and computed at once."""

    op: OpJob
    start: int
    """First element within the op; of a padding tile within the logical tensor."""
    count: int
    piece: int
    """Most elements of a piece; 0: the tile is computed at once."""
    is_padding: bool = False
    """Whether it is read for the mean of the rows of padded inputs only, before all others."""
    variants: tuple[tuple[TileJob, tuple[int, ...]], ...] = ()
    """The tiles of the variants of a joint op, and which of its inputs they are made of."""

    def variant(self, number: int, raw: Raw) -> tuple[TileJob, Raw]:
        """What is made of its bytes for one variant; the tile itself of an op without any."""
        if not self.variants:
            return self, raw
        tile, inputs = self.variants[number]
        return tile, [raw[each] for each in inputs]

    @property
    def first_element(self) -> int:
        return self.start if self.is_padding else self.op.first_element + self.start

    def span(self, source: Read) -> tuple[int, int]:
        """First byte and number of bytes that the tile takes of an input."""
        if self.count == self.op.num_elements:
            return source.offset, source.nbytes
        return source.offset + source.dtype.nbytes(self.start), source.dtype.nbytes(self.count)

    def scales_span(self, scales: Scales) -> tuple[int, int]:
        if self.count == self.op.num_elements:
            return scales.offset, scales.nbytes
        return scales.of(self.start, self.count)

    def zeros_span(self, scales: Scales) -> tuple[int, int]:
        if self.count == self.op.num_elements:
            return scales.zeros_offset, scales.zeros_nbytes
        return scales.zeros_of(self.start, self.count)

    def window(self, source: GatheredInput) -> tuple[int, int]:
        """The rows of a gathered input that hold the tile: first and stop."""
        limit = source.real_rows if self.is_padding else source.num_rows
        if not self.op.is_flat:
            return 0, limit
        first = self.first_element // source.num_columns
        stop = -(-(self.first_element + self.count) // source.num_columns)
        return min(first, limit), min(stop, limit)

    def place(self, source: GatheredInput) -> tuple[int, int]:
        if not self.op.is_flat:
            return 0, source.num_rows * source.num_columns
        return self.first_element - self.window(source)[0] * source.num_columns, self.count


@dataclass(frozen=True, slots=True)
class Load:
    """Tiles that are read together: several short ops whole, or one tile of a longer op."""

    tiles: tuple[TileJob, ...]
    nbytes: int
    work_bytes: int
    """Most bytes of the host's memory that computing one of them takes."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Ops of a segment that are made one after the other: any number in one load, or one in several."""

    loads: tuple[Load, ...]
    """What they are read in; of an op in several loads every pass takes them all, in order."""
    padding: tuple[Load, ...]
    """What is read for the mean of padded rows beforehand."""
    joined: tuple[ReadPlan, ...] = ()
    """Ops that are looked at beforehand: the only op here shares the one scale of a matrix with them."""


def read_plans(ops: Sequence[OpJob], lane: memory.Lane, device: torch.device) -> Iterator[ReadPlan]:
    """Cut a segment's ops for a lane: short ones together, long ones into tiles."""
    cut = _cut(ops, lane, device)
    return cut if device.type == "cpu" else map(_without_work, cut)


def _cut(ops: Sequence[OpJob], lane: memory.Lane, device: torch.device) -> Iterator[ReadPlan]:
    batch: list[TileJob] = []
    nbytes = work = 0
    for op in ops:
        passes = max(memory.expression_passes(each.expression, each.parts[0].shape) for each in op.each)
        cut = memory.tiling(op.need, op.num_elements, lane, passes=passes)
        if op.variants and cut.peak > lane.budget:
            # Too much together: each is made by itself, of a read of its own.
            yield from _cut([replace(each, leaves_inputs=False) for each in op.each], lane, device)
            continue
        need = op.need if device.type == "cpu" else op.need.on_gpu
        mine = need.load_bytes(op.num_elements)
        if batch and nbytes + mine > lane.load_bytes:
            yield ReadPlan((Load(tuple(batch), nbytes, work),), ())
            batch, nbytes, work = [], 0, 0
        # What is made in place of its input must be nobody else's, and equal bytes of a load are read once.
        is_apart = _padded(op) or need.in_place or bool(op.joined_with)
        if not cut.is_whole(op.num_elements) or is_apart:
            if batch:
                yield ReadPlan((Load(tuple(batch), nbytes, work),), ())
                batch, nbytes, work = [], 0, 0
            joined = tuple(each for other in op.joined_with for each in _cut([other], lane, device))
            yield replace(_long(op, need, cut.elements), joined=joined)
            continue
        batch.append(_tile(op, need, 0, op.num_elements))
        nbytes += mine
        work = max(work, need.work_bytes(need.piece_of(op.num_elements)))
    if batch:
        yield ReadPlan((Load(tuple(batch), nbytes, work),), ())


def _without_work(read_plan: ReadPlan) -> ReadPlan:
    """A stretch that is computed on a GPU: that takes none of the host's memory."""
    loads, padding = (
        tuple(replace(each, work_bytes=0) for each in loads) for loads in (read_plan.loads, read_plan.padding)
    )
    return ReadPlan(loads, padding, tuple(map(_without_work, read_plan.joined)))


def _long(op: OpJob, need: memory.Need, elements: int) -> ReadPlan:
    """An op of several tiles, or with a pass of its own."""
    padding: tuple[Load, ...] = ()
    padded = _padded(op)
    if padded:
        # Whole groups of rows, as far as padded inputs have rows of their own.
        group = ROW_GROUP * padded[0].num_columns
        total = max(each.real_rows * each.num_columns for each in padded)
        cut = max(1, elements // group) * group if op.is_flat else total
        padding = _loads(op, need, (total, cut), is_padding=True)
    loads = _loads(op, need, (op.num_elements, max(1, elements)), is_padding=False)
    return ReadPlan(loads, padding)


def _loads(op: OpJob, need: memory.Need, elements: tuple[int, int], *, is_padding: bool) -> tuple[Load, ...]:
    total, size = elements
    tiles = [
        _tile(op, need, start, min(size, total - start), is_padding=is_padding)
        for start in range(0, max(1, total), size)
    ]
    return tuple(
        Load((tile,), need.load_bytes(tile.count), need.work_bytes(need.piece_of(tile.count)))
        for tile in tiles
    )


def _tile(op: OpJob, need: memory.Need, start: int, count: int, *, is_padding: bool = False) -> TileJob:
    on_gpu = need is not op.need
    variants = tuple(
        (_tile(each.op, each.op.need.on_gpu if on_gpu else each.op.need, start, count), each.inputs)
        for each in op.variants
    )
    return TileJob(op, start, count, need.piece, is_padding, variants)


def _padded(op: OpJob) -> list[GatheredInput]:
    return [each for each in op.inputs if isinstance(each, GatheredInput) and each.is_padded]


# Reading -------------------------------------------------------------------------------------------

_NOTHING = torch.empty(0, dtype=torch.uint8)
_ELEMENT = 64
"""Bytes that begin at a multiple of this are aligned for elements of any dtype."""
_PARTS = _ITSELF, _SCALES, _TENSOR_SCALE, _ZERO_POINTS = tuple(range(4))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Bytes of a file that a tile takes of one of its inputs."""

    tile: int
    number: int
    what: int
    """Whether they are the input itself, the scales of its codes, the one of their matrix, or zero points."""
    source: int
    key: str
    range: Range

    @property
    def file(self) -> tuple[int, str]:
        return self.source, self.key


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    extent: Extent
    members: Sequence[_Wanted]
    region: torch.Tensor
    """uint8, page-aligned: where they come to, with room around them."""


class _Rest:
    """What a load leaves of its buffer."""

    def __init__(self, buffer: torch.Tensor, maps: PageMaps | None) -> None:
        self._buffer = buffer
        self._maps = maps

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]``, aligned for every dtype; where the rest is too short, memory of its own.

        That is where the rows at the ends of an op's last tile are longer than the tile."""
        if nbytes > self._buffer.numel():
            return torch.empty(nbytes, dtype=torch.uint8)
        if self._maps is not None and nbytes:
            # Files that the load before was mapped from are not to be read for what is written here.
            self._maps.release(self._buffer.numpy().data)
            self._maps = None
        taken, self._buffer = self._buffer[:nbytes], self._buffer[-(-nbytes // _ELEMENT) * _ELEMENT :]
        return taken


class LoadReader:
    def __init__(self, sources: Sequence[ReadStore], maps: PageMaps | None = None) -> None:
        """``maps``: for cached files over buffers that it watches; None: everything is copied."""
        self.read_bytes = 0
        """Bytes wanted and read so far; holes between them are not counted."""
        self.final_bytes = 0
        """Of them, those that are not read once more."""
        self.tensor = ""
        """Name of the one that was read for last."""
        self._sources = sources
        self._maps = maps
        self._op: OpJob | None = None
        self._factors: dict[int, tuple[tuple[torch.Tensor, ...], ...]] = {}

    def read(self, load: Load, buffer: torch.Tensor, *, again: bool = False) -> tuple[Raw, ...]:
        """The bytes of every input of every tile; those that lie side by side in a file by one request.

        They lie in the buffer (uint8, page-aligned, of at least ``load.nbytes``), but for factors. ``again``:
        the same bytes will be read once more."""
        raw_inputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.tensor, before = load.tiles[0].op.tensor, self.read_bytes
        needed = sorted(_wanted(load), key=lambda each: each.file)
        requests, place = _requests(needed, buffer)
        for request, begin in zip(requests, self._fetched(load, requests, again=again), strict=True):
            for each in request.members:
                first = begin + each.range.offset - request.extent.offset
                own = raw_inputs.setdefault((each.tile, each.number), [_NOTHING] * len(_PARTS))
                own[each.what] = request.region[first : first + each.range.nbytes]
        repeated = [tile.op.repeated for tile in load.tiles]
        self.read_bytes += sum(each.range.nbytes for each in needed if not repeated[each.tile][each.number])
        rest, raws = _Rest(buffer[place:], self._maps), []
        for position, tile in enumerate(load.tiles):
            self._take_up_factors(tile)
            inputs: list[RawInput] = []
            for number, source in enumerate(tile.op.inputs):
                if isinstance(source, GatheredInput):
                    inputs.append(self._rows(tile, number, source, rest))
                    continue
                data, *scales = raw_inputs.get((position, number), [_NOTHING] * len(_PARTS))
                if source.scales is not None and any(map(len, scales)):
                    inputs.append(RawCodes(source, source.scales, data, *scales))
                else:
                    inputs.append(data)
            raws.append(inputs)
        self.final_bytes += 0 if again else self.read_bytes - before
        return tuple(raws)

    def _fetched(self, load: Load, requests: Sequence[_Request], *, again: bool) -> list[int]:
        """Carry out requests; where in its region the first byte of each is.

        Those to servers are under way together, as each takes long to begin."""

        def fetch(request: _Request) -> int:
            source, key = request.members[0].file
            store, extent, buffer = self._sources[source], request.extent, request.region.numpy().data
            if self._maps is not None:
                begin = (
                    None
                    if is_written
                    else store.map_extent(key, extent.offset, extent.nbytes, buffer, self._maps)
                )
                if begin is not None:
                    return begin
                self._maps.release(buffer)
            like = _target(load, request.members)
            return store.read_extent(key, extent.offset, extent.nbytes, buffer, again=again, like=like)

        # Copies are written from where they are read to, and lie there as in the file to be written.
        is_written = any(tile.op.writes_inputs for tile in load.tiles)
        if len(requests) < 2 or not any(self._sources[each.members[0].source].is_far for each in requests):
            return [fetch(request) for request in requests]
        # Every piece has ended when the pool has, so that nothing is written to the buffer any more.
        with ThreadPoolExecutor(min(memory.MOST_TOGETHER, len(requests))) as pool:
            return list(pool.map(fetch, requests))

    def store(self, read: Read) -> ReadStore:
        return self._sources[read.source]

    def sample(self, tile: TileJob) -> list[torch.Tensor]:
        """The bytes of an op's sample, for each input; all of them are read as they are stored."""
        runs = list(sample_runs(tile.op.num_elements))

        def sampled(read: Read) -> torch.Tensor:
            size = read.dtype.nbytes
            return torch.cat([self._bytes(read, read.offset + size(first), size(n)) for first, n in runs])

        return [sampled(each) for each in tile.op.inputs if isinstance(each, Read)]

    def _take_up_factors(self, tile: TileJob) -> None:
        """Read what the products of an op's inputs are made of, once for all of its tiles."""
        if tile.op is self._op:
            return
        self._op = tile.op
        self._factors = {
            number: tuple(
                tuple(self._bytes(own, own.offset, own.nbytes) for own in gather_input.factors)
                for gather_input in each.inputs
            )
            for number, each in enumerate(tile.op.inputs)
            if isinstance(each, GatheredInput)
        }

    def _rows(self, tile: TileJob, number: int, source: GatheredInput, rest: _Rest) -> RawRows:
        is_wanted = source.is_padded or not tile.is_padding
        first, stop = tile.window(source) if is_wanted else (0, 0)
        begin, count = tile.place(source)
        taken = source.taken(first, stop)
        stored = tuple(
            self._taken(gather_input, each, source.num_columns, rest)
            for gather_input, each in zip(source.inputs, taken, strict=True)
        )
        return RawRows(source, stop - first, first, begin, count, taken, stored, self._factors[number])

    def _taken(self, gather_input: GatherInput, taken: Taken, num_columns: int, rest: _Rest) -> torch.Tensor:
        """The stored rows that a window takes of an input, close together; all bytes of a viewed one."""
        read = gather_input.read
        if read.view is not None:
            return self._fill(read, read.offset, rest.take(read.nbytes if len(taken.moves) else 0))
        width = read.dtype.nbytes(num_columns)
        ranges = [Range(read.offset + a * width, (b - a) * width) for a, b in taken.ranges.tolist()]
        block = rest.take(sum(each.nbytes for each in ranges))
        filled = 0
        for extent in coalesce(ranges, gap=memory.HOLE_MOST, limit=memory.REQUEST_MOST):
            members = [ranges[member] for member in extent.members]
            nbytes = sum(each.nbytes for each in members)
            target = block[filled : filled + nbytes]
            if nbytes == extent.nbytes:
                self._fill(read, extent.offset, target)
            else:
                whole = self._bytes(read, extent.offset, extent.nbytes)
                # One by one: views of all of them together would be memory that no plan counts.
                done = 0
                for each in members:
                    begin = each.offset - extent.offset
                    target[done : done + each.nbytes] = whole[begin : begin + each.nbytes]
                    done += each.nbytes
            filled += nbytes
        return block

    def _bytes(self, read: Read, offset: int, nbytes: int) -> torch.Tensor:
        return self._fill(read, offset, torch.empty(nbytes, dtype=torch.uint8))

    def _fill(self, read: Read, offset: int, target: torch.Tensor) -> torch.Tensor:
        self._sources[read.source].read_into(read.key, offset, target.numpy().data)
        self.read_bytes += target.numel()
        return target


def _requests(needed: Sequence[_Wanted], buffer: torch.Tensor) -> tuple[list[_Request], int]:
    """What is read of each file, with regions of the buffer side by side; and the first byte behind them."""
    requests: list[_Request] = []
    place = 0
    for _, group in groupby(needed, key=lambda each: each.file):
        mine = list(group)
        for extent in coalesce([each.range for each in mine], gap=memory.READ_MARGIN, limit=memory.LOAD_MOST):
            nbytes = buffer_nbytes(extent.nbytes)
            members = [mine[member] for member in extent.members]
            requests.append(_Request(extent, members, buffer[place : place + nbytes]))
            place += nbytes
    return requests, place


def _target(load: Load, members: Sequence[_Wanted]) -> int | None:
    """Where the first byte of an extent will be written, if all of it is copied as it is."""
    tiles = [load.tiles[each.tile] for each in members]
    if not all(each.expression.is_copy for tile in tiles for each in tile.op.each):
        return None
    op = tiles[0].op
    return op.places[0][1] + op.expression.cast.nbytes(tiles[0].start)


def _wanted(load: Load) -> Iterator[_Wanted]:
    """The stored bytes that a load's tiles take; a padding tile takes none."""
    for position, tile in enumerate(load.tiles):
        for number, each in enumerate(tile.op.inputs):
            if not isinstance(each, Read) or tile.is_padding:
                continue
            spans = [(_ITSELF, each.key, tile.span(each))]
            if (scales := each.scales) is not None:
                spans.append((_SCALES, scales.key, tile.scales_span(scales)))
                whole = scales.tensor_offset, scales.tensor_nbytes
                spans.append((_TENSOR_SCALE, scales.tensor_key, whole))
                spans.append((_ZERO_POINTS, scales.zeros_key, tile.zeros_span(scales)))
            for what, key, (offset, nbytes) in spans:
                if nbytes:
                    yield _Wanted(position, number, what, each.source, key, Range(offset, nbytes))
