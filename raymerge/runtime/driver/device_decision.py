"""Has the device of a submission chosen: the one that was begun on, or the faster one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir

from raymerge.planner.chained_merges import PlannedMerge
from raymerge.planner.inputs.sources import holdings
from raymerge.planner.inputs.stages import Prepared
from raymerge.publish.ledger import Ledger
from raymerge.runtime.devices.choice import Choice, amounts_of, choose
from raymerge.runtime.devices.probe import Sample
from raymerge.runtime.workers.pool import Measure, Pool
from raymerge.storage.addresses import is_remote


def settle_device(
    pool: Pool, merges: Sequence[PlannedMerge], output: Path | str, *, ledgers: Sequence[Path]
) -> None:
    """Have a started pool choose its device, where there is a choice.

    Bytes are the same on one kind of device, so that what was begun goes on there, whatever is faster today.
    Before a merge whole layers of a model are computed, for which a GPU that works is always the faster one.

    Args:
        pool: what chooses.
        merges: all merges of the submission.
        output: directory of the new checkpoint, or a place in an object store.
        ledgers: where ledgers of unfinished runs and results between would be, the most telling first.
    """

    def chosen(measure: Measure) -> Choice:
        begun = next(filter(None, map(_device_of, ledgers)), None)
        if begun is not None:
            return Choice("cuda" if begun == "cuda" else "cpu", "what is there was begun on it")
        # Also where that would not change the choice: it is found out whether the GPU works.
        measured = measure(_sample(merges[0], output))
        if any(merge.stages for merge in merges):
            return Choice("cuda", "what comes before the merge computes layers of a model", measured.probe)
        amounts = amounts_of(merge.plan for merge in merges)
        return choose(measured.probe, amounts, cpu=measured.cpu, gpu=measured.gpu)

    pool.settle(chosen)


def _device_of(ledger: Path) -> str | None:
    """The kind of device that a ledger was begun on."""
    numerics = (Ledger.conditions(ledger) or {}).get("numerics")
    device = numerics.get("device") if isinstance(numerics, dict) else None
    return device if isinstance(device, str) else None


def _sample(merge: PlannedMerge, output: Path | str) -> Sample:
    """The largest file of the sources, and the place nearest to the output that is there: of an object store
    this machine's directory for what is temporary."""
    files = [
        (file.nbytes, each.root, file.key)
        for each in holdings(merge.sources)
        if not isinstance(each, Prepared)
        for file in each.files
    ]
    nbytes, root, key = max(files)
    near = Path(gettempdir()) / "out" if is_remote(str(output)) else Path(output).absolute()
    target = next(place for place in near.parents if place.is_dir())
    return Sample(str(root), key, nbytes, str(target))
