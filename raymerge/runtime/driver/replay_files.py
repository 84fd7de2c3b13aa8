"""The files of a checkpoint against its record, and against what its plan and its sources make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from raymerge.checkpoints.files import MODEL_CARD
from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.source import CONFIG_FILE
from raymerge.errors import Problem, UserError
from raymerge.merge_plan.tables import Plan
from raymerge.planner.chained_merges import PlannedMerge
from raymerge.publish.attempt import RECORD
from raymerge.publish.finish import check_shards, config_files, finished_files, kept_companions, written_files
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.provenance import Provenance
from raymerge.publish.record import PROVENANCE
from raymerge.publish.staging import NUMERICS, RECIPE, numerics_bytes
from raymerge.storage.addresses import shown
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore
from raymerge.verifier.companions import changed_file, file_digest, may_be_added
from raymerge.verifier.structure import verify_structure

_AGAIN = "Merge again, or take the checkpoint from where it is whole."


@dataclass(frozen=True, slots=True)
class Output:
    """A checkpoint that is looked at."""

    place: str
    """Where it is, with its options."""
    store: ReadStore
    """Its files."""
    record: Path
    """A directory of this machine that has its record: itself, or a copy of that alone."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return shown(self.place)

    @property
    def ledger(self) -> Path:
        """Its ledger."""
        return self.record / RECORD / NAME


def changed_files(output: Output, plan: Plan, told: Provenance) -> Iterator[Problem]:
    """Files that are not as the record in the checkpoint has them, the bytes of tensors aside.

    Args:
        output: the checkpoint.
        plan: the plan in its record.
        told: its provenance.
    """
    yield from verify_structure(output.place).problems
    yield from _shards_changed(output, plan)
    # All other files beside the weights are part of the structure.
    if MODEL_CARD in told.files:
        yield from changed_file(output.store, MODEL_CARD, told.files[MODEL_CARD], output.name)
    yield from _record_changed(output, plan, told)


def files_apart(output: Output, merge: PlannedMerge, told: Provenance) -> Iterator[Problem]:
    """Files beside the weights that are others than a merge that is planned anew makes."""
    donor = merge.sources[int(merge.plan.manifest["donor"])].checkpoint
    wanted = finished_files(merge.plan, donor.companions)
    for file in output.store.files():
        # Any other file is a problem of the structure.
        if file.key not in wanted and file.key.partition("/")[0] != RECORD and may_be_added(file.key):
            what = "the merge writes no such file."
            yield Problem(f"{output.name}/{file.key}", what, "Take it away, or merge again.")
    digests = {
        name: xxhash.xxh3_128_hexdigest(content) for name, content in written_files(merge.plan).items()
    }
    settled: dict[str, bytes] = {}
    # What another merge makes on the way is on no disk.
    if donor.unwritten is None:
        with open_store(donor.root) as files:
            kept = kept_companions(merge.plan, donor.companions)
            digests |= {key: file_digest(files, key) for key in kept}
            settled |= config_files(merge.plan, files, donor.config)
    for key, content in settled.items():
        if not _holds(output.store, key, content):
            yield Problem(f"{output.name}/{key}", "it is not what the plan makes.", _AGAIN)
    shards = merge.plan["shards"].column("name").to_pylist()
    for key in sorted(wanted - {*shards, CONFIG_FILE, INDEX_FILE}):
        if key not in told.files:
            yield Problem(
                f"{output.name}/{PROVENANCE}",
                f"it has no digest of {key}, which such a merge writes.",
                _AGAIN,
            )
        elif told.files[key] != digests.get(key, told.files[key]):
            whose = f"what {donor.name} has" if key in donor.companions else "what the plan makes"
            yield Problem(
                f"{output.name}/{key}", f"by its digest in the provenance it is not {whose}.", _AGAIN
            )


def _shards_changed(output: Output, plan: Plan) -> Iterator[Problem]:
    """Shards whose length or header is another than planned."""
    try:
        check_shards(plan, output.store)
    except UserError as error:
        for each in error.problems:
            yield replace(each, where=f"{output.name}/{each.where}")


def _record_changed(output: Output, plan: Plan, told: Provenance) -> Iterator[Problem]:
    """Files of the record that do not say what the provenance says."""
    if plan.digest != told.plan:
        what = f"it is of the plan {told.plan}, and {plan.digest} stands beside it."
        yield Problem(f"{output.name}/{PROVENANCE}", what, _AGAIN)
    recipe = told.recipes[-1] if told.recipes else ""
    if not _holds(output.store, f"{RECORD}/{RECIPE}", recipe.encode()):
        yield Problem(
            f"{output.name}/{RECORD}/{RECIPE}", "it is not the recipe that the provenance has.", _AGAIN
        )
    conditions = Ledger.conditions(output.ledger)
    if conditions is None:
        what = "is missing, or what it was begun under cannot be read."
        yield Problem(f"{output.name}/{RECORD}/{NAME}", what, _AGAIN)
    elif conditions.get("numerics") != dict(told.numerics):
        what = "it does not say the device and the torch that the provenance says."
        yield Problem(f"{output.name}/{RECORD}/{NAME}", what, _AGAIN)
    if not _holds(output.store, f"{RECORD}/{NUMERICS}", numerics_bytes(told.numerics)):
        what = "it does not say the device and the torch that the provenance says."
        yield Problem(f"{output.name}/{RECORD}/{NUMERICS}", what, _AGAIN)


def _holds(store: ReadStore, key: str, content: bytes) -> bool:
    """Whether a file has these bytes."""
    info = store.info(key)
    return info is not None and info.nbytes == len(content) and store.read(key, 0, info.nbytes) == content
