"""The choice of the largest, and the loops that merge what it leaves: the very bits of the form in torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import CPU, Case, make_settings, method_named, same_bits

from raymerge.methods import BLOCK, Settings, Tile, Value
from raymerge.methods.sce import (
    deviations_in_torch,
    deviations_of,
    merge_selected_in_torch,
    selected_deltas,
    selected_deltas_in_torch,
    selection_by_deviation,
    sum_of,
)
from raymerge.methods.selection import MagnitudeSelection
from raymerge.methods.task_arithmetic import merge_factors, merge_factors_in_torch
from raymerge.methods.trim import (
    EVERYTHING,
    NOTHING,
    WHOLE,
    SelectedMerge,
    Threshold,
    Trim,
    compiled_thresholds,
    mark_largest_,
    merge_trimmed_in_torch,
    threshold_of,
    tie_key,
    trimmed_merge,
)

SOME = [0.0, -0.0, 1.0, -1.0, 1.5, 2.0, -2.0, 3.0, 1e-45, -1e-40, 3e38, math.inf, -math.inf, math.nan]


def select(values: torch.Tensor, rank: int) -> MagnitudeSelection:
    selection = MagnitudeSelection(rank, CPU)
    selection.observe(values)
    while selection.conclude():
        selection.observe(values)
    return selection


def marks(values: torch.Tensor, rank: int, start: int = 0) -> torch.Tensor:
    magnitudes = values.abs()
    mark_largest_(magnitudes, threshold_of(select(values, rank), tie_key("ties", 0)), start=start)
    return magnitudes


# The choice -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(data=st.data(), values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_marks_are_the_largest_and_smaller_ranks_mark_fewer(data: st.DataObject, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    rank = data.draw(st.integers(0, len(values)))
    marked = marks(tensor, rank)
    assert set(marked.tolist()) <= {0.0, 1.0}
    threshold = select(tensor, rank).threshold
    assert bool((marked[tensor.abs() > threshold] == 1).all())
    assert bool((marked[tensor.abs() < threshold] == 0).all())
    if rank:
        assert bool((marks(tensor, rank - 1) <= marked).all() or threshold == math.inf)


@pytest.mark.parametrize(("values", "rank"), [([0.0, 2.0, 0.0], 2), ([1.0, 2.0, 3.0], 3), ([5.0], 0)])
def test_a_cut_without_a_choice_has_no_level(values: list[float], rank: int) -> None:
    assert math.isnan(threshold_of(select(torch.tensor(values), rank), 1).tied)


# The loops --------------------------------------------------------------------------------------------


def alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, but for which NaN it is: processors choose one of two by the order of operands."""
    whole = torch.ones(())
    return same_bits(left.where(~left.isnan(), whole), right.where(~right.isnan(), whole)) and torch.equal(
        left.isnan(), right.isnan()
    )


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    """Up to four sources of any length, rows further apart than they are long."""
    num_sources, size = draw(st.integers(1, 4)), draw(st.sampled_from([0, 1, 7, 130, 1024, 1025, 3000]))
    gap, seed = draw(st.sampled_from([0, 1, 17])), draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((num_sources, size + gap), generator=generator)
    if draw(st.booleans()):
        rows = (rows * 2).round().mul_(0.5)
    odd = torch.tensor(draw(st.lists(st.sampled_from(SOME), min_size=1, max_size=20)), dtype=torch.float32)
    if rows.numel():
        places = torch.randint(rows.numel(), (40,), generator=generator)
        rows.view(-1)[places] = odd.repeat(40)[:40]
    base = torch.randn(size, generator=generator)
    base[: size // 3] = -0.0
    start = draw(st.sampled_from([0, BLOCK, (1 << 33) + 5]))
    return Tile(base, rows[:, :size], start)


levels = st.sampled_from([0.5, 1.0, 1.5, 2.0, math.inf])


@st.composite
def cuts(draw: st.DrawFn) -> Threshold:
    if draw(st.booleans()):
        return draw(st.sampled_from([EVERYTHING, NOTHING, Threshold(0.7)]))
    level = draw(levels)
    return Threshold(level, level, draw(st.floats(0.0, 1.0)), draw(st.integers(0, (1 << 64) - 1)))


@st.composite
def trims(draw: st.DrawFn) -> Trim:
    """The second cut never takes more than the first gives: as ranks of one selection do."""
    gain = draw(st.sampled_from([1.0, 3.7]))
    kept = draw(cuts())
    outliers = [NOTHING]
    if kept.above < math.inf:
        level = kept.above + 1
        outliers += [Threshold(level), Threshold(level, level, draw(st.floats(0.0, 1.0)), kept.key)]
    if math.isnan(kept.tied):
        # Just what is kept, of which nothing is left then.
        outliers.append(Threshold(kept.above))
    else:
        outliers.append(Threshold(kept.above, kept.tied, kept.share * draw(st.floats(0.0, 1.0)), kept.key))
        # A cut without a choice at the same level takes all that is larger than the tied ones.
        outliers.append(Threshold(kept.above))
    return Trim(kept, draw(st.sampled_from(outliers)), gain)


@st.composite
def family_settings(draw: st.DrawFn, num_sources: int) -> Settings:
    weights = draw(
        st.lists(st.sampled_from([0.5, 1.0, -0.3, 0.0]), min_size=num_sources, max_size=num_sources)
    )
    values: dict[str, Value] = {
        "normalize": draw(st.booleans()),
        "lambda": draw(st.sampled_from([1.0, -0.5, 1.7])),
    }
    method = method_named("ties")
    return make_settings(method, Case(values, tuple({"weight": weight} for weight in weights)))


@settings(deadline=None, max_examples=80)
@given(data=st.data(), tile=tiles(), elect=st.booleans())
def test_the_loop_trims_and_merges_as_torch_does(data: st.DataObject, tile: Tile, *, elect: bool) -> None:
    count = len(tile.sources)
    chosen = [data.draw(trims()) for _ in range(count)]
    how = data.draw(family_settings(count))
    compiled = trimmed_merge(how, chosen, elect=elect).apply(tile)
    assert alike(compiled, merge_trimmed_in_torch(tile, how, chosen, elect=elect))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_more_nan_than_outliers_leave_what_is_kept(share: float) -> None:
    """A NaN is the largest magnitude; where all outliers are NaN no number may go with them."""
    delta = torch.arange(1.0, 101.0)
    delta[:10] = math.nan
    kept = threshold_of(select(delta, 50), 1)
    outliers = threshold_of(select(delta, round(10 * share)), 1)
    assert not math.isnan(outliers.above)
    method = method_named("breadcrumbs")
    how = make_settings(method, Case({"normalize": False}, ({"weight": 1.0},)))
    tile, chosen = Tile(torch.zeros(100), delta[None], 0), [Trim(kept, outliers)]
    merged = trimmed_merge(how, chosen, elect=False).apply(tile)
    assert alike(merged, merge_trimmed_in_torch(tile, how, chosen, elect=False))
    assert bool(merged[:10].isnan().all())
    assert torch.equal(merged[10:], delta[10:].where(delta[10:] > 60, 0.0))


@pytest.mark.parametrize("elect", [False, True])
def test_infinities_at_an_infinite_level_are_kept_or_make_nan(*, elect: bool) -> None:
    """Where more are infinite than are kept: those that are chosen stay, the others are 0 times infinity."""
    deltas = torch.full((2, 4096), math.inf)
    deltas[1] = 1.0
    tile = Tile(torch.zeros(4096), deltas, 0)
    method = method_named("ties")
    how = make_settings(method, Case({}, ({"weight": 0.5},) * 2))
    chosen = [Trim(Threshold(math.inf, math.inf, 0.5, 11)), WHOLE]
    merged = trimmed_merge(how, chosen, elect=elect).apply(tile)
    assert alike(merged, merge_trimmed_in_torch(tile, how, chosen, elect=elect))
    assert 1500 < int((merged == math.inf).sum()) < 2500
    assert bool((merged.isnan() | (merged == math.inf)).all())


@settings(deadline=None, max_examples=60)
@given(data=st.data(), tile=tiles(), elect=st.booleans(), gap=st.sampled_from([0, 5]))
def test_the_loop_multiplies_and_merges_as_torch_does(
    data: st.DataObject, tile: Tile, *, elect: bool, gap: int
) -> None:
    count, size = tile.sources.shape
    how = data.draw(family_settings(count))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    factors = torch.rand((count, size + gap), generator=generator).sub_(0.5).clamp_min_(0.0)[:, :size]
    compiled = merge_factors(tile, how, factors, elect=elect)
    assert alike(compiled, merge_factors_in_torch(tile, how, factors, elect=elect))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), tile=tiles(), cut=cuts())
