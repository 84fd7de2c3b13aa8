"""The bytes of safetensors files that are not written yet: every offset known from metadata alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from raymerge.checkpoints.header import MAX_HEADER_NBYTES, METADATA_KEY
from raymerge.dtypes import DType

DATA_ALIGNMENT_NBYTES = 4096
"""Data starts at a multiple of this, for direct I/O, GPU direct storage and shared extents."""
PYTORCH_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""The metadata that transformers asks of a file before it loads it."""

_LENGTH_NBYTES = 8
# What a header holds beside its tensors: its length, the usual metadata and the padding.
_MOST_LISTED_NBYTES = MAX_HEADER_NBYTES - 2 * DATA_ALIGNMENT_NBYTES
_BESIDE_NAME = ':{"dtype":"","shape":,"data_offsets":[,]},'
_JSON = json.JSONEncoder(ensure_ascii=False)
# Widest first, so that every tensor is aligned to its elements. DType is declared in the format's order.
_RANK = {dtype: -position for position, dtype in enumerate(DType)}


class TensorSpec(NamedTuple):
    """A tensor that a file will hold."""

    name: str
    """Its name."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...]
    """Dimensions; ``()`` is one element."""

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""
        return self.dtype.nbytes(math.prod(self.shape))


class PlacedTensor(NamedTuple):
    """A tensor with its place in the file."""

    name: str
    """Its name."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...]
    """Dimensions."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int
    """Number of bytes."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A whole file but for the data."""

    header: bytes
    """Everything before the data: length, JSON and padding; ``data_start`` bytes."""
    data_start: int
    """Byte at which the data begins, a multiple of 4096."""
    nbytes: int
    """Size of the whole file in bytes."""
    tensors: tuple[PlacedTensor, ...]
    """Its tensors in order of offset, without holes."""


def lay_out(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] = PYTORCH_METADATA) -> FileLayout:
    """Place ``tensors`` in one file; the order given does not matter.

    But for the padding of the header, these are the bytes that ``safetensors.torch.save_file`` gives.
    Metadata of several keys is the exception: there its order is left to chance, here it is by name.

    Raises:
        ValueError: a name stands twice or is reserved, a shape does not fill whole bytes, or there are more
            names than a header may hold (100 MB).
    """
    _check_names(tensors)
    ordered = sorted(tensors, key=lambda spec: (_RANK[spec.dtype], spec.name))
    sizes = [spec.nbytes for spec in ordered]
    begins, end = [], 0
    for nbytes in sizes:
        begins.append(end)
        end += nbytes
    header = _header(ordered, begins, sizes, metadata)
    start = len(header)
    placed = tuple(
        PlacedTensor(spec.name, spec.dtype, spec.shape, start + begin, nbytes)
        for spec, begin, nbytes in zip(ordered, begins, sizes, strict=True)
    )
    return FileLayout(header, start, start + end, placed)


def split_into_shards(specs: Sequence[TensorSpec], shard_size: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Cut ``specs`` in the given order into runs of at most ``shard_size`` bytes of data.

    A tensor above ``shard_size`` gets a shard of its own; 0 means one shard for all. In either case a shard
    has no more names than its header may hold. Without tensors there are no shards.
    """
    shards: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    filled = listed = 0
    for spec in specs:
        nbytes, entry = spec.nbytes, _entry_nbytes(spec)
        # Two offsets for each tensor, with as many digits as the last one at most.
        offsets = 2 * len(str(filled + nbytes)) * (len(current) + 1)
        is_full = shard_size and filled + nbytes > shard_size
        if current and (is_full or listed + entry + offsets > _MOST_LISTED_NBYTES):
            shards.append(tuple(current))
            current, filled, listed = [], 0, 0
        current.append(spec)
        filled += nbytes
        listed += entry
    return (*shards, tuple(current)) if current else tuple(shards)


def shard_names(num_shards: int) -> tuple[str, ...]:
    """File names that loaders know: ``model.safetensors``, or ``model-00001-of-0000n.safetensors`` and on."""
    if num_shards == 1:
        return ("model.safetensors",)
    return tuple(f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1))


def index_json(layouts: Sequence[FileLayout], names: Sequence[str]) -> bytes:
    """The text of ``model.safetensors.index.json`` for shards named ``names``, as transformers writes it."""
    weight_map = {
        tensor.name: name for layout, name in zip(layouts, names, strict=True) for tensor in layout.tensors
    }
    return weight_map_json(weight_map, sum(layout.nbytes - layout.data_start for layout in layouts))


def weight_map_json(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """As ``index_json``, from the file of each tensor and the bytes of all of them."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("ascii")


def _check_names(tensors: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in tensors:
        if spec.name in seen or spec.name == METADATA_KEY:
            reason = "is reserved" if spec.name == METADATA_KEY else "stands twice in one file"
            raise ValueError(f"the tensor name {spec.name!r} {reason}")
        seen.add(spec.name)


def _entry_nbytes(spec: TensorSpec) -> int:
    """Bytes of a tensor in the header at most, without the digits of its two offsets."""
    name = len(_JSON.encode(spec.name).encode("utf-8"))
    return name + len(_BESIDE_NAME) + len(spec.dtype.value) + len(str(spec.shape))


def _header(
    ordered: Sequence[TensorSpec], begins: Sequence[int], sizes: Sequence[int], metadata: Mapping[str, str]
) -> bytes:
    entries: dict[str, object] = {METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    for spec, begin, nbytes in zip(ordered, begins, sizes, strict=True):
        entries[spec.name] = {
            "dtype": spec.dtype.value,
            "shape": spec.shape,
            "data_offsets": (begin, begin + nbytes),
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    length = len(text) + -(_LENGTH_NBYTES + len(text)) % DATA_ALIGNMENT_NBYTES
    if length > MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {length} bytes is above the format's limit of {MAX_HEADER_NBYTES}")
    return length.to_bytes(_LENGTH_NBYTES, "little") + text.ljust(length)
