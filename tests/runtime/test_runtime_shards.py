"""What a run takes over from an earlier one: nothing that the files do not prove."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.merge_cases import INLINE, EventLog, Family, digests, flip, make_family, merge, recipes, staging_of

from raymerge.api import plan, submit
from raymerge.errors import DiskSpaceError, IncompleteError, OptionError
from raymerge.events import Event, Planned, SegmentDone, Started
from raymerge.execute.receipts import Receipt
from raymerge.options import RunOptions
from raymerge.publish import shards as shards_module
from raymerge.publish import staging as staging_module
from raymerge.publish.record import Ledger
from raymerge.publish.shards import Shards
from raymerge.storage.local.store import LocalStore

_WRITES = ("pwrite", "pwritev", "write", "writev", "ftruncate", "posix_fallocate")
_Inode = tuple[int, int]


class Durability:
    """What a power cut would leave: data and names since they were last synced, as system calls show it.

    The oracle knows nothing of the package. The data of a file are durable when nothing was written after its
    last sync, its name when the directory had it at its own last sync.
    """

    def __init__(self, root: Path, rule: Rule) -> None:
        self._root = root
        self._rule = rule
        self._synced_data: dict[_Inode, tuple[int, int]] = {}
        self._synced_names: dict[_Inode, dict[str, int]] = {}
        self._written: set[_Inode] = set()
        self.checked: set[str] = set()
        self.violations: list[str] = []

    def has_name(self, path: Path) -> bool:
        """Whether a power cut would leave a file or directory its name."""
        names = self._synced_names.get(_inode(os.stat(path.parent)), {})
        return names.get(path.name) == path.stat().st_ino

    def has_data(self, path: Path) -> bool:
        """Whether a power cut would leave a file all that was written to it."""
        inode = _inode(path.stat())
        # The time shows writes that were none of the calls that are replaced.
        return inode not in self._written and self._synced_data.get(inode) == _state(path)

    def lost(self, directory: Path) -> list[str]:
        """Names below a directory of what a power cut would take, whole or in part; sorted."""
        return sorted(
            path.name
            for path in directory.rglob("*")
            if not (self.has_name(path) and (path.is_dir() or self.has_data(path)))
        )

    def check(self, call: str, path: Path) -> None:
        missing = self._rule(self, call, path) if path.is_relative_to(self._root) else None
        if missing is not None:
            self.checked.add(call)
            self.violations += [f"{call} {path.name}: {each}" for each in missing]

    def sync(self, descriptor: int) -> None:
        inode, path = _inode(os.fstat(descriptor)), _path(descriptor)
        if path.is_dir():
            self._synced_names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._written.discard(inode)
            self._synced_data[inode] = _state(path)

    def write(self, descriptor: int) -> None:
        self.check("write", _path(descriptor))
        self._written.add(_inode(os.fstat(descriptor)))


Rule = Callable[[Durability, str, Path], list[str] | None]
"""What is not durable and must be before a call ("write", "rename", "link" or "unlink") on a path.

