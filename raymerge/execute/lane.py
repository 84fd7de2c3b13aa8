"""One segment's pipeline: a thread that reads a load, computes it and writes what is finished, over and over.

While one lane of a worker reads or writes, others compute: that is why a worker has more lanes than threads
to compute with. Within a lane nothing is done side by side. Handing bytes from thread to thread takes longer
than one might think, as each of them waits for the interpreter's lock; and what is read ahead takes memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol

import torch

from raymerge.dtypes import DType
from raymerge.errors import IncompleteError
from raymerge.execute.compute import PartComputation, Scratch
from raymerge.execute.decoding import PlacedResults, rows_of_codes, scatter
from raymerge.execute.encoding import Observed, TensorScale, coded_sum, encoded, observe, shared_scale
from raymerge.execute.output import ComputePermit, Fill, Output
from raymerge.execute.reading import Load, LoadReader, Raw, RawCodes, RawInput, RawRows, ReadPlan, TileJob
from raymerge.execute.transfers import Arrival, HostTransfers
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import Input, JobPart, RowJob
from raymerge.methods import Stored, Tile


def pieces(tile: TileJob, raw: Raw) -> Iterator[tuple[TileJob, Raw]]:
    """A tile of a row with codes as tiles that are computed at once; any other as it is."""
    if not (tile.piece and tile.row.has_codes):
        yield tile, raw
        return
    for start in range(0, tile.count, tile.piece):
        count = min(tile.piece, tile.count - start)
        inputs = zip(raw, tile.row.parts[0].inputs, strict=True)
        cut = tuple(_part(each, source, start, count) for each, source in inputs)
        yield replace(tile, start=tile.start + start, count=count, piece=0), cut


def _part(raw: RawInput, source: Input, start: int, count: int) -> RawInput:
    if not isinstance(source, Read) or isinstance(raw, RawRows):
        raise TypeError("rows with codes that are assembled are made at once")
    begin, nbytes = source.dtype.nbytes(start), source.dtype.nbytes(count)
    if isinstance(raw, torch.Tensor):
        return raw[begin : begin + nbytes]
    first, of_scales = raw.layout.of(start, count)
    skipped = first - raw.layout.offset
    scales = raw.scales[skipped : skipped + of_scales]
    return replace(raw, codes=raw.codes[begin : begin + nbytes], scales=scales)


NOTHING = torch.empty(0, dtype=torch.uint8)


class Tiles(Protocol):
    """A row's tiles with their bytes."""

    def __call__(self, *, again: bool = False) -> Iterable[tuple[TileJob, Raw]]:
        """Gives all tiles in order; ``again``: another pass will follow."""


class LoadBuffer:
    """One lane's buffer for loads, one load after the other.

    It is kept, as memory that was used before is many times faster than fresh memory. One that is larger than
    usual makes way as soon as its bytes are wanted for something else: it and the computing may have
    ``limit`` bytes together."""

    def __init__(self, transfers: HostTransfers, *, usual_bytes: int, limit: int) -> None:
        self._transfers = transfers
        self._usual_bytes = usual_bytes
        self._limit = limit
        self._held = NOTHING
        self._leaving: Arrival | None = None

    def room(self, load: Load) -> torch.Tensor:
        """uint8 of at least ``load.nbytes``, page-aligned; what was in it before is gone."""
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None
        held = self._held.numel()
        if held < load.nbytes or (held > self._usual_bytes and held + load.work_bytes > self._limit):
            # The old one goes first, as both at once may be too much.
            self._held = NOTHING
            self._held = self._transfers.buffer(max(self._usual_bytes, load.nbytes))
        return self._held

    def leave(self, arrival: Arrival | None) -> None:
        """Say when what was read has left the buffer; None: when the next load is asked for."""
        self._leaving = arrival


@dataclass(frozen=True, slots=True)
class LaneState:
    seed: int
    aborted: threading.Event
    watch: Callable[[], None]
    """Looks after the process's memory; called after every load."""


@dataclass(frozen=True, slots=True, eq=False)
class Equipment:
    """A lane's memory and ways; they go from segment to segment, as memory that was used before is much
    faster."""

    transfers: HostTransfers
    buffer: LoadBuffer
    block: torch.Tensor
    """uint8, page-aligned: for what will be written."""
    scratch: Scratch


