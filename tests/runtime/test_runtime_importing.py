"""Imports of processes of raymerge's own: the garbage collector stays out of their way."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kits.checkpoint_maker import tiny_llama
from kits.merges import mean_of, merge_here

from raymerge import deferred
from raymerge.runtime.workers import importing
from raymerge.runtime.workers.importing import heavy_imports

_WORKER = """
import gc, json, sys
from raymerge.runtime.workers.worker import MergeWorker
loaded = [name for name in ("torch", "numba") if name in sys.modules]
before = gc.get_stats()[2]["collections"]
worker = MergeWorker("worker-0", "cpu")
full = gc.get_stats()[2]["collections"] - before
print(json.dumps([loaded, full, gc.isenabled(), gc.get_freeze_count(), worker.ready()["numerics"]["device"]]))
"""


def _last_line(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_worker_imports_what_it_needs_when_it_is_made() -> None:
    loaded, full, is_enabled, frozen, device = _last_line(_WORKER)
    assert loaded == []
    assert full == 0
    assert is_enabled
    assert frozen > 100_000
    assert device == "cpu"


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_merge_leaves_the_collector_what_was_frozen_before(is_frozen: bool, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "a", seed=1)
    merge_here(mean_of(tmp_path / "a"), tmp_path / "once")
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        merge_here(mean_of(tmp_path / "a"), tmp_path / "out")
        # What nobody refers to any more is gone.
        assert gc.get_freeze_count() == pytest.approx(before, rel=0.01)
    finally:
        gc.freeze()


_WITHOUT_TORCH = """
import sys
class Refused:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            raise ImportError("a driver loads torch")


sys.meta_path.insert(0, Refused)
import raymerge.runtime.workers.ray_pool
from raymerge.cli.main import main
main()
"""


_TORCH_WATCHED = """
import gc, signal, sys
class Watch:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            sys.meta_path.remove(Watch)
            is_ours = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            open("loaded", "w").write(f"{gc.isenabled()} {is_ours}")


sys.meta_path.insert(0, Watch)
from raymerge.cli.main import main
main()
"""


@pytest.mark.slow
def test_nothing_interrupts_torch_while_a_merge_in_this_process_loads_it(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "a", seed=0)
    words = ["submit", _recipe(tmp_path, ["a"]), "--inline"]
    command = [sys.executable, "-c", _TORCH_WATCHED, *words]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "loaded").read_text() == "False True"


def _recipe(root: Path, names: Sequence[str]) -> str:
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
    recipe = {"merge_method": "ties", "base_model": "a", "models": models, "dtype": "bfloat16"}
    (root / "recipe.yml").write_text(yaml.safe_dump(recipe))
    return "recipe.yml"


def test_only_own_modules_get_torch_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = vars(deferred)["_Torch"]()
    own, foreign = SimpleNamespace(torch=stand_in), SimpleNamespace(torch=stand_in)
    monkeypatch.setitem(sys.modules, "raymerge.own", own)
    monkeypatch.setitem(sys.modules, "raymerge_foreign", foreign)
    assert stand_in.float32 is sys.modules["torch"].float32
    assert own.torch is sys.modules["torch"]
    assert foreign.torch is stand_in


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "recipe.yml"],
        pytest.param(["submit", "recipe.yml", "--workers", "1"], marks=(pytest.mark.slow, pytest.mark.ray)),
    ],
    ids=["plan", "driver"],
)
def test_plans_and_drivers_do_without_torch(words: list[str], tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        tiny_llama(tmp_path / name, seed=seed)
    _recipe(tmp_path, "ab")
    command = [sys.executable, "-c", _WITHOUT_TORCH, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr
    assert "tensors" in done.stdout


@pytest.fixture
def _heavy_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_HEAVY", "raymerge_absent")
    # What this process has frozen would stay so.
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.mark.usefixtures("_heavy_absent")
def test_the_collector_is_away_for_as_long_as_the_imports_take() -> None:
    with heavy_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), heavy_imports():
        import raymerge_absent  # noqa: F401
    assert gc.isenabled()


@pytest.mark.usefixtures("_heavy_absent")
def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with heavy_imports():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_ctrl_c_waits_for_the_end_of_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_HEAVY", "no such module")
    before, steps = signal.getsignal(signal.SIGINT), []

    def load() -> None:
        with heavy_imports():
            signal.raise_signal(signal.SIGINT)
            steps.append("ended")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert steps == ["ended"]
    assert signal.getsignal(signal.SIGINT) is before
    assert gc.isenabled()
