"""The process's memory: when the allocator is asked, and that what is promised is kept by real threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.merge_cases import make_family, recipes
from kits.segment_bench import make_bench

from raymerge import allocator
from raymerge.errors import IncompleteError
from raymerge.execute.compute import PartComputation
from raymerge.execute.heap import HeapWatch

MIB = 1 << 20
BUDGET = 24 * MIB
BIG, NUM_BIG = 20 * MIB, 4
"""Elements of a big tensor, and how many there are, so that two are in work at once. Each is 40 MiB in both
sources and the output, all together 20 times the budget."""


class _Process:
    """A process whose memory is what the test says, of which releasing frees some."""

    def __init__(self, resident: int, *, free: int) -> None:
        self.resident, self.free, self.released = resident, free, 0

    def measure(self) -> int:
        return self.resident

    def release(self) -> None:
        self.released += 1
        self.resident -= self.free


def _watch(process: _Process, limit: int = 100) -> HeapWatch:
    return HeapWatch(limit, measure=process.measure, release=process.release)


def test_free_memory_is_given_back_above_the_limit_only() -> None:
    process = _Process(1000, free=80)
    watch = _watch(process)
    process.resident = 1100
    watch.check()
    assert process.released == 0
    process.resident = 1101
    watch.check()
    assert (process.released, process.resident) == (1, 1021)


def test_what_does_not_go_away_is_not_asked_for_again() -> None:
    process = _Process(1000, free=0)
    watch = _watch(process)
    process.resident = 5000
    for _ in range(3):
        watch.check()
    assert process.released == 1
    process.resident = 5051
    watch.check()
    assert process.released == 2


def test_without_glibc_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    measured = iter([0, 500, 500])
    HeapWatch(100, measure=lambda: next(measured)).check()


def test_the_system_is_asked_by_default() -> None:
    HeapWatch(-1).check()


def test_a_gpu_without_room_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.\nGPU 0 has ...")

    bench = make_bench(recipes(make_family(tmp_path / "models"))["linear"], tmp_path / "staging")
    monkeypatch.setattr(PartComputation, "apply", full)
    said = (
        r"the GPU of bench has too little memory: CUDA out of memory\. .* 16777216 bytes.* smaller --memory"
    )
    with pytest.raises(IncompleteError, match=said):
        bench.runner.run(0)


_MEASURED = """
import json, sys
from pathlib import Path
from raymerge.api import plan, submit
from raymerge.runtime.budget import fit_budget
from raymerge.runtime.options import RunOptions

job = json.load(sys.stdin)
root = Path(job["root"])
options = RunOptions(inline=True, device="cpu", memory=job["budget"], replace=True)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

submit(job["small"], root / "idle", options)
projected = fit_budget(plan(job["big"]), options).peak
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
submit(job["big"], root / "out", options)
print(json.dumps({"projected": projected, "measured": status("VmHWM") - before}))
"""


def _model(root: Path, num_elements: int, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(num_elements // 64, 64, generator=generator).bfloat16()
    tensors = {f"model.big{number}.weight": big.roll(number, 0) for number in range(NUM_BIG)}
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    return write_checkpoint(root, tensors, {"architectures": ["Odd"], "model_type": "odd"})


def _recipe(method: str, base: Path, tune: Path) -> dict[str, Any]:
    models = [{"model": str(tune), "parameters": {"weight": 0.5}}]
    recipe: dict[str, Any] = {"merge_method": method, "models": models}
    if method == "linear":
        return {**recipe, "models": [{**models[0], "model": str(each)} for each in (base, tune)]}
    if method == "slerp":
        models = [{"model": str(base)}, {"model": str(tune)}]
        return {**recipe, "models": models, "base_model": str(base), "parameters": {"t": 0.5}}
    return {**recipe, "base_model": str(base), "parameters": {"density": 0.5}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("pairs")
    return {
        name: (_model(root / f"{name}-base", size, 1), _model(root / f"{name}-tune", size, 2))
        for name, size in (("small", MIB), ("big", BIG))
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is asked of Linux")
@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "dare_ties"])
def test_a_process_grows_by_no_more_than_was_projected(
    method: str, pairs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    job = {name: _recipe(method, *pair) for name, pair in pairs.items()}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED],
        input=json.dumps({**job, "root": str(tmp_path), "budget": BUDGET}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(
        f"{method}: {found['projected'] / MIB:.0f} MiB projected, {found['measured'] / MIB:.0f} MiB measured"
    )
    assert 0 < found["projected"] <= BUDGET
    assert found["measured"] <= 1.3 * found["projected"] + 24 * MIB, found
