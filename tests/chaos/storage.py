"""Storage that fails, is full or is written to by others, and what is promised of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.faults import Fault, NotHereError, Outcome, Trial, come_to
from chaos.kills import RAY
from chaos.yard import BrokenPromiseError, Place


def disk_errors(trial: Trial) -> Outcome:
    """Reads and writes that fail now and then are done again; the run does not even stop."""
    place = trial.place()
    with place.submit("--inline", environment=place.disk(failures=0.02)) as attempt:
        attempt.ends(0)
    return _failures(place), [place]


def disk_errors_of_workers(trial: Trial) -> Outcome:
    """The same, in workers of Ray."""
    place = trial.place()
    with place.submit(*RAY, environment=place.disk(failures=0.02)) as attempt:
        attempt.ends(0)
    return _failures(place), [place]


def disk_full(trial: Trial) -> Outcome:
    """Somebody else fills the disk: the run stops and says so; with room again it goes on."""
    place = trial.place()
    with _small_disk(place.output.parent, "32m") as mounted:
        small = Place(trial.yard, mounted / "within" / "out")
        for number in range(trial.times):
            small.pause(0.02)
            with small.submit("--inline", environment=small.disk()) as attempt:
                come_to(small, attempt, small.count() + 5 + number)
                _fill(mounted / "ballast")
                attempt.ends(2, 3)
                if "space" not in attempt.message().lower():
                    raise BrokenPromiseError(f"a full disk, and no word of it: {attempt.message()}")
            (mounted / "ballast").unlink()
        small.finish()
        shutil.copytree(small.output, place.output)
    place.redone, place.lost_bytes = small.redone, small.lost_bytes
    return trial.times, [place]


def quota_exceeded(trial: Trial) -> Outcome:
    """A quota is used up: the run stops and says so; when it is raised the same command goes on."""
    place = trial.place()
    for number in range(trial.times):
        place.pause(0.02)
        with place.submit("--inline", environment=place.disk(notes=True)) as attempt:
            come_to(place, attempt, place.count() + 5 + number)
            place.quota.touch()
            attempt.ends(2, 3)
            if "quota" not in attempt.message().lower():
                raise BrokenPromiseError(f"a quota is used up, and no word of it: {attempt.message()}")
        place.quota.unlink()
    place.finish()
    return min(trial.times, _failures(place)), [place]


def source_changed(trial: Trial) -> Outcome:
    """A source that is written again meanwhile: nothing is published, and the source is named."""
    return _with_spoiled_source(trial, lambda data: data[:-64] + bytes(64))


def source_cut_short(trial: Trial) -> Outcome:
    """A source that loses its end meanwhile, as by a copy that failed: the same."""
    return _with_spoiled_source(trial, lambda data: data[: len(data) // 2])


def _with_spoiled_source(trial: Trial, spoil: Callable[[bytes], bytes]) -> Outcome:
    place = trial.place()
    weights = trial.yard.family.tunes[0] / "model.safetensors"
    before, times = weights.read_bytes(), weights.stat()
    place.pause(0.02)
    try:
        with place.submit("--inline", environment=place.disk()) as attempt:
            come_to(place, attempt, 20)
            weights.write_bytes(spoil(before))
            place.pause(0)
            attempt.ends(2)
            if place.output.exists() or "tune1" not in attempt.message():
                raise BrokenPromiseError(f"a source was spoiled, and: {attempt.tail()}")
    finally:
        weights.write_bytes(before)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    place.finish("--inline", "--replace")
    # What was made of a source that changed is not kept, and on purpose.
    place.redone, place.lost_bytes = 0, 0
    return 1, [place]


def _failures(place: Place) -> int:
    return sum(note[-1] == "failed" for note in place.notes())


@contextmanager
def _small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of its own, mounted below the directory."""
    if os.geteuid() != 0:
        raise NotHereError("mounting takes root")
    mounted = directory / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise NotHereError("no tmpfs can be mounted")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


STORAGE_FAULTS: tuple[Fault, ...] = (
    Fault("reads and writes that fail with EIO", disk_errors, sample=1),
    Fault("the same in workers of Ray", disk_errors_of_workers),
    Fault("a disk that others fill, and free again", disk_full, 2, sample=1),
    Fault("a quota that is used up, and raised", quota_exceeded),
    Fault("a source that changes during the run", source_changed),
    Fault("a source that is cut short during the run", source_cut_short),
)
