"""Byte ranges that lie close together, read as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Some bytes of one file that are wanted."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes to read in one request, and the wanted ranges that lie in them."""

    offset: int
    """First byte."""
    nbytes: int
    members: tuple[int, ...]
    """Positions in the given sequence of the ranges it holds, by their offset."""


def coalesce(ranges: Sequence[Range], *, gap: int, limit: int) -> tuple[Extent, ...]:
    """Extents that hold every range once, in order of offset.

    Neighbours join when at most ``gap`` bytes lie between them and the extent stays within ``limit`` bytes;
    a range that lies wholly in an extent always joins it. A single range above ``limit`` stays whole.

    Raises:
        ValueError: a negative offset, size or gap, or a limit below one byte.
    """
    _check(ranges, gap, limit)
    extents: list[Extent] = []
    members: list[int] = []
    start = end = 0
    for position in sorted(range(len(ranges)), key=lambda at: (ranges[at].offset, ranges[at].end)):
        wanted = ranges[position]
        reach = max(end, wanted.end)
        near = wanted.offset - end <= gap and (reach == end or reach - start <= limit)
        if members and not near:
            extents.append(Extent(start, end - start, tuple(members)))
            members = []
        if not members:
            start, reach = wanted.offset, wanted.end
        members.append(position)
        end = reach
    return (*extents, Extent(start, end - start, tuple(members))) if members else ()


def _check(ranges: Sequence[Range], gap: int, limit: int) -> None:
    if gap < 0 or limit < 1:
        raise ValueError(f"gap must be 0 or more and limit 1 or more, not {gap} and {limit}")
    for wanted in ranges:
        if wanted.offset < 0 or wanted.nbytes < 0:
            raise ValueError(f"{wanted} has a negative offset or size")
