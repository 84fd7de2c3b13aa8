"""One segment's pipeline: a thread that reads a load, computes it and writes what is finished, over and over.

While one lane of a worker reads or writes, others compute: that is why a worker has more lanes than threads
to compute with. Within a lane nothing is done side by side. Handing bytes from thread to thread takes longer
than one might think, as each of them waits for the interpreter's lock; and what is read ahead takes memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from raymerge.checkpoints.quantisation.encoding import Made
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import IncompleteError
from raymerge.execute.compute import PartComputation, Scratch
from raymerge.execute.decoding import PlacedResults, rows_of_codes, scatter
from raymerge.execute.encoding import Observed, TensorScale, coded_sum, encoded, observe, shared_scale
from raymerge.execute.non_finite import are_negative
from raymerge.execute.output import ComputePermit, Fill, NotFinite, Output
from raymerge.execute.reading import Load, LoadReader, Raw, RawCodes, ReadPlan, TileJob
from raymerge.execute.tiled import TiledOp, Tiles, made_together, observed_alike, pieces, take_statistics
from raymerge.execute.transfers import Arrival, HostTransfers
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import JobPart, OpJob
from raymerge.methods import Tile
from raymerge.storage.local.mapping import PageMaps


def _refuse_negative_scales(load: Load, raws: Sequence[Raw]) -> None:
    """Raises NotFinite: what is not finite shows in the numbers, but a wrong sign does not."""
    for tile, raw in zip(load.tiles, raws, strict=True):
        for number in range(len(tile.op.each)):
            own, share = tile.variant(number, raw)
            codes = (each for each in share if isinstance(each, RawCodes))
            if any(are_negative(dtype, data.numpy()) for each in codes for dtype, data in each.all_scales):
                raise NotFinite(own.op)


NOTHING = torch.empty(0, dtype=torch.uint8)


class LoadBuffer:
    """One lane's buffer for loads, one load after the other.

    It is kept, as memory that was used before is many times faster than fresh memory. One that is larger than
    usual makes way as soon as its bytes are wanted for something else: it and the computing may have
    ``limit`` bytes together."""

    def __init__(
        self, transfers: HostTransfers, *, usual_bytes: int, limit: int, maps: PageMaps | None = None
    ) -> None:
        self._transfers = transfers
        self._usual_bytes = usual_bytes
        self._limit = limit
        self._maps = maps
        self._held = NOTHING
        self._leaving: Arrival | None = None

    def buffer(self, load: Load) -> torch.Tensor:
        """uint8 of at least ``load.nbytes``, page-aligned; what was in it before is gone."""
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None
        held = self._held.numel()
        if held < load.nbytes or (held > self._usual_bytes and held + load.work_bytes > self._limit):
            # The old one goes first, as both at once may be too much.
            self._held = NOTHING
            self._held = self._transfers.buffer(max(self._usual_bytes, load.nbytes))
            if self._maps is not None:
                self._maps.watch(self._held.numpy().data, self._held)
        return self._held

    def leave(self, arrival: Arrival | None) -> None:
        """Say when what was read has left the buffer; None: when the next load is asked for."""
        self._leaving = arrival


@dataclass(frozen=True, slots=True)
class LaneState:
    seeds: Sequence[int]
    """Of each plan that is carried out."""
    aborted: threading.Event
    watch: Callable[[], None]
    """Looks after the process's memory; called after every load."""


@dataclass(frozen=True, slots=True, eq=False)
class Equipment:
    """A lane's memory and ways; they go from segment to segment, as memory that was used before is much
    faster."""

    transfers: HostTransfers
    buffer: LoadBuffer
    blocks: Sequence[torch.Tensor]
    """uint8, page-aligned: for what will be written of each plan."""
    scratch: Scratch


