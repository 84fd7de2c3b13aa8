"""Where the elements of a chunk lie in its file: in what ``torch.save`` wrote, or in a safetensors blob.

Only the two ends of a blob are read, where it says what it holds."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from raymerge.checkpoints.dcp.metadata import TORCH_DTYPES, SavedChunk, SavedTensor
from raymerge.checkpoints.dcp.unpickle import MOST_DIMENSIONS, Global, Made, Persistent, unpickle
from raymerge.checkpoints.header import FileHeader, StoredTensor, read_header
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import FileInfo, ReadStore

_END_NBYTES = 4096
_MOST_NBYTES = 1 << 20
"""Of a description of one tensor, or of an archive's directory."""
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_END64, _LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_ARCHIVE_START = b"PK\x03\x04"
_ENCRYPTED, _DESCRIBED_BEHIND, _NOWHERE = 1, 8, 0xFFFFFFFF
_IN_HEAD, _IN_ENTRY, _IN_DESCRIPTOR = 14, 16, 4
"""Where checksums stand in these."""
_V2, _V3, _PARAMETER = (
    Global("torch._utils", f"_rebuild_{name}") for name in ("tensor_v2", "tensor_v3", "parameter")
)
_UNTYPED = Global("torch.storage", "UntypedStorage")
_STORAGES: Mapping[str, DType] = {
    "FloatStorage": DType.F32,
    "DoubleStorage": DType.F64,
    "HalfStorage": DType.F16,
    "BFloat16Storage": DType.BF16,
    "ByteStorage": DType.U8,
    "CharStorage": DType.I8,
    "ShortStorage": DType.I16,
    "IntStorage": DType.I32,
    "LongStorage": DType.I64,
    "BoolStorage": DType.BOOL,
    "ComplexFloatStorage": DType.C64,
}
_SAVE_AGAIN = "Take the checkpoint from where it is whole, or have the training save it again."


class Checked(NamedTuple):
    """What a checksum is of, and where in the file it stands."""

    offset: int
    nbytes: int
    places: tuple[int, ...]


class Place(NamedTuple):
    offset: int
    """Of the first element in the file."""
    digest: str
    """Of what the blob says of itself: its tensor, and the checksum of the data where it has one."""
    checked: Checked | None = None
    """None where the blob has no checksum."""


