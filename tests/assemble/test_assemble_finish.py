"""What finishes an output: companions, the card, and the rest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import TOKENIZER_FILES, tiny_llama

from raymerge.api import plan, read_recipe
from raymerge.checkpoints.files import INDEX_FILE
from raymerge.errors import CheckpointError, VerificationError
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.sources import Source, open_models
from raymerge.publish.finish import (
    Parent,
    check_shards,
    copy_companions,
    finish_companions,
    finish_config,
    finished_files,
    model_card,
    parents_of,
    shown_name,
    without_places,
)
from raymerge.storage.local.store import LocalStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "base", 1)


def _planned(model: Path, **changes: Any) -> tuple[Plan, tuple[Source, ...]]:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}], **changes}
    return plan(recipe).require(), open_models(read_recipe(recipe)).require()


def _shards_written(made: Plan, root: Path) -> LocalStore:
    """A directory whose shards have their planned headers and sizes, and no data."""
    root.mkdir()
    store = LocalStore(root)
    for shard in made["shards"].to_pylist():
        store.create(shard["name"], shard["nbytes"])
        store.write_at(shard["name"], 0, shard["header"])
    return store


@pytest.fixture
def several(model: Path) -> tuple[Plan, tuple[Source, ...]]:
    """A plan with more than one shard."""
    made = _planned(model, shard_size=20_000)
    assert len(made[0]["shards"]) > 2
    return made


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def _scribble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_remove, "it is absent"),
        (_cut, "bytes long, the plan says"),
        (_lengthen, "bytes long, the plan says"),
        (_scribble, "not the planned one"),
    ],
)
def test_every_harmed_shard_is_named(
    harm: Callable[[Path], None], said: str, several: tuple[Plan, tuple[Source, ...]], tmp_path: Path
) -> None:
    store = _shards_written(several[0], tmp_path / "out")
    check_shards(several[0], store)
    names = several[0]["shards"].column("name").to_pylist()
    for name in names[:2]:
        harm(tmp_path / "out" / name)
    with pytest.raises(VerificationError) as caught:
        check_shards(several[0], store)
    assert [problem.where for problem in caught.value.problems] == names[:2]
    assert all(said in problem.what for problem in caught.value.problems)


def test_companions_and_the_card_are_written(model: Path, tmp_path: Path) -> None:
    made, sources = _planned(model)
    donor = sources[0].checkpoint
    target = _shards_written(made, tmp_path / "out")
    finish_companions(
        made, LocalStore(model), target, companions=donor.companions, parents=parents_of(sources)
    )
    for name in TOKENIZER_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert made.digest in card
    assert "`passthrough`" in card
    assert "base`" in card
    assert f"Seed: {made.manifest['seed']}." in card


def _finished(made: Plan, sources: tuple[Source, ...], root: Path) -> list[str]:
    """Finish the config; the names that were written, in order."""
    store = _shards_written(made, root)
    written: list[str] = []
    original = store.write_atomic

    def noting(key: str, data: bytes) -> None:
        written.append(key)
        original(key, data)

    store.write_atomic = noting  # type: ignore[method-assign]
    donor = sources[0].checkpoint
    finish_config(made, LocalStore(Path(donor.root)), store, donor_config=donor.config)
    return written


def test_an_unchanged_config_keeps_its_bytes(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "odd"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    text = json.dumps(json.loads((model / "config.json").read_text()), indent=7, sort_keys=True) + "\n\n"
    (source / "config.json").write_text(text)
    assert _finished(*_planned(source), tmp_path / "out") == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == text


def test_a_changed_config_is_written_anew(model: Path, tmp_path: Path) -> None:
    made, sources = _planned(model, dtype="float32")
    _finished(made, sources, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == made.manifest["config"]
    assert config["torch_dtype"] == "float32"


def test_tensors_without_a_config_get_none(model: Path, tmp_path: Path) -> None:
    made, sources = _planned(model / "model.safetensors", shard_size=20_000)
    assert _finished(made, sources, tmp_path / "out") == [INDEX_FILE]
    names = finished_files(made, sources[0].checkpoint.companions)
    assert names == {*made["shards"].column("name").to_pylist(), INDEX_FILE, "README.md"}


def test_the_index_comes_last_and_names_every_tensor(
    several: tuple[Plan, tuple[Source, ...]], tmp_path: Path
) -> None:
    made, sources = several
    assert _finished(made, sources, tmp_path / "out") == ["config.json", INDEX_FILE]
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    shards = made["shards"].column("name").to_pylist()
    wanted = {row["name"]: shards[row["shard"]] for row in made["tensors"].to_pylist()}
    assert index["weight_map"] == wanted
    assert index["metadata"]["total_size"] == sum(made["tensors"].column("nbytes").to_pylist())


RECIPE = "merge_method: ties\nmodels:\n  - model: org/code\n  - model: org/french\nbase_model: org/base\n"
PARENTS = (Parent("org/base"), Parent("org/code", "abc123"), Parent("org/french"))


def card(recipe: str = RECIPE, parents: tuple[Parent, ...] = PARENTS, **changes: Any) -> str:
    manifest: dict[str, Any] = {
        "method": "ties",
        "recipe": {"base_model": changes.pop("base", "org/base")},
        "recipe_text": recipe,
        "seed": 7,
        "raymerge": "0.1.0",
        "config": {"model_type": "llama"},
    }
    return model_card(manifest | changes, "d1g35t", parents)


def front_matter(text: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    assert match is not None
    parsed: dict[str, Any] = yaml.safe_load(match[1])
    return parsed


def fenced(text: str) -> str:
    """The recipe as a Markdown reader finds it: up to the first line that closes the opening fence."""
    lines = text.split("\n")
    start = next(index for index, line in enumerate(lines) if re.match(r"`{3,}yaml$", line))
    fence = lines[start].removesuffix("yaml")
    closing = re.compile(rf" {{0,3}}`{{{len(fence)},}} *$")
    end = next(index for index in range(start + 1, len(lines)) if closing.match(lines[index]))
    return "\n".join(lines[start + 1 : end])


def test_what_a_card_says() -> None:
    text = card()
    assert front_matter(text) == {
        "base_model": ["org/base", "org/code", "org/french"],
        "base_model_relation": "merge",
        "library_name": "transformers",
        "tags": ["merge", "raymerge"],
    }
    assert "with the method `ties` on the base `org/base`." in text
    assert "- `org/code`, revision `abc123`\n" in text
    assert "- `org/french`\n" in text
    assert "Plan digest: `d1g35t`. Seed: 7." in text
    assert "raymerge 0.1.0" in text
    assert text.endswith("\n")
    assert fenced(text) == RECIPE.rstrip()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("org/model", "org/model"),
        ("../models/base", "models/base"),
        ("/data/alice/models/base", "models/base"),
        ("/base", "base"),
        ("C:\\data\\models\\base", "models/base"),
        ("\\\\server\\share\\models\\base", "models/base"),
    ],
)
def test_absolute_paths_lose_their_beginning(name: str, shown: str) -> None:
    assert shown_name(name) == shown


def test_local_parents_are_listed_but_no_hub_models() -> None:
    text = card(
        recipe="merge_method: linear", parents=(Parent("/data/alice/models/base"),), base="/data/alice/m/b"
    )
    assert "base_model" not in front_matter(text)
    assert "- `models/base`\n" in text
    assert "alice" not in text
    assert "on the base `m/b`." in text


@example(recipe="chat_template: |\n  ```yaml\n  ``````\n")
@given(recipe=st.text(alphabet="`ab: \n~#-", max_size=60))
@settings(deadline=None, max_examples=40)
def test_fences_survive_any_recipe(recipe: str) -> None:
    assert fenced(card(recipe=recipe)) == recipe.rstrip()


@pytest.mark.parametrize("name", ["a`b", "a``b", "a\nb", "---\nlicense: mit", "`"])
def test_names_cannot_break_out(name: str) -> None:
    text = card(parents=(Parent(name, revision=name),))
    assert set(front_matter(text)) == {"library_name", "tags"}
    listed = text.split("## Parents\n\n")[1].split("\n\n## Recipe")[0]
    assert "\n" not in listed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model: /data/alice/models/base", "model: models/base"),
        ("{model: /data/alice/a/b+/data/alice/c/lora@main}", "{model: a/b+c/lora@main}"),
        ("- file:///data/alice/models/base", "- models/base"),
        ("prompts: C:\\\\data\\\\prompts.txt".replace("\\\\", "\\"), "prompts: data/prompts.txt"),
        ("# see /data/alice/notes.txt, and more", "# see alice/notes.txt, and more"),
        # What is no place of a machine stays.
        ("model: org/name", "model: org/name"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("chat_template: <s>{{ x }}</s>", "chat_template: <s>{{ x }}</s>"),
    ],
)
def test_a_recipes_text_is_shown_without_places(text: str, shown: str) -> None:
    assert without_places(text) == shown


def test_parents_are_found_whatever_their_paths_hold() -> None:
    """Also where one is the beginning of another."""
    names = ("/data/my models/x, y", "/data/my models/x, y z")
    text = f"- '{names[0]}'\n- '{names[1]}'"
    assert without_places(text, names) == "- 'my models/x, y'\n- 'my models/x, y z'"


def test_a_local_directory_is_no_model_of_the_hub() -> None:
    text = card(parents=(Parent("models/base", is_local=True), Parent("org/base")))
    assert front_matter(text)["base_model"] == ["org/base"]
    assert "- `models/base`\n" in text


FILES = {
    "tokenizer.json": b'{"a": 1}\r\n',
    "merges.txt": "été\n".encode(),
    "empty.txt": b"",
    "code/modeling_x.py": b"import torch\n",
    "big.model": bytes(range(256)) * 40_000,
}


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    for key, data in FILES.items():
        path = tmp_path / "source" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return LocalStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> LocalStore:
    (tmp_path / "target").mkdir()
    return LocalStore(tmp_path / "target")


def test_files_arrive_with_their_bytes(source: LocalStore, target: LocalStore) -> None:
    assert len(FILES["big.model"]) > 8 << 20
    copy_companions(source, target, ["tokenizer.json", "code/modeling_x.py"])
    assert [file.key for file in target.files()] == ["code/modeling_x.py", "tokenizer.json"]
    target.write_atomic("tokenizer.json", b"something longer than the file that comes")
    for _ in range(2):
        copy_companions(source, target, FILES)
        assert {file.key: target.read(file.key, 0, file.nbytes) for file in target.files()} == FILES


def test_all_problems_at_once_and_nothing_copied(source: LocalStore, target: LocalStore) -> None:
    keys = ["config.json", "gone.txt", "tokenizer.json", "README.md"]
    with pytest.raises(CheckpointError) as caught:
        copy_companions(source, target, keys)
    assert len(caught.value.problems) == 3
    assert "gone since the plan was made" in str(caught.value)
    assert target.files() == ()
