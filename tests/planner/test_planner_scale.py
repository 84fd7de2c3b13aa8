"""Many tensors: DeepSeek-V3's true headers stacked within memory; what is alike is made alike, and right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from kits.checkpoint_maker import (
    V3_CONFIG,
    V3_NBYTES,
    V3_NUM_TENSORS,
    deepseek_v3_names,
    deepseek_v3_specs,
    sparse_checkpoint,
)
from kits.huge_maker import HugeSize, huge_tensors

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.merges import build_plan
from raymerge.recipes import recipe_from_mapping

MOST_BYTES = 1_500_000_000
"""Peak memory of a planning process."""

CHILD = """
import json, sys, time
def peak():
    # Not ru_maxrss, which begins with what the parent had.
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
from raymerge.recipes import recipe_from_mapping
from raymerge.planner.merges import build_plan
from raymerge.merge_plan.plan import digest
from raymerge.planner.inputs.sources import open_sources
recipe = recipe_from_mapping(json.loads(sys.argv[1]))
times = [time.perf_counter()]
sources = open_sources(recipe)
times.append(time.perf_counter())
plan = build_plan(recipe, sources, version="0")
times.append(time.perf_counter())
table = plan["dispositions"]
print(json.dumps({
    "open": times[1] - times[0],
    "build": times[2] - times[1],
    "peak": peak(),
    "problems": [str(problem) for problem in plan.problems],
    "dispositions": sorted(
        map(list, zip(table.column("source").to_pylist(), table.column("disposition").to_pylist()))
    ),
    "distinct": len(set(zip(table.column("source").to_pylist(), table.column("name").to_pylist()))),
    "names": plan["tensors"].column("name").to_pylist(),
    "nbytes": sum(plan["tensors"].column("nbytes").to_pylist()),
    "layers": plan.manifest["config"]["num_hidden_layers"],
}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints whose data is a hole."""
    root = tmp_path_factory.mktemp("v3")
    specs = deepseek_v3_specs()
    a, b = (sparse_checkpoint(root / n, specs, V3_CONFIG, names=deepseek_v3_names()) for n in "ab")
    return a, b


def _report(data: dict[str, Any]) -> dict[str, Any]:
    recipe = json.dumps(data, default=str)
    done = subprocess.run([sys.executable, "-c", CHILD, recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    print(f"open {report['open']:.1f} s, build {report['build']:.1f} s, peak {report['peak'] / 1e9:.2f} GB")
    return report


def _counts(report: dict[str, Any]) -> dict[tuple[int, str], int]:
    counts: dict[tuple[int, str], int] = {}
    for source, disposition in report["dispositions"]:
        counts[source, disposition] = counts.get((source, disposition), 0) + 1
    return counts


@pytest.mark.slow
def test_stacking_copies_every_tensor_of_the_layers_taken(models: tuple[Path, Path]) -> None:
    """Layers 0 to 60 of one, then 3 to 60 of the other with its prediction layer behind them."""
    a, b = models
    slices = [
        {"sources": [{"model": a, "layer_range": [0, 61]}]},
        {"sources": [{"model": b, "layer_range": [3, 61]}]},
    ]
    report = _report({"merge_method": "passthrough", "slices": slices})
    assert report["problems"] == []
    assert report["distinct"] == len(report["dispositions"]) == 2 * V3_NUM_TENSORS
    counts = _counts(report)
    assert set(counts) == {(source, kind) for source in (0, 1) for kind in ("copied", "dropped")}
    prediction = 1564
    assert counts[0, "copied"] + counts[0, "dropped"] == V3_NUM_TENSORS
    assert counts[0, "dropped"] == prediction + 2
    assert len(report["names"]) == counts[0, "copied"] + counts[1, "copied"]
    assert V3_NBYTES < report["nbytes"] < 2 * V3_NBYTES
    assert report["layers"] == 61 + 58
    last = [name for name in report["names"] if name.startswith("model.layers.119.")]
    assert len(last) == prediction
    assert sum(name.endswith("_scale_inv") for name in last) == 776
    assert report["peak"] < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["x{}.0.w.weight", "x{}.weight", "model.layers.{}.w.weight", "model.layers.0.mlp.experts.{}.w.weight"],
    ids=["one stack each", "outside layers", "one layer each", "experts"],
)
def test_a_tensor_more_costs_as_many_calls_however_many_there_are(tmp_path: Path, name: str) -> None:
    # The first plan of all calls more, for what is imported on the way.
    _, few, more, most = (_calls(tmp_path / str(number), name, number) for number in (1, 100, 300, 500))
    assert most - more < 1.1 * (more - few)


MOST_CALLS = 170
"""To plan one tensor more of two parents: 370 where each expert is looked at like the first one."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_an_expert_more_costs_few_calls(tmp_path: Path, method: str) -> None:
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    _, few, most = (_calls(tmp_path / str(number), name, number, method=method) for number in (1, 100, 300))
    assert (most - few) / 200 < MOST_CALLS


RECIPES: Mapping[str, dict[str, Any]] = {
    "copies": {"merge_method": "passthrough", "models": [{"model": "a"}]},
    "mean": {
        "merge_method": "linear",
        "parameters": {"weight": 0.5},
        "dtype": "float16",
        "models": [{"model": "a"}, {"model": "b"}],
    },
    "deltas": {
        "merge_method": "dare_ties",
        "parameters": {"weight": 0.5, "density": 0.5},
        "base_model": "a",
        "models": [{"model": "b"}, {"model": "c"}],
    },
    "one of several": {
        "merge_method": "linear",
        "parameters": {"weight": 0.5},
        "models": [{"model": "a"}, {"model": "a"}, {"model": "c"}],
    },
    "by layer": {
        "merge_method": "slerp",
        "base_model": "b",
        "models": [{"model": "a"}],
        "parameters": {"t": [0, 1]},
    },
    "by depth": {
        "merge_method": "lines",
        "parameters": {"weight": 0.5},
        "base_model": "a",
        "models": [{"model": "b"}],
    },
    "by role": {
        "merge_method": "linear",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"weight": [{"role": "attention", "value": 0.3}, {"value": 0.7}]},
    },
    "by role and layer": {
        "merge_method": "linear",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"weight": [{"role": "norm", "layers": "1..2", "value": 0.3}, {"value": 0.7}]},
    },
    "rules": {
        "merge_method": "linear",
        "parameters": {"weight": 0.5},
        "models": [{"model": "a"}, {"model": "b"}],
        "methods": [{"layers": [1], "role": "expert", "merge_method": "passthrough", "sources": ["b"]}],
    },
    "filters": {
        "merge_method": "linear",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"weight": [{"filter": "experts.1.", "value": 0.3}, {"value": 0.7}]},
    },
    "layers twice": {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "a", "layer_range": [0, 2]}]},
            {"sources": [{"model": "c", "layer_range": [1, 2]}]},
            {"sources": [{"model": "a", "layer_range": [1, 3]}]},
        ],
    },
    "absent": {
        "merge_method": "linear",
        "parameters": {"weight": 0.5},
        "base_model": "a",
        "missing_tensors": "copy_base",
        "models": [{"model": "a"}, {"model": "lacking"}],
    },
}
"""Recipes over models of three layers, two of them with experts."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models ``a``, ``b``, ``c``, and ``lacking``, which has no last expert in its last layer."""
    root, size = tmp_path_factory.mktemp("mixtures"), HugeSize(layers=3, experts=4, width=32)
    specs = list(huge_tensors(size))
    lacking = [spec for spec in specs if "layers.2.mlp.experts.3." not in spec.name]
    for name, own in {"a": specs, "b": specs[::-1], "c": specs, "lacking": lacking}.items():
        sparse_checkpoint(root / name, [own], size.config)
    return root


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_tensors_that_are_made_like_others_are_made_as_if_alone(
    mixtures: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mixtures)
    asked = recipe_from_mapping(recipe)
    alike = build_plan(asked, open_sources(asked), version="0").require()
    monkeypatch.setattr("raymerge.planner.outputs.outputs._AlikeTensors.stored", lambda *_: None)
    alone = build_plan(asked, open_sources(asked), version="0")
    assert alike.tables == alone.tables
    assert alike.digest == alone.digest


def _calls(root: Path, name: str, number: int, *, method: str = "passthrough") -> int:
    """Calls of Python functions, steps of generators counted, to plan so many tensors, copied or merged."""
    specs = [TensorSpec(name.format(each), DType.BF16, (2, 3)) for each in range(number)]
    models = [sparse_checkpoint(root / each, [specs], {"model_type": "any"}) for each in "ab"]
    data: dict[str, Any] = {"merge_method": method, "models": [{"model": str(each)} for each in models]}
    if method == "passthrough":
        data["models"].pop()
    else:
        data["parameters"] = {"weight": 0.5}
    if method == "ties":
        data["base_model"] = data["models"].pop(0)["model"]
    recipe = recipe_from_mapping(data)
    count = 0

    def see(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        build_plan(recipe, open_sources(recipe), version="0").require()
    finally:
        sys.setprofile(None)
    return count
