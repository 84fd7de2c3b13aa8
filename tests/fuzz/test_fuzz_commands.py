"""The command line on input that was changed at random: an exit code that says what to do, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.command_line import run_command
from kits.hostile import bounded, changed_values, ends
from kits.marks import one_in, slow_but

from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.schema import ModelEntry, ModuleEntry, Recipe, SliceSource

CONFIGS = Path(__file__).parents[2] / "configs" / "recipes"
EXPERTS = {"experts": {"keep": [0]}, "base_model": "base", "router": "base", "seed": 3}
FIELDS = sorted(
    {
        *("filter", "value", "glob", "role", "layers", "lora", "path", "revision", "density", "tokens"),
        "source",
        *(name for kind in (Recipe, MoeRecipe, ExpertSetRecipe) for name in kind.model_fields),
        *(name for kind in (ModelEntry, ModuleEntry, SliceSource) for name in kind.model_fields),
    }
)


def _samples() -> list[Any]:
    """The recipes that come with raymerge, of models that lie in the folder."""
    paths = [
        path
        for pattern in ("*.yml", "moe/*.yml", "sweeps/*.yml", "searches/*.yml")
        for path in sorted(CONFIGS.glob(pattern))
    ]
    texts = (path.read_text(encoding="utf-8").replace("configs/quickstart/models/", "") for path in paths)
    return [*(document for text in texts for document in yaml.safe_load_all(text)), EXPERTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    for seed, name in enumerate(("base", "code", "english", "french")):
        tiny_llama(root / name, seed, layers=2, hidden=8, vocab=8)
    return root


def _ends_well(folder: Path, *args: str) -> int:
    with ends():
        found = run_command(*args, cwd=folder)
    assert found.code in (0, 2, 3), found.text
    assert "Traceback" not in found.text
    assert "\x1b" not in found.text
    assert found.code == 0 or found.text.strip()
    return found.code


@pytest.mark.parametrize("examples", slow_but([10, 60], 10))
def test_plans_of_changed_recipes(folder: Path, examples: int) -> None:
    @bounded(examples)
    @given(
        st.sampled_from(_samples()).flatmap(lambda sample: changed_values(sample, most=2, names=FIELDS)),
        st.booleans(),
    )
    def check(recipe: Any, as_json: bool) -> None:
        text = yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False)
        (folder / "recipe.yml").write_text(text, encoding="utf-8", errors="surrogatepass")
        _ends_well(folder, "plan", "recipe.yml", *(["--json"] if as_json else []))

    check()


QUANTISED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MIXTURE = {"num_experts": 4, "model_type": "qwen3_moe"}


@pytest.mark.parametrize("examples", slow_but([6, 40], 6))
def test_inspection_and_verification_of_changed_configs(folder: Path, examples: int, tmp_path: Path) -> None:
    sample = json.loads((folder / "base" / "config.json").read_text())
    root = write_checkpoint(tmp_path / "changed", read_tensors(folder / "base"), sample)

    @bounded(examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        more = data.draw(st.sampled_from([{}, {"text_config": sample}, QUANTISED, MIXTURE]))
        changed = data.draw(changed_values({**sample, **more}))
        (root / "config.json").write_text(json.dumps(changed), encoding="utf-8", errors="surrogatepass")
        for verb in ("inspect", "verify"):
            _ends_well(tmp_path, verb, "changed", *data.draw(st.sampled_from([[], ["--json"]])))

    check()


NAMES = (
    *("\x1b[31mred", "[bold]x[/]", "[/]", "[link=http://x]y", "x\ny", "x\ty", "\u202e", "\ud83d\ude00"),
    "a" * 5000,
    *("model.layers.99999999999999999999.mlp.up_proj.weight", "model.layers.-1.x", ":smile:", "%s{0}{x}"),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_names_cannot_steer_the_terminal(folder: Path, tmp_path: Path, name: str) -> None:
    tensors = read_tensors(folder / "base")
    config = json.loads((folder / "base" / "config.json").read_text())
    strange = name.encode("utf-16", "surrogatepass").decode("utf-16")
    write_checkpoint(tmp_path / "strange", {**tensors, strange: tensors["model.norm.weight"]}, config)
    (tmp_path / "plain").symlink_to(folder / "base")
    recipe = {
        "merge_method": "linear",
        "models": [{"model": "plain"}, {"model": "strange"}],
        "parameters": {"weight": 1},
    }
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    for args in (["inspect", "strange"], ["plan", "recipe.yml"]):
        _ends_well(tmp_path, *args)
