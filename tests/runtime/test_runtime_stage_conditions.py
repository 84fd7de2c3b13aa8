"""What stages and merges were begun under, and what is done with a result that something wrote to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from kits import stage_maker
from kits.checkpoint_maker import tiny_llama
from kits.merge_cases import INLINE, digests
from kits.stage_maker import UNITS, run_chain, staged

from raymerge.api import plan_for
from raymerge.device_numerics import kernels_of
from raymerge.errors import IncompleteError, OptionError, TargetError
from raymerge.events import Event, SegmentDone, StageKept, StageStarted, Started, UnitDone
from raymerge.options import RunOptions
from raymerge.planner.inputs.source import RESULT_FILE
from raymerge.publish.conditions import agree, check_agreement
from raymerge.publish.staging import is_untouched
from raymerge.runtime.driver.chained_merges import steps_directory
from raymerge.runtime.driver.run import InlinePool
from raymerge.runtime.driver.stage_run import is_whole, result_digest, stage_record
from raymerge.runtime.workers.ray_pool import RayPool
from raymerge.runtime.workers.worker import MergeWorker

KEEP = RunOptions(inline=True, keep_intermediates=True)
AGAIN = RunOptions(inline=True, keep_intermediates=True, replace=True)
TWO = RunOptions(workers=2, memory=16 << 20)
ELSEWHERE = {"device": "cuda", "torch": "another"}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """The mean of two models, of which the first has a stage."""
    for seed, name in enumerate(("one", "two")):
        tiny_llama(tmp_path / "models" / name, seed, hidden=32, layers=1)
    models = [{"model": str(tmp_path / "models" / name)} for name in ("one", "two")]
    return {"merge_method": "linear", "models": [{**e, "parameters": {"weight": 0.5}} for e in models]}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where the result goes, alone in its directory."""
    (tmp_path / "outs").mkdir()
    return tmp_path / "outs" / "out"


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, another version of transformers is installed."""

    def install() -> None:
        monkeypatch.setattr("raymerge.runtime.driver.run.kernels_of", lambda _: {"transformers": "99"})

    return install


def _of(events: list[Event], *kinds: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kinds)]


def _run(
    recipe: Any, output: Path, options: RunOptions = KEEP, on_event: Any = None, **settings: Any
) -> list[Event]:
    events: list[Event] = []

    def take(event: Event) -> None:
        events.append(event)
        if on_event is not None:
            on_event(event)

    run_chain(staged(recipe, output), output, options, on_event=take, **settings)
    return events


def _break_off(recipe: Any, output: Path, **settings: Any) -> None:
    """A run that ends within the stage, with two units done."""
    with pytest.raises(IncompleteError):
        _run(recipe, output, fails_with=OSError(5, "once"), **settings)


def _break_off_merge(recipe: Any, output: Path) -> None:
    """A run that ends within the merge, with a segment done."""

    def end(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise IncompleteError("as after kill -9")

    with pytest.raises(IncompleteError):
        _run(recipe, output, on_event=end)


def _result(output: Path) -> Path:
    return steps_directory(output) / "router-rows"


def _staging(output: Path) -> Path:
    (found,) = steps_directory(output).glob(".router-rows.raymerge-*")
    return found


# What a stage is made under


def test_rows_depend_on_what_computes_layers_and_products() -> None:
    pool = InlinePool("cpu")
    assert kernels_of(torch.device("cpu")) == {
        "transformers": version("transformers"),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    assert pool.stage_numerics == {**pool.numerics, **kernels_of(torch.device("cpu"))}
    assert set(pool.numerics) == {"device", "torch", "float32"}


def test_the_record_says_what_a_result_was_made_under(recipe: dict[str, Any], output: Path) -> None:
    _run(recipe, output)
    assert stage_record(_result(output))["numerics"] == InlinePool("cpu").stage_numerics


def test_units_of_another_version_are_not_gone_on_with(
    recipe: dict[str, Any], output: Path, other_kernels: Callable[[], None]
) -> None:
    _break_off(recipe, output)
    other_kernels()
    with pytest.raises(TargetError, match=r"numerics > transformers was .*, is \"99\".*--replace") as caught:
        _run(recipe, output)
    assert caught.value.exit_code == 2
    assert len(list(_staging(output).glob("piece-*.bin"))) == 2
    before = _staging(output).name
    with pytest.raises(IncompleteError):
        _run(recipe, output, AGAIN, fails_with=OSError(5, "once"))
    # Workers that are left from before write by that name.
    assert _staging(output).name != before
    (started,) = _of(_run(recipe, output, AGAIN), StageStarted)
    assert started.done_units == 2


def test_units_are_gone_on_with_under_the_same(recipe: dict[str, Any], output: Path) -> None:
    _break_off(recipe, output, options=AGAIN)
    (started,) = _of(_run(recipe, output, AGAIN), StageStarted)
    assert started.done_units == 2


def test_a_good_result_is_not_thrown_away_by_mistake(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody forgets --device."""
    _break_off_merge(recipe, output)
    before = digests(_result(output))
    monkeypatch.setattr(InlinePool, "numerics", ELSEWHERE)
    with pytest.raises(TargetError) as caught:
        _run(recipe, output)
    merge, stage = caught.value.problems
    assert "an unfinished run of this recipe was begun under other conditions: numerics" in merge.what
    assert 'device was "cpu", is "cuda"' in stage.what
    assert digests(_result(output)) == before
    monkeypatch.undo()
    events = _run(recipe, output)
    assert len(_of(events, StageKept)) == 1
    assert [event.done_segments for event in _of(events, Started)] == [1]


