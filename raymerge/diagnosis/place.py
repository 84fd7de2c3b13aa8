"""A place for models: how fast it is, whether files can share blocks there, whether it may be read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from raymerge.diagnosis.check import Check, note, ok, problem
from raymerge.storage import hub
from raymerge.storage.addresses import as_path, is_object_place, parse_place, shown
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, buffer_nbytes
from raymerge.storage.local.copying import RangeCopier, mount_of, share_extents
from raymerge.storage.local.store import LocalStore, nearest
from raymerge.storage.objects.store import asking, object_client
from raymerge.storage.open import open_store, resolve_source
from raymerge.storage.temporary import OwnDirectory
from raymerge.units import format_size

_PIECE_NBYTES = 4 << 20
_MOST_NBYTES = 256 << 20
_MOST_SECONDS = 4.0
"""For writing, and as long for reading."""
_SLOW = 100e6
"""Bytes per second below which a merge of a 7B model takes minutes for each copy of it."""
_LITTLE_ROOM = 10 * 10**9
_PROBE = "probe"
_READ_SECONDS = 10.0
_FILES_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True)
class Speed:
    read: float
    """Bytes per second, past the page cache where the file system allows it."""
    write: float | None
    """None where nothing may be written."""
    nbytes: int


def local_place(place: str, *, is_output: bool = False, most_nbytes: int = _MOST_NBYTES) -> Iterator[Check]:
    """``is_output``: a merge will write there."""
    path = nearest(Path(os.path.abspath(os.path.expanduser(as_path(place)))))
    if path.is_file():
        path = path.parent
    if not os.access(path, os.W_OK | os.X_OK):
        yield from _not_written(path, most_nbytes, is_output=is_output)
        return
    free = shutil.disk_usage(path).free
    kind = mount_of(path.stat().st_dev)[0] or "of an unknown kind"
    fact = f"{path}: {format_size(free)} free, file system {kind}"
    if free < _LITTLE_ROOM:
        yield note("disk", fact, "A merge writes as much as one of its models has; `raymerge plan` says it.")
    else:
        yield ok("disk", fact)
    if free < 2 * most_nbytes:
        yield note(
            "disk speed", "too little room to measure its speed.", "Free some, or name another directory."
        )
        return
    with OwnDirectory(str(path)) as directory:
        yield _speed_check(measure(directory, most_nbytes))
        yield _sharing(directory)


def _not_written(path: Path, most_nbytes: int, *, is_output: bool) -> Iterator[Check]:
    if is_output:
        yield problem("disk", f"{path} may not be written to.", "Give a directory that you may write to.")
        return
    if not os.access(path, os.R_OK | os.X_OK):
        yield problem("disk", f"{path} may not be read.", "Give a directory that you may read.")
        return
    yield note("disk", f"{path} may be read, and not written to.", "Write results elsewhere, with -o OUT.")
    nbytes, name = max(_readable(path), default=(0, ""))
    if nbytes < _PIECE_NBYTES:
        yield note("disk speed", "there is no large file to measure its speed with.")
        return
    with LocalStore(path) as store:
        read = min(nbytes, most_nbytes)
        yield _speed_check(Speed(_read_speed(store, name, read, _PIECE_NBYTES), None, read))


def _readable(directory: Path) -> Iterator[tuple[int, str]]:
    """Sizes and names of files there and below, of the first that are found."""
    paths = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    for path in islice(paths, _FILES_LOOKED_AT):
        with suppress(OSError):
            if path.is_file() and os.access(path, os.R_OK):
                yield path.stat().st_size, str(path.relative_to(directory))


def measure(directory: Path, most_nbytes: int = _MOST_NBYTES) -> Speed:
    """Write a file in the way of a merge, make it durable, and read it again from the disk."""
    piece = aligned_buffer(min(_PIECE_NBYTES, most_nbytes))
    piece[:] = os.urandom(len(piece))
    with LocalStore(directory) as store:
        store.create(_PROBE, most_nbytes)
        began, written = time.perf_counter(), 0
        while written < most_nbytes and time.perf_counter() - began < _MOST_SECONDS:
            store.write_extent(_PROBE, written, piece)
            written += len(piece)
        store.sync(_PROBE)
        write = written / (time.perf_counter() - began)
        read = _read_speed(store, _PROBE, written, len(piece))
        store.remove(_PROBE)
    return Speed(read, write, written)


def _read_speed(store: LocalStore, name: str, nbytes: int, piece_nbytes: int) -> float:
    """Of whole pieces, past the page cache."""
    _forget(Path(store.location(name)))
    buffer = aligned_buffer(buffer_nbytes(piece_nbytes))
    began, read = time.perf_counter(), 0
    while read + piece_nbytes <= nbytes and time.perf_counter() - began < _MOST_SECONDS:
        store.read_extent(name, read, piece_nbytes, buffer)
        read += piece_nbytes
    return read / (time.perf_counter() - began)


def _forget(path: Path) -> None:
    """Have the system drop the file's pages, so that reading comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _speed_check(speed: Speed) -> Check:
    pace = {"reads": speed.read} | ({} if speed.write is None else {"writes": speed.write})
    rates = ", ".join(f"{word} {format_size(round(each))}/s" for word, each in pace.items())
    fact = f"{rates} ({format_size(speed.nbytes)} past the cache)"
    if min(pace.values()) < _SLOW:
        return note(
            "disk speed", fact, "Merges run at the speed of storage: a faster disk makes them faster."
        )
    return ok("disk speed", fact)


