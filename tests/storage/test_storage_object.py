"""Object stores as places for reading and writing."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from kits.marks import slow_but
from kits.s3_server import ENVIRONMENT, MotoServer, S3Server
from kits.seaweed_server import S3_SERVERS, any_s3_server
from moto.s3.models import FakeMultipart

from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    OptionError,
    TargetError,
    TransientError,
    UnreadableError,
)
from raymerge.storage import retry
from raymerge.storage.addresses import StoreOptions, with_options
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, buffer_nbytes
from raymerge.storage.objects import writer as object_stream
from raymerge.storage.objects import writer as object_writer
from raymerge.storage.objects import writer as unfinished_uploads
from raymerge.storage.objects.store import ObjectStore, object_client, server_message
from raymerge.storage.objects.writer import SMALLEST_PART, ObjectInfo, ObjectWriter, part_bytes, stream_bytes
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo

LARGE = os.urandom((9 << 20) + 17)
SMALL = b"small"


@pytest.fixture(scope="module", params=S3_SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with any_s3_server(request.param) as found:
        found.put("model/large.bin", LARGE)
        found.put("model/small.txt", SMALL)
        found.put("model/sub/more.txt", SMALL)
        found.put("model/.cache/hidden.txt", SMALL)
        found.put("model/.gitattributes", SMALL)
        found.put("model-2/other.txt", SMALL)
        yield found


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    server.calm()
    yield server
    server.calm()


def _impatient() -> RetryPolicy:
    return RetryPolicy(sleep=lambda _: None)


def test_what_lies_below_a_place(s3: S3Server) -> None:
    with open_store(s3.place("model")) as store:
        files = store.files()
        assert [file.key for file in files] == [".gitattributes", "large.bin", "small.txt", "sub/more.txt"]
        assert [file.nbytes for file in files] == [5, len(LARGE), 5, 5]
        assert store.info("large.bin") == files[1]
        assert store.info("absent") is None
        assert store.infos(["small.txt", "absent", "large.bin"]) == dict(
            zip(("small.txt", "absent", "large.bin"), (files[2], None, files[1]), strict=True)
        )
        assert store.location("sub/more.txt") == f"s3://{s3.bucket}/model/sub/more.txt"
    assert len(s3.asked("GET")) == 2
    assert len(s3.asked("HEAD")) == 2


def test_a_long_range_is_fetched_in_pieces_each_of_the_version_that_was_seen(s3: S3Server) -> None:
    with open_store(s3.place("model")) as store:
        version = {file.key: file.version for file in store.files()}["large.bin"]
        assert store.read("large.bin", 3, len(LARGE) - 3) == LARGE[3:]
    asked = sorted(each.range for each in s3.asked("GET", "large") if each.range is not None)
    assert len(asked) == 3
    assert [begin for begin, _ in asked] == [3, *(end for _, end in asked[:-1])]
    assert asked[-1][1] == len(LARGE)
    assert {each.if_match for each in s3.asked("GET", "large")} == {version}


def test_an_extent_lies_where_it_will_be_written(s3: S3Server) -> None:
    with open_store(s3.place("model")) as store:
        for like, begin in ((None, 5001 % ALIGNMENT), (77, 77)):
            buffer = aligned_buffer(buffer_nbytes(1000))
            assert store.read_extent("large.bin", 5001, 1000, buffer, like=like) == begin
            assert buffer[begin : begin + 1000] == LARGE[5001:6001]
        with pytest.raises(ValueError, match="too few"):
            store.read_extent("large.bin", 0, 1000, memoryview(bytearray(1000)))


@pytest.mark.parametrize("kind", ["error", "throttle", "reset", "cut", "tear"])
def test_what_fails_for_a_moment_is_tried_again_and_read_once(s3: S3Server, kind: Any) -> None:
    s3.fail(kind, key="large", times=3)
    with open_store(s3.place("model")) as store:
        assert store.read("large.bin", 0, len(LARGE)) == LARGE
    # What was broken off goes on where it ended; a reset loses what was on its way.
    assert kind == "tear" or sum(each.sent for each in s3.asked("GET", "large") if each.status == 206) == len(
        LARGE
    )


def test_an_answer_longer_than_its_range_is_no_answer(s3: S3Server) -> None:
    s3.fail("long", key="small", times=2)
    with ObjectStore(s3.place("model"), retry_policy=_impatient()) as store:
        assert store.read("small.txt", 1, 3) == SMALL[1:4]
        s3.fail("long", key="small", times=99)
        with pytest.raises(TransientError, match=r"small\.txt: reading at byte 1 .*more bytes than"):
            store.read("small.txt", 1, 3)


def test_patience_goes_on_where_the_client_gives_up(s3: S3Server) -> None:
    retry_policy = _impatient()
    s3.fail("throttle", key="small", times=6)
    with ObjectStore(s3.place("model"), retry_policy=retry_policy) as store:
        assert store.read("small.txt", 0, 5) == SMALL
    assert retry_policy.take_faults() == {"small.txt: 503 SlowDown (EIO)": 1}


def test_a_server_that_goes_on_failing(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.storage.objects.store.object_client", partial(object_client, retries=0))
    s3.fail("error", key="small", times=99)
    with ObjectStore(s3.place("model"), retry_policy=_impatient()) as store:
        store.info("small.txt")
        with pytest.raises(
            TransientError, match=r"small\.txt: reading at byte 0 failed 8 times.*500 Internal"
        ):
            store.read("small.txt", 0, 5)


def test_an_object_that_was_changed_is_refused(s3: S3Server) -> None:
    s3.put("changing/a", b"before")
    with open_store(s3.place("changing")) as store:
        (before,) = store.files()
        s3.put("changing/a", b"behind")
        with pytest.raises(CheckpointError, match=r"changing/a: the file was changed while it was merged"):
            store.read("a", 0, 6)
        assert store.info("a") != before
        assert store.read("a", 0, 6) == b"behind"
    for expected in (before, FileInfo("a", 6, 'W/"old"')):
        with (
            open_store(s3.place("changing"), expected={"a": expected}) as store,
            pytest.raises(CheckpointError, match="was changed"),
        ):
            store.read("a", 0, 6)


def test_an_object_that_is_gone_or_too_short(s3: S3Server) -> None:
    s3.put("going/a", b"here")
    with open_store(s3.place("going")) as store:
        store.files()
        with pytest.raises(CheckpointError, match="ends at byte 4, but bytes 2 to 5 were wanted"):
            store.read("a", 2, 3)
        s3.client().delete_object(Bucket=s3.bucket, Key="going/a")
        for key in ("a", "never"):
            with pytest.raises(
                UnreadableError, match=rf"going/{key}: cannot be read at byte 0: No such file"
            ):
                store.read(key, 0, 4)


def _named(s3: S3Server, **options: Any) -> str:
    return with_options("s3://models/model", StoreOptions(endpoint=s3.endpoint, allow_http=True, **options))


def test_refusals_say_what_was_asked(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="there is no bucket 'nowhere' at http") as caught:
        open_store(s3.place("x").replace("models", "nowhere")).files()
    assert "?" not in str(caught.value)
    s3.fail("forbid", times=9)
    with pytest.raises(UnreadableError, match=r"403 AccessDenied\. Looked for were AWS_ACCESS_KEY_ID"):
        open_store(s3.place("model")).files()
    with pytest.raises(UnreadableError, match=r"small\.txt: may not be read with the credentials"):
        open_store(s3.place("model")).read("small.txt", 0, 5)
    with pytest.raises(UnreadableError, match="may not be read by everybody"):
        open_store(_named(s3, anonymous=True)).files()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CheckpointError, match=r"there are no credentials\. Asked were AWS_ACCESS_KEY_ID"):
        open_store(s3.place("model")).files()
    with pytest.raises(OptionError, match="storage: profile: AWS gives no credentials"):
        open_store(_named(s3, profile="nobody")).files()


def test_codes_of_other_services_are_told_too() -> None:
    said = "status code: 400 Bad Request: <Error><Code>KMS.NotFoundException</Code></Error>"
    assert server_message(OSError(said)) == "400 KMS.NotFoundException"


def test_the_environment_says_where_the_server_is(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    with pytest.raises(OptionError, match="AWS_ALLOW_HTTP=true"):
        open_store("s3://models/model").files()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with open_store("s3://models/model") as store:
        assert store.read("small.txt", 0, 5) == SMALL


def test_a_server_that_is_not_there(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.storage.objects.store.object_client", partial(object_client, retries=0))
    nowhere = with_options("s3://models/x", StoreOptions(endpoint="https://127.0.0.1:1"))
    with (
        ObjectStore(nowhere, retry_policy=_impatient()) as store,
        pytest.raises(TransientError, match=r"the server cannot be reached at https://127\.0\.0\.1:1"),
    ):
        store.files()


def test_without_a_signature(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3.put("model/public", SMALL)
    readable = f"arn:aws:s3:::{s3.bucket}/model/public"
    statement = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": readable}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    s3.client().put_bucket_policy(Bucket=s3.bucket, Policy=policy)
    with open_store(_named(s3, anonymous=True)) as store:
        assert store.read("public", 0, 5) == SMALL
    s3.client().delete_bucket_policy(Bucket=s3.bucket)
    s3.client().delete_object(Bucket=s3.bucket, Key="model/public")


def test_the_profile_of_a_user_gives_credentials(s3: S3Server, tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "credentials"
    pair = [
        f"{name.lower()} = {ENVIRONMENT[name]}" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    ]
    path.write_text("\n".join(("[mine]", *pair)))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with open_store(_named(s3, profile="mine")) as store:
        assert store.read("small.txt", 0, 5) == SMALL


def test_it_goes_to_workers_as_its_place_and_expectations(s3: S3Server) -> None:
    expected: Mapping[str, FileInfo] = {"small.txt": FileInfo("small.txt", 5, '"other"')}
    store = open_store(s3.place("model"), expected=expected)
    store.files()
    sent = pickle.dumps(store)
    assert os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in sent
    there = pickle.loads(sent)
    with pytest.raises(CheckpointError, match="was changed"):
        there.read("small.txt", 0, 5)
    assert there.read("sub/more.txt", 0, 5) == SMALL


def test_keys_stay_below_the_place(s3: S3Server) -> None:
    store = open_store(s3.place("model"))
    for key in ("", "/small.txt", "../model-2/other.txt"):
        with pytest.raises(ValueError, match="is not a key"):
            store.read(key, 0, 5)


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs"), ("az", "azure")])
def test_a_package_that_is_not_installed(scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(OptionError, match=rf"Run: pip install 'raymerge\[{extra}\]'"):
        open_store(f"{scheme}://bucket/x").files()


# The smallest that servers take.
PART = 5 << 20
LONG = os.urandom(2 * PART + 100_005)
PIECE = 1_234_567


@pytest.fixture(scope="module", params=S3_SERVERS)
def writers_server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with any_s3_server(request.param) as found:
        yield found


@pytest.fixture
def writers_s3(writers_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server where objects of a few megabytes are uploads of several parts."""
    monkeypatch.setattr(object_stream, "SMALLEST_PART", PART)
    writers_server.calm()
    yield writers_server
    writers_server.calm()
    # Other tests of this process may have used the server's memory, too. What one leaves no other meets.
    assert writers_server.abort_uploads("written") == []


