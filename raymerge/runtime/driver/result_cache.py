"""Results between that are there by now: which of them are still what their plans say, and nobody touched."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.chained_merges import PlannedMerge
from raymerge.planner.inputs.source import Source
from raymerge.publish.attempt import RECORD
from raymerge.publish.finish import kept_companions
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.record import PROVENANCE, read_record
from raymerge.publish.staging import is_untouched
from raymerge.publish.steps_place import steps_directory
from raymerge.runtime.driver.prepared import over_results, with_stage_results
from raymerge.runtime.driver.stage_run import is_stage_made
from raymerge.runtime.driver.versions import file_versions
from raymerge.runtime.workers.pool import Pool
from raymerge.storage.local.store import LocalStore
from raymerge.storage.temporary import fetched
from raymerge.verifier.structure import RECORD_PLAN, verify_structure


def kept_steps(
    merges: Sequence[PlannedMerge], output: Path | str, steps: str | None = None
) -> frozenset[str]:
    """Names of the merges that are made already, as far as can be told without workers and without weights.

    A worker with another device or another version of torch makes them again. One whose files were touched
    is not among them, though it may turn out that all its bytes are right.

    Args:
        merges: in the order in which they are carried out.
        output: the output place, with its options.
        steps: the directory that the user names for results between; None for beside the output.
    """
    root = steps_directory(output, steps)
    found: set[str] = set()
    for merge in merges[:-1]:
        if found.issuperset(merge.uses.values()) and is_kept(merge, root):
            found.add(str(merge.recipe.name))
    return frozenset(found)


def with_results(merge: PlannedMerge, root: Path) -> tuple[Source, ...]:
    """The sources of a merge, with the results of other merges as they are."""
    wanted = merge.plan.manifest["sources"]
    return tuple(
        _found(source, root / merge.uses[source.index], wanted[source.index]["made_by"])
        if source.index in merge.uses
        else source
        for source in merge.sources
    )


def _found(source: Source, place: Path, digest: str) -> Source:
    """A source as it lies on disk, if it was made by the plan of that digest."""
    checkpoint = open_checkpoint(place, source.name)
    # Only now: what was written to before it was opened is found here, and after that by its version.
    if digest_at(place) != digest or not _is_as_made(place):
        what = "it is no longer the result that was planned with; something else changed it meanwhile."
        raise CheckpointError(Problem(str(place), what, "Give the command again."))
    # What somebody laid beside them since is no part of it.
    published = Ledger.files(place / RECORD / NAME) or {}
    companions = tuple(key for key in checkpoint.companions if key in published)
    found = replace(checkpoint, companions=companions, contents=_contents(place))
    return replace(source, checkpoint=found)


def _contents(place: Path) -> str:
    """A digest of what was written, by its own record; "" where that does not tell."""
    try:
        with LocalStore(place) as store:
            told = read_record(store, PROVENANCE)
    except CheckpointError:
        return ""
    told = {key: told.get(key) for key in ("plan", "numerics", "tensors", "files")}
    return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True).encode())


def is_kept(merge: PlannedMerge, root: Path, pool: Pool | None = None) -> bool:
    """Whether the result of a merge that others use is there, and those of its stages; None for any pool."""
    numerics, of_stages = (None, None) if pool is None else (pool.numerics, pool.stage_numerics)
    results = with_results(merge, root)
    stages = [over_results(stage, results) for stage in merge.stages]
    if not all(is_stage_made(root / stage.name, stage, of_stages) for stage in stages):
        return False
    return _is_made(root / str(merge.recipe.name), merge, with_stage_results(results, root), numerics)


def _is_made(
    place: Path, merge: PlannedMerge, sources: Sequence[Source], numerics: Mapping[str, str] | None = None
) -> bool:
    """Whether a directory holds, untouched, what a merge makes of these sources; None for any numerics."""
    if digest_at(place) != merge.plan.digest:
        return False
    before = Ledger.conditions(place / RECORD / NAME) or {}
    if before.get("versions") != file_versions(sources):
        return False
    if numerics is not None and before.get("numerics") != numerics:
        return False
    if not (_is_as_made(place) and _has_companions(place, merge, sources)):
        return False
    # Companions are compared above, and what lies beside them is not read.
    return verify_structure(place).are_tensors_sound


def _is_as_made(place: Path) -> bool:
    """Whether nobody wrote to a result, and its record tells what is in it; reads no weights."""
    return is_untouched(place) and _contents(place) != ""


def digest_at(place: Path) -> str | None:
    """Digest of the plan that a checkpoint was made by, as its record says."""
    try:
        found = json.loads((place / RECORD_PLAN / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("digest") if isinstance(found, dict) else None


def _has_companions(place: Path, merge: PlannedMerge, sources: Sequence[Source]) -> bool:
    """Whether the files that are copied are still those of the donor: no plan speaks of what is in them."""
    donor = sources[int(merge.plan.manifest["donor"])].checkpoint
    kept = kept_companions(merge.plan, donor.companions)
    with fetched(donor.root, kept) as theirs:
        return all(
            (place / key).is_file() and filecmp.cmp(place / key, theirs / key, shallow=False) for key in kept
        )
