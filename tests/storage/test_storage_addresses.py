"""Addresses of places, how they are opened, copies between them, and patience with those that fail."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.reflink_mount import reflink_mount
from kits.s3_server import s3_server

from raymerge.errors import CheckpointError, DiskSpaceError, OptionError, TransientError, UnreadableError
from raymerge.storage.addresses import (
    NO_OPTIONS,
    Place,
    StoreOptions,
    as_path,
    check_output_address,
    is_remote,
    join,
    options_from_text,
    parent_and_name,
    parse_place,
    shown,
    with_options,
)
from raymerge.storage.arrow import ArrowStore
from raymerge.storage.local import copying
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, buffer_nbytes
from raymerge.storage.local.copying import BLOCK_NBYTES, inner_blocks, mount_of
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store, resolve_source
from raymerge.storage.retry import TRANSIENT, RetryPolicy
from raymerge.storage.store import FileInfo
from raymerge.storage.temporary import OwnDirectory, fetched

MINIO = StoreOptions(region="eu-west-1", endpoint="https://minio.example:9000", anonymous=True, profile="a b")


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("out/x", Place("file", "out/x")),
        ("/data/a b", Place("file", "/data/a b")),
        ("file:///data/a%20b", Place("file", "/data/a b")),
        ("file:///data/a?b#c", Place("file", "/data/a?b#c")),
        ("s3://bucket/a/b/", Place("s3", "bucket/a/b")),
        ("S3://bucket//a//b", Place("s3", "bucket/a/b")),
        ("gs://bucket", Place("gs", "bucket")),
        ("az://container/x", Place("az", "container/x")),
        ("hf://org/name@main/sub", Place("hf", "org/name@main/sub")),
        ("hdfs://host:9000/x/", Place("hdfs", "host:9000/x")),
        ("s3://bucket/a?region=eu-west-1", Place("s3", "bucket/a", StoreOptions(region="eu-west-1"))),
    ],
)
def test_what_a_place_says(place: str, address: Place) -> None:
    assert parse_place(place) == address
    assert parse_place(str(address)) == address


def test_a_place_carries_its_options_and_shows_none() -> None:
    place = with_options("s3://bucket/a", MINIO)
    assert parse_place(place) == Place("s3", "bucket/a", MINIO)
    assert parse_place(join(place, "b/c.txt")) == Place("s3", "bucket/a/b/c.txt", MINIO)
    assert parent_and_name(join(place, "b/c.txt")) == (join(place, "b"), "c.txt")
    assert shown(place) == "s3://bucket/a"
    assert with_options(place, StoreOptions(region="other")) == place
    assert with_options("s3://bucket/a", NO_OPTIONS) == "s3://bucket/a"
    for other in ("out", "hf://org/name", "hdfs://host/x"):
        assert with_options(other, MINIO) == other


def test_local_places() -> None:
    assert not is_remote("out")
    assert not is_remote("file:///out")
    assert as_path("file:///data/a%20b") == "/data/a b"
    for place in ("out", "org/name", "~/x", "s3://bucket/x", "file://host/x"):
        assert as_path(place) == place
    assert join("out", "a/b") == "out/a/b"
    assert parent_and_name("/data/out") == ("/data", "out")


def test_nothing_secret_is_shown() -> None:
    assert shown("s3://key:secret@bucket/a?X-Amz-Signature=abc") == "s3://bucket/a"
    assert shown("hdfs://user:secret@host/a") == "hdfs://host/a"
    assert shown("https://user:p@ss+word@host/a") == "https://host/a"
    assert shown("base+oss://key:secret@bucket/a@v1") == "base+oss://bucket/a@v1"
    assert shown("file://user:secret@host/a") == "file://host/a"
    assert shown("hf://org/name@main") == "hf://org/name@main"
    assert shown("HF://gpt2@main") == "HF://gpt2@main"


@pytest.mark.parametrize(
    "place",
    [
        *("s3://", "s3:///a", "s3://bucket/../a", "s3://../a", "s3://key:secret@bucket/a"),
        *("s3://bucket/a?X-Amz-Signature=secret", "s3://bucket/a?anonymous=secret", "file://host/a"),
        *("file://[host/a", "s3:/key:secret@bucket/a?token=secret", "GS:/bucket/a", "file:/a"),
    ],
)
def test_what_is_no_place_is_refused_without_repeating_a_secret(place: str) -> None:
    for read in (parse_place, check_output_address):
        with pytest.raises(OptionError) as caught:
            read(place)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parse_place("s3://b/a/../c"), r"s3://b/a/\.\./c: has '\.\.' in it"),
        (lambda: parent_and_name("s3://bucket"), "lies in no directory"),
        (
            lambda: StoreOptions(anonymous=True, requester_pays=True),
            "storage: requester_pays: nobody can pay",
        ),
        (lambda: options_from_text({"regoin": "x"}), "profile, allow_http, kms_key, requester_pays"),
    ],
)
def test_what_is_wrong_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        call()


def test_one_slash_is_told_from_two() -> None:
    for place, meant in (("s3:/models/x", "s3://models/x"), ("file:/tmp/x", "file:///tmp/x")):
        with pytest.raises(OptionError, match=re.escape(f"Write {meant}, or ./")):
            parse_place(place)
        assert parse_place(f"./{place}") == Place("file", f"./{place}")


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("minio:9000", "is not the address of a server"),
        ("https://key:secret@minio", "holds a user, a password"),
        ("https://minio?token=secret", "holds a user, a password or a query"),
        ("http://minio", "allow_http"),
    ],
)
def test_endpoints_that_are_refused(endpoint: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        StoreOptions(endpoint=endpoint)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", ["", "eu west", "a\nb", "ключ"])
def test_what_goes_into_requests_is_a_name(value: str) -> None:
    for name in ("region", "kms_key"):
        with pytest.raises(OptionError, match=f"storage: {name}: is empty, or holds spaces"):
            StoreOptions(**{name: value})  # type: ignore[arg-type]


def test_places_for_outputs() -> None:
    for place in ("/mnt/out", "out", "file:///mnt/out", "s3://bucket/x", "gs://bucket/a/b"):
        check_output_address(place)
    for place in ("hdfs://me:pwSECRET@host/x", "s3://bucket/x\n--flag", "hf://org/name"):
        with pytest.raises(OptionError) as refused:
            check_output_address(place)
        assert "pwSECRET" not in str(refused.value)


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_store("~/models").root == Path("/home/somebody/models")


def test_a_source_may_be_a_file_address(tmp_path: Path) -> None:
    model = tmp_path / "a model"
    model.mkdir()
    assert resolve_source(model.as_uri()) == str(model)
    with pytest.raises(CheckpointError, match=r"^file://tmp/x: names the machine tmp"):
        resolve_source("file://tmp/x")
    with pytest.raises(CheckpointError, match=r"Write s3://bucket/x"):
        resolve_source("s3:/bucket/x")


SAID = r"x: the file was changed while it was merged\. Leave the sources alone"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    for key in ("x", "y"):
        (tmp_path / key).write_bytes(b"0123456789")
        os.utime(tmp_path / key, ns=(1, 1000))
    return LocalStore(tmp_path, expected={"x": FileInfo("x", 10, "1000")})


def test_a_file_that_is_as_expected_is_read(store: LocalStore) -> None:
    assert store.read("x", 2, 3) == b"234"
    store.check_expected()


@pytest.mark.parametrize("content", [b"9876543210", b"012345678"], ids=["as long", "shorter"])
def test_another_file_is_not_read(store: LocalStore, content: bytes) -> None:
    """Also if it is gone again when one looks: what was opened would be read for long."""
    (store.root / "other").write_bytes(content)
    os.utime(store.root / "other", ns=(1, 1000 + (len(content) == 10)))
    (store.root / "x").rename(store.root / "kept")
    (store.root / "other").rename(store.root / "x")
    with pytest.raises(CheckpointError, match=SAID):
        store.read("x", 0, 1)
    (store.root / "kept").rename(store.root / "x")
    store.check_expected()
    assert store.read("x", 0, 10) == b"0123456789"


@pytest.mark.parametrize(
    "change",
    [lambda x: os.truncate(x, 3), lambda x: x.with_name("y").replace(x)],
    ids=["written", "replaced"],
)
def test_a_file_that_is_changed_after_it_was_opened_is_found(
    store: LocalStore, change: Callable[[Path], object]
) -> None:
    store.read("x", 0, 1)
    (store.root / "y").touch()
    change(store.root / "x")
    with pytest.raises(CheckpointError, match=SAID):
        store.check_expected()


def test_of_others_and_of_what_is_gone_nothing_is_said(store: LocalStore) -> None:
    store.read("x", 0, 1)
    store.read("y", 0, 1)
    (store.root / "y").write_bytes(b"new")
    (store.root / "x").unlink()
    store.check_expected()
    assert store.read("x", 1, 2) == b"12"


NOBODY_ELSE = 54_321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")


@contextmanager
def _holding(code: str, *args: str, temporary: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A process that makes a directory, prints it and sleeps; what it has printed, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys, time\n{code}", *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    with process:
        try:
            yield Path(process.stdout.readline().strip()), process
        finally:
            process.kill()


def _left(shared: Path) -> OwnDirectory:
    """One whose process was killed, as the system leaves it."""
    found = OwnDirectory(str(shared))
    (found.path / "file").write_bytes(b"x")
    os.close(found._descriptor)
    return found


def _names(shared: Path) -> set[str]:
    return {path.name for path in shared.iterdir()}


def test_those_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    code = (
        "from raymerge.storage.temporary import OwnDirectory\n"
        "found = OwnDirectory(); (found.path / 'file').write_bytes(b'x')\n"
        "print(found.path, flush=True); time.sleep(1000)"
    )
    with OwnDirectory(str(tmp_path)) as own, _holding(code, temporary=tmp_path) as (other, process):
        # What looks like one and is none: without a lock nobody knows whose it is.
        prefix = own.parent.name.rpartition("-")[0]
        directories = {"mine", "raymerge-abcdefgh", "raymerge-job-abcdefgh", f"{prefix}-abcdefgh"}
        for name in directories:
            (tmp_path / name / "files").mkdir(parents=True)
        (tmp_path / f"{prefix}-file").touch()
        (tmp_path / f"{prefix}-link").symlink_to(own.parent)
        foreign = directories | {f"{prefix}-file", f"{prefix}-link"}
        living = {own.parent.name, other.parent.name}
        OwnDirectory(str(tmp_path)).remove()
        assert _names(tmp_path) == living | foreign
        process.send_signal(signal.SIGKILL)
        process.wait()
        OwnDirectory(str(tmp_path)).remove()
        assert _names(tmp_path) == {own.parent.name} | foreign
    assert _names(tmp_path) == foreign


@needs_root
def test_those_of_other_users_are_left_alone(tmp_path: Path) -> None:
    left = _left(tmp_path)
    os.chown(left.path.parent, NOBODY_ELSE, -1)
    OwnDirectory(str(tmp_path)).remove()
    assert (left.path / "file").is_file()


def test_those_of_other_machines_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks may be those of each machine, on a file system that several share."""
    left = _left(tmp_path)
    for host, there in (("another", True), (socket.gethostname(), False)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        OwnDirectory(str(tmp_path)).remove()
        assert left.path.exists() is there


def test_one_that_was_killed_while_it_removed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files first, and the lock that says whose they are last."""
    killed = _left(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            OwnDirectory(str(tmp_path))
    assert not (killed.path / "file").exists()
    with OwnDirectory(str(tmp_path)):
        assert not killed.path.parent.exists()


def _interrupted(path: Path, **_: object) -> None:
    """Removes one file, the lock if it may, and comes no further."""
    files = [each for each in path.rglob("*") if each.is_file()]
    max(files, key=lambda each: each.name == "lock").unlink()
    raise KeyboardInterrupt


def test_names_leave_room_for_the_sockets_of_ray(tmp_path: Path) -> None:
    with OwnDirectory(str(tmp_path)) as own:
        below = "/ray/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
        assert len(f"/tmp/{own.relative_to(tmp_path)}{below}") <= 107


def test_what_a_killed_command_fetched_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "from raymerge.storage.temporary import fetched\n"
        "with fetched(sys.argv[1], ['config.json']) as found:\n"
        "    print(found, flush=True); time.sleep(1000)"
    )
    with s3_server() as server:
        source = tmp_path / "source"
        source.mkdir()
        (source / "config.json").write_text("{}")
        server.upload(source, "model")
        shutil.rmtree(source)
        place = server.place("model")
        with _holding(code, place, temporary=tmp_path) as (left, process):
            with fetched(place, ["config.json"]) as found:
                assert (left / "config.json").is_file()
                assert (found / "config.json").is_file()
            process.send_signal(signal.SIGKILL)
            process.wait()
        with fetched(place, ["config.json"]):
            assert not left.exists()
            assert len(_names(tmp_path)) == 1
    assert _names(tmp_path) == set()


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
        buffer = aligned_buffer(buffer_nbytes(1000))
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
    retry_policy = RetryPolicy(sleep=lambda _: None)
    with ArrowStore("oss://models/a", retry_policy=retry_policy) as store:
        assert store.read("sub/b", 0, 5) == b"bytes"
    assert sum(retry_policy.take_faults().values()) == 2
    failures = iter([OSError("connection lost")] * 9)
    with (
        ArrowStore("oss://models/a", retry_policy=retry_policy) as store,
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


NBYTES = 40 * BLOCK_NBYTES + 777
DATA = random.Random(5).randbytes(NBYTES)
Stores = tuple[LocalStore, LocalStore]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """A source with a file ``a`` and a target with a file ``b`` of zeros."""
    with LocalStore(tmp_path / "source") as source, LocalStore(tmp_path / "target") as target:
        fill(source, target)
        yield source, target


@pytest.fixture(scope="module")
def reflink_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with (
        reflink_mount(tmp_path_factory.mktemp("xfs")) as place,
        LocalStore(place / "source") as source,
        LocalStore(place / "target") as target,
    ):
        yield source, target


def fill(source: LocalStore, target: LocalStore) -> None:
    for copied_store, key, data in ((source, "a", DATA), (target, "b", bytes(NBYTES))):
        copied_store.create(key, NBYTES)
        copied_store.write_at(key, 0, data)


def copied(stores: Stores, *, source_offset: int = 0, offset: int = 0, nbytes: int = NBYTES) -> int:
    source, target = stores
    return target.copy_range(
        "b", offset, source=source, source_key="a", source_offset=source_offset, nbytes=nbytes
    )


@pytest.fixture
def count_clones(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Lets every attempt to share blocks end with an error number (0: as if done), and counts them."""

    def install(code: int) -> list[int]:
        calls: list[int] = []

        def answer(descriptor: int, request: int, _: bytes) -> int:
            calls.append(request)
            if code:
                raise OSError(code, os.strerror(code))
            return 0

        monkeypatch.setattr(fcntl, "ioctl", answer)
        return calls

    return install


@given(source_offset=st.integers(0, 1 << 45), offset=st.integers(0, 1 << 45), nbytes=st.integers(0, 1 << 40))
def test_inner_blocks_are_whole_in_both_files(source_offset: int, offset: int, nbytes: int) -> None:
    source_offset += (offset - source_offset) % BLOCK_NBYTES * (nbytes % 2)
    lead, inner = inner_blocks(source_offset, offset, nbytes)
    assert lead + inner <= nbytes
    assert inner % BLOCK_NBYTES == 0
    if inner:
        assert (source_offset + lead) % BLOCK_NBYTES == (offset + lead) % BLOCK_NBYTES == 0
        assert lead < BLOCK_NBYTES
        assert nbytes - lead - inner < BLOCK_NBYTES
    elif (source_offset - offset) % BLOCK_NBYTES == 0:
        assert nbytes < 2 * BLOCK_NBYTES


class TestSharing:
    @settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        source_offset=st.integers(0, NBYTES // 2),
        block=st.integers(0, 20),
        nbytes=st.integers(0, NBYTES // 2),
    )
    def test_any_range_is_copied_whole_or_not_at_all(
        self, reflink_stores: Stores, source_offset: int, block: int, nbytes: int
    ) -> None:
        fill(*reflink_stores)
        offset = block * BLOCK_NBYTES + source_offset % BLOCK_NBYTES
        nbytes = min(nbytes, NBYTES - offset)
        done = copied(reflink_stores, source_offset=source_offset, offset=offset, nbytes=nbytes)
        assert done in (0, nbytes)
        if nbytes >= 2 * BLOCK_NBYTES:
            assert done == nbytes
        new = DATA[source_offset : source_offset + done]
        assert reflink_stores[1].read("b", 0, NBYTES) == bytes(offset) + new + bytes(NBYTES - offset - done)

    def test_takes_no_room_and_keeps_its_bytes(self, reflink_stores: Stores) -> None:
        source, target = reflink_stores
        data = os.urandom(20 << 20)
        source.create("a", len(data))
        source.write_extent("a", 0, memoryview(data))
        target.create("b", len(data))
        os.sync()
        free = os.statvfs(target.root).f_bfree
        assert copied(reflink_stores, source_offset=0, offset=0, nbytes=len(data)) == len(data)
        target.sync("b")
        os.sync()
        assert os.statvfs(target.root).f_bfree - free > 0.9 * len(data) / BLOCK_NBYTES
        source.write_extent("a", 0, memoryview(bytes(len(data))))
        assert target.read("b", 0, len(data)) == data

    def test_a_source_that_ends_early_is_left_to_an_ordinary_copy(self, reflink_stores: Stores) -> None:
        fill(*reflink_stores)
        reflink_stores[0].create("a", 10 * BLOCK_NBYTES)
        assert copied(reflink_stores, source_offset=0, offset=0, nbytes=20 * BLOCK_NBYTES) == 0


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.ENOSYS])
def test_a_pair_of_devices_that_cannot_share_is_asked_once(
    stores: Stores, count_clones: Callable[[int], list[int]], code: int
) -> None:
    calls = count_clones(code)
    assert [copied(stores) for _ in range(3)] == [0, 0, 0]
    assert len(calls) == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSPC, errno.EPERM])
