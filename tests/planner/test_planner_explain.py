"""The account of a plan: what it reads and writes, how long it takes, and the memory that it needs."""

from __future__ import annotations

import contextlib
import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import llama_config, read_tensors, write_checkpoint
from kits.gather_maker import expression
from kits.merge_cases import make_family, recipes
from kits.merges import MEAN, STACK, make_models
from kits.plan_maker import Planned, header_checkpoint, llama, llama_specs, planned, same_needs
from kits.quantised_models import deepseek_v3
from kits.recipe_maker import piece, slerp, stack

from raymerge.api import plan
from raymerge.dtypes import DType
from raymerge.errors import OptionError, Problem
from raymerge.merge_plan.expressions import Expression, copy_expression
from raymerge.merge_plan.memory import (
    READ_MARGIN,
    SMALLEST_BUDGET,
    TILE_MOST,
    InputNeed,
    Lane,
    Need,
    OpSize,
    expression_passes,
    op_need,
    project,
    tiling,
)
from raymerge.merge_plan.plan import Plan
from raymerge.methods import BLOCK, ROW_GROUP, Access, BaseUse, methods
from raymerge.planner.explain import config_changes, explain, tensor_lines, tensors_by_use
from raymerge.planner.inputs.sources import Source, open_models
from raymerge.planner.merges import build_plan
from raymerge.planner.simulation import (
    Cluster,
    MethodSpeeds,
    SegmentLoads,
    run_seconds,
    segment_loads,
    simulate_plan,
)
from raymerge.recipes.load import parse_recipe
from raymerge.recipes.schema import Recipe
from raymerge.storage.local.buffers import ALIGNMENT

BUDGET = 1 << 30


def _planned(folder: Path, text: str) -> tuple[Plan, tuple[Source, ...]]:
    with contextlib.chdir(folder):
        recipe = parse_recipe(text)
        assert isinstance(recipe, Recipe)
        sources = open_models(recipe).require()
        return build_plan(recipe, sources, version="test"), sources


@pytest.mark.parametrize("text", [MEAN, STACK])
def test_every_source_tensor_and_byte_is_accounted_for(text: str, tmp_path: Path) -> None:
    plan, sources = _planned(make_models(tmp_path), text)
    found = explain(plan, sources, project(plan, BUDGET))
    tensors: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for line in found.dispositions:
        tensors[line.source] += line.tensors
        nbytes[line.source] += line.nbytes
    assert [tensors[index] for index in range(2)] == [source.tensors for source in found.sources]
    assert [nbytes[index] for index in range(2)] == [source.nbytes for source in found.sources]


def test_problems_of_the_plan_and_of_the_options_come_together(tmp_path: Path) -> None:
    folder = make_models(tmp_path)
    tensors = read_tensors(folder / "two")
    tensors["model.norm.weight"] = torch.ones(33, dtype=torch.bfloat16)
    write_checkpoint(folder / "two", tensors, llama_config())
    plan, sources = _planned(folder, MEAN)
    extra = Problem("--memory", "it is too little.", "Give more.")
    found = explain(plan, sources, project(plan, BUDGET), problems=[extra])
    assert found.problems == (*plan.problems, extra)
    assert "model.norm.weight" in str(found.problems[0])


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["a", "b"])
CONFIGS = st.recursive(
    st.dictionaries(st.sampled_from("pqr"), SCALARS | st.lists(st.integers(0, 3), max_size=3), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("pqr"), inner, max_size=3),
    max_leaves=6,
)


