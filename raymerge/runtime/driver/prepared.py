"""Stages between other merges: over results that are there by now, and with results that are there by now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raymerge.checkpoints.header import read_header
from raymerge.checkpoints.source import WeightFile
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.inputs.source import GateSpec, Prepared, Source, Stage
from raymerge.runtime.driver.stage_run import result_digest
from raymerge.runtime.driver.stage_work import sources_of_stage
from raymerge.storage.local.store import LocalStore


def awaits_results(stage: Stage) -> bool:
    """Whether a stage reads a checkpoint that another merge has to make first."""
    return any(source.checkpoint.unwritten is not None for source in sources_of_stage(stage))


def over_results(stage: Stage, sources: Sequence[Source]) -> Stage:
    """The stage over the results of other merges as they are.

    Args:
        stage: as it was planned.
        sources: of its merge, opened after the results were made.
    """
    found = {source.reference: source for source in sources}

    def opened(planned: Source) -> Source:
        if planned.checkpoint.unwritten is None:
            return planned
        return replace(planned, checkpoint=found[planned.reference].checkpoint)

    spec = stage.spec
    if isinstance(spec, GateSpec):
        return replace(stage, spec=replace(spec, base=opened(spec.base)))
    return replace(stage, spec=replace(spec, reference=opened(spec.reference), other=opened(spec.other)))


def with_stage_results(sources: Sequence[Source], root: Path) -> tuple[Source, ...]:
    """The sources with what stages prepared as it is below ``root`` now.

    Raises:
        CheckpointError: a result is not there, or is not the planned one.
    """
    return tuple(
        replace(source, prepared=tuple(_opened(each, root / each.stage.name) for each in source.prepared))
        if source.prepared
        else source
        for source in sources
    )


def _opened(prepared: Prepared, place: Path) -> Prepared:
    """A result whose file has its digest for a version."""
    return replace(
        prepared, root=str(place), files=tuple(_file(planned, prepared, place) for planned in prepared.files)
    )


def _file(planned: WeightFile, prepared: Prepared, place: Path) -> WeightFile:
    with LocalStore(place) as store:
        info = store.info(planned.key)
        header = None if info is None else read_header(store, info.key, info.nbytes, info.version)
    digest = result_digest(place)
    if (
        header is None
        or digest is None
        or (header.nbytes, header.digest) != (planned.nbytes, planned.header_digest)
    ):
        state = (
            "absent"
            if header is None or digest is None
            else "no longer what was prepared; something else changed it"
        )
        what = f"the result of '{prepared.name}' is {state}."
        raise CheckpointError(Problem(str(place / planned.key), what, "Give the command again."))
    return WeightFile(header.key, header.nbytes, header.digest, digest)
