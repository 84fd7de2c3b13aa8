"""Units of router rows: how far they say they are, and which files they leave."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kits.gate_stages import CPU, LAYERS, reading_base, stage_of, three_experts

from raymerge.errors import IncompleteError
from raymerge.execute.threads import one_thread
from raymerge.planner.inputs.sources import Source, Stage
from raymerge.stages.router import gate_work
from raymerge.stages.router.prompts import tokenized
from raymerge.stages.router.streamed_model import StreamedModel

SEVERAL = 20
"""Tokens of a unit, where a stage is to have several."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A model that reads."""
    return reading_base(tmp_path_factory.mktemp("models") / "base")


def _work(base: Source, mode: str) -> Any:
    return gate_work(stage_of(base, mode, three_experts()))


@pytest.mark.parametrize("mode", ["hidden", "ridge", "cheap_embed", "random"])
def test_it_tells_after_each_layer_what_it_has_read(tmp_path: Path, base: Source, mode: str) -> None:
    work, told = _work(base, mode), list[int]()
    with one_thread():
        read, _ = work.unit(0, staging=tmp_path, device=CPU, budget=1 << 30, tell=told.append)
    assert len(told) == LAYERS
    assert told == sorted(told)
    assert told[-1] == read
    if mode in ("hidden", "ridge"):
        assert 0 < told[0] < told[1] < told[2]


@pytest.mark.parametrize("mode", ["hidden", "random"])
def test_it_ends_when_it_is_told_to(tmp_path: Path, base: Source, mode: str) -> None:
    calls: list[int] = []

    def stop(nbytes: int) -> None:
        calls.append(nbytes)
        raise IncompleteError("stopped at once.")

    with pytest.raises(IncompleteError):
        _work(base, mode).unit(0, staging=tmp_path, device=CPU, budget=1 << 30, tell=stop)
    assert len(calls) == 1
    assert not list(tmp_path.glob("spill*"))


@pytest.mark.parametrize("unit_tokens", [SEVERAL, 1 << 16])
@pytest.mark.parametrize("mode", ["ridge", "cheap_embed"])
def test_each_unit_leaves_its_own_whole_files(
    tmp_path: Path, base: Source, monkeypatch: pytest.MonkeyPatch, *, mode: str, unit_tokens: int
) -> None:
    monkeypatch.setattr("raymerge.stages.router.prompts.UNIT_TOKENS", unit_tokens)
    work = _work(base, mode)
    seen: set[str] = set()
    for number in range(work.num_units):
        with one_thread():
            work.unit(number, staging=tmp_path, device=CPU, budget=1 << 30, tell=lambda _: None)
        left = work.files(number)
        assert set(left.values()) == {()}
        assert not seen & set(left)
        seen |= set(left)
        assert {path.name for path in tmp_path.iterdir()} == seen
    assert (work.num_units > 2) == (mode == "ridge" and unit_tokens == SEVERAL)
    before = {name: (tmp_path / name).read_bytes() for name in seen}
    with one_thread():
        work.conclude(tmp_path)
    assert before == {name: (tmp_path / name).read_bytes() for name in seen}


# What is left, and what is kept


def test_files_of_attempts_that_were_killed_are_cleared_away(tmp_path: Path, base: Source) -> None:
    work = _work(base, "hidden")
    ours, other = tmp_path / "spill-0-killed", tmp_path / "spill-10-working"
    for place in (ours, other):
        place.mkdir()
        (place / "hidden_states.bin").write_bytes(b"states")
    seen: list[list[str]] = []

    def look(_: int) -> None:
        seen.append(sorted(path.name for path in tmp_path.glob("spill-*")))

    with one_thread():
        work.unit(0, staging=tmp_path, device=CPU, budget=0, tell=look)
    assert not ours.exists()
    assert other.exists(), "another unit's"
    assert all(len(names) == 2 and names[0].startswith("spill-0-") for names in seen)
    assert [path.name for path in tmp_path.glob("spill-*")] == [other.name]


def test_an_attempt_that_was_given_up_does_no_harm(tmp_path: Path, base: Source) -> None:
    """It goes on after the next one began, with a file of its own that has no name any more."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "staging").mkdir()
    once: list[int] = []

    def begin_again(nbytes: int) -> None:
        if not once:
            once.append(nbytes)
            _work(base, "ridge").unit(0, staging=tmp_path / "staging", device=CPU, budget=0, tell=_silent)

    with one_thread():
        _work(base, "ridge").unit(0, staging=tmp_path / "plain", device=CPU, budget=0, tell=_silent)
        _work(base, "ridge").unit(0, staging=tmp_path / "staging", device=CPU, budget=0, tell=begin_again)
    found, wanted = (_bytes(tmp_path / name) for name in ("staging", "plain"))
    assert found == wanted


def _silent(_: int) -> None:
    """Nobody listens."""


def _bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_base_and_prompts_are_looked_at_once(
    tmp_path: Path, base: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[StreamedModel] = []
    readings: list[Stage] = []
    build, read = StreamedModel.__init__, tokenized

    def built(self: StreamedModel, *args: Any) -> None:
        models.append(self)
        build(self, *args)

    def counted(spec: Any) -> Any:
        readings.append(spec)
        return read(spec)

    monkeypatch.setattr(StreamedModel, "__init__", built)
    monkeypatch.setattr("raymerge.stages.router.streamed.tokenized", counted)
    for mode, num_models in (("ridge", 1), ("cheap_embed", 0)):
        models.clear()
        readings.clear()
        work = _work(base, mode)
        size = len(pickle.dumps(work))
        work.check()
        budget = work.least_budget()
        assert work.num_units == len(work.costs())
        with one_thread():
            work.unit(0, staging=tmp_path, device=CPU, budget=budget, tell=_silent)
            work.conclude(tmp_path)
        assert (len(models), len(readings)) == (num_models, 1)
        assert len(pickle.dumps(work)) == size, "workers find out for themselves"
        assert pickle.loads(pickle.dumps(work)).least_budget() == budget


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from kits.gate_stages import CPU, reading_base, stage_of, three_experts
from raymerge.device_numerics import return_free_memory
from raymerge.stages.router import gate_work
from raymerge.stages.router import prompts as readings

def status(word):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))

def grown(act):
    return_free_memory()
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    act()
    return status("VmHWM") - before

def silent(_):
    pass

torch.set_num_threads(1)
readings.UNIT_TOKENS = int(sys.argv[2])
found = []
for width in (32, 1024):
    # The first is to have everything imported.
    root = Path(sys.argv[1]) / str(width)
    base = reading_base(root / "base", layers=1, width=width)
    work = gate_work(stage_of(base, "ridge", three_experts(), layers=(0,), width=width))
    work.check()
    least = work.least_budget()
    units = [
        grown(lambda: work.unit(number, staging=root, device=CPU, budget=least, tell=silent))
        for number in range(work.num_units)
    ]
    found = [least, max(units), grown(lambda: work.conclude(root)), work._own_nbytes()]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
@pytest.mark.parametrize("unit_tokens", [SEVERAL, 1 << 16])
def test_neither_units_nor_the_conclusion_take_more_than_is_said(tmp_path: Path, unit_tokens: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(unit_tokens)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    least, unit, conclusion, sums = json.loads(ran.stdout.splitlines()[-1])
    assert unit <= least + 4 * MIB
    assert conclusion <= sums + 4 * MIB
    assert sums < least < 3 * sums