def test_a_range_that_cannot_be_shared_says_nothing_of_others(
    stores: Stores, count_clones: Callable[[int], list[int]], code: int
) -> None:
    calls = count_clones(code)
    assert [copied(stores) for _ in range(3)] == [0, 0, 0]
    assert len(calls) == 3


def test_a_missing_source_is_named(stores: Stores) -> None:
    stores[0].remove("a")
    with pytest.raises(CheckpointError, match="a: cannot be read at byte 0: No such file"):
        copied(stores)


@pytest.fixture
def on_server(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, count_clones: Callable[[int], list[int]]
) -> Stores:
    """The stores as on a file server that shares no blocks, but copies."""
    count_clones(errno.EOPNOTSUPP)
    monkeypatch.setattr(copying, "mount_of", lambda _: ("nfs4", ("rw", "vers=4.2", "hard")))
    return stores


@pytest.mark.parametrize("lead", [0, 5])
@pytest.mark.parametrize("most", [NBYTES, 3 * BLOCK_NBYTES])
def test_the_server_copies_in_as_many_steps_as_it_takes(
    on_server: Stores, monkeypatch: pytest.MonkeyPatch, lead: int, most: int
) -> None:
    whole = os.copy_file_range
    monkeypatch.setattr(
        os, "copy_file_range", lambda src, dst, n, at, to: whole(src, dst, min(n, most), at, to)
    )
    for _ in range(2):
        length = NBYTES - lead
        assert copied(on_server, source_offset=lead, offset=lead, nbytes=length) == length
        assert on_server[1].read("b", lead, length) == DATA[lead:]


