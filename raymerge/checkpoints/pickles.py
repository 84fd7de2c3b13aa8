"""Weights saved by ``torch.save``: where each tensor lies in the file, without reading its data.

The file is a zip archive: ``data.pkl`` describes the tensors, and every storage is an uncompressed record.
torch reads the description with its safe loader, without data; the archive's directory must confirm where
the storages lie.

A pickle of a few hundred bytes can describe 2**40 values by nesting shared tuples (hashing one visits
all), or a million levels, which overflows the stack. So extents are checked before anything is built."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import xxhash

from raymerge.checkpoints.header import (
    LFS_START,
    MAX_HEADER_NBYTES,
    METADATA_KEY,
    FileHeader,
    StoredTensor,
    lfs_pointer,
)
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem, shortlist
from raymerge.storage.store import FileInfo, ReadStore

if TYPE_CHECKING:
    import torch


_MAX_DEPTH = 200
_MAX_STACK = 100_000
_MAX_SIZE = 50_000_000
# pickle adds to maps by the thousand, which is what it has on its stack; the largest models have a hundred
# thousand tensors, of thirty values each.

_Extent: TypeAlias = tuple[int, int]
"""Number of values in a value, shared ones counted each time, and levels of nesting."""

_ONE: _Extent = (1, 1)
_STORES = {"PUT", "BINPUT", "LONG_BINPUT"}
_ADDITIONS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_FETCHES = {"GET", "BINGET", "LONG_BINGET"}


def check_extent(description: bytes) -> None:
    """Go through the opcodes of a pickle without executing them. Raises ValueError: not a pickle, or it
    describes something larger or deeper than a map of tensors."""
    stack: list[_Extent | None] = []
    memo: dict[int, _Extent] = {}
    for step, argument, _ in pickletools.genops(description):
        place = int(argument) if isinstance(argument, int) else 0
        if step.name in _STORES or step.name == "MEMOIZE":
            memo[len(memo) if step.name == "MEMOIZE" else place] = _top(stack)
        elif step.name in _FETCHES:
            stack.append(memo.get(place, _ONE))
        else:
            _do(step, stack)


def _do(step: Any, stack: list[_Extent | None]) -> None:
    taken = _taken(step, stack)
    *inner, outer = taken or [_ONE]
    size, depth = 1 + sum(each[0] for each in taken), 1 + max((each[1] for each in inner), default=0)
    # What is added to does not get deeper by that; what is made of values does.
    depth = max(depth, outer[1] + (step.name not in _ADDITIONS))
    if size > _MAX_SIZE or depth > _MAX_DEPTH:
        raise ValueError("it describes what is far larger than the file")
    if len(stack) > _MAX_STACK:
        raise ValueError("it holds back too many values at once")
    stack.extend(None if each is pickletools.markobject else (size, depth) for each in step.stack_after)


def _taken(step: Any, stack: list[_Extent | None]) -> list[_Extent]:
    operands = list(step.stack_before)
    taken: list[_Extent] = []
    if pickletools.markobject in operands:
        # Everything down to the last mark, the mark, and what stands before it in the list.
        while (each := _popped(stack)) is not None:
            taken.append(each)
        operands = operands[: operands.index(pickletools.markobject)]
    for _ in operands:
        each = _popped(stack)
        if each is None:
            raise ValueError("it has a mark where a value is wanted")
        taken.append(each)
    return taken


def _popped(stack: list[_Extent | None]) -> _Extent | None:
    if not stack:
        raise ValueError("it takes more values than there are")
    return stack.pop()


def _top(stack: list[_Extent | None]) -> _Extent:
    return (stack[-1] if stack else None) or _ONE


_END_NBYTES = 256 << 10
"""Bytes at either end of a file that hold torch's descriptions."""
_READERS = 16


