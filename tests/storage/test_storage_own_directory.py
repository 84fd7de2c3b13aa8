"""Temporary directories: removed with their processes, and by the next run where these were killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kits.s3_server import s3_server

from raymerge.storage.temporary import OwnDirectory, fetched

NOBODY_ELSE = 54_321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")


@contextmanager
def _holding(code: str, *args: str, temporary: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A process that makes a directory, prints it and sleeps; what it has printed, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys, time\n{code}", *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    with process:
        try:
            yield Path(process.stdout.readline().strip()), process
        finally:
            process.kill()


def _left(shared: Path) -> OwnDirectory:
    """One whose process was killed, as the system leaves it."""
    found = OwnDirectory(str(shared))
    (found.path / "file").write_bytes(b"x")
    os.close(found._descriptor)
    return found


def _names(shared: Path) -> set[str]:
    return {path.name for path in shared.iterdir()}


def test_those_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    code = (
        "from raymerge.storage.temporary import OwnDirectory\n"
        "found = OwnDirectory(); (found.path / 'file').write_bytes(b'x')\n"
        "print(found.path, flush=True); time.sleep(1000)"
    )
    with OwnDirectory(str(tmp_path)) as own, _holding(code, temporary=tmp_path) as (other, process):
        # What looks like one and is none: without a lock nobody knows whose it is.
        prefix = own.parent.name.rpartition("-")[0]
        directories = {"mine", "raymerge-abcdefgh", "raymerge-job-abcdefgh", f"{prefix}-abcdefgh"}
        for name in directories:
            (tmp_path / name / "files").mkdir(parents=True)
        (tmp_path / f"{prefix}-file").touch()
        (tmp_path / f"{prefix}-link").symlink_to(own.parent)
        foreign = directories | {f"{prefix}-file", f"{prefix}-link"}
        living = {own.parent.name, other.parent.name}
        OwnDirectory(str(tmp_path)).remove()
        assert _names(tmp_path) == living | foreign
        process.send_signal(signal.SIGKILL)
        process.wait()
        OwnDirectory(str(tmp_path)).remove()
        assert _names(tmp_path) == {own.parent.name} | foreign
    assert _names(tmp_path) == foreign


@needs_root
def test_those_of_other_users_are_left_alone(tmp_path: Path) -> None:
    left = _left(tmp_path)
    os.chown(left.path.parent, NOBODY_ELSE, -1)
    OwnDirectory(str(tmp_path)).remove()
    assert (left.path / "file").is_file()


def test_those_of_other_machines_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks may be those of each machine, on a file system that several share."""
    left = _left(tmp_path)
    for host, there in (("another", True), (socket.gethostname(), False)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        OwnDirectory(str(tmp_path)).remove()
        assert left.path.exists() is there


def test_one_that_was_killed_while_it_removed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files first, and the lock that says whose they are last."""
    killed = _left(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            OwnDirectory(str(tmp_path))
    assert not (killed.path / "file").exists()
    with OwnDirectory(str(tmp_path)):
        assert not killed.path.parent.exists()


def _interrupted(path: Path, **_: object) -> None:
    """Removes one file, the lock if it may, and comes no further."""
    files = [each for each in path.rglob("*") if each.is_file()]
    max(files, key=lambda each: each.name == "lock").unlink()
    raise KeyboardInterrupt


def test_names_leave_room_for_the_sockets_of_ray(tmp_path: Path) -> None:
    with OwnDirectory(str(tmp_path)) as own:
        below = "/ray/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
        assert len(f"/tmp/{own.relative_to(tmp_path)}{below}") <= 107


def test_what_a_killed_command_fetched_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "from raymerge.storage.temporary import fetched\n"
        "with fetched(sys.argv[1], ['config.json']) as found:\n"
        "    print(found, flush=True); time.sleep(1000)"
    )
    with s3_server() as server:
        source = tmp_path / "source"
        source.mkdir()
        (source / "config.json").write_text("{}")
        server.upload(source, "model")
        shutil.rmtree(source)
        place = server.place("model")
        with _holding(code, place, temporary=tmp_path) as (left, process):
            with fetched(place, ["config.json"]) as found:
                assert (left / "config.json").is_file()
                assert (found / "config.json").is_file()
            process.send_signal(signal.SIGKILL)
            process.wait()
        with fetched(place, ["config.json"]):
            assert not left.exists()
            assert len(_names(tmp_path)) == 1
    assert _names(tmp_path) == set()
