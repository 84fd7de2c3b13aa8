"""The tensors of a training checkpoint as those of files: each as one run of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import xxhash

from raymerge.checkpoints.dcp.blobs import Place
from raymerge.checkpoints.dcp.layout import SIDECARS, Layout, read_layout
from raymerge.checkpoints.dcp.metadata import SavedChunk, SavedTensor, shortened
from raymerge.checkpoints.dcp.store import ASSEMBLED
from raymerge.checkpoints.header import FileHeader, StoredTensor
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import FileInfo, ReadStore, map_reads


@dataclass(frozen=True, slots=True)
class ChunkedTensors:
    headers: tuple[FileHeader, ...]
    """Of each file that is read. Tensors of one chunk without a blob are where that is; all others are in a
    file that only ``ChunkedStore`` has."""
    notes: tuple[str, ...]
    left: Mapping[str, int]
    """Bytes of what is not the model's, by key; 0 of what is no tensor."""
    assembled_nbytes: int
    """Of that file."""
    sidecars: tuple[str, ...]
    """Files beside the chunks that are the training's."""
    twins: tuple[tuple[str, str], ...]
    """Pairs of tensors with elements that are the same bytes."""


def read_chunked(store: ReadStore, files: Sequence[FileInfo]) -> ChunkedTensors:
    """Locate every chunk of the model. Raises CheckpointError: one is not stored as it must be; with every
    problem."""
    layout = read_layout(store, files)
    places = _located(store, layout)
    tensors: dict[str, list[StoredTensor]] = defaultdict(list)
    first = layout.keys[0]
    for name, begin in zip(layout.assembled, layout.begins, strict=False):
        saved = layout.model.tensors[name]
        tensors[first].append(StoredTensor(name, saved.dtype, saved.shape, ASSEMBLED, begin, saved.nbytes))
    digests: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name, saved in layout.model.tensors.items():
        for chunk in saved.chunks:
            place = places[name, chunk.begin]
            digests[chunk.key].append((place.offset, place.digest))
            if saved.is_bare:
                own = StoredTensor(name, saved.dtype, saved.shape, chunk.key, place.offset, saved.nbytes)
                tensors[chunk.key].append(own)
    twins = tuple(_twins(layout, places))
    if alone := [first for first, second in twins if first == second]:
        what = f"tensor {alone[0]!r} has chunks that are the same bytes: what one of them held is lost."
        remedy = "Have the training save it again, in the usual format of torch."
        raise CheckpointError(Problem(store.location("."), what, remedy))
    infos = {info.key: info for info in files}
    headers = tuple(
        FileHeader(
            key,
            infos[key].nbytes,
            0,
            tuple(tensors[key]),
            {},
            layout.digests.get(key) or _digest(digests[key]),
            infos[key].version,
        )
        for key in layout.keys
    )
    sidecars = tuple(key for key in SIDECARS if key in infos)
    return ChunkedTensors(headers, (_note(layout),), layout.model.left, layout.begins[-1], sidecars, twins)


def _twins(layout: Layout, places: Mapping[tuple[str, tuple[int, ...]], Place]) -> Iterator[tuple[str, str]]:
    runs = sorted(
        (chunk.key, place.offset, place.offset + nbytes, name)
        for name, tensor in layout.model.tensors.items()
        for chunk in tensor.chunks
        if (nbytes := tensor.nbytes_of(chunk)) and (place := places[name, chunk.begin])
    )
    for (key, _, end, first), (other, begin, _, second) in pairwise(runs):
        if key == other and begin < end:
            yield first, second


def _located(store: ReadStore, layout: Layout) -> dict[tuple[str, tuple[int, ...]], Place]:
    def locate(item: tuple[str, SavedTensor, SavedChunk]) -> Place | CheckpointError:
        try:
            return layout.reader.place(*item[1:])
        except CheckpointError as error:
            return error

    items = [(name, saved, chunk) for name, saved in layout.model.tensors.items() for chunk in saved.chunks]
    # In the order of the files, for slow disks.
    items.sort(key=lambda item: (item[2].key, item[2].offset))
    results = map_reads(store, locate, items)
    problems = [problem for each in results if isinstance(each, CheckpointError) for problem in each.problems]
    if problems:
        raise CheckpointError(shortened(problems, store.location(".")))
    return {
        (name, chunk.begin): place
        for (name, _, chunk), place in zip(items, results, strict=True)
        if isinstance(place, Place)
    }


def _digest(parts: Sequence[tuple[int, str]]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(sorted(parts)).encode())


def _note(layout: Layout) -> str:
    tensors = layout.model.tensors
    count = sum(len(each.chunks) for each in tensors.values())
    return f"its {len(tensors)} tensors are read from {count} chunks of a training checkpoint."
