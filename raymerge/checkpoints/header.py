"""Safetensors headers: read as untrusted input, and made from metadata.

Layout: 8 bytes little-endian length, that many bytes of JSON, then the data without holes."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from raymerge.checkpoints.json_files import strict_object
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import ReadStore

MAX_HEADER_NBYTES = 100_000_000
"""The safetensors format's own limit; DeepSeek-V3's largest header has 0.1 MB."""
METADATA_KEY = "__metadata__"

_LENGTH_NBYTES = 8
_FIRST_NBYTES = 256 << 10
"""Bytes of the first request to a server: holds most headers, so that one request suffices."""
_MAX_INT = 2**63 - 1
_MAX_REPORTED = 8
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_DTYPES = {dtype.value: dtype for dtype in DType}
_DOWNLOAD = "Download or copy the file again; if that does not help, its publisher must save it again."


class StoredTensor(NamedTuple):
    """A tensor in a file. A tuple, because a checkpoint has up to a hundred thousand of them."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    key: str
    offset: int
    """Position of the first byte in the file."""
    nbytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileHeader:
    key: str
    nbytes: int
    data_start: int
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    digest: str
    """xxh3-128 of the header's JSON bytes, in hexadecimal."""
    version: str


def read_header(store: ReadStore, key: str, nbytes: int, version: str, *, start: int = 0) -> FileHeader:
    """Read and check the header of ``key``, a file of ``nbytes`` bytes; or of what it has from ``start`` on.

    Raises CheckpointError: with every defect, each with the file, the tensor and the numbers."""
    where = store.location(key)
    raw = _raw_header(store, key, nbytes - start, start)
    data_start = start + _LENGTH_NBYTES + len(raw)
    entries = _entries(raw, where)
    metadata = entries.pop(METADATA_KEY, {})
    problems: list[Problem] = []
    tensors: list[StoredTensor] = []
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        what = f"has a {METADATA_KEY} that is not a map from text to text."
        problems.append(Problem(where, what, _DOWNLOAD))
    sizes: dict[tuple[DType, tuple[int, ...]], tuple[tuple[int, ...], int]] = {}
    for name, entry in entries.items():
        tensor = _tensor(name, entry, key, data_start, sizes)
        if isinstance(tensor, str):
            problems.append(Problem(where, f"tensor {name!r} {tensor}.", _DOWNLOAD))
        else:
            tensors.append(tensor)
    if not problems:
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        problems = _coverage(tensors, where, data_start=data_start, nbytes=nbytes)
    more = len(problems) - _MAX_REPORTED
    if more > 1:
        problems[_MAX_REPORTED:] = [Problem(where, f"has {more} more defects of this kind.", "")]
    if problems:
        raise CheckpointError(problems)
    digest = xxhash.xxh3_128_hexdigest(raw)
    return FileHeader(key, nbytes, data_start, tuple(tensors), metadata, digest, version)


LFS_START = b"version "
"""Of a Git LFS pointer; a header of so many bytes is far above the limit."""


def lfs_pointer(where: str) -> Problem:
    what = "is a Git LFS pointer, a note of where the weights are, not the weights."
    return Problem(where, what, "Run `git lfs pull` in that directory.")


def _raw_header(store: ReadStore, key: str, nbytes: int, begin: int) -> bytes:
    where = store.location(key)
    if nbytes < _LENGTH_NBYTES:
        what = f"has {nbytes} bytes, too few for a safetensors file."
        raise CheckpointError(Problem(where, what, _DOWNLOAD))
    first = store.read(key, begin, min(nbytes, _FIRST_NBYTES if store.is_far else _LENGTH_NBYTES))
    start, begun = first[:_LENGTH_NBYTES], first[_LENGTH_NBYTES:]
    if start == LFS_START:
        raise CheckpointError(lfs_pointer(where))
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_NBYTES or length > nbytes - _LENGTH_NBYTES:
        what = f"announces a header of {length} bytes, but the file has {nbytes} bytes in all"
        what += f" and a header may have {MAX_HEADER_NBYTES}."
        raise CheckpointError(Problem(where, what, f"It is cut off or no safetensors file. {_DOWNLOAD}"))
    if length <= len(begun):
        return begun[:length]
    return begun + store.read(key, begin + len(first), length - len(begun))


