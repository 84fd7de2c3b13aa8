"""Reads files in which somebody else has written how much each expert counts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raymerge.checkpoints.source import open_tensor_file
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.elements_part import torch_dtype
from raymerge.planner.moe.expert_blocks import ExpertBlock
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