@pytest.fixture
def writer(writers_s3: S3Server) -> ObjectWriter:
    return ObjectWriter(writers_s3.place("written"), retry_policy=RetryPolicy(sleep=lambda _: None))


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


def test_a_stream_is_one_upload_of_a_few_parts(writers_s3: S3Server, writer: ObjectWriter) -> None:
    _written(writer, "large", LONG)
    assert writers_s3.objects("written/large") == {"written/large": LONG}
    assert sorted(each.received for each in writers_s3.asked("PUT", "large")) == [
        len(LONG) - 2 * PART,
        PART,
        PART,
    ]
    found = writer.info("large")
    assert found is not None
    assert (found.nbytes, found.version.endswith('-3"')) == (len(LONG), True)


def test_bytes_that_come_early_are_kept_until_it_is_their_turn(
    writers_s3: S3Server, writer: ObjectWriter
) -> None:
    data = os.urandom(5000)
    with writer.stream("mixed", len(data)) as stream:
        for begin, end in ((4000, 5000), (0, 1000), (2000, 4000)):
            stream.write(begin, bytearray(data[begin:end]))
        assert (stream.done_bytes, stream.early_bytes) == (1000, 3000)
        stream.write(1000, data[1000:2000])
        assert (stream.done_bytes, stream.early_bytes) == (5000, 0)
        stream.finish()
    assert writers_s3.objects("written/mixed") == {"written/mixed": data}