def _entries(raw: bytes, where: str) -> dict[str, Any]:
    entries = strict_object(raw, where, "has a header that", _DOWNLOAD)
    # The first byte is part of the format, though not every reader insists on it.
    if not raw.startswith(b"{"):
        raise CheckpointError(Problem(where, "has a header that is not a JSON object.", _DOWNLOAD))
    return entries


def _tensor(
    name: str,
    entry: Any,
    key: str,
    data_start: int,
    sizes: dict[tuple[DType, tuple[int, ...]], tuple[tuple[int, ...], int]],
) -> StoredTensor | str:
    """The tensor, or what is wrong with its entry as a clause; ``sizes`` interns equal shapes and bytes."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        return f"is described by {_brief(entry)}, not by dtype, shape and data_offsets"
    if not is_text(name):
        return "has a name that cannot be written as UTF-8"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return f"has the dtype {_brief(dtype)}, which raymerge does not know"
    if not _are_counts(shape):
        return f"has the shape {_brief(shape)}, not a list of whole numbers from 0 to 2**63 - 1"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the data_offsets {_brief(offsets)}, not a begin and an end"
    count = math.prod(shape)
    # Zeros do not make up for the rest: readers multiply in 64 bits and refuse the overflow.
    if (count or math.prod(size or 1 for size in shape)) > _MAX_INT:
        return f"has the shape {_brief(shape)}, more elements than 2**63 - 1"
    known = _DTYPES[dtype]
    begin, end = offsets
    num_bits = known.bits * count
    if (end - begin) * 8 != num_bits:
        needed = f"{num_bits // 8} bytes" if num_bits % 8 == 0 else "no whole number of bytes"
        return f"occupies {end - begin} bytes, but {dtype} {shape} needs {needed}"
    own = tuple(shape)
    own, nbytes = sizes.setdefault((known, own), (own, end - begin))
    # Sources of one family share their names, in memory too.
    return StoredTensor(sys.intern(name), known, own, key, data_start + begin, nbytes)


def is_text(name: str) -> bool:
    # Half of a surrogate pair is what JSON can spell and no other reader takes.
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _are_counts(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    # A loop, for speed: this is asked twice for each of a hundred thousand tensors.
    for size in value:  # noqa: SIM110
        # type() and not isinstance(): true and false are ints to Python, but not to the format.
        if type(size) is not int or not 0 <= size <= _MAX_INT:
            return False
    return True


def _coverage(tensors: list[StoredTensor], where: str, *, data_start: int, nbytes: int) -> list[Problem]:
    problems: list[Problem] = []
    reached, previous = data_start, ""
    for tensor in tensors:
        if tensor.offset != reached:
            after = f"tensor {previous!r} ends" if previous else "the header ends"
            kind = "overlaps what is before it" if tensor.offset < reached else "leaves a hole before it"
            begins = f"tensor {tensor.name!r} begins at byte {tensor.offset}"
            what = f"{begins} but {after} at {reached}: it {kind}."
            problems.append(Problem(where, what, _DOWNLOAD))
        reached = max(reached, tensor.offset + tensor.nbytes)
        previous = tensor.name
    if reached != nbytes:
        kind = f"{reached - nbytes} too few" if reached > nbytes else f"{nbytes - reached} too many"
        what = f"has {nbytes} bytes, but by its header it must have {reached}: {kind}."
        problems.append(Problem(where, what, _DOWNLOAD))
    return problems


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "lists in lists without end"
    return text if len(text) <= 80 else f"{text[:77]}..."


DATA_ALIGNMENT_NBYTES = 4096
"""Data starts at a multiple of this, for direct I/O, GPU direct storage and shared extents."""
PYTORCH_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""Metadata that transformers requires of a file."""

# What a header holds beside its tensors: its length, the usual metadata and the padding.
_MOST_LISTED_NBYTES = MAX_HEADER_NBYTES - 2 * DATA_ALIGNMENT_NBYTES
_BESIDE_NAME = ':{"dtype":"","shape":,"data_offsets":[,]},'
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# Widest first, so that every tensor is aligned to its elements. DType is declared in the format's order.
_RANK = {dtype: -position for position, dtype in enumerate(DType)}


class TensorSpec(NamedTuple):
    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class FileLayout:
    header: bytes
    """Everything before the data: length, JSON and padding."""
    data_start: int
    nbytes: int
    tensors: tuple[StoredTensor, ...]
    """Of a file without a name: their ``key`` is "" until they are ``stored``."""

    def stored(self, key: str) -> list[StoredTensor]:
        return [
            StoredTensor(name, dtype, shape, key, offset, nbytes)
            for name, dtype, shape, _, offset, nbytes in self.tensors
        ]


