"""The scale benchmark's parts, carried out on models of a few tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import scale
from kits.deepseek_headers import HugeSize, huge_checkpoint

from raymerge.checkpoints.source import open_checkpoint

pytestmark = pytest.mark.slow

SIZE = HugeSize(layers=4, experts=3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scale")
    models = [str(huge_checkpoint(root / f"model{number}", SIZE)) for number in range(4)]
    for name, recipe in scale.recipes(models, SIZE.layers).items():
        (root / f"{name}.json").write_text(json.dumps(recipe))
    return root


def test_a_huge_model_has_the_tensors_that_its_config_counts(place: Path) -> None:
    found = open_checkpoint(place / "model0", "model0")
    dense, mixed, prediction, ends = 9 + 3, 9 + 2 + 3 + 3 * SIZE.experts, 6, 3
    assert len(found.tensors) == dense + SIZE.layers * mixed + prediction + ends
    assert len(found.files) == 1
    full = HugeSize()
    assert 140_000 < dense + full.layers * (14 + 3 * full.experts) + prediction + ends < 142_000


@pytest.mark.parametrize("name", ["linear", "gradient", "ties", "passthrough", "slices"])
def test_every_part_works_on_every_recipe(place: Path, name: str) -> None:
    timer = scale.Timer()
    facts = {part: work(timer, place, name) for part, work in scale.PARTS.items()}
    assert facts["plan"]["ops"] >= facts["plan"]["tensors"] > 90
    assert facts["send"]["sent bytes"] > 1000
    assert {"read headers", "plan", "load plan", "decode ops", "verify structure"} <= timer.steps.keys()
    assert all(wall >= 0 and busy >= 0 for wall, busy in timer.steps.values())
