"""mergekit's options and commands, and the page that tells of them: it runs, and leaves no option out."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kits.chains import CHAIN
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.command_line import Outcome, run_command
from kits.merges import MEAN, make_models, write_recipe
from kits.transplants import BYTE_LEVEL, METASPACE, byte_level, metaspace, plain_text, write_model
from safetensors.torch import save_file

from raymerge.cli.mergekit import EXTRACT, SUBMIT, TRANSPLANT, translate
from raymerge.options import RunOptions
from raymerge.recipes.load import parse_recipes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "from-mergekit.md").read_text(encoding="utf-8")
OPTIONS: Mapping[str, list[str]] = json.loads((ROOT / "tests/data/mergekit-options.json").read_text())
"""Of version 0.1.5: those of every command, and each one's own (bakllama and evolve have only these)."""
FILES = MEAN.replace("one", "one.safetensors").replace("two", "two.safetensors")
MIXTURE = "base_model: one\ngate_mode: random\nexperts: [{source_model: one}, {source_model: two}]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recipe(make_models(tmp_path), MEAN)
    return tmp_path


def _refused_line(outcome: Outcome) -> str:
    outcome.check_refusal("add there:")
    return outcome.text.partition("add there:\n")[2].split("\n\n")[0]


def test_what_has_no_effect_is_accepted_with_one_line(folder: Path) -> None:
    words = {
        name: "2" if answer.takes_value else ""
        for name, answer in SUBMIT.items()
        if answer.reason and not name.startswith("--no-")
    }
    assert len(words) > 20
    given = [word for pair in words.items() for word in pair if word]
    outcome = run_command("submit", "recipe.yml", "out", *given, "--inline", cwd=folder)
    assert outcome.code == 0, outcome.text
    (line,) = [line for line in outcome.text.splitlines() if line.startswith("not needed here: ")]
    assert all(f"{name} (" in line for name in words)
    plain = run_command("submit", "recipe.yml", "plain", "--inline", cwd=folder)
    assert "not needed" not in plain.text
    assert (folder / "out/model.safetensors").read_bytes() == (
        folder / "plain/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("--cuda", "--device cuda"),
        ("--gpu-rich", "--device cuda"),
        ("--no-cuda --workers 2", "--device cpu --workers 2"),
        ("-I steps --out-path=place", "--steps steps --keep-intermediates --output place"),
        ("-j8 -vv --lazy-unpickle -o out", "-o out"),
        ("-oout", "-oout"),
        ("-v -- -v --cuda", "-- -v --cuda"),
        ("-I -1 --cuda", "--steps -1 --keep-intermediates --device cuda"),
    ],
)
def test_what_has_another_name_is_passed_on(given: str, ours: str) -> None:
    assert translate(given.split(), SUBMIT).arguments == tuple(ours.split())


@pytest.mark.parametrize(
    ("given", "where", "what"),
    [
        ("--out-shard-size --json", "--out-shard-size", "a value is expected"),
        ("--out-shard-size=--json", "--out-shard-size", "a value is expected"),
        ("-I --cuda", "-I", "a value is expected"),
        ("-j -v", "-j", "a value is expected"),
        ("--out-path -- out", "--out-path", "a value is expected"),
        ("--cuda=1", "--cuda", "'1' stands behind it"),
        ("--lazy-unpickle=false", "--lazy-unpickle", "'false' stands behind it"),
        ("-vi", "-v", "'i' stands behind it"),
    ],
)
def test_an_option_takes_neither_its_neighbour_nor_what_it_has_no_use_for(
    given: str, where: str, what: str
) -> None:
    (problem,) = translate(given.split(), SUBMIT).problems
    assert (problem.where, problem.what.startswith(what)) == (where, True)


def test_behind_two_dashes_nothing_is_misspelt(folder: Path) -> None:
    outcome = run_command(
        "submit", "recipe.yml", "-o", "out", "--dry-run", "--", "--lazy-unpickel", cwd=folder
    )
    outcome.check_refusal("--lazy-unpickel")
    assert "Did you mean" not in outcome.text


def test_cuda_is_the_device_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, RunOptions]] = []
    monkeypatch.setattr("raymerge.api.submit", lambda _, out, options, **__: seen.append((out, options)))
    assert run_command("submit", "recipe.yml", "--out-path", "out", "--cuda", cwd=folder).code == 0
    assert seen == [("out", RunOptions(device="cuda"))]


