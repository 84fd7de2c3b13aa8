"""Replay: the provenance of a checkpoint derived anew, and what is told where it cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import read_tensors, tiny_llama, write_json
from kits.merges import MEAN, STACK, make_models, write_recipe
from safetensors.torch import load_file

from raymerge.api import replay, submit
from raymerge.options import RunOptions
from raymerge.publish.record import PROVENANCE, STORY

INLINE = RunOptions(inline=True)
LEDGER = "raymerge/ledger.jsonl"


def made(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that was made of the models ``one`` and ``two`` in the folder, by relative paths."""
    monkeypatch.chdir(folder)
    submit(write_recipe(folder, text), "out", INLINE)
    return folder / "out"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, and the merge of both in ``out``."""
    with pytest.MonkeyPatch.context() as patch:
        return made(make_models(tmp_path_factory.mktemp("whole")), MEAN, patch).parent


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it; the record says that the sources lie in the original."""
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def said(root: Path, **sources: str) -> str:
    return "\n".join(map(str, replay(root, sources).problems))


def test_a_checkpoint_is_what_its_record_says(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any directory: relative sources are looked for where they were."""
    monkeypatch.chdir(tmp_path)
    verdict = replay(whole / "out")
    assert verdict.require() is verdict
    assert (verdict.sources, verdict.tensors, verdict.notes) == (2, 30, ())
    assert verdict.digested_nbytes > 60_000


def test_a_source_that_moved_is_told_and_can_be_named(folder: Path) -> None:
    """The original stays where it is; what is named goes before it."""
    story = json.loads((folder / "out" / STORY).read_text())
    write_json(folder / "out" / STORY, {**story, "places": {**story["places"], "one": "/nowhere/one"}})
    assert "it was at /nowhere/one and is not there any more" in said(folder / "out")
    assert "--source 'one=PATH'" in said(folder / "out")
    assert said(folder / "out", one=str(folder / "one")) == ""


def test_a_source_that_is_another_model_is_told(folder: Path, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "other", 0, layers=2)
    assert "layers" in said(folder / "out", one=str(tmp_path / "other"))


def test_a_config_that_changed_is_told(folder: Path) -> None:
    config = json.loads((folder / "one" / "config.json").read_text())
    write_json(folder / "one" / "config.json", {**config, "initializer_range": 0.5})
    found = said(folder / "out", one=str(folder / "one"))
    assert "derived anew, the plan differ" in found
    assert "initializer_range" in found
    assert "of one, config" in found


def test_numbers_that_changed_below_the_same_header_are_a_note(folder: Path) -> None:
    """A header does not tell the numbers; an audit recomputes them."""
    tiny_llama(folder / "one", 5)
    verdict = replay(folder / "out", {"one": str(folder / "one")})
    assert verdict.problems == ()
    assert any("of one, model.safetensors was written or copied since" in note for note in verdict.notes)


def test_a_source_that_no_recipe_names_is_told(folder: Path) -> None:
    assert "the recipe has no source 'three'; it has one, two." in said(folder / "out", three="x")


def _flip(root: Path) -> None:
    with (root / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


def _change(key: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        content = json.loads((root / key).read_text())
        change(content)
        write_json(root / key, content)

    return damage


def _first(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["tensors"]["lm_head.weight"]
    return found


def _swap_names(root: Path) -> None:
    """Two tensors of one shape change places in the header."""
    file = root / "model.safetensors"
    content = file.read_bytes()
    names = [b"layers.0.mlp.up_proj", b"layers.0.mlp.gate_proj"]
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[:end].replace(names[0], b"?").replace(names[1], names[0]).replace(b"?", names[1])
    file.write_bytes(header + content[end:])


def _fit_companion(root: Path) -> None:
    (root / "tokenizer.json").write_text("{}")
    digest = xxhash.xxh3_128_hexdigest(b"{}")
    _change(PROVENANCE, lambda data: data["files"].update({"tokenizer.json": digest}))(root)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of a tensor": (_flip, "their digest is not the ledger's"),
    "a companion": (lambda root: (root / "tokenizer.json").write_text("{}"), "tokenizer.json: its bytes"),
    "a companion gone": (lambda root: (root / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
    "the card": (lambda root: (root / "README.md").write_text("mine"), "README.md: its bytes are not"),
    "a digest": (
        _change(PROVENANCE, lambda data: _first(data).update(digest="0" * 32)),
        "what became of tensors differ: lm_head.weight",
    ),
    "a disposition": (
        _change(PROVENANCE, lambda data: _first(data).update(disposition="copied")),
        "what became of tensors differ: lm_head.weight",
    ),
    "a source": (
        _change(PROVENANCE, lambda data: data["sources"][1]["files"][0].update(header="0")),
        "the sources differ: of two, model.safetensors",
    ),
    "the seed": (_change(PROVENANCE, lambda data: data.update(seed=3)), "the record says 3, and it is 0"),
    "the recipe": (
        _change(PROVENANCE, lambda data: data.update(recipes=[data["recipes"][0].replace("0.25", "0.26")])),
        "derived anew, the plan differ",
    ),
    "the provenance gone": (lambda root: (root / PROVENANCE).unlink(), "does not tell what it was made of"),
    "a header": (_swap_names, "model.safetensors: its header is not the planned one"),
    "the config": (
        _change("config.json", lambda data: data.update(tie_word_embeddings=0)),
        "config.json: it is not what the plan makes",
    ),
    "a file that nobody wrote": (
        lambda root: (root / "sub.json").write_text("{}"),
        "sub.json: the merge writes no such file",
    ),
    "a companion and its digest": (
        _fit_companion,
        "tokenizer.json: by its digest in the provenance it is not",
    ),
    "a companion without a digest": (
        lambda root: _change(PROVENANCE, lambda data: data["files"].pop("tokenizer.json"))(root),
        "it has no digest of tokenizer.json",
    ),
    "the text of the recipe": (
        lambda root: (root / "raymerge" / "recipe.yml").write_text("merge_method: lies\n"),
        "recipe.yml: it is not the recipe",
    ),
    "the numerics": (
        lambda root: (root / "raymerge" / "numerics.json").write_text("{}"),
        "numerics.json: it does not say the device",
    ),
    "the numerics of the provenance": (
        _change(PROVENANCE, lambda data: data.update(numerics={"device": "abacus"})),
        "ledger.jsonl: it does not say the device",
    ),
    "the ledger gone": (lambda root: (root / LEDGER).unlink(), "ledger.jsonl: is missing"),
    "a place outside": (
        _change(PROVENANCE, lambda data: data["files"].update({"../../x": "00"})),
        "is no file of a checkpoint",
    ),
    "no JSON": (lambda root: (root / PROVENANCE).write_text("{"), "is not JSON"),
    "the plan": (
        _change("raymerge/plan/manifest.json", lambda data: data.update(seed=1)),
        "the saved plan is of another version of raymerge, or was changed",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_changed_afterwards_is_found(what: str, folder: Path) -> None:
    damage, words = DAMAGE[what]
    damage(folder / "out")
    before = sorted((folder / "out").rglob("*"))
    assert words in said(folder / "out")
    assert sorted((folder / "out").rglob("*")) == before, "a replay writes nothing"


def test_of_many_damaged_tensors_all_are_counted(folder: Path) -> None:
    file = folder / "out" / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:end] + bytes(each ^ 1 for each in content[end:]))
    verdict = replay(folder / "out")
    assert (len(verdict.problems), verdict.num_problems) == (20, 30)


@pytest.mark.parametrize(
    "versions", [[{"files": [1]}], [{"name": "a"}], [{"files": [["a"], [[], "b"]]}], [5]]
)
def test_versions_that_are_none_are_passed_over(versions: list[Any], folder: Path) -> None:
    lines = (folder / "out" / LEDGER).read_text().splitlines()
    first = json.loads(lines[0])
    first["conditions"]["versions"] = versions
    (folder / "out" / LEDGER).write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    assert said(folder / "out") == ""


def test_digests_of_what_is_no_row_are_passed_over(folder: Path) -> None:
    lines = (folder / "out" / LEDGER).read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    for entry in entries:
        entry.get("receipt", {"digests": {}})["digests"]["x"] = "y"
    (folder / "out" / LEDGER).write_text("".join(json.dumps(each) + "\n" for each in entries))
    assert "the ledger has no digest of some of its bytes" in said(folder / "out")


COMMIT = "a" * 40


def test_a_source_of_the_hubs_cache_may_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the cache knows of it, a commit and SHA-256, is compared where both know it."""
    snapshot = tiny_llama(tmp_path / "models--org--one" / "snapshots" / COMMIT, 0)
    tiny_llama(tmp_path / "two", 1)
    out = made(tmp_path, MEAN.replace("one", str(snapshot)), monkeypatch)
    shutil.copytree(snapshot, tmp_path / "moved")
    assert said(out, **{str(snapshot): str(tmp_path / "moved")}) == ""
    other = shutil.copytree(snapshot, snapshot.with_name("b" * 40))
    assert "revision" in said(out, **{str(snapshot): str(other)})


def test_nothing_is_fetched_and_the_commit_is_the_one_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tiny_llama(tmp_path / "models--org--one" / "snapshots" / COMMIT, 0)
    tiny_lora(tmp_path / "adapter", read_tensors(snapshot), 1)
    tiny_llama(tmp_path / "two", 1)
    asked: list[tuple[str, str | None, bool]] = []

    def found(name: str, revision: str | None, *, offline: bool, **_: Any) -> Path:
        asked.append((name, revision, offline))
        return snapshot if name == "org/one" else tmp_path / "adapter"

    monkeypatch.setattr("raymerge.storage.hub.cache._snapshot", found)
    out = made(tmp_path, MEAN.replace("model: one", "model: org/one+org/lora"), monkeypatch)
    story = json.loads((out / STORY).read_text())
    places = {**story["places"], "org/one+org/lora": "/nowhere/one"}
    write_json(out / STORY, {**story, "places": places})
    asked.clear()
    assert said(out) == ""
    assert set(asked) == {("org/one", COMMIT, True), ("org/lora", None, True)}


def test_pickles_are_read_as_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_models(tmp_path)
    torch.save(load_file(tmp_path / "one" / "model.safetensors"), tmp_path / "one" / "pytorch_model.bin")
    (tmp_path / "one" / "model.safetensors").unlink()
    out = made(tmp_path, MEAN, monkeypatch)
    assert replay(out).problems == ()


def test_other_versions_are_a_note(folder: Path) -> None:
    _change(PROVENANCE, lambda data: data["versions"].update(torch="1.0"))(folder / "out")
    verdict = replay(folder / "out")
    assert verdict.problems == ()
    assert any("it was made with torch 1.0 (here " in note for note in verdict.notes)


def test_other_kinds_of_merges_are_derived_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several merges of one file, layers that are stacked, and an adapter on a model."""
    make_models(tmp_path)
    tiny_lora(tmp_path / "adapter", read_tensors(tmp_path / "one"), 1)
    chain = f"name: stack\n{STACK}---\nmerge_method: passthrough\nmodels: [{{model: stack}}]\n"
    adapted = MEAN.replace("model: one", "model: one+adapter")
    for text in (chain, adapted):
        out = made(tmp_path, text, monkeypatch)
        # A directory that came since, with the name of a result, is not meant.
        (tmp_path / "stack").mkdir(exist_ok=True)
        assert said(out) == ""
        (tmp_path / "stack").rmdir()
        shutil.rmtree(out)
