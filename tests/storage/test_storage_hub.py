"""Models by path or Hub name, without a network: a cache made by hand and a downloader that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from raymerge.errors import CheckpointError
from raymerge.storage.hub import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The Hub cache with one model, as its own tools lay it out: blobs, and snapshots of links to them."""
    repository = tmp_path / "cache" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, name in enumerate(("config.json", "model.safetensors")):
        (repository / "blobs" / f"{number}").write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{number}")
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

    def test_home_is_understood(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "tiny").mkdir()
        assert resolve_model("~/tiny", None) == tmp_path / "tiny"

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
            "/no/such/place",
            "./tiny",
            "../tiny",
            "a/b/c",
            "~/no/such/place",
            "",
            "org/..",
            "org/näme",
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
        found = resolve_model("org/tiny", revision, offline=True, cache_dir=cache)
        assert found == cache / "models--org--tiny" / "snapshots" / COMMIT
        assert (found / "model.safetensors").read_text() == "{}"

    @pytest.mark.parametrize(("name", "revision"), [("org/other", None), ("org/tiny", "v2"), ("tiny", None)])
    def test_what_is_not_cached_is_named(self, cache: Path, name: str, revision: str | None) -> None:
        with pytest.raises(CheckpointError) as caught:
            resolve_model(name, revision, offline=True, cache_dir=cache)
        message = str(caught.value)
        assert message.startswith(f"{name}: " if revision is None else f"{name}@{revision}: ")
        assert "there is no such directory, and the Hub gave no such model (" in message


class TestDownload:
    def test_asks_for_safetensors_and_small_files_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        downloads = install(monkeypatch, "/somewhere")
        assert resolve_model("org/tiny", "v1", cache_dir=Path("/c")) == Path("/somewhere")
        (asked,) = downloads.asked
        assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/tiny", "v1", Path("/c"))
        assert asked["local_files_only"] is False
        assert asked["etag_timeout"] <= 10
        wanted = [
            "model.safetensors",
            "tokenizer.model",
            "modeling_x.py",
            "config.json",
            "LICENSE",
            "a/x.json",
            # What no rule is about is seen, and refused by its name.
            "a/pytorch_model.bin",
            "a.pt",
        ]
        heavy = [
            "pytorch_model.bin",
            "x.gguf",
            "a/model.onnx",
            "tf_model.h5",
            "flax_model.msgpack",
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
            (refusal(GatedRepoError), "access to it must be asked for"),
            (refusal(LocalEntryNotFoundError), "the Hub did not answer"),
            (ConnectionError("name or service not known\nsecond line"), "(name or service not known)"),
            (TimeoutError(), "(TimeoutError())"),
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
        assert resolve_model("org/tiny", "v1", cache_dir=tmp_path, pickled=True) == tmp_path
        small, pickles = downloads.asked
        assert "pytorch_model*" in small["ignore_patterns"]
        same = ("name", "revision", "cache_dir", "local_files_only")
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
