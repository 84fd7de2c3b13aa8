"""How much each expert counts: from a file of scores, or from the size of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from raymerge.checkpoints.source import open_tensor_file
from raymerge.errors import CheckpointError, PlanError, Problem, UserError
from raymerge.merge_plan.elements import strided, torch_dtype
from raymerge.merge_plan.expressions import Read
from raymerge.planner.inputs.quantised import CONVERT_FIRST, USE_PLAIN, quantised_tensors, stored_formats
from raymerge.planner.inputs.source import Source, holdings
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.recipes import ExpertSetRecipe
from raymerge.storage.open import open_store

Row = tuple[float, ...]
"""A number for each expert of a layer."""

HOW_TO_WRITE = (
    'Write {"LAYER": [one number for each expert]} as JSON, or one such tensor a layer as safetensors.'
)
"""What every message on such a file ends with."""

_MAX_NBYTES = 64 * 2**20
_SHOWN = 5


def file_scores(said: str, blocks: Sequence[ExpertBlock]) -> Mapping[str, Row]:
    """The scores in a file, by the path of their block; of blocks that it does not name there are none.

    Args:
        said: path of a JSON or safetensors file. Its keys are numbers of layers or paths of blocks; what is
            no list of numbers, such as a comment, is passed over.
        blocks: the experts that it may speak of.

    Raises:
        PlanError: the file cannot be read, or what it says is not clear.
        CheckpointError: a safetensors file is broken.
    """
    try:
        path = _path(said)
        listed = _tensors(path) if path.suffix == ".safetensors" else _parsed(path)
    except OSError as error:
        what = f"cannot be read ({error.strerror or error})."
        raise PlanError(Problem(said, what, "Mend its rights or its place, or give another file.")) from error
    layers = {key: block for block in blocks for key in (str(block.layer), block.path, block.canonical)}
    problems = [Problem(str(path), what, remedy) for what, remedy in _unclear(listed, layers)]
    if problems:
        raise PlanError(problems)
    return {layers[key].path: row for key, row in listed.items()}


def _path(said: str) -> Path:
    remedy = "Give the path of a file, or 'weights' to have scores computed."
    try:
        path = Path(said).expanduser()
    except RuntimeError as error:
        raise PlanError(Problem(said, "there is no such user, and so no such file.", remedy)) from error
    if not path.is_file():
        raise PlanError(Problem(said, "there is no such file of scores.", remedy))
    if path.stat().st_size > _MAX_NBYTES:
        raise PlanError(Problem(said, "is too large for a file of scores.", HOW_TO_WRITE))
    return path


def _unclear(listed: Mapping[str, Row], layers: Mapping[str, ExpertBlock]) -> Iterator[tuple[str, str]]:
    """Layers that the model has not, and layers that are named twice."""
    strange = [key for key in listed if key not in layers]
    if strange:
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        what = f"it has scores for {', '.join(map(repr, strange[:_SHOWN]))}{more}, where no experts are."
        numbers = ", ".join(dict.fromkeys(str(block.layer) for block in layers.values()))
        yield what, f"Remove them, or use the file of this very model: its layers with experts are {numbers}."
    by_path: dict[str, list[str]] = {}
    for key in listed:
        if key in layers:
            by_path.setdefault(layers[key].path, []).append(key)
    for keys in by_path.values():
        if len(keys) > 1:
            yield f"{' and '.join(map(repr, keys))} name one and the same layer.", "Keep one of them."


def _parsed(path: Path) -> Mapping[str, Row]:
    """Lists of numbers from a JSON file; what is none is left out, so that it is missed by its name."""
    repeated: dict[str, None] = {}

    def one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                repeated[key] = None
            found[key] = value
        return found

    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=one_of_each)
    except (ValueError, RecursionError) as error:
        raise PlanError(Problem(str(path), f"is not JSON ({str(error)[:80]}).", HOW_TO_WRITE)) from error
    if not isinstance(data, dict):
        raise PlanError(Problem(str(path), "is no map of layers.", HOW_TO_WRITE))
    if repeated:
        what = f"these keys stand in it more than once: {', '.join(map(repr, list(repeated)[:_SHOWN]))}."
        raise PlanError(Problem(str(path), what, "Keep one of each."))
    return {key: tuple(map(_number, value)) for key, value in data.items() if _is_numbers(value)}


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) in (int, float) for each in value)


def _number(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _tensors(path: Path) -> Mapping[str, Row]:
    """The vectors of a safetensors file."""
    checkpoint = open_tensor_file(path, str(path))
    found: dict[str, Row] = {}
    with open_store(checkpoint.root) as store:
        for name, tensor in checkpoint.tensors.items():
            if tensor.dtype.torch_name is None or len(tensor.shape) != 1 or not tensor.nbytes:
                continue
            buffer = bytearray(store.read(tensor.key, tensor.offset, tensor.nbytes))
            values = torch.frombuffer(buffer, dtype=torch_dtype(tensor.dtype))
            found[name] = tuple(values.double().tolist())
    return found


Scores = Mapping[str, Row]
"""A score for each expert, by the path of its block; more is better."""

FROM_WEIGHTS = "weights"
"""What a recipe writes to have scores computed from the experts' own weights."""

_BASE = 0
_LARGEST = 1e300
# So that sums of scores are numbers too.


def read_scores(recipe: ExpertSetRecipe, resolver: InputResolver, blocks: Sequence[ExpertBlock]) -> Scores:
    """The scores that a recipe names.

    Args:
        recipe: its ``experts.scores`` is ``weights``, or the path of a file that has for each layer a list
            of numbers, by the layer's number or the path of its block.
        resolver: its models, the mixture of experts first.
        blocks: the experts of that.

    Raises:
        PlanError: there are no such scores, or not one finite number for each expert.
    """
    said, place = recipe.experts.scores or "", recipe.where("experts", "scores")
    try:
        found = _of_weights(resolver, blocks) if said == FROM_WEIGHTS else file_scores(said, blocks)
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


def _of_weights(resolver: InputResolver, blocks: Sequence[ExpertBlock]) -> Scores:
    """``|down| * sqrt(|gate|^2 + |up|^2)`` with Frobenius norms: how much an expert can do to its input."""
    source = resolver.sources[_BASE]
    if source.checkpoint.unwritten is not None:
        what = "scores are computed from weights while planning, and this model is not made yet."
        remedy = "Carry out the merge that makes it first, and name its output as base_model."
        raise PlanError(Problem(source.name, what, remedy))
    _refuse_codes(source, blocks)
    with _Matrices(resolver) as matrices:
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

    def __init__(self, resolver: InputResolver) -> None:
        self._resolver = resolver
        self._base = resolver.sources[_BASE]
        self._stores = [open_store(each.root) for each in holdings(resolver.sources)]
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
        found = self._resolver.find(_BASE, name, name)
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
