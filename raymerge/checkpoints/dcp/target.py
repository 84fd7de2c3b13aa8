"""Tensors written in the files and chunks of a training checkpoint: where everything goes, and stores that
take and give them as if they were in a file of tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raymerge.checkpoints.dcp.blobs import Checked, Place
from raymerge.checkpoints.dcp.chunk_map import ChunkMap
from raymerge.checkpoints.dcp.layout import Layout
from raymerge.checkpoints.dcp.metadata import METADATA_FILE, SavedChunk, SavedTensor, metadata_of_some
from raymerge.checkpoints.dcp.store import AssemblingStore, Members, Run, TensorChunks, empty
from raymerge.checkpoints.header import StoredTensor
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import Range, ReadStore, WriteStore, map_reads

_Blob = tuple[str, int]
_BLOCK_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The layout of a checkpoint whose tensors are others: as it is, or without the state of the training,
    whose blobs are left out of the files."""

    source: Layout
    drops_state: bool
    _blobs: Mapping[_Blob, tuple[int, int]] = field(init=False)
    """Of each blob that moves, its new place and its size."""

    def __post_init__(self) -> None:
        # Shards for the Hub have no state.
        drops = self.drops_state and METADATA_FILE in self.source.keys
        object.__setattr__(self, "_blobs", dict(_packed(self.source)) if drops else {})

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of the files that hold blobs which move."""
        sizes: dict[str, int] = {}
        for (key, _), (begin, nbytes) in self._blobs.items():
            sizes[key] = begin + nbytes
        return sizes

    def metadata(self, raw: bytes, where: str) -> bytes | None:
        """The ``.metadata`` of what is left, from that of the source; None where all is as there. Raises
        CheckpointError: it cannot be written again."""
        if not self._blobs:
            return None
        keys = frozenset(each.key for each in self.source.model.tensors.values())
        try:
            return metadata_of_some(raw, keys, {blob: begin for blob, (begin, _) in self._blobs.items()})
        except ValueError as error:
            what = f"cannot be written without the state of the training: {error}."
            raise CheckpointError(Problem(where, what, "Keep the state: 'training_state: keep'.")) from error

    def copies(self, key: str, nbytes: int) -> Sequence[tuple[int, Range]]:
        """What a file of so many bytes consists of: where each part goes, and which bytes of the source's
        file it is."""
        moved = [(to, Range(at, size)) for (own, at), (to, size) in self._blobs.items() if own == key]
        return moved or [(0, Range(0, nbytes))]

    def chunks_of(self, name: str) -> TensorChunks:
        tensor = self.source.model.tensors[name]
        places = map_reads(self.source.reader.store, lambda each: self.place(tensor, each), tensor.chunks)
        offsets = [place.offset for place in places]
        return tuple(each.key for each in tensor.chunks), ChunkMap(tensor, range(len(offsets)), offsets)

    def place(self, tensor: SavedTensor, chunk: SavedChunk) -> Place:
        place = self.source.reader.place(tensor, chunk)
        if not self._blobs:
            return place
        by = self._blobs[chunk.key, chunk.offset][0] - chunk.offset
        checked = place.checked
        if checked is not None:
            moved = tuple(each + by for each in checked.places)
            checked = checked._replace(offset=checked.offset + by, places=moved)
        return place._replace(offset=place.offset + by, checked=checked)

    def elements(self) -> Mapping[str, Sequence[tuple[Range, Checked | None]]]:
        """By file, where the elements of each chunk are, in order, and what checksum is made of them."""
        chunks = [(each, chunk) for each in self.source.model.tensors.values() for chunk in each.chunks]
        places = map_reads(self.source.reader.store, lambda each: self.place(*each), chunks)
        by_file: dict[str, list[tuple[Range, Checked | None]]] = defaultdict(list)
        for (tensor, chunk), place in zip(chunks, places, strict=True):
            by_file[chunk.key].append((Range(place.offset, tensor.nbytes_of(chunk)), place.checked))
        return {key: sorted(own, key=lambda each: each[0].offset) for key, own in by_file.items()}


def ranges_beside(elements: Sequence[Range], whole: Range) -> Iterator[Range]:
    """What of a range is none of ``elements``, which are in order, in pieces of a few megabytes."""
    begin = whole.offset
    for each in (*(own for own in elements if whole.offset <= own.offset < whole.end), Range(whole.end, 0)):
        for offset in range(begin, each.offset, _BLOCK_NBYTES):
            yield Range(offset, min(_BLOCK_NBYTES, each.offset - offset))
        begin = max(begin, each.end)


def _packed(source: Layout) -> Iterator[tuple[_Blob, tuple[int, int]]]:
    """The blobs of the model, side by side in each file."""
    sizes = {
        (chunk.key, chunk.offset): chunk.nbytes
        for tensor in source.model.tensors.values()
        for chunk in tensor.chunks
    }
    ends: dict[str, int] = {}
    for key, offset in sorted(sizes):
        begin = ends.get(key, 0)
        ends[key] = begin + sizes[key, offset]
        yield (key, offset), (begin, sizes[key, offset])


class TensorFile(AssemblingStore):
    """With the file of tensors that a plan has where its output is in chunks."""

    def __init__(
        self,
        files: ReadStore,
        keys: Collection[str],
        header: bytes,
        tensors: Sequence[StoredTensor],
        chunks_of: Callable[[str], TensorChunks],
    ) -> None:
        """``header``: what the file begins with."""
        super().__init__(files, keys, chunks_of)
        self._header = header
        self._tensors = sorted((each for each in tensors if each.nbytes), key=lambda each: each.offset)
        self._begins = [each.offset for each in self._tensors]

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        begin = min(len(self._header) - offset, buffer.nbytes)
        if key in self._keys and begin > 0:
            buffer[:begin] = self._header[offset : offset + begin]
        super().read_into(key, offset, buffer)

    def _members(self, begin: int, end: int) -> Members:
        index = max(0, bisect_right(self._begins, begin) - 1)
        while index < len(self._tensors) and self._begins[index] < end:
            tensor = self._tensors[index]
            low, high = max(begin, tensor.offset), min(end, tensor.offset + tensor.nbytes)
            if low < high:
                yield tensor.name, low - begin, (low - tensor.offset, high - tensor.offset)
            index += 1


class GrowingTensorFile(TensorFile):
    """As ``Sink`` too: what is written of the file goes into the chunks."""

    def __init__(
        self,
        files: WriteStore,
        keys: Collection[str],
        header: bytes,
        tensors: Sequence[StoredTensor],
        chunks_of: Callable[[str], TensorChunks],
        name_of: Callable[[str], str],
    ) -> None:
        """``name_of``: under which name a file of chunks is there by now."""
        super().__init__(files, keys, header, tensors, chunks_of)
        self._written = files
        self._name_of = name_of
        self._touched: set[str] = set()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        if key not in self._keys:
            raise ValueError(f"{key} is not the file of tensors")
        for run in self._runs(offset, buffer.nbytes):
            self._touched.add(run.key)
            empty(self._written, run, buffer)

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """0: files of chunks begin anywhere, and no blocks of them can be shared."""
        del key, offset, source, source_key, source_offset, nbytes
        return 0

    def sync(self, key: str) -> None:
        """Make durable what was written of this file through this store."""
        del key
        for each in tuple(self._touched):
            self._written.sync(each)

    def _runs(self, offset: int, nbytes: int) -> Iterator[Run]:
        return (run._replace(key=self._name_of(run.key)) for run in super()._runs(offset, nbytes))
