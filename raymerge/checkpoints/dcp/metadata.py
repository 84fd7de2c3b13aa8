"""What ``.metadata`` says of a training checkpoint: its tensors, their chunks, and the blob that holds each
of these.

The file is a pickle of torch's classes, read without building one of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from raymerge.checkpoints.dcp.repickle import repickled
from raymerge.checkpoints.dcp.unpickle import MOST_DIMENSIONS, Global, Made, unpickle
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import FileInfo, is_key

METADATA_FILE = ".metadata"
_MOST_PROBLEMS = 8

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _METADATA: {
        *(
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
        ),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}
_SIZE = Global("torch", "Size")
TORCH_DTYPES: Mapping[str, DType] = {each.torch_name: each for each in DType if each.torch_name}
_MOST = 2**63 - 1
_MOST_PARTS = 4
"""Parts that are written for each byte that is read: some are names that are written once."""
_DAMAGED = "Take the checkpoint from where it is whole, or have the training save it again."


class SavedChunk(NamedTuple):
    begin: tuple[int, ...]
    """Its first element within the tensor."""
    sizes: tuple[int, ...]
    key: str
    offset: int
    """First byte of its blob in that file; of its elements where it is ``bare``."""
    nbytes: int
    is_bare: bool = False
    """Whether nothing is stored around its elements."""

    def text(self) -> str:
        return f"the chunk of {list(self.sizes)} at {list(self.begin)}"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    key: str
    """Its name in the checkpoint."""
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(math.prod(self.shape))

    def nbytes_of(self, chunk: SavedChunk) -> int:
        return self.dtype.nbytes(math.prod(chunk.sizes))

    @property
    def is_bare(self) -> bool:
        """Whether it is one chunk with nothing stored around it."""
        return len(self.chunks) == 1 and self.chunks[0].is_bare


@dataclass(frozen=True, slots=True)
class SavedState:
    tensors: Mapping[str, SavedTensor]
    entries: tuple[str, ...]
    """Keys of what is no tensor: pickled values, which are never read."""
    paths: Mapping[str, tuple[str, ...]]
    """Where each key stood in the state that was saved, as far as it is known."""


def read_state(raw: bytes, where: str, files: Mapping[str, FileInfo]) -> SavedState:
    """Parse the bytes of ``.metadata``; ``files`` are those beside it. Raises CheckpointError: it is damaged,
    would run code, or its chunks are not whole tensors of existing files; with every problem."""
    try:
        content = unpickle(raw, _is_allowed)
        fields = _fields(content, _METADATA, "Metadata")
        described, places = fields["state_dict_metadata"], fields["storage_data"]
        if not isinstance(described, dict) or not isinstance(places, dict):
            raise ValueError("it has no map of tensors, or none of where they are stored")
        if not all(isinstance(key, str) for key in described):
            raise ValueError("its map of tensors has a key that is no text")
        # Tensors that share one list of chunks would take ages; torch gives each its own.
        if _num_chunks(described) > len(raw):
            raise ValueError("it lists more chunks than it has bytes for")
        reader = _StateReader(where, files, _blobs(places), [])
    except (ValueError, KeyError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"it lacks {error}"
        what = f"cannot be read as the description of a checkpoint: {reason}."
        remedy = f"raymerge runs no code of a checkpoint. {_DAMAGED}"
        raise CheckpointError(Problem(where, what, remedy)) from error
    tensors, entries = reader.tensors(described)
    if problems := [*reader.problems, *_overlapping(reader.blobs, where)]:
        raise CheckpointError(shortened(problems, where))
    return SavedState(tensors, entries, _paths(fields.get("planner_data")))


def metadata_of_some(raw: bytes, keys: Collection[str], moved: Mapping[tuple[str, int], int]) -> bytes:
    """The bytes of a ``.metadata`` that ``read_state`` takes, for the tensors of these keys alone; ``moved``
    are the new places of blobs, by file and place. Raises ValueError: it cannot be written again."""
    content = unpickle(raw, _is_allowed)
    fields = content.fields()
    places = {
        index: _moved(info, moved)
        for index, info in fields["storage_data"].items()
        if index.fields()["fqn"] in keys
    }
    paths = fields.get("planner_data")
    own = {
        "state_dict_metadata": _of(keys, fields["state_dict_metadata"]),
        "planner_data": _of(keys, paths) if isinstance(paths, dict) else paths,
        "storage_data": places,
    }
    return repickled(Made(content.by, (), {**fields, **own}), most=_MOST_PARTS * len(raw))


def _of(keys: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in values.items() if key in keys}


def _moved(info: Made, moved: Mapping[tuple[str, int], int]) -> Made:
    fields = info.fields()
    return Made(info.by, (), {**fields, "offset": moved[fields["relative_path"], fields["offset"]]})


def _num_chunks(described: Mapping[str, Any]) -> int:
    lists = (each.fields().get("chunks") for each in described.values() if isinstance(each, Made))
    return sum(len(each) for each in lists if isinstance(each, list))


def shortened(problems: Sequence[Problem], where: str) -> list[Problem]:
    """The first of them, and how many more there are."""
    more = len(problems) - _MOST_PROBLEMS
    rest = [Problem(where, f"has {more} more such faults.", "")] if more > 0 else []
    return [*problems[:_MOST_PROBLEMS], *rest]


def _is_allowed(name: Global) -> bool:
    if name.module == "torch":
        return name == _SIZE or name.name in TORCH_DTYPES
    return name.name in _CLASSES.get(name.module, ())


class _Blob(NamedTuple):
    key: str
    offset: int
    nbytes: int
    is_encoded: bool


_Place = tuple[str, tuple[int, ...] | None]


def _blobs(places: Mapping[Any, Any]) -> dict[_Place, _Blob]:
    """The blob of each chunk, by the tensor's key and the chunk's first element; None for what is no
    tensor."""
    blobs: dict[_Place, _Blob] = {}
    for index, info in places.items():
        named = _fields(index, _METADATA, "MetadataIndex")
        stored = _fields(info, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
        begin = named.get("offset")
        place = _text(named["fqn"]), None if begin is None else _size(begin)
        key, numbers = _text(stored["relative_path"]), (_count(stored["offset"]), _count(stored["length"]))
        if place in blobs:
            raise ValueError(f"it says twice where {place[0]} at {place[1]} is stored")
        blobs[place] = _Blob(key, *numbers, bool(stored.get("transform_descriptors")))
    return blobs


@dataclass(frozen=True, slots=True)
class _StateReader:
    where: str
    files: Mapping[str, FileInfo]
    blobs: Mapping[_Place, _Blob]
    problems: list[Problem]

    def tensors(self, described: Mapping[str, Any]) -> tuple[dict[str, SavedTensor], tuple[str, ...]]:
        tensors: dict[str, SavedTensor] = {}
        entries: list[str] = []
        for key, value in described.items():
            try:
                if isinstance(value, Made) and value.by == Global(_METADATA, "BytesStorageMetadata"):
                    entries.append(key)
                else:
                    tensors[key] = self._tensor(key, _fields(value, _METADATA, "TensorStorageMetadata"))
            except (ValueError, KeyError) as error:
                reason = str(error) if isinstance(error, ValueError) else f"its description lacks {error}"
                self.problems.append(Problem(self.where, f"tensor {key[:200]!r}: {reason}.", _DAMAGED))
        return tensors, tuple(entries)

    def _tensor(self, key: str, fields: Mapping[str, Any]) -> SavedTensor:
        dtype, shape = _dtype(fields["properties"]), _size(fields["size"])
        if math.prod(size or 1 for size in shape) > _MOST // 16:
            raise ValueError(f"its shape is {list(shape)}, more than any file holds")
        if not isinstance(fields["chunks"], list):
            raise ValueError("it has no list of chunks")
        chunks = []
        for each in fields["chunks"]:
            box = _fields(each, _METADATA, "ChunkStorageMetadata")
            chunks.append(self._chunk(key, shape, _size(box["offsets"]), _size(box["sizes"])))
        return SavedTensor(key, dtype, shape, tuple(chunks))

    def _chunk(
        self, key: str, shape: tuple[int, ...], begin: tuple[int, ...], sizes: tuple[int, ...]
    ) -> SavedChunk:
        own = f"its chunk of {list(sizes)} at {list(begin)}"
        if not len(shape) == len(begin) == len(sizes) or any(
            first + size > whole for first, size, whole in zip(begin, sizes, shape, strict=False)
        ):
            raise ValueError(f"{own} is not within its shape {list(shape)}")
        blob = self.blobs.get((key, begin))
        if blob is None:
            raise ValueError(f"nothing says where {own} is stored")
        if blob.is_encoded:
            raise ValueError(
                f"{own} is compressed or encoded otherwise, and is not read; save it without transforms"
            )
        info = self.files.get(blob.key) if is_key(blob.key) else None
        if info is None:
            raise ValueError(f"{own} is in {blob.key!r}, which is not there")
        if blob.offset + blob.nbytes > info.nbytes:
            end = blob.offset + blob.nbytes
            raise ValueError(f"{own} ends at byte {end} of {blob.key}, which has {info.nbytes} bytes")
        return SavedChunk(begin, sizes, *blob[:3])


def _overlapping(blobs: Mapping[_Place, _Blob], where: str) -> Iterator[Problem]:
    """Blobs that share bytes, but those that begin at the same byte: as tensors of one safetensors blob
    do."""
    ordered = sorted((blob.key, blob.offset, blob.nbytes, key) for (key, _), blob in blobs.items())
    for (key, offset, nbytes, name), (other, begin, _, second) in pairwise(ordered):
        if key == other and offset < begin < offset + nbytes:
            what = f"{name!r} and {second!r} overlap in {key}, at byte {begin}."
            yield Problem(where, what, _DAMAGED)


def _fields(value: Any, module: str, name: str) -> dict[str, Any]:
    if not isinstance(value, Made) or value.by != Global(module, name):
        raise ValueError(f"it has something else in the place of a {name}")
    return value.fields()


def _dtype(properties: Any) -> DType:
    if not isinstance(properties, Made) or properties.by != Global(_METADATA, "TensorProperties"):
        raise ValueError("it has no dtype")
    state = properties.state
    dtype, layout = state[:2] if isinstance(state, tuple) and len(state) > 1 else (None, None)
    if not isinstance(layout, Made) or layout.arguments != ("torch.strided",):
        raise ValueError("it is not stored densely")
    if not isinstance(dtype, Global) or dtype.name not in TORCH_DTYPES:
        raise ValueError("its dtype is none that raymerge knows")
    return TORCH_DTYPES[dtype.name]


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, Made) and value.by == _SIZE:
        sizes = value.arguments[0] if value.arguments else ()
        if isinstance(sizes, tuple | list) and len(sizes) <= MOST_DIMENSIONS:
            return tuple(map(_count, sizes))
    raise ValueError(f"it has something else in the place of at most {MOST_DIMENSIONS} sizes")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("it has a size or an offset that is no whole number from 0 to 2**63 - 1")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it has something else in the place of a name")
    return value


def _paths(planner_data: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(planner_data, dict):
        return {}
    return {
        key: tuple(map(str, path))
        for key, path in planner_data.items()
        # A key is its path's parts with dots between them, so no path is longer, as shared texts may make it.
        if isinstance(key, str) and isinstance(path, tuple) and 0 < len(path) <= len(key) + 1
        if all(isinstance(each, str | int) for each in path)
        if sum(len(str(each)) for each in path) <= len(key)
    }