def test_a_merge_is_asked_before_its_stage_is_made_again(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_off_merge(recipe, output)
    shutil.rmtree(_result(output))
    monkeypatch.setattr(InlinePool, "numerics", ELSEWHERE)
    with pytest.raises(TargetError, match="an unfinished run of this recipe was begun under"):
        _run(recipe, output)
    assert not _result(output).exists()


@pytest.mark.parametrize("harm", [shutil.rmtree, lambda place: (place / RESULT_FILE).unlink()])
def test_a_merge_goes_on_though_its_stage_is_made_again(
    harm: Callable[[Path], object], recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    _break_off_merge(recipe, output)
    harm(_result(output))
    events = _run(recipe, output)
    assert len(_of(events, UnitDone)) == UNITS
    assert [event.done_segments for event in _of(events, Started)] == [1]
    _run(recipe, tmp_path / "fresh", INLINE)
    assert digests(output) == digests(tmp_path / "fresh")


def test_what_nobody_has_made_yet_is_not_compared() -> None:
    old = {"numerics": {"device": "cpu"}, "versions": [_holding("a", "1"), _holding("b", "2")]}
    new = {"numerics": {"device": "cpu"}, "versions": [_holding("a", "1"), _holding("b", "")]}
    assert not agree(old, new)
    check_agreement(old, new, where="out", what="it")
    check_agreement(None, new, where="out", what="it")
    changed = {**new, "versions": [_holding("a", "9"), _holding("b", "")]}
    with pytest.raises(TargetError, match=r'out: it was begun .*a > files > f > 2 was "1", is "9"'):
        check_agreement(old, changed, where="out", what="it")


def _holding(name: str, found: str) -> dict[str, Any]:
    return {"name": name, "files": [["f", found]]}


# A result that something wrote to


def _write_again(place: Path) -> None:
    """What a worker does that was given up, and is still at its unit: the same bytes once more."""
    path = place / RESULT_FILE
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(1, 1))


def test_a_result_with_the_same_bytes_is_kept(recipe: dict[str, Any], output: Path) -> None:
    _run(recipe, output)
    _write_again(_result(output))
    assert not is_untouched(_result(output))
    assert is_whole(_result(output))
    assert len(_of(_run(recipe, output, AGAIN), StageKept)) == 1
    assert is_untouched(_result(output))


def test_what_is_not_there_is_not_whole(tmp_path: Path, recipe: dict[str, Any], output: Path) -> None:
    assert not is_whole(tmp_path / "absent")
    assert result_digest(tmp_path / "absent") is None
    _run(recipe, output)
    (_result(output) / "raymerge" / "stage.json").write_text('{"result": 5}')
    assert not is_whole(_result(output))


def test_a_worker_that_was_given_up_does_no_harm_after_the_stage(
    recipe: dict[str, Any], output: Path, tmp_path: Path
) -> None:
    def write(event: Event) -> None:
        if isinstance(event, SegmentDone):
            _write_again(_result(output))

    _run(recipe, output, on_event=write)
    _run(recipe, tmp_path / "fresh", INLINE)
    assert digests(output) == digests(tmp_path / "fresh")


def test_what_dead_workers_left_is_gone_before_units_are_done(recipe: dict[str, Any], output: Path) -> None:
    _break_off(recipe, output)
    staging = _staging(output)
    for name in ("progress-1", ".progress-1.0123456789ab", ".piece-0.bin.0123456789ab.tmp"):
        (staging / name).write_text("1")
    (staging / "spill-1-abc").mkdir()
    (staging / "spill-1-abc" / "hidden_states.bin").write_text("1")
    seen: list[list[str]] = []

    def look(event: Event) -> None:
        if isinstance(event, StageStarted):
            seen.append(sorted(path.name for path in staging.iterdir()))

    _run(recipe, output, on_event=look)
    assert seen == [["piece-2.bin", "piece-3.bin", "raymerge"]]


def test_units_without_a_ledger_are_nobodys(recipe: dict[str, Any], output: Path) -> None:
    """As from a worker that began its unit after the stage was over."""
    _break_off(recipe, output)
    (_staging(output) / "raymerge" / "ledger.jsonl").unlink()
    (started,) = _of(_run(recipe, output), StageStarted)
    assert started.done_units == 0


# On Ray


def _odd() -> type[Any]:
    """Defined in here, so that Ray sends the class itself to workers that cannot import this file."""

    class Odd(MergeWorker):
        def ready(self) -> dict[str, Any]:
            return {**super().ready(), "kernels": {"processor": f"of {self._name}"}}

    return Odd


@pytest.fixture
def cluster(ray_cluster: Any) -> Iterator[Any]:
    """The cluster, whose workers get the stage's work itself: they cannot import this file's kit."""
    ray_cluster.cloudpickle.register_pickle_by_value(stage_maker)
    yield ray_cluster
    ray_cluster.cloudpickle.unregister_pickle_by_value(stage_maker)


@pytest.mark.slow
@pytest.mark.ray
def test_unequal_processors_are_refused_for_stages_and_not_for_merges(
    recipe: dict[str, Any], output: Path, cluster: Any
) -> None:
    del cluster
    pool = RayPool(TWO, lambda _: None, worker=_odd())
    with pytest.raises(OptionError, match=r"differ in processor or transformers .*of worker-0.*of worker-1"):
        run_chain(staged(recipe, output), output, TWO, pool=pool, pause=1.0)
    assert not _result(output).exists()
    run_chain(plan_for(recipe, output), output, TWO, pool=RayPool(TWO, lambda _: None, worker=_odd()))
