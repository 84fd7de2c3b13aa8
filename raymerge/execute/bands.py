"""Tiles of rows with codes, cut into pieces of whole bands: what is read at once is more than what is
computed at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from raymerge.execute.gathers import Input, Raw, RawCodes, RawInput
from raymerge.execute.tiles import TileJob
from raymerge.merge_plan.expressions import Read


def pieces(tile: TileJob, raw: Raw) -> Iterator[tuple[TileJob, Raw]]:
    """A tile of a row with codes as tiles that are computed at once; any other as it is.

    Args:
        tile: the tile.
        raw: its bytes.
    """
    if not (tile.piece and tile.row.has_codes):
        yield tile, raw
        return
    for start in range(0, tile.count, tile.piece):
        count = min(tile.piece, tile.count - start)
        inputs = zip(raw, tile.row.parts[0].inputs, strict=True)
        cut = tuple(_part(each, source, start, count) for each, source in inputs)
        yield replace(tile, start=tile.start + start, count=count, piece=0), cut


def _part(raw: RawInput, source: Input, start: int, count: int) -> RawInput:
    """The bytes of some elements."""
    if not isinstance(source, Read):
        raise TypeError("rows with codes that are assembled are made at once")
    begin, nbytes = source.dtype.nbytes(start), source.dtype.nbytes(count)
    if isinstance(raw, torch.Tensor):
        return raw[begin : begin + nbytes]
    if not isinstance(raw, RawCodes) or source.scales is None:
        raise TypeError("an input was read as another kind of input")
    first, of_scales = source.scales.of(start, count)
    skipped = first - source.scales.offset
    scales = raw.scales[skipped : skipped + of_scales]
    return RawCodes(raw.codes[begin : begin + nbytes], scales, raw.tensor_scale)
