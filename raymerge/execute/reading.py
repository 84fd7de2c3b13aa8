"""Reads the bytes of tiles from sources; runs on the reading thread of a segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymerge.execute.assembled import AssembledInput, Input, Raw, RawInput, RawRows, Taken
from raymerge.execute.steps import PADDING, WRITING, Step
from raymerge.planner.assembly_memory import HOLE_MOST, REQUEST_MOST
from raymerge.planner.expressions import Read, Term
from raymerge.storage.ranges import Extent, Range, coalesce
from raymerge.storage.store import ReadStore


class TileReader:
    """Reads one segment's tiles in order, and keeps what later passes or tiles want again."""

    def __init__(self, sources: Sequence[ReadStore]) -> None:
        """
        Args:
            sources: one store for each source, in the plan's order.
        """
        self.read_bytes = 0
        self._sources = sources
        self._kept: dict[tuple[int, int], Raw] = {}
        self._factors: dict[int, tuple[tuple[torch.Tensor, ...], ...]] = {}

    def read(self, step: Step) -> Raw:
        """The bytes of every input of a tile; of resident rows from memory after the first pass."""
        if step.begins_row:
            self._factors = {
                number: tuple(self._factor_bytes(term) for term in each.terms)
                for number, each in enumerate(step.row.inputs)
                if isinstance(each, AssembledInput)
            }
        key = (step.row.index, step.start)
        keeps = step.resident and step.pass_index != PADDING
        if keeps and key in self._kept:
            return self._kept.pop(key) if step.pass_index == WRITING else self._kept[key]
        found = [self._input(step, number, each) for number, each in enumerate(step.row.inputs)]
        if keeps:
            self._kept[key] = found
        return found

    def _input(self, step: Step, number: int, source: Input) -> RawInput:
        if isinstance(source, AssembledInput):
            return self._rows(step, number, source)
        if step.pass_index == PADDING:
            return torch.empty(0, dtype=torch.uint8)
        return self._bytes(source, *step.span(source))

    def _rows(self, step: Step, number: int, source: AssembledInput) -> RawRows:
        is_wanted = source.is_padded or step.pass_index != PADDING
        first, stop = step.window(source) if is_wanted else (0, 0)
        begin, count = step.place(source)
        taken = source.taken(first, stop)
        stored = tuple(
            self._taken(term, each, source.num_columns)
            for term, each in zip(source.terms, taken, strict=True)
        )
        return RawRows(stop - first, first, begin, count, taken, stored, self._factors[number])

    def _factor_bytes(self, term: Term) -> tuple[torch.Tensor, ...]:
        factors = term.product.factors if term.product is not None else ()
        return tuple(self._bytes(each, each.offset, each.nbytes) for each in factors)

    def _taken(self, term: Term, taken: Taken, num_columns: int) -> torch.Tensor:
        """The stored rows that a window takes of a term, close together; all bytes of a viewed one."""
        read = term.read
        if read.view is not None:
            return self._bytes(read, read.offset, read.nbytes if len(taken.moves) else 0)
        width = read.dtype.nbytes(num_columns)
        ranges = [Range(read.offset + a * width, (b - a) * width) for a, b in taken.ranges.tolist()]
        found = torch.empty(sum(each.nbytes for each in ranges), dtype=torch.uint8)
        filled = 0
        for extent in coalesce(ranges, gap=HOLE_MOST, limit=REQUEST_MOST):
            members = [ranges[member] for member in extent.members]
            wanted = sum(each.nbytes for each in members)
            self._extent(read, extent, members, found[filled : filled + wanted])
            filled += wanted
        return found

    def _extent(self, read: Read, extent: Extent, members: Sequence[Range], target: torch.Tensor) -> None:
        """Read an extent and keep of it what is wanted."""
        if extent.nbytes == target.numel():
            self._fill(read, extent.offset, target)
            return
        whole = self._bytes(read, extent.offset, extent.nbytes)
        filled = 0
        for each in members:
            begin = each.offset - extent.offset
            target[filled : filled + each.nbytes] = whole[begin : begin + each.nbytes]
            filled += each.nbytes

    def _bytes(self, read: Read, offset: int, nbytes: int) -> torch.Tensor:
        return self._fill(read, offset, torch.empty(nbytes, dtype=torch.uint8))

    def _fill(self, read: Read, offset: int, target: torch.Tensor) -> torch.Tensor:
        self._sources[read.source].read_into(read.key, offset, target.numpy().data)
        self.read_bytes += target.numel()
        return target
