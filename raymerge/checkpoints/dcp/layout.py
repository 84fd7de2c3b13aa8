"""The layout of a training checkpoint: which files hold it, and the tensors of its model with their
chunks."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import xxhash

from raymerge.checkpoints.dcp.blobs import BlobReader
from raymerge.checkpoints.dcp.chunk_map import coverage_fault
from raymerge.checkpoints.dcp.metadata import METADATA_FILE, SavedChunk, SavedTensor, read_state, shortened
from raymerge.checkpoints.dcp.names import ModelTensors, model_tensors
from raymerge.checkpoints.header import FileHeader, read_header
from raymerge.checkpoints.json_files import load_json, read_bounded
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem, UnreadableError
from raymerge.storage.store import FileInfo, ReadStore, num_readers

MEGATRON_FILE = "metadata.json"
SIDECARS = (MEGATRON_FILE, "common.pt", "latest_checkpointed_iteration.txt")
"""Files of Megatron's beside the chunks, which are the training's and not the model's."""
CHUNKS_ENDING = ".distcp"
_ALIGNMENT = 64
_SHARD = re.compile(r"shard-([0-9]{5})-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"
_MOST_METADATA = 1 << 30
_COPY = "Copy the checkpoint again from where it is whole."


def is_chunked(keys: Iterable[str]) -> bool:
    """Whether files of these names are a training checkpoint in chunks."""
    names = frozenset(keys)
    is_saved = METADATA_FILE in names and any(name.endswith(CHUNKS_ENDING) for name in names)
    return is_saved or any(map(_SHARD.fullmatch, names))


def listed_files(keys: Iterable[str]) -> frozenset[str]:
    """Of the files of such a checkpoint those that are known by their names to be read."""
    names = frozenset(keys)
    if METADATA_FILE in names:
        return frozenset({METADATA_FILE})
    return frozenset(filter(_SHARD.fullmatch, names))


@dataclass(frozen=True, slots=True)
class Layout:
    model: ModelTensors
    keys: tuple[str, ...]
    """Files that tell of it, or hold chunks of its model."""
    digests: Mapping[str, str]
    """Of what is read of a file here, by key."""
    reader: BlobReader
    assembled: tuple[str, ...] = field(init=False)
    """Names of the tensors of several chunks, or of one that is within a blob, in the order in which they
    follow each other. A blob begins at any byte of its file, where no elements can be computed with."""
    begins: tuple[int, ...] = field(init=False)
    """Where they begin, and where the last one ends."""

    def __post_init__(self) -> None:
        tensors = self.model.tensors
        names = tuple(sorted(name for name, each in tensors.items() if not each.is_bare))
        object.__setattr__(self, "assembled", names)
        sizes = (-(-tensors[name].nbytes // _ALIGNMENT) * _ALIGNMENT for name in names)
        begins = accumulate(sizes, initial=0)
        object.__setattr__(self, "begins", tuple(begins))

    def members(self, begin: int, end: int) -> Iterator[tuple[str, int, tuple[int, int]]]:
        """Names of the assembled tensors that a run of bytes lies in, with where each begins in that run, and
        which of its bytes these are. Some bytes are between two tensors, and of none."""
        index = bisect_right(self.begins, begin) - 1
        while index < len(self.assembled) and self.begins[index] < end:
            first = self.begins[index]
            name = self.assembled[index]
            low, high = max(begin, first), min(end, first + self.model.tensors[name].nbytes)
            if low < high:
                yield name, low - begin, (low - first, high - first)
            index += 1


def read_layout(store: ReadStore, files: Sequence[FileInfo]) -> Layout:
    """Raises CheckpointError: the checkpoint is damaged or not whole; with every problem. UnreadableError: no
    file tells of it, as where they were removed since."""
    infos = {info.key: info for info in files}
    if METADATA_FILE in infos:
        layout = _saved(store, infos)
    else:
        layout = _shards(store, infos)
    problems = [
        Problem(store.location("."), f"tensor {name!r} {fault}.", _COPY)
        for name, each in layout.model.tensors.items()
        if (fault := coverage_fault(each))
    ]
    if problems:
        raise CheckpointError(shortened(problems, store.location(".")))
    return layout


def _saved(store: ReadStore, infos: Mapping[str, FileInfo]) -> Layout:
    info, where = infos[METADATA_FILE], store.location(METADATA_FILE)
    raw = read_bounded(store, METADATA_FILE, info.nbytes, most=_MOST_METADATA)
    state = read_state(raw, where, infos)
    model = model_tensors(state, keeps_names=_is_megatron(store, infos), where=where)
    if not model.tensors:
        what = "names no tensor of a model: there is only the state of a training."
        raise CheckpointError(Problem(where, what, "Give the directory that the model was saved to."))
    own = sorted({chunk.key for each in model.tensors.values() for chunk in each.chunks})
    digests = {METADATA_FILE: xxhash.xxh3_128_hexdigest(raw)}
    return Layout(model, (METADATA_FILE, *own), digests, BlobReader(store, infos))


def _is_megatron(store: ReadStore, infos: Mapping[str, FileInfo]) -> bool:
    info = infos.get(MEGATRON_FILE)
    if info is None:
        return False
    try:
        content = load_json(read_bounded(store, MEGATRON_FILE, info.nbytes))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"


def _shards(store: ReadStore, infos: Mapping[str, FileInfo]) -> Layout:
    own = [info for key, info in infos.items() if _SHARD.fullmatch(key)]
    if not own:
        what = f"holds no {METADATA_FILE} any more, and no shards of a training checkpoint."
        remedy = "Check that the files are there, whole and readable, then run again."
        raise UnreadableError(Problem(store.location("."), what, remedy))
    numbers = {int(match.group(1)) for info in own if (match := _SHARD.fullmatch(info.key))}
    if missing := set(range(1, max(numbers) + 1)) - numbers:
        what = f"holds {len(numbers)} shards up to number {max(numbers)}; number {min(missing)} is missing."
        raise CheckpointError(Problem(store.location("."), what, _COPY))
    with ThreadPoolExecutor(num_readers(store)) as pool:
        headers = list(pool.map(lambda info: read_header(store, info.key, info.nbytes, info.version), own))
    chunks: dict[str, list[tuple[SavedChunk, DType]]] = {}
    for header in headers:
        begins = _begins(header, store.location(header.key))
        for each in header.tensors:
            chunk = SavedChunk(
                begins[each.name], each.shape, each.key, each.offset, each.nbytes, is_bare=True
            )
            chunks.setdefault(each.name, []).append((chunk, each.dtype))
    tensors = {name: _whole(name, parts, store.location(".")) for name, parts in chunks.items()}
    digests = {header.key: header.digest for header in headers}
    return Layout(ModelTensors(tensors, {}), tuple(digests), digests, BlobReader(store, infos))


def _begins(header: FileHeader, where: str) -> dict[str, tuple[int, ...]]:
    """Where in its tensor each chunk of a shard begins."""
    try:
        sharding = json.loads(header.metadata[_SHARDING])
        begins = {each.name: tuple(sharding[each.name]["saved_offsets"]) for each in header.tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"has no {_SHARDING} that says where each of its tensors begins ({error!r})."
        raise CheckpointError(Problem(where, what, _COPY)) from error
    for each in header.tensors:
        begin = begins[each.name]
        if len(begin) != len(each.shape) or any(type(at) is not int or not 0 <= at < 2**62 for at in begin):
            what = f"says that the chunk {list(each.shape)} of {each.name!r} begins at {list(begin)}."
            raise CheckpointError(Problem(where, what, _COPY))
    return begins


def _whole(name: str, parts: Sequence[tuple[SavedChunk, DType]], where: str) -> SavedTensor:
    chunks, dtypes = [chunk for chunk, _ in parts], {dtype for _, dtype in parts}
    if len(dtypes) > 1 or len({len(chunk.sizes) for chunk in chunks}) > 1:
        what = f"tensor {name!r} has chunks of several dtypes or numbers of dimensions."
        raise CheckpointError(Problem(where, what, _COPY))
    ends = ([at + size for at, size in zip(each.begin, each.sizes, strict=True)] for each in chunks)
    shape = tuple(map(max, zip(*ends, strict=True)))
    if math.prod(shape) > 2**59:
        what = f"tensor {name!r} would have the shape {list(shape)}, more than any file holds."
        raise CheckpointError(Problem(where, what, _COPY))
    return SavedTensor(name, dtypes.pop(), shape, tuple(chunks))
