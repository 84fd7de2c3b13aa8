"""The output place: what is refused, what is replaced and when, and that no crash loses anything."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import tiny_llama
from kits.merge_cases import INLINE, Family, digests, make_family, merge, recipes, staging_of

from raymerge.api import plan_for, submit, verify
from raymerge.errors import IncompleteError, OptionError, TargetError
from raymerge.events import Event, SegmentDone, ShardDone, Started
from raymerge.options import RunOptions
from raymerge.publish import staging as staging_module
from raymerge.publish.record import ATTEMPT, attempt_id_of, check_begun, remove_thrown_away, throw_away
from raymerge.publish.shards import Shards
from raymerge.runtime.driver.run import Run
from raymerge.runtime.workers.pool import InlinePool, Runner
from raymerge.storage.local.store import LocalStore

REPLACE = RunOptions(inline=True, replace=True)


class Crash(BaseException):
    """A process that ends here; nothing in raymerge catches it."""


def _looks_complete(directory: Path) -> bool:
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)


def _complete(parent: Path) -> list[str]:
    """Names of what a person or a loader would take for a checkpoint."""
    return [path.name for path in sorted(parent.iterdir()) if path.name[0] != "." and _looks_complete(path)]


@pytest.fixture
def linear(small: Family) -> dict[str, Any]:
    return recipes(small)["linear"]


@pytest.fixture
def slerp(small: Family) -> dict[str, Any]:
    return recipes(small)["slerp"]


def test_missing_parents_are_made(linear: dict[str, Any], tmp_path: Path) -> None:
    merge(linear, tmp_path / "a" / "b" / "out")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out"]


def test_a_link_to_a_directory_is_followed(linear: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    merge(linear, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert _complete(tmp_path / "disk") == ["out"]


def test_a_filled_directory_is_refused_and_untouched(linear: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(TargetError, match=r"out: this directory is not empty\. .*--replace"):
        merge(linear, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_a_file_in_the_way_is_refused_even_with_replace(linear: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    for options in (RunOptions(inline=True), REPLACE):
        with pytest.raises(TargetError, match="a file is in the place of the output directory"):
            merge(linear, tmp_path / "out", options)


def test_a_file_above_the_place_is_refused(linear: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="file is a file, so no directory can be made below it"):
        merge(linear, tmp_path / "file" / "out")


def test_a_parent_that_may_not_be_written_is_asked_about(
    linear: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(TargetError, match=f"you may not write in {tmp_path}"):
        merge(linear, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_written(
    linear: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OptionError, match=r"the output takes .* kB, and 1\.00 kB are free there"):
        merge(linear, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_replace_swaps_only_after_verification(
    linear: dict[str, Any], slerp: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(linear, tmp_path / "out")
    before = digests(tmp_path / "out")
    seen: list[dict[str, str]] = []
    verify = staging_module.LocalStaging.publish

    def publish(self: Any, *, replace: bool) -> None:
        seen.append(digests(tmp_path / "out"))
        verify(self, replace=replace)

    monkeypatch.setattr(staging_module.LocalStaging, "publish", publish)
    merge(slerp, tmp_path / "out", REPLACE)
    assert seen == [before]
    assert digests(tmp_path / "out") != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_replacement_leaves_the_old_output(
    linear: dict[str, Any], slerp: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(linear, tmp_path / "out")
    before = digests(tmp_path / "out")

    def broken(*_: object) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr("raymerge.runtime.driver.run.finish_companions", lambda *_, **__: broken())
    with pytest.raises(IncompleteError, match="the disk is on fire"):
        merge(slerp, tmp_path / "out", REPLACE)
    assert digests(tmp_path / "out") == before


# Crashes while publishing


def _crash_at(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, call: int) -> None:
    """Let the process end at the given call of a function, before the call has any effect."""
    original: Callable[..., Any] = getattr(target, name)
    count = 0

    def maybe(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise Crash
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, maybe)


def _made_alone(method: str, family: Family, root: Path) -> dict[str, str]:
    """Digests of what a method makes."""
    merge(recipes(family)[method], root / "out")
    return digests(root / "out")


@pytest.fixture(scope="module")
def new(small: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _made_alone("slerp", small, tmp_path_factory.mktemp("new"))


@pytest.fixture(scope="module")
def linear_digests(small: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _made_alone("linear", small, tmp_path_factory.mktemp("old"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        (Path, "rename", 1),
        (Path, "rename", 2),
        (staging_module, "sync_directory", 3),
        (staging_module.shutil, "rmtree", 1),
        (staging_module.LocalStaging, "publish", 1),
    ],
)
def test_after_a_crash_while_publishing_an_output_is_whole_and_the_command_ends_it(
    target: Any,
    name: str,
    call: int,
    linear: dict[str, Any],
    slerp: dict[str, Any],
    new: dict[str, str],
    tmp_path: Path,
) -> None:
    merge(linear, tmp_path / "out")
    old = digests(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        _crash_at(patch, target, name, call)
        with pytest.raises(Crash):
            merge(slerp, tmp_path / "out", REPLACE)
    places = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert any(digests(path) in (old, new) for path in places)
    assert _complete(tmp_path) in ([], ["out"])
    merge(slerp, tmp_path / "out", REPLACE)
    assert digests(tmp_path / "out") == new
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", ["check_shards", "finish_companions", "finish_config", "verify_structure"])
def test_after_a_crash_while_finishing_nothing_looks_complete_and_the_command_ends_it(
    step: str, linear: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"raymerge.runtime.driver.run.{step}", _crashes)
        with pytest.raises(Crash):
            merge(linear, tmp_path / "out")
    assert _complete(tmp_path) == []
    merged = merge(linear, tmp_path / "out")
    assert merged.result.verdict.problems == ()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _crashes(*_: object, **__: object) -> None:
    raise Crash


# What an earlier attempt left


def _stopped_at(step: str, recipe: dict[str, Any], output: Path) -> Path:
    """A run that ends at a step; its staging directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"raymerge.runtime.driver.run.{step}", _crashes)
        with pytest.raises(Crash):
            merge(recipe, output)
    return staging_of(output)


