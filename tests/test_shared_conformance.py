"""The conformance pack: every recipe, and every recipe that must be refused.

The recipes run in this process, and the pack's own comparator judges them.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.command_line import Outcome
from kits.conformance import (
    DIFFERS,
    EXPLICIT,
    WEIGHTS_ONLY,
    Merge,
    bad_names,
    recipe_names,
    run_recipes,
    submit_inline,
)
from kits.marks import slow_but
from kits.method_kit import threads
from safetensors.torch import load_file

# Known without the fixture: parameters are collected before fixtures exist.
PACK = Path(__file__).resolve().parents[2] / "shared" / "conformance"

WRITES_BEFORE_REFUSING = {"nan-weights"}
"""What only the weights can tell is found while they are merged, so a staging directory may be left."""

SLOW = {
    "breadcrumbs-two", "karcher-three", "model-stock-three", "multislerp-three", "nearswap-pair", "ram-three",
    "linear-bin-source", "linear-three", "linear-unnormalized-bf16", "llama-tied-linear", "moe-qwen3-cheap",
    "nuslerp-pair", "passthrough-scale", "passthrough-two-models", "qwen3-modules-syntax", "slerp-bf16",
    "slerp-classic", "task-arithmetic-lambda", "ties-three-densities", "tokenizer-from-model",
    "tokenizer-union-chatml", "tokenizer-zero-embedding",
}  # fmt: skip
"""The others have each kind of method, way of choosing a gate, family, format and treatment of a tokenizer.

What each method computes is compared with the reference in ``test_shared_golden.py``, too."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A bad recipe that was run, and what it left."""

    outcome: Outcome
    left: tuple[str, ...]
    """Every path written, relative to a folder that was empty before."""
    complaints: tuple[str, ...]
    """The pack's judge's."""


@pytest.fixture(scope="module")
def merges(
    request: pytest.FixtureRequest, shared_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Merge]:
    """Every good recipe that a test of this session is about, run and judged."""
    tests = (item for item in request.session.items if isinstance(item, pytest.Function))
    asked = [
        each for each in tests if each.originalname == test_a_merge_agrees_with_the_expected_tensors.__name__
    ]
    names = [item.callspec.params["name"] for item in asked]
    return run_recipes(shared_root / "conformance", tmp_path_factory.mktemp("conformance"), names)


@pytest.fixture(scope="module")
def refusals(shared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    """Every bad recipe, run and judged."""
    pack, place = shared_root / "conformance", tmp_path_factory.mktemp("bad")
    spec = importlib.util.spec_from_file_location("compare", pack / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    compare: Any = importlib.util.module_from_spec(spec)
    with threads(1):
        spec.loader.exec_module(compare)
    found: dict[str, Refusal] = {}
    for name in bad_names(pack):
        out = place / name / "out"
        out.parent.mkdir()
        outcome = submit_inline(f"bad/{name}/recipe.yml", out, pack)
        report = compare.judge_bad(str(pack / "bad" / name), str(out), outcome.code, outcome.text)
        left = sorted(out.parent.rglob("*"))
        complete = [
            f"{path} looks complete" for path in left if path.is_dir() and compare.looks_complete(path)
        ]
        written = tuple(str(path.relative_to(out.parent)) for path in left)
        found[name] = Refusal(outcome, written, (*report.fails, *complete))
    return found


@pytest.mark.usefixtures("shared_root")
def test_the_pack_is_there_and_every_recipe_of_which_something_is_known() -> None:
    assert {*EXPLICIT, *DIFFERS, *WEIGHTS_ONLY, *SLOW} < set(recipe_names(PACK))
    assert len(recipe_names(PACK)) == 52
    assert len(bad_names(PACK)) == 17


@pytest.mark.parametrize("name", slow_but(recipe_names(PACK), *(set(recipe_names(PACK)) - SLOW)))
def test_a_merge_agrees_with_the_expected_tensors(name: str, merges: dict[str, Merge]) -> None:
    merge = merges[name]
    assert merge.outcome.code == 0, merge.outcome.text
    judged = merge.judged()
    assert judged.verdict == ("DIFFERS" if name in DIFFERS else "PASS"), judged.line()


@pytest.mark.parametrize("name", sorted(EXPLICIT))
def test_what_a_recipe_leaves_unsaid_is_refused_and_not_half_done(
    name: str, shared_root: Path, tmp_path: Path
) -> None:
    outcome = submit_inline(f"recipes/{name}.yml", tmp_path / "out", shared_root / "conformance")
    assert outcome.code == 2, outcome.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", bad_names(PACK))
def test_a_bad_recipe_is_refused_with_its_place(name: str, refusals: dict[str, Refusal]) -> None:
    refusal = refusals[name]
    assert refusal.outcome.code == 2, refusal.outcome.text
    assert refusal.complaints == (), refusal.outcome.text
    assert "Traceback" not in refusal.outcome.text


@pytest.mark.parametrize("name", bad_names(PACK))
def test_a_refusal_comes_before_the_first_byte(name: str, refusals: dict[str, Refusal]) -> None:
    left = refusals[name].left
    if name not in WRITES_BEFORE_REFUSING:
        assert left == ()
    assert "out" not in left


def test_an_expert_may_have_an_adapter(shared_root: Path, tmp_path: Path) -> None:
    pack = shared_root / "conformance"
    recipe = {"base_model": "models/llama-base", "gate_mode": "random"}
    experts = [{"source_model": f"models/llama-base{adapter}"} for adapter in ("", "+models/lora-code")]
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps({**recipe, "experts": experts}))
    outcome = submit_inline(str(path), tmp_path / "out", pack)
    assert outcome.code == 0, outcome.text
    made, base = read_tensors(tmp_path / "out"), read_tensors(pack / "models" / "llama-base")
    adapter = load_file(pack / "models" / "lora-code" / "adapter_model.safetensors")
    settings = json.loads((pack / "models" / "lora-code" / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    stored, module = "model.layers.1.block_sparse_moe.experts", "model.layers.1.mlp.down_proj"
    key, down = f"base_model.model.{module}.lora_", base[f"{module}.weight"]
    change = scale * (adapter[f"{key}B.weight"] @ adapter[f"{key}A.weight"])
    assert bool(change.any())
    assert torch.equal(made[f"{stored}.0.w2.weight"], down)
    torch.testing.assert_close(made[f"{stored}.1.w2.weight"], down + change)
    assert torch.equal(made[f"{stored}.1.w1.weight"], base["model.layers.1.mlp.gate_proj.weight"])
