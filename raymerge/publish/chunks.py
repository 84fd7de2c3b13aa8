"""A model written in the chunks of a training checkpoint, so that the training, or what reads its
checkpoints, loads it.

Everything but the elements of the model's tensors is as in that checkpoint: its files, its metadata, the
state of the training. Only checksums of changed data are made anew."""

from __future__ import annotations

import glob
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import xxhash

from raymerge.checkpoints.dcp.blobs import Place
from raymerge.checkpoints.dcp.chunk_map import ChunkMap
from raymerge.checkpoints.dcp.layout import Layout, is_chunked, read_layout
from raymerge.checkpoints.dcp.metadata import METADATA_FILE, SavedTensor
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint, Holding, open_checkpoint
from raymerge.errors import CheckpointError, OptionError, PlanError, Problem, VerificationError, shortlist
from raymerge.publish.lease import Lease, LeaseFile, leased
from raymerge.publish.output_place import check_apart
from raymerge.publish.record import sync_directory
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.local.store import LocalStore, check_disk_space
from raymerge.storage.open import open_store
from raymerge.storage.store import Range, ReadStore

_BLOCK_NBYTES = 8 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True)
class ChunksResult:
    output: str
    tensors: int
    chunks: int
    nbytes: int
    """Of the model."""
    left: int
    """Entries of the training's state, which are those of the checkpoint that the chunks are of."""


def write_chunks(source: Checkpoint, like: str, output: Path) -> ChunksResult:
    """Write a model as ``like`` is stored. The output is there when it is whole and every byte was read back.

    Raises OptionError: ``like`` is no training checkpoint on this machine, or the output is there already;
    TargetError: the output is in or around a source, or another process makes it; PlanError: the model's
    tensors are not those of ``like``, or differ where that stores one for two; CheckpointError;
    VerificationError: what was written is not the model."""
    if is_remote(like) or not is_chunked(os.listdir(like) if os.path.isdir(like) else ()):
        what = "is no directory of a training checkpoint on this machine."
        raise OptionError(Problem(shown(like), what, "Give one of the training that the model comes from."))
    alone = (source.root,) if source.is_single_file else ()
    check_apart(output, [source, Holding(like, like, {}, ())], alone)
    _check_free(output)
    with LocalStore(Path(like)) as template, open_store(source.place) as weights:
        layout = read_layout(template, template.files())
        if problems := [*_differences(source.tensors, layout.model.tensors, source.name, like)]:
            raise PlanError(problems)
        check_disk_space(output.parent, sum(info.nbytes for info in template.files()))
        # A name of its own: a process that was paused and wakes after its lease writes to nobody's files.
        growing = LocalStore(output.parent / f"{_prefix(output)}{uuid.uuid4().hex[:12]}")
        writer = _Writer(layout, source.tensors, weights, template, growing)
        with leased(LeaseFile(output), f"{source.name} in the chunks of {like}") as lease, growing:
            _publish(writer, source, output, lease)
    tensors = layout.model.tensors.values()
    return ChunksResult(
        str(output),
        len(tensors),
        sum(len(each.chunks) for each in tensors),
        sum(each.nbytes for each in tensors),
        len(layout.model.left),
    )


def _prefix(output: Path) -> str:
    return f".{output.name}.raymerge-chunks-"


def _check_free(output: Path) -> None:
    if os.path.lexists(output):
        raise OptionError(Problem(str(output), "is there already.", "Choose another -o, or take it away."))


