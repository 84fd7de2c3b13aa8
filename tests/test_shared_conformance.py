"""The conformance pack: every recipe, and every recipe that must be refused.

The recipes run in this process; the pack's own comparator then judges all of them in one subprocess each way.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

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
    verdicts,
)
from safetensors.torch import load_file

# Known without the fixture: parameters are collected before fixtures exist.
PACK = Path(__file__).resolve().parents[2] / "shared" / "conformance"

WRITES_BEFORE_REFUSING = {"nan-weights"}
"""What only the weights can tell is found while they are merged, so a staging directory may be left."""

JUDGE_BAD = """
import importlib.util, json, pathlib, sys
pack, logs = map(pathlib.Path, sys.argv[1:])
spec = importlib.util.spec_from_file_location("compare", pack / "compare.py")
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)
for log in sorted(logs.glob("*.json")):
    case = json.loads(log.read_text())
    report = compare.judge_bad(str(pack / "bad" / log.stem), case["out"], case["code"], case["text"])
    folders = [path for path in pathlib.Path(case["out"]).parent.rglob("*") if path.is_dir()]
    fails = report.fails + [f"{path} looks complete" for path in folders if compare.looks_complete(str(path))]
    print("FAIL" if fails else "PASS", f"{log.stem}:", "; ".join(fails), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A bad recipe that was run, what it left and what the pack's judge says."""

    outcome: Outcome
    """How the command ended."""
    left: tuple[str, ...]
    """Every path written, relative to a folder that was empty before."""
    verdict: str
    """``PASS ...`` or ``FAIL ...``."""


@pytest.fixture(scope="module")
def merges(shared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Merge]:
    """Every good recipe, run and judged."""
    return run_recipes(shared_root / "conformance", tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="module")
def refusals(shared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    """Every bad recipe, run and judged."""
    pack, place = shared_root / "conformance", tmp_path_factory.mktemp("bad")
    logs = place / "logs"
    logs.mkdir()
    found: dict[str, tuple[Outcome, tuple[str, ...]]] = {}
    for name in bad_names(pack):
        folder = place / name
        folder.mkdir()
        outcome = submit_inline(f"bad/{name}/recipe.yml", folder / "out", pack)
        found[name] = outcome, tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
        case = {"out": str(folder / "out"), "code": outcome.code, "text": outcome.text}
        (logs / f"{name}.json").write_text(json.dumps(case))
    said = verdicts([sys.executable, "-c", JUDGE_BAD, str(pack), str(logs)])
    return {name: Refusal(*seen, said.get(name, "")) for name, seen in found.items()}


@pytest.mark.usefixtures("shared_root")
def test_the_pack_is_there_and_every_recipe_of_which_something_is_known() -> None:
    assert {*EXPLICIT, *DIFFERS, *WEIGHTS_ONLY} < set(recipe_names(PACK))
    assert len(recipe_names(PACK)) == 52
    assert len(bad_names(PACK)) == 17


@pytest.mark.parametrize("name", recipe_names(PACK))
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
    assert refusal.verdict.startswith("PASS"), f"{refusal.verdict}\n{refusal.outcome.text}"
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
