"""Faults planted in checkpoints on disk are named by a report on samples of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from kits import permuted_experts as mixtures
from safetensors.torch import load_file, save_file

import raymerge
from raymerge.verifier.observations import observations

MODELS = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "models"
Tensors = dict[str, torch.Tensor]


def problems(base: Path, *models: Path) -> list[str]:
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(base),
        "models": [{"model": str(each), "parameters": {"weight": 0.5}} for each in models],
    }
    return [each.sentence for each in observations(raymerge.report(recipe)) if each.severity == "problem"]


def changed(target: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> Path:
    """The quickstart's French model with other tensors."""
    shutil.copytree(MODELS / "french", target)
    file = target / "model.safetensors"
    save_file(dict(change(load_file(file))), file, {"format": "pt"})
    return target


def _swapped(tensors: Tensors) -> Tensors:
    places = {"1": "4", "4": "1"}
    return {
        re.sub(r"(?<=layers\.)\d+", lambda found: places.get(found[0], found[0]), name): value
        for name, value in tensors.items()
    }


def _strange(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(value.shape, generator=generator) * value.float().std()).to(value.dtype)
        if value.dim() > 1
        else value
        for name, value in tensors.items()
    }


def _shuffled(tensors: Tensors) -> Tensors:
    rows = torch.randperm(1536, generator=torch.Generator().manual_seed(1))
    return tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][rows].clone()}


FAULTS: Mapping[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "swapped": (_swapped, "Layers 1 and 4 of parent 2 (swapped) are swapped against the base"),
    "strange": (_strange, "Parent 2 (strange) does not come from the base"),
    "shuffled": (_shuffled, "1 tensor of parent 2 (shuffled) is far off"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_the_problem_that_is_named(fault: str, tmp_path: Path) -> None:
    change, sentence = FAULTS[fault]
    (found,) = problems(MODELS / "base", MODELS / "code", changed(tmp_path / fault, change))
    assert found.startswith(sentence)


# 0x7fa0 is a NaN that signals.
@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (b"\0\0", r"1\d tensors of parent 2 \(damaged\) are all zeros"),
        (b"\xff\xff", r"1\d tensors of parent 2 \(damaged\) with NaN or infinity"),
        (b"\xa0\x7f", r"1\d tensors of parent 2 \(damaged\) with NaN or infinity"),
        (b"\x20\x3d", r"Layers 4 and 5 of parent 2 \(damaged\) are far off"),
    ],
)
def test_a_damaged_end_of_a_file_is_named(number: bytes, sentence: str, tmp_path: Path) -> None:
    target = changed(tmp_path / "damaged", dict)
    file = target / "model.safetensors"
    stored = bytearray(file.read_bytes())
    numbers = len(stored) // 10
    file.write_bytes(stored[: -2 * numbers] + number * numbers)
    found = problems(MODELS / "base", MODELS / "code", target)
    assert re.match(sentence, found[0]), found


def test_the_quickstart_is_sound() -> None:
    assert problems(MODELS / "base", *(MODELS / name for name in ("code", "english", "french"))) == []


@pytest.mark.parametrize("family", [mixtures.QWEN, mixtures.GPT_OSS], ids=lambda family: str(family.name))
def test_experts_in_another_order_are_named_in_every_layout(family: mixtures.Family, tmp_path: Path) -> None:
    base = mixtures.make_model(family, 1)
    models = {
        "base": base,
        "one": mixtures.noisy(base, 2, 0.02),
        "two": mixtures.moved(mixtures.noisy(base, 3, 0.02), family, 5),
    }
    places = [mixtures.store(tmp_path / name, model, family) for name, model in models.items()]
    (found,) = problems(*places)
    assert found.startswith("The experts of parent 2 (two) are in another order than those of the base")


def test_the_base_named_as_a_parent_is_told() -> None:
    models = [{"model": str(MODELS / name), "parameters": {"weight": 0.5}} for name in ("code", "base")]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(MODELS / "base"), "models": models}
    (first, *_) = observations(raymerge.report(recipe))
    assert "is the base itself" in first.sentence
