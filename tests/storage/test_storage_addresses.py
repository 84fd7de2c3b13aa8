"""Addresses of places, how they are opened, and what is expected of them."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from kits.s3_server import s3_server

from raymerge.errors import CheckpointError, OptionError, TransientError, UnreadableError
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
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store, resolve_source
from raymerge.storage.retry import RetryPolicy
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
    assert shown("hf://org/name@main") == "hf://org/name@main"


@pytest.mark.parametrize(
    "place",
    [
        "s3://",
        "s3:///a",
        "s3://bucket/../a",
        "s3://../a",
        "s3://key:secret@bucket/a",
        "s3://bucket/a?X-Amz-Signature=secret",
        "s3://bucket/a?anonymous=secret",
        "file://host/a",
        "file://[host/a",
        "s3:/key:secret@bucket/a?token=secret",
        "GS:/bucket/a",
        "file:/a",
    ],
)
def test_what_is_no_place_is_refused_without_repeating_a_secret(place: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_place(place)
    assert "secret" not in str(caught.value)


def test_ways_up_are_named() -> None:
    with pytest.raises(OptionError, match=r"s3://b/a/\.\./c: has '\.\.' in it"):
        parse_place("s3://b/a/../c")


def test_one_slash_is_told_from_two() -> None:
    for place, meant in (("s3:/models/x", "s3://models/x"), ("file:/tmp/x", "file:///tmp/x")):
        with pytest.raises(OptionError, match=re.escape(f"Write {meant}, or ./")):
            parse_place(place)
        assert parse_place(f"./{place}") == Place("file", f"./{place}")


def test_a_bucket_lies_nowhere() -> None:
    with pytest.raises(OptionError, match="lies in no directory"):
        parent_and_name("s3://bucket")


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


def test_nobody_pays_for_requests_that_are_not_signed() -> None:
    with pytest.raises(OptionError, match="storage: requester_pays: nobody can pay"):
        StoreOptions(anonymous=True, requester_pays=True)


def test_unknown_options_name_the_known_ones() -> None:
    with pytest.raises(OptionError, match="profile, allow_http, kms_key, requester_pays"):
        options_from_text({"regoin": "x"})


@pytest.mark.parametrize(
    "place",
    [
        "s3://me:pwSECRET@bucket/x",
        "s3://bucket/x?secret=pwSECRET",
        "hdfs://me:pwSECRET@host/x",
        "s3://bucket/x\n--flag",
        "s3://",
        "s3://b/../c",
        "hf://org/name",
    ],
)
def test_what_is_no_place_for_an_output_is_refused_without_its_secret(place: str) -> None:
    with pytest.raises(OptionError) as refused:
        check_output_address(place)
    assert "pwSECRET" not in str(refused.value)


@pytest.mark.parametrize("place", ["/mnt/out", "out", "file:///mnt/out", "s3://bucket/x", "gs://bucket/a/b"])
def test_places_for_outputs(place: str) -> None:
    check_output_address(place)


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


def test_a_file_that_is_written_to_after_it_was_opened_is_found(store: LocalStore) -> None:
    store.read("x", 0, 1)
    with (store.root / "x").open("r+b") as file:
        file.write(b"new")
    with pytest.raises(CheckpointError, match=SAID):
        store.check_expected()


def test_a_file_that_takes_the_place_of_one_that_was_read_is_found(store: LocalStore) -> None:
    store.read("x", 0, 1)
    (store.root / "z").write_bytes(b"0123456789")
    (store.root / "z").replace(store.root / "x")
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
