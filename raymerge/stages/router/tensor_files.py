"""Small safetensors files that are written and read tensor by tensor, at places that are known beforehand."""

from __future__ import annotations

import torch

from raymerge.checkpoints.layout import FileLayout
from raymerge.merge_plan.elements import torch_dtype
from raymerge.storage.local.store import LocalStore


class Piece:
    """One such file."""

    def __init__(self, store: LocalStore, key: str, layout: FileLayout) -> None:
        self._store = store
        self._key = key
        self._layout = layout
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}

    def create(self) -> None:
        self._store.create(self._key, self._layout.nbytes)
        self._store.write_at(self._key, 0, self._layout.header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor into its place; it must have the dtype and the shape of the layout.

        Raises:
            ValueError: it has not.
        """
        placed = self._tensors[name]
        stored = tensor.detach().cpu().contiguous()
        if (stored.dtype, tuple(stored.shape)) != (torch_dtype(placed.dtype), placed.shape):
            found = f"{stored.dtype} {tuple(stored.shape)}"
            raise ValueError(f"{name} is laid out as {placed.dtype.value} {placed.shape}, not as {found}")
        self._store.write_at(self._key, placed.offset, stored.view(-1).view(torch.uint8).numpy().data)

    def sync(self) -> None:
        """Return once the file would survive a power cut."""
        self._store.sync(self._key)
        self._store.sync_directory()

    def read(self, name: str) -> torch.Tensor:
        placed = self._tensors[name]
        buffer = torch.empty(placed.nbytes, dtype=torch.uint8)
        self._store.read_into(self._key, placed.offset, buffer.numpy().data)
        return buffer.view(torch_dtype(placed.dtype)).view(placed.shape)
