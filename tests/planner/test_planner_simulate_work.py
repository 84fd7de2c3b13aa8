"""What a simulated run is told of the real plan: bytes, passes, copies, places and the speed of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.plan_maker import Planned, llama, planned
from kits.quantised_models import deepseek_v3

from raymerge.api import plan
from raymerge.errors import OptionError
from raymerge.merge_plan.memory import Lane, expression_passes
from raymerge.methods import methods
from raymerge.planner.simulate_speeds import MethodSpeeds, measured_speeds
from raymerge.planner.simulate_work import SegmentLoads, segment_loads, stays_resident
from raymerge.planner.simulation import Cluster, simulate_plan

SPEEDS = MethodSpeeds({"linear": 1e-9, "ties": 4e-9}, 2e-8, 1e-10, {})
AMPLE = Lane(1 << 30)
SCARCE = Lane(0)


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
    assert len(loads) == len(made.plan["segments"])
    assert loads.cost.tolist() == made.plan["segments"].column("cost").to_pylist()
    assert (loads.read_bytes.sum(), loads.write_bytes.sum()) == (2 * size, size)
    assert loads.source_bytes.sum() == 2 * size
    # Two bytes an element.
    assert loads.thread_seconds.sum() == pytest.approx(size * 1e-9)
    assert (loads.copy_seconds == 0).all()
    assert loads.num_tensors == len(made.names())
    assert (loads.cost == loads.read_bytes + loads.write_bytes).all()


def test_what_does_not_stay_in_memory_is_read_again_for_statistics(tmp_path: Path) -> None:
    base, *others = _models(tmp_path)
    density = {"parameters": {"density": 0.5}}
    made = planned(_merge("ties", others, base, **density))
    kept, again = _loads(made), _loads(made, SCARCE)
    passes = max(expression_passes(each) for each in made.plan.expressions)
    assert passes > 0
    assert (again.read_bytes == (1 + passes) * kept.read_bytes).all()
    for name in ("write_bytes", "source_bytes", "thread_seconds", "cost"):
        assert getattr(again, name).tolist() == getattr(kept, name).tolist()


def test_elementwise_methods_read_once_in_any_memory(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    assert _loads(made, SCARCE).read_bytes.tolist() == _loads(made).read_bytes.tolist()


def test_copies_take_the_time_of_copies(tmp_path: Path) -> None:
    model = str(llama(tmp_path / "model"))
    sources = [{"model": model, "layer_range": [0, 2]}]
    made = planned({"merge_method": "passthrough", "slices": [{"sources": sources}]})
    loads, size = _loads(made), _data_bytes(made)
    assert loads.read_bytes.sum() == loads.write_bytes.sum() == size
    assert loads.source_bytes.sum() == 0
    assert loads.thread_seconds.sum() == loads.copy_seconds.sum() == pytest.approx(size * 1e-10)
    assert loads.guessed == ()
    assert loads.compute_seconds(1.0).tolist() == loads.copy_seconds.tolist()


def test_a_layer_taken_twice_is_read_once_and_written_to_both_places(tmp_path: Path) -> None:
    model = str(llama(tmp_path / "model"))
    twice = [{"sources": [{"model": model, "layer_range": [0, 3]}]} for _ in range(2)]
    made = planned({"merge_method": "passthrough", "slices": twice})
    loads = _loads(made)
    distinct = sum(row["nbytes"] for row in made.plan["rows"].to_pylist() if row["copy_of"] < 0)
    assert loads.write_bytes.sum() == _data_bytes(made)
    assert loads.read_bytes.sum() == distinct < _data_bytes(made)


def test_every_tensor_takes_time_beyond_its_elements(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    speeds = MethodSpeeds({"linear": 1e-9}, 0.0, 0.0, {"linear": 1e-3, "ties": 1.0})
    loads, size = segment_loads(made.plan.require(), AMPLE, speeds), _data_bytes(made)
    assert loads.thread_seconds.sum() == pytest.approx(size * 1e-9 + len(made.names()) * 1e-3)
    assert speeds.per_tensor("slerp") == 0


def test_codes_take_time_beyond_the_method(tmp_path: Path) -> None:
    models = [deepseek_v3(tmp_path / name, seed).root for seed, name in enumerate("ab")]
    entries = [{"model": str(each), "parameters": {"weight": 0.5}} for each in models]
    recipe = {"merge_method": "linear", "models": entries}
    found = {}
    for name, figures in {"none": {}, "decoded": {"decoded": 1.0}, "encoded": {"encoded": 1.0}}.items():
        speeds = MethodSpeeds({"linear": 0.0}, 0.0, 0.0, {}, **figures)
        loads = segment_loads(plan({**recipe, "out_format": "same"}).require(), AMPLE, speeds)
        found[name] = loads.thread_seconds.sum()
    assert found["none"] == 0
    assert found["decoded"] == 2 * found["encoded"] > 0
    plain = segment_loads(plan({**recipe, "out_format": "bf16"}).require(), AMPLE, speeds)
    assert plain.thread_seconds.sum() == 0


def test_a_given_speed_counts_bytes_of_sources(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    loads = _loads(made)
    assert loads.compute_seconds(1e6).sum() == pytest.approx(loads.source_bytes.sum() / 1e6)
    assert loads.compute_seconds(None).tolist() == loads.thread_seconds.tolist()


def test_a_method_without_a_measured_speed_is_guessed_and_named(tmp_path: Path) -> None:
    first, second = _models(tmp_path, 2)
    models = [{"model": str(first)}, {"model": str(second)}]
    recipe = {"merge_method": "slerp", "base_model": str(first), "models": models, "parameters": {"t": 0.5}}
    made = planned(recipe)
    loads = _loads(made)
    assert loads.guessed == ("slerp",)
    assert loads.thread_seconds.sum() == pytest.approx(_data_bytes(made) * 2e-8)
    cluster = Cluster(storage=1e9)
    assert simulate_plan(made.plan, cluster, 1 << 30, speeds=SPEEDS).guessed == ("slerp",)
    told = Cluster(storage=1e9, compute=1e9)
    assert simulate_plan(made.plan, told, 1 << 30, speeds=SPEEDS).guessed == ()


def test_more_memory_keeps_more() -> None:
    kept = np.array([0, 1 << 20, 1 << 30])
    counts = [int(stays_resident(kept, Lane(budget << 20)).sum()) for budget in (0, 8, 64, 4096)]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_a_plan_is_simulated_with_its_own_memory_and_lanes(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    simulation = simulate_plan(made.plan, Cluster(storage=1e9, threads=2, lanes=4), 1 << 30)
    assert simulation.cluster.memory == 1 << 30
    # No more lanes than there is work for.
    assert simulation.cluster.lanes == min(4, simulation.segments)
    assert simulation.segments == len(made.plan["segments"])
    assert simulation.read_bytes == 2 * _data_bytes(made)
    assert simulation.written_bytes == _data_bytes(made)


def test_too_little_memory_is_refused_with_the_least_that_works(tmp_path: Path) -> None:
    made = planned(_merge("linear", _models(tmp_path, 2)))
    with pytest.raises(OptionError, match="smallest budget that works") as caught:
        simulate_plan(made.plan, Cluster(storage=1e9, memory=1 << 10), 1 << 30)
    assert caught.value.problems[0].where == "--simulate memory"


def test_the_figures_that_come_along_are_of_methods_that_there_are() -> None:
    speeds = measured_speeds()
    assert set(speeds.by_method) <= set(methods())
    assert all(0 < value < 1e-3 for value in speeds.by_method.values())
    assert set(speeds.by_tensor) <= set(speeds.by_method)
    assert all(0 <= value < 0.1 for value in speeds.by_tensor.values())
    assert 0 < speeds.copied_byte < speeds.other < 1e-6
    assert speeds.per_element("no such method") == speeds.other
