"""The behaviour pack: merges of small trained models must predict text as well as right merges do.

The recipes run in this process; the pack's own evaluation judges them in two subprocesses of one thread each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kits.command_line import Outcome, run_command

RECIPES = (
    "linear",
    "linear-fp32",
    "task_arithmetic",
    "ties",
    "ties-lambda",
    "slerp",
    "slerp-t25",
    "nuslerp",
    "model_stock",
    "sce",
    "dare_linear",
    "dare_ties",
    "della",
    "lora-applied",
    "far-linear",
    "far-slerp",
    "far-model_stock",
    "far-dare_ties",
    "passthrough-identity",
    "passthrough-upscale",
    "passthrough-upscale-zero",
)
"""All of the pack but those that build a mixture of experts, which cannot be carried out yet."""
EVALUATIONS_AT_ONCE = 2

JUDGE = """
import json, os, runpy, sys
import torch
torch.set_num_threads(1)
pack, outs, names = sys.argv[1], sys.argv[2], sys.argv[3:]
tools = runpy.run_path(os.path.join(pack, "eval.py"))
rules = json.load(open(os.path.join(pack, "thresholds.json")))["recipes"]
for name in names:
    try:
        result = tools["evaluate"](os.path.join(outs, name))
        failed = tools["check"](result, rules[name]) + tools["check"](result, rules[name].get("parity", {}))
    except Exception as error:
        result, failed = {"loss": {}}, [repr(error)]
    print(json.dumps({"name": name, "loss": result["loss"], "failed": failed}), flush=True)
"""


def _judge(pack: Path, outs: Path) -> dict[str, dict[str, Any]]:
    """What the pack says of every merge under ``outs``, by name."""
    command = [sys.executable, "-c", JUDGE, str(pack), str(outs)]
    shares = [RECIPES[index::EVALUATIONS_AT_ONCE] for index in range(EVALUATIONS_AT_ONCE)]
    running = [
        subprocess.Popen([*command, *share], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for share in shares
    ]
    ended = [process.communicate(timeout=220) for process in running]
    for process, (_, complaints) in zip(running, ended, strict=True):
        assert process.returncode == 0, complaints
    judged = [json.loads(line) for printed, _ in ended for line in printed.splitlines() if line[:1] == "{"]
    return {entry["name"]: entry for entry in judged}


@pytest.fixture(scope="module")
def outs(shared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    """Every recipe, run: the folder of the merges and how each command ended."""
    place = tmp_path_factory.mktemp("behaviour")
    pack = shared_root / "behaviour"
    return place, {
        name: run_command("submit", f"recipes/{name}.yml", "-o", str(place / name), "--inline", cwd=pack)
        for name in RECIPES
    }


@pytest.fixture(scope="module")
def judged(outs: tuple[Path, dict[str, Outcome]], shared_root: Path) -> dict[str, dict[str, Any]]:
    """What the pack says of every merge."""
    return _judge(shared_root / "behaviour", outs[0])


def test_every_recipe_but_those_of_mixtures_is_judged(shared_root: Path) -> None:
    names = {path.stem for path in (shared_root / "behaviour" / "recipes").glob("*.yml")}
    assert {name for name in names if not name.startswith("moe-")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_trained_models_merges(name: str, outs: tuple[Path, dict[str, Outcome]]) -> None:
    outcome = outs[1][name]
    assert outcome.code == 0, outcome.text


@pytest.mark.parametrize("name", RECIPES)
def test_a_merge_behaves_as_a_right_merge(name: str, judged: dict[str, dict[str, Any]]) -> None:
    assert judged[name]["failed"] == [], judged[name]


def test_the_same_layers_put_together_again_are_the_same_model(judged: dict[str, dict[str, Any]]) -> None:
    assert judged["passthrough-identity"]["loss"] == judged["passthrough-upscale-zero"]["loss"]