def test_bytes_that_nobody_awaits_are_refused(writer: ObjectWriter) -> None:
    with writer.stream("never", 10) as stream:
        stream.write(0, b"12345")
        for offset, data in ((0, b"1"), (4, b"1"), (9, b"12")):
            with pytest.raises(ValueError, match="not awaited"):
                stream.write(offset, data)
        with pytest.raises(IncompleteError, match="5 of 10 bytes came"):
            stream.finish()


@pytest.mark.parametrize("kind", ["error", "throttle", "reset"])
def test_parts_that_fail_for_a_moment_are_sent_again(
    writers_s3: S3Server, writer: ObjectWriter, kind: str
) -> None:
    writers_s3.fail(kind, method="PUT", key="large", times=2)  # type: ignore[arg-type]
    writers_s3.fail(kind, method="POST", key="large", times=1)  # type: ignore[arg-type]
    _written(writer, "large", LONG)
    assert writers_s3.objects("written/large") == {"written/large": LONG}


def test_an_upload_whose_number_was_lost_is_aborted_in_the_end(
    writers_s3: S3Server, writer: ObjectWriter
) -> None:
    writers_s3.fail("cut", method="POST", key="large", times=1)
    with pytest.raises(TransientError):
        _written(writer, "large", LONG)
    assert writers_s3.uploads() == ["written/large"]
    assert writer.abort_uploads(lambda key: key == "large") == 1


