"""Models read from the Hub by ranges, against a server on this machine that fails as it is told."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from kits.hub_server import HubServer, Repository, blob_id, hub_server

from raymerge.errors import CheckpointError, TransientError, UnreadableError
from raymerge.storage.hub import (
    HubPlace,
    HubStore,
    SnapshotStore,
    at_commit,
    cached_snapshot,
    hub_place,
    open_hub,
)
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo

REPO = "org/tiny"
WEIGHTS = "model.safetensors"
LENGTH = 9 << 20
"""Of the weights: read as a whole they are three requests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    (root / "config.json").write_text('{"model_type": "tiny"}')
    (root / WEIGHTS).write_bytes(os.urandom(LENGTH))
    for key in ("a/b/model.safetensors", "a/config.json", ".hidden/x.json", ".gitattributes"):
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(key.encode())
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_server(tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture
def hub(server: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The server with one model and an empty cache, as if nothing had been asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    server.repositories.clear()
    server.push(REPO, model)
    server.forget()
    return server


@pytest.fixture
def place(hub: HubServer) -> HubPlace:
    return HubPlace(REPO, hub.repositories[REPO].refs["main"])


@pytest.fixture
def store(place: HubPlace) -> Iterator[HubStore]:
    with HubStore(place, patience=hasty()) as found:
        yield found


def hasty() -> RetryPolicy:
    """As many attempts as usual, one behind the other."""
    return RetryPolicy(sleep=lambda _: None)


def asked(hub: HubServer, method: str) -> list[str]:
    return [each.path for each in hub.asked if each.method == method]


class TestFiles:
    def test_the_listing_has_sizes_and_contents_and_no_hidden_directories(
        self, store: HubStore, model: Path
    ) -> None:
        found = {info.key: info for info in store.files()}
        hidden = ".gitattributes"
        assert list(found) == [hidden, "a/b/model.safetensors", "a/config.json", "config.json", WEIGHTS]
        weights, config = (model / WEIGHTS).read_bytes(), (model / "config.json").read_bytes()
        assert found[WEIGHTS] == FileInfo(WEIGHTS, LENGTH, hashlib.sha256(weights).hexdigest())
        assert found["config.json"] == FileInfo("config.json", len(config), blob_id(config))

    def test_a_directory_is_a_model_of_its_own(self, hub: HubServer, place: HubPlace) -> None:
        with open_store(f"{place}/a") as store:
            assert [info.key for info in store.files()] == ["b/model.safetensors", "config.json"]
            assert store.read("config.json", 2, 6) == b"config"
            assert store.location("config.json") == f"{place}/a/config.json"

    def test_a_commit_is_listed_once(self, hub: HubServer, store: HubStore) -> None:
        store.files()
        assert store.info(WEIGHTS) is not None
        assert store.infos(["config.json", "no.json"])["no.json"] is None
        assert len(hub.asked) == 1


class TestReading:
    def test_of_a_long_range_every_byte_is_served_once_and_the_hub_is_asked_once(
        self, hub: HubServer, store: HubStore, model: Path
    ) -> None:
        weights = (model / WEIGHTS).read_bytes()
        data = bytearray(LENGTH - 1000)
        store.read_into(WEIGHTS, 1000, memoryview(data))
        assert data == weights[1000:]
        assert store.read(WEIGHTS, 5, 10) == weights[5:15]
        ranges = hub.ranges(REPO, WEIGHTS)
        assert len(ranges) == 4
        assert ranges[0] == (5, 10)
        ends = [offset + nbytes for offset, nbytes in ranges[1:]]
        assert [1000, *ends] == [*(offset for offset, _ in ranges[1:]), LENGTH]
        assert len(asked(hub, "HEAD")) == 1

    def test_it_pickles_as_its_place_and_what_it_expects(
        self, hub: HubServer, store: HubStore, model: Path
    ) -> None:
        copied = pickle.loads(pickle.dumps(store))
        assert copied.read(WEIGHTS, 0, 100) == (model / WEIGHTS).read_bytes()[:100]
        expected = {"config.json": FileInfo("config.json", 22, "0" * 40)}
        other = pickle.loads(pickle.dumps(HubStore(hub_place(store.root), expected=expected)))
        with pytest.raises(CheckpointError, match="was changed while it was merged"):
            other.read("config.json", 0, 5)

    def test_what_lies_behind_the_end_is_not_asked_for(self, hub: HubServer, store: HubStore) -> None:
        with pytest.raises(CheckpointError, match=f"ends at byte {LENGTH}, but bytes 5 to"):
            store.read(WEIGHTS, 5, LENGTH)
        with pytest.raises(UnreadableError, match=r"no\.json: cannot be read at byte 0"):
            store.read("no.json", 0, 1)
        assert asked(hub, "HEAD") == []


class TestFailures:
    def test_it_goes_on_where_an_answer_broke_off(self, hub: HubServer, store: HubStore, model: Path) -> None:
        hub.fail(f"GET .*{WEIGHTS}", "cut", "reset", "500", "cut")
        hub.fail("GET /api", "500")
        hub.fail("HEAD", "429", "reset")
        assert store.read(WEIGHTS, 100, 4000) == (model / WEIGHTS).read_bytes()[100:4100]
        served = [(each.offset, each.nbytes) for each in hub.asked if each.status == 206]
        assert served == [(100, 2000), (2100, 1000), (3100, 1000)]

    def test_patience_ends(self, hub: HubServer, store: HubStore) -> None:
        hub.fail("HEAD", *["500"] * 8)
        with pytest.raises(TransientError) as caught:
            store.read("config.json", 0, 1)
        assert "config.json: reading at byte 0 failed 8 times" in str(caught.value)
        assert "the server answered 500" in str(caught.value)

    def test_an_address_that_expired_is_asked_for_anew(
        self, hub: HubServer, store: HubStore, model: Path
    ) -> None:
        store.read(WEIGHTS, 0, 10)
        hub.expire()
        assert store.read(WEIGHTS, 10, 10) == (model / WEIGHTS).read_bytes()[10:20]
        assert [each.status for each in hub.asked if each.method == "GET"] == [200, 206, 403, 206]
        assert len(asked(hub, "HEAD")) == 2

    def test_other_bytes_under_the_same_commit_are_refused(self, hub: HubServer, store: HubStore) -> None:
        store.files()
        hub.repositories[REPO].commits[store.root.partition("@")[2]][WEIGHTS] = bytes(LENGTH)
        with pytest.raises(CheckpointError, match=f"{WEIGHTS}: the file was changed"):
            store.read(WEIGHTS, 0, 1)

    def test_a_server_that_gives_whole_files_only_is_told_of(
        self, hub: HubServer, store: HubStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub, "has_ranges", False)
        assert len(store.read("config.json", 0, 22)) == 22
        with pytest.raises(CheckpointError, match=r"gives no ranges of files\. Name it without hf://"):
            store.read(WEIGHTS, 5, 10)

    @pytest.mark.parametrize(
        ("refusal", "said"),
        [
            ((403, "GatedRepo", "no"), "the Hub gives it only to those who were granted access. Ask for"),
            ((401, "RepoNotFound", "no"), "has no such repository, or it is private. Check the name."),
            ((401, "", ""), r"the Hub does not accept who asks \(401\). Log in with 'hf auth login'"),
            ((403, "", ""), r"the Hub forbids to read it \(403\). Ask for access"),
        ],
    )
    def test_refusals_say_what_they_are(
        self, hub: HubServer, place: HubPlace, store: HubStore, refusal: tuple[int, str, str], said: str
    ) -> None:
        store.files()
        hub.repositories[REPO].refusal = refusal
        with pytest.raises(UnreadableError, match=said):
            store.read(WEIGHTS, 0, 1)
        with pytest.raises(UnreadableError, match=said):
            at_commit(HubPlace(REPO))

    @pytest.mark.parametrize(
        ("address", "said"),
        [
            ("hf://org/none", "hf://org/none@main: the Hub has no such repository, or it is private."),
            ("hf://org/tiny@v9", "hf://org/tiny@v9: the repository has no such revision. Check the branch"),
        ],
    )
    def test_what_is_not_there_is_named(self, hub: HubServer, address: str, said: str) -> None:
        with pytest.raises(UnreadableError) as caught:
            at_commit(hub_place(address))
        assert str(caught.value).startswith(said)

    def test_what_is_no_hub_is_told_of(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", f"{hub.endpoint}/elsewhere")
        with pytest.raises(CheckpointError, match="Check the"):
            at_commit(HubPlace(REPO))


class TestToken:
    def test_it_goes_to_the_hub_alone(
        self, hub: HubServer, place: HubPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.repositories[REPO].refusal = (401, "RepoNotFound", "no")
        monkeypatch.setenv("HF_TOKEN", hub.token)
        with open_hub(at_commit(HubPlace(REPO))) as store:
            store.read(WEIGHTS, 0, 10)
            store.read("config.json", 0, 10)
        of_cdn = [each for each in hub.asked if each.method == "GET" and each.path.endswith(WEIGHTS)]
        assert [each.token for each in of_cdn] == [None]
        assert {each.token for each in hub.asked if each not in of_cdn} == {f"Bearer {hub.token}"}


class TestCache:
    @pytest.fixture
    def snapshot(self, hub: HubServer) -> Path:
        """The model as the Hub's own client fetches it."""
        (self.repository(hub)).commits = {
            commit: {key: data for key, data in files.items() if not key.startswith((".", "a/"))}
            for commit, files in self.repository(hub).commits.items()
        }
        found = Path(snapshot_download(REPO))
        hub.forget()
        return found

    def repository(self, hub: HubServer) -> Repository:
        return hub.repositories[REPO]

    def test_a_whole_copy_is_read_and_has_the_versions_of_the_hub(
        self, hub: HubServer, place: HubPlace, snapshot: Path, model: Path
    ) -> None:
        with open_hub(place) as store:
            assert isinstance(store, SnapshotStore)
            assert store.read(WEIGHTS, 7, 100) == (model / WEIGHTS).read_bytes()[7:107]
            assert hub.asked == []
            with HubStore(place) as remote:
                assert store.files() == remote.files()
            expected = {WEIGHTS: FileInfo(WEIGHTS, LENGTH, "0" * 64)}
            with open_hub(place, expected=expected) as other, pytest.raises(CheckpointError, match="changed"):
                other.read(WEIGHTS, 0, 1)

    def test_a_file_of_it_that_is_written_to_meanwhile_is_refused(
        self, hub: HubServer, place: HubPlace, snapshot: Path
    ) -> None:
        with open_hub(place) as listing:
            expected = {info.key: info for info in listing.files()}
        with open_hub(place, expected=expected) as store:
            store.read(WEIGHTS, 0, 1)
            store.check_expected()
            blob = (snapshot / WEIGHTS).resolve()
            os.utime(blob, ns=(0, blob.stat().st_mtime_ns + 1))
            with pytest.raises(CheckpointError, match="changed"):
                store.check_expected()

    def test_a_cache_without_links_is_read_only_where_the_hub_may_not_be_asked(
        self, hub: HubServer, place: HubPlace, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (snapshot / WEIGHTS).resolve().replace(snapshot / WEIGHTS)
        with open_hub(place) as store:
            assert isinstance(store, HubStore)
        with pytest.raises(CheckpointError, match="not in the Hub's local cache as a whole, and nothing is"):
            at_commit(place, offline=True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with open_hub(at_commit(place, offline=True)) as store:
            assert isinstance(store, SnapshotStore)
            assert store.read(WEIGHTS, 0, 1)

    def test_a_branch_is_looked_up_and_only_without_an_answer_in_the_cache(
        self, hub: HubServer, place: HubPlace, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert at_commit(place) == place
        assert at_commit(HubPlace(REPO), offline=True) == place
        assert hub.asked == []
        self.repository(hub).refs["main"] = "f" * 40
        self.repository(hub).commits["f" * 40] = {}
        assert at_commit(HubPlace(REPO)).commit == "f" * 40
        hub.fail("GET /api", "reset")
        assert at_commit(HubPlace(REPO)) == place
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert at_commit(HubPlace(REPO), offline=True) == place

    def test_a_part_of_a_model_is_none(
        self, hub: HubServer, place: HubPlace, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (snapshot / WEIGHTS).unlink()
        assert cached_snapshot(place) is None
        with open_hub(place) as store:
            assert isinstance(store, HubStore)
        with pytest.raises(CheckpointError, match="not in the Hub's local cache as a whole, and nothing is"):
            at_commit(place, offline=True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with open_hub(place) as store, pytest.raises(UnreadableError, match="HF_HUB_OFFLINE is set"):
            store.files()

    def test_a_link_that_leads_out_of_the_cache_is_not_followed(
        self, hub: HubServer, place: HubPlace, snapshot: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "secret").write_text("secret")
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(tmp_path / "secret")
        with open_hub(place) as store:
            assert store.read("config.json", 2, 10) == b"model_type"

    def test_an_index_names_what_must_be_there(
        self, hub: HubServer, place: HubPlace, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        index = snapshot / "model.safetensors.index.json"
        index.write_text('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}')
        assert cached_snapshot(place) is None
        (snapshot / "model-2.safetensors").write_bytes(b"")
        assert cached_snapshot(place) == snapshot
        index.write_text("[]")
        assert cached_snapshot(place) is None
