"""The quickstart's evaluation: the loss it reports is the loss, and its verdict is the exit code."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart"
BASE = QUICKSTART / "models" / "base"


@pytest.fixture(scope="module")
def evaluate() -> ModuleType:
    """The script as a module; dataclasses look their module up, so it is registered while it is made."""
    spec = importlib.util.spec_from_file_location("quickstart_evaluate", QUICKSTART / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    target = tmp_path / "broken"
    shutil.copytree(BASE, target)
    tensors = load_file(target / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _row(evaluate: ModuleType, name: str, *losses: float) -> object:
    return evaluate.Row(name, dict(zip(evaluate.TEXTS, losses, strict=True)))


def test_the_loss_of_a_model_that_knows_nothing_is_that_of_guessing(evaluate: ModuleType) -> None:
    model = evaluate.load_strictly(BASE)
    with torch.inference_mode():
        model.lm_head.weight.zero_()
        loss = evaluate.mean_loss(model, torch.arange(512).view(2, 256))
    assert loss == pytest.approx(
        math.log(json.loads((BASE / "config.json").read_text())["vocab_size"]), abs=1e-5
    )


@pytest.mark.slow
def test_the_base_has_the_loss_that_its_makers_measured(evaluate: ModuleType) -> None:
    row = evaluate.measure("base", BASE)
    assert row.losses == pytest.approx({"code": 3.20775, "English": 3.17429, "French": 2.81668}, abs=6e-4)
    assert row.mean == pytest.approx(3.06624, abs=6e-4)


def test_a_checkpoint_that_lacks_a_tensor_is_not_measured(evaluate: ModuleType, broken: Path) -> None:
    with pytest.raises(ValueError, match=r"missing_keys.*up_proj"):
        evaluate.load_strictly(broken)


@pytest.mark.parametrize(("mean", "won", "said"), [(1.9, True, "beats every"), (2.0, False, "does NOT beat")])
def test_the_verdict_compares_with_the_best_parent(
    evaluate: ModuleType, mean: float, won: bool, said: str
) -> None:
    parents = [_row(evaluate, "weak", 3.0, 3.0, 3.0), _row(evaluate, "strong", 2.0, 2.0, 2.0)]
    verdict, sentence = evaluate.verdict(parents, _row(evaluate, "merged", mean, mean, mean))
    assert verdict is won
    assert said in sentence
    assert "strong" in sentence