class StoreFile(io.RawIOBase):
    """A file of a store. On a remote store, ranges that are read one by one later are fetched ahead together:
    an archive has a directory at its end and a head for each record, and each request has a high latency."""

    def __init__(self, store: ReadStore, info: FileInfo) -> None:
        super().__init__()
        self._store = store
        self._info = info
        self._at = 0
        self._kept: list[tuple[int, bytes]] = []
        if info.nbytes > 2 * _END_NBYTES:
            self.look_ahead([(0, _END_NBYTES), (info.nbytes - _END_NBYTES, _END_NBYTES)])
        else:
            self.look_ahead([(0, info.nbytes)])

    def look_ahead(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges (offset, nbytes) that are read later, clipped to the file. Raises CheckpointError: the
        file cannot be read."""
        if not self._store.is_far:
            return
        inside = ((start, min(nbytes, self._info.nbytes - start)) for start, nbytes in spans)
        missing = [(start, nbytes) for start, nbytes in inside if len(self._ahead(start)) < nbytes]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="header") as threads:
            for block in threads.map(self._fetched, missing):
                insort(self._kept, block)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``; the file position does not change. Raises
        CheckpointError: the file cannot be read, or is shorter."""
        ahead = self._ahead(offset)[:nbytes]
        return bytes(ahead) if len(ahead) == nbytes else self._store.read(self._info.key, offset, nbytes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.nbytes}[whence]
        if start + offset < 0:
            raise OSError(f"byte {start + offset} is before the file")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """May fill less than the buffer: what has been fetched, or what the file has left."""
        view = memoryview(buffer).cast("B")
        ahead = self._ahead(self._at)[: len(view)]
        nbytes = len(ahead) or max(0, min(len(view), self._info.nbytes - self._at))
        if ahead:
            view[:nbytes] = ahead
        elif nbytes:
            self._store.read_into(self._info.key, self._at, view[:nbytes])
        self._at += nbytes
        return nbytes

    def _fetched(self, span: tuple[int, int]) -> tuple[int, bytes]:
        return span[0], self._store.read(self._info.key, *span)

    def _ahead(self, offset: int) -> memoryview:
        place = bisect_right(self._kept, offset, key=lambda each: each[0]) - 1
        if place < 0:
            return memoryview(b"")
        start, data = self._kept[place]
        return memoryview(data)[offset - start :]


_ARCHIVE_START = b"PK\x03\x04"
_LOCAL_HEADER_NBYTES = 30
_IS_ENCRYPTED = 1
_BUFFER_NBYTES = 1 << 16
_DOWNLOAD = "Download or copy the file again."
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "d = torch.load('{path}', weights_only=True, map_location='cpu'){within}; "
    "s.save_file({{k: v.clone().contiguous() for k, v in d.items() if torch.is_tensor(v)}}, "
    "'{target}', {{'format': 'pt'}})\""
)
# What torch calls the thing that its safe reader would not build.
_CULPRIT = re.compile(r"GLOBAL ([\w.]+)|whose module (\w+) is blocked")


def read_pickled(store: ReadStore, info: FileInfo) -> tuple[FileHeader, tuple[str, ...]]:
    """Locate every tensor of a pickled file; also returns notes on the file.

    The digest covers the description and the archive's table of storages with their checksums.

    Raises CheckpointError: not a plain map from names to tensors that are stored as they are."""
    where = store.location(info.key)
    raw = StoreFile(store, info)
    with io.BufferedReader(raw, _BUFFER_NBYTES) as file:
        archive = _read_archive(file, raw, store, info)
        content = _load(file, where)
    named, within, notes = _chosen(content, where, info.key)
    tensors, problems = _located(named, archive, info.key)
    if problems:
        remedy = f"If you trust the file, convert it: {conversion_command(where, within)}"
        raise CheckpointError([Problem(where, what, remedy) for what in problems])
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes, tensor.name))
    start = min((tensor.offset for tensor in tensors), default=info.nbytes)
    return FileHeader(info.key, info.nbytes, start, tuple(tensors), {}, archive.digest, info.version), notes


@dataclass(frozen=True, slots=True)
class _Archive:
    storages: Mapping[int, int]
    digest: str


def _read_archive(file: BinaryIO, raw: StoreFile, store: ReadStore, info: FileInfo) -> _Archive:
    """The archive's storages; ``file``, which reads from ``raw``, is left at its start."""
    where = store.location(info.key)
    start = file.read(len(LFS_START))
    if start == LFS_START:
        raise CheckpointError(lfs_pointer(where))
    if not start.startswith(_ARCHIVE_START):
        what = "is not of the format that torch writes since version 1.6, a zip archive."
        raise CheckpointError(
            Problem(where, what, f"If you trust it, convert it: {conversion_command(where)}")
        )
    try:
        with zipfile.ZipFile(file) as archive:
            entries = _checked(archive, raw, store, info)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive makes zipfile raise half a dozen kinds
        what = f"is a zip archive that cannot be read in place ({str(error)[:80]})."
        remedy = (
            f"{_DOWNLOAD} If that does not help and you trust it, convert it: {conversion_command(where)}"
        )
        raise CheckpointError(Problem(where, what, remedy)) from error
    file.seek(0)
    return entries