def test_leftovers_of_a_crash_are_not_published(linear: dict[str, Any], tmp_path: Path) -> None:
    merge(linear, tmp_path / "fresh")
    root = _stopped_at("finish_config", linear, tmp_path / "out")
    leftovers = (
        ".config.json.0123456789ab.part", "model.safetensors.index.json", "old_template.jinja",
        "deep/er/vocab.txt", "raymerge/.ledger.jsonl.0123456789ab.part", "raymerge/plan/odd.arrow",
        "model-00009-of-00009.safetensors",
    )  # fmt: skip
    for name in leftovers:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left over")
    (root / "link").symlink_to(tmp_path / "fresh", target_is_directory=True)
    merge(linear, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")
    names = [sorted(path.name for path in (tmp_path / each).rglob("*")) for each in ("out", "fresh")]
    assert names[0] == names[1]
    assert (tmp_path / "fresh" / "model.safetensors").exists()


def test_companions_in_directories_of_their_own_stay(tmp_path: Path) -> None:
    family = make_family(tmp_path / "models")
    (family.base / "extra").mkdir()
    (family.base / "extra" / "notes.json").write_text("{}")
    merge(recipes(family)["slerp"], tmp_path / "out")
    merge(recipes(family)["slerp"], tmp_path / "out", REPLACE)
    companions = {path.relative_to(family.base).as_posix() for path in family.base.rglob("*.json")}
    assert companions <= {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")
    }


# The record


@pytest.mark.sample(1)
@pytest.mark.parametrize("harm", ["manifest.json", "ops.arrow", "plan"])
def test_a_record_that_is_not_whole_is_written_again(
    harm: str, linear: dict[str, Any], linear_digests: dict[str, str], tmp_path: Path
) -> None:
    root = _stopped_at("finish_companions", linear, tmp_path / "out")
    record = root / "raymerge"
    if harm == "plan":
        shutil.rmtree(record / "plan")
    else:
        os.truncate(record / "plan" / harm, 10)
    (record / "recipe.yml").unlink()
    (record / "numerics.json").write_text("")
    merge(linear, tmp_path / "out")
    assert digests(tmp_path / "out") == linear_digests


def test_the_record_is_durable_before_there_is_a_ledger(
    linear: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write_atomic = LocalStore.write_atomic

    def noting(self: LocalStore, key: str, data: bytes) -> None:
        write_atomic(self, key, data)
        written.append(key)

    monkeypatch.setattr(LocalStore, "write_atomic", noting)
    merge(linear, tmp_path / "out")
    record = tmp_path / "out" / "raymerge"
    files = {path.name for path in record.rglob("*") if path.is_file()}
    before = written[: written.index("ledger.jsonl")]
    after = {"ledger.jsonl", "events.jsonl", "provenance.json", "run.json"}
    assert set(before) == files - after | {"begun"}
    assert before.index("manifest.json") > max(before.index(n) for n in files if n.endswith(".arrow"))


# Two drivers


def test_replace_does_not_disturb_a_running_driver(
    linear: dict[str, Any], slerp: dict[str, Any], tmp_path: Path
) -> None:
    """The other driver makes another plan for the same place: its unfinished work must stay."""
    refused: list[TargetError] = []

    def second(event: object) -> None:
        if type(event).__name__ == "SegmentDone":
            with pytest.raises(TargetError) as caught:
                merge(slerp, tmp_path / "out", REPLACE)
            refused.append(caught.value)

    from raymerge.api import submit

    submit(linear, tmp_path / "out", REPLACE, on_event=second)
    assert len(refused) == 1
    assert _complete(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("place", "relation"), [("tune1", "is"), ("tune1/out", "lies inside"), (".", "holds")]
)
def test_an_output_over_in_or_around_a_source_is_refused(tmp_path: Path, place: str, relation: str) -> None:
    recipe = recipes(make_family(tmp_path / "models"))["linear"]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TargetError, match=f"the output place {relation} the source"):
        merge(recipe, tmp_path / "models" / place, REPLACE)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mount_point_is_refused_before_anything_is_merged(
    linear: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(staging_module.os.path, "ismount", lambda path: Path(path).name == "out")
    with pytest.raises(TargetError, match=r"mounted directory cannot be renamed.*inside it"):
        merge(linear, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["x" * 250, "bad\udcffname", "two\nlines"])
def test_names_that_the_system_or_a_terminal_cannot_take_are_the_users_to_change(
    linear: dict[str, Any], tmp_path: Path, name: str
) -> None:
    with pytest.raises(TargetError):
        merge(linear, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_links_is_the_users_to_change(linear: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TargetError):
        merge(linear, tmp_path / "loop" / "out")


def test_an_old_output_that_could_not_be_cleared_away_is_not_in_the_way(
    linear: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(linear, tmp_path / "out")
    with monkeypatch.context() as stuck:
        stuck.setattr(staging_module.shutil, "rmtree", lambda *_, **__: None)
        merge(linear, tmp_path / "out", REPLACE)
        assert (tmp_path / ".out.replaced").is_dir()
        merge(linear, tmp_path / "out", REPLACE)
    merge(linear, tmp_path / "out", REPLACE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_only_has_a_name_like_ours_is_left_alone(linear: dict[str, Any], tmp_path: Path) -> None:
    for name in (".out.replaced-my-backup", ".out.raymerge-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    (tmp_path / ".out.raymerge-00").symlink_to(tmp_path)
    merge(linear, tmp_path / "out")
    merge(linear, tmp_path / "out", REPLACE)
    left = [".out.raymerge-00", ".out.raymerge-notes", ".out.replaced-my-backup", "out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


# What --replace may delete


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("keys", "foreign"),
    [
        (("thesis.txt", ".ssh/id_rsa"), "2 other files here, such as .ssh"),
        (("config.json", "app.py"), "2 other files here, such as app.py"),
        (("data/model.safetensors", "data/config.json"), "1 other files here, such as data"),
        (("config.json", "model.safetensors", "photos/cat.jpg"), "such as photos/cat.jpg"),
        (("config.json", "model.safetensors", ".git/HEAD"), "such as .git/HEAD"),
        (("model.safetensors.index.json", "config.json", "raymerge/notes.txt"), "such as raymerge/notes.txt"),
        (
            ("config.json", "embeddings.pt", "main.py", "thesis.docx"),
            "4 other files here, such as embeddings",
        ),
        (("config.json", "weights.h5"), "2 other files here, such as weights.h5"),
        (("config.json", "model.safetensors", "tokenizer.json", "thesis.docx"), "such as thesis.docx"),
        (("config.json", "pytorch_model.bin", "modeling_x.py", "main.py"), "such as main.py"),
        (("config.json", "model-00001-of-00002.safetensors", "train.json"), "such as train.json"),
    ],
)
def test_replace_deletes_nothing_but_a_checkpoint(
    keys: tuple[str, ...], foreign: str, small: Family, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    for key in keys:
        (output / key).parent.mkdir(parents=True, exist_ok=True)
        (output / key).write_text("{}")
    with pytest.raises(TargetError, match=re.escape(foreign)):
        merge(recipes(small)["linear"], output, REPLACE)
    assert {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()} == {*keys}


def test_replace_deletes_a_foreign_checkpoint_and_one_of_its_own(small: Family, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "one", 0, hidden=32, layers=1)
    (model / "assets" / "deep").mkdir(parents=True)
    (model / "assets" / "deep" / "logo.txt").write_text("of the model")
    (model / "voices.dat").write_text("of the model")
    output, options = tiny_llama(tmp_path / "out", 1), REPLACE
    case = {"merge_method": "linear", "models": [{"model": str(model), "parameters": {"weight": 1}}]}
    merge(case, output, options)
    assert (output / "assets" / "deep" / "logo.txt").is_file()
    merge(recipes(small)["linear"], output, options)
    assert not (output / "assets").exists()
    assert verify(output).problems == ()
    # What came to it later is not the merge's to delete.
    (output / "evals").mkdir()
    (output / "evals" / "scores.csv").write_text("1")
    with pytest.raises(TargetError, match=r"such as evals/scores\.csv"):
        merge(case, output, options)


def test_a_file_that_came_to_an_output_is_never_replaced(linear: dict[str, Any], tmp_path: Path) -> None:
    merge(linear, tmp_path / "out")
    for key in ("thesis.docx", "extra.safetensors", "tokenizer.model", "pytorch_model.bin"):
        path = tmp_path / "out" / key
        path.write_text("of somebody")
        with pytest.raises(TargetError, match=f"no part of the checkpoint, such as {re.escape(key)}"):
            merge(linear, tmp_path / "out", REPLACE)
        assert path.read_text() == "of somebody"
        path.unlink()


@pytest.fixture
def family(tmp_path: Path) -> Family:
    """Models that a test may change."""
    return make_family(tmp_path / "models", hidden=64)


@pytest.fixture
def recipe(family: Family) -> dict[str, Any]:
    return {**recipes(family)["linear"], "shard_size": 60_000}


def _record(output: Path) -> Path:
    return staging_of(output) / "raymerge"


def _stopped(recipe: dict[str, Any], output: Path, options: RunOptions = INLINE) -> None:
    """A driver that ends at its first segment."""

    def stop(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise Crash

    with pytest.raises(Crash):
        submit(recipe, output, options, on_event=stop)


def _worker_that_is_left(recipe: dict[str, Any], output: Path) -> tuple[Runner, int]:
    """A worker with its sources open, whose driver is gone; and how many segments there are."""
    planned = plan_for(recipe, output)[-1]
    pool = InlinePool("cpu", 1)
    run = Run(planned.plan, planned.sources, output, INLINE, on_event=lambda _: None)
    ledger = run._staging.prepare(run._conditions(pool.numerics), replace=False)
    Shards(planned.plan, LocalStore(run._staging.root)).take_up(ledger)
    runner = run.work(pool).open(torch.device("cpu"), "left")
    runner.run(0)
    return runner, len(planned.plan["segments"])


def _replace_numbers(path: Path) -> None:
    """Another file with the same header takes the place of a source."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.with_name("other").write_bytes(data[:begin] + data[begin + 64 :] + data[begin : begin + 64])
    path.with_name("other").replace(path)


def test_a_worker_that_was_given_up_writes_nothing_into_the_next_run(
    family: Family, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """It has the old source open, and the next run of the same plan is over another."""
    worker, segments = _worker_that_is_left(recipe, tmp_path / "out")
    assert segments > 4
    _replace_numbers(Path(family.tunes[0]) / "model.safetensors")
    said: list[str] = []

    def write(event: Event) -> None:
        if isinstance(event, ShardDone) and not said:
            for segment in range(1, segments):
                with pytest.raises(IncompleteError) as caught:
                    worker.run(segment)
                said.append(str(caught.value))

    submit(recipe, tmp_path / "out", REPLACE, on_event=write)
    worker.close()
    assert all("is no longer the run that the worker writes for" in each for each in said)
    merge(recipe, tmp_path / "fresh")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_a_run_that_goes_on_keeps_its_mark_and_one_that_begins_has_another(
    family: Family, recipe: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _stopped(recipe, output)
    first = attempt_id_of(_record(output))
    assert len(first) == 32
    _stopped(recipe, output)
    assert attempt_id_of(_record(output)) == first
    _replace_numbers(Path(family.tunes[0]) / "model.safetensors")
    _stopped(recipe, output, REPLACE)
    second = attempt_id_of(_record(output))
    assert len(second) == 32 != first
    assert second != first
    with pytest.raises(IncompleteError, match="another began there, or it is published"):
        check_begun(_record(output), first)
    merge(recipe, output)
    assert not (output / "raymerge" / ATTEMPT).exists()


def test_what_is_thrown_away_is_gone_by_its_name_before_anything_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, begun = tmp_path / "out", tmp_path / ".out.raymerge-0123"
    (begun / "raymerge").mkdir(parents=True)
    (begun / "raymerge" / "ledger.jsonl").write_text("{}")

    def dies(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(Crash):
            throw_away(begun, place)
    assert list(tmp_path.glob(".out.raymerge-*")) == []
    (left,) = tmp_path.iterdir()
    assert (left / "raymerge" / "ledger.jsonl").exists()
    remove_thrown_away(tmp_path / "other")
    assert left.exists()
    remove_thrown_away(place)
    throw_away(begun, place)
    assert list(tmp_path.iterdir()) == []


def _spoil(family: Family) -> None:
    """The last number of a source is no number."""
    file = Path(family.tunes[0]) / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\xff\xff\xff\xff")


@pytest.mark.parametrize("when", [Started, SegmentDone])
def test_who_lost_the_place_throws_nothing_away_and_finishes_nothing(
    when: type[Event], family: Family, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The other run may be at work in the directory."""
    output = tmp_path / "out"
    if when is Started:
        _spoil(family)

    def lose(event: Event) -> None:
        if isinstance(event, when):
            lease = tmp_path / ".out.raymerge.lock"
            lease.write_text(json.dumps({**json.loads(lease.read_text()), "run": "other"}))

    with pytest.raises(IncompleteError, match="the lease of this run is gone"):
        submit(recipe, output, INLINE, on_event=lose)
    names = [path.name for path in _record(output).parent.iterdir()]
    assert any(name.endswith(".part") for name in names)
    assert not any(name.endswith(".safetensors") for name in names)


def test_a_guard_is_asked_after_each_opening_to_write_and_before_any_byte(tmp_path: Path) -> None:
    calls: list[bool] = []

    def guard() -> None:
        calls.append(True)
        if len(calls) > 1:
            raise IncompleteError("no more")

    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "b").write_bytes(b"1234")
    with LocalStore(tmp_path, guard=guard) as store:
        store.read("a", 0, 4)
        store.write_at("a", 0, b"x")
        store.write_at("a", 1, b"y")
        attempts: tuple[Callable[[], None], ...] = (
            lambda: store.write_at("b", 0, b"x"),
            lambda: store.write_extent("b", 0, memoryview(b"xy")),
            lambda: store.append("b", b"x"),
            lambda: store.sync("b"),
        )
        for attempt in attempts:
            with pytest.raises(IncompleteError, match="no more"):
                attempt()
    assert (tmp_path / "a").read_bytes() == b"xy34"
    assert (tmp_path / "b").read_bytes() == b"1234"
    assert len(calls) == 5
