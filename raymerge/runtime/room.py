"""How much disk a submission still takes until its output is in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from raymerge.planner.planned import PlannedMerge
from raymerge.planner.stages import Stage
from raymerge.runtime.staging import Staging


def disk_nbytes(
    merges: Sequence[PlannedMerge],
    place_of: Callable[[PlannedMerge], Path | str],
    steps: Path,
    *,
    staging_of: Callable[[Stage], int],
) -> int:
    """Bytes that are taken at most at one time, beside what is taken by now.

    What is there, or begun, counts as taken. Results between stay until the last merge is published.

    Args:
        merges: in the order in which they are carried out.
        place_of: where the result of each will be.
        steps: the directory of the results between.
        staging_of: what a stage takes until its result is in its place.
    """
    kept = most = 0
    for merge in merges:
        for stage in merge.stages:
            if not _is_begun(steps, stage):
                most = max(most, kept + staging_of(stage))
                kept += stage.layout.nbytes
        place = Path(place_of(merge))
        begun = Staging(Path(os.path.realpath(place)), merge.plan).root
        is_made = place.parent == steps and place.exists()
        if not (is_made or begun.exists()):
            kept += sum(merge.plan["shards"].column("nbytes").to_pylist())
        most = max(most, kept)
    return most


def _is_begun(steps: Path, stage: Stage) -> bool:
    return (steps / stage.name).exists() or any(steps.glob(f".{stage.name}.raymerge-*"))
