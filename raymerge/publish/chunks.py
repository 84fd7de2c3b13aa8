"""Stores of an output in the files and chunks of a training checkpoint.

The plan of such an output has its tensors in one file, which is never there: ``TensorFile`` gives its bytes
from the chunks, and ``GrowingTensorFile`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raymerge.checkpoints.dcp.store import ChunkedStore
from raymerge.checkpoints.dcp.target import GrowingTensorFile, TargetLayout, TensorFile
from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.execute.receipts import UNFINISHED
from raymerge.merge_plan.plan import planned_layout
from raymerge.merge_plan.tables import Plan
from raymerge.storage.addresses import chunked_place
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore


def output_store(plan: Plan, place: str) -> ReadStore:
    """The store at the place of a checkpoint that a plan made, with the shards of the plan."""
    if planned_layout(plan) is None:
        return open_store(place)
    files = open_store(chunked_place(place))
    assert isinstance(files, ChunkedStore)
    return TensorFile(files, *_shard(plan), files.chunks_of)


def growing_tensors(
    plan: Plan,
    staging: LocalStore,
    source: ReadStore,
    name_of: Callable[[str], str] = lambda key: key + UNFINISHED,
) -> GrowingTensorFile:
    """The shard of a plan whose layout is that of ``source``; ``name_of``: under which name a file of chunks
    is in the staging directory by now."""
    return GrowingTensorFile(staging, *_shard(plan), target_layout(plan, source).chunks_of, name_of)


def target_layout(plan: Plan, source: ReadStore) -> TargetLayout:
    layout = planned_layout(plan)
    assert layout is not None
    assert isinstance(source, ChunkedStore)
    return TargetLayout(source.layout(), drops_state=layout.drops_state)


def _shard(plan: Plan) -> tuple[Sequence[str], bytes, Sequence[StoredTensor]]:
    """Names, header and tensors of the one file that such a plan has."""
    ((name, header),) = plan.columns("shards", "name", "header")
    tensors = [
        StoredTensor(tensor, DType(dtype), tuple(shape), name, offset, nbytes)
        for tensor, dtype, shape, offset, nbytes in plan.columns(
            "tensors", "name", "dtype", "shape", "offset", "nbytes"
        )
    ]
    return (name, name + UNFINISHED), header, tensors
