"""How much each expert counts: from a file of scores, or from the size of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch

from raymerge.errors import CheckpointError, PlanError, Problem, UserError
from raymerge.merge_plan.elements_part import strided, torch_dtype
from raymerge.merge_plan.expressions import Read
from raymerge.planner.inputs.quantised import CONVERT_FIRST, USE_PLAIN, quantised_tensors, stored_formats
from raymerge.planner.inputs.sources import Source, holdings
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.matching.input_resolver import Supplies
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.planner.moe.score_files import HOW_TO_WRITE, Row, file_scores
from raymerge.recipes import ExpertSetRecipe
from raymerge.storage.open import open_store

Scores = Mapping[str, Row]
"""A score for each expert, by the path of its block; more is better."""

FROM_WEIGHTS = "weights"
"""What a recipe writes to have scores computed from the experts' own weights."""

_BASE = 0
_LARGEST = 1e300
# So that sums of scores are numbers too.


def read_scores(recipe: ExpertSetRecipe, supplies: Supplies, blocks: Sequence[ExpertBlock]) -> Scores:
    """The scores that a recipe names.

    Args:
        recipe: its ``experts.scores`` is ``weights``, or the path of a file that has for each layer a list
            of numbers, by the layer's number or the path of its block.
        supplies: its models, the mixture of experts first.
        blocks: the experts of that.

    Raises:
        PlanError: there are no such scores, or not one finite number for each expert.
    """
    said, place = recipe.experts.scores or "", recipe.where("experts", "scores")
    try:
        found = _of_weights(supplies, blocks) if said == FROM_WEIGHTS else file_scores(said, blocks)
    except UserError as error:
        problems = [Problem(f"{place}: {each.where}", each.what, each.remedy) for each in error.problems]
        raise PlanError(problems) from error
    problems = [
        Problem(f"{place}: {said}", sentence, HOW_TO_WRITE)
        for block in blocks
        for sentence in _objections(block, found.get(block.path))
    ]
    if problems:
        raise PlanError(problems)
    return found


def _objections(block: ExpertBlock, scores: Row | None) -> Iterator[str]:
    where = f"layer {block.layer} ({block.path})"
    if scores is None:
        yield f"there are no scores for {where}."
    elif len(scores) != block.num_experts:
        yield f"{where} has {block.num_experts} experts, and {len(scores)} scores."
    elif not all(abs(score) <= _LARGEST for score in scores):
        yield f"the scores of {where} hold NaN, infinity or a number beyond {_LARGEST:g}."


def _of_weights(supplies: Supplies, blocks: Sequence[ExpertBlock]) -> Scores:
    """``|down| * sqrt(|gate|^2 + |up|^2)`` with Frobenius norms: how much an expert can do to its input."""
    source = supplies.sources[_BASE]
    if source.checkpoint.unwritten is not None:
        what = "scores are computed from weights while planning, and this model is not made yet."
        remedy = "Carry out the merge that makes it first, and name its output as base_model."
        raise PlanError(Problem(source.name, what, remedy))
    _refuse_codes(source, blocks)
    with _Matrices(supplies) as matrices:
        return {
            block.path: tuple(_size(matrices, block, expert) for expert in range(block.num_experts))
            for block in blocks
        }


def _refuse_codes(source: Source, blocks: Sequence[ExpertBlock]) -> None:
    """Refuse experts that are codes, by the format's name.

    Raises:
        PlanError: some are.
    """
    found = quantised_tensors(source.checkpoint)
    heads = tuple(f"{block.path}.experts" for block in blocks)
    for name, form in {**stored_formats(found), **found.unknown}.items():
        if name.startswith(heads):
            what = f"its experts are stored as {form} (such as {name}), and sizes are those of plain numbers."
            remedy = CONVERT_FIRST if name in found.members else USE_PLAIN
            raise PlanError(Problem(source.name, what, f"{remedy} Or give the scores in a file."))


def _size(matrices: _Matrices, block: ExpertBlock, expert: int) -> float:
    head = f"{block.canonical}.experts.{expert}"
    found = {each: matrices.square(f"{head}.{each}_proj.weight") for each in ("gate", "up", "down")}
    down, inner = found.pop("down"), [square for square in found.values() if square is not None]
    if down is None or not inner:
        what = f"the matrices of {head} cannot be told apart, so they have no sizes."
        raise PlanError(Problem(block.path, what, "Give the scores in a file."))
    return math.sqrt(down) * math.sqrt(math.fsum(inner))


class _Matrices:
    """The base's matrices, for one look at each.

    A run of bytes that holds several of them is read once if they are asked for one after the other: it is
    kept until another one is needed.
    """

    def __init__(self, supplies: Supplies) -> None:
        self._supplies = supplies
        self._base = supplies.sources[_BASE]
        self._stores = [open_store(each.root) for each in holdings(supplies.sources)]
        self._weights = Weights(self._base) if self._base.adapter is not None else None
        self._run: tuple[int, str, int, int] | None = None
        self._elements = torch.empty(0)

    def __enter__(self) -> _Matrices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (*self._stores, self._weights):
            if each is not None:
                each.close()

    def square(self, name: str) -> float | None:
        """Sum of the squares of all elements; None where there is no such matrix.

        Row by row, so that the number of threads does not show in it.
        """
        matrix = self._load(name)
        if matrix is None:
            return None
        lengths = torch.linalg.vector_norm(matrix.float().contiguous(), dim=1, dtype=torch.float64)
        return math.fsum(length * length for length in lengths.tolist())

    def _load(self, name: str) -> torch.Tensor | None:
        found = self._supplies.find(_BASE, name, name)
        if found is None:
            return None
        if found.factor is not None and self._weights is not None:
            return self._weights.load(name)
        read = found.read(0)
        elements = self._read(read)
        return elements.view(found.place.shape) if read.view is None else strided(elements, read.view)

    def _read(self, read: Read) -> torch.Tensor:
        """The elements of a run, as they are stored."""
        run = read.source, read.key, read.offset, read.nbytes
        if run != self._run:
            if not read.dtype.is_mergeable:
                what = f"it holds {read.dtype.value} where plain numbers are needed ({read.key})."
                remedy = "Use a checkpoint in bfloat16 or float32, or give the scores in a file."
                raise CheckpointError(Problem(self._base.name, what, remedy))
            buffer = torch.empty(read.nbytes, dtype=torch.uint8)
            self._stores[read.source].read_into(read.key, read.offset, buffer.numpy().data)
            self._run, self._elements = run, buffer.view(torch_dtype(read.dtype))
        return self._elements
