"""Links and paths: of a model nothing outside is copied, of an output nothing outside is written or lost."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from kits.chains import documents
from kits.checkpoint_maker import tiny_llama
from kits.merge_cases import Family, digests, make_family, merge, recipes
from kits.plan_damage import tampered
from kits.plan_maker import good

from raymerge import api
from raymerge.checkpoints.files import SAFETENSORS
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import CheckpointError, RaymergeError, TargetError
from raymerge.execute.output import UNFINISHED
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.plan import Plan
from raymerge.options import RunOptions
from raymerge.publish.staging import LocalStaging
from raymerge.runtime.driver import run as run_module
from raymerge.runtime.driver.chained_merges import steps_directory
from raymerge.storage.local.store import LocalStore

KEPT = b"what is none of raymerge's business"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module")
def linear(family: Family) -> dict[str, Any]:
    return recipes(family)["linear"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "diary.txt").write_bytes(KEPT)
    return tmp_path / "elsewhere"


def _contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


class TestSources:
    @pytest.mark.parametrize("name", ["notes.txt", "tokenizer_config.json", "modeling_own.py"])
    def test_a_companion_that_is_a_link_out_of_the_model_is_refused(
        self, name: str, elsewhere: Path, tmp_path: Path
    ) -> None:
        model = tiny_llama(tmp_path / "model", 0, layers=1)
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to("../elsewhere/diary.txt")
        with pytest.raises(
            CheckpointError, match=r"is a link to .*diary.txt, outside of the model"
        ) as caught:
            open_checkpoint(model, "model")
        # The remedy does what it says.
        (problem,) = caught.value.problems
        os.system(problem.remedy.partition(": ")[2])
        assert (model / name).read_bytes() == KEPT
        assert name in open_checkpoint(model, "model").companions

    def test_links_within_the_model_and_of_weights_are_followed(
        self, elsewhere: Path, tmp_path: Path
    ) -> None:
        model = tiny_llama(tmp_path / "model", 0, layers=1)
        (model / "again.txt").symlink_to("tokenizer.json")
        shutil.move(model / "model.safetensors", elsewhere / "weights")
        (model / "model.safetensors").symlink_to(elsewhere / "weights")
        assert "again.txt" in open_checkpoint(model, "model").companions

    @pytest.mark.parametrize("shared", [False, True])
    def test_so_are_those_of_the_hub_s_cache(self, shared: bool, tmp_path: Path) -> None:
        snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
        plain, blobs = tiny_llama(tmp_path / "plain", 0, layers=1), snapshot.parents[1] / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        kept = tmp_path / "hub" / "blobs" if shared else blobs
        kept.mkdir(exist_ok=True)
        for number, path in enumerate(plain.iterdir()):
            shutil.copy(path, kept / f"blob{number}")
            if shared:
                (blobs / f"blob{number}").symlink_to(kept / f"blob{number}")
            (snapshot / path.name).symlink_to(f"../../blobs/blob{number}")
        assert open_checkpoint(snapshot, "a").companions == open_checkpoint(plain, "b").companions

    def test_a_neighbour_whose_name_begins_alike_is_outside(self, tmp_path: Path) -> None:
        model = tiny_llama(tmp_path / "model", 0, layers=1)
        (tmp_path / "model-private").mkdir()
        (tmp_path / "model-private" / "x.txt").write_bytes(KEPT)
        (model / "x.txt").symlink_to(tmp_path / "model-private" / "x.txt")
        with pytest.raises(CheckpointError, match="outside of the model"):
            open_checkpoint(model, "model")


class TestOutput:
    def test_a_staging_directory_that_somebody_made_a_link_is_refused(
        self, linear: dict[str, Any], elsewhere: Path, tmp_path: Path
    ) -> None:
        staging = LocalStaging(tmp_path / "out", api.plan(linear)).root
        staging.symlink_to(elsewhere, target_is_directory=True)
        for options in (RunOptions(inline=True), RunOptions(inline=True, replace=True)):
            with pytest.raises(TargetError, match="is a link"):
                merge(linear, tmp_path / "out", options)
        assert _contents(elsewhere) == {"diary.txt": KEPT}

    def test_so_is_the_directory_of_results_between(
        self, family: Family, elsewhere: Path, tmp_path: Path
    ) -> None:
        for name, place in (("one", family.base), ("two", family.tunes[0])):
            (tmp_path / name).symlink_to(place)
        steps_directory(tmp_path / "out").symlink_to(elsewhere, target_is_directory=True)
        with pytest.raises(TargetError, match="is a link"):
            merge(documents(root=str(tmp_path)), tmp_path / "out")
        assert _contents(elsewhere) == {"diary.txt": KEPT}

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "place", [f"model.safetensors{UNFINISHED}", "model.safetensors", "raymerge", "raymerge/ledger.jsonl"]
    )
    def test_links_in_an_unfinished_run_are_not_followed(
        self,
        place: str,
        linear: dict[str, Any],
        elsewhere: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        merge(linear, tmp_path / "sound")
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "finish_config", lambda *_, **__: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                merge(linear, tmp_path / "out")
        (staging,) = tmp_path.glob(".out.raymerge-*")
        target = elsewhere if place == "raymerge" else elsewhere / "diary.txt"
        if (staging / place).is_dir():
            shutil.rmtree(staging / place)
        if place.startswith(SAFETENSORS.singles[0]):
            (staging / SAFETENSORS.singles[0]).unlink()
        (staging / place).unlink(missing_ok=True)
        (staging / place).symlink_to(target)
        merge(linear, tmp_path / "out")
        assert _contents(elsewhere) == {"diary.txt": KEPT}
        assert digests(tmp_path / "out") == digests(tmp_path / "sound")
        assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]

    def test_no_file_is_opened_for_writing_through_a_link(self, elsewhere: Path, tmp_path: Path) -> None:
        """Not even where somebody puts it there at the last moment."""
        (tmp_path / "link").symlink_to(elsewhere / "diary.txt")
        with LocalStore(tmp_path) as store:
            for write in (lambda: store.create("link", 3), lambda: store.write_at("link", 0, b"abc")):
                with pytest.raises(OSError, match="symbolic link"):
                    write()
        assert _contents(elsewhere) == {"diary.txt": KEPT}

    @pytest.mark.parametrize("mask", [0o077, 0o027])
    def test_modes_are_those_that_the_umask_allows(
        self, mask: int, linear: dict[str, Any], tmp_path: Path
    ) -> None:
        before = os.umask(mask)
        try:
            merge(linear, tmp_path / "out")
        finally:
            os.umask(before)
        for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
            wanted = (0o777 if path.is_dir() else 0o666) & ~mask
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan that writes a file beside the weights."""
    root = tmp_path_factory.mktemp("plan")
    models = [{"model": tiny_llama(root / name, seed, layers=1)} for seed, name in enumerate("ab")]
    data = {
        "merge_method": "linear",
        "models": models,
        "parameters": {"weight": 1},
        "chat_template": "chatml",
    }
    made = good(data).plan
    assert len(made["files"])
    assert not check_plan(made)
    return made


