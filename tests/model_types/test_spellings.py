"""Models in the Hub's names and in those of transformers' modules: they meet, and the base's names come out.

transformers is the judge: it writes both, and reads the merged model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.marks import slow_but
from kits.merges import mean_of, merge_here
from kits.model_parents import assert_same_state
from kits.model_types import ModelType, perturb
from kits.model_types_decoders import DECODERS
from kits.model_types_others import OTHERS
from kits.model_types_renamed import RENAMED

import raymerge
from raymerge.architectures.rules import load_rules
from raymerge.verifier.compare import Status

KINDS: Mapping[str, ModelType] = {kind.name: kind for kind in (*DECODERS, *OTHERS, *RENAMED)}
OWN_NAMES = tuple(kind.name for kind in RENAMED)
"""Families that are here for their names; beside them those that other tests merge as published."""
SPELT_TWICE = (
    *OWN_NAMES,
    *("gpt_neox", "qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "deepseek_v2", "deepseek_v3", "olmoe"),
    *("flex_olmo", "granitemoe", "granitemoehybrid", "glm4_moe", "lfm2_moe", "phimoe", "minimax"),
    *("minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe", "jamba", "vit", "beit", "dinov2", "llava"),
    *("llava_next", "qwen2_vl", "qwen2_5_vl", "gemma3", "paligemma", "mistral3", "internvl", "mllama"),
    "qwen2_audio",
)
CASES = [(name, is_published) for name in SPELT_TWICE for is_published in (True, False)]


def test_the_page_lists_the_families_that_are_tried_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    table = page.partition("## Two spellings")[2].partition("## Loaders")[0].split("|---|")[1]
    assert set(re.findall(r"`(\w+)`", table.partition("\n\n")[0])) == set(SPELT_TWICE)


def _save(model: Any, root: Path, *, published: bool) -> Path:
    model.save_pretrained(root, save_original_format=published)
    return root


def _set_tables(model: Any) -> None:
    """Other experts for other tokens, where a table gives them."""
    generator = torch.Generator().manual_seed(3)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.randint(model.config.n_routed_experts, table.shape, generator=generator))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "is_base_published"), slow_but(CASES, ("glm5_next", True), ("kimi_k25", False))
)
def test_a_base_and_a_finetune_in_the_other_spelling(
    name: str, is_base_published: bool, tmp_path: Path
) -> None:
    kind = KINDS[name]
    model: Any = kind.build(1)
    _set_tables(model)
    base = _save(model, tmp_path / "base", published=is_base_published)
    same = _save(model, tmp_path / "same", published=not is_base_published)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tuned = _save(perturb(model, 2), tmp_path / "tuned", published=not is_base_published)
    stored, other = read_tensors(base), read_tensors(same)
    assert stored.keys() != other.keys()
    if name in OWN_NAMES:
        assert not list(_rules_without_effect(kind.name, {*stored, *other}))
    for key, value in merge_here(mean_of(base, same), tmp_path / "self").items():
        assert torch.equal(value, stored[key]), key
    differing = [each for each in raymerge.diff(base, same).tensors if each.status is not Status.SAME_NUMBERS]
    assert not [each for each in differing if each.status is Status.DIFFERENT or "tid2eid" in each.name]
    merged = merge_here(mean_of(base, tuned), tmp_path / "out")
    assert merged.keys() == stored.keys()
    loaded, info = kind.load(tmp_path / "out")
    assert info == kind.load(base)[1]
    mean = {
        key: (state[key] + value) / 2 if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    assert_same_state(loaded.state_dict(), mean)


def _rules_without_effect(model_type: str, names: Iterable[str]) -> Iterator[str]:
    """Patterns of the family's renames that no name of either spelling has, nor the path of a block."""
    paths = {name[: end + 1] for name in names for end, letter in enumerate(name) if letter == "."}
    current = {*names, *paths}
    general = load_rules(None).renames
    for pattern, replacement in load_rules(model_type).renames:
        if (pattern, replacement) not in general and not any(map(pattern.search, current)):
            yield pattern.pattern
        current = {pattern.sub(replacement, name) for name in current}
