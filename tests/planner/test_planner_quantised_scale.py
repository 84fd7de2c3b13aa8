"""DeepSeek-V3 and Kimi-K2-Thinking in their true headers, two parents each: planned, nothing forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
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
from kits.quantised_headers import KIMI_CONFIG, KIMI_NUM_TENSORS, kimi_k2_thinking_specs

from raymerge.checkpoints.header import TensorSpec

pytestmark = pytest.mark.slow

MOST_BYTES = 2_000_000_000
"""Peak memory of a planning process."""
MOST_SECONDS = 60.0
"""Of a core, for a plan of up to 416,430 stored tensors; wall time hangs on who else is there."""
MOST_WORKER_BYTES = 4 << 30
"""The largest budget that these plans may need of a worker."""

CHILD = """
import json, sys, time
def peak():
    # Not ru_maxrss, which begins with what the parent had.
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
from raymerge.api import plan
from raymerge.merge_plan.memory import project
began = time.perf_counter(), time.process_time()
plan = plan(json.loads(sys.argv[1]))
seconds, busy = time.perf_counter() - began[0], time.process_time() - began[1]
worker = project(plan, 16 << 30)
table, tensors = plan["dispositions"], plan["tensors"]
rows = list(zip(*(table.column(key).to_pylist() for key in ("source", "name", "disposition"))))
print(json.dumps({
    "seconds": seconds,
    "busy": busy,
    "peak": peak(),
    "problems": [str(problem) for problem in plan.problems],
    "dispositions": [(source, disposition) for source, _, disposition in rows],
    "distinct": len({(source, name) for source, name, _ in rows}),
    "tensors": list(zip(*(tensors.column(key).to_pylist() for key in ("name", "dtype", "shape")))),
    "nbytes": sum(tensors.column("nbytes").to_pylist()),
    "segments": len(plan["segments"]),
    "worker": worker.peak,
    "least": worker.least_budget,
    "table": plan.manifest["config"]["quantization_config"],
}))
"""


def _report(name: str, *models: Path) -> dict[str, Any]:
    """What becomes of a linear merge, planned in a process of its own."""
    entries = [{"model": str(model), "parameters": {"weight": 0.5}} for model in models]
    recipe = json.dumps({"merge_method": "linear", "models": entries})
    done = subprocess.run([sys.executable, "-c", CHILD, recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    print(
        f"{name}: planned in {report['seconds']:.1f} s ({report['busy']:.1f} s of a core), "
        f"peak {report['peak'] / 1e9:.2f} GB, "
        f"{report['segments']} segments; a worker needs {report['least'] / 2**20:.0f} MiB at least, "
        f"and takes {report['worker'] / 2**30:.2f} of 16 GiB"
    )
    return report


def _check(report: dict[str, Any], specs: Sequence[Sequence[TensorSpec]], config: Mapping[str, Any]) -> None:
    """Everything that is stored has a fate in each parent, and is in the output as it was."""
    stored = {spec.name: (spec.dtype.value, list(spec.shape)) for file in specs for spec in file}
    assert report["problems"] == []
    assert report["distinct"] == len(report["dispositions"]) == 2 * len(stored)
    assert {name: (dtype, shape) for name, dtype, shape in report["tensors"]} == stored
    merged = {(source, "merged"): len(stored) for source in (0, 1)}
    assert Counter(map(tuple, report["dispositions"])) == merged
    assert report["nbytes"] == sum(spec.nbytes for file in specs for spec in file)
    assert report["table"] == config["quantization_config"]
    assert report["busy"] < MOST_SECONDS
    assert report["peak"] < MOST_BYTES
    assert 0 < report["least"] < MOST_WORKER_BYTES
    assert report["worker"] >= report["least"]


def test_two_deepseek_v3_are_planned_whole(tmp_path: Path) -> None:
    specs = deepseek_v3_specs()
    models = [sparse_checkpoint(tmp_path / n, specs, V3_CONFIG, names=deepseek_v3_names()) for n in "ab"]
    report = _report("DeepSeek-V3", *models)
    assert len(report["tensors"]) == V3_NUM_TENSORS
    assert report["nbytes"] == V3_NBYTES
    _check(report, specs, V3_CONFIG)


def test_two_kimi_k2_thinking_are_planned_whole(tmp_path: Path) -> None:
    specs = kimi_k2_thinking_specs()
    models = [sparse_checkpoint(tmp_path / name, specs, KIMI_CONFIG) for name in "ab"]
    report = _report("Kimi-K2-Thinking", *models)
    assert len(report["tensors"]) == KIMI_NUM_TENSORS
    _check(report, specs, KIMI_CONFIG)
