"""Models in bfloat16 as they are published, with what stays in float32 and what transformers never loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.moe_maker import FAMILIES, AncestryOf, in_bfloat16
from kits.moe_reference import merged_states, slerp

import raymerge
from raymerge.errors import PlanError

INLINE = raymerge.RunOptions(inline=True)
FLOAT32 = ("deepseek_v3", "glm4_moe", "minimax_m2", "jamba", "hunyuan_v1_moe", "ernie4_5_moe", "lfm2_moe")
"""Families some of whose tensors stay in float32."""
PREDICTING = [name for name, family in FAMILIES.items() if family.prediction]


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_stays_beside_bfloat16(name: str, ancestry_of: AncestryOf, tmp_path: Path) -> None:
    """Arithmetic is float32 for all, with one rounding of what is stored in bfloat16."""
    ancestry = ancestry_of(name)
    family = ancestry.family
    roots = [in_bfloat16(p.root, family, tmp_path / str(i)) for i, p in enumerate(ancestry.parents[:2])]
    recipe = {"merge_method": "slerp", "base_model": str(roots[0]), "parameters": {"t": 0.3}}
    raymerge.submit({**recipe, "models": [{"model": str(r)} for r in roots]}, tmp_path / "out", INLINE)
    parents, found = [read_tensors(root) for root in roots], read_tensors(tmp_path / "out")
    wanted = merged_states(parents, slerp(0.3), layout=family.layout, num_experts=family.num_experts)
    _, info = family.kind.load(tmp_path / "out")
    assert not info["missing_keys"] | info["mismatched_keys"]
    kept = {key for key in found if found[key].dtype == torch.float32}
    assert kept == {key for key in found if re.search(family.float32, key)}
    assert kept
    for key, tensor in found.items():
        rtol, atol = (1e-5, 1e-6) if key in kept else (2**-8, 1e-6)
        torch.testing.assert_close(tensor.double(), wanted[key], rtol=rtol, atol=atol, msg=key)


@pytest.mark.parametrize("name", PREDICTING)
def test_what_the_kit_adds_is_what_transformers_drops(
    name: str, ancestry_of: AncestryOf, tmp_path: Path
) -> None:
    family, root = ancestry_of(name).family, ancestry_of(name).parents[0].root
    model, _ = family.kind.load(root)
    model.save_pretrained(tmp_path / "again")  # type: ignore[operator]
    lost = read_tensors(root).keys() - read_tensors(tmp_path / "again").keys()
    assert len(lost) > 3 * family.num_experts + 6
    assert all(key.startswith(f"{family.prediction}.") for key in lost)
    assert sorted(path.name for path in root.glob("*.safetensors"))[0] == "model-00001-of-000003.safetensors"


@pytest.mark.parametrize("name", PREDICTING)
def test_a_parent_that_lost_them(name: str, ancestry_of: AncestryOf, tmp_path: Path) -> None:
    """A fine-tune that transformers saved has none; the base's are kept where the recipe says so."""
    ancestry = ancestry_of(name)
    base, tuned, _ = ancestry.parents
    ancestry.model.load_state_dict(tuned.state)
    ancestry.model.save_pretrained(tmp_path / "lost")  # type: ignore[operator]
    models = [{"model": str(root), "parameters": {"weight": 0.5}} for root in (base.root, tmp_path / "lost")]
    recipe = {"merge_method": "linear", "base_model": str(base.root), "models": models}
    with pytest.raises(PlanError, match=f"lacks .* tensors(.|\n)*{re.escape(ancestry.family.prediction)}"):
        raymerge.plan(recipe).require()
    raymerge.submit({**recipe, "missing_tensors": "copy_base"}, tmp_path / "out", INLINE)
    found, kept = read_tensors(tmp_path / "out"), read_tensors(base.root)
    assert found.keys() == kept.keys()
    for key in found:
        is_lost = key.startswith(f"{ancestry.family.prediction}.")
        assert torch.equal(found[key], kept[key]) == is_lost, key