def test_a_dry_run_says_that_there_is_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: None)
    outcome = run_command("submit", "recipe.yml", "out", "--cuda", "--dry-run", cwd=folder)
    outcome.check_refusal("no GPU is visible")


def test_a_dry_run_counts_a_worker_for_each_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: torch.device("cuda"))
    monkeypatch.setattr("raymerge.devices.list_gpus", lambda: [torch.device("cuda")] * 8)
    outcome = run_command("submit", "recipe.yml", "out", "--cuda", "--dry-run", cwd=folder)
    assert (outcome.code, "out can be made by 8 workers of 1 thread\n" in outcome.text) == (0, True)


def test_the_cache_of_models_is_where_it_was_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def record(*_: object, **__: object) -> None:
        import os

        seen.append(os.environ["HF_HUB_CACHE"])

    monkeypatch.setattr("raymerge.api.submit", record)
    run_command("submit", "recipe.yml", "--transformers-cache", "models", cwd=folder)
    assert seen == ["models"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--random-seed 7", "seed: 7"),
        ("--random-seed=7", "seed: 7"),
        ("--out-shard-size 1B", "shard_size: 1GB"),
        ("--out-shard-size 200m", "shard_size: 200MB"),
        ("--out-shard-size 5000", "shard_size: 5000B"),
        ("--unsafe-truncate-embeddings", "embedding_sizes: common"),
        ("-i", "extra_tensors: drop"),
        ("--tensor-union", "missing_tensors: copy_base"),
    ],
)
def test_what_changes_the_result_is_refused_with_the_line_for_the_recipe(
    given: str, line: str, folder: Path
) -> None:
    outcome = run_command("submit", "recipe.yml", "out", *given.split(), cwd=folder)
    outcome.check_refusal(given.split("=", maxsplit=1)[0].split(maxsplit=1)[0])
    shown = outcome.text.partition("add there:\n")[2].split("#")[0].strip()
    assert shown == line
    parse_recipes(f"{MEAN}{shown}\n", "recipe.yml", exists=lambda _: False)
    assert not (folder / "out").exists()


def test_all_that_is_refused_is_said_at_once(folder: Path) -> None:
    given = ("--random-seed", "7", "--no-safe-serialization", "--lazy-unpickel", "--lazy")
    outcome = run_command("submit", "recipe.yml", "out", *given, cwd=folder)
    outcome.check_refusal("seed: 7", "always safetensors", "Did you mean '--lazy-unpickle'?")
    bare = run_command("submit", "recipe.yml", "--out-path", cwd=folder)
    bare.check_refusal("--out-path: a value is expected")


def test_an_option_that_nobody_has_is_an_error_as_before(folder: Path) -> None:
    outcome = run_command("submit", "recipe.yml", "out", "--wrkers", "2", cwd=folder)
    outcome.check_refusal("--wrkers")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("recipe.yml 'my out' --cuda", "raymerge submit recipe.yml 'my out' --cuda"),
        ("moe recipe.yml out", "raymerge submit recipe.yml out"),
        ("mergekit-yaml recipe.yml out", "raymerge submit recipe.yml out"),
        ("multi r.yml --out-path out -I steps", "raymerge submit r.yml --out-path out -I steps"),
        (
            "mergekit-extract-lora --model m --base-model b --out-path o",
            "raymerge extract-lora --model m --base-model b --out-path o",
        ),
        (
            "tokensurgeon -a subword base donor out -k 8 --cuda",
            "raymerge transplant --approximation subword base --tokenizer donor -o out --k 8 --device cuda",
        ),
        ("yaml", "raymerge submit RECIPE -o OUT"),
        ("moe --cuda", "raymerge submit RECIPE -o OUT --cuda"),
        ("mergekit-extract-lora", "raymerge extract-lora MODEL --base BASE -o OUT"),
        ("tokensurgeon", "raymerge transplant MODEL --tokenizer DONOR -o OUT"),
        ("layershuffle -m a out", "raymerge submit RECIPE -o OUT"),
    ],
)
def test_commands_of_mergekit_are_answered_with_ours(given: str, right: str, tmp_path: Path) -> None:
    run_command(*shlex.split(given), cwd=tmp_path).check_refusal(right)


def test_a_recipe_of_any_name_is_taken_for_one(tmp_path: Path) -> None:
    write_recipe(tmp_path, MEAN, "my-recipe")
    run_command("my-recipe", "out", cwd=tmp_path).check_refusal("raymerge submit my-recipe out")


def test_another_word_is_no_command(tmp_path: Path) -> None:
    run_command("submitt", "recipe.yml", cwd=tmp_path).check_refusal("Did you mean 'submit'?")


