"""init: each recipe plans as it is written, and so does every setting that it offers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kits.adapter_maker import tiny_lora
from kits.adapter_merges import adapter
from kits.checkpoint_maker import (
    llama_config,
    llama_shapes,
    read_config,
    read_tensors,
    tiny_llama,
    write_checkpoint,
    write_json,
)
from kits.command_line import Outcome, run_command
from kits.hub_server import hub_server
from kits.permuted_experts import MIXTRAL, make_model, noisy, store
from kits.quantised_models import deepseek_v3
from kits.tokenizer_maker import word_level, write_tokenizer
from safetensors.torch import save_file

import raymerge
from raymerge.errors import PlanError
from raymerge.storage.open import resolve_source

CARD = "---\nbase_model: {base}\n---\n# A model\n"
_NEXT = """next:
  raymerge plan recipe.yml              # what it would do; writes nothing
  raymerge submit recipe.yml -o merged  # does it
"""
Scene = Callable[[Path], list[str]]


def _tunes(folder: Path, *, base: str | None = None) -> list[str]:
    root = tiny_llama(folder / "start", 0, layers=2)
    for seed, name in enumerate(("code", "french"), 1):
        tiny_llama(folder / name, seed, layers=2, base=root)
        if base is not None:
            (folder / name / "README.md").write_text(CARD.format(base=base))
    return ["code", "french"]


def _with_base(folder: Path) -> list[str]:
    return ["start", *_tunes(folder, base="some-org/START")]


def _pair(folder: Path) -> list[str]:
    return _tunes(folder)


def _three(folder: Path) -> list[str]:
    return [*_tunes(folder), "start"]


def _one_tune(folder: Path) -> list[str]:
    names = _tunes(folder)
    config = read_config(folder / "code") | {"_name_or_path": str(folder / "start")}
    write_json(folder / "code" / "config.json", config)
    return [names[0], "start"]


def _mixtures(folder: Path) -> list[str]:
    model = make_model(MIXTRAL, 1)
    store(folder / "one", model, MIXTRAL)
    store(folder / "two", noisy(model, 2, 0.1), MIXTRAL)
    return ["one", "two"]


def _mixtures_of_a_base(folder: Path) -> list[str]:
    _mixtures(folder)
    store(folder / "three", noisy(make_model(MIXTRAL, 1), 3, 0.1), MIXTRAL)
    for name in ("two", "three"):
        (folder / name / "README.md").write_text(CARD.format(base="one"))
    return ["one", "two", "three"]


def _quantised(folder: Path) -> list[str]:
    for seed, name in enumerate(("one", "two")):
        deepseek_v3(folder / name, seed)
    return ["one", "two"]


def _vocabularies(folder: Path) -> list[str]:
    for name, more in (("one", ()), ("two", ("green", "blue"))):
        words = ("<unk>", "red", *more)
        config = llama_config(layers=1, hidden=8, vocab=len(words))
        tensors = {key: torch.ones(shape).bfloat16() for key, shape in llama_shapes(config).items()}
        root = write_checkpoint(folder / name, tensors, config)
        write_tokenizer(root, word_level(words), {"chat_template": f"{name} {{{{ messages }}}}"})
    return ["one", "two"]


def _rows(folder: Path) -> list[str]:
    for name, rows in (("one", 8), ("two", 12)):
        config = llama_config(layers=1, hidden=8, vocab=rows)
        tensors = {key: torch.ones(shape).bfloat16() for key, shape in llama_shapes(config).items()}
        root = write_checkpoint(folder / name, tensors, config)
        write_tokenizer(root, word_level(("<unk>", "red", "green")), {})
    return ["one", "two"]


def _files(folder: Path) -> list[str]:
    for name in ("one", "two"):
        save_file({"a": torch.ones(4, 4)}, folder / f"{name}.safetensors")
    return ["one.safetensors", "two.safetensors"]


def _model_and_adapters(folder: Path) -> list[str]:
    base = tiny_llama(folder / "start", 0, layers=1)
    for seed, name in enumerate(("law", "med"), 1):
        tiny_lora(folder / name, read_tensors(base), seed)
    return ["start", "law", "med"]


def _named_with_adapters(folder: Path) -> list[str]:
    """Their base is not named by itself, and is a directory that is there."""
    _model_and_adapters(folder)
    return ["start+law", "start+med"]


def _base_beside(folder: Path) -> list[str]:
    """The base that cards name is a directory that is there, and was not named."""
    return _tunes(folder, base="start")


def _qwen2(folder: Path) -> list[str]:
    """Its mixtures have a shared expert."""
    names = ["tiny-base", "code", "french"]
    config = {**llama_config(layers=1), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    shapes = llama_shapes(config)
    for name in list(shapes):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shapes[name.replace("weight", "bias")] = shapes[name][:1]
    for name in names:
        write_checkpoint(folder / name, {key: torch.ones(shape) for key, shape in shapes.items()}, config)
    return names


SCENES: dict[str, tuple[Scene, str, dict[str, Any]]] = {
    "base": (_with_base, "", {"merge_method": "ties", "base_model": "start", "dtype": "bfloat16"}),
    "base that is not named": (_base_beside, "", {"merge_method": "ties", "base_model": "start"}),
    "one fine-tune": (_one_tune, "", {"merge_method": "task_arithmetic", "base_model": "start"}),
    "two": (_pair, "", {"merge_method": "slerp", "base_model": "code"}),
    "three": (_three, "", {"merge_method": "linear", "base_model": None}),
    "mixtures": (_mixtures, "", {"merge_method": "linear", "base_model": None}),
    "mixtures of a base": (_mixtures_of_a_base, "", {"merge_method": "ties", "base_model": "one"}),
    "quantised": (_quantised, "", {"merge_method": "linear", "dtype": None}),
    "vocabularies": (_vocabularies, "", {"tokenizer": {"source": "union"}}),
    "rows": (_rows, "", {"embedding_sizes": "common", "tokenizer": None}),
    "files": (_files, "", {"merge_method": "linear", "dtype": "float32"}),
    "model and adapters": (_model_and_adapters, "", {"merge_method": "ties", "base_model": "start"}),
    "models with adapters": (_named_with_adapters, "", {"merge_method": "ties", "base_model": "start"}),
    "mixture": (_with_base, "--moe", {"gate_mode": "router_input", "base_model": "start"}),
    "shared expert": (_qwen2, "--moe", {"base_model": "tiny-base", "gate_mode": "router_input"}),
    "copies": (lambda folder: _pair(folder)[:1], "--moe", {"gate_mode": "random", "base_model": "code"}),
}


def _init(folder: Path, *args: str, **more: Any) -> Outcome:
    return run_command("init", *args, cwd=folder, **more)


@pytest.mark.sample(4)
@pytest.mark.parametrize("scene", SCENES)
def test_a_recipe_plans_as_written_and_with_each_setting_that_it_offers(scene: str, tmp_path: Path) -> None:
    make, flag, expected = SCENES[scene]
    outcome = _init(tmp_path, *make(tmp_path), *filter(None, [flag]))
    assert outcome.code == 0, outcome.text
    assert outcome.text.endswith(_NEXT)
    text = (tmp_path / "recipe.yml").read_text()
    found = yaml.safe_load(text)
    assert {key: found.get(key) for key in expected} == expected
    with contextlib.chdir(tmp_path):
        assert raymerge.plan("recipe.yml").problems == ()
        offered = list(_offered(text))
        for changed in offered:
            (tmp_path / "changed.yml").write_text(changed)
            assert yaml.safe_load(changed) != found
            assert raymerge.plan("changed.yml").problems == (), changed
    # A file of tensors has nothing to offer but methods.
    assert offered


def _offered(text: str) -> Iterator[str]:
    """The recipe with each commented setting, and with each method that is said to fit."""
    lines = text.splitlines(keepends=True)
    starts = [
        number
        for number, line in enumerate(lines)
        if re.match(r"#[^ \n]|#  +\S", line) and not re.match(r"#[^ \n]|#  +\S", lines[number - 1])
    ]
    for start in starts:
        end = start
        while end < len(lines) and re.match(r"#[^ \n]|#  +\S", lines[end]):
            end += 1
        yield "".join([*lines[:start], *(line[1:] for line in lines[start:end]), *lines[end:]])
    for named in re.findall(r"^# (.+) fit too", text, re.MULTILINE):
        for method in named.split(", "):
            yield re.sub(r"^(merge_method|gate_mode): \w+", rf"\1: {method}", text, flags=re.MULTILINE)


def test_adapters_give_a_recipe_that_makes_an_adapter(tmp_path: Path) -> None:
    for seed, name in enumerate(("law", "med")):
        adapter(tmp_path / name, seed, base_model_name_or_path="org/model")
    outcome = _init(tmp_path, "law", "med")
    assert outcome.text.endswith(
        "  raymerge submit recipe.yml -o merged-adapter  # merges, and writes the adapter\n"
    ), outcome.text
    text = (tmp_path / "recipe.yml").read_text()
    assert "# raymerge init --force org/model law med" in text
    for number, changed in enumerate([text, *_offered(text)]):
        (tmp_path / "changed.yml").write_text(changed)
        done = run_command("submit", "changed.yml", "-o", f"out-{number}", cwd=tmp_path)
        assert done.code == 0, done.text + changed


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("some-org/START", "# Likely the base, by the model card of code, french."),
        ("[one/start, two/start]", "# No base is known."),
        ('"x\\ndtype: float16"', "# No base is known."),
        ("some-org/elsewhere", "# The base is some-org/elsewhere, by the model card of code, french, and"),
    ],
)
def test_a_base_is_told_with_who_says_so(base: str, said: str, tmp_path: Path) -> None:
    models = _tunes(tmp_path, base=base)
    outcome = _init(tmp_path, *models, *(["start"] if "START" in base else []))
    assert outcome.code == 0, outcome.text
    assert said in (tmp_path / "recipe.yml").read_text()


def test_no_server_is_asked_for_a_base_that_a_card_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other than the Hub: whoever wrote the card would learn who reads it, or have a wrong base merged."""
    asked: list[str] = []

    def resolve(path: str, *rest: Any, **more: Any) -> str:
        asked.append(path)
        return resolve_source(path, *rest, **more)

    monkeypatch.setattr("raymerge.planner.suggestion.models.resolve_source", resolve)
    _init(tmp_path, *_tunes(tmp_path, base="s3://theirs/model"))
    assert asked == ["code", "french"]


