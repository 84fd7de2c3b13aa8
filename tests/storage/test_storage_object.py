"""Reading from an S3 server: every byte once, of one version, however the server behaves."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from kits.s3_server import S3Server, s3_server

from raymerge.errors import CheckpointError, OptionError, TransientError, UnreadableError
from raymerge.storage.addresses import StoreOptions, with_options
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for
from raymerge.storage.objects.store import ObjectStore, object_client, server_message
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo

LARGE = os.urandom((9 << 20) + 17)
SMALL = b"small"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
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
            buffer = aligned_buffer(room_for(1000))
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
    with ObjectStore(s3.place("model"), patience=_impatient()) as store:
        assert store.read("small.txt", 1, 3) == SMALL[1:4]
        s3.fail("long", key="small", times=99)
        with pytest.raises(TransientError, match=r"small\.txt: reading at byte 1 .*more bytes than"):
            store.read("small.txt", 1, 3)


def test_patience_goes_on_where_the_client_gives_up(s3: S3Server) -> None:
    patience = _impatient()
    s3.fail("throttle", key="small", times=6)
    with ObjectStore(s3.place("model"), patience=patience) as store:
        assert store.read("small.txt", 0, 5) == SMALL
    assert patience.take_faults() == {"small.txt: 503 SlowDown (EIO)": 1}


def test_a_server_that_goes_on_failing(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.storage.objects.store.object_client", partial(object_client, retries=0))
    s3.fail("error", key="small", times=99)
    with ObjectStore(s3.place("model"), patience=_impatient()) as store:
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
        ObjectStore(nowhere, patience=_impatient()) as store,
        pytest.raises(TransientError, match=r"the server cannot be reached at https://127\.0\.0\.1:1"),
    ):
        store.files()


def test_without_a_signature(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3.client().put_object(Bucket=s3.bucket, Key="model/public", Body=SMALL, ACL="public-read")
    with open_store(_named(s3, anonymous=True)) as store:
        assert store.read("public", 0, 5) == SMALL
    s3.client().delete_object(Bucket=s3.bucket, Key="model/public")


def test_the_profile_of_a_user_gives_credentials(s3: S3Server, tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "credentials"
    path.write_text("[mine]\naws_access_key_id = AKIDMINE\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
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
