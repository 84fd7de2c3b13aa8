"""Places as text: what they say, what they do not repeat, and how they are put together."""

from __future__ import annotations

import re

import pytest

from raymerge.errors import OptionError
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
