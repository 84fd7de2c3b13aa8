"""Ops of one part that are made tile by tile of one read: which tiles they share, and their statistics."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from raymerge import methods
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.execute.compute import PartComputation
from raymerge.execute.encoding import TensorScale
from raymerge.execute.output import Fill
from raymerge.execute.reading import Raw, RawInput, RawRows, TileJob
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import Input, OpJob
from raymerge.methods import Stored, Tile


class Tiles(Protocol):
    """An op's tiles with their bytes."""

    def __call__(self, *, again: bool = False) -> Iterable[tuple[TileJob, Raw]]:
        """Gives all tiles in order; ``again``: another pass will follow."""


@dataclass(eq=False, slots=True)
class TiledOp:
    """One op that is made of a read, perhaps beside others."""

    number: int
    """Which variant of the joint op it is; 0 for an op by itself."""
    first: TileJob
    """Its own first tile."""
    part: PartComputation | None
    """None for a copy."""
    shared: TensorScale | None = None

    @property
    def op(self) -> OpJob:
        return self.first.op

    @property
    def form(self) -> Hashable:
        """What ops have in common that are made of the same inputs in the same tiles."""
        return None if self.part is None else (self.part.form, self.first.piece, self.op.has_codes)

    def skipped(self, start: int) -> int:
        """Bytes of the op before an element."""
        return start * self.op.expression.cast.bits // 8

    def apply(self, tile: Tile) -> torch.Tensor:
        assert self.part is not None
        return self.part.apply(tile)

    def takes_stored(self, most_bytes: int) -> bool:
        """Whether results are written as bfloat16, and so many bytes at once are enough for it."""
        is_plain = self.op.expression.cast is DType.BF16 and self.op.places[0][1] % 2 == 0
        return is_plain and self.unit_bytes <= most_bytes

    @property
    def unit_bytes(self) -> int:
        assert self.part is not None
        return self.part.unit_bytes

    def filler(self, stored: Stored) -> Fill:
        """What writes the results of a tile as bfloat16."""
        part = self.part
        assert part is not None

        def fill(done: int, target: torch.Tensor) -> None:
            part.apply_stored(stored.part(done // 2, target.numel() // 2), target)

        return fill

    def pieces_again(self, tiles: Tiles) -> Iterator[tuple[TileJob, Raw]]:
        """A pass over what is computed at once, which another follows."""
        assert self.part is not None
        for tile, raw in tiles(again=True):
            own, share = tile.variant(self.number, raw)
            self.part.load(share)
            yield from pieces(own, share)


def made_together(first: TileJob, tiled_ops: Sequence[TiledOp]) -> list[list[TiledOp]]:
    """Groups of ops that are made of the same tiles."""
    groups: dict[Hashable, list[TiledOp]] = {}
    for each in tiled_ops:
        inputs = first.variants[each.number][1] if first.variants else ()
        groups.setdefault((inputs, each.form), []).append(each)
    return list(groups.values())


def observed_alike(group: Sequence[TiledOp]) -> list[list[TiledOp]]:
    """Groups of ops made of the same tiles that have their statistics, or what they depend on, in common."""
    alike: dict[Hashable, list[TiledOp]] = {}
    for each in group:
        assert each.part is not None
        alike.setdefault(each.part.observed, []).append(each)
    return list(alike.values())


def take_statistics(
    together: Sequence[Sequence[TiledOp]], tiles: Tiles, sample: Callable[[TiledOp], Tile] | None
) -> None:
    """Take the statistics of all ops, in as few passes over the read as the one takes that needs most."""
    taking = [each for group in together if group[0].part is not None for each in _statistics(group, sample)]
    while running := [each for each in taking if not each.gathering.is_done]:
        for tile, raw in tiles(again=True):
            for group in together:
                own = [each.gathering for each in running if each.group is group]
                _observe(own, group[0], *tile.variant(group[0].number, raw))
        for each in running:
            each.gathering.end_pass()
    for each in taking:
        for tiled, state in zip(each.tiled_ops, each.gathering.states, strict=True):
            assert tiled.part is not None
            tiled.part.take(state)


@dataclass(frozen=True, slots=True, eq=False)
class _Statistics:
    group: Sequence[TiledOp]
    tiled_ops: Sequence[TiledOp]
    """Those of the group that are observed alike."""
    gathering: methods.Gathering


def _statistics(group: Sequence[TiledOp], sample: Callable[[TiledOp], Tile] | None) -> Iterator[_Statistics]:
    lead = group[0]
    for tiled_ops in observed_alike(group):
        parts = [each.part for each in tiled_ops if each.part is not None]
        gathering = parts[0].gathering(parts)
        if sample is not None and gathering.takes_sample and lead.first.piece and not lead.op.has_codes:
            gathering.add_sample(sample(lead))
        yield _Statistics(group, tiled_ops, gathering)


def _observe(gatherings: Sequence[methods.Gathering], lead: TiledOp, tile: TileJob, raw: Raw) -> None:
    part = lead.part
    if not gatherings or part is None:
        return
    part.load(raw)
    for each, bytes_of_it in pieces(tile, raw):
        own: Iterable[Tile | Stored] = (
            part.tiles(bytes_of_it, each.first_element, each.piece)
            if each.piece
            else (part.whole(bytes_of_it, each.first_element),)
        )
        for observed in own:
            for gathering in gatherings:
                gathering.observe(observed)


def pieces(tile: TileJob, raw: Raw) -> Iterator[tuple[TileJob, Raw]]:
    """A tile of an op with codes as tiles that are computed at once; any other as it is."""
    if not (tile.piece and tile.op.has_codes):
        yield tile, raw
        return
    for start in range(0, tile.count, tile.piece):
        count = min(tile.piece, tile.count - start)
        inputs = zip(raw, tile.op.parts[0].inputs, strict=True)
        cut = tuple(_part(each, source, start, count) for each, source in inputs)
        yield replace(tile, start=tile.start + start, count=count, piece=0), cut


def _part(raw: RawInput, source: Input, start: int, count: int) -> RawInput:
    # Ops with codes that are gathered are made at once.
    assert isinstance(source, Read)
    assert not isinstance(raw, RawRows)
    begin, nbytes = source.dtype.nbytes(start), source.dtype.nbytes(count)
    if isinstance(raw, torch.Tensor):
        return raw[begin : begin + nbytes]
    scales = _cut(raw.scales, raw.layout.offset, raw.layout.of(start, count))
    zeros = _cut(raw.zero_points, raw.layout.zeros_offset, raw.layout.zeros_of(start, count))
    return replace(raw, codes=raw.codes[begin : begin + nbytes], scales=scales, zero_points=zeros)


def _cut(data: torch.Tensor, offset: int, span: tuple[int, int]) -> torch.Tensor:
    first, nbytes = span[0] - offset, span[1]
    return data[first : first + nbytes]
