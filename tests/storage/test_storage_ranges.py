"""Coalescing of byte ranges."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.storage.store import Extent, Range, coalesce

ranges = st.lists(st.builds(Range, st.integers(0, 400), st.integers(0, 60)), max_size=25)
gaps = st.integers(0, 40)
limits = st.integers(1, 200)


def reads(extents: tuple[Extent, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(extent.offset, extent.nbytes, extent.members) for extent in extents]


def test_order_given_does_not_matter_and_members_name_positions() -> None:
    given_order = [Range(20, 5), Range(0, 5), Range(5, 5)]
    assert reads(coalesce(given_order, gap=0, limit=100)) == [(0, 10, (1, 2)), (20, 5, (0,))]


def test_a_range_above_the_limit_stays_whole_and_takes_in_what_it_holds() -> None:
    wanted = [Range(0, 50), Range(10, 5), Range(50, 5)]
    assert reads(coalesce(wanted, gap=0, limit=20)) == [(0, 50, (0, 1)), (50, 5, (2,))]


@pytest.mark.parametrize(("gap", "limit"), [(-1, 1), (0, 0), (0, -5)])
def test_impossible_settings(gap: int, limit: int) -> None:
    with pytest.raises(ValueError, match="gap must be 0 or more and limit 1 or more"):
        coalesce([], gap=gap, limit=limit)


@pytest.mark.parametrize("wanted", [Range(-1, 3), Range(1, -3)])
def test_impossible_ranges(wanted: Range) -> None:
    with pytest.raises(ValueError, match="negative"):
        coalesce([wanted], gap=0, limit=1)


@settings(deadline=None, max_examples=200)
@given(ranges, gaps, limits)
def test_every_range_lies_whole_in_exactly_one_extent(wanted: list[Range], gap: int, limit: int) -> None:
    extents = coalesce(wanted, gap=gap, limit=limit)
    assert sorted(at for extent in extents for at in extent.members) == list(range(len(wanted)))
    for extent in extents:
        for at in extent.members:
            assert extent.offset <= wanted[at].offset
            assert wanted[at].end <= extent.offset + extent.nbytes


@settings(deadline=None, max_examples=200)
@given(ranges, gaps, limits)
def test_extents_are_tight_sorted_and_within_the_limit(wanted: list[Range], gap: int, limit: int) -> None:
    extents = coalesce(wanted, gap=gap, limit=limit)
    assert [extent.offset for extent in extents] == sorted(extent.offset for extent in extents)
    for extent in extents:
        members = [wanted[at] for at in extent.members]
        assert extent.offset == min(member.offset for member in members)
        assert extent.offset + extent.nbytes == max(member.end for member in members)
        assert extent.nbytes <= max(limit, *(member.nbytes for member in members))


@settings(deadline=None, max_examples=200)
@given(ranges, gaps)
def test_no_hole_above_the_gap_is_read_and_none_below_is_left(wanted: list[Range], gap: int) -> None:
    extents = coalesce(wanted, gap=gap, limit=10**9)
    for extent in extents:
        reached = extent.offset
        for at in extent.members:
            assert wanted[at].offset - reached <= gap
            reached = max(reached, wanted[at].end)
    for before, after in pairwise(extents):
        assert after.offset - (before.offset + before.nbytes) > gap


@settings(deadline=None, max_examples=100)
@given(ranges, gaps, limits, st.randoms())
def test_the_bytes_to_read_hang_on_the_set_alone(
    wanted: list[Range], gap: int, limit: int, chance: object
) -> None:
    shuffled = list(wanted)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = coalesce(wanted, gap=gap, limit=limit), coalesce(shuffled, gap=gap, limit=limit)
    assert [(e.offset, e.nbytes) for e in one] == [(e.offset, e.nbytes) for e in other]
