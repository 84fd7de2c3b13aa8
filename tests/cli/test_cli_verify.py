"""``raymerge verify``: every level and replay, in words, as JSON and as exit code."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from kits.checkpoint_maker import llama_config, tiny_llama, write_json
from kits.command_line import Outcome, run_command
from kits.merges import MEAN, make_models, write_recipe

from raymerge.cli.running import Ending
from raymerge.cli.verify import _progress
from raymerge.events import RayEnded, Stopping


def _merged(root: Path) -> Path:
    recipe = write_recipe(make_models(root), MEAN)
    assert run_command("submit", recipe, "-o", "out", "--inline", cwd=root).code == 0
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and their merge ``out``; nobody changes it."""
    return _merged(tmp_path_factory.mktemp("merged"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same to be changed."""
    return shutil.copytree(folder, tmp_path / "copy")


def _verify(folder: Path, *args: str) -> Outcome:
    return run_command("verify", "out", *args, cwd=folder)


def _audit(folder: Path, *args: str) -> Outcome:
    return _verify(folder, "--level", "audit", "--inline", *args)


def test_a_merged_checkpoint_is_sound_as_its_plan_says(folder: Path, tmp_path: Path) -> None:
    outcome = _verify(folder)
    assert outcome.code == 0
    assert outcome.text.startswith("out is sound: 30 tensors, ")
    assert "as its plan says" in outcome.text
    verdict = json.loads(_verify(folder, "--json").text)
    assert (verdict["sound"], verdict["tensors"], verdict["files"]) == (True, 30, 1)
    tiny_llama(tmp_path / "out", 0, files=2)
    assert "in 2 files; it keeps no plan" in _verify(tmp_path).text


def test_damage_is_not_sound(copy: Path) -> None:
    write_json(copy / "out" / "config.json", llama_config() | {"vocab_size": 65})
    outcome = _verify(copy)
    assert (outcome.code, "vocab_size is 65" in outcome.text) == (2, True)
    weights = copy / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    outcome = _verify(copy)
    assert outcome.code == 2
    assert "out is NOT SOUND: 1 problem." in outcome.text
    assert "model.safetensors" in outcome.text
    assert "→" in outcome.text
    shutil.rmtree(copy / "out")
    outcome = _verify(copy, "--json")
    verdict = json.loads(outcome.text)
    assert (outcome.code, verdict["sound"], verdict["problems"][0]["where"]) == (2, False, "out")


# The audit


def test_an_audit_tells_what_it_looked_at(folder: Path) -> None:
    outcome = _audit(folder, "--seed", "7")
    assert outcome.code == 0
    assert outcome.text.startswith("out is sound: 30 tensors.")
    assert "compared with the digests of the ledger" in outcome.text
    assert "30 tensors recomputed from the sources (0.01 of each, seed 7)" in outcome.text
    assert "not audited" not in outcome.text


def test_an_audit_chooses_a_seed_and_says_which(folder: Path) -> None:
    one, other = (json.loads(_audit(folder, "--json").text) for _ in range(2))
    assert one["seed"] != other["seed"]
    assert one["sound"] is other["sound"] is True
    assert (one["recomputed"], one["skipped"], one["problems"]) == (30, [], [])


def test_an_audit_of_damage_ends_with_2(copy: Path) -> None:
    weights = copy / "out" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in range(1, 20):
        content[-place * 2000] ^= 0x80
    weights.write_bytes(content)
    outcome = _audit(copy, "--sample", "1", "--show", "2")
    assert outcome.code == 2
    assert "out is NOT SOUND: " in outcome.text
    assert outcome.text.count("→") == 2
    assert "more are not shown; --show " in outcome.text
    assert _verify(copy).code == 0


def test_an_audit_says_what_it_could_not_look_at(tmp_path: Path) -> None:
    # Not of a copy: the record says where the sources were.
    (_merged(tmp_path) / "two").rename(tmp_path / "away")
    outcome = _audit(tmp_path)
    assert outcome.code == 2
    assert "not audited: 30 tensors (such as lm_head.weight): two is not there" in outcome.text
    assert _audit(tmp_path, "--source", "two=away").code == 0


def test_an_audit_that_could_compare_nothing_does_not_say_sound(copy: Path) -> None:
    """The mean of a model and its negative: all of it is left open."""
    name = yaml.safe_load((copy / "recipe.yml").read_text())["models"][0]["model"]
    shutil.copytree(copy / name, copy / "same")
    entries = [{"model": each, "parameters": {"weight": w}} for each, w in ((name, 1.0), ("same", -1.0))]
    cancelled = {"merge_method": "linear", "models": entries, "parameters": {"normalize": False}}
    write_recipe(copy, yaml.safe_dump(cancelled | {"dtype": "bfloat16"}))
    again = run_command("submit", "recipe.yml", "-o", "out", "--inline", "--replace", cwd=copy)
    assert again.code == 0, again.text
    outcome = _audit(copy)
    assert outcome.text.startswith("out is as it was written: 30 tensors. Whether they are right was not")
    assert "not audited: 30 tensors" in outcome.text


def test_an_audit_ends_in_time_once_it_is_told_to() -> None:
    ending = Ending()
    with _progress(ending) as show:
        show(Stopping(None))
        assert not ending._timers
        show(Stopping(1.0))
    assert len(ending._timers) == 1
    ending.cancel()


@pytest.mark.parametrize("as_json", [False, True])
def test_an_audit_whose_ray_dies_says_so(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with _progress(Ending(json_to=sys.__stdout__ if as_json else None)) as show:
        show(RayEnded("raylet"))
    said, shown = "the embedded Ray of this command has ended (raylet died).", capfd.readouterr()
    assert codes == [3]
    if not as_json:
        assert said in shown.err
        return
    event = json.loads(shown.out)
    assert (event["event"], event["exit_code"]) == ("error", 3)
    assert event["message"].startswith(said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--sample", "0"), "0 is no share of the elements"),
        (("--source", "two"), "'two' does not say which source is where"),
        (("--memory", "1MiB"), "an audit takes 16.78 MB"),
    ],
)
def test_what_an_audit_cannot_be_asked(wrong: tuple[str, ...], said: str, folder: Path) -> None:
    outcome = _audit(folder, *wrong)
    assert (outcome.code, said in outcome.text) == (2, True)


# Loading, and the record


def test_a_checkpoint_that_loads(folder: Path) -> None:
    outcome = _verify(folder, "--level", "load")
    assert outcome.code == 0
    assert outcome.text.startswith("out loads.\nLlamaForCausalLM of transformers ")
    assert "it was loaded and run, with " in outcome.text
    outcome = _verify(folder, "--level", "load", "--memory", "16MiB")
    assert outcome.code == 0
    assert "only names and shapes were compared" in outcome.text


def test_a_checkpoint_that_does_not_load(tmp_path: Path) -> None:
    make_models(tmp_path, ("out",))
    write_json(tmp_path / "out" / "config.json", llama_config(layers=4))
    outcome = _verify(tmp_path, "--level", "load", "--json")
    verdict = json.loads(outcome.text)
    assert (outcome.code, verdict["sound"], verdict["ran"]) == (2, False, False)
    assert "would be random" in verdict["problems"][0]["what"]


def test_a_record_is_derived_anew(folder: Path) -> None:
    outcome = _verify(folder, "--replay")
    assert outcome.code == 0
    assert outcome.text.startswith("out is what its record says.\nplan ")
    assert "2 sources, 30 tensors" in outcome.text
    outcome = _verify(folder, "--replay", "--source", "one=two/absent")
    assert outcome.code == 2
    assert "out IS NOT WHAT ITS RECORD SAYS: 1 problem." in outcome.text
    assert "two/absent" in outcome.text
    outcome = _verify(folder, "--replay", "--level", "audit")
    assert (outcome.code, "so is --level audit." in outcome.text) == (2, True)
    assert "Give one after the other." in outcome.text
