"""Parents that store their experts in different ways give the bytes that they give when stored alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.moe_maker import Ancestry, AncestryOf, by_expert, fused, taken_apart

import raymerge

INLINE = raymerge.RunOptions(inline=True)
SINGLE = (
    ("mixtral", "slerp"),
    ("qwen3_moe", "ties"),
    ("deepseek_v2", "slerp"),
    ("phimoe", "ties"),
    ("jamba", "slerp"),
)
"""Published with single experts, which transformers 5 fuses when it saves its own layout; and a method."""
STACKED = (
    ("gpt_oss", "slerp"),
    ("gpt_oss", "ties"),
    ("llama4_text", "slerp"),
    ("llama4", "ties"),
    ("dbrx", "slerp"),
    ("dbrx", "ties"),
    ("granitemoe", "slerp"),
)
"""Published with experts transposed, interleaved, flattened or joined."""


def merged(root: Path, method: str, *parents: Path) -> dict[str, torch.Tensor]:
    """Two parents merged by a method that looks at whole matrices; the first is the base."""
    entries: list[dict[str, Any]] = [{"model": str(parent)} for parent in parents]
    recipe: dict[str, Any] = {"merge_method": method, "base_model": str(parents[0]), "models": entries}
    if method == "ties":
        recipe["models"] = [{**entries[1], "parameters": {"weight": 0.5, "density": 0.4}}]
    else:
        recipe["parameters"] = {"t": 0.3}
    assert raymerge.plan(recipe).problems == ()
    raymerge.submit(recipe, root, INLINE)
    return read_tensors(root)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether names and bytes are the same."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def in_memory_layout(ancestry: Ancestry, number: int, root: Path) -> Path:
    """A parent as transformers 5 saves it in its own layout."""
    return fused(ancestry.model, ancestry.parents[number].state, root)


@pytest.mark.parametrize(("name", "method"), SINGLE)
def test_single_experts_and_fused_ones(
    name: str, method: str, ancestry_of: AncestryOf, tmp_path: Path
) -> None:
    ancestry = ancestry_of(name)
    base, other = (parent.root for parent in ancestry.parents[:2])
    fused_base, fused_other = (in_memory_layout(ancestry, i, tmp_path / f"fused{i}") for i in range(2))
    assert read_tensors(fused_base).keys() != read_tensors(base).keys()
    alike = merged(tmp_path / "single", method, base, other)
    assert same(merged(tmp_path / "a", method, base, fused_other), alike)
    alike = merged(tmp_path / "fused", method, fused_base, fused_other)
    assert alike.keys() == read_tensors(fused_base).keys()
    assert same(merged(tmp_path / "b", method, fused_base, other), alike)
    (single, _), (stacked, info) = (ancestry.family.kind.load(tmp_path / n) for n in ("single", "b"))
    assert not any(info.values())
    assert same(single.state_dict(), stacked.state_dict())


@pytest.mark.parametrize(("name", "method"), STACKED)
def test_stacked_experts_and_single_ones(
    name: str, method: str, ancestry_of: AncestryOf, tmp_path: Path
) -> None:
    ancestry = ancestry_of(name)
    family, (base, other) = ancestry.family, (parent.root for parent in ancestry.parents[:2])
    single_base, single_other = (
        by_expert(root, family, tmp_path / f"single{i}") for i, root in enumerate((base, other))
    )
    alike = merged(tmp_path / "alike", method, base, other)
    assert same(merged(tmp_path / "a", method, base, single_other), alike)
    found = merged(tmp_path / "b", method, single_base, other)
    assert found.keys() == read_tensors(single_base).keys()
    assert same(found, taken_apart(alike, family))