def test_a_store_that_goes_on_failing_ends_in_an_error_and_nothing_is_there(
    writers_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_writer, "_STREAM_RETRIES", 0)
    writers_s3.fail("error", method="PUT", key="lost", times=100)
    writer = ObjectWriter(writers_s3.place("written"))
    with pytest.raises(TransientError, match=r"lost: writing at byte .* the same command goes on"):
        _written(writer, "lost", LONG)
    assert writers_s3.objects("written/lost") == {}


def test_who_may_not_write_is_told(writers_s3: S3Server, writer: ObjectWriter) -> None:
    writers_s3.fail("forbid", method="PUT", times=100)
    with pytest.raises(
        TargetError, match=r"written/small: the store refuses it to the credentials .* 403"
    ) as told:
        writer.put("small", b"1")
    assert "AWS_ACCESS_KEY_ID" in str(told.value)
    assert "testing-secret" not in str(told.value)
    with pytest.raises(TargetError, match="the store refuses it"):
        _written(writer, "large", LONG)


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_what_is_refused_for_good_in_the_middle_is_not_tried_again(
    writers_s3: S3Server, writer: ObjectWriter, method: str
) -> None:
    def written() -> None:
        with writer.stream("refused", len(LONG)) as stream:
            stream.write(0, LONG[: PART + PIECE])
            while not writers_s3.asked("PUT", "refused"):
                time.sleep(0.01)
            writers_s3.fail("forbid", method=method, times=100)
            stream.write(stream.done_bytes, LONG[stream.done_bytes :])
            stream.finish()

    with pytest.raises(
        TargetError, match=r"refused: the store refuses it to the credentials .*: 403 AccessDenied\."
    ) as told:
        written()
    assert "uploadId" not in str(told.value)
    assert writers_s3.objects("written/refused") == {}


