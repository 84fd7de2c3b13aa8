"""Writing to an S3 server: what is there is whole, whatever happened on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from kits.s3_server import S3Server, s3_server
from moto.s3.models import FakeMultipart

from raymerge.errors import IncompleteError, TargetError, TransientError
from raymerge.storage import retry
from raymerge.storage.addresses import with_options
from raymerge.storage.objects import writer as object_stream
from raymerge.storage.objects import writer as object_writer
from raymerge.storage.objects import writer as unfinished_uploads
from raymerge.storage.objects.store import ObjectStore
from raymerge.storage.objects.writer import SMALLEST_PART, ObjectInfo, ObjectWriter, part_bytes, stream_bytes
from raymerge.storage.retry import RetryPolicy

LARGE = os.urandom(2 * SMALLEST_PART + (3 << 20) + 5)
PIECE = 1_234_567


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    server.calm()
    yield server
    server.calm()
    # Other tests of this process may have used the server's memory, too. What one leaves no other meets.
    assert server.abort_uploads("written") == []


@pytest.fixture
def writer(s3: S3Server) -> ObjectWriter:
    return ObjectWriter(s3.place("written"), patience=RetryPolicy(sleep=lambda _: None))


def _written(writer: ObjectWriter, key: str, data: bytes) -> None:
    """Write an object from a buffer that is used again for every piece, as lanes do."""
    buffer = bytearray(PIECE)
    with writer.stream(key, len(data)) as stream:
        for begin in range(0, len(data), PIECE):
            piece = data[begin : begin + PIECE]
            buffer[: len(piece)] = piece
            stream.write(begin, memoryview(buffer)[: len(piece)])
        stream.finish()


def test_small_objects(writer: ObjectWriter) -> None:
    first = writer.put_new("a/b.json", b"one")
    assert first
    assert writer.put_new("a/b.json", b"two") is None
    assert writer.get("a/b.json") == (b"one", first)
    second = writer.put_over("a/b.json", b"three", first)
    assert second
    assert writer.put_over("a/b.json", b"four", first) is None
    assert writer.put_over("absent", b"four", first) is None
    assert [(each.key, each.nbytes, each.version) for each in writer.files()] == [("a/b.json", 5, second)]
    assert writer.info("a/b.json") == ObjectInfo(5, second, "")
    writer.delete(["a/b.json", "absent"])
    assert (writer.files(), writer.get("a/b.json"), writer.info("a/b.json")) == ((), None, None)


def test_a_stream_is_one_upload_of_a_few_parts(s3: S3Server, writer: ObjectWriter) -> None:
    _written(writer, "large", LARGE)
    assert s3.objects("written/large") == {"written/large": LARGE}
    assert sorted(each.received for each in s3.asked("PUT", "large")) == [
        len(LARGE) - 2 * SMALLEST_PART,
        SMALLEST_PART,
        SMALLEST_PART,
    ]
    found = writer.info("large")
    assert found is not None
    assert (found.nbytes, found.version.endswith('-3"')) == (len(LARGE), True)


def test_bytes_that_come_early_are_kept_until_it_is_their_turn(s3: S3Server, writer: ObjectWriter) -> None:
    data = os.urandom(5000)
    with writer.stream("mixed", len(data)) as stream:
        for begin, end in ((4000, 5000), (0, 1000), (2000, 4000)):
            stream.write(begin, bytearray(data[begin:end]))
        assert (stream.done_bytes, stream.early_bytes) == (1000, 3000)
        stream.write(1000, data[1000:2000])
        assert (stream.done_bytes, stream.early_bytes) == (5000, 0)
        stream.finish()
    assert s3.objects("written/mixed") == {"written/mixed": data}


def test_bytes_that_nobody_awaits_are_refused(writer: ObjectWriter) -> None:
    with writer.stream("never", 10) as stream:
        stream.write(0, b"12345")
        for offset, data in ((0, b"1"), (4, b"1"), (9, b"12")):
            with pytest.raises(ValueError, match="not awaited"):
                stream.write(offset, data)
        with pytest.raises(IncompleteError, match="5 of 10 bytes came"):
            stream.finish()


@pytest.mark.parametrize("kind", ["error", "throttle", "reset"])
def test_parts_that_fail_for_a_moment_are_sent_again(s3: S3Server, writer: ObjectWriter, kind: str) -> None:
    s3.fail(kind, method="PUT", key="large", times=2)  # type: ignore[arg-type]
    s3.fail(kind, method="POST", key="large", times=1)  # type: ignore[arg-type]
    _written(writer, "large", LARGE)
    assert s3.objects("written/large") == {"written/large": LARGE}


def test_an_upload_whose_number_was_lost_is_aborted_in_the_end(s3: S3Server, writer: ObjectWriter) -> None:
    s3.fail("cut", method="POST", key="large", times=1)
    with pytest.raises(TransientError):
        _written(writer, "large", LARGE)
    assert s3.uploads() == ["written/large"]
    assert writer.abort_uploads(lambda key: key == "large") == 1


def test_a_store_that_goes_on_failing_ends_in_an_error_and_nothing_is_there(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_writer, "_STREAM_RETRIES", 0)
    s3.fail("error", method="PUT", key="lost", times=100)
    writer = ObjectWriter(s3.place("written"))
    with pytest.raises(TransientError, match=r"lost: writing at byte .* the same command goes on"):
        _written(writer, "lost", LARGE)
    assert s3.objects("written/lost") == {}


def test_who_may_not_write_is_told(s3: S3Server, writer: ObjectWriter) -> None:
    s3.fail("forbid", method="PUT", times=100)
    with pytest.raises(
        TargetError, match=r"written/small: the store refuses it to the credentials .* 403"
    ) as told:
        writer.put("small", b"1")
    assert "AWS_ACCESS_KEY_ID" in str(told.value)
    assert "testing-secret" not in str(told.value)
    with pytest.raises(TargetError, match="the store refuses it"):
        _written(writer, "large", LARGE)


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_what_is_refused_for_good_in_the_middle_is_not_tried_again(
    s3: S3Server, writer: ObjectWriter, method: str
) -> None:
    def written() -> None:
        with writer.stream("refused", len(LARGE)) as stream:
            stream.write(0, LARGE[: SMALLEST_PART + PIECE])
            while not s3.asked("PUT", "refused"):
                time.sleep(0.01)
            s3.fail("forbid", method=method, times=100)
            stream.write(stream.done_bytes, LARGE[stream.done_bytes :])
            stream.finish()

    with pytest.raises(
        TargetError, match=r"refused: the store refuses it to the credentials .*: 403 AccessDenied\."
    ) as told:
        written()
    assert "uploadId" not in str(told.value)
    assert s3.objects("written/refused") == {}


def test_an_object_says_who_wrote_it(s3: S3Server, writer: ObjectWriter) -> None:
    for key, data in (("large", LARGE), ("small", b"1")):
        with writer.stream(key, len(data), stamp="mine") as stream:
            stream.write(0, data)
            stream.finish()
        info = writer.info(key)
        assert info is not None
        assert (info.nbytes, info.stamp) == (len(data), "mine")
    s3.put("written/small", b"2")
    assert writer.info("small") == ObjectInfo(1, '"c81e728d9d4c2f636f067f89cc14862c"', "")


def _pass() -> None:
    """A guard that lets everything pass."""


def _refuse() -> None:
    raise IncompleteError("as the test has it")


def test_an_object_whose_answer_was_lost_is_there(s3: S3Server, writer: ObjectWriter) -> None:
    s3.fail("lose", method="PUT", key="answer")
    writer.put_only("answer", b"1", _pass, stamp="mine")
    assert [each.status for each in s3.asked("PUT", "answer")] == [0, 412]


def test_who_finds_ever_others_in_a_place_gives_up(s3: S3Server, writer: ObjectWriter) -> None:
    numbers = count()
    s3.before = lambda method, key: s3.put(key, b"%d" % next(numbers)) if method == "PUT" else None
    with pytest.raises(TransientError, match="another process goes on writing there"):
        writer.put_only("one", b"2", _pass, stamp="mine")


@pytest.mark.parametrize("data", [LARGE, b"small"])
def test_what_a_guard_refuses_is_not_there(s3: S3Server, writer: ObjectWriter, data: bytes) -> None:
    def guarded() -> None:
        with writer.stream("guarded", len(data), stamp="mine", guard=_refuse) as stream:
            stream.write(0, data)
            stream.finish()

    with pytest.raises(IncompleteError, match="as the test has it"):
        guarded()
    assert s3.objects("written/guarded") == {}


@pytest.mark.parametrize("kind", ["error", "reset"])
def test_an_abort_that_fails_for_a_moment_is_made_again(
    s3: S3Server, writer: ObjectWriter, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that meets parts on their way may."""
    dispose, stumbled = FakeMultipart.dispose, []

    def stumble(upload: FakeMultipart) -> None:
        stumbled.append(upload)
        if len(stumbled) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        dispose(upload)

    def written() -> None:
        with writer.stream("aborted", len(LARGE), guard=_refuse) as stream:
            stream.write(0, LARGE)
            stream.finish()

    monkeypatch.setattr(FakeMultipart, "dispose", stumble)
    s3.fail(kind, method="DELETE", key="aborted")  # type: ignore[arg-type]
    with pytest.raises(IncompleteError, match="as the test has it"):
        written()
    assert len(stumbled) == 2
    assert s3.uploads() == []