@pytest.mark.parametrize("answer", [0, errno.EIO])
def test_a_server_that_stops_leaves_it_to_an_ordinary_copy(
    on_server: Stores, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    def stop(*_: object) -> int:
        if answer:
            raise OSError(answer, os.strerror(answer))
        return 0

    monkeypatch.setattr(os, "copy_file_range", stop)
    assert copied(on_server) == 0


@pytest.mark.parametrize(
    ("mount", "done"),
    [
        (("ext4", ("rw", "vers=4.2")), 0),
        (("nfs", ("rw", "vers=3")), 0),
        (("nfs4", ("rw", "vers=4.0")), 0),
        (("nfs4", ("rw", "vers=4.1", "minorversion=1")), 0),
        (("nfs4", ()), 0),
        (("ceph", ("rw", "acl")), 0),
        (("", ()), 0),
        (("cifs", ("rw", "vers=3.1.1")), NBYTES),
        (("ceph", ("rw", "copyfrom")), NBYTES),
    ],
)
def test_only_servers_that_copy_are_asked(
    on_server: Stores, monkeypatch: pytest.MonkeyPatch, mount: tuple[str, tuple[str, ...]], done: int
) -> None:
    """Of NFS before 4.2, and of Ceph unless mounted for it, the kernel would copy through this machine."""
    monkeypatch.setattr(copying, "mount_of", lambda _: mount)
    if not done:
        monkeypatch.setattr(os, "copy_file_range", None)
    assert copied(on_server) == done


MOUNTS = (
    "22 1 254:0 / / rw,relatime - ext4 /dev/root rw,discard\n"
    "36 22 0:33 / /mnt/some\\040place rw shared:5 master:7 - nfs4 server:/x rw,vers=4.2\n"
)


def test_kind_and_options_of_a_mount_are_found_by_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    monkeypatch.setattr(copying, "_MOUNTS", table)
    assert mount_of(os.makedev(254, 0)) == ("ext4", ("rw", "discard"))
    assert mount_of(os.makedev(0, 33)) == ("nfs4", ("rw", "vers=4.2"))
    assert mount_of(os.makedev(9, 9)) == ("", ())


PATIENT_DATA = bytes(range(200))


@pytest.fixture
def waited() -> list[float]:
    """How long is waited, in seconds; and nobody waits."""
    return []


@pytest.fixture
def retry_policy(waited: list[float]) -> RetryPolicy:
    return RetryPolicy(sleep=waited.append, chance=lambda: 1.0)


@pytest.fixture
def copied_store(tmp_path: Path, retry_policy: RetryPolicy) -> LocalStore:
    (tmp_path / "x").write_bytes(PATIENT_DATA)
    return LocalStore(tmp_path, retry_policy=retry_policy)


def failing(function: Callable[..., Any], times: int, number: int = errno.EIO) -> Callable[..., Any]:
    """The function, which fails so many times before it does its work."""
    left = times

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(number, os.strerror(number))
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("number", sorted(TRANSIENT), ids=lambda number: errno.errorcode[number])
def test_a_read_that_fails_for_a_moment_is_tried_again(
    number: int, copied_store: LocalStore, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 3, number))
    assert copied_store.read("x", 10, 50) == PATIENT_DATA[10:60]
    assert waited == pytest.approx([0.1, 0.2, 0.4])