def test_an_object_says_who_wrote_it(writers_s3: S3Server, writer: ObjectWriter) -> None:
    for key, data in (("large", LONG), ("small", b"1")):
        with writer.stream(key, len(data), stamp="mine") as stream:
            stream.write(0, data)
            stream.finish()
        info = writer.info(key)
        assert info is not None
        assert (info.nbytes, info.stamp) == (len(data), "mine")
    writers_s3.put("written/small", b"2")
    assert writer.info("small") == ObjectInfo(1, '"c81e728d9d4c2f636f067f89cc14862c"', "")


def _pass() -> None:
    """A guard that lets everything pass."""


def _refuse() -> None:
    raise IncompleteError("as the test has it")


def test_an_object_whose_answer_was_lost_is_there(writers_s3: S3Server, writer: ObjectWriter) -> None:
    writers_s3.fail("lose", method="PUT", key="answer")
    writer.put_only("answer", b"1", _pass, stamp="mine")
    assert [each.status for each in writers_s3.asked("PUT", "answer")] == [0, 412]


def test_who_finds_ever_others_in_a_place_gives_up(writers_s3: S3Server, writer: ObjectWriter) -> None:
    numbers = count()
    writers_s3.before = lambda method, key: (
        writers_s3.put(key, b"%d" % next(numbers)) if method == "PUT" else None
    )
    with pytest.raises(TransientError, match="another process goes on writing there"):
        writer.put_only("one", b"2", _pass, stamp="mine")


@pytest.mark.parametrize("data", [LONG, b"small"])
def test_what_a_guard_refuses_is_not_there(writers_s3: S3Server, writer: ObjectWriter, data: bytes) -> None:
    def guarded() -> None:
        with writer.stream("guarded", len(data), stamp="mine", guard=_refuse) as stream:
            stream.write(0, data)
            stream.finish()

    with pytest.raises(IncompleteError, match="as the test has it"):
        guarded()
    assert writers_s3.objects("written/guarded") == {}


