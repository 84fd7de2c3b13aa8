"""The result of a merge as a model that is not written: its bytes are made when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from raymerge.checkpoints.source import Checkpoint, Holding, open_checkpoint
from raymerge.merge_plan.memory import LOAD_MOST
from raymerge.merge_plan.plan import ints, made_bytes
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import Source, holdings, source_of
from raymerge.planner.merges import PlannedMerge
from raymerge.publish.finish import config_files, kept_companions, written_files
from raymerge.recipes.entry import ModelReference
from raymerge.runtime.driver.in_memory import (
    Share,
    check_stages,
    in_process,
    op_maker,
    share_memory,
    started_pool,
)
from raymerge.runtime.workers.pool import InlinePool
from raymerge.storage.in_memory import MemoryStore
from raymerge.storage.open import open_store
from raymerge.storage.store import FileInfo, ReadStore
from raymerge.storage.temporary import OwnDirectory

if TYPE_CHECKING:
    from raymerge.execute.op_cache import MadeOps, OpCache


def files_beside(merges: Sequence[PlannedMerge]) -> dict[str, bytes]:
    """What ``submit`` writes beside the weights of the last merge, by name: config, tokenizer, index and
    other companions. Without a model card, and without the record of a run."""
    plan, sources = merges[-1].plan, merges[-1].sources
    donor = sources[int(plan.manifest["donor"])]
    with _donor_files(donor, merges) as store:
        sizes = {each.key: each.nbytes for each in store.files()}
        keys = kept_companions(plan, donor.checkpoint.companions)
        copied = {key: store.read(key, 0, sizes[key]) for key in keys if key in sizes}
        return {**copied, **written_files(plan), **config_files(plan, store, donor.checkpoint.config)}


def _donor_files(donor: Source, merges: Sequence[PlannedMerge]) -> ReadStore:
    if donor.checkpoint.unwritten is None:
        return open_store(donor.checkpoint.root)
    names = [each.recipe.name for each in merges]
    made_by = merges[: names.index(donor.reference.path) + 1]
    return MemoryStore(donor.name, files_beside(made_by), ())


class MergeStore(MemoryStore):
    """The files of a merge. What is read of a shard is made first, no more than the ops that it lies in."""

    def __init__(self, name: str, plan: Plan, ops: MadeOps, small: Mapping[str, bytes], version: str) -> None:
        shards = plan["shards"].to_pylist()
        super().__init__(name, small, [FileInfo(each["name"], each["nbytes"], version) for each in shards])
        self._ops = ops
        self._headers: Mapping[str, bytes] = {each["name"]: each["header"] for each in shards}
        table = plan["ops"]
        shard, self._offsets, self._sizes = (ints(table, each) for each in ("shard", "offset", "nbytes"))
        self._first = {each["name"]: int(np.searchsorted(shard, n)) for n, each in enumerate(shards)}
        self._stop = {
            each["name"]: int(np.searchsorted(shard, n, side="right")) for n, each in enumerate(shards)
        }

    def fill(self, key: str, offset: int, buffer: memoryview) -> None:
        header, target = self._headers[key], np.frombuffer(buffer, np.uint8)
        before = header[offset : offset + len(buffer)]
        target[: len(before)] = np.frombuffer(before, np.uint8)
        first, stop, end = self._first[key], self._stop[key], offset + len(buffer)
        begins = self._offsets[first:stop]
        some = slice(
            int(np.searchsorted(begins + self._sizes[first:stop], offset, side="right")),
            int(np.searchsorted(begins, end, side="left")),
        )
        for op, data in self._ops.read(range(first, stop)[some]):
            begin = int(self._offsets[op])
            low, high = max(begin, offset), min(begin + len(data), end)
            target[low - offset : high - offset] = data[low - begin : high - begin]


@contextmanager
def open_merge(
    merges: Sequence[PlannedMerge], options: RunOptions, *, cache: OpCache | None = None
) -> Iterator[Source]:
    """The result of merges, as ``plan_for`` gives them, as a model like one on disk, without its weights
    being written: config, tokenizer and companions lie in its ``checkpoint.root``, a temporary directory, and
    its tensors are made when they are read, in memory of the options' limit.

    ``cache``: keeps what is made, beside that memory, for other merges that make the same of the same
    sources; None: an own one, in it.

    Raises PlanError: a plan has problems; OptionError: too little memory, other workers, or merges that need
    results of stages; CheckpointError: a source cannot be read."""
    options = in_process(options)
    check_stages(merges)
    with ExitStack() as stack:
        pool = stack.enter_context(started_pool(merges, options))
        merge = stack.enter_context(over_results(merges, options, pool))
        share = store_share(merge, alone_of(options, len(merges)))
        yield stack.enter_context(_opened(merge, share, pool, cache))


@contextmanager
def over_results(
    merges: Sequence[PlannedMerge], options: RunOptions, pool: InlinePool
) -> Iterator[PlannedMerge]:
    """The last of some merges over the results of the others, which are made as they are read."""
    results: dict[str, Checkpoint] = {}

    def found(source: Source) -> Source:
        if source.checkpoint.unwritten is None:
            return source
        return replace(source, checkpoint=results[source.reference.path])

    with ExitStack() as stack:
        for each in merges:
            each.plan.require()
            merge = replace(each, sources=tuple(map(found, each.sources)))
            if each is not merges[-1]:
                share = store_share(merge, alone_of(options, len(merges)))
                opened = stack.enter_context(_opened(merge, share, pool, None))
                results[str(merge.recipe.name)] = opened.checkpoint
        yield merge


def alone_of(options: RunOptions, num_merges: int) -> RunOptions:
    """The options for one of several merges that are made side by side, with equal parts of the memory."""
    return options if options.memory is None else replace(options, memory=options.memory // num_merges)


def store_share(merge: PlannedMerge, options: RunOptions) -> Share:
    """The memory of a merge that is read as a store; raises OptionError where it is too little."""
    made = made_bytes(merge.plan)
    if not len(made):
        return share_memory(merge, options, whole=0, what="this model")
    largest = int(made.argmax())
    tensor = int(ints(merge.plan["ops"], "tensor")[largest])
    what = merge.plan["tensors"].column("name")[tensor].as_py()
    # What is made is beside what is kept, and kept afterwards.
    return share_memory(merge, options, whole=2 * int(made[largest]), what=what)


@contextmanager
def _opened(merge: PlannedMerge, share: Share, pool: InlinePool, cache: OpCache | None) -> Iterator[Source]:
    from raymerge.execute.op_cache import MadeOps, OpCache

    plan, name = merge.plan, merge.recipe.name or "the result"
    identities = [_identity(each) for each in holdings(merge.sources)]
    version = xxhash.xxh3_128_hexdigest("/".join((plan.digest, *identities)).encode())
    small = files_beside([merge])
    together = min(LOAD_MOST, share.held // 4)
    most_made = max(together, int(made_bytes(plan).max(initial=0)))
    with OwnDirectory() as directory, op_maker(merge, share.projection, pool) as maker:
        for key, content in small.items():
            path = Path(directory, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        own = OpCache(share.held - most_made) if cache is None else cache
        ops = MadeOps(plan, maker, own, identities=identities, together=together)
        store = MergeStore(name, plan, ops, small, version if all(identities) else "")
        checkpoint = open_checkpoint(directory, name, opener=lambda: store)
        yield source_of(0, ModelReference(name), checkpoint)


def _identity(holding: Holding) -> str:
    """What tells its contents apart; "" where they may change without a trace."""
    if not all(each.version for each in holding.files):
        return ""
    files = [(each.key, each.nbytes, each.version) for each in holding.files]
    is_made = isinstance(holding, Checkpoint) and holding.opener is not None
    return repr(("" if is_made else holding.place, files))
