"""Models of a hub: names, places, and the store that reads them."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from kits.hub_server import HubServer, Repository, blob_id, hub_server

from raymerge.errors import CheckpointError, TransientError, UnreadableError
from raymerge.storage.hub import (
    HubPlace,
    HubStore,
    SnapshotStore,
    at_commit,
    blob_digest,
    cached_snapshot,
    hub_place,
    is_hub_place,
    open_hub,
    resolve_model,
    snapshot_revision,
)
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub cache with one model, as its own tools lay it out: blobs, and snapshots of links to them."""
    repository = tmp_path / "cache" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, name in enumerate(("config.json", "model.safetensors")):
        (repository / "blobs" / f"{number}").write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Downloads:
    """Stands in for the Hub's client; remembers how it was asked and fails as told."""

    def __init__(self, outcome: Exception | str) -> None:
        self.outcome = outcome
        self.asked: list[dict[str, Any]] = []

    def __call__(self, name: str, **options: Any) -> str:
        self.asked.append({"name": name, **options})
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def install(monkeypatch: pytest.MonkeyPatch, outcome: Exception | str) -> Downloads:
    downloads = Downloads(outcome)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloads)
    return downloads


def refusal(kind: type[Exception]) -> Exception:
    """An error of the client as it raises them, but for the HTTP response that it would carry."""
    error = kind.__new__(kind)
    error.args = ("a text for programmers",)
    return error


class TestDirectories:
    def test_an_existing_directory_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        downloads = install(monkeypatch, RuntimeError("not to be asked"))
        (tmp_path / "org" / "tiny").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert resolve_model("org/tiny", None) == Path("org/tiny")
        assert resolve_model(str(tmp_path), None) == tmp_path
        assert downloads.asked == []

    def test_a_directory_has_no_revisions(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="'v2' is asked for, but this is a local directory"):
            resolve_model(str(tmp_path), "v2")

    def test_a_file_is_no_model(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"")
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors: is a file, but a model is a directory"
        ):
            resolve_model(str(path), None)

    @pytest.mark.parametrize(
        "path",
        [
            *("/no/such/place", "./tiny", "../tiny", "a/b/c", "~/no/such/place", "", "org/..", "org/näme"),
            "a b",
            "x" * 5000,
        ],
    )
    def test_what_is_no_hub_name_is_not_asked_for(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        downloads = install(monkeypatch, RuntimeError("not to be asked"))
        monkeypatch.chdir("/")
        with pytest.raises(CheckpointError, match=r"there is no such directory\. Check the path"):
            resolve_model(path, None)
        assert downloads.asked == []


class TestCache:
    @pytest.mark.parametrize("revision", [None, "main", COMMIT])
    def test_a_cached_model_needs_no_network(self, cache: Path, revision: str | None) -> None:
        found = resolve_model("org/tiny", revision, offline=True)
        assert found == cache / "models--org--tiny" / "snapshots" / COMMIT
        assert (found / "model.safetensors").read_text() == "{}"

    @pytest.mark.parametrize(("name", "revision"), [("org/other", None), ("org/tiny", "v2"), ("tiny", None)])
    def test_what_is_not_cached_is_named(self, cache: Path, name: str, revision: str | None) -> None:
        with pytest.raises(CheckpointError) as caught:
            resolve_model(name, revision, offline=True)
        message = str(caught.value)
        assert message.startswith(f"{name}: " if revision is None else f"{name}@{revision}: ")
        assert "there is no such directory, and the Hub gave no such model (" in message


class TestDownload:
    def test_asks_for_safetensors_and_small_files_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        downloads = install(monkeypatch, "/somewhere")
        assert resolve_model("org/tiny", "v1") == Path("/somewhere")
        (asked,) = downloads.asked
        assert (asked["name"], asked["revision"]) == ("org/tiny", "v1")
        assert asked["local_files_only"] is False
        assert asked["etag_timeout"] <= 10
        wanted = [
            *("model.safetensors", "tokenizer.model", "modeling_x.py", "config.json", "LICENSE", "a/x.json"),
            # What no rule is about is seen, and refused by its name.
            "a/pytorch_model.bin",
            "a.pt",
        ]
        heavy = [
            *("pytorch_model.bin", "x.gguf", "a/model.onnx", "tf_model.h5", "flax_model.msgpack"),
            "consolidated.00.pth",
        ]
        heavy += ["consolidated.safetensors", "optimizer.pt", "original/model.safetensors"]
        kept = huggingface_hub.utils.filter_repo_objects(
            [*wanted, *heavy], ignore_patterns=asked["ignore_patterns"]
        )
        assert list(kept) == wanted

    def test_offline_is_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        downloads = install(monkeypatch, "/somewhere")
        resolve_model("tiny", None, offline=True)
        assert downloads.asked[0]["local_files_only"] is True

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (refusal(RepositoryNotFoundError), "no such repository, or it is private"),
            (refusal(GatedRepoError), "only to those who were granted access"),
            (refusal(LocalEntryNotFoundError), "the Hub did not answer"),
            (ConnectionError("name or service not known\nsecond line"), "(name or service not known)"),
            (TimeoutError(), "(TimeoutError)"),
        ],
    )
    def test_every_failure_names_the_model_and_the_reason(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
    ) -> None:
        install(monkeypatch, error)
        with pytest.raises(CheckpointError) as caught:
            resolve_model("models/does-not-exist", None)
        message = str(caught.value)
        assert message.startswith("models/does-not-exist: there is no such directory, and the Hub gave no")
        assert reason in message
        assert "Check the path" in message
        assert "\n" not in message
        assert caught.value.__cause__ is error

    def test_pickles_are_fetched_where_there_are_no_safetensors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        downloads = install(monkeypatch, str(tmp_path))
        assert resolve_model("org/tiny", "v1", pickled=True) == tmp_path
        small, pickles = downloads.asked
        assert "pytorch_model*" in small["ignore_patterns"]
        same = ("name", "revision", "local_files_only")
        assert [small[key] for key in same] == [pickles[key] for key in same]
        wanted = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"]
        others = ["optimizer.pt", "training_args.bin", "model.gguf", "tf_model.h5", "onnx/pytorch_model.bin"]
        kept = huggingface_hub.utils.filter_repo_objects(
            [*wanted, *others],
            allow_patterns=pickles["allow_patterns"],
            ignore_patterns=pickles["ignore_patterns"],
        )
        assert list(kept) == wanted

    @pytest.mark.parametrize(("pickled", "key"), [(True, "model.safetensors"), (False, "config.json")])
    def test_pickles_are_not_fetched_beside_safetensors_or_unasked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickled: bool, key: str
    ) -> None:
        (tmp_path / key).write_text("")
        downloads = install(monkeypatch, str(tmp_path))
        resolve_model("org/tiny", pickled=pickled)
        assert len(downloads.asked) == 1


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
        *("hf://", "hf://org", "hf://org/", "hf:///name", "hf://org/name@", "hf://org/name@main/../x"),
        *("hf://org/na me", "hf://org/name@v1/a@v2", "hf://user:secret@org/name"),
        *("hf://org/name?token=secret", "hf://org/name@..", "hf://org/name@%2e%2e", "hf://org/name@%2E/a"),
        *("hf://org/name@refs/pr/..", "hf://org/name@a%2F..%2Fb", "hf://org/name@v1%0A"),
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
    with HubStore(place, retry_policy=hasty()) as found:
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


class TestSnapshots:
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
