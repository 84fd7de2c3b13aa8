"""Reading through pyarrow: a file system of fsspec that is held in memory, under the name of one in use."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raymerge.errors import CheckpointError, OptionError, TransientError, UnreadableError
from raymerge.storage.arrow import ArrowStore
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for
from raymerge.storage.open import open_store, resolve_source
from raymerge.storage.retry import RetryPolicy

LARGE = os.urandom((5 << 20) + 3)


class InMemory(MemoryFileSystem):
    """What fsspec opens for oss:// addresses in these tests."""

    protocol = ("oss",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("oss://"))


@pytest.fixture
def memory() -> Iterator[Any]:
    fsspec.register_implementation("oss", InMemory, clobber=True)
    system = fsspec.filesystem("oss")
    for path, data in {"a/large": LARGE, "a/sub/b": b"bytes", "a/.hidden/c": b"c"}.items():
        system.pipe(f"/models/{path}", data)
    yield system
    system.rm("/models", recursive=True)


def test_what_lies_below_a_place(memory: Any) -> None:
    with open_store("oss://models/a") as store:
        assert isinstance(store, ArrowStore)
        assert [(file.key, file.nbytes) for file in store.files()] == [("large", len(LARGE)), ("sub/b", 5)]
        assert store.info("sub/b") == store.files()[1]
        assert store.infos(["sub", "absent"]) == {"sub": None, "absent": None}


def test_reading(memory: Any) -> None:
    with open_store("oss://models/a") as store:
        assert store.read("large", 3, len(LARGE) - 3) == LARGE[3:]
        buffer = aligned_buffer(room_for(1000))
        begin = store.read_extent("large", 5001, 1000, buffer)
        assert begin == 5001 % ALIGNMENT
        assert buffer[begin : begin + 1000] == LARGE[5001:6001]
        with pytest.raises(CheckpointError, match=r"oss://models/a/sub/b: ends at byte 5, but bytes 3 to 7"):
            store.read("sub/b", 3, 4)
        with pytest.raises(UnreadableError, match="oss://models/a/absent: cannot be read at byte 0"):
            store.read("absent", 0, 1)
    assert pickle.loads(pickle.dumps(store)).read("sub/b", 0, 5) == b"bytes"


def test_a_file_that_was_changed_is_refused(memory: Any) -> None:
    place = "oss://models/changing"
    memory.pipe("/models/changing/a", b"before")
    with open_store(place) as store:
        (before,) = store.files()
    with open_store(place, expected={"a": before}) as store:
        assert store.read("a", 0, 6) == b"before"
        store.check_expected()
        memory.pipe("/models/changing/a", b"longer than before")
        with pytest.raises(CheckpointError, match="was changed while it was merged"):
            store.check_expected()
    with open_store(place, expected={"a": before}) as store, pytest.raises(CheckpointError, match="changed"):
        store.read("a", 0, 6)


def test_what_fails_for_a_moment_is_tried_again(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError("connection lost"), OSError("connection lost")])
    whole = MemoryFileSystem._open

    def open_it(*args: Any, **more: Any) -> Any:
        for error in failures:
            raise error
        return whole(*args, **more)

    monkeypatch.setattr(MemoryFileSystem, "_open", open_it)
    patience = RetryPolicy(sleep=lambda _: None)
    with ArrowStore("oss://models/a", patience=patience) as store:
        assert store.read("sub/b", 0, 5) == b"bytes"
    assert sum(patience.take_faults().values()) == 2
    failures = iter([OSError("connection lost")] * 9)
    with (
        ArrowStore("oss://models/a", patience=patience) as store,
        pytest.raises(TransientError, match="sub/b: reading at byte 0 failed 8 times"),
    ):
        store.read("sub/b", 0, 5)


def test_a_place_that_is_not_there(memory: Any) -> None:
    with ArrowStore("oss://models/none") as store:
        with pytest.raises(CheckpointError, match=r"byte 0: No such file or directory\."):
            store.files()
        with pytest.raises(UnreadableError, match=r"byte 0: No such file or directory\."):
            store.read("absent", 0, 1)


@pytest.mark.parametrize("scheme", ["reference", "ftp", "zip", "local", "memory", "github", "nonsense"])
def test_only_schemes_on_the_list_are_opened(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec knows many more, and some of them read files of this machine or connect to any server."""
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda _: pytest.fail("it was opened"))
    said = (
        rf"^{scheme}://127\.0\.0\.1/x: addresses of the kind {scheme}:// are not supported\. "
        r"Give a local path, or an address of one of "
        r"file, s3, gs, az, hf, hdfs, viewfs, abfs, abfss, oss, webhdfs\.$"
    )
    with pytest.raises(OptionError, match=said):
        open_store(f"{scheme}://me:secret@127.0.0.1/x?token=secret")
    with pytest.raises(CheckpointError, match=said):
        resolve_source(f"{scheme}://127.0.0.1/x")


def test_addresses_that_no_directory_is_read_from() -> None:
    with pytest.raises(OptionError, match=r"^https://hub\.example/org/name: is an address of the web"):
        open_store("https://hub.example/org/name")
    with pytest.raises(OptionError, match=r"names several file systems, one behind another"):
        open_store("oss://a::ftp://127.0.0.1/x")
    with pytest.raises(OptionError, match=r"what reads hdfs:// addresses does not work here"):
        open_store("hdfs://127.0.0.1:1/x")
