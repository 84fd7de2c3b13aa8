"""How long a run would take: what segments of plans take, and the time that follows, against sums by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.plan_maker import Planned, llama, planned
from kits.quantised_models import deepseek_v3

from raymerge.api import plan
from raymerge.errors import OptionError
from raymerge.merge_plan.memory import Lane, expression_passes
from raymerge.planner.simulation import (
    Cluster,
    MethodSpeeds,
    SegmentLoads,
    run_seconds,
    segment_loads,
    simulate_plan,
)

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


# What segments take


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
    base, *others = _models(tmp_path)
    made = planned(_merge("ties", others, base, parameters={"density": 0.5}))
    kept, again = _loads(made), _loads(made, SCARCE)
    passes = max(expression_passes(each) for each in made.plan.expressions)
    assert passes > 0
    assert (again.read_bytes == (1 + passes) * kept.read_bytes).all()
    assert again.write_bytes.tolist() == kept.write_bytes.tolist()
    assert again.thread_seconds.tolist() == kept.thread_seconds.tolist()


def test_a_layer_taken_twice_is_read_once_and_written_to_both_places(tmp_path: Path) -> None:
    model = str(llama(tmp_path / "model"))
    twice = [{"sources": [{"model": model, "layer_range": [0, 3]}]} for _ in range(2)]
    made = planned({"merge_method": "passthrough", "slices": twice})
    loads = _loads(made)
    distinct = sum(row["nbytes"] for row in made.plan["rows"].to_pylist() if row["copy_of"] < 0)
    assert loads.write_bytes.sum() == _data_bytes(made)
    assert loads.read_bytes.sum() == distinct < _data_bytes(made)
    assert loads.thread_seconds.sum() == pytest.approx(distinct * 1e-10)


def test_codes_take_time_beyond_the_method(tmp_path: Path) -> None:
    models = [deepseek_v3(tmp_path / name, seed).root for seed, name in enumerate("ab")]
    recipe = _merge("linear", models)
    found = {}
    for name, figures in {"none": {}, "decoded": {"decoded": 1.0}, "encoded": {"encoded": 1.0}}.items():
        speeds = MethodSpeeds({"linear": 0.0}, 0.0, 0.0, {}, **figures)
        loads = segment_loads(plan({**recipe, "out_format": "same"}).require(), AMPLE, speeds)
        found[name] = loads.thread_seconds.sum()
    assert found["none"] == 0
    assert found["decoded"] == 2 * found["encoded"] > 0
    plain = segment_loads(plan({**recipe, "out_format": "bf16"}).require(), AMPLE, speeds)
    assert plain.thread_seconds.sum() == 0


# The time that follows


def _equal(
    count: int, *, read: float = 400 * MB, write: float = 100 * MB, compute: float = 0.0
) -> SegmentLoads:
    return SegmentLoads(*(np.full(count, each) for each in (read, write, compute)))


def _cluster(**given: Any) -> Cluster:
    return Cluster(**{"overhead": 0.0, "driver": 0.0, "startup": 0.0, "storage": 1e15, "threads": 1, **given})


def test_one_lane_takes_the_sum_of_reading_computing_and_writing() -> None:
    cluster = _cluster(storage=None, read=1e9, write=5e8, lanes=1, overhead=0.25)
    seconds, busy = run_seconds(_equal(8, compute=0.5), cluster)
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
        ({"workers": 50, "threads": 2}, _equal(1000, compute=1.0), 10.0, "computing"),
        ({"workers": 50, "threads": 2, "cores": 1}, _equal(1000, compute=1.0), 20.0, "computing"),
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


# The whole prediction


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
    models = [{"model": str(first)}, {"model": str(second)}]
    recipe = {"merge_method": "slerp", "base_model": str(first), "models": models, "parameters": {"t": 0.5}}
    made = planned(recipe)
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
