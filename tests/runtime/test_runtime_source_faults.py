"""A source that changes, shrinks, vanishes or turns unreadable while it is merged, and comes back."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kits.marks import one_in
from kits.merge_cases import INLINE, Family, digests, make_family, merge, recipes

from raymerge.api import submit
from raymerge.errors import CheckpointError, IncompleteError, RaymergeError, TargetError, TransientError
from raymerge.events import Event, SegmentDone, Started, StorageFailed

Fault = Callable[[Path], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """A merge, the file that has a fault, and what comes of it without one."""

    recipe: dict[str, Any]
    file: Path
    expected: dict[str, str]
    segments: int


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("faults")
    family: Family = make_family(root / "models", hidden=160, layers=1)
    recipe = recipes(family)["task_arithmetic"]
    segments = len(merge(recipe, root / "out").of(SegmentDone))
    assert segments > 4
    return Case(recipe, family.tunes[2] / "model.safetensors", digests(root / "out"), segments)


@contextmanager
def _kept(file: Path) -> Iterator[Path]:
    """A copy of a file, which takes its place again in the end, with its times."""
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    try:
        yield copy
    finally:
        copy.replace(file)


@contextmanager
def another(file: Path) -> Iterator[None]:
    """Another file of the same length is put in its place, and the first one back."""
    other = file.with_name("other")
    data = file.read_bytes()
    other.write_bytes(data[:-4000] + bytes(4000))
    kept = file.with_name("kept")
    file.rename(kept)
    other.rename(file)
    yield
    kept.replace(file)


@contextmanager
def overwritten(file: Path) -> Iterator[None]:
    with _kept(file):
        with file.open("r+b") as opened:
            opened.seek(-4000, os.SEEK_END)
            opened.write(bytes(4000))
        yield


@contextmanager
def cut(file: Path) -> Iterator[None]:
    with _kept(file):
        os.truncate(file, 5000)
        yield


@contextmanager
def grown(file: Path) -> Iterator[None]:
    with _kept(file) as copy:
        with file.open("ab") as opened:
            opened.write(b"more")
        os.utime(file, ns=(1, copy.stat().st_mtime_ns))
        yield


@contextmanager
def away(file: Path) -> Iterator[None]:
    """The directory is gone, as when its storage is."""
    place = file.parent.with_name("away")
    file.parent.rename(place)
    yield
    place.rename(file.parent)


def sealed(file: Path) -> AbstractContextManager[None]:
    return _refusing(file, errno.EACCES)


def broken(file: Path) -> AbstractContextManager[None]:
    return _refusing(file, errno.EIO)


@contextmanager
def _refusing(file: Path, error: int) -> Iterator[None]:
    number, whole = file.stat().st_ino, os.preadv

    def refused(descriptor: int, *rest: Any) -> int:
        if os.fstat(descriptor).st_ino == number:
            raise OSError(error, os.strerror(error))
        return whole(descriptor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        yield


def _run(case: Case, output: Path, fault: Fault, *, after: int) -> RaymergeError:
    """What a run ends with that meets a fault after so many segments, 0 for before the first."""
    done = 0
    under_way: list[AbstractContextManager[None]] = []

    def watch(event: Event) -> None:
        nonlocal done
        done += isinstance(event, SegmentDone)
        if isinstance(event, Started | SegmentDone) and done >= after and not under_way:
            under_way.append(fault(case.file))
            under_way[0].__enter__()

    try:
        with pytest.raises(RaymergeError) as caught:
            submit(case.recipe, output, INLINE, on_event=watch)
    finally:
        under_way[0].__exit__(None, None, None)
    assert not output.exists()
    return caught.value


def _goes_on(case: Case, output: Path) -> None:
    """What was made of the file while it had a fault is not believed now."""
    merge(case.recipe, output)
    assert digests(output) == case.expected


CHANGES = [
    (another, r"bytes as before, but was written to"),
    (overwritten, r"bytes as before, but was written to"),
    (cut, r"it had \d+ bytes and has 5000"),
    (grown, r"it had \d+ bytes and has \d+"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("after", [0, 2, 10**6], ids=["before it is read", "while it is read", "after"])
@pytest.mark.parametrize(("fault", "said"), one_in(2, CHANGES), ids=[fault.__name__ for fault, _ in CHANGES])
def test_a_source_that_changes_ends_the_run(
    fault: Fault, said: str, after: int, case: Case, tmp_path: Path
) -> None:
    error = _run(case, tmp_path / "out", fault, after=min(after, case.segments))
    assert isinstance(error, CheckpointError)
    (problem,) = error.problems
    assert problem.where.endswith("tune3: model.safetensors")
    assert problem.what.startswith("the file was changed while it was merged: ")
    assert re.search(said, problem.what)
    _goes_on(case, tmp_path / "out")


@pytest.mark.parametrize("after", [0, 2], ids=["before it is read", "while it is read"])
def test_a_source_that_vanishes_is_waited_for_by_the_same_command(
    after: int, case: Case, tmp_path: Path
) -> None:
    error = _run(case, tmp_path / "out", away, after=after)
    assert isinstance(error, IncompleteError)
    assert re.search(
        r"tune3: model\.safetensors is gone since the merge was planned\. .* back as it was", str(error)
    )
    _goes_on(case, tmp_path / "out")


def test_a_source_that_may_not_be_read_now_may_be_later(case: Case, tmp_path: Path) -> None:
    error = _run(case, tmp_path / "out", sealed, after=0)
    assert isinstance(error, IncompleteError)
    assert re.search(r"tune3/model\.safetensors: cannot be read at byte \d+: Permission denied", str(error))
    _goes_on(case, tmp_path / "out")


def test_storage_that_fails_for_a_moment_is_told_of(case: Case, tmp_path: Path) -> None:
    """And where it fails for longer, the run can go on later."""
    number, whole, left, told = case.file.stat().st_ino, os.preadv, 0, list[StorageFailed]()

    def failing(descriptor: int, *rest: Any) -> int:
        nonlocal left
        if left and os.fstat(descriptor).st_ino == number:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(descriptor, *rest)

    def watch(event: Event) -> None:
        nonlocal left
        left = 2 if isinstance(event, Started) else left
        told.extend([event] if isinstance(event, StorageFailed) else [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.storage.retry._FIRST_SECONDS", 0.001)
        patch.setattr(os, "preadv", failing)
        submit(case.recipe, tmp_path / "out", INLINE, on_event=watch)
        assert {fault for each in told for fault in each.faults} == {
            "model.safetensors: Input/output error (EIO)"
        }
        assert sum(sum(each.faults.values()) for each in told) == 2
    assert digests(tmp_path / "out") == case.expected


def test_storage_that_fails_for_long_ends_the_run_for_now(case: Case, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.storage.retry._FIRST_SECONDS", 0.0001)
        error = _run(case, tmp_path / "out", broken, after=0)
    assert isinstance(error, TransientError)
    assert re.search(r"tune3/model\.safetensors: reading at byte \d+ failed 8 times", str(error))
    _goes_on(case, tmp_path / "out")


def _edit(file: Path) -> None:
    file.write_text('{"another": 1}', encoding="utf-8")


@pytest.mark.parametrize("fault", [_edit, Path.unlink], ids=["changed", "removed"])
def test_companions_that_change_during_the_run_are_not_published(
    fault: Callable[[Path], None], tmp_path: Path
) -> None:
    """Nor by the same command afterwards: what was read with them belongs to others."""
    family = make_family(tmp_path / "models", hidden=32, layers=1)
    companion, recipe = family.base / "generation_config.json", recipes(family)["task_arithmetic"]
    companion.write_text("{}", encoding="utf-8")
    out = tmp_path / "out"

    def disturb(event: Event) -> None:
        if isinstance(event, Started):
            fault(companion)

    with pytest.raises(CheckpointError, match=r"generation_config.json: .*(was changed|is gone)"):
        submit(recipe, out, INLINE, on_event=disturb)
    assert not out.exists()
    with pytest.raises(TargetError, match=r"other conditions: companions > generation_config.json"):
        submit(recipe, out, INLINE)
    submit(recipe, out, replace(INLINE, replace=True))
    assert (out / "generation_config.json").exists() == (fault is _edit)