def test_a_write_that_fails_for_a_moment_is_tried_again(
    copied_store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 2))
    copied_store.write_at("x", 7, b"new")
    assert copied_store.read("x", 0, 12) == PATIENT_DATA[:7] + b"new" + PATIENT_DATA[10:12]


def test_what_is_appended_is_there_once(copied_store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the attempt that failed had written a part."""
    whole, calls = os.pwrite, 0

    def partly(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, "")
        return whole(descriptor, data[:2] if calls == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", partly)
    copied_store.append("x", b"line")
    assert (copied_store.root / "x").read_bytes() == PATIENT_DATA + b"line"


def test_a_file_is_opened_anew_for_each_attempt(copied_store: LocalStore, tmp_path: Path) -> None:
    """A file server that came back does not know the descriptors of before: ESTALE."""
    copied_store.read("x", 0, 1)
    first = os.stat(tmp_path / "x").st_ino
    (tmp_path / "y").write_bytes(PATIENT_DATA[::-1])
    whole = os.preadv

    def stale(descriptor: int, *rest: Any) -> int:
        if os.fstat(descriptor).st_ino == first:
            os.replace(tmp_path / "y", tmp_path / "x")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(descriptor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        assert copied_store.read("x", 0, 4) == PATIENT_DATA[::-1][:4]


def test_after_the_last_attempt_file_byte_and_cause_are_named(
    copied_store: LocalStore, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1000))
    said = r"x: reading at byte 4 failed 8 times, .* Input/output error \(EIO\)\. .* same command goes on"
    with pytest.raises(TransientError, match=said) as caught:
        copied_store.read("x", 4, 2)
    assert caught.value.exit_code == 3
    assert waited == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4])


def test_waits_differ_by_chance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited: list[float] = []
    (tmp_path / "x").write_bytes(PATIENT_DATA)
    copied_store = LocalStore(tmp_path, retry_policy=RetryPolicy(sleep=waited.append, chance=lambda: 0.0))
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 2))
    copied_store.read("x", 0, 1)
    assert waited == pytest.approx([0.05, 0.1])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EROFS, errno.EISDIR])
def test_what_lasts_is_not_tried_again(
    number: int, copied_store: LocalStore, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1, number))
    with pytest.raises(UnreadableError, match="x: cannot be read at byte 0"):
        copied_store.read("x", 0, 1)
    assert waited == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_lack_of_room_is_not_tried_again(
    number: int, copied_store: LocalStore, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 1, number))
    with pytest.raises(DiskSpaceError):
        copied_store.write_at("x", 0, b"1")
    assert waited == []


def test_bytes_that_were_not_made_durable_count_as_lost(
    copied_store: LocalStore, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system forgets them and says that all is well when it is asked again."""
    copied_store.create("y", 5)
    monkeypatch.setattr(os, "fdatasync", failing(os.fdatasync, 1))
    with pytest.raises(TransientError, match=r"x: not made durable: Input/output error \(EIO\)"):
        copied_store.sync("x")
    with pytest.raises(TransientError, match="x: bytes of it were lost"):
        copied_store.sync("x")
    copied_store.sync("y")
    assert waited == []


def test_a_file_that_cannot_be_looked_at_for_a_moment_is_there(
    copied_store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "stat", failing(os.stat, 2))
    found = copied_store.info("x")
    assert found is not None
    assert found.nbytes == len(PATIENT_DATA)


def test_what_was_tried_again_is_told_once(
    copied_store: LocalStore, retry_policy: RetryPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 2, errno.ETIMEDOUT))
    copied_store.read("x", 0, 1)
    assert retry_policy.take_faults() == {"x: Connection timed out (ETIMEDOUT)": 2}
    assert retry_policy.take_faults() == {}


@pytest.mark.usefixtures("store")
def test_a_wait_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retry_policy = RetryPolicy()
    retry_policy.end()
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1000))
    with pytest.raises(TransientError, match="failed once"):
        LocalStore(tmp_path, retry_policy=retry_policy).read("x", 0, 1)