def test_objects_are_encrypted_with_the_key_that_is_named(s3: S3Server) -> None:
    options = replace(s3.options, kms_key="alias/models")
    writer = ObjectWriter(with_options(f"s3://{s3.bucket}/written", options))
    _written(writer, "large", LARGE)
    writer.put("small", b"1")
    writer.put_new("new", b"1")
    for key in ("large", "small", "new"):
        found = s3.client().head_object(Bucket=s3.bucket, Key=f"written/{key}")
        assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", "alias/models")


def test_every_request_says_that_the_requester_pays(s3: S3Server) -> None:
    place = with_options(f"s3://{s3.bucket}/written", replace(s3.options, requester_pays=True))
    writer = ObjectWriter(place)
    _written(writer, "large", LARGE)
    assert writer.get("large") is not None
    assert len(writer.files()) > 0
    s3.client().create_multipart_upload(Bucket=s3.bucket, Key="written/left")
    assert writer.abort_uploads({"left"}.__contains__) == 1
    writer.delete(["large"])
    with ObjectStore(place) as store:
        store.files()
    assert {each.headers.get("x-amz-request-payer") for each in s3.requests} == {"requester"}


def test_uploads_that_nobody_completes_are_aborted_below_the_place_alone(
    s3: S3Server, writer: ObjectWriter
) -> None:
    client = s3.client()
    for key in ("written/a", "written/sub/b", "written/theirs", "written-2/a"):
        client.create_multipart_upload(Bucket=s3.bucket, Key=key)
    assert writer.abort_uploads({"a", "sub/b"}.__contains__) == 2
    assert sorted(key for key in s3.uploads() if key.startswith("written")) == [
        "written-2/a",
        "written/theirs",
    ]
    assert writer.abort_uploads({"theirs"}.__contains__) == 1
    assert ObjectWriter(s3.place("written-2")).abort_uploads({"a"}.__contains__) == 1