@pytest.mark.parametrize("kind", ["error", "reset"])
def test_an_abort_that_fails_for_a_moment_is_made_again(
    writers_s3: S3Server, writer: ObjectWriter, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that meets parts on their way may."""
    if not isinstance(writers_s3, MotoServer):
        pytest.skip("only moto can be made to stumble")
    dispose, stumbled = FakeMultipart.dispose, []

    def stumble(upload: FakeMultipart) -> None:
        stumbled.append(upload)
        if len(stumbled) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        dispose(upload)

    def written() -> None:
        with writer.stream("aborted", len(LONG), guard=_refuse) as stream:
            stream.write(0, LONG)
            stream.finish()

    monkeypatch.setattr(FakeMultipart, "dispose", stumble)
    writers_s3.fail(kind, method="DELETE", key="aborted")  # type: ignore[arg-type]
    with pytest.raises(IncompleteError, match="as the test has it"):
        written()
    assert len(stumbled) == 2
    assert writers_s3.uploads() == []


def test_objects_are_encrypted_with_the_key_that_is_named(writers_s3: S3Server) -> None:
    if not isinstance(writers_s3, MotoServer):
        pytest.skip("it has no key service")
    options = replace(writers_s3.options, kms_key="alias/models")
    writer = ObjectWriter(with_options(f"s3://{writers_s3.bucket}/written", options))
    _written(writer, "large", LONG)
    writer.put("small", b"1")
    writer.put_new("new", b"1")
    for key in ("large", "small", "new"):
        found = writers_s3.client().head_object(Bucket=writers_s3.bucket, Key=f"written/{key}")
        assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", "alias/models")


def test_every_request_says_that_the_requester_pays(writers_s3: S3Server) -> None:
    place = with_options(
        f"s3://{writers_s3.bucket}/written", replace(writers_s3.options, requester_pays=True)
    )
    writer = ObjectWriter(place)
    _written(writer, "large", LONG)
    assert writer.get("large") is not None
    assert len(writer.files()) > 0
    writers_s3.client().create_multipart_upload(Bucket=writers_s3.bucket, Key="written/left")
    assert writer.abort_uploads({"left"}.__contains__) == 1
    writer.delete(["large"])
    with ObjectStore(place) as store:
        store.files()
    assert {each.headers.get("x-amz-request-payer") for each in writers_s3.requests} == {"requester"}


def test_uploads_that_nobody_completes_are_aborted_below_the_place_alone(
    writers_s3: S3Server, writer: ObjectWriter
) -> None:
    client = writers_s3.client()
    for key in ("written/a", "written/sub/b", "written/theirs", "written-2/a"):
        client.create_multipart_upload(Bucket=writers_s3.bucket, Key=key)
    assert writer.abort_uploads({"a", "sub/b"}.__contains__) == 2
    assert sorted(key for key in writers_s3.uploads() if key.startswith("written")) == [
        "written-2/a",
        "written/theirs",
    ]
    assert writer.abort_uploads({"theirs"}.__contains__) == 1
    assert ObjectWriter(writers_s3.place("written-2")).abort_uploads({"a"}.__contains__) == 1


@pytest.mark.parametrize("fault", ["gone", "error", "reset"])
def test_an_upload_that_cannot_be_aborted_keeps_none_of_the_others(
    writers_s3: S3Server, writer: ObjectWriter, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_uploads, "_ATTEMPTS", 1)
    client, numbers = writers_s3.client(), {}
    for key in ("written/a", "written/b", "written/c"):
        made = client.create_multipart_upload(Bucket=writers_s3.bucket, Key=key)
        numbers[key] = made["UploadId"]

    def end(method: str, key: str) -> None:
        if (method, key) == ("DELETE", "written/a"):
            writers_s3.before = None
            client.abort_multipart_upload(Bucket=writers_s3.bucket, Key=key, UploadId=numbers[key])

    if fault == "gone":
        writers_s3.before = end
    else:
        writers_s3.fail(fault, method="DELETE", key="written/a")  # type: ignore[arg-type]
    writer.abort_uploads({"a", "b", "c"}.__contains__)
    assert [key for key in writers_s3.uploads() if key.startswith("written")] == []


def test_a_listing_of_uploads_that_fails_is_made_again_or_told(
    writers_s3: S3Server, writer: ObjectWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_uploads, "_ATTEMPTS", 1)
    writers_s3.client().create_multipart_upload(Bucket=writers_s3.bucket, Key="written/a")
    with monkeypatch.context() as patched:
        patched.setattr(retry, "_RETRIES", 1)
        writers_s3.fail("error", times=2)
        with pytest.raises(TransientError, match="listing"):
            writer.abort_uploads({"a"}.__contains__)
    writers_s3.fail("throttle", times=2)
    assert writer.abort_uploads({"a"}.__contains__) == 1
    # Who may not list them leaves that to a rule of the bucket.
    writers_s3.fail("forbid")
    assert writer.abort_uploads({"a"}.__contains__) == 0


def test_uploads_are_looked_for_on_the_server_that_is_written_to(
    writers_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client goes by variables that boto3 does not know.
    monkeypatch.setenv("AWS_ENDPOINT", writers_s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-central-7")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    writers_s3.client().create_multipart_upload(Bucket=writers_s3.bucket, Key="written/large")
    assert ObjectWriter(f"s3://{writers_s3.bucket}/written").abort_uploads({"large"}.__contains__) == 1
    assert [(each.method, each.status) for each in writers_s3.requests] == [("GET", 200), ("DELETE", 204)]


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
@pytest.mark.parametrize("nbytes", slow_but([SMALLEST_PART, 48 << 20], 48 << 20))
def test_a_stream_takes_no_more_memory_than_it_says_however_slow_the_store_is(
    writers_s3: S3Server, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_stream, "SMALLEST_PART", SMALLEST_PART)
    writers_s3.fail("delay", method="PUT", key="slow", times=100, seconds=0.15)
    command = [sys.executable, "-c", _STREAM, writers_s3.place("written"), str(nbytes)]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert stream_bytes(nbytes) <= 34 << 20
    assert int(done.stdout) < stream_bytes(nbytes) + (6 << 20)
    writers_s3.client().delete_object(Bucket=writers_s3.bucket, Key="written/slow")
