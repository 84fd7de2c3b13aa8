"""How much disk a submission still takes until its output is in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from raymerge.planner.chained_merges import PlannedMerge
from raymerge.planner.inputs.source import Stage
from raymerge.publish.staging import Staging
from raymerge.storage.addresses import is_remote
from raymerge.storage.local.store import check_room, nearest


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that a submission takes, beside what is taken by now."""

    steps: int
    """What comes before the output, at most at one time."""
    results: int
    """What of that stays until the output is published."""
    output: int
    """The output; 0 in an object store."""

    @property
    def together(self) -> int:
        """All of it at most at one time."""
        return max(self.steps, self.results + self.output)


def check_disk(disk: Disk, steps: Path, output: Path | str, *, is_chosen: bool) -> None:
    """See that there is room for what comes before an output, and for the output with it.

    Args:
        disk: what is taken.
        steps: the directory of the results between.
        output: the output place.
        is_chosen: whether the user named a directory for results between.

    Raises:
        OptionError: there is not enough of it.
    """
    option = "--steps" if is_chosen else "-o"
    if not is_remote(str(output)) and _is_one_disk(steps, Path(output)):
        what = "the output, with what is made before it,"
        check_room(steps.parent, disk.together, what=what, option=option)
        return
    check_room(steps.parent, disk.steps, what="what is made before the output", option=option)
    if not is_remote(str(output)):
        check_room(Path(os.path.realpath(output)).parent, disk.output)


def disk_nbytes(
    merges: Sequence[PlannedMerge],
    place_of: Callable[[PlannedMerge], Path | str],
    steps: Path,
    *,
    staging_of: Callable[[Stage], int],
) -> Disk:
    """Bytes that are taken beside what is taken by now.

    What is there, or begun, counts as taken. Results between stay until the last merge is published.

    Args:
        merges: in the order in which they are carried out.
        place_of: where the result of each will be.
        steps: the directory of the results between.
        staging_of: what a stage takes until its result is in its place.
    """
    kept = most = output = 0
    for merge in merges:
        for stage in merge.stages:
            if not _is_begun(steps, stage):
                most = max(most, kept + staging_of(stage))
                kept += stage.layout.nbytes
        nbytes = _missing_nbytes(merge, place_of(merge), steps)
        if merge is merges[-1]:
            output = nbytes
        else:
            kept += nbytes
        most = max(most, kept)
    return Disk(most, kept, output)


def _missing_nbytes(merge: PlannedMerge, place: Path | str, steps: Path) -> int:
    """Bytes of disk that the result of a merge takes, unless it is there or begun; less what is removed
    before: unfinished runs of other plans, which stand in the way where they are not to be replaced."""
    if is_remote(str(place)):
        return 0
    place = Path(place)
    is_made = place.parent == steps and place.exists()
    if is_made:
        return 0
    staging = Staging(Path(os.path.realpath(place)), merge.plan)
    nbytes = 0 if staging.root.exists() else sum(merge.plan["shards"].column("nbytes").to_pylist())
    return nbytes - sum(map(_taken_nbytes, staging.others()))


def _taken_nbytes(directory: Path) -> int:
    """Bytes of disk that the files below a directory take."""
    return sum(each.lstat().st_blocks * 512 for each in directory.rglob("*"))


def _is_one_disk(one: Path, other: Path) -> bool:
    """Whether two places, which need not exist, are on one file system."""
    places = (Path(os.path.realpath(each)) for each in (one, other))
    first, second = (nearest(each).stat().st_dev for each in places)
    return first == second


def _is_begun(steps: Path, stage: Stage) -> bool:
    return (steps / stage.name).exists() or any(steps.glob(f".{stage.name}.raymerge-*"))
