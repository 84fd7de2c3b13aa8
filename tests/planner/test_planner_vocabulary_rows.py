"""Runs of rows against the rules said token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.errors import PlanError
from raymerge.planner.tokenizer.tokens import ABSENT, FixedRow, RowRun, RowSources


def _sources(
    ids: Sequence[Sequence[int]],
    *,
    fixed: Mapping[int, tuple[int, int] | None] | None = None,
    forced: Sequence[int] = (),
    base: int = 0,
) -> RowSources:
    rows = {at: FixedRow(f"recipe.yml:{at}:1", f"row {at}", term) for at, term in (fixed or {}).items()}
    arrays = {source: np.array(each, dtype=np.int64) for source, each in enumerate(ids)}
    return RowSources(ids=arrays, base=base, fixed=rows, forced=frozenset(forced))


def _terms(sources: RowSources, member: int, holders: Mapping[int, int], row: int) -> list[tuple[int, int]]:
    """The rule for one row, said plainly."""
    has = {source: int(sources.ids[source][row]) for source in sorted(holders)}
    has = {source: own for source, own in has.items() if ABSENT != own < holders[source]}
    if member in has and row not in sources.forced:
        return [(member, has[member])]
    if row in sources.fixed:
        term = sources.fixed[row].term
        return [] if term is None else [term]
    if sources.base in has:
        return [(sources.base, has[sources.base])]
    return list(has.items())


def _expand(runs: Sequence[RowRun]) -> list[list[tuple[int, int]]]:
    return [[(s, first + at) for s, first in run.terms] for run in runs for at in range(run.count)]


def test_own_rows_then_the_base_then_the_mean_then_zeros() -> None:
    sources = _sources([[0, 1, 2, -1, -1, -1], [-1, 5, -1, 7, -1, -1], [3, -1, -1, 4, 9, -1]])
    everybody = {0: 99, 1: 99, 2: 99}
    assert sources.runs(0, everybody) == (
        RowRun(0, 3, ((0, 0),)),
        RowRun(3, 1, ((1, 7), (2, 4))),
        RowRun(4, 1, ((2, 9),)),
        RowRun(5, 1, ()),
    )
    assert sources.runs(1, everybody)[:3] == (
        RowRun(0, 1, ((0, 0),)),
        RowRun(1, 1, ((1, 5),)),
        RowRun(2, 1, ((0, 2),)),
    )
    assert sources.defaults().tolist() == [1, 1, 1, 2, 1, 0]


def test_a_fixed_row_of_a_source_without_the_tensor_is_refused_with_its_place() -> None:
    sources = _sources([[0, 1], [0, -1], [5, 6]], fixed={1: (2, 6)})
    with pytest.raises(PlanError, match=r"recipe\.yml:1:1: row 1 lacks a tensor that needs it"):
        sources.runs(1, {0: 99, 1: 99})
    assert sources.runs(1, {0: 99, 1: 99, 2: 99})[-1] == RowRun(1, 1, ((2, 6),))


def test_a_fixed_row_beyond_a_tensor_is_refused_with_its_place() -> None:
    sources = _sources([[0, 1], [0, -1]], fixed={1: (0, 6)})
    with pytest.raises(PlanError, match="or that row of it"):
        sources.runs(1, {0: 6, 1: 6})
    assert sources.runs(1, {0: 7, 1: 6})[-1] == RowRun(1, 1, ((0, 6),))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[RowSources, dict[int, int], int]:
    num_sources, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    row = st.one_of(st.integers(ABSENT, 14), st.just(ABSENT))
    plain = st.lists(row, min_size=num_tokens, max_size=num_tokens)
    # Consecutive rows, so that runs come about.
    shifted = st.integers(0, 3).map(lambda start: list(range(start, start + num_tokens)))
    ids = [draw(st.one_of(plain, shifted)) for _ in range(num_sources)]
    rows = st.integers(6, 18)
    holders = draw(st.dictionaries(st.integers(0, num_sources - 1), rows, min_size=1))
    member = draw(st.sampled_from(sorted(holders)))
    term = st.tuples(st.sampled_from(sorted(holders)), st.integers(0, 5))
    at = st.integers(0, num_tokens - 1)
    fixed = draw(st.dictionaries(at, st.one_of(st.none(), term), max_size=3))
    forced = draw(st.lists(at, max_size=3))
    base = draw(st.integers(0, num_sources - 1))
    return _sources(ids, fixed=fixed, forced=forced, base=base), holders, member


@settings(deadline=None, max_examples=150)
@given(_cases())
def test_runs_say_what_the_rules_say_row_by_row(case: tuple[RowSources, dict[int, int], int]) -> None:
    sources, holders, member = case
    runs = sources.runs(member, holders)
    num_tokens = len(sources.ids[0])
    assert _expand(runs) == [_terms(sources, member, holders, row) for row in range(num_tokens)]
    ends = [run.to_row + run.count for run in runs]
    assert [run.to_row for run in runs] == [0, *ends[:-1]]
    assert ends[-1] == num_tokens
    # They are as long as can be.
    for run, following in pairwise(runs):
        grown = tuple((source, first + run.count) for source, first in run.terms)
        assert grown != following.terms