def header_digest(header: bytes) -> str:
    """As ``FileHeader.digest``, from a header with the length before it."""
    return xxhash.xxh3_128_hexdigest(header[_LENGTH_NBYTES:])


def lay_out(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] = PYTORCH_METADATA) -> FileLayout:
    """Place ``tensors`` in one file; their order does not matter.

    Except for the padding of the header, the bytes equal those of ``safetensors.torch.save_file``. Several
    metadata keys are sorted here; there their order is random.

    Raises ValueError: a duplicate or reserved name, a shape that does not fill whole bytes, a header > 100
    MB."""
    seen: set[str] = {METADATA_KEY}
    for spec in tensors:
        if spec.name in seen:
            reason = "is reserved" if spec.name == METADATA_KEY else "stands twice in one file"
            raise ValueError(f"the tensor name {spec.name!r} {reason}")
        seen.add(spec.name)
    ordered = sorted(tensors, key=lambda spec: (_RANK[spec.dtype], spec.name))
    # Of equal numbers one is kept.
    nbytes_of = cache(_sizes)
    sizes = [nbytes_of(spec.dtype, spec.shape)[0] for spec in ordered]
    begins, end = [], 0
    for nbytes in sizes:
        begins.append(end)
        end += nbytes
    header = _header(ordered, begins, sizes, metadata)
    start = len(header)
    placed = tuple(
        StoredTensor(spec.name, spec.dtype, spec.shape, "", start + begin, nbytes)
        for spec, begin, nbytes in zip(ordered, begins, sizes, strict=True)
    )
    return FileLayout(header, start, start + end, placed)


def split_into_shards(specs: Sequence[TensorSpec], shard_size: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Split ``specs`` in order into runs of at most ``shard_size`` bytes of data.

    A tensor above ``shard_size`` gets its own shard; 0 means one shard for all. A header's size limit may
    split further. Without tensors there are no shards."""
    shards: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    filled = listed = 0
    sizes = cache(_sizes)
    for spec in specs:
        nbytes, entry = sizes(spec.dtype, spec.shape)
        entry += len(_JSON.encode(spec.name).encode())
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


MODEL_STEM = "model"
_SHARD = re.compile(r"(.+?)(?:-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")


def shard_names(num_shards: int, stem: str = MODEL_STEM) -> tuple[str, ...]:
    """``model.safetensors``, or ``model-00001-of-0000n.safetensors`` and on."""
    if num_shards == 1:
        return (f"{stem}.safetensors",)
    numbers = range(1, num_shards + 1)
    return tuple(f"{stem}-{number:05d}-of-{num_shards:05d}.safetensors" for number in numbers)


def shards_by_stem(names: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Names of shards in their order, by that of their file without number and ending."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        groups.setdefault(name if match is None else match[1], []).append(name)
    return groups


def weight_map_json(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Contents of ``model.safetensors.index.json``, as transformers writes it."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("ascii")


def _sizes(dtype: DType, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of a tensor, and of its entry in the header at most, without its name and offsets."""
    return dtype.nbytes(math.prod(shape)), len(_BESIDE_NAME) + len(dtype) + len(str(shape))


def _described(dtype: DType, shape: tuple[int, ...]) -> str:
    """What a header says of a tensor, up to its offsets."""
    return _JSON.encode({"dtype": dtype.value, "shape": shape, "data_offsets": 0}).removesuffix("0}")


def _header(
    ordered: Sequence[TensorSpec], begins: Sequence[int], sizes: Sequence[int], metadata: Mapping[str, str]
) -> bytes:
    described = cache(_described)
    entries = (
        [f"{_JSON.encode(METADATA_KEY)}:{_JSON.encode(dict(sorted(metadata.items())))}"] if metadata else []
    )
    entries += [
        f"{_JSON.encode(spec.name)}:{described(spec.dtype, spec.shape)}[{begin},{begin + nbytes}]}}"
        for spec, begin, nbytes in zip(ordered, begins, sizes, strict=True)
    ]
    text = f"{{{','.join(entries)}}}".encode()
    length = len(text) + -(_LENGTH_NBYTES + len(text)) % DATA_ALIGNMENT_NBYTES
    if length > MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {length} bytes is above the format's limit of {MAX_HEADER_NBYTES}")
    return length.to_bytes(_LENGTH_NBYTES, "little") + text.ljust(length)