class Lane:
    def __init__(
        self,
        lane_state: LaneState,
        turn: ComputePermit,
        reader: LoadReader,
        output: Output,
        equipment: Equipment,
    ) -> None:
        self._lane_state = lane_state
        self._turn = turn
        self._reader = reader
        self._output = output
        self._buffer = equipment.buffer
        self._transfers = equipment.transfers
        self._scratch = equipment.scratch
        self._observed: dict[int, Observed] = {}

    def run(self, read_plans: Sequence[ReadPlan]) -> None:
        """Make all rows and hand over their bytes; returns when they are written. Raises IncompleteError: the
        segment is to be given up."""
        try:
            with self._transfers.computing():
                for read_plan in read_plans:
                    self._read_plan(read_plan)
            self._output.flush()
            self._lane_state.watch()
        finally:
            self._turn.rest()

    def _read_plan(self, read_plan: ReadPlan) -> None:
        for other in read_plan.joined:
            self._observe(other)
        loads = read_plan.loads
        if len(loads) == 1 and not read_plan.padding:
            for tile, raw in zip(loads[0].tiles, self._begin(loads[0]), strict=True):
                self._make(tile, raw, self._computations(tile.row))
            return
        first = loads[0].tiles[0]
        parts = self._computations(first.row)
        self._pad(read_plan, parts)
        if len(loads) == 1:
            (raw,) = self._begin(loads[0])
            self._make(first, raw, parts)
        elif parts:
            self._make_in_tiles(first, parts[0], partial(self._cycle, loads), self._sampler(first, parts[0]))
        else:
            for tile, raw in self._cycle(loads):
                self._copy(tile, raw)

    def _begin(self, load: Load, *, again: bool = False) -> tuple[Raw, ...]:
        """Read a load and wait for leave to compute; the bytes of the load before are gone."""
        self._turn.rest()
        self._lane_state.watch()
        if self._lane_state.aborted.is_set():
            raise IncompleteError("the segment was given up, since the run ends.")
        self._scratch.leave(load.work_bytes)
        read = self._reader.read(load, self._buffer.room(load), again=again)
        raws, arrival = self._transfers.upload(load, read)
        self._buffer.leave(arrival)
        self._transfers.arrive(raws, arrival)
        self._turn.take()
        return raws

    def _computations(self, row: RowJob) -> list[PartComputation]:
        """One for each part of a row; none of a copy or a constant."""
        if row.expression.is_copy or row.expression.is_constant:
            return []
        return [
            PartComputation(
                row.expression,
                part,
                num_elements=row.num_elements if row.is_flat else prod(part.shape),
                seed=self._lane_state.seed,
                # The results of several parts are there at the same time, unless they are made in pieces.
                scratch=self._scratch
                if len(row.parts) == 1 or row.need.piece
                else Scratch(self._scratch.device),
            )
            for part in row.parts
        ]

    def _make(self, tile: TileJob, raw: Raw, parts: list[PartComputation]) -> None:
        row = tile.row
        if not parts and row.expression.is_constant:
            content = torch.frombuffer(bytearray(row.expression.content), dtype=torch.uint8)
            self._output.take_stored(row, 0, content, is_there=False)
            return
        if not parts:
            self._copy(tile, raw)
            return
        if tile.piece and not row.is_flat:
            self._make_in_pieces(tile, raw, parts)
            return
        if not tile.piece:
            self._emit(row, [self._whole(row, raw, parts)], 0, raw)
            return
        (part,) = parts
        self._make_in_tiles(tile, part, _held(tile, raw), lambda: part.sample_within(raw))

    def _make_in_tiles(
        self, first: TileJob, part: PartComputation, tiles: Tiles, sample: Callable[[], Tile]
    ) -> None:
        """A row of one part that is made tile by tile; ``sample`` is of use where no codes are decoded."""
        row, again = first.row, _pieces_again(part, tiles)
        part.gather(lambda: _tiles(part, again()), sample if first.piece and not row.has_codes else None)
        shared = self._tensor_scale(row, part, again)
        for tile, raw in tiles():
            part.load(raw)
            self._finish(tile, raw, part, shared)

    def _make_in_pieces(self, tile: TileJob, raw: Raw, parts: list[PartComputation]) -> None:
        """A row that is read whole, and whose parts lie across each other."""
        row = tile.row
        placed = PlacedResults(row, raw, self._scratch.device)
        for part, own, share in zip(parts, row.parts, _by_part(row, raw), strict=True):
            spans = _spans(prod(own.shape), tile.piece)
            # Without a sample, as its tiles lie.
            part.gather(partial(_elements_of, part, share, spans), None)
            for begin, count in spans:
                result = part.apply(part.elements(share, begin, count))
                if row.expression.encode is None:
                    placed.put(own, begin, result)
                    continue
                made, errors = encoded(row, result, _input_codes(row, own, share, (begin, count)), None)
                self._output.add_errors(row, errors)
                placed.put_codes(own, begin, count, made)
            part.forget()
        self._output.take(row, 0, placed.data.numel(), self._fetcher(placed.data))
        self._emit_scales(row, placed.scales, 0)

    def _observe(self, read_plan: ReadPlan) -> None:
        """Look at a row for the scale that it shares with the one to be made, unless that was done before."""
        loads, tile = read_plan.loads, read_plan.loads[0].tiles[0]
        row = tile.row
        if row.index in self._observed:
            return
        parts = self._computations(row)
        self._pad(read_plan, parts)
        tiles: Tiles = partial(self._cycle, loads)
        if len(loads) == 1:
            (raw,) = self._begin(loads[0])
            if not tile.piece:
                self._see(row, ((self._whole(row, raw, parts), raw),))
                return
            tiles = _held(tile, raw)
        (part,) = parts
        again = _pieces_again(part, tiles)
        part.gather(lambda: _tiles(part, again()), None)
        self._see(row, _results(part, again()))

    def _whole(self, row: RowJob, raw: Raw, parts: Sequence[PartComputation]) -> torch.Tensor:
        shares = zip(parts, _by_part(row, raw), strict=True)
        results = [_result_of_whole(part, share, row) for part, share in shares]
        return results[0] if row.is_flat else scatter(results, row)

    def _tensor_scale(
        self, row: RowJob, part: PartComputation, tiles: Callable[[], Iterator[tuple[TileJob, Raw]]]
    ) -> TensorScale | None:
        """The one scale that the codes of a row share, from a pass over its tiles unless they were looked at
        before; None where they share none."""
        if row.tensor_scale is None:
            return None
        if row.index not in self._observed:
            self._see(row, _results(part, tiles()))
        return self._shared(row)

    def _see(self, row: RowJob, results: Iterable[tuple[torch.Tensor, Raw]]) -> None:
        self._observed[row.index] = observe(row, results)

    def _shared(self, row: RowJob) -> TensorScale:
        """The one scale of a row that was looked at; what no other row shares is forgotten."""
        own = self._observed[row.index] if row.joined_with else self._observed.pop(row.index)
        return shared_scale(row, (own, *(self._observed[each.index] for each in row.joined_with)))

    def _sampler(self, tile: TileJob, part: PartComputation) -> Callable[[], Tile]:
        def sample() -> Tile:
            self._turn.rest()
            inputs = self._reader.sample(tile)
            self._turn.take()
            return part.sample(inputs)

        return sample

    def _pad(self, read_plan: ReadPlan, parts: Sequence[PartComputation]) -> None:
        for load in read_plan.padding:
            (raw,) = self._begin(load, again=True)
            for part, share in zip(parts, _by_part(load.tiles[0].row, raw), strict=True):
                part.load(share)
                part.pad(share)
        for part in parts if read_plan.padding else ():
            part.end_padding()

    def _cycle(self, loads: Sequence[Load], *, again: bool = False) -> Iterator[tuple[TileJob, Raw]]:
        for load in loads:
            (raw,) = self._begin(load, again=again)
            yield load.tiles[0], raw

    def _copy(self, tile: TileJob, raw: Raw) -> None:
        (data,) = raw
        if not isinstance(data, torch.Tensor):
            raise TypeError("a copy of bytes is made of rows")

        row, (read,) = tile.row, tile.row.inputs
        skipped = row.expression.cast.nbytes(tile.start)
        is_there = isinstance(read, Read) and self._output.copy_from(
            self._reader.store(read), read, row, tile.span(read)
        )
        self._output.take_stored(row, skipped, data, is_there=is_there)

    def _finish(self, tile: TileJob, raw: Raw, part: PartComputation, shared: TensorScale | None) -> None:
        if not tile.row.has_codes:
            self._apply(tile, raw, part)
            return
        coded = coded_sum(tile, raw, part)
        if coded is None or coded.unit_bytes > self._output.most_together:
            for piece, bytes_of_it in pieces(tile, raw):
                self._apply(piece, bytes_of_it, part, shared)
            return
        self._output.take(tile.row, tile.start, tile.count, coded.fill, unit=coded.unit_bytes)
        self._output.add_errors(tile.row, coded.errors)
        self._emit_scales(tile.row, coded.stored_scales(), tile.start)

    def _apply(
        self, tile: TileJob, raw: Raw, part: PartComputation, shared: TensorScale | None = None
    ) -> None:
        """Make one tile of a row that is made of one part and in order."""
        row, skipped = tile.row, tile.start * tile.row.expression.cast.bits // 8
        if not tile.piece:
            self._emit(row, [part.apply(part.whole(raw, tile.first_element))], skipped, raw, shared)
            return
        is_plain, unit = row.expression.cast is DType.BF16 and row.places[0][1] % 2 == 0, part.unit_bytes
        is_plain = is_plain and unit <= self._output.most_together
        stored = part.stored(raw, tile.first_element) if is_plain else None
        if stored is None:
            pieces = part.pieces(raw, tile.first_element, tile.piece)
            self._emit(row, map(part.apply, pieces), skipped, raw)
            return

        def fill(done: int, target: torch.Tensor) -> None:
            part.apply_stored(stored.part(done // 2, target.numel() // 2), target)

        self._output.take(row, skipped, 2 * stored.count, fill, unit=unit)

    def _emit(
        self,
        row: RowJob,
        results: Iterable[torch.Tensor],
        skipped: int,
        raw: Raw,
        shared: TensorScale | None = None,
    ) -> None:
        """Round results to the output's dtype, one after the other, and hand them over."""
        cast = row.expression.cast
        for result in results:
            nbytes = cast.nbytes(result.numel())
            if row.expression.encode is None:
                self._output.take(row, skipped, nbytes, self._encoder(result, cast))
            else:
                self._emit_codes(row, result, raw, skipped, shared)
            skipped += nbytes

    def _emit_codes(
        self, row: RowJob, result: torch.Tensor, raw: Raw, skipped: int, shared: TensorScale | None
    ) -> None:
        """Encode whole bands of a row, and hand over codes and scales."""
        if row.tensor_scale is not None:
            if shared is None:
                self._see(row, ((result, raw),))
                shared = self._shared(row)
            if not skipped:
                stored = shared.stored(row)
                self._output.take(row.tensor_scale, 0, stored.numel(), self._fetcher(stored))
        (codes, scales), errors = encoded(row, result, raw, shared)
        self._output.add_errors(row, errors)
        self._output.take(row, skipped, codes.numel(), self._fetcher(codes))
        self._emit_scales(row, scales, skipped * 8 // row.expression.cast.bits)

    def _emit_scales(self, row: RowJob, scales: torch.Tensor, start: int) -> None:
        if row.scales is not None:
            encode, columns = row.encoding, row.parts[0].columns
            before = start // (encode.band * columns) * encode.scales_nbytes(columns)
            self._output.take(row.scales, before, scales.numel(), self._fetcher(scales), aside=True)

    def _fetcher(self, data: torch.Tensor) -> Fill:
        def fill(done: int, target: torch.Tensor) -> Arrival | None:
            return self._transfers.fetch(data[done : done + target.numel()], target)

        return fill

    def _encoder(self, result: torch.Tensor, cast: DType) -> Fill:
        def fill(done: int, target: torch.Tensor) -> Arrival | None:
            first, count = done * 8 // cast.bits, target.numel() * 8 // cast.bits
            return self._transfers.download(result[first : first + count], cast, target)

        return fill


def _held(tile: TileJob, raw: Raw) -> Tiles:
    return lambda *, again=False: ((tile, raw),)  # noqa: ARG005


def _pieces_again(part: PartComputation, tiles: Tiles) -> Callable[[], Iterator[tuple[TileJob, Raw]]]:
    """Passes over what is computed at once, each of which another follows."""

    def again() -> Iterator[tuple[TileJob, Raw]]:
        for tile, raw in tiles(again=True):
            part.load(raw)
            yield from pieces(tile, raw)

    return again


def _tiles(part: PartComputation, tiles: Iterator[tuple[TileJob, Raw]]) -> Iterator[Tile | Stored]:
    for tile, raw in tiles:
        if tile.piece:
            yield from part.tiles(raw, tile.first_element, tile.piece)
        else:
            yield part.whole(raw, tile.first_element)


def _results(
    part: PartComputation, tiles: Iterator[tuple[TileJob, Raw]]
) -> Iterator[tuple[torch.Tensor, Raw]]:
    for tile, raw in tiles:
        yield part.apply(part.whole(raw, tile.first_element)), raw


def _result_of_whole(part: PartComputation, share: Raw, row: RowJob) -> torch.Tensor:
    """The result of a part that is one piece."""
    part.load(share)
    whole = part.whole(share, row.first_element)
    # Without a sample, as for one that is made in several tiles: where sums are split is in their last bits.
    part.gather(lambda: (whole,), None)
    return part.apply(whole)


def _elements_of(part: PartComputation, share: Raw, spans: Sequence[tuple[int, int]]) -> Iterator[Tile]:
    return (part.elements(share, *span) for span in spans)


def _spans(num_elements: int, piece: int) -> list[tuple[int, int]]:
    return [(begin, min(piece, num_elements - begin)) for begin in range(0, max(1, num_elements), piece)]


def _input_codes(row: RowJob, part: JobPart, raw: Raw, span: tuple[int, int]) -> Raw:
    """The codes that some rows of a part have in those of its inputs that lie as the output does; nothing of
    the others, whose scales are those of other rows."""
    place = part.view, row.expression.cast.nbytes(row.num_elements)
    return [
        rows_of_codes(each, *span)
        if isinstance(each, RawCodes) and (each.read.view, each.read.nbytes) == place
        else NOTHING
        for each in raw
    ]


def _by_part(row: RowJob, raw: Raw) -> list[Raw]:
    shares: list[Raw] = []
    first = 0
    for part in row.parts:
        shares.append(raw[first : first + len(part.inputs)])
        first += len(part.inputs)
    return shares
