"""Places: speed measured and nothing left, stores that answer or refuse, credentials that are never shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.azure_server import AzureServer
from kits.cloud_http import serving
from kits.cloud_server import CloudServer
from kits.google_server import GoogleServer
from kits.reflink_mount import reflink_mount
from kits.s3_server import ENVIRONMENT, S3Server, s3_server

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets.target import Where
from raymerge.diagnosis import place
from raymerge.diagnosis.check import Check, Question, examine
from raymerge.diagnosis.diagnosis import _questions
from raymerge.storage.addresses import StoreOptions, with_options

MIB = 1 << 20


def _checks(where: str) -> list[Check]:
    """As they are told: a refusal becomes a problem."""
    return list(examine([Question("store", lambda: place.remote_place(where), 30, "Look there.")]))


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    checks = list(place.local_place(str(tmp_path / "not" / "yet"), most_nbytes=16 * MIB))
    assert [check.topic for check in checks] == ["disk", "disk speed", "shared blocks"]
    assert checks[0].fact.startswith(f"{tmp_path}: ")
    assert "16.78 MB past the cache" in checks[1].fact
    assert list(tmp_path.iterdir()) == []


def test_the_speed_is_that_of_all_bytes_there_and_back(tmp_path: Path) -> None:
    speed = place.measure(tmp_path, 12 * MIB)
    assert speed.nbytes == 12 * MIB
    assert 0 < speed.write < 1e12
    assert 0 < speed.read < 1e12
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "measure", lambda *_: place.Speed(read=2e9, write=20e6, nbytes=MIB))
    speed = list(place.local_place(str(tmp_path)))[1]
    assert (speed.verdict, speed.fact) == (
        "note",
        "reads 2.00 GB/s, writes 20.00 MB/s (1.05 MB past the cache)",
    )


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file of a model; root may write anywhere, so the system's answer is changed."""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: allowed(path, mode) and not mode & os.W_OK)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(os.urandom(9 * MIB))
    (tmp_path / "config.json").write_bytes(b"{}")
    return tmp_path


def test_a_place_that_is_only_read_is_a_note_with_its_speed(read_only: Path) -> None:
    disk, speed = place.local_place(str(read_only))
    assert (disk.verdict, disk.fact) == ("note", f"{read_only} may be read, and not written to.")
    assert re.fullmatch(r"reads \S+ \w+/s \(9.44 MB past the cache\)", speed.fact)
    (read_only / "model" / "model.safetensors").unlink()
    (_, speed) = place.local_place(str(read_only))
    assert (speed.verdict, speed.fact) == ("note", "there is no large file to measure its speed with.")


def test_an_output_that_may_not_be_written_is_a_problem(read_only: Path) -> None:
    where = Where("job", "http://h:8265", Profile(output=str(read_only)))
    asked = {
        each.subject: each for each in _questions(where, [str(read_only), "/"], {}, 9) if each.topic == "disk"
    }
    (check,) = asked[str(read_only)].ask()
    assert (check.verdict, check.fact) == ("problem", f"{read_only} may not be written to.")
    assert next(iter(asked["/"].ask())).verdict == "note"


def test_a_place_that_may_not_be_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (check,) = place.local_place(str(tmp_path))
    assert (check.verdict, check.fact) == ("problem", f"{tmp_path} may not be read.")


def test_files_that_share_blocks_are_told(tmp_path: Path) -> None:
    with reflink_mount(tmp_path) as mounted:
        checks = list(place.local_place(str(mounted), most_nbytes=8 * MIB))
    assert re.search("share their blocks.*duplicates: share", checks[2].fact)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def _place(server: S3Server, bucket: str, **options: bool) -> str:
    return with_options(
        f"s3://{bucket}/models", StoreOptions(endpoint=server.endpoint, allow_http=True, **options)
    )


def test_a_store_that_answers_is_well_and_its_credentials_are_not_shown(s3: S3Server) -> None:
    (empty,) = _checks(_place(s3, s3.bucket))
    assert empty.verdict == "ok"
    assert empty.fact.endswith("nothing is there yet")
    s3.put("models/config.json", b"{}")
    (check,) = _checks(_place(s3, s3.bucket))
    assert check.fact.startswith(
        f"s3://{s3.bucket}/models: answers, and lets the credentials that this machine"
    )
    assert check.fact.endswith("it holds files")
    assert not any(secret in str(check) for secret in list(ENVIRONMENT.values())[:2])


def test_a_bucket_that_is_not_there_is_a_problem(s3: S3Server) -> None:
    (check,) = _checks(_place(s3, "elsewhere"))
    assert check.verdict == "problem"
    assert "there is no bucket 'elsewhere'" in check.fact


def test_credentials_that_are_not_found_are_a_problem_with_the_places_looked_at(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # The server keeps what it found before, by address.
    (check,) = _checks(_place(s3, s3.bucket, requester_pays=True))
    assert check.verdict == "problem"
    assert "there are no credentials. Asked were AWS_ACCESS_KEY_ID" in check.fact


@pytest.mark.parametrize("kind", [GoogleServer, AzureServer])
def test_the_other_stores_answer_or_refuse(kind: type[CloudServer]) -> None:
    with serving(kind()) as cloud:
        cloud.put("models/config.json", b"{}")
        (well,) = _checks(cloud.place("models"))
        cloud.fail("forbid", times=9)
        (denied,) = _checks(cloud.place("models"))
    assert (well.verdict, well.fact.endswith("it holds files")) == ("ok", True)
    assert denied.verdict == "problem"
    assert "may not be read with the credentials of this machine" in denied.fact
    assert cloud.secret not in str([well, denied])


def test_a_token_of_the_hub_is_told_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (check,) = place.hub_token()
    assert (check.verdict, check.remedy) == ("note", "For others: hf auth login, or set HF_TOKEN.")
    (tmp_path / "token").write_text("hf_secret")
    (check,) = place.hub_token()
    assert check.verdict == "ok"
    assert "hf_secret" not in str(check)