def _checked(archive: zipfile.ZipFile, raw: StoreFile, store: ReadStore, info: FileInfo) -> _Archive:
    entries = archive.infolist()
    top = entries[0].filename.partition("/")[0] if entries else ""
    by_name = {entry.filename: entry for entry in entries}
    if problem := _layout_problem(archive, by_name, top):
        what, remedy = problem
        raise CheckpointError(Problem(store.location(info.key), what, remedy))
    description = archive.read(by_name[f"{top}/data.pkl"])
    check_extent(description)
    hasher = xxhash.xxh3_128(description)
    storages: dict[int, int] = {}
    records = [entry for entry in entries if entry.filename.startswith(f"{top}/data/")]
    raw.look_ahead([_head(entry, info) for entry in records])
    for entry in records:
        offset = _data_offset(entry, raw, info)
        storages[offset] = entry.file_size
        hasher.update(f"\n{entry.filename} {offset} {entry.file_size} {entry.CRC}".encode())
    return _Archive(storages, hasher.hexdigest())


def _layout_problem(
    archive: zipfile.ZipFile, by_name: Mapping[str, zipfile.ZipInfo], top: str
) -> tuple[str, str] | None:
    if len(by_name) < len(archive.infolist()):
        return "is a zip archive that has a name twice.", _DOWNLOAD
    if f"{top}/constants.pkl" in by_name:
        return "is a TorchScript program and no weights.", "Give the weights that it was made from."
    description = by_name.get(f"{top}/data.pkl")
    if description is None or description.file_size > MAX_HEADER_NBYTES:
        return "is a zip archive without a description of tensors as torch saves it.", _DOWNLOAD
    order = by_name.get(f"{top}/byteorder")
    if order is not None and (order.file_size > len("little") or archive.read(order) != b"little"):
        return (
            "was saved by a machine with the other order of bytes (big-endian).",
            "Convert it to safetensors on such a machine.",
        )
    return None


def _name(entry: zipfile.ZipInfo) -> bytes:
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437")


def _head(entry: zipfile.ZipInfo, info: FileInfo) -> tuple[int, int]:
    """Offset and size of a record's head; raises ValueError: outside the file."""
    begin, nbytes = entry.header_offset, _LOCAL_HEADER_NBYTES + len(_name(entry))
    if not 0 <= begin <= info.nbytes - nbytes:
        raise ValueError(f"{entry.filename} begins outside the file")
    return begin, nbytes


def _data_offset(entry: zipfile.ZipInfo, raw: StoreFile, info: FileInfo) -> int:
    """Offset of a record's data, which must be uncompressed and within the file."""
    name = _name(entry)
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _IS_ENCRYPTED:
        raise ValueError(f"{entry.filename} is compressed or encrypted")
    begin, nbytes = _head(entry, info)
    header = raw.read_at(begin, nbytes)
    lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    agrees = header.startswith(_ARCHIVE_START) and lengths[0] == len(name)
    offset = begin + _LOCAL_HEADER_NBYTES + sum(lengths)
    if not agrees or header[_LOCAL_HEADER_NBYTES:] != name or offset + entry.file_size > info.nbytes:
        raise ValueError(f"{entry.filename} is not where the directory says")
    return offset