@given(before=CONFIGS, after=CONFIGS)
@settings(deadline=None, max_examples=50)
def test_the_config_changes_lead_from_one_config_to_the_other(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    changed = copy.deepcopy(before)
    for change in config_changes(before, after):
        *path, last = change.key.split(".")
        section = changed
        for key in path:
            section = section[key]
        if change.after is None:
            del section[last]
        else:
            section[last] = json.loads(change.after)
    assert changed == after


def test_tensors_are_copied_or_converted_as_the_recipe_says(tmp_path: Path) -> None:
    folder = make_models(tmp_path)
    copied, _ = _planned(folder, STACK)
    assert {(line.disposition, line.expressions) for line in tensor_lines(copied)} == {
        ("copied", ("read copy",))
    }
    converted, _ = _planned(folder, f"{STACK}dtype: float16\n")
    assert {line.disposition for line in tensor_lines(converted)} == {"converted"}
    merged, _ = _planned(folder, MEAN)
    for each in (copied, converted, merged):
        assert tensors_by_use(each) == Counter(line.disposition for line in tensor_lines(each))


MB = 10**6
SPEEDS = MethodSpeeds({"linear": 1e-9, "ties": 4e-9}, 2e-8, 1e-10, {})
AMPLE, SCARCE = Lane(1 << 30), Lane(0)


def _merge(method: str, models: Sequence[Path], base: Path | None = None, **more: Any) -> Mapping[str, Any]:
    entries = [{"model": str(each), "parameters": {"weight": 0.5}} for each in models]
    named = {"base_model": str(base)} if base is not None else {}
    return {"merge_method": method, "models": entries, **named, **more}


def _models(root: Path, count: int = 3) -> list[Path]:
    return [llama(root / f"model{number}") for number in range(count)]


def _loads(made: Planned, lane: Lane = AMPLE) -> SegmentLoads:
    return segment_loads(made.plan.require(), lane, SPEEDS)


def _data_bytes(made: Planned) -> int:
    return int(np.sum(made.plan["tensors"].column("nbytes").to_pylist()))


def test_a_merge_reads_its_sources_and_writes_its_tensors_once(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    loads, size = _loads(made), _data_bytes(made)
    assert (loads.read_bytes + loads.write_bytes).tolist() == made.plan["segments"].column("cost").to_pylist()
    assert (loads.read_bytes.sum(), loads.write_bytes.sum()) == (2 * size, size)
    # Two bytes an element.
    assert loads.thread_seconds.sum() == pytest.approx(size * 1e-9)
    assert _loads(made, SCARCE).read_bytes.tolist() == loads.read_bytes.tolist()
    per_tensor = replace(SPEEDS, by_tensor={"linear": 1e-3, "ties": 1.0})
    more = segment_loads(made.plan, AMPLE, per_tensor).thread_seconds.sum()
    assert more == pytest.approx(size * 1e-9 + len(made.names()) * 1e-3)
    given_speed = segment_loads(made.plan, AMPLE, SPEEDS, compute=1e6)
    assert given_speed.thread_seconds.sum() == pytest.approx(2 * size / 1e6)


def test_what_does_not_stay_in_memory_is_read_again_for_statistics(tmp_path: Path) -> None:
    config = llama_config(layers=1, hidden=512)
    specs = llama_specs(1, hidden=512)
    base, *others = (header_checkpoint(tmp_path / name, specs, config) for name in "abc")
    made = planned(_merge("ties", others, base, parameters={"density": 0.5}))
    kept, again = _loads(made), _loads(made, SCARCE)
    passes = max(expression_passes(each) for each in made.plan.expressions)
    large = [dtype.nbytes(prod(shape)) for dtype, shape in specs.values() if prod(shape) > BLOCK]
    assert passes > 0
    assert 0 < len(large) < len(specs)
    assert again.read_bytes.sum() == kept.read_bytes.sum() + passes * 3 * sum(large)
    assert again.write_bytes.tolist() == kept.write_bytes.tolist()
    assert again.thread_seconds.tolist() == kept.thread_seconds.tolist()


def test_a_layer_taken_twice_is_read_once_and_written_to_both_places(tmp_path: Path) -> None:
    model = str(llama(tmp_path / "model"))
    twice = [piece(model, 0, 3) for _ in range(2)]
    made = planned(stack(*twice))
    loads = _loads(made)
    distinct = sum(row["nbytes"] for row in made.plan["ops"].to_pylist() if row["copy_of"] < 0)
    assert loads.write_bytes.sum() == _data_bytes(made)
    assert loads.read_bytes.sum() == distinct < _data_bytes(made)
    assert loads.thread_seconds.sum() == pytest.approx(distinct * 1e-10)


def test_codes_take_time_beyond_the_method(tmp_path: Path) -> None:
    models = [deepseek_v3(tmp_path / name, seed).root for seed, name in enumerate("ab")]
    recipe = _merge("linear", models)
    same = plan({**recipe, "out_format": "same"}).require()
    found = {}
    for name, figures in {"none": {}, "decoded": {"decoded": 1.0}, "encoded": {"encoded": 1.0}}.items():
        speeds = MethodSpeeds({"linear": 0.0}, 0.0, 0.0, {}, **figures)
        found[name] = segment_loads(same, AMPLE, speeds).thread_seconds.sum()
    assert found["none"] == 0
    assert found["decoded"] == 2 * found["encoded"] > 0
    plain = segment_loads(plan({**recipe, "out_format": "bf16"}).require(), AMPLE, speeds)
    assert plain.thread_seconds.sum() == 0


def _equal(count: int, compute: float = 0.0) -> SegmentLoads:
    return SegmentLoads(*(np.full(count, each) for each in (400 * MB, 100 * MB, compute)))


def _cluster(**given: Any) -> Cluster:
    return Cluster(**{"overhead": 0.0, "driver": 0.0, "startup": 0.0, "storage": 1e15, "threads": 1, **given})


def test_one_lane_takes_the_sum_of_reading_computing_and_writing() -> None:
    cluster = _cluster(storage=None, read=1e9, write=5e8, lanes=1, overhead=0.25)
    seconds, busy = run_seconds(_equal(8, 0.5), cluster)
    assert seconds == pytest.approx(8 * (0.4 + 0.5 + 0.2 + 0.25))
    assert {name: round(value, 9) for name, value in busy.items() if value} == {
        "reading": 3.2,
        "computing": 4.0,
        "writing": 1.6,
    }


@pytest.mark.parametrize(
    ("given", "loads", "expected", "limiter"),
    [
        ({"storage": 1e9, "workers": 50}, _equal(1000), 500.0, "the storage"),
        ({"workers": 50, "per_worker": 1e8}, _equal(1000), 100.0, "the workers' links"),
        ({"workers": 50, "threads": 2}, _equal(1000, 1.0), 10.0, "computing"),
        ({"workers": 50, "threads": 2, "cores": 1}, _equal(1000, 1.0), 20.0, "computing"),
        (
            {"workers": 50, "cores": 2, "per_core": 1e8, "threads": 2},
            _equal(1000),
            50.0,
            "the workers' cores",
        ),
        ({"workers": 50, "driver": 1.0}, _equal(1000), 1000.0, "handing out"),
    ],
)
def test_many_lanes_come_near_the_busiest_resource(
    given: dict[str, Any], loads: SegmentLoads, expected: float, limiter: str
) -> None:
    seconds, busy = run_seconds(loads, _cluster(lanes=20, **given))
    assert max(busy, key=lambda name: busy[name]) == limiter
    assert max(busy.values()) == pytest.approx(expected)
    assert expected <= seconds <= 1.1 * expected


@given(
    st.lists(st.floats(0, 1e9), min_size=0, max_size=30),
    st.integers(1, 40),
    st.integers(1, 8),
    st.sampled_from([None, 1e8]),
)
def test_no_run_is_shorter_than_its_limits_or_longer_than_one_lane(
    reads: list[float], workers: int, threads: int, link: float | None
) -> None:
    read = np.array(reads, dtype=np.float64)
    loads = SegmentLoads(read, read / 2, read / 1e9)
    cluster = _cluster(storage=1e9, workers=workers, threads=threads, per_worker=link, overhead=0.01)
    seconds, busy = run_seconds(loads, cluster)
    one, _ = run_seconds(loads, replace(cluster, workers=1, lanes=1))
    assert max(busy.values()) <= seconds <= one * (1 + 1e-9)
    assert run_seconds(loads, replace(cluster, workers=2 * workers))[0] <= seconds * (1 + 1e-9)


def test_a_plan_is_simulated_with_its_own_memory_and_lanes(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    found = simulate_plan(made.plan, Cluster(storage=1e9, threads=2, lanes=4, workers=2), 1 << 30)
    assert found.cluster.memory == 1 << 30
    # No more lanes than there is work for.
    assert found.cluster.lanes == min(4, found.segments)
    assert found.segments == len(made.plan["segments"])
    assert (found.read_bytes, found.written_bytes) == (2 * _data_bytes(made), _data_bytes(made))
    assert list(found.others) == [1, 4]
    assert found.others[1] >= found.seconds >= found.others[4]
    assert found.limiter == "start-up"
    assert found.to_json()["seconds"] == found.seconds


def test_a_method_without_a_measured_speed_is_named(tmp_path: Path) -> None:
    first, second = _models(tmp_path, 2)
    made = planned(slerp(first, second))
    assert _loads(made).thread_seconds.sum() == pytest.approx(_data_bytes(made) * 2e-8)
    assert simulate_plan(made.plan, Cluster(storage=1e9), 1 << 30, speeds=SPEEDS).guessed == ("slerp",)
    told = Cluster(storage=1e9, compute=1e9)
    assert simulate_plan(made.plan, told, 1 << 30, speeds=SPEEDS).guessed == ()


def test_too_little_memory_is_refused_with_the_least_that_works(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    with pytest.raises(OptionError, match="smallest budget that works") as caught:
        simulate_plan(made.plan, Cluster(storage=1e9, memory=1 << 10), 1 << 30)
    assert caught.value.problems[0].where == "--simulate memory"


def test_everything_wrong_with_a_cluster_is_told_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        Cluster(workers=0, threads=-1, read=1e9, per_worker=0.0, startup=-1.0)
    places = [problem.where.removeprefix("--simulate ") for problem in caught.value.problems]
    assert places == ["workers", "threads", "per_worker", "startup", "--simulate"]


MIB = 1 << 20
_ROUNDING = 4 * ALIGNMENT
"""Bytes by which shares of a lane are rounded, with some to spare."""


@st.composite
def _needs(draw: st.DrawFn) -> tuple[Need, int]:
    num_elements = draw(st.integers(0, 1 << 24))
    unit = draw(st.sampled_from([BLOCK, ROW_GROUP * 77, 3 << 20]))
    scratch = draw(st.floats(0, 60))
    need = Need(
        stored_per_element=draw(st.floats(0, 20)),
        work_per_element=scratch + draw(st.floats(0, 60)),
        scratch_per_element=scratch,
        read_margin=READ_MARGIN * draw(st.integers(1, 9)),
        fixed_bytes=draw(st.integers(0, 64 * MIB)),
        least_elements=min(num_elements, unit),
        unit=unit,
        piece=draw(st.sampled_from([0, max(1, BLOCK // unit) * unit])),
    )
    return need, num_elements


passes = st.sampled_from([0, 2])


def _expression(name: str) -> Expression:
    """A method with three sources and everything thinned."""
    method = methods()[name]
    sources = min(3, method.max_sources or 3)
    has_base = method.base is BaseUse.REQUIRED
    numbers = {"weight": 1.0, "density": 0.5, "t": 0.5}
    return expression(method, sources=sources, has_base=has_base, cast=DType.BF16, **numbers)


def _need(name: str, num_elements: int, *, columns: int = 1, is_flat: bool = True) -> Need:
    reads = [InputNeed(DType.BF16, 2 * num_elements)] * 4
    return op_need(_expression(name), reads, OpSize(num_elements, 1, columns, 2, is_flat))


@given(case=_needs(), above=st.one_of(st.integers(0, 64 * MIB), st.integers(0, 1 << 32)), passes=passes)
@settings(deadline=None, max_examples=60)
def test_a_tiling_fits_its_lane(case: tuple[Need, int], above: int, passes: int) -> None:
    need, num_elements = case
    lane = Lane(need.least_bytes + above)
    cut = tiling(need, num_elements, lane, passes=passes)
    assert 0 < cut.peak <= lane.budget
    assert 1 <= cut.elements <= max(1, num_elements)
    assert cut.elements % need.unit == 0 or cut.is_whole(num_elements)
    if not passes and not need.piece:
        assert cut.elements <= max(TILE_MOST, need.unit)


@given(case=_needs(), passes=passes)
@settings(deadline=None, max_examples=60)
def test_a_lane_below_the_least_does_not_hold_the_least_tile(case: tuple[Need, int], passes: int) -> None:
    need, num_elements = case
    load, work = need.load_bytes(need.least_elements), need.work_bytes(need.piece_of(need.least_elements))
    for budget, fits in ((need.least_bytes, True), (need.least_bytes - _ROUNDING, False)):
        lane = Lane(budget)
        assert (max(load, lane.load_bytes) + work + lane.write_bytes <= budget) is fits
    assert tiling(need, num_elements, Lane(need.least_bytes), passes=passes).elements >= need.least_elements


@given(case=_needs(), above=st.integers(0, 1 << 30), more=st.integers(16 * _ROUNDING, 1 << 30), passes=passes)
@settings(deadline=None, max_examples=60)
def test_more_memory_never_gives_more_tiles(
    case: tuple[Need, int], above: int, more: int, passes: int
) -> None:
    need, num_elements = case
    budget = need.least_bytes + above
    lanes = [Lane(each) for each in (budget, budget + more)]
    # Where a full piece just fits beside its buffer, tiles are cut in another way.
    fits = [bool(need.piece) and lane.load_limit(need, need.piece) >= lane.load_bytes for lane in lanes]
    assume(fits[0] == fits[1])
    small, large = (tiling(need, num_elements, lane, passes=passes) for lane in lanes)
    assert large.elements >= small.elements
    assert large.is_whole(num_elements) or not small.is_whole(num_elements)


@pytest.mark.parametrize("name", list(methods()))
def test_tiles_are_cut_as_the_method_can_be(name: str) -> None:
    made, method = _expression(name), methods()[name]
    shape = (BLOCK // 10, 100)
    access = method.access_with(made.bind(keys=(), shape=shape))
    need = _need(name, BLOCK // 10 * 100, columns=100)
    units = {Access.ROW: ROW_GROUP * 100, Access.MATRIX: BLOCK // 10 * 100}
    assert need.unit == need.least_elements == units.get(access, BLOCK)


def test_access_that_hangs_on_the_settings_sets_the_unit() -> None:
    plain = _expression("model_stock")
    wise = replace(plain, settings=plain.settings.replace("false", "true"))
    reads = [InputNeed(DType.F32, 400 * BLOCK)] * 4
    matrix = OpSize(100 * BLOCK, 1, 100, 2, is_flat=True)
    assert op_need(plain, reads, matrix).unit == BLOCK
    assert op_need(wise, reads, matrix).unit == ROW_GROUP * 100
    assert (expression_passes(plain, matrix.shape), expression_passes(wise, matrix.shape)) == (1, 0)
    vector = OpSize(100 * BLOCK, 1, 100 * BLOCK, 1, is_flat=True)
    assert op_need(wise, reads, vector).unit == BLOCK
    assert expression_passes(wise, vector.shape) == 1


@pytest.mark.parametrize("name", list(methods()))
def test_pieces_are_blocks_or_whole_groups_of_rows(name: str) -> None:
    """However large a tile is, what computing takes does not grow with it."""
    need = _need(name, 1 << 24, columns=1 << 9)
    access = methods()[name].access_with(_expression(name).bind(keys=(), shape=(1 << 15, 1 << 9)))
    assert need.piece == (1 << 24 if access is Access.MATRIX else BLOCK)
    assert need.piece_of(1 << 24) == need.piece
    assert need.piece_of(100) == 100
    assert _need(name, 1 << 24, is_flat=False).piece == 0


def test_a_region_larger_than_the_row_is_counted_in_full() -> None:
    """One projection read out of an interleaved pair brings the other projection's bytes along."""
    reads = [InputNeed(DType.BF16, 4 * BLOCK)]
    need = op_need(_expression("linear"), reads, OpSize(BLOCK, 1, BLOCK, 1, is_flat=False))
    assert need.stored_per_element == 4


def test_a_copy_takes_its_buffers_only() -> None:
    reads = [InputNeed(DType.F8_E4M3, 10 * BLOCK)]
    size = OpSize(10 * BLOCK, 1, 10 * BLOCK, 1, is_flat=True)
    need = op_need(copy_expression(DType.F8_E4M3), reads, size)
    assert need.work_bytes(BLOCK) == 0
    assert need.load_bytes(BLOCK) == BLOCK + READ_MARGIN
    assert tiling(need, 10 * BLOCK, Lane(SMALLEST_BUDGET), passes=0).peak == 3 * MIB
    assert expression_passes(copy_expression(DType.F8_E4M3)) == 0


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[Plan]:
    asked = recipes(make_family(tmp_path_factory.mktemp("memory"), hidden=256))
    return [plan(asked[name]).require() for name in NAMED]


def test_memory_is_projected_from_what_ops_need(plans: list[Plan]) -> None:
    assert sum(map(same_needs, plans)) >= 19 * len(plans)


NAMED = ["linear", "passthrough", "slerp", "ties", "dare_ties", "arcee_fusion", "iso_c"]


@given(above=st.integers(0, 1 << 30), lanes=st.integers(1, 40), index=st.integers(0, len(NAMED) - 1))
@settings(deadline=None, max_examples=30)
def test_every_budget_from_the_least_on_holds_the_peak(
    above: int, lanes: int, index: int, plans: list[Plan]
) -> None:
    made = plans[index]
    budget = project(made, SMALLEST_BUDGET).least_budget + above
    projection = project(made, budget, lanes=lanes)
    assert 1 <= projection.lanes <= lanes
    assert projection.lanes * projection.lane.budget <= budget
    assert 0 < projection.peak <= budget
    fewer = project(made, budget, lanes=1)
    assert projection.lane.budget <= fewer.lane.budget
