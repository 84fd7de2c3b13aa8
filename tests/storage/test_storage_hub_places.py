"""Addresses on the Hub, taken apart and put together; and which commits count as being in its cache."""

from __future__ import annotations

import pytest

from raymerge.errors import CheckpointError
from raymerge.storage.hub import HubPlace, blob_digest, hub_place, is_hub_place, snapshot_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "revision", "expected"),
    [
        ("hf://org/name", None, HubPlace("org/name")),
        ("hf://org/name/", None, HubPlace("org/name")),
        ("HF://org/name", None, HubPlace("org/name")),
        ("hf://org/name@v1.0", None, HubPlace("org/name", "v1.0")),
        ("hf://org/name@v1/a/b", None, HubPlace("org/name", "v1", "a/b")),
        ("hf://org/name/a", None, HubPlace("org/name", "main", "a")),
        ("hf://org/name", "v1", HubPlace("org/name", "v1")),
        ("hf://org/name", "v1/a/b", HubPlace("org/name", "v1", "a/b")),
        ("hf://org/name", "refs/pr/3/a", HubPlace("org/name", "refs/pr/3", "a")),
        ("hf://org/name/a", "feature/x", HubPlace("org/name", "feature/x", "a")),
        ("hf://org/name@feature%2Fx", None, HubPlace("org/name", "feature/x")),
        (f"hf://org/name@{COMMIT}/a", None, HubPlace("org/name", COMMIT, "a")),
    ],
)
def test_an_address_says_repository_revision_and_directory(
    text: str, revision: str | None, expected: HubPlace
) -> None:
    assert is_hub_place(text)
    assert hub_place(text, revision) == expected
    assert hub_place(str(expected)) == expected


@pytest.mark.parametrize("revision", ["main", "feature/x", "refs/pr/1", "refs/heads/x", "50%", "a@b", COMMIT])
def test_every_revision_can_be_written(revision: str) -> None:
    place = HubPlace("org/name", revision, "a")
    assert hub_place(str(place)) == place
    assert place.commit == (revision if revision == COMMIT else None)


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://org",
        "hf://org/",
        "hf:///name",
        "hf://org/name@",
        "hf://org/name@main/../x",
        "hf://org/na me",
        "hf://org/name@v1/a@v2",
        "hf://user:secret@org/name",
        "hf://org/name?token=secret",
        "hf://org/name@..",
        "hf://org/name@%2e%2e",
        "hf://org/name@%2E/a",
        "hf://org/name@refs/pr/..",
        "hf://org/name@a%2F..%2Fb",
        "hf://org/name@v1%0A",
        f"hf://org/{'x' * 200}",
    ],
)
def test_what_says_no_model_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not the address of a model on the Hub") as caught:
        hub_place(text)
    assert "secret" not in str(caught.value)


def test_one_revision_is_enough() -> None:
    with pytest.raises(CheckpointError, match="names a revision, and 'v2' is asked for beside it"):
        hub_place("hf://org/name@v1", "v2")


def test_a_commit_and_contents_are_known_of_addresses_as_of_snapshots() -> None:
    assert snapshot_revision(f"hf://org/name@{COMMIT}/a") == COMMIT
    assert snapshot_revision(f"/cache/models--org--name/snapshots/{COMMIT}/a") == COMMIT
    assert snapshot_revision("hf://org/name@main") is None
    assert snapshot_revision(f"/models/{COMMIT}") is None
    sha256 = "ab" * 32
    assert blob_digest(f"hf://org/name@{COMMIT}", "model.safetensors", sha256) == sha256
    assert blob_digest(f"hf://org/name@{COMMIT}", "config.json", "ab" * 20) is None