def test_the_base_is_the_beginning_of_a_chain_of_fine_tunes(tmp_path: Path) -> None:
    models = _tunes(tmp_path, base="start")
    (tmp_path / "french" / "README.md").write_text(CARD.format(base="code"))
    _init(tmp_path, *models, "start")
    assert yaml.safe_load((tmp_path / "recipe.yml").read_text())["base_model"] == "start"


def test_models_that_name_different_bases_have_none(tmp_path: Path) -> None:
    models = _tunes(tmp_path, base="org/one")
    (tmp_path / "french" / "README.md").write_text(CARD.format(base="org/other"))
    _init(tmp_path, *models)
    assert "# No base is known." in (tmp_path / "recipe.yml").read_text()


def test_a_base_by_its_name_alone_is_a_guess_to_check(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "tiny-base-v1", 5, layers=2)
    outcome = _init(tmp_path, *_tunes(tmp_path), "tiny-base-v1")
    assert "perhaps" in outcome.text
    assert "# Perhaps the base (check it), by its name alone." in (tmp_path / "recipe.yml").read_text()


def test_names_stand_in_the_recipe_as_yaml(tmp_path: Path) -> None:
    """Whatever they hold, the recipe names the same directories."""
    names = ["a: b", "#two, 3", "with@sign"]
    for seed, name in enumerate(names):
        tiny_llama(tmp_path / name, seed, layers=1)
    outcome = _init(tmp_path, *names, "-o", "my recipe.yml")
    assert outcome.text.endswith("  raymerge submit 'my recipe.yml' -o merged  # does it\n")
    with contextlib.chdir(tmp_path):
        sources = raymerge.plan("my recipe.yml").manifest["sources"]
    assert [source["name"] for source in sources] == names


