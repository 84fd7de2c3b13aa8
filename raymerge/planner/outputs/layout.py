"""An output in the files and chunks of a training checkpoint: whether it fits there, and what is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.checkpoints.dcp.layout import Layout, read_layout
from raymerge.checkpoints.dcp.metadata import METADATA_FILE
from raymerge.checkpoints.dcp.target import TargetLayout
from raymerge.checkpoints.source import Checkpoint
from raymerge.errors import CheckpointError, Problem, shortlist
from raymerge.merge_plan.expressions import Output
from raymerge.planner.inputs.sources import Source
from raymerge.recipes.schema import Recipe
from raymerge.storage.file_rules import TRAINING
from raymerge.storage.open import open_store
from raymerge.units import format_size

_NAME_ONE = (
    "Name a directory of torch's distributed checkpoint (.metadata and *.distcp), Megatron's torch_dist or "
    "shard-*-model-*.safetensors, or take 'layout' out for safetensors."
)
_ALIKE = "Name one of the training that the models come from, and leave 'dtype' and 'out_dtype' out."
_KEEP = "Write 'training_state: keep'."


@dataclass(frozen=True, slots=True)
class DecidedLayout:
    source: int
    training_state: str
    files: Mapping[str, int]
    """Sizes by key."""
    written: Mapping[str, bytes]
    """Files that are made anew."""
    note: str

    def to_json(self) -> dict[str, Any]:
        files = sorted(self.files.items())
        return {"source": self.source, "training_state": self.training_state, "files": list(map(list, files))}


def decide_layout(
    recipe: Recipe, sources: Sequence[Source], outputs: Sequence[Output]
) -> tuple[DecidedLayout | None, Sequence[Problem]]:
    """The layout that the recipe names, None without one; and what stands in its way. ``outputs`` are those
    that are stored."""
    if recipe.layout is None:
        return None, ()
    where = recipe.where("layout")
    source = next(each for each in sources if each.reference == recipe.layout)
    checkpoint = source.checkpoint
    if source.adapter is not None or checkpoint.chunks is None:
        what = f"{checkpoint.name} is no training checkpoint in chunks, whose layout an output could have."
        return None, [Problem(where, what, _NAME_ONE)]
    problems = [Problem(where, *each) for each in _misfits(checkpoint, outputs)]
    if problems:
        return None, problems
    drops = recipe.training_state == "drop"
    try:
        files, written = _without_state(checkpoint) if drops else (_all_files(checkpoint), {})
    except CheckpointError as error:
        return None, [Problem(f"{where}: {each.where}", each.what, each.remedy) for each in error.problems]
    note = (
        f"the output is written in the files and chunks of {checkpoint.name}{_of_state(checkpoint, drops)}."
    )
    return DecidedLayout(source.index, recipe.training_state, files, written, note), ()


def _misfits(checkpoint: Checkpoint, outputs: Sequence[Output]) -> Iterator[tuple[str, str]]:
    made = {each.name: (each.dtype, each.shape) for each in outputs}
    stored = {each.name: (each.dtype, each.shape) for each in checkpoint.stored.values()}
    name = checkpoint.name
    if missing := [each for each in made if each not in stored]:
        yield f"the output has {shortlist(missing)}, which {name} has not.", _ALIKE
    if missing := [each for each in stored if each not in made]:
        yield f"{name} has {shortlist(missing)}, which the output has not.", _ALIKE
    differ = [each for each in made if each in stored and made[each] != stored[each]]
    if differ:
        (dtype, shape), (other_dtype, other_shape) = made[differ[0]], stored[differ[0]]
        more = f", and {len(differ) - 1} more tensors differ" if differ[1:] else ""
        what = f"{differ[0]} is {dtype} {list(shape)} in the output, and {other_dtype} {list(other_shape)} in"
        yield f"{what} {name}{more}.", _ALIKE
    assert checkpoint.chunks is not None
    if pair := next(iter(checkpoint.chunks.twins), None):
        what = f"{name} stores {pair[0]} and {pair[1]} as the same bytes, which may differ in the output."
        yield what, "Name a checkpoint that stores each of them."


def _all_files(checkpoint: Checkpoint) -> dict[str, int]:
    """The files of chunks, and all beside them that is the training's."""
    beside = {each.key: each.nbytes for each in checkpoint.left_out if each.rule == TRAINING.name}
    own = {each.key: each.nbytes for each in checkpoint.files}
    return {key: nbytes for key, nbytes in beside.items() if "/" not in key} | own


def _without_state(checkpoint: Checkpoint) -> tuple[dict[str, int], dict[str, bytes]]:
    """Files and what is written anew. Raises CheckpointError: the state cannot be left out."""
    assert checkpoint.chunks is not None
    every, where = _all_files(checkpoint), f"{checkpoint.root}/{METADATA_FILE}"
    with open_store(checkpoint.root) as store:
        layout = read_layout(store, store.files())
        target = TargetLayout(layout, drops_state=True)
        if not target.sizes:
            return {each.key: each.nbytes for each in checkpoint.files}, {}
        if (key := _shared_blob(layout)) is not None:
            what = "is one safetensors blob, in which the model and the state of the training lie together."
            raise CheckpointError(Problem(store.location(key), what, _KEEP))
        written = target.metadata(store.read(METADATA_FILE, 0, every[METADATA_FILE]), where)
    sidecars = {key: every[key] for key in checkpoint.chunks.sidecars}
    return {**sidecars, **target.sizes}, {} if written is None else {METADATA_FILE: written}


def _shared_blob(layout: Layout) -> str | None:
    """A file of blobs that are no archives of one tensor each."""
    first: dict[str, int] = {}
    for tensor in layout.model.tensors.values():
        for chunk in tensor.chunks:
            first.setdefault(chunk.key, chunk.offset)
    return next((key for key, at in first.items() if not layout.reader.is_archive(key, at)), None)


def _of_state(checkpoint: Checkpoint, drops: bool) -> str:
    left = checkpoint.left
    if not left:
        return ""
    nbytes = sum(left.values())
    state = f"{len(left)} entries of the state of its training ({format_size(nbytes)} of tensors)"
    return f"; {state} are left out" if drops else f"; {state} are copied with them"