class TestNames:
    @pytest.mark.parametrize("name", ["../x", "a/b", "/etc", "..", ".", "x\0y", ".hidden", "a\\b"])
    def test_a_merge_cannot_be_called_a_path(self, name: str, family: Family, tmp_path: Path) -> None:
        """Results between are written below a directory of this name."""
        model = str(family.base)
        first = {"name": name, "merge_method": "passthrough", "models": [{"model": model}]}
        last = {
            "merge_method": "linear",
            "models": [{"model": name}, {"model": model}],
            "parameters": {"weight": 1},
        }
        with pytest.raises(RaymergeError):
            merge([first, last], tmp_path / "place" / "out")
        assert not (tmp_path / "place").exists() or not list((tmp_path / "place").iterdir())

    @pytest.mark.parametrize(
        "name", [*("a\0b", "model.safetensors", "README.md", ".hidden/x", "x/../config.json")]
    )
    def test_a_plan_s_files_are_companions(self, plan: Plan, name: str) -> None:
        (problem, *_) = check_plan(tampered(plan, "files", "name", {0: name}))
        assert "files" in problem.where

    @pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "config.json", "model.bin"])
    def test_its_shards_are_called_as_shards_are(self, plan: Plan, name: str) -> None:
        assert check_plan(tampered(plan, "shards", "name", {0: name}))

    @pytest.mark.parametrize("key", ["../a/model.safetensors", "/etc/passwd", "x/../../y", ""])
    def test_its_sources_are_read_below_their_roots(self, plan: Plan, key: str) -> None:
        number = plan["inputs"].num_rows
        sources = [{**each, "files": [[key, *each["files"][0][1:]]]} for each in plan.manifest["sources"]]
        moved = Plan({**plan.manifest, "sources": sources}, plan.tables, (), plan.digest)
        assert check_plan(tampered(moved, "inputs", "key", dict.fromkeys(range(number), key)))