None where nothing is required.
"""


def record_durability(patch: pytest.MonkeyPatch, root: Path, rule: Rule) -> Durability:
    seen = Durability(root, rule)

    def before(name: str, look: Callable[..., object]) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return original(*args, **kwargs)

        patch.setattr(os, name, call)

    for name in _WRITES:
        before(name, lambda descriptor, *_: seen.write(descriptor))
    before("copy_file_range", lambda _, target, *__: seen.write(target))
    for name in ("fsync", "fdatasync"):
        before(name, seen.sync)
    for name in ("rename", "replace"):
        before(name, lambda source, *_, **__: seen.check("rename", Path(source)))
    before("link", lambda source, *_, **__: seen.check("link", Path(source)))
    for name in ("unlink", "remove"):
        before(name, lambda path, *, dir_fd=None: seen.check("unlink", _below(path, dir_fd)))
    return seen


def _below(path: str | os.PathLike[str], directory: int | None) -> Path:
    return Path(path) if directory is None else _path(directory) / path


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class Crash(BaseException):
    """A process that ends here; nothing in raymerge catches it."""


@pytest.fixture(scope="module")
def recipe(medium: Family) -> dict[str, Any]:
    """Several shards, of a few segments each."""
    return {**recipes(medium)["linear"], "shard_size": 1_000_000}


@pytest.fixture(scope="module")
def expected(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(recipe, output)
    return digests(output)


def _stopped(recipe: dict[str, Any], output: Path, *, after: int) -> int:
    """Stop a run at once after some segments; how many were done before and in it.

    That is as many as have receipts, of which those that came with the last one were not told of.
    """

    def stop(event: Event) -> None:
        if isinstance(event, SegmentDone) and len(events.of(SegmentDone)) == after:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    events = EventLog(stop)
    with pytest.raises(IncompleteError):
        submit(recipe, output, INLINE, on_event=events)
    done = len(_receipts(output))
    assert done >= events.of(Started)[0].done_segments + after
    return done


def _receipts(output: Path) -> dict[int, dict[str, str]]:
    """Digests of the rows by segment, as the ledger has them."""
    lines = (staging_of(output) / "raymerge" / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line)["receipt"] for line in lines[1:]]
    return {entry["segment"]: entry["digests"] for entry in entries}


def _plan_rows(recipe: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:

    made = plan(recipe)
    return made["shards"].column("name").to_pylist(), made["ops"].to_pylist()


def _shard_of_a_receipt(recipe: dict[str, Any], output: Path) -> tuple[Path, dict[str, Any], int]:
    """A growing shard that a receipt speaks of, one row in it, and the segment."""
    names, rows = _plan_rows(recipe)
    segment, found = next(iter(_receipts(output).items()))
    row = rows[int(next(iter(found)))]
    return staging_of(output) / f"{names[row['shard']]}.part", row, segment


@pytest.mark.parametrize("harm", ["removed", "truncated"])
def test_a_lost_shard_is_made_again_even_if_the_next_run_stops_too(
    harm: str, recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    """The run after the next finds the shard in full length, and must not believe the first run's lines."""
    output = tmp_path / "out"
    _stopped(recipe, output, after=12)
    shard, _, segment = _shard_of_a_receipt(recipe, output)
    shard.unlink() if harm == "removed" else os.truncate(shard, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "_open", _after(Shards._open, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    assert shard.exists()
    assert segment not in _receipts(output)
    merge(recipe, output)
    assert digests(output) == expected


def test_a_receipt_of_a_segment_that_the_plan_has_not_is_dropped(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _stopped(recipe, output, after=2)
    ledger = staging_of(output) / "raymerge" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    strange = json.loads(lines[-1])
    strange["receipt"]["segment"] = len(plan(recipe)["segments"])
    ledger.write_text("".join([*lines, json.dumps(strange) + "\n"]))
    merge(recipe, output)
    assert digests(output) == expected
    assert strange["receipt"]["segment"] not in {
        json.loads(line)["receipt"]["segment"]
        for line in (output / "raymerge" / "ledger.jsonl").read_text().splitlines()
        if "receipt" in line
    }


def _after(call: Any, error: type[BaseException]) -> Any:

    def ending(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        raise error

    return ending


def test_the_ledger_forgets_before_a_file_is_made_anew(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _stopped(recipe, output, after=12)
    shard, _, segment = _shard_of_a_receipt(recipe, output)
    shard.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "create", _refusing(LocalStore.create))
        with pytest.raises(Crash):
            merge(recipe, output)
    assert not shard.exists()
    assert segment not in _receipts(output)
    merge(recipe, output)
    assert digests(output) == expected


def _refusing(call: Any) -> Any:

    def create(self: LocalStore, key: str, nbytes: int) -> None:
        if key.startswith("model"):
            raise Crash
        call(self, key, nbytes)

    return create


def test_other_shards_keep_their_receipts(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    done = _stopped(recipe, output, after=20)
    shard, _, _ = _shard_of_a_receipt(recipe, output)
    names, rows = _plan_rows(recipe)
    gone = names.index(shard.name.removesuffix(".part"))
    lost = {s for s, found in _receipts(output).items() if any(rows[int(r)]["shard"] == gone for r in found)}
    shard.unlink()
    merged = merge(recipe, output)
    assert 0 < len(lost) < done
    assert merged.of(Started)[0].done_segments == done - len(lost)
    assert lost <= {event.segment for event in merged.of(SegmentDone)}
    assert digests(output) == expected


def test_bytes_that_a_power_cut_took_are_made_again(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_CHUNK", 1000)
    output = tmp_path / "out"
    done = _stopped(recipe, output, after=12)
    shard, row, segment = _shard_of_a_receipt(recipe, output)
    flip(shard, row["offset"] + row["nbytes"] - 1)
    merged = merge(recipe, output)
    assert merged.of(Started)[0].done_segments == done - 1
    assert segment in {event.segment for event in merged.of(SegmentDone)}
    assert digests(output) == expected


def test_a_copy_that_was_lost_is_made_again_with_its_original(small: Family, tmp_path: Path) -> None:
    """A row that is written to two places is proved by both."""
    span = {"sources": [{"model": str(small.base), "layer_range": [0, 1]}]}
    recipe = {"merge_method": "passthrough", "slices": [span, span]}
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "complete", _after(lambda *_: None, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    _, rows = _plan_rows(recipe)
    copy = next(row for row in rows if row["copy_of"] >= 0)
    with (staging_of(output) / "model.safetensors.part").open("r+b") as file:
        file.seek(copy["offset"])
        file.write(b"\x00" * copy["nbytes"])
    merged = merge(recipe, output)
    assert len(merged.of(SegmentDone)) > 0
    merge(recipe, tmp_path / "fresh")
    assert digests(output) == digests(tmp_path / "fresh")


def test_a_crash_between_a_shard_and_its_header_is_resumed(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    write_at = LocalStore.write_at

    def ends_at_shards(self: LocalStore, key: str, offset: int, buffer: bytes) -> None:
        if key.startswith("model"):
            raise Crash
        write_at(self, key, offset, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "write_at", ends_at_shards)
        with pytest.raises(Crash):
            merge(recipe, output)
    assert any(staging_of(output).glob("model-*.part"))
    merge(recipe, output)
    assert digests(output) == expected


def test_shards_with_their_final_names_grow_again_when_a_segment_is_lost(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.runtime.driver.run.finish_companions", _after(lambda *_, **__: None, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    names, rows = _plan_rows(recipe)
    with (staging_of(output) / names[0]).open("r+b") as file:
        file.seek(next(row["offset"] for row in rows if row["shard"] == 0))
        file.write(b"\x01\x02")
    merged = merge(recipe, output)
    assert 0 < len(merged.of(SegmentDone)) < merged.of(Planned)[0].segments
    assert digests(output) == expected


def test_finished_shards_are_not_touched_again(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.runtime.driver.run.check_shards", _after(lambda *_: None, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    before = {path.name: path.stat().st_mtime_ns for path in staging_of(output).glob("*.safetensors")}
    merged = merge(recipe, output)
    assert merged.of(SegmentDone) == []
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")} == before
    assert digests(output) == expected


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the paths of descriptors in /proc")
REPLACE = RunOptions(inline=True, replace=True)
JOURNAL = "events.jsonl"
"""For people: what a power cut takes of it is missed by nobody."""


def _not_durable(seen: Durability, call: str, path: Path) -> list[str] | None:
    """What a program needs that lives through power cuts.

    A file has its data before it gets its name (records, shards, leases), a directory all that is in it.
    What was thrown away keeps its other name before its files go: otherwise half of it might be taken up.
    A receipt is believed later, so the ledger and the shards of which it speaks are there under their names.
    """
    if call in ("rename", "link") and path.is_file():
        return [] if seen.has_data(path) else ["its data"]
    if call == "rename" and path.is_dir():
        return [name for name in seen.lost(path) if name != JOURNAL]
    discarded = next((each for each in path.parents if ".discarded-" in each.name), None)
    if call == "unlink" and discarded is not None:
        return [] if seen.has_name(discarded) else [f"the name of {discarded.name}"]
    if call == "write" and path.name == "ledger.jsonl":
        staging = path.parents[1]
        spoken_of = (staging, path.parent, path, *staging.glob("*.safetensors*"))
        return [each.name for each in spoken_of if not seen.has_name(each)]
    return None


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Durability]:
    with pytest.MonkeyPatch.context() as patch:
        yield record_durability(patch, tmp_path, _not_durable)


@pytest.fixture
def linear(small: Family) -> dict[str, Any]:
    return recipes(small)["linear"]


def _crash(*_: object, **__: object) -> None:
    raise Crash


def _stopped_before(target: Any, name: str, recipe: dict[str, Any], output: Path) -> None:
    """A run that ends where a function would be called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, _crash)
        with pytest.raises(Crash):
            merge(recipe, output)


def test_what_a_merge_needs_is_durable_in_time(
    linear: dict[str, Any], tmp_path: Path, seen: Durability
) -> None:
    merge(linear, tmp_path / "out")
    assert seen.violations == []
    assert seen.checked == {"write", "rename", "link"}
    assert seen.has_name(tmp_path / "out")
    assert seen.lost(tmp_path / "out") == [JOURNAL]


def test_a_resumed_merge_syncs_the_headers_that_it_wrote_again(
    linear: dict[str, Any], tmp_path: Path, seen: Durability
) -> None:
    _stopped_before(Shards, "complete", linear, tmp_path / "out")
    merge(linear, tmp_path / "out")
    assert seen.violations == []
    assert seen.lost(tmp_path / "out") == [JOURNAL]


def test_what_is_thrown_away_is_so_durably_before_its_files_are_deleted(
    linear: dict[str, Any], small: Family, tmp_path: Path, seen: Durability
) -> None:
    _stopped_before(Shards, "complete", linear, tmp_path / "out")
    merge(recipes(small)["slerp"], tmp_path / "out", REPLACE)
    assert "unlink" in seen.checked
    assert seen.violations == []


def test_the_old_output_goes_after_the_new_one_is_durably_in_its_place(
    linear: dict[str, Any], small: Family, tmp_path: Path, seen: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(linear, tmp_path / "out")
    names: list[bool] = []
    remove = shutil.rmtree

    def removes(path: Path, **options: Any) -> None:
        if ".replaced" in path.name:
            names.append(seen.has_name(tmp_path / "out"))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", removes)
    merge(recipes(small)["slerp"], tmp_path / "out", REPLACE)
    assert names == [True]
    assert seen.violations == []


_DISK_NBYTES = 4 << 20


@pytest.fixture(scope="module")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    family = make_family(tmp_path_factory.mktemp("models"), hidden=160, layers=1)
    return {**recipes(family)["linear"], "shard_size": 500_000}


@pytest.fixture(scope="module")
def small_expected(small_recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the output of a run that has room."""
    output = tmp_path_factory.mktemp("small_expected") / "out"
    merge(small_recipe, output)
    return digests(output)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_NBYTES}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system, where that is allowed")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_becomes_full_costs_nothing(
    small_recipe: dict[str, Any], small_expected: dict[str, str], disk: Path
) -> None:
    def fill(event: Event) -> None:
        if isinstance(event, Started):
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))

    with pytest.raises(DiskSpaceError) as caught:
        submit(small_recipe, disk / "out", INLINE, on_event=fill)
    said = str(caught.value)
    assert caught.value.exit_code == 3
    assert said.startswith(str(disk))
    assert re.search(r"the same command goes on from there\. \S+ \w+ are free beside it\.$", said), said
    assert not (disk / "out").exists()
    (disk / "filler").unlink()
    merge(small_recipe, disk / "out")
    assert digests(disk / "out") == small_expected
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_room_that_another_takes_first_is_said_to_be_missing(
    small_recipe: dict[str, Any], small_expected: dict[str, str], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the room and the reservation of it; what is missing is said before the next run."""
    (disk / "filler").write_bytes(bytes(_DISK_NBYTES - (1 << 20)))
    with monkeypatch.context() as blind:
        blind.setattr(staging_module, "check_disk_space", lambda *_, **__: None)
        with pytest.raises(
            DiskSpaceError, match=r"cannot take \d+ more bytes.* The output takes \S+ \wB more, and"
        ):
            merge(small_recipe, disk / "out")
    with pytest.raises(OptionError, match=r"the output takes .*, and .* are free there"):
        merge(small_recipe, disk / "out")
    (disk / "filler").unlink()
    merge(small_recipe, disk / "out")
    assert digests(disk / "out") == small_expected


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "calls"),
    [("posix_fallocate", 3), ("pwrite", 40), ("fdatasync", 20), ("replace", 9)],
    ids=["create", "write", "sync", "rename"],
)
def test_a_quota_that_is_used_up_costs_no_more_than_what_is_in_hand(
    name: str,
    calls: int,
    small_recipe: dict[str, Any],
    small_expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, left, done = getattr(os, name), calls, []

    def refused(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return whole(*args)

    def count(event: Event) -> None:
        if isinstance(event, SegmentDone):
            done.append(event.segment)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refused)
        with pytest.raises(DiskSpaceError, match=r"Disk quota exceeded.*the same command goes on"):
            submit(small_recipe, tmp_path / "out", INLINE, on_event=count)
    assert not (tmp_path / "out").exists()
    merged = merge(small_recipe, tmp_path / "out")
    assert merged.of(Started)[0].done_segments >= len(done)
    assert digests(tmp_path / "out") == small_expected


CONDITIONS = {"numerics": {"device": "cpu"}, "versions": []}


def _receipt(segment: int) -> Receipt:
    sums = {"3": (0.1 * segment, 1e-30)}
    return Receipt(segment, 10, 20, 0.5, "worker-0", {"3": "ab" * 16}, encoding_errors=sums)


def _filled(path: Path, count: int) -> Ledger:
    ledger = Ledger(path, CONDITIONS)
    for segment in range(count):
        ledger.record(_receipt(segment))
    return ledger


def test_receipts_come_back_as_they_were(tmp_path: Path) -> None:
    ledger = _filled(tmp_path / "ledger", 3)
    assert ledger.receipts() == {segment: _receipt(segment) for segment in range(3)}
    assert Ledger(tmp_path / "ledger", {"other": 1}).receipts() == ledger.receipts()


def test_the_files_are_those_that_were_published_last(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = _filled(path, 2)
    assert Ledger.files(path) is None
    for size in (1, 2):
        ledger.record_files({"model.safetensors": [size, 5, 6]})
    assert Ledger.files(path) == {"model.safetensors": [2, 5, 6]}
    assert ledger.receipts() == {segment: _receipt(segment) for segment in range(2)}
    with path.open("a") as file:
        file.write('{"files": 3}\n')
    assert Ledger.files(path) == {"model.safetensors": [2, 5, 6]}
    ledger.begin(ledger.receipts())
    assert Ledger.files(path) is None


def test_conditions_are_those_it_was_begun_under(tmp_path: Path) -> None:
    _filled(tmp_path / "ledger", 1)
    Ledger(tmp_path / "ledger", {"numerics": {"device": "cuda"}})
    assert Ledger.conditions(tmp_path / "ledger") == CONDITIONS


@pytest.mark.parametrize("text", [None, "", '{"condit', "[1]\n", '{"receipt": {}}\n', '{"conditions": 3}\n'])
def test_a_ledger_without_a_readable_first_line_has_no_conditions(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    if text is not None:
        path.write_text(text)
    assert Ledger.conditions(path) is None
    assert Ledger.files(path) is None


@given(kept=st.integers(1, 400))
@settings(deadline=None, max_examples=20)
def test_cut_anywhere_it_keeps_whole_lines_and_can_be_continued(
    kept: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "ledger"
    _filled(path, 3)
    first = len(path.read_bytes().split(b"\n")[0]) + 1
    os.truncate(path, min(path.stat().st_size, first + kept))
    ledger = Ledger(path, CONDITIONS)
    before = ledger.receipts()
    assert before == {segment: _receipt(segment) for segment in range(len(before))}
    ledger.record(_receipt(9))
    assert ledger.receipts() == {**before, 9: _receipt(9)}
    assert Ledger.conditions(path) == CONDITIONS


def test_a_line_that_is_no_text_is_passed_over(tmp_path: Path) -> None:
    ledger = _filled(tmp_path / "ledger", 2)
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b"\xff\xfe\x00garbage\n")
    assert set(ledger.receipts()) == {0, 1}


def test_a_ledger_begun_anew_has_only_what_it_is_given(tmp_path: Path) -> None:
    ledger = _filled(tmp_path / "ledger", 3)
    ledger.begin({1: _receipt(1)})
    assert ledger.receipts() == {1: _receipt(1)}
    assert Ledger.conditions(tmp_path / "ledger") == CONDITIONS
    ledger.record(_receipt(2))
    assert set(ledger.receipts()) == {1, 2}


def test_a_crash_while_a_ledger_is_begun_anew_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = _filled(tmp_path / "ledger", 3)

    def no_disk(*_: object) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(os, "replace", no_disk)
    with pytest.raises(OSError, match="on fire"):
        ledger.begin({})
    assert set(ledger.receipts()) == {0, 1, 2}


def test_every_line_is_json_and_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(1), fsync(descriptor)))
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(1), fdatasync(descriptor)))
    _filled(tmp_path / "ledger", 2)
    lines = (tmp_path / "ledger").read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["conditions", "receipt", "receipt"]
    # The first line with its file's name, then each receipt.
    assert len(synced) == 4
