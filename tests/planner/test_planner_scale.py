"""DeepSeek-V3's true headers, stacked: 183,982 tensors planned within memory, none forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
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

from raymerge.checkpoints.layout import TensorSpec
from raymerge.dtypes import DType
from raymerge.planner.build import build_plan
from raymerge.planner.sources import open_sources
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
from raymerge.planner.build import build_plan
from raymerge.planner.plan import digest
from raymerge.planner.sources import open_sources
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


@pytest.mark.parametrize(
    "name",
    ["x{}.0.w.weight", "x{}.weight", "model.layers.{}.w.weight", "model.layers.0.mlp.experts.{}.w.weight"],
    ids=["one stack each", "outside layers", "one layer each", "experts"],
)
def test_a_tensor_more_costs_as_many_calls_however_many_there_are(tmp_path: Path, name: str) -> None:
    # The first plan of all calls more, for what is imported on the way.
    _, few, more, most = (_calls(tmp_path / str(number), name, number) for number in (1, 100, 300, 500))
    assert most - more < 1.1 * (more - few)


def _calls(root: Path, name: str, number: int) -> int:
    """Calls of Python functions, steps of generators counted, to plan a copy of so many tensors."""
    specs = [TensorSpec(name.format(each), DType.BF16, (2, 3)) for each in range(number)]
    sparse_checkpoint(root, [specs], {"model_type": "any"})
    recipe = recipe_from_mapping({"merge_method": "passthrough", "models": [{"model": str(root)}]})
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