def test_the_loop_selects_and_merges_as_torch_does(data: st.DataObject, tile: Tile, cut: Threshold) -> None:
    shares = tuple(data.draw(st.sampled_from([0.0, 0.25, 0.6])) for _ in tile.sources)
    compiled = SelectedMerge(selection_by_deviation(cut), sum_of(shares)).apply(tile)
    assert alike(compiled, merge_selected_in_torch(tile, shares, cut))


@settings(deadline=None, max_examples=60)
@given(tile=tiles(), cut=cuts())
def test_deviations_and_what_they_select_are_those_of_torch(tile: Tile, cut: Threshold) -> None:
    ours, theirs = deviations_of(tile), deviations_in_torch(tile)
    assert alike(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    compiled = selected_deltas(tile, compiled_thresholds([(cut, NOTHING)]))
    assert alike(compiled, selected_deltas_in_torch(tile, cut))


@pytest.mark.parametrize("num_sources", range(1, 12))
def test_equal_deltas_lie_nowhere_apart_and_others_always_do(num_sources: int) -> None:
    """Also where the only difference is the smallest number that there is."""
    values = torch.randn(999, generator=torch.Generator().manual_seed(0))
    deltas = values.repeat(num_sources, 1)
    assert deviations_of(Tile(None, deltas, 0))[1] == 0
    if num_sources > 1:
        smallest = torch.zeros((num_sources, 3))
        smallest[-1] = 1e-45
        for deviations in (deviations_of, deviations_in_torch):
            assert deviations(Tile(None, smallest, 0))[1] == 3