@dataclass(slots=True)
class BlobReader:
    """Finds elements in blobs. Thread-safe."""

    store: ReadStore
    files: Mapping[str, FileInfo]
    _headers: dict[tuple[str, int], FileHeader] = field(default_factory=dict)
    _header_locks: dict[tuple[str, int], threading.Lock] = field(default_factory=dict)
    """Each is held while that header is read, so that it is read once."""
    _described: dict[bytes, _Described] = field(default_factory=dict)
    """What descriptions of tensors say: those of chunks of one shape are equal bytes."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, tensor: SavedTensor, chunk: SavedChunk) -> Place:
        """Raises CheckpointError: the blob is damaged, or of another tensor than the metadata says."""
        if chunk.is_bare:
            return Place(chunk.offset, "")
        try:
            start = self.store.read(chunk.key, chunk.offset, min(chunk.nbytes, _END_NBYTES))
            if start.startswith(_ARCHIVE_START):
                return self._in_archive(tensor, chunk, start)
            return self._in_safetensors(tensor, chunk)
        except (ValueError, struct.error, IndexError) as error:
            where = f"{self.store.location(chunk.key)}: {tensor.key}"
            what = f"{chunk.text()} is not stored as the metadata says: {error}."
            raise CheckpointError(Problem(where, what, _SAVE_AGAIN)) from error

    def is_archive(self, key: str, offset: int) -> bool:
        """Whether a blob is an archive of one tensor; else it is of all tensors in its file."""
        return self.store.read(key, offset, len(_ARCHIVE_START)) == _ARCHIVE_START

    def _in_archive(self, tensor: SavedTensor, chunk: SavedChunk, start: bytes) -> Place:
        window = _Window(self.store, chunk.key, chunk.offset, chunk.nbytes, start)
        records = _records(window)
        description = next((each for name, each in records.items() if name.endswith("/data.pkl")), None)
        if description is None or description.nbytes > _MOST_NBYTES:
            raise ValueError("its archive has no description of a tensor")
        pickled = window.read(_data_offset(window, description), description.nbytes)
        stored = self._described.get(pickled)
        if stored is None:
            stored = self._described[pickled] = _described(unpickle(pickled, _is_allowed))
        folder = description.name.removesuffix("data.pkl")
        data = records.get(f"{folder}data/{stored.storage}")
        order = records.get(f"{folder}byteorder")
        if order is not None and window.read(_data_offset(window, order), min(order.nbytes, 8)) != b"little":
            raise ValueError("it was saved by a machine with the other order of bytes (big-endian)")
        _check_form(stored, tensor, chunk)
        needed, begin = stored.dtype.nbytes(math.prod(stored.shape)), stored.dtype.nbytes(stored.offset)
        if not needed:
            return Place(chunk.offset, "")
        if data is None or begin + needed > data.nbytes:
            raise ValueError("its archive does not hold as many bytes as its tensor needs")
        checked = _checked(window, data)
        offset = checked.offset + begin
        hasher = xxhash.xxh3_128(pickled)
        hasher.update(f"{offset} {data.nbytes} {data.checksum}".encode())
        return Place(offset, hasher.hexdigest(), checked)

    def _in_safetensors(self, tensor: SavedTensor, chunk: SavedChunk) -> Place:
        header = self._header(chunk)
        stored = next((each for each in header.tensors if each.name == tensor.key), None)
        if stored is None:
            raise ValueError("the safetensors blob that is there does not hold it")
        _check_form(stored, tensor, chunk)
        return Place(stored.offset, header.digest)

    def _header(self, chunk: SavedChunk) -> FileHeader:
        """The header of the blob that a file ends with."""
        place, info = (chunk.key, chunk.offset), self.files[chunk.key]
        with self._lock:
            header_lock = self._header_locks.setdefault(place, threading.Lock())
        with header_lock:
            if place not in self._headers:
                own = read_header(self.store, chunk.key, info.nbytes, info.version, start=chunk.offset)
                self._headers[place] = own
            return self._headers[place]


@dataclass(frozen=True, slots=True)
class _Window:
    store: ReadStore
    key: str
    offset: int
    nbytes: int
    start: bytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the blob. Raises ValueError: they are not within it."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError("its archive says that bytes are outside of it")
        if offset + nbytes <= len(self.start):
            return self.start[offset : offset + nbytes]
        return self.store.read(self.key, self.offset + offset, nbytes)


class _Record(NamedTuple):
    name: str
    offset: int
    """Of its head."""
    nbytes: int
    checksum: int
    entry: int
    """Of its entry in the directory."""
    is_described_behind: bool
    """Whether its checksum stands behind its data, and not in its head."""


def _records(window: _Window) -> dict[str, _Record]:
    """The records of an archive by its directory. Raises ValueError: it is not as torch writes it."""
    size = min(window.nbytes, _END_NBYTES)
    ending = window.read(window.nbytes - size, size)
    offset, nbytes, count = _directory(window, ending)
    if nbytes > _MOST_NBYTES:
        raise ValueError("its archive has a directory far larger than one tensor needs")
    begin = len(ending) - (window.nbytes - offset)
    directory = ending[begin : begin + nbytes] if begin >= 0 else window.read(offset, nbytes)
    records: dict[str, _Record] = {}
    at = 0
    for _ in range(count):
        entry = offset + at
        magic, _, _, flags, method, _, _, checksum, packed, size, *lengths, _, _, _, head = (
            _CENTRAL.unpack_from(directory, at)
        )
        at += _CENTRAL.size
        name = directory[at : at + lengths[0]].decode("utf-8")
        size, packed, head = _wide(directory[at + lengths[0] : at + sum(lengths[:2])], [size, packed, head])
        at += sum(lengths)
        if magic != b"PK\x01\x02" or method or size != packed or flags & _ENCRYPTED or name in records:
            raise ValueError("its archive is packed in another way than torch does it")
        records[name] = _Record(name, head, size, checksum, entry, bool(flags & _DESCRIBED_BEHIND))
    return records


def _directory(window: _Window, ending: bytes) -> tuple[int, int, int]:
    """Offset, bytes and number of entries of an archive's directory."""
    end = len(ending) - _END.size
    magic, _, _, _, count, nbytes, offset, comment = _END.unpack_from(ending, max(0, end))
    if end < 0 or magic != b"PK\x05\x06" or comment:
        raise ValueError("its archive has no end")
    locator = end - _LOCATOR.size
    if locator >= 0 and ending[locator : locator + 4] == b"PK\x06\x07":
        place = _LOCATOR.unpack_from(ending, locator)[2]
        magic, *_, count, nbytes, offset = _END64.unpack(window.read(place, _END64.size))
        if magic != b"PK\x06\x06":
            raise ValueError("its archive has no end")
    return offset, nbytes, count


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """Sizes and offset with what does not fit in 32 bits put in."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, at + 4))
            return [next(wide, value) if value == _NOWHERE else value for value in values]
        at += 4 + nbytes
    return values


def _data_offset(window: _Window, record: _Record) -> int:
    head = window.read(record.offset, _LOCAL.size)
    magic, *_, name, extra = _LOCAL.unpack(head)
    if magic != _ARCHIVE_START or window.read(record.offset + _LOCAL.size, name) != record.name.encode():
        raise ValueError(f"{record.name} is not where the archive's directory says")
    begin = record.offset + _LOCAL.size + int(name) + int(extra)
    if begin + record.nbytes > window.nbytes:
        raise ValueError(f"{record.name} ends outside of its archive")
    return begin


def _check_form(stored: _Described | StoredTensor, tensor: SavedTensor, chunk: SavedChunk) -> None:
    if (stored.dtype, stored.shape) != (tensor.dtype, chunk.sizes):
        meant = f"{tensor.dtype} {list(chunk.sizes)}"
        raise ValueError(f"it holds {stored.dtype} {list(stored.shape)}, the metadata says {meant}")


def _checked(window: _Window, record: _Record) -> Checked:
    begin = _data_offset(window, record)
    place, end = record.offset + _IN_HEAD, begin + record.nbytes
    if record.is_described_behind:
        if window.read(end, _IN_DESCRIPTOR) != b"PK\x07\x08":
            raise ValueError(f"{record.name} has no description behind it")
        place = end + _IN_DESCRIPTOR
    places = window.offset + place, window.offset + record.entry + _IN_ENTRY
    return Checked(window.offset + begin, record.nbytes, places)


class _Described(NamedTuple):
    dtype: DType
    shape: tuple[int, ...]
    storage: str
    offset: int
    """Elements of the storage before its first one."""


def _is_allowed(name: Global) -> bool:
    if name.module == "torch":
        return name.name in TORCH_DTYPES or name.name in _STORAGES
    return name in (_V2, _V3, _PARAMETER, _UNTYPED, Global("collections", "OrderedDict"))


def _described(value: Any) -> _Described:
    if isinstance(value, Made) and value.by == _PARAMETER and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Made) or value.by not in (_V2, _V3) or len(value.arguments) < 6:
        raise ValueError("it is no plain tensor")
    storage, offset, shape, strides, _, _, *rest = value.arguments
    named = storage.identifier if isinstance(storage, Persistent) else ()
    if not isinstance(named, tuple) or len(named) != 5 or named[0] != "storage":
        raise ValueError("it has no storage of its own")
    if not isinstance(named[2], str):
        raise ValueError("its storage is named by what is no text")
    # Types that are new to torch have no storage of their own; their name follows.
    if value.by == _V2:
        dtype = _STORAGES.get(_name(named[1]))
    else:
        dtype = TORCH_DTYPES.get(_name(rest.pop(0))) if rest else None
    if any(rest):
        raise ValueError("it is a view that changes the sign of what is stored")
    if dtype is None:
        raise ValueError("its dtype is none that raymerge knows")
    are_tuples = isinstance(shape, tuple) and isinstance(strides, tuple)
    if not are_tuples or max(len(shape), len(strides)) > MOST_DIMENSIONS:
        raise ValueError(f"its shape or strides are not those of at most {MOST_DIMENSIONS} dimensions")
    if any(type(each) is not int or each < 0 for each in (offset, *shape, *strides)):
        raise ValueError("its shape or strides are no whole numbers")
    if not _is_contiguous(shape, strides):
        raise ValueError(f"its elements do not lie one after the other (strides {list(strides)})")
    return _Described(dtype, shape, named[2], offset)


def _name(value: Any) -> str:
    return value.name if isinstance(value, Global) else ""


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(shape) != len(strides):
        return False
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return not math.prod(shape)
        step *= size
    return True