class Lane:
    def __init__(
        self,
        lane_state: LaneState,
        turn: ComputePermit,
        reader: LoadReader,
        outputs: Mapping[int, Output],
        equipment: Equipment,
    ) -> None:
        """``outputs``: where the ops of each plan go that is carried out."""
        self._lane_state = lane_state
        self._turn = turn
        self._reader = reader
        self._outputs = outputs
        self._buffer = equipment.buffer
        self._transfers = equipment.transfers
        self._scratch = equipment.scratch
        self._observed: dict[tuple[int, int], Observed] = {}

    def run(self, read_plans: Sequence[ReadPlan]) -> None:
        """Make all ops and hand over their bytes; returns when they are written. Raises IncompleteError: the
        segment is to be given up."""
        try:
            with self._transfers.computing():
                for read_plan in read_plans:
                    self._read_plan(read_plan)
            for output in self._outputs.values():
                output.flush()
            self._lane_state.watch()
        finally:
            self._turn.rest()

    def _read_plan(self, read_plan: ReadPlan) -> None:
        for other in read_plan.joined:
            self._observe(other)
        loads = read_plan.loads
        if len(loads) == 1 and not read_plan.padding:
            for tile, raw in zip(loads[0].tiles, self._begin(loads[0]), strict=True):
                self._make_each(tile, raw)
            return
        first = loads[0].tiles[0]
        if first.op.variants:
            self._make_in_tiles(first, self._tiled_ops(first), partial(self._cycle, loads), self._sample)
            return
        parts = self._computations(first.op)
        self._pad(read_plan, parts)
        if len(loads) == 1:
            (raw,) = self._begin(loads[0])
            self._make(first, raw, parts)
            return
        tiled = TiledOp(0, first, parts[0] if parts else None)
        self._make_in_tiles(first, [tiled], partial(self._cycle, loads), self._sample)

    def _begin(self, load: Load, *, again: bool = False) -> tuple[Raw, ...]:
        """Read a load and wait for leave to compute; the bytes of the load before are gone."""
        self._turn.rest()
        self._lane_state.watch()
        if self._lane_state.aborted.is_set():
            raise IncompleteError("the segment was given up, since the run ends.")
        self._scratch.leave(load.work_bytes)
        read = self._reader.read(load, self._buffer.buffer(load), again=again)
        _refuse_negative_scales(load, read)
        raws, arrival = self._transfers.upload(load, read)
        self._buffer.leave(arrival)
        self._transfers.arrive(raws, arrival)
        self._turn.take()
        return raws

    def _computations(self, op: OpJob) -> list[PartComputation]:
        """One for each part of an op; none of a copy or a constant."""
        if op.expression.is_copy or op.expression.is_constant:
            return []
        device = self._scratch.device
        # What an op leaves goes back to a GPU's allocator, as the next one may want more than it beside it.
        scratch = self._scratch if device.type == "cpu" else Scratch(device)
        return [
            PartComputation(
                op.expression,
                part,
                num_elements=op.num_elements if op.is_flat else prod(part.shape),
                seed=self._lane_state.seeds[op.output],
                # The results of several parts are there at the same time, unless they are made in pieces.
                scratch=scratch if len(op.parts) == 1 or op.need.piece else Scratch(device),
            )
            for part in op.parts
        ]

    def _tiled_ops(self, tile: TileJob) -> list[TiledOp]:
        """What is made of the tiles of a joint op whose variants are of one part."""
        computations = (self._computations(own.op) for own, _ in tile.variants)
        return [
            TiledOp(number, own, parts[0] if parts else None)
            for number, ((own, _), parts) in enumerate(zip(tile.variants, computations, strict=True))
        ]

    def _make_each(self, tile: TileJob, raw: Raw) -> None:
        """Make an op of a read, or each variant of a joint one."""
        if not tile.variants:
            self._make(tile, raw, self._computations(tile.op))
        elif tile.op.is_flat and tile.piece:
            self._make_in_tiles(
                tile, self._tiled_ops(tile), _held(tile, raw), partial(_sample_within, tile, raw)
            )
        else:
            for number, (own, _) in enumerate(tile.variants):
                self._make(*tile.variant(number, raw), self._computations(own.op))

    def _make(self, tile: TileJob, raw: Raw, parts: list[PartComputation]) -> None:
        op = tile.op
        if not parts and op.expression.is_constant:
            content = torch.frombuffer(bytearray(op.expression.content), dtype=torch.uint8)
            self._outputs[op.output].take_stored(op, 0, content, is_there=False)
            return
        if not parts:
            self._copy(tile, raw)
            return
        if tile.piece and not op.is_flat:
            self._make_in_pieces(tile, raw, parts)
            return
        if not tile.piece:
            self._emit(op, [self._whole(op, raw, parts)], 0, raw)
            return
        tiled, held = TiledOp(0, tile, parts[0]), _held(tile, raw)
        self._make_in_tiles(tile, [tiled], held, partial(_sample_within, tile, raw))

    def _make_in_tiles(
        self, first: TileJob, tiled_ops: Sequence[TiledOp], tiles: Tiles, sample: Callable[[TiledOp], Tile]
    ) -> None:
        """Make ops of one part tile by tile of one read; ``sample`` is of use where no codes are decoded."""
        together = made_together(first, tiled_ops)
        take_statistics(together, tiles, sample)
        for tiled in tiled_ops:
            tiled.shared = self._tensor_scale(tiled, tiles)
        for tile, raw in tiles():
            for group in together:
                own, share = tile.variant(group[0].number, raw)
                self._finish(group, own, share)

    def _make_in_pieces(self, tile: TileJob, raw: Raw, parts: list[PartComputation]) -> None:
        """An op that is read whole, and whose parts lie across each other."""
        op = tile.op
        placed = PlacedResults(op, raw, self._scratch.device)
        for part, own, share in zip(parts, op.parts, _by_part(op, raw), strict=True):
            spans = _spans(prod(own.shape), tile.piece)
            # Without a sample, as its tiles lie.
            part.gather(partial(_elements_of, part, share, spans), None)
            for begin, count in spans:
                result = part.apply(part.elements(share, begin, count))
                if op.expression.encode is None:
                    placed.put(own, begin, result)
                    continue
                rows = encoded(op, result, _input_codes(op, own, share, (begin, count)), None)
                self._outputs[op.output].add_errors(op, rows.errors, rows.exactness)
                placed.put_codes(own, begin, count, rows.coded)
            part.forget()
        self._outputs[op.output].take(op, 0, placed.data.numel(), self._fetcher(placed.data))
        self._emit_scales(op, placed.scales, 0)

    def _observe(self, read_plan: ReadPlan) -> None:
        """Look at an op for the scale that it shares with the one to be made, unless that was done before."""
        loads, tile = read_plan.loads, read_plan.loads[0].tiles[0]
        op = tile.op
        if (op.output, op.index) in self._observed:
            return
        parts = self._computations(op)
        self._pad(read_plan, parts)
        tiles: Tiles = partial(self._cycle, loads)
        if len(loads) == 1:
            (raw,) = self._begin(loads[0])
            if not tile.piece:
                self._see(op, ((self._whole(op, raw, parts), raw),))
                return
            tiles = _held(tile, raw)
        tiled = TiledOp(0, tile, parts[0])
        take_statistics([[tiled]], tiles, None)
        self._see(op, _results(parts[0], tiled.pieces_again(tiles)))

    def _whole(self, op: OpJob, raw: Raw, parts: Sequence[PartComputation]) -> torch.Tensor:
        shares = zip(parts, _by_part(op, raw), strict=True)
        results = [_result_of_whole(part, share, op) for part, share in shares]
        return results[0] if op.is_flat else scatter(results, op)

    def _tensor_scale(self, tiled: TiledOp, tiles: Tiles) -> TensorScale | None:
        """The one scale that the codes of an op share, from a pass over its tiles unless they were looked at
        before; None where they share none."""
        op = tiled.op
        if op.tensor_scale is None or tiled.part is None:
            return None
        if (op.output, op.index) not in self._observed:
            self._see(op, _results(tiled.part, tiled.pieces_again(tiles)))
        return self._shared(op)

    def _see(self, op: OpJob, results: Iterable[tuple[torch.Tensor, Raw]]) -> None:
        self._observed[op.output, op.index] = observe(op, results)

    def _shared(self, op: OpJob) -> TensorScale:
        """The one scale of an op that was looked at; what no other op shares is forgotten."""
        key = op.output, op.index
        own = self._observed[key] if op.joined_with else self._observed.pop(key)
        others = (self._observed[op.output, each.index] for each in op.joined_with)
        return shared_scale(op, (own, *others))

    def _sample(self, tiled: TiledOp) -> Tile:
        self._turn.rest()
        inputs = self._reader.sample(tiled.first)
        self._turn.take()
        assert tiled.part is not None
        return tiled.part.sample(inputs)

    def _pad(self, read_plan: ReadPlan, parts: Sequence[PartComputation]) -> None:
        for load in read_plan.padding:
            (raw,) = self._begin(load, again=True)
            for part, share in zip(parts, _by_part(load.tiles[0].op, raw), strict=True):
                part.load(share)
                part.pad(share)
        for part in parts if read_plan.padding else ():
            part.end_padding()

    def _cycle(self, loads: Sequence[Load], *, again: bool = False) -> Iterator[tuple[TileJob, Raw]]:
        for load in loads:
            (raw,) = self._begin(load, again=again)
            yield load.tiles[0], raw

    def _copy(self, tile: TileJob, raw: Raw) -> None:
        op, (data,), (read,) = tile.op, raw, tile.op.inputs
        assert isinstance(data, torch.Tensor)
        assert isinstance(read, Read)
        skipped, output = op.expression.cast.nbytes(tile.start), self._outputs[op.output]
        is_there = output.copy_from(self._reader.store(read), read, op, tile.span(read))
        output.take_stored(op, skipped, data, is_there=is_there)

    def _finish(self, group: Sequence[TiledOp], tile: TileJob, raw: Raw) -> None:
        """Make one tile of ops that are made of the same inputs."""
        lead = group[0].part
        if lead is None:
            for tiled in group:
                self._copy(replace(tile, op=tiled.op), raw)
            return
        lead.load(raw)
        if not tile.op.has_codes:
            self._apply(group, lead, tile, raw)
            return
        left = [tiled for tiled in group if not self._sum_codes(tiled, tile, raw)]
        for piece, bytes_of_it in pieces(tile, raw) if left else ():
            self._apply(left, lead, piece, bytes_of_it)

    def _sum_codes(self, tiled: TiledOp, tile: TileJob, raw: Raw) -> bool:
        """Make a tile of codes from codes in one call; whether it can be made so."""
        op, part = tiled.op, tiled.part
        assert part is not None
        output = self._outputs[op.output]
        coded = coded_sum(replace(tile, op=op), raw, part)
        if coded is None or coded.unit_bytes > output.most_together:
            return False
        output.take(op, tile.start, tile.count, coded.fill, unit=coded.unit_bytes)
        output.add_errors(op, coded.errors)
        self._emit_scales(op, coded.stored_scales(), tile.start)
        return True

    def _apply(self, group: Sequence[TiledOp], lead: PartComputation, tile: TileJob, raw: Raw) -> None:
        """Make one tile of ops that are made of one part and in order."""
        if not tile.piece:
            whole = lead.whole(raw, tile.first_element)
            for tiled in group:
                self._emit(tiled.op, [tiled.apply(whole)], tiled.skipped(tile.start), raw, tiled.shared)
            return
        left = self._apply_stored(group, lead, tile, raw)
        done = 0
        for piece in lead.pieces(raw, tile.first_element, tile.piece) if left else ():
            for tiled in left:
                self._emit(tiled.op, [tiled.apply(piece)], tiled.skipped(tile.start + done), raw)
            done += piece.sources.shape[1]

    def _apply_stored(
        self, group: Sequence[TiledOp], lead: PartComputation, tile: TileJob, raw: Raw
    ) -> list[TiledOp]:
        """Make a tile of those ops that are made of what is stored as it is; what is left.

        At once for each, unless they share more than the tile: smaller parts in turn would be in the
        processor's cache, but many more calls take longer than that saves."""
        fitting = [each for each in group if each.takes_stored(self._outputs[each.op.output].most_together)]
        stored = lead.stored(raw, tile.first_element) if fitting else None
        if stored is None:
            return list(group)
        for alike in observed_alike(fitting):
            part = alike[0].part
            assert part is not None
            for shared in part.marked(stored) if len(alike) > 1 else (stored,):
                for each in alike:
                    skipped = each.skipped(tile.start + shared.start - stored.start)
                    fill, unit = each.filler(shared), each.unit_bytes
                    self._outputs[each.op.output].take(each.op, skipped, 2 * shared.count, fill, unit=unit)
        return [each for each in group if each not in fitting]

    def _emit(
        self,
        op: OpJob,
        results: Iterable[torch.Tensor],
        skipped: int,
        raw: Raw,
        shared: TensorScale | None = None,
    ) -> None:
        """Round results to the output's dtype, one after the other, and hand them over."""
        cast = op.expression.cast
        for result in results:
            nbytes = cast.nbytes(result.numel())
            if op.expression.encode is None:
                self._outputs[op.output].take(op, skipped, nbytes, self._encoder(result, cast))
            else:
                self._emit_codes(op, result, raw, skipped, shared)
            skipped += nbytes

    def _emit_codes(
        self, op: OpJob, result: torch.Tensor, raw: Raw, skipped: int, shared: TensorScale | None
    ) -> None:
        """Encode whole scale rows of an op, and hand over codes and scales."""
        if op.tensor_scale is not None:
            if shared is None:
                self._see(op, ((result, raw),))
                shared = self._shared(op)
            if not skipped:
                stored = shared.stored(op)
                self._outputs[op.output].take(op.tensor_scale, 0, stored.numel(), self._fetcher(stored))
        rows = encoded(op, result, raw, shared)
        self._outputs[op.output].add_errors(op, rows.errors, rows.exactness)
        codes, scales, zeros, _ = rows.coded
        self._outputs[op.output].take(op, skipped, codes.numel(), self._fetcher(codes))
        self._emit_scales(op, scales, skipped * 8 // op.expression.cast.bits)
        if op.zero_points is not None and zeros is not None:
            self._emit_made(op, "zero_points", zeros, skipped * 8 // op.expression.cast.bits)

    def _emit_scales(self, op: OpJob, scales: torch.Tensor, start: int) -> None:
        if op.scales is not None:
            self._emit_made(op, "scales", scales, start)

    def _emit_made(self, op: OpJob, what: Made, data: torch.Tensor, start: int) -> None:
        """Hand over what was made with codes; ``start``: the op's first element that it was made with."""
        columns, into = op.parts[0].columns, getattr(op, what)
        before = op.encoding.made_nbytes(what, start // columns, columns)
        self._outputs[op.output].take(into, before, data.numel(), self._fetcher(data), aside=True)

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


def _sample_within(tile: TileJob, raw: Raw, tiled: TiledOp) -> Tile:
    assert tiled.part is not None
    return tiled.part.sample_within(tile.variant(tiled.number, raw)[1])


def _results(
    part: PartComputation, tiles: Iterator[tuple[TileJob, Raw]]
) -> Iterator[tuple[torch.Tensor, Raw]]:
    for tile, raw in tiles:
        yield part.apply(part.whole(raw, tile.first_element)), raw


def _result_of_whole(part: PartComputation, share: Raw, op: OpJob) -> torch.Tensor:
    """The result of a part that is one piece."""
    part.load(share)
    whole = part.whole(share, op.first_element)
    # Without a sample, as for one that is made in several tiles: where sums are split is in their last bits.
    part.gather(lambda: (whole,), None)
    return part.apply(whole)


def _elements_of(part: PartComputation, share: Raw, spans: Sequence[tuple[int, int]]) -> Iterator[Tile]:
    return (part.elements(share, *span) for span in spans)


def _spans(num_elements: int, piece: int) -> list[tuple[int, int]]:
    return [(begin, min(piece, num_elements - begin)) for begin in range(0, max(1, num_elements), piece)]


def _input_codes(op: OpJob, part: JobPart, raw: Raw, span: tuple[int, int]) -> Raw:
    """The codes that some rows of a part have in those of its inputs that lie as the output does; nothing of
    the others, whose scales are those of other rows."""
    place = part.view, op.expression.cast.nbytes(op.num_elements)
    return [
        rows_of_codes(each, *span)
        if isinstance(each, RawCodes) and (each.read.view, each.read.nbytes) == place
        else NOTHING
        for each in raw
    ]


def _by_part(op: OpJob, raw: Raw) -> list[Raw]:
    shares: list[Raw] = []
    first = 0
    for part in op.parts:
        shares.append(raw[first : first + len(part.inputs)])
        first += len(part.inputs)
    return shares