def test_models_that_do_not_fit_are_told_as_a_plan_tells_it(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "one", 1, layers=1)
    tiny_llama(tmp_path / "two", 2, layers=1, hidden=64)
    outcome = _init(tmp_path, "one", "two")
    recipe = {"merge_method": "slerp", "base_model": "one", "models": [{"model": "one"}, {"model": "two"}]}
    with contextlib.chdir(tmp_path), pytest.raises(PlanError) as refused:
        raymerge.plan(recipe | {"parameters": {"t": 0.5}}).require()
    outcome.check_refusal(refused.value.problems[0].what)
    assert not (tmp_path / "recipe.yml").exists()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["one"], ["one model is named, and a merge needs two or more.", "raymerge convert"]),
        (["one", "one"], ["named twice"]),
        (["one", "./one/"], ["./one/: this is the same directory as one."]),
        (["one", "tow"], ["tow: there is no such directory", "Did you mean 'two'?"]),
        (["one", "./tow"], ["./tow: there is no such directory", "Did you mean './two'?"]),
        (["one", "absent"], ["absent", "there is no such directory"]),
        (["one", "org/absent"], ["org/absent"]),
        (["one", "two", "other"], ["is an adapter", "MODEL+ADAPTER"]),
        (["one", "two", "-o", "taken.yml"], ["-o taken.yml", "--force"]),
        (["one", "two", "-o", "nowhere/recipe.yml"], ["cannot be written", "writable directory"]),
        (["other", "--moe"], ["is an adapter, and experts are made of models"]),
    ],
)
def test_what_cannot_be_is_refused(args: list[str], words: list[str], tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        tiny_llama(tmp_path / name, seed, layers=1)
    adapter(tmp_path / "other", 1, base_model_name_or_path="org/unknown")
    (tmp_path / "taken.yml").write_text("mine")
    _init(tmp_path, *args).check_refusal(*words)
    assert (tmp_path / "taken.yml").read_text() == "mine"
    assert not (tmp_path / "recipe.yml").exists()


def test_the_recipe_goes_to_standard_output_or_over_a_file_when_asked(tmp_path: Path) -> None:
    models = _tunes(tmp_path)
    printed = _init(tmp_path, *models, "-o", "-").text
    assert list(tmp_path.glob("*.yml")) == []
    (tmp_path / "recipe.yml").write_text("old")
    assert _init(tmp_path, *models, "--force").code == 0
    assert (tmp_path / "recipe.yml").read_text() == printed


def test_models_of_the_hub_are_read_by_their_headers(tmp_path: Path) -> None:
    """No weight is fetched, and the recipe says what a plan will fetch."""
    for seed, name in enumerate(("start", "code", "french")):
        tiny_llama(tmp_path / name, seed, layers=1, hidden=256)
        (tmp_path / name / "README.md").write_text(CARD.format(base="org/start"))
    with hub_server(tmp_path / "cache") as hub:
        for name in ("start", "code", "french"):
            hub.push(f"org/{name}", tmp_path / name)
        outcome = _init(tmp_path, "org/code", "org/french")
        assert outcome.code == 0, outcome.text
        read = sum(nbytes for _, nbytes in hub.ranges("org/code", "model.safetensors"))
    assert 0 < read < (tmp_path / "code" / "model.safetensors").stat().st_size / 2
    text = (tmp_path / "recipe.yml").read_text()
    assert yaml.safe_load(text)["base_model"] == "org/start"
    assert text.count("# not in the Hub's cache: plan and submit fetch") == 3


def test_the_next_commands_have_the_profile_and_no_place_that_it_says(tmp_path: Path) -> None:
    (tmp_path / "profile.yml").write_text("output: elsewhere\n")
    outcome = _init(tmp_path, *_tunes(tmp_path), "--profile", "profile.yml")
    assert "  raymerge plan recipe.yml --profile profile.yml    # what" in outcome.text
    assert "  raymerge submit recipe.yml --profile profile.yml  # does it" in outcome.text


def test_the_same_from_python(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        suggestion = raymerge.suggest_recipe(_with_base(tmp_path))
        text = raymerge.suggestion_text(suggestion)
        assert raymerge.plan(yaml.safe_load(text)).problems == ()
    assert (suggestion.kind, suggestion.method, len(suggestion.models)) == ("merge", "ties", 2)


@pytest.mark.parametrize(
    "place", ["https://me:pw@h/x", "oss://me:pw@h/x@v1@v2", "s3://me:pw@h/x", "file://me:pw@h/x"]
)
@pytest.mark.parametrize("verb", ["init", "inspect", "diff"])
def test_a_password_in_an_address_is_not_shown(place: str, verb: str, tmp_path: Path) -> None:
    outcome = run_command(verb, place, *(["one"] if verb == "diff" else []), cwd=tmp_path)
    outcome.check_refusal(place.replace("me:pw@", ""))
    assert "pw" not in outcome.text
    assert "me:" not in outcome.text