@pytest.mark.parametrize("fault", ["gone", "error", "reset"])
def test_an_upload_that_cannot_be_aborted_keeps_none_of_the_others(
    s3: S3Server, writer: ObjectWriter, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_uploads, "_ATTEMPTS", 1)
    client, numbers = s3.client(), {}
    for key in ("written/a", "written/b", "written/c"):
        made = client.create_multipart_upload(Bucket=s3.bucket, Key=key)
        numbers[key] = made["UploadId"]

    def end(method: str, key: str) -> None:
        if (method, key) == ("DELETE", "written/a"):
            s3.before = None
            client.abort_multipart_upload(Bucket=s3.bucket, Key=key, UploadId=numbers[key])

    if fault == "gone":
        s3.before = end
    else:
        s3.fail(fault, method="DELETE", key="written/a")  # type: ignore[arg-type]
    writer.abort_uploads({"a", "b", "c"}.__contains__)
    assert [key for key in s3.uploads() if key.startswith("written")] == []


def test_a_listing_of_uploads_that_fails_is_made_again_or_told(
    s3: S3Server, writer: ObjectWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_uploads, "_ATTEMPTS", 1)
    s3.client().create_multipart_upload(Bucket=s3.bucket, Key="written/a")
    with monkeypatch.context() as patched:
        patched.setattr(retry, "_RETRIES", 1)
        s3.fail("error", times=2)
        with pytest.raises(TransientError, match="listing"):
            writer.abort_uploads({"a"}.__contains__)
    s3.fail("throttle", times=2)
    assert writer.abort_uploads({"a"}.__contains__) == 1
    # Who may not list them leaves that to a rule of the bucket.
    s3.fail("forbid")
    assert writer.abort_uploads({"a"}.__contains__) == 0


def test_uploads_are_looked_for_on_the_server_that_is_written_to(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client goes by variables that boto3 does not know.
    monkeypatch.setenv("AWS_ENDPOINT", s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-central-7")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    s3.client().create_multipart_upload(Bucket=s3.bucket, Key="written/large")
    assert ObjectWriter(f"s3://{s3.bucket}/written").abort_uploads({"large"}.__contains__) == 1
    assert [(each.method, each.status) for each in s3.requests] == [("GET", 200), ("DELETE", 204)]


def test_parts_are_not_too_many() -> None:
    assert part_bytes(1) == SMALLEST_PART
    assert -(-object_stream.LARGEST_OBJECT // part_bytes(object_stream.LARGEST_OBJECT)) < 10_000


_STREAM = """
import sys
from raymerge.storage.objects.writer import ObjectWriter

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

nbytes, piece = int(sys.argv[2]), bytearray(4 << 20)
with ObjectWriter(sys.argv[1]).stream("warm", 9 << 20) as stream:
    stream.write(0, memoryview(piece))
before = resident("VmRSS:")
with ObjectWriter(sys.argv[1]).stream("slow", nbytes) as stream:
    for begin in range(0, nbytes, len(piece)):
        stream.write(begin, memoryview(piece))
    stream.finish()
print(resident("VmHWM:") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("nbytes", [SMALLEST_PART, 96 << 20])
def test_a_stream_takes_no_more_memory_than_it_says_however_slow_the_store_is(
    s3: S3Server, nbytes: int
) -> None:
    s3.fail("delay", method="PUT", key="slow", times=100, seconds=0.15)
    command = [sys.executable, "-c", _STREAM, s3.place("written"), str(nbytes)]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert stream_bytes(nbytes) <= 34 << 20
    assert int(done.stdout) < stream_bytes(nbytes) + (6 << 20)
    s3.client().delete_object(Bucket=s3.bucket, Key="written/slow")
