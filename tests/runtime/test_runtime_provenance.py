"""The provenance that a checkpoint keeps: what it says, that equal merges have the same; and its paths."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import read_tensors, tiny_llama, write_json
from kits.merge_cases import Family, make_family, merge, recipes
from kits.merges import MEAN, STACK, make_models, write_recipe
from safetensors.torch import load_file, save_file

from raymerge.api import AuditOptions, AuditVerdict, audit, replay, submit
from raymerge.errors import CheckpointError, IncompleteError
from raymerge.events import Event, Planned, SegmentDone, Started
from raymerge.options import RunOptions
from raymerge.publish.finish import STORY, Provenance, SourceFile, SourceRecord, TensorRecord
from raymerge.recipes.load import parse_recipe
from raymerge.runtime.driver import run as run_module
from raymerge.runtime.driver.audit_run import Audit
from raymerge.verifier.audit import Auditor, Findings
from raymerge.verifier.structure import PROVENANCE_FILE as PROVENANCE

INLINE = RunOptions(inline=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def merged(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "out"
    merge({**recipes(family)["ties"], "seed": 7, "shard_size": 20_000}, out)
    return out


def told(root: Path) -> Provenance:
    return Provenance.from_json(json.loads((root / PROVENANCE).read_text()), "provenance.json")


def test_it_says_what_was_merged_by_what_and_how(family: Family, merged: Path) -> None:
    found = told(merged)
    manifest: dict[str, Any] = json.loads((merged / "raymerge" / "plan" / "manifest.json").read_text())
    assert found.plan == manifest["digest"]
    assert found.recipes == ((merged / "raymerge" / "recipe.yml").read_text(),)
    assert (found.method, found.seed) == ("ties", 7)
    assert found.versions.keys() == {"numpy", "python", "ray", "raymerge", "torch", "transformers"}
    assert found.numerics == json.loads((merged / "raymerge" / "numerics.json").read_text())
    assert [source.name for source in found.sources] == [str(family.base), *map(str, family.tunes)]
    assert [source.dispositions for source in found.sources] == [{"merged": 21}] * 4
    file = found.sources[0].files[0]
    assert (file.name, file.nbytes) == ("model.safetensors", (family.base / file.name).stat().st_size)


def test_every_tensor_has_its_digest(merged: Path) -> None:
    found, tensors = told(merged).tensors, read_tensors(merged)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].pieces, found[name].disposition) == (1, "merged")
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert found[name].digest == xxhash.xxh3_128_hexdigest(content), name


def test_what_is_copied_and_what_is_dropped_is_told(family: Family, tmp_path: Path) -> None:
    spans = [{"sources": [{"model": str(family.base), "layer_range": [0, 1]}]}]
    merge({"merge_method": "passthrough", "slices": spans}, tmp_path / "out")
    found = told(tmp_path / "out")
    assert {tensor.disposition for tensor in found.tensors.values()} == {"copied"}
    assert found.sources[0].dispositions == {"copied": 12, "dropped: outside_slices": 9}


def test_what_is_made_once_and_written_twice_has_its_digest_twice(family: Family, tmp_path: Path) -> None:
    span = {"sources": [{"model": str(family.base), "layer_range": [0, 1]}]}
    merge({"merge_method": "passthrough", "slices": [span, span]}, tmp_path / "out")
    found = told(tmp_path / "out").tensors
    one, two = (found[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert one.digest
    assert one == two


def test_every_other_file_has_its_digest(merged: Path) -> None:
    last = {"config.json", "model.safetensors.index.json"}
    names = {path.name for path in merged.iterdir() if path.is_file() and path.suffix != ".safetensors"}
    found = told(merged).files
    assert found.keys() == names - last
    for name, digest in found.items():
        assert digest == xxhash.xxh3_128_hexdigest((merged / name).read_bytes()), name


def test_equal_merges_have_equal_provenance(family: Family, merged: Path, tmp_path: Path) -> None:
    """Byte by byte, however they were run; only the story of the run differs."""
    recipe = {**recipes(family)["ties"], "seed": 7, "shard_size": 20_000}
    merge(recipe, tmp_path / "again", RunOptions(inline=True, memory=32 << 20, threads=1))
    assert (tmp_path / "again" / PROVENANCE).read_bytes() == (merged / PROVENANCE).read_bytes()
    story = json.loads((merged / STORY).read_text())
    assert story.keys() == {"finished", "host", "places", "seconds"}
    assert story["places"] == {name: name for name in (str(family.base), *map(str, family.tunes))}


def test_a_chain_keeps_the_recipes_of_all_its_merges(family: Family, tmp_path: Path) -> None:
    one, two, _ = map(str, family.tunes)
    text = (
        f"name: first\nmerge_method: linear\nmodels:\n- {{model: {one}, parameters: {{weight: 1}}}}\n"
        f"- {{model: {two}, parameters: {{weight: 1}}}}\n---\nmerge_method: passthrough\n"
        "models: [{model: first}]\n"
    )
    (tmp_path / "recipe.yml").write_text(text)
    submit(tmp_path / "recipe.yml", tmp_path / "out", INLINE)
    found = told(tmp_path / "out")
    assert [parse_recipe(recipe).name for recipe in found.recipes] == ["first", None]
    assert found.sources[0].made_by


def test_a_source_in_the_hubs_cache_is_known_by_its_commit(tmp_path: Path) -> None:
    """Its large files are named by their SHA-256, so that is known without reading them."""
    commit, sha256 = "0123456789abcdef0123456789abcdef01234567", "a" * 64
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = tiny_llama(cache / "snapshots" / commit, 0)
    (snapshot / "model.safetensors").rename(cache / "blobs" / sha256)
    os.symlink(f"../../blobs/{sha256}", snapshot / "model.safetensors")
    merge({"merge_method": "passthrough", "models": [{"model": str(snapshot)}]}, tmp_path / "out")
    (source,) = told(tmp_path / "out").sources
    assert source.revision == commit
    assert source.files[0].sha256 == sha256
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"revision `{commit}`" in card


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("tensors"),
        lambda data: data.update(format=2),
        lambda data: data.update(seed="many"),
        lambda data: data["sources"][0].update(files=3),
        lambda data: data["tensors"].update(x={"digest": []}),
    ],
)
def test_what_is_no_provenance_is_refused(damage: Any, merged: Path) -> None:
    data = json.loads((merged / PROVENANCE).read_text())
    damage(data)
    with pytest.raises(CheckpointError, match="it is no provenance that this version of raymerge knows"):
        Provenance.from_json(data, "provenance.json")


def test_the_page_names_every_field() -> None:
    """The page's tables behind the one of files: the record, a source, its files, a tensor."""
    page = (ROOT / "docs" / "provenance.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| field \| means \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    named = [re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) for table in tables]
    records = (Provenance, SourceRecord, SourceFile, TensorRecord)
    assert named == [[field.name for field in fields(record)] for record in records]


# Paths


def test_no_absolute_path_gets_into_the_card(family: Family, tmp_path: Path) -> None:
    base, one, two = str(family.base), str(family.tunes[0]), str(family.tunes[1])
    text = (
        f"# parents are in {family.base.parent}, see /srv/private/notes.txt\n"
        f"merge_method: task_arithmetic\nbase_model: '{base}'\n"
        f'models:\n- {{model: "{one}", parameters: {{weight: 0.5}}}}\n'
        f"- model: {two}\n  parameters: {{weight: 0.5}}\n"
    )
    (tmp_path / "recipe.yml").write_text(text)
    submit(tmp_path / "recipe.yml", tmp_path / "out", INLINE)
    card = (tmp_path / "out" / "README.md").read_text()
    places = str(family.base.parent.parent), "/srv/private", str(tmp_path)
    assert not [place for place in places if place in card]
    assert "base_model" not in card.split("---")[1]
    assert f"base_model: '{family.base.parent.name}/base'" in card


def test_a_single_file_is_named_with_its_place(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_llama(tmp_path / "model", 0))
    for name in ("one", "two"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    models = [
        {"model": str(tmp_path / f"{name}.safetensors"), "parameters": {"weight": 0.5}}
        for name in ("one", "two")
    ]
    merge({"merge_method": "linear", "models": models}, tmp_path / "out")
    story = json.loads((tmp_path / "out" / STORY).read_text())
    assert list(story["places"].values()) == [each["model"] for each in models]


ONE_THREAD = RunOptions(inline=True, threads=1)


@pytest.fixture(scope="module")
def damaged(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge of dozens of segments, with a byte in three places turned round."""
    root = tmp_path_factory.mktemp("damaged") / "out"
    merge(recipes(medium)["ties"], root)
    (shard,) = root.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    for part in (3, 5, 7):
        content[len(content) * part // 8] ^= 0x40
    shard.write_bytes(content)
    return root


def _found(verdict: AuditVerdict) -> AuditVerdict:
    """What does not hang on time."""
    return replace(verdict, seconds=0.0)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_workers_find_what_one_process_finds(damaged: Path) -> None:
    wanted, events = AuditOptions(0.5, seed=9), list[Event]()
    alone = audit(damaged, wanted, ONE_THREAD)
    spread = audit(damaged, wanted, RunOptions(workers=2, threads=1), on_event=events.append)
    assert _found(spread) == _found(alone)
    assert alone.num_problems >= 3
    made = [event for event in events if isinstance(event, SegmentDone)]
    (planned,) = (event for event in events if isinstance(event, Planned))
    assert len(made) == planned.segments > 12
    (started,) = (event for event in events if isinstance(event, Started))
    # Which of the two makes how many of so short segments is chance.
    assert started.workers == ("worker-0", "worker-1")
    assert {event.worker for event in made} <= {*started.workers}


def test_problems_beyond_those_that_are_shown_are_counted(damaged: Path) -> None:
    everything = audit(damaged, AuditOptions(0.001, seed=9), ONE_THREAD)
    few = audit(damaged, AuditOptions(0.001, seed=9, most=1), ONE_THREAD)
    assert len(few.problems) == 1
    assert few.num_problems == everything.num_problems == len(everything.problems) > 1
    assert few.problems == everything.problems[:1]


def test_without_a_seed_other_elements_are_drawn_each_time(damaged: Path) -> None:
    seeds = {Audit(damaged, AuditOptions(), ONE_THREAD, on_event=lambda _: None)._seed for _ in range(3)}
    assert len(seeds) == 3


def test_without_a_ledger_no_byte_counts_as_proved(damaged: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(damaged, tmp_path / "out"))
    (root / "raymerge" / "ledger.jsonl").unlink()
    verdict = audit(root, AuditOptions(0.01), ONE_THREAD)
    assert verdict.num_problems >= verdict.tensors
    assert "no digest" in str(verdict.problems)


def test_a_stopped_audit_ends_with_3(damaged: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, SegmentDone):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(IncompleteError, match=r"stopped with \d+ of \d+ segments audited"):
        audit(damaged, AuditOptions(0.01), ONE_THREAD, on_event=stop)


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)])
def test_a_segment_in_hand_is_given_up(
    signals: tuple[int, ...], damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that would go on for long ends when the time after a signal is over."""
    plainly = Auditor.audit

    def hang(self: Auditor, segment: int) -> tuple[Findings, int]:
        for each in signals:
            os.kill(os.getpid(), each)
        assert self._aborted.wait(20)
        return plainly(self, segment)

    monkeypatch.setattr(Auditor, "audit", hang)
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 0.0)
    with pytest.raises(IncompleteError, match=r"stopped at once\. The same command begins anew"):
        audit(damaged, AuditOptions(0.01), ONE_THREAD)


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
    "a companion": (lambda root: (root / "tokenizer.json").write_text("{}"), "tokenizer.json: its bytes"),
    "the card": (lambda root: (root / "README.md").write_text("mine"), "README.md: its bytes are not"),
    "a digest": (
        _change(PROVENANCE, lambda data: _first(data).update(digest="0" * 32)),
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


@pytest.mark.sample(7)
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
    assert "their digest is not the ledger's" in str(verdict.problems[0])


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

    monkeypatch.setattr("raymerge.storage.hub._snapshot", found)
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
