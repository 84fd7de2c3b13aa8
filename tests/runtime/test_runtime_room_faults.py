"""A file system that becomes full, or a quota that is used up, in the middle of a run."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import INLINE, digests, make_family, merge, recipes

from raymerge.api import submit
from raymerge.errors import OptionError, RoomError
from raymerge.events import Event, SegmentDone, Started
from raymerge.publish import staging as staging_module

_DISK_NBYTES = 4 << 20


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    family = make_family(tmp_path_factory.mktemp("models"), hidden=160, layers=1)
    return {**recipes(family)["linear"], "shard_size": 500_000}


@pytest.fixture(scope="module")
def expected(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the output of a run that has room."""
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(recipe, output)
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
    recipe: dict[str, Any], expected: dict[str, str], disk: Path
) -> None:
    def fill(event: Event) -> None:
        if isinstance(event, Started):
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))

    with pytest.raises(RoomError) as caught:
        submit(recipe, disk / "out", INLINE, on_event=fill)
    said = str(caught.value)
    assert caught.value.exit_code == 3
    assert said.startswith(str(disk))
    assert re.search(r"the same command goes on from there\. \S+ \w+ are free beside it\.$", said), said
    assert not (disk / "out").exists()
    (disk / "filler").unlink()
    merge(recipe, disk / "out")
    assert digests(disk / "out") == expected
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_room_that_another_takes_first_is_said_to_be_missing(
    recipe: dict[str, Any], expected: dict[str, str], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the room and the reservation of it; what is missing is said before the next run."""
    (disk / "filler").write_bytes(bytes(_DISK_NBYTES - (1 << 20)))
    with monkeypatch.context() as blind:
        blind.setattr(staging_module, "check_room", lambda *_, **__: None)
        with pytest.raises(
            RoomError, match=r"cannot take \d+ more bytes.* The output takes \S+ \wB more, and"
        ):
            merge(recipe, disk / "out")
    with pytest.raises(OptionError, match=r"the output takes .*, and .* are free there"):
        merge(recipe, disk / "out")
    (disk / "filler").unlink()
    merge(recipe, disk / "out")
    assert digests(disk / "out") == expected


@pytest.mark.parametrize(
    ("name", "calls"),
    [("posix_fallocate", 3), ("pwrite", 40), ("fdatasync", 20), ("replace", 9)],
    ids=["create", "write", "sync", "rename"],
)
def test_a_quota_that_is_used_up_costs_no_more_than_what_is_in_hand(
    name: str,
    calls: int,
    recipe: dict[str, Any],
    expected: dict[str, str],
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
        with pytest.raises(RoomError, match=r"Disk quota exceeded.*the same command goes on"):
            submit(recipe, tmp_path / "out", INLINE, on_event=count)
    assert not (tmp_path / "out").exists()
    merged = merge(recipe, tmp_path / "out")
    assert merged.of(Started)[0].done_segments >= len(done)
    assert digests(tmp_path / "out") == expected