def _load(file: BinaryIO, where: str) -> Any:
    """Contents of the pickle, tensors without data."""
    # Imported here because both take long, and most weights are no pickles.
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            return torch.load(file, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        culprit = _CULPRIT.search(str(error))
        name = f" ({culprit.group(1) or culprit.group(2)})" if culprit else ""
        what = f"is not made of plain tensors alone: to load it would run code or build other things{name}."
        remedy = (
            "raymerge never does that. Take weights in safetensors, or have its publisher save tensors only."
        )
        raise CheckpointError(Problem(where, what, remedy)) from error
    except Exception as error:  # a damaged pickle makes torch raise almost anything
        reason = (str(error).strip().splitlines() or [repr(error)])[0][:120]
        what = f"cannot be read as plain tensors ({reason})."
        raise CheckpointError(
            Problem(where, what, "Take weights in safetensors, or a file that holds tensors only.")
        ) from error


def _chosen(content: Any, where: str, key: str) -> tuple[dict[Any, Any], str, tuple[str, ...]]:
    """The map of tensors, its path in the loaded value, and notes on the rest."""
    if not isinstance(content, dict):
        what = f"holds a {type(content).__name__}, not a map from names to tensors."
        raise CheckpointError(Problem(where, what, "Give a file that holds a model's weights."))
    if any(_is_tensor(value) for value in dict.values(content)):
        return content, "", ()
    holders = [key for key, value in dict.items(content) if _holds_tensors(value)]
    if len(holders) == 1 and isinstance(content[holders[0]], dict):
        inner = content[holders[0]]
        rest = [str(key) for key in content if key != holders[0]]
        beside = f"; beside it, and left out: {shortlist(rest)}" if rest else ""
        return (
            inner,
            f"[{holders[0]!r}]",
            (f"the tensors of {key} are those below {holders[0]!r}{beside}.",),
        )
    what = (
        f"holds tensors below {shortlist([str(key) for key in holders])}." if holders else "holds no tensors."
    )
    remedy = "Save the model's tensors alone, as a map from names to tensors."
    raise CheckpointError(Problem(where, what, remedy))


def _holds_tensors(value: Any) -> bool:
    """Whether there is a tensor at any depth; not recursive, since a pickle may be deep or circular."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if _is_tensor(each):
            return True
        if isinstance(each, dict):
            waiting.extend(dict.values(each))
        elif isinstance(each, list | tuple | set | frozenset):
            waiting.extend(each)
    return False


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _located(named: dict[Any, Any], archive: _Archive, key: str) -> tuple[list[StoredTensor], list[str]]:
    """Located tensors, and sentences about those that are not stored as they are."""
    tensors: list[StoredTensor] = []
    wrong: dict[str, list[str]] = {}
    dtypes = _dtypes()
    for name, value in dict.items(named):
        placed = _place(name, value, archive, dtypes)
        if isinstance(placed, str):
            wrong.setdefault(placed, []).append(str(name))
        else:
            tensors.append(StoredTensor(name, *placed[:2], key, *placed[2:]))
    return tensors, [f"{_entries(names)} {reason}." for reason, names in wrong.items()]


def _place(
    name: Any, value: Any, archive: _Archive, dtypes: Mapping[Any, DType]
) -> tuple[DType, tuple[int, ...], int, int] | str:
    """Dtype, shape, offset and bytes of a tensor; or why it has none, as the end of a sentence."""
    if not _is_name(name):
        return "cannot be a name in safetensors"
    if not _is_tensor(value):
        return f"is a {type(value).__name__} and no tensor"
    if reason := _unusual(value):
        return reason
    if value.dtype not in dtypes:
        return f"is of {value.dtype}, which raymerge does not know"
    storage = value.untyped_storage()
    offset = getattr(storage, "_checkpoint_offset", None)
    if offset is None or archive.storages.get(offset) != storage.nbytes():
        return "is not where torch takes it to be: another tool packed this archive, or this torch is too old"
    nbytes = dtypes[value.dtype].nbytes(value.numel())
    inside = value.storage_offset() * value.element_size()
    if inside + nbytes > storage.nbytes():
        return "is larger than what is stored of it"
    return dtypes[value.dtype], tuple(value.shape), offset + inside, nbytes


def _unusual(tensor: torch.Tensor) -> str | None:
    """Why the storage is not the tensor's elements in order."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "is sparse or quantised in a way of torch's own"
    if not tensor.is_contiguous():
        return "is a view whose elements do not lie one after the other (a transposed tensor, say)"
    if tensor.is_conj() or tensor.is_neg():
        return "is a view that changes the sign of what is stored"
    return None


def _dtypes() -> Mapping[Any, DType]:
    import torch

    names = {dtype: dtype.torch_name for dtype in DType}
    return {getattr(torch, name): dtype for dtype, name in names.items() if name and hasattr(torch, name)}


def _is_name(name: Any) -> bool:
    if not isinstance(name, str) or name == METADATA_KEY:
        return False
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def conversion_command(path: str, within: str = "") -> str:
    directory, slash, name = path.rpartition("/")
    stem = name.rpartition(".")[0]
    stem = stem.removeprefix("pytorch_") if stem.startswith("pytorch_model") else stem
    target = f"{directory}{slash}{stem}.safetensors"
    return _CONVERT.format(path=path, within=within, target=target)


def _entries(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"each of {len(names)} entries ({shortlist(names)})"
