"""What a merge without files takes in this process: its sources opened, its memory shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raymerge.checkpoints.dcp.store import ChunkedStore
from raymerge.checkpoints.source import Holding
from raymerge.deferred import torch
from raymerge.errors import OptionError, Problem
from raymerge.execute.stored_scales import check_scales
from raymerge.merge_plan.memory import FAR_BYTES, FAR_LANE_BYTES, SMALLEST_BUDGET, Projection, project
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import holdings, reads_far
from raymerge.planner.merges import PlannedMerge
from raymerge.runtime.driver.chained_merges import device_for
from raymerge.runtime.workers.pool import InlinePool
from raymerge.runtime.workers.sizing import check_free, fit_budget, free_memory, usual_budget
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo, ReadStore
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.execute.in_memory import OpMaker


def in_process(options: RunOptions) -> RunOptions:
    """The options for work in this process. Raises OptionError: they ask for other workers."""
    if options.address is not None:
        what = "tensors are made in this process, and no cluster takes part."
        raise OptionError(Problem("--address", what, "Leave it out, or submit the merge there."))
    if options.workers not in (None, 1):
        what = f"tensors are made in this process, which is one worker, not {options.workers}."
        raise OptionError(Problem("--workers", what, "Leave it out, and give threads."))
    return replace(options, inline=True, workers=None)


@dataclass(frozen=True, slots=True)
class Share:
    """How the memory for a merge without files is shared out."""

    projection: Projection
    """Of what makes it."""
    held: int
    """Bytes for what is made and not taken yet."""

    @property
    def peak(self) -> int:
        """Bytes that both take at most."""
        return self.projection.whole_peak + self.held


def share_memory(merge: PlannedMerge, options: RunOptions, *, whole: int, what: str) -> Share:
    """Half of the memory for what is made, but at least the ``whole`` bytes that must be there at once, of
    ``what``, and no more than leaves the other half enough to make it.

    Raises OptionError: there is too little for both."""
    check_free(options)
    plan, is_far = merge.plan, reads_far(merge.sources)
    free = free_memory()
    least = project(plan, SMALLEST_BUDGET).least_budget + is_far * (FAR_BYTES + FAR_LANE_BYTES)
    budget = options.memory or max(usual_budget(options, free), min(whole + 2 * least, free // 2))
    if budget < whole + least:
        text = f"{format_size(budget)} are too little to hold {what} whole ({format_size(whole)})"
        text += f" beside what makes it ({format_size(least)})."
        raise OptionError(Problem("--memory", text, f"The smallest that works is {whole + least} bytes."))
    held = min(max(whole, budget // 2), budget - least)
    return Share(fit_budget(plan, replace(options, memory=budget - held), is_far=is_far), held)


@contextmanager
def started_pool(merges: Sequence[PlannedMerge], options: RunOptions) -> Iterator[InlinePool]:
    """The device and the settings that these merges are computed with in this process."""
    pool = InlinePool(options.device, options.threads)
    try:
        pool.start()
        pool.settle(lambda: device_for(merges, ()))
        yield pool
    finally:
        pool.close()


@contextmanager
def op_maker(merge: PlannedMerge, projection: Projection, pool: InlinePool) -> Iterator[OpMaker]:
    """What makes ops of a merge. Raises CheckpointError: a source cannot be read; NonFiniteError: one has
    scales that are no positive numbers."""
    from raymerge.execute.in_memory import OpMaker

    held, retry_policy = holdings(merge.sources), RetryPolicy()
    with ExitStack() as stack:
        stores = [stack.enter_context(_opened(each, retry_policy)) for each in held]
        check_scales(merge.plan, stores, [each.name for each in held])
        device = torch.device(pool.device)
        maker = OpMaker(merge.plan, stores, device=device, projection=projection, threads=pool.threads)
        stack.enter_context(maker)
        stack.callback(retry_policy.end)
        yield maker


def _opened(holding: Holding, retry_policy: RetryPolicy) -> ReadStore:
    expected = {
        each.key: FileInfo(each.key, each.nbytes, each.version) for each in holding.files if each.version
    }
    store = holding.open(retry_policy=retry_policy, expected=expected)
    if isinstance(store, ChunkedStore):
        store.prepare()
    return store


def check_stages(merges: Sequence[PlannedMerge]) -> None:
    """Raises OptionError: some of the merges need results of stages, which are files."""
    for merge in merges:
        if merge.stages:
            titles = ", ".join(stage.title for stage in merge.stages)
            what = f"before this merge other results are computed, which need files: {titles}."
            raise OptionError(Problem(merge.recipe.where(), what, "Submit it, and read what it writes."))
