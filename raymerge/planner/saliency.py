"""How much each expert counts: from a file of scores, or from the size of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raymerge.checkpoints.source import open_tensor_file
from raymerge.errors import PlanError, Problem, UserError
from raymerge.planner.elements import torch_dtype
from raymerge.planner.expert_blocks import ExpertBlock
from raymerge.planner.sources import Source
from raymerge.planner.weights import Weights
from raymerge.recipes import ExpertSetRecipe
from raymerge.storage.open import open_store

Scores = Mapping[str, tuple[float, ...]]
"""A score for each expert, by the path of its block; more is better."""

FROM_WEIGHTS = "weights"
"""What a recipe writes to have scores computed from the experts' own weights."""

_MAX_TEXT_BYTES = 64 * 2**20
_WRITE = 'Write {"LAYER": [one number for each expert]} as JSON, or one such tensor a layer as safetensors.'


def read_scores(recipe: ExpertSetRecipe, source: Source, blocks: Sequence[ExpertBlock]) -> Scores:
    """The scores that a recipe names.

    Args:
        recipe: its ``experts.scores`` is ``weights``, or the path of a file that has for each layer a list
            of numbers, by the layer's number or the path of its block.
        source: the mixture of experts.
        blocks: its experts.

    Raises:
        PlanError: there are no such scores, or not one finite number for each expert.
    """
    said, place = recipe.experts.scores or "", recipe.where("experts", "scores")
    try:
        found = _of_weights(source, blocks) if said == FROM_WEIGHTS else _of_file(said, blocks)
    except UserError as error:
        problems = [Problem(f"{place}: {each.where}", each.what, each.remedy) for each in error.problems]
        raise PlanError(problems) from error
    are_weights = recipe.experts.merge is not None
    problems = [
        Problem(f"{place}: {said}", sentence, _WRITE)
        for block in blocks
        for sentence in _objections(block, found.get(block.path), as_weights=are_weights)
    ]
    if problems:
        raise PlanError(problems)
    return found


def _of_weights(source: Source, blocks: Sequence[ExpertBlock]) -> Scores:
    """``|down| * sqrt(|gate|^2 + |up|^2)`` with Frobenius norms: what an expert can do to its input at most.

    Every byte of every expert is read, once.
    """
    if source.checkpoint.unwritten is not None:
        what = "scores are computed from weights while planning, and this model is not made yet."
        remedy = "Carry out the merge that makes it first, and name its output as base_model."
        raise PlanError(Problem(source.name, what, remedy))
    with Weights(source) as weights:
        names = frozenset(weights.names())
        return {
            block.path: tuple(_size(weights, names, block, expert) for expert in range(block.num_experts))
            for block in blocks
        }


def _size(weights: Weights, names: frozenset[str], block: ExpertBlock, expert: int) -> float:
    head = f"{block.canonical}.experts.{expert}"
    squares = {
        projection: _square(weights, name)
        for projection in ("gate", "up", "down")
        if (name := f"{head}.{projection}_proj.weight") in names
    }
    inner = math.fsum(value for projection, value in squares.items() if projection != "down")
    if "down" not in squares or len(squares) < 2:
        what = f"the matrices of {head} cannot be told apart, so they have no sizes."
        raise PlanError(Problem(block.path, what, "Give the scores in a file."))
    return math.sqrt(squares["down"]) * math.sqrt(inner)


def _square(weights: Weights, name: str) -> float:
    """Sum of the squares of all elements; row by row, so that the number of threads does not show in it."""
    lengths = torch.linalg.vector_norm(weights.load(name), dim=1, dtype=torch.float64)
    return math.fsum(length * length for length in lengths.tolist())


def _of_file(said: str, blocks: Sequence[ExpertBlock]) -> Scores:
    path = Path(said).expanduser()
    if not path.is_file():
        remedy = "Give the path of a file, or 'weights' to have scores computed."
        raise PlanError(Problem(said, "there is no such file of scores.", remedy))
    listed = _tensors(path) if path.suffix == ".safetensors" else _parsed(path)
    found: dict[str, tuple[float, ...]] = {}
    for block in blocks:
        for key in (str(block.layer), block.path, block.canonical):
            if key in listed and block.path not in found:
                found[block.path] = listed[key]
    return found


def _parsed(path: Path) -> Mapping[str, tuple[float, ...]]:
    """Lists of numbers from a JSON file; what is none is left out, so that it is missed by its name."""
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise PlanError(Problem(str(path), "is too large for a file of scores.", _WRITE))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(Problem(str(path), f"is not JSON ({str(error)[:80]}).", _WRITE)) from error
    if not isinstance(data, dict):
        raise PlanError(Problem(str(path), "is no map of layers.", _WRITE))
    return {key: tuple(map(float, value)) for key, value in data.items() if _is_numbers(value)}


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) in (int, float) for each in value)


def _tensors(path: Path) -> Mapping[str, tuple[float, ...]]:
    checkpoint = open_tensor_file(path, str(path))
    found: dict[str, tuple[float, ...]] = {}
    with open_store(checkpoint.root) as store:
        for name, tensor in checkpoint.tensors.items():
            if tensor.dtype.torch_name is None or len(tensor.shape) != 1 or not tensor.nbytes:
                continue
            buffer = bytearray(store.read(tensor.key, tensor.offset, tensor.nbytes))
            values = torch.frombuffer(buffer, dtype=torch_dtype(tensor.dtype))
            found[name] = tuple(values.double().tolist())
    return found


def _objections(block: ExpertBlock, scores: Sequence[float] | None, *, as_weights: bool) -> Iterator[str]:
    where = f"layer {block.layer} ({block.path})"
    if scores is None:
        yield f"there are no scores for {where}."
    elif len(scores) != block.num_experts:
        yield f"{where} has {block.num_experts} experts, and {len(scores)} scores."
    elif not all(map(math.isfinite, scores)):
        yield f"the scores of {where} hold NaN or infinity."
    elif as_weights and min(scores) < 0:
        yield f"the lowest score of {where} is {min(scores):g}, and weights of a mean cannot be negative."