def _publish(writer: _Writer, source: Checkpoint, output: Path, lease: Lease) -> None:
    """Write beside the output, check it, and rename it into its place, durably."""
    _check_free(output)
    growing = writer.target.root
    for left in output.parent.glob(f"{glob.escape(_prefix(output))}*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        writer.write()
        _check(growing, source, writer.weights)
        lease.confirm()
        _check_free(output)
        os.rename(growing, output)
        sync_directory(output.parent)
    finally:
        shutil.rmtree(growing, ignore_errors=True)


def _differences(
    own: Mapping[str, StoredTensor], saved: Mapping[str, SavedTensor], name: str, like: str
) -> Iterator[Problem]:
    remedy = "Merge with that checkpoint as the base, in its dtypes (leave 'dtype' and 'out_dtype' out)."
    for first, second, where, other in ((own, saved, name, like), (saved, own, like, name)):
        if missing := [each for each in first if each not in second]:
            yield Problem(where, f"has {shortlist(missing)}, which {shown(other)} has not.", remedy)
    for key in own.keys() & saved.keys():
        mine, theirs = (own[key].dtype, own[key].shape), (saved[key].dtype, saved[key].shape)
        if mine != theirs:
            what = f"{key} is {mine[0]} {list(mine[1])}, and {theirs[0]} {list(theirs[1])} in {shown(like)}."
            yield Problem(name, what, remedy)


@dataclass(frozen=True, slots=True)
class _Writer:
    layout: Layout
    tensors: Mapping[str, StoredTensor]
    weights: ReadStore
    template: LocalStore
    target: LocalStore

    def write(self) -> None:
        model = self.layout.model.tensors
        places = {name: self._places(each) for name, each in model.items()}
        if problems := [*self._shared(places)]:
            raise PlanError(problems)
        own: dict[str, list[Range]] = {}
        for name, each in model.items():
            for chunk, place in zip(each.chunks, places[name], strict=True):
                nbytes = each.dtype.nbytes(int(np.prod(chunk.sizes, dtype=np.int64)))
                own.setdefault(chunk.key, []).append(Range(place.offset, nbytes))
        files = [info for info in self.template.files() if info.key != METADATA_FILE]
        for info in files:
            self.target.create(info.key, info.nbytes)
            self._copy(info.key, info.nbytes, own.get(info.key, ()))
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self._tensor(name, model[name], places[name]), model))
        for info in files:
            self.target.sync(info.key)
        metadata = self.template.info(METADATA_FILE)
        if metadata is not None:
            self.target.write_atomic(METADATA_FILE, self.template.read(METADATA_FILE, 0, metadata.nbytes))
        parents = {str(parent) for info in files for parent in PurePosixPath(info.key).parents}
        for directory in {".", *parents}:
            self.target.sync_directory(directory)

    def _shared(self, places: Mapping[str, Sequence[Place]]) -> Iterator[Problem]:
        """Pairs of tensors that differ, but are the same bytes of the template."""
        holders: dict[tuple[str, int], str] = {}
        pairs: dict[tuple[str, str], None] = {}
        for name, each in self.layout.model.tensors.items():
            for chunk, place in zip(each.chunks, places[name], strict=True):
                if math.prod(chunk.sizes):
                    pairs[holders.setdefault((chunk.key, place.offset), name), name] = None
        for first, second in pairs:
            if first != second and len({_digest(self.weights, self.tensors[n]) for n in (first, second)}) > 1:
                what = f"stores {first} and {second} as the same bytes, and they differ in the model."
                remedy = "Give a checkpoint that stores each of them, or a model in which they are equal."
                yield Problem(self.template.location("."), what, remedy)

    def _places(self, tensor: SavedTensor) -> Sequence[Place]:
        return [self.layout.reader.place(tensor, chunk) for chunk in tensor.chunks]

    def _copy(self, key: str, nbytes: int, changed: Sequence[Range]) -> None:
        """Copy all bytes of a file but those that are changed."""
        begin = 0
        for each in (*sorted(changed, key=lambda own: own.offset), Range(nbytes, 0)):
            for offset in range(begin, each.offset, _BLOCK_NBYTES):
                size = min(_BLOCK_NBYTES, each.offset - offset)
                self.target.write_at(key, offset, self.template.read(key, offset, size))
            begin = max(begin, each.end)

    def _tensor(self, name: str, saved: SavedTensor, places: Sequence[Place]) -> None:
        stored, keys = self.tensors[name], [chunk.key for chunk in saved.chunks]
        chunk_map = ChunkMap(saved, range(len(keys)), [place.offset for place in places])
        for begin in range(0, saved.nbytes, _BLOCK_NBYTES):
            end = min(saved.nbytes, begin + _BLOCK_NBYTES)
            data = np.frombuffer(self.weights.read(stored.key, stored.offset + begin, end - begin), np.uint8)
            for file, offset, to, rows, width, stride in chunk_map.pieces(begin, end):
                lines = np.lib.stride_tricks.as_strided(data[to:], (rows, width), (stride, 1))
                self.target.write_at(keys[file], offset, np.ascontiguousarray(lines).reshape(-1).data)
        for key, place in zip(keys, places, strict=True):
            self._checksum(key, place)

    def _checksum(self, key: str, place: Place) -> None:
        if place.checked is None:
            return
        first, nbytes, places = place.checked
        checksum = 0
        for offset in range(first, first + nbytes, _BLOCK_NBYTES):
            size = min(_BLOCK_NBYTES, first + nbytes - offset)
            checksum = zlib.crc32(self.target.read(key, offset, size), checksum)
        for at in places:
            self.target.write_at(key, at, checksum.to_bytes(4, "little"))


def _check(written: Path, source: Checkpoint, weights: ReadStore) -> None:
    """Read back what was written, by its own metadata. Raises VerificationError: it is not the model."""
    try:
        checkpoint = open_checkpoint(written, str(written))
    except CheckpointError as error:
        raise VerificationError(error.problems) from error
    with open_store(checkpoint.place) as store:
        wrong = [
            name
            for name, own in source.tensors.items()
            if _digest(weights, own) != _digest(store, checkpoint.tensors[name])
        ]
    if wrong:
        what = f"{shortlist(wrong)} {'is' if len(wrong) == 1 else 'are'} not as in {source.name}."
        raise VerificationError([Problem(str(written), what, "Try again; check the disk if it stays so.")])


def _digest(store: ReadStore, tensor: StoredTensor) -> str:
    hasher = xxhash.xxh3_128()
    for offset in range(0, tensor.nbytes, _BLOCK_NBYTES):
        size = min(_BLOCK_NBYTES, tensor.nbytes - offset)
        hasher.update(store.read(tensor.key, tensor.offset + offset, size))
    return hasher.hexdigest()
