"""The three object stores over servers of their own, and redirects."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from kits.azure_server import ACCOUNT, AzureServer
from kits.cloud_http import serving
from kits.cloud_server import CloudServer, Request
from kits.google_server import GoogleServer
from kits.local_http import Handler, listening
from kits.marks import slow_but

from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    OptionError,
    RaymergeError,
    TargetError,
    TransientError,
    UnreadableError,
)
from raymerge.storage.addresses import StoreOptions, with_options
from raymerge.storage.objects import writer as object_stream
from raymerge.storage.objects.store import ObjectStore, object_client
from raymerge.storage.objects.writer import ObjectInfo, ObjectWriter
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo

_CLOUDS: Mapping[str, type[CloudServer]] = {"gs": GoogleServer, "az": AzureServer}
_PART = 100_000
LARGE = os.urandom(2 * _PART + 12_345)


@pytest.fixture(scope="module", params=_CLOUDS)
def server(request: pytest.FixtureRequest) -> Iterator[CloudServer]:
    with serving(_CLOUDS[request.param]()) as found:
        yield found


@pytest.fixture
def cloud(server: CloudServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudServer]:
    """The fake, empty; nothing that it does not know is asked of it."""
    server.clear()
    server.smallest_part = _PART
    monkeypatch.setattr(object_stream, "SMALLEST_PART", _PART)
    yield server
    assert server.strange == []
    assert server.secret.encode() not in b"".join(server.below("").values())


@pytest.fixture
def writer(cloud: CloudServer) -> ObjectWriter:
    return ObjectWriter(cloud.place("written"), retry_policy=_impatient())


def _impatient() -> RetryPolicy:
    return RetryPolicy(sleep=lambda _: None)


def _one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the client repeat nothing by itself."""
    for name in ("objects.store", "objects.writer"):
        monkeypatch.setattr(f"raymerge.storage.{name}.object_client", partial(object_client, retries=0))


def _written(writer: ObjectWriter, key: str, data: bytes, stamp: str = "") -> None:
    with writer.stream(key, len(data), stamp=stamp) as stream:
        for begin in range(0, len(data), 77_777):
            stream.write(begin, data[begin : begin + 77_777])
        stream.finish()


def _pass() -> None:
    """A guard that lets everything pass."""


def test_what_lies_below_a_place_by_pages(cloud: CloudServer) -> None:
    for key in ("model/a.bin", "model/sub dir/ä+&.txt", "model/.cache/hidden", "model-2/other"):
        cloud.put(key, b"12345")
    cloud.page = 1
    with open_store(cloud.place("model")) as store:
        files = store.files()
        assert [(file.key, file.nbytes) for file in files] == [("a.bin", 5), ("sub dir/ä+&.txt", 5)]
        # A listing and an answer name the version in one way.
        assert [store.info(file.key) for file in files] == list(files)
        assert [store.read(file.key, 1, 3) for file in files] == [b"234", b"234"]
        assert store.info("absent") is None
    assert len([each for each in cloud.of("GET") if each.request.key == ""]) == 3


@pytest.mark.parametrize("is_listed", [True, False])
def test_an_object_that_was_changed_is_refused(cloud: CloudServer, is_listed: bool) -> None:
    cloud.put("model/a", b"before")
    with open_store(cloud.place("model")) as store:
        before = store.files()[0] if is_listed else store.info("a")
        assert before is not None
        cloud.put("model/a", b"behind")
        with pytest.raises(CheckpointError, match="model/a: the file was changed while it was merged"):
            store.read("a", 0, 6)
        assert store.info("a") != before
    assert cloud.of("GET", "a")[-1].status == 412
    with open_store(cloud.place("model"), expected={"a": before}) as store:
        with pytest.raises(CheckpointError, match="was changed"):
            pickle.loads(pickle.dumps(store)).read("a", 0, 6)
        cloud.objects.clear()
        with pytest.raises(UnreadableError, match="No such file"):
            store.read("a", 0, 6)


def test_what_fails_for_a_moment_is_tried_again(cloud: CloudServer) -> None:
    cloud.put("lesson/metadata", b"12345")
    for kind in ("error", "throttle", "reset"):
        cloud.fail(kind, key="lesson", times=1)  # type: ignore[arg-type]
    with ObjectStore(cloud.place("lesson"), retry_policy=_impatient()) as store:
        assert store.read("metadata", 0, 5) == b"12345"
    assert len(cloud.of("GET", "lesson")) == 4