def test_every_option_of_a_served_command_has_an_answer() -> None:
    own = {"--device"}
    for command in ("every command", "mergekit-moe", "mergekit-multi", "mergekit-pytorch"):
        assert set(OPTIONS[command]) - own <= SUBMIT.keys()
    for command in ("every command", "mergekit-extract-lora"):
        assert set(OPTIONS[command]) - own <= EXTRACT.keys()
    for command in ("every command", "mergekit-tokensurgeon"):
        assert set(OPTIONS[command]) - {*own, "--k"} <= TRANSPLANT.keys()


def _told(text: str) -> set[str]:
    """The options that a part of the page has in its code spans."""
    words = " ".join(re.findall(r"`([^`\n]*)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)))
    both = re.sub(r"--\[no-\]([-\w]+)", r"--\1 --no-\1", words)
    return set(re.findall(r"(?<![-\w])--?[a-zA-Z][-\w]*", both))


@pytest.mark.parametrize("command", OPTIONS)
def test_the_page_tells_of_every_option(command: str) -> None:
    title = "Options of every command" if command == "every command" else command
    found = re.search(rf"^(##+) {title}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert set(OPTIONS[command]) - _told(found[2]) == set()


def test_the_page_and_the_command_agree() -> None:
    """What has no effect, is used or belongs into the recipe does so for ``submit``."""
    for row in re.findall(r"^\| (`-.*?) \| (\S+?):? ", PAGE.partition("## mergekit-extract-lora")[0], re.M):
        for name in _told(row[0]) - {"--device"}:
            answer = SUBMIT[name]
            word = {"used": answer.here or answer.variable, "no": answer.reason}.get(row[1], answer.remedy)
            assert word, (name, row[1])


def _commands() -> Iterator[str]:
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        yield from () if language else block.splitlines()


@pytest.mark.slow
def test_the_command_lines_of_the_page_run(tmp_path: Path) -> None:
    """In their order and in one folder, as a reader types them."""
    _make_what_the_page_names(tmp_path)
    commands = list(_commands())
    assert len(commands) > 15
    for line in commands:
        program, *words = shlex.split(line, comments=True)
        if program == "python":
            with open(tmp_path / words[2], "w") as out:
                subprocess.run([sys.executable, words[0]], cwd=tmp_path, stdout=out, check=True)
            continue
        runs = words[0] in ("submit", "transplant") and "--dry-run" not in words
        more = ["--inline"] if runs else []
        outcome = run_command(*words, *more, cwd=tmp_path)
        assert outcome.code == 0, (line, outcome.text)
    one, stack = (read_tensors(tmp_path / name) for name in ("two", "stack"))
    scaled = one["model.layers.1.mlp.up_proj.weight"] * 0.5
    assert stack["model.layers.2.mlp.up_proj.weight"].equal(scaled.half())
    assert _same(tmp_path / "adapter", tmp_path / "same-adapter", "adapter_model.safetensors")


def _make_what_the_page_names(folder: Path) -> None:
    make_models(folder, ("one", "two", "base"))
    tiny_llama(folder / "tuned", 7, base=folder / "base")
    tensors = read_tensors(folder / "one")
    text = plain_text("english")
    write_model(folder / "body", byte_level(300, text), BYTE_LEVEL, seed=1)
    write_model(folder / "donor", metaspace(320, text), METASPACE, seed=2)
    for name, text in re.findall(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S):
        (folder / name).write_text(text)
    for name, text in {"recipe": MEAN, "mixture": MIXTURE, "several": CHAIN, "files": FILES}.items():
        write_recipe(folder, text, f"{name}.yml")
    for name in ("one", "two"):
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "part").mkdir()
    (folder / "part" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    some = {name: tensor for name, tensor in tensors.items() if "layers.2" not in name}
    save_file(some, folder / "part" / "model.safetensors")


def _same(one: Path, other: Path, name: str = "model.safetensors") -> bool:
    return (one / name).read_bytes() == (other / name).read_bytes()


def test_a_shuffled_recipe_is_the_same_for_the_same_number(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "shuffle.py").write_text(script)
    made = [
        subprocess.run([sys.executable, "shuffle.py"], cwd=tmp_path, capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    assert made[0] == made[1]
    recipe: dict[str, Any] = yaml.safe_load(made[0])
    assert [each["sources"][0]["layer_range"] for each in recipe["slices"]] == [[0, 1], [1, 2], [2, 3]]
