"""Which texts are read, in which units, and which tokens the report looks at."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.stages.router.prompts import UNIT_TOKENS, Reading, Schedule, TokenRun, make_schedule

ROUTED = 3

runs_of = st.lists(
    st.builds(
        TokenRun,
        expert=st.integers(0, ROUTED),
        sign=st.sampled_from((-1, 0, 1)),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
    ),
    max_size=12,
)


def readings(schedule: Schedule) -> list[Reading]:
    return [reading for unit in schedule.units for reading in unit]


def planned(runs: list[TokenRun], mode: str = "hidden", *, routed: int = ROUTED, shared: int = 1) -> Schedule:
    return make_schedule(runs, mode, num_routed=routed, num_shared=shared)


@settings(deadline=None, max_examples=100)
@given(runs_of)
def test_equal_runs_are_read_once_and_count_as_often_as_they_are_given(runs: list[TokenRun]) -> None:
    found = readings(planned(runs))
    assert len({each.run.tokens for each in found}) == len(found)
    counted = Counter((use.expert, use.sign, each.run.tokens) for each in found for use in each.uses)
    assert counted == Counter((run.expert, run.sign, run.tokens) for run in runs if run.sign)


@settings(deadline=None, max_examples=100)
@given(runs_of)
def test_modes_of_positive_texts_read_no_others(runs: list[TokenRun]) -> None:
    schedule = planned(runs, "ridge")
    assert all(sign == 1 for each in readings(schedule) for _, sign, _ in each.uses)
    assert all(each.uses or each.kept for each in readings(schedule))
    tokens = [sum(len(run.tokens) for run in runs if run.sign > 0 and run.expert == e) for e in range(4)]
    assert list(schedule.num_tokens) == tokens


@settings(deadline=None, max_examples=100)
@given(runs_of)
def test_short_texts_are_judged_whole_by_held_out_ones_where_there_are_any(runs: list[TokenRun]) -> None:
    schedule = planned(runs)
    for expert in range(ROUTED):
        own = [run for run in runs if run.expert == expert]
        held_out = [run.tokens for run in own if run.sign == 0]
        wanted = held_out or [run.tokens for run in own if run.sign > 0]
        assert (expert in schedule.on_own) == (not held_out)
        assert schedule.num_kept[expert] == sum(map(len, wanted))
        kept = [
            (each.run.tokens, positions)
            for each in readings(schedule)
            for whose, positions in each.kept
            if whose == expert
        ]
        assert Counter(tokens for tokens, _ in kept) == Counter(wanted)
        assert all(positions == tuple(range(len(tokens))) for tokens, positions in kept)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(1, 80))
def test_long_texts_are_judged_by_tokens_evenly_taken(lengths: list[int], routed: int) -> None:
    runs = [TokenRun(0, 1, (number,) * length) for number, length in enumerate(lengths)]
    schedule = planned(runs, routed=routed, shared=0)
    total = sum(lengths)
    wanted = min(total, 256, 8192 // routed)
    assert schedule.num_kept[0] == wanted
    places, begin = [], 0
    for each in readings(schedule):
        for _, positions in each.kept:
            places += [begin + position for position in positions]
        begin += len(each.run.tokens)
    assert len(set(places)) == wanted
    steps = [after - before for before, after in pairwise(places)]
    assert all(total // wanted <= step <= -(-total // wanted) for step in steps)


def test_units_are_whole_runs_in_order() -> None:
    lengths = (30_000, 30_000, 10_000, UNIT_TOKENS + 1, 5, 5)
    runs = [TokenRun(0, 1, (number,) * length) for number, length in enumerate(lengths)]
    schedule = planned(runs)
    assert [[len(each.run.tokens) for each in unit] for unit in schedule.units] == [
        [30_000, 30_000],
        [10_000],
        [UNIT_TOKENS + 1],
        [5, 5],
    ]
    assert schedule.longest == UNIT_TOKENS + 1
    assert schedule.num_positive == (6, 0, 0, 0)


@settings(deadline=None, max_examples=100)
@given(runs_of)
def test_halves_share_no_text_unless_it_is_all_there_is(runs: list[TokenRun]) -> None:
    schedule = planned(runs, "ridge")
    for expert in range(ROUTED + 1):
        own = [
            (reading.run.tokens, use.first)
            for reading in readings(schedule)
            for use in reading.uses
            if use.expert == expert
        ]
        counts = Counter(tokens for tokens, _ in own)
        assert sum(first for _, first in own) == schedule.num_first[expert]
        if len(counts) == 1:
            assert all(first == len(tokens) // 2 for tokens, first in own)
            continue
        assert all(first in (0, len(tokens)) for tokens, first in own)
        assert len(set(own)) == len(counts), "a text that is given twice is in one half"
        longest = max((len(tokens) * count for tokens, count in counts.items()), default=0)
        assert abs(2 * schedule.num_first[expert] - schedule.num_tokens[expert]) <= longest


def test_experts_with_the_same_texts_have_the_same_halves() -> None:
    texts = ((1, 2, 3), (4, 5), (6,), (7, 8, 9, 1))
    schedule = planned([TokenRun(expert, 1, text) for expert in (0, 1) for text in texts], "ridge")
    assert all(len({use.first for use in reading.uses}) == 1 for reading in readings(schedule))
    assert schedule.shares[:, 2].tolist() == [0.0, 1.0], "an expert without text divides by nothing"


def test_held_out_texts_of_shared_experts_are_not_read() -> None:
    schedule = planned([TokenRun(3, 1, (1,)), TokenRun(3, 0, (2,))])
    assert [each.run.tokens for each in readings(schedule)] == [(1,)]
    assert readings(schedule)[0].kept == ()