def test_a_connection_that_breaks_is_not_taken_for_a_lack_of_credentials(
    cloud: CloudServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _one_attempt(monkeypatch)
    cloud.put("sso/metadata", b"12345")
    with ObjectStore(cloud.place("sso"), retry_policy=_impatient()) as store:
        store.files()
        cloud.fail("reset", key="sso", times=1)
        assert store.read("metadata", 0, 5) == b"12345"


def test_everybody_may_read_what_is_public(cloud: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.put("model/a", b"12345")
    place = with_options(cloud.place("model"), StoreOptions(anonymous=True))
    with pytest.raises(UnreadableError, match=r"read by everybody: the server says 40[13]"):
        open_store(place).files()
    cloud.is_public = True
    with open_store(place) as store:
        assert [each.key for each in store.files()] == ["a"]
        assert store.read("a", 0, 5) == b"12345"
    assert "authorization" not in cloud.of("GET", "a")[0].request.headers


def test_small_objects(cloud: CloudServer, writer: ObjectWriter) -> None:
    first = writer.put_new("a/b.json", b"one")
    assert first
    assert writer.put_new("a/b.json", b"two") is None
    assert writer.get("a/b.json") == (b"one", first)
    second = writer.put_over("a/b.json", b"three", first)
    assert second
    assert second != first
    assert writer.put_over("a/b.json", b"four", first) is None
    assert writer.put_over("absent", b"four", first) is None
    assert [(each.key, each.nbytes) for each in writer.files()] == [("a/b.json", 5)]
    assert writer.info("a/b.json") == ObjectInfo(5, second, "")
    third = writer.put("a/b.json", b"three")
    # Of the same bytes, too: who had the place before may not write over what is there now.
    assert writer.put_over("a/b.json", b"four", second) is None
    assert writer.get("a/b.json") == (b"three", third)


def test_many_are_deleted_also_those_that_are_not_there(cloud: CloudServer, writer: ObjectWriter) -> None:
    keys = [f"many/{number:03}" for number in range(300)]
    for key in [*keys[::2], "kept"]:
        cloud.put(f"written/{key}", b"1")
    writer.delete(keys)
    writer.delete(["absent"])
    assert list(cloud.below("")) == ["written/kept"]


def test_a_stream_is_whole_or_not_there_and_says_who_wrote_it(
    cloud: CloudServer, writer: ObjectWriter
) -> None:
    cloud.put("written/kept", b"before")
    for data in (LARGE, b"small"):

        def broken_off(data: bytes) -> None:
            with writer.stream("kept", len(data) + 1, stamp="mine") as stream:
                stream.write(0, data)
                assert cloud.below("written/kept") == {"written/kept": b"before"}
                raise RuntimeError("as the test has it")

        with pytest.raises(RuntimeError, match="as the test has it"):
            broken_off(data)
        assert cloud.below("") == {"written/kept": b"before"}
    assert cloud.scheme == "az" or cloud.uploads() == []
    for data in (LARGE, b"small"):
        _written(writer, "one", data, "mine")
        assert cloud.below("written/one") == {"written/one": data}
        found = writer.info("one")
        assert found is not None
        assert (found.nbytes, found.stamp) == (len(data), "mine")
        cloud.objects.pop("written/one")
    done = 201 if cloud.scheme == "az" else 200
    assert [each.status for each in cloud.asked if each.is_write] == [done, done]


def test_a_connection_that_breaks_when_an_upload_begins(cloud: CloudServer, writer: ObjectWriter) -> None:
    """Google's client does not repeat that request: the run stops resumably. Azure has no such request."""
    cloud.fail("reset", method="POST", key="large")
    if cloud.scheme == "gs":
        with pytest.raises(TransientError, match=r"the server cannot be reached\. What is done is kept"):
            _written(writer, "large", LARGE)
        assert cloud.below("") == {}
    _written(writer, "large", LARGE)
    assert cloud.below("") == {"written/large": LARGE}


def test_an_object_is_written_only_over_what_was_seen_there(cloud: CloudServer, writer: ObjectWriter) -> None:
    writer.put_only("one", b"1", _pass, stamp="mine")
    cloud.asked.clear()
    writer.put_only("one", b"2", _pass, stamp="mine")
    assert cloud.below("") == {"written/one": b"1"}
    assert [each.status for each in cloud.of("PUT")] == [412 if cloud.scheme == "gs" else 409]
    writer.put_only("one", b"3", _pass, stamp="other")
    assert cloud.below("") == {"written/one": b"3"}
    asked: list[None] = []

    def guard() -> None:
        asked.append(None)
        if len(asked) == 2:
            cloud.put("written/one", b"theirs")
        if len(asked) == 3:
            raise IncompleteError("as the test has it")

    with pytest.raises(IncompleteError, match="as the test has it"):
        writer.put_only("one", b"mine", guard)
    assert cloud.below("") == {"written/one": b"theirs"}


def test_an_object_whose_answer_was_lost_is_there(cloud: CloudServer, writer: ObjectWriter) -> None:
    cloud.fail("lose", method="PUT", key="answer")
    writer.put_only("answer", b"1", _pass, stamp="mine")
    assert cloud.below("") == {"written/answer": b"1"}


def test_an_upload_that_the_store_no_longer_knows_may_be_made_again(
    cloud: CloudServer, writer: ObjectWriter
) -> None:
    """Its end came and the answer was lost, or another one of that name was completed meanwhile."""
    lost = _Lost(cloud)
    cloud.before = lost
    with pytest.raises(TransientError, match=r"large: writing at byte .* no longer knows of the upload"):
        _written(writer, "large", LARGE)
    assert lost.is_done
    assert cloud.below("") == {"written/large": LARGE}


class _Lost:
    """Loses the answer to the request that ends an upload."""

    def __init__(self, cloud: CloudServer) -> None:
        self._cloud = cloud
        self.is_done = False

    def __call__(self, request: Request) -> None:
        is_end = request.query.get("comp") == "blocklist" or (
            request.method == "POST" and "uploadId" in request.query
        )
        if is_end and not self.is_done:
            self.is_done = True
            self._cloud.fail("lose", method=request.method, key="large")


def test_blocks_that_come_late_are_refused(cloud: CloudServer, writer: ObjectWriter) -> None:
    """On Azure the end of one upload drops the blocks of another; on Google's each has its own number."""
    late = writer.stream("one", len(LARGE))
    late.write(0, LARGE)
    _written(writer, "one", LARGE[::-1])
    if cloud.scheme == "gs":
        late.finish()
    else:
        with pytest.raises(TransientError, match="the store no longer knows of the upload"):
            late.finish()
    assert cloud.below("") == {"written/one": LARGE if cloud.scheme == "gs" else LARGE[::-1]}


def test_who_may_not_is_told(cloud: CloudServer, writer: ObjectWriter) -> None:
    cloud.put("model/a", b"12345")
    for method in ("GET", "HEAD", "PUT", "POST"):
        cloud.fail("forbid", method=method, times=99)
    words = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": r"the AZURE_STORAGE_\* variables"}[cloud.scheme]
    told: list[RaymergeError] = []
    with pytest.raises(UnreadableError, match=rf"403 AsTheTestHasIt\. Looked for were {words}") as caught:
        open_store(cloud.place("model")).files()
    told.append(caught.value)
    with pytest.raises(UnreadableError, match="a: may not be read with the credentials of this") as caught:
        open_store(cloud.place("model"), expected={"a": FileInfo("a", 5, '"x"')}).read("a", 0, 5)
    told.append(caught.value)
    for put in (partial(writer.put, "small", b"1"), partial(_written, writer, "large", LARGE)):
        with pytest.raises(TargetError, match=r"the store refuses it to the credentials .*: 403") as refused:
            put()
        told.append(refused.value)
    # To HEAD there is no body that could name a code.
    with pytest.raises(TargetError, match=r"refuses it to the credentials .*: status 403\..*Looked for were"):
        writer.info("small")
    assert not any(cloud.secret in str(each) or "?" in str(each) for each in told)


def test_no_bucket(cloud: CloudServer) -> None:
    with pytest.raises(CheckpointError, match="there is no bucket 'absent'") as caught:
        open_store(cloud.place("x").replace("//models/", "//absent/")).files()
    assert "region" not in str(caught.value)
    with pytest.raises(TargetError, match="there is no bucket 'absent'"):
        ObjectWriter(cloud.place("x").replace("//models/", "//absent/")).put("a", b"1")


def test_the_endpoint_of_a_profile_is_that_of_s3_alone(cloud: CloudServer) -> None:
    """Sources may lie on both; what a machine may show to the one is nothing for the other."""
    cloud.put("model/a", b"12345")
    options = StoreOptions(endpoint="https://127.0.0.1:1", region="nowhere", profile="nobody")
    with open_store(with_options(cloud.place("model"), options)) as store:
        assert store.read("a", 0, 5) == b"12345"
    absent = with_options(cloud.place("x").replace("//models/", "//absent/"), options)
    with pytest.raises(CheckpointError, match="there is no bucket 'absent'") as caught:
        open_store(absent).files()
    assert "127.0.0.1" not in str(caught.value)


def _without_credentials(cloud: CloudServer, home: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """As on a machine that has none of its own, and asks who gives them."""
    for name in ("GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, at)
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://{at}/msi/token")


def test_no_credentials(cloud: CloudServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _one_attempt(monkeypatch)
    words = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "the AZURE_STORAGE_"}[cloud.scheme]
    # Nobody answers there; or he who does has no such thing to give.
    for at in ("127.0.0.1:1", f"{cloud.endpoint.removeprefix('http://')}/{cloud.scheme}"):
        _without_credentials(cloud, tmp_path, monkeypatch, at)
        # Resumable where it happens in a run.
        with pytest.raises(UnreadableError, match=rf"there are no credentials .*Asked were {words}"):
            open_store(cloud.place("model")).files()
        with pytest.raises(TargetError, match=rf"there are no credentials .*Asked were {words}"):
            ObjectWriter(cloud.place("model")).put("a", b"1")
    assert {each.status for each in cloud.of("GET")} == {403 if cloud.scheme == "gs" else 400}
    cloud.strange.clear()


def test_the_account_of_a_machine_gives_credentials(
    cloud: CloudServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_credentials(cloud, tmp_path, monkeypatch, cloud.endpoint.removeprefix("http://"))
    cloud.put("model/a", b"12345")
    with open_store(cloud.place("model")) as store:
        assert store.read("a", 0, 5) == b"12345"
    assert cloud.of("GET", "model/a")[0].request.headers["authorization"].startswith("Bearer ")


def test_azure_wants_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(OptionError, match="Account must be specified") as caught:
        open_store("az://models/x").files()
    assert "AZURE_STORAGE_ACCOUNT_NAME" in str(caught.value)
    assert ACCOUNT not in str(caught.value)


_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "s3": {
        "AWS_ENDPOINT_URL": "{endpoint}",
        "AWS_ACCESS_KEY_ID": "AKIDTESTING",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
        "AWS_SESSION_TOKEN": "SECRET",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent/config",
        "AWS_ALLOW_HTTP": "true",
    },
    "gs": {"GOOGLE_BASE_URL": "{endpoint}", "GOOGLE_BEARER_TOKEN": "SECRET", "GOOGLE_ALLOW_HTTP": "true"},
    "az": {
        "AZURE_STORAGE_ENDPOINT": "{endpoint}",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_KEY": "sv=2023-01-01&sig=SECRET",
        "AZURE_ALLOW_HTTP": "true",
    },
}
"""A server of each kind, and credentials of the kind that travels farthest."""
_OBJECT = {"Content-Length": "5", "ETag": '"a"', "Last-Modified": "Mon, 23 Nov 2026 00:00:00 GMT"}


class _OneAnswer(Handler):
    """Answers everything with one answer, and writes down the line and the headers of what it was asked."""

    protocol_version = "HTTP/1.0"
    seen: list[str]
    status: int
    answered: Mapping[str, str]
    body: bytes

    def serve(self) -> None:
        self.seen.append(f"{self.requestline}\n{self.headers}")
        self.send_response(self.status)
        for name, value in self.answered.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_GET = do_HEAD = do_PUT = do_POST = serve  # noqa: N815


@contextmanager
def _answering(
    status: int, answered: Mapping[str, str], body: bytes = b""
) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    with listening(_OneAnswer, seen=seen, status=status, answered=answered, body=body) as address:
        yield address, seen


def _go_to(scheme: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in _ENVIRONMENTS[scheme].items():
        monkeypatch.setenv(name, value.format(endpoint=endpoint))


@pytest.mark.parametrize("status", slow_but([302, 307], 307))
@pytest.mark.parametrize("scheme", _ENVIRONMENTS)
def test_no_redirect_to_another_host_is_followed(
    scheme: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _answering(200, _OBJECT, b"other") as (other, asked_there):
        onward = {"Location": f"{other.replace('127.0.0.1', 'localhost')}/x", "Content-Length": "0"}
        with _answering(status, onward) as (first, asked):
            _go_to(scheme, first, monkeypatch)
            with (
                open_store(f"{scheme}://bucket/a") as store,
                pytest.raises(CheckpointError, match="sends requests on to another host"),
            ):
                store.read("model.safetensors", 0, 5)
            with pytest.raises(TargetError, match=r"sends requests on to another host|is in another region"):
                ObjectWriter(f"{scheme}://bucket/a").put("model.safetensors", b"bytes")
        assert asked
        assert asked_there == []


def test_a_proxy_of_the_user_is_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with _answering(200, _OBJECT, b"bytes") as (proxy, seen):
        _go_to("s3", "http://s3.example", monkeypatch)
        monkeypatch.setenv("http_proxy", proxy)
        with open_store("s3://bucket/a") as store:
            assert store.info("model.safetensors") is not None
    assert seen[0].startswith("HEAD http://s3.example/bucket/a/model.safetensors")