def _sharing(directory: Path) -> Check:
    """Whether a copied tensor is shared with its source, or copied by a file server, instead of moved."""
    paths = directory / "one", directory / "two"
    for path in paths:
        path.write_bytes(os.urandom(ALIGNMENT))
    descriptors = [os.open(path, os.O_RDWR) for path in paths]
    try:
        source, target = descriptors
        if RangeCopier().copy_blocks(source, 0, target, 0, ALIGNMENT):
            os.fsync(source)
            can_share = share_extents(source, 0, target, 0, ALIGNMENT) > 0
            more = "; duplicates: share takes effect" if can_share else ""
            return ok(
                "shared blocks", f"tensors that are copied share their blocks, or a server copies them{more}"
            )
    finally:
        for each in descriptors:
            os.close(each)
    return ok("shared blocks", "none: tensors that are copied are written in full")


def remote_place(place: str) -> Iterator[Check]:
    """Whether this machine finds credentials for a place, and the place answers. Shows no secret."""
    name = shown(place)
    if hub.is_hub_place(place):
        commit = hub.snapshot_revision(resolve_source(place))
        yield ok("store", f"{name}: the Hub answers; its commit is {commit}")
        return
    if not is_object_place(place):
        with open_store(place) as store:
            store.info("config.json")
        yield ok("store", f"{name}: answers, and lets this machine read")
        return
    address = parse_place(place)
    # Where there are no credentials this refuses, with where they were looked for.
    client = object_client(address, read_seconds=_READ_SECONDS, retries=1)
    with asking(address, name):
        first = next(client.listed(), None)
    who = "anybody" if address.options.anonymous else "the credentials that this machine finds"
    there = "nothing is there yet" if first is None else "it holds files"
    yield ok("store", f"{name}: answers, and lets {who} list it; {there}")


def hub_token() -> Iterator[Check]:
    from huggingface_hub import constants, get_token

    if hub.is_barred():
        yield note(
            "Hub", "only models in its local cache: HF_HUB_OFFLINE is set.", "Unset it to fetch others."
        )
    elif get_token() is None:
        remedy = "For others: hf auth login, or set HF_TOKEN."
        yield note("Hub", "no token: models that anybody may read.", remedy)
    else:
        yield ok("Hub", f"a token is there (HF_TOKEN or {constants.HF_TOKEN_PATH})")
