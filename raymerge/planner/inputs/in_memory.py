"""Models whose tensors are in this process's memory: parents of a recipe like those on disk."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raymerge.checkpoints.header import TensorSpec, is_text, lay_out
from raymerge.checkpoints.json_files import json_bytes
from raymerge.checkpoints.source import CONFIG_FILE, Checkpoint, open_checkpoint
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.in_memory import MemoryStore
from raymerge.storage.store import FileInfo
from raymerge.storage.temporary import OwnDirectory

_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class InMemoryModel:
    """A model of tensors, as a state dict has them, on any device.

    They are read whenever a merge needs them, and what they are by then counts: change none while one is
    under way. Two names of one tensor are two equal tensors."""

    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What is in a model's config.json; ``model.config.to_dict()`` of transformers. Empty: it is tensors
    only, to be merged with others that are."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files that belong to it by name: those of the tokenizer, above all."""


def open_in_memory(model: InMemoryModel, name: str) -> Checkpoint:
    """Raises CheckpointError: a tensor has no bytes that safetensors could hold, with all of them."""
    problems = [
        Problem(f"{name}: {key}", what, "Leave it out, or give a dense tensor of another dtype.")
        for key, tensor in model.tensors.items()
        if (what := _unfit(key, tensor))
    ]
    if problems:
        raise CheckpointError(problems)
    store = TensorStore(model, name)
    return open_checkpoint(store.directory, name, opener=lambda: store)


def _unfit(name: str, tensor: torch.Tensor) -> str:
    if not is_text(name):
        return "its name cannot be written as UTF-8."
    if tensor.is_meta:
        return "it is on the meta device, and has no numbers."
    if tensor.layout != torch.strided:
        return f"it is not dense, but of the layout {tensor.layout}."
    return "" if tensor.dtype in _dtypes() else f"its dtype {tensor.dtype} is not one that files have."


def _dtypes() -> dict[torch.dtype, DType]:
    names = {each: each.torch_name for each in DType}
    return {getattr(torch, name): each for each, name in names.items() if name and hasattr(torch, name)}


class TensorStore(MemoryStore):
    """The files of a model in memory. All but the weights are in a ``directory`` too, for as long as it
    lives."""

    def __init__(self, model: InMemoryModel, name: str) -> None:
        dtypes = _dtypes()
        specs = [
            TensorSpec(key, dtypes[each.dtype], tuple(each.shape)) for key, each in model.tensors.items()
        ]
        layout = lay_out(specs)
        config = {CONFIG_FILE: json_bytes(model.config)} if model.config else {}
        small = {**model.files, **config}
        super().__init__(name, small, [FileInfo(_FILE, layout.nbytes, "")])
        self._header, self._places = layout.header, layout.tensors
        self._begins = [each.offset for each in layout.tensors]
        self._tensors = model.tensors
        self._kinds = {key: _kind(each) for key, each in model.tensors.items()}
        own = OwnDirectory()
        weakref.finalize(self, own.remove)
        self.directory = own.path
        for key, content in small.items():
            path = Path(own.path, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def fill(self, key: str, offset: int, buffer: memoryview) -> None:
        """Raises CheckpointError: a tensor is not of the dtype and shape that it had."""
        del key
        target, end = np.frombuffer(buffer, np.uint8), offset + len(buffer)
        before = self._header[offset:end]
        target[: len(before)] = np.frombuffer(before, np.uint8)
        for place in self._places[max(0, bisect_right(self._begins, offset) - 1) :]:
            if place.offset >= end:
                break
            first, stop = max(place.offset, offset), min(place.offset + place.nbytes, end)
            if first < stop:
                span = slice(first - place.offset, stop - place.offset)
                target[first - offset : stop - offset] = _bytes(self._tensor(place.name), span)

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        now = "gone" if tensor is None else _kind(tensor)
        if tensor is None or now != self._kinds[name]:
            what = f"it was {self._kinds[name]} when the merge was planned, and is {now}."
            raise CheckpointError(Problem(self.location(name), what, "Plan the merge again."))
        return tensor


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bytes(tensor: torch.Tensor, span: slice) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Some bytes of a tensor in row-major order; no more rows are copied than they lie in."""
    tensor = tensor.detach()
    rows = tensor if tensor.dim() else tensor.view(1)
    width = rows.element_size() * rows[0].numel()
    first, stop = span.start // width, -(-span.stop // width)
    flat = rows[first:stop].contiguous().view(-1).view(torch.uint8)
    data: np.ndarray[Any, np.dtype[np.uint8]] = (
        flat[span.start - first * width : span.stop - first * width].cpu().numpy()
    )
    return data
