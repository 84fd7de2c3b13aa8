"""Integers as compressed-tensors stores them: with zero points, by channel, and one to a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors
from kits.integer_models import LAYOUTS, Integers, integer_llama
from kits.merge_cases import INLINE, digests, merge
from kits.quantised_merges import changed_bytes, check_stored_alike, merge_cases, merged_values
from kits.quantised_models import QuantisedModel
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one as one_model

from raymerge.api import AuditOptions, audit
from raymerge.merge_plan import segments
from raymerge.options import RunOptions


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Integers:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def parents(layout: Integers, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    root = tmp_path_factory.mktemp("parents")
    return [integer_llama(root / name, seed, layout) for seed, name in enumerate(("base", "one", "two"))]


def _numbers(root: Path, layout: Integers, name: str) -> Any:
    return layout.read(read_tensors(root), name.removesuffix(".weight"))


@pytest.mark.sample(3)
def test_a_model_merged_with_itself_is_itself(
    layout: Integers, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """To the last byte of codes, scales, zero points and shapes, also where a matrix is made in pieces."""
    model = parents[0]
    for name in model.quantised:
        assert (_numbers(model.root, layout, name).values == model.values[name]).all()
    merge(mean_of(model, model), tmp_path / "out")
    check_stored_alike(tmp_path / "out", model.root)
    assert changed_bytes(tmp_path / "out", model.root) == set()


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_a_merge_is_the_merge_of_what_the_parents_mean(
    method: str, layout: Integers, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Each number is within half a step of the exact one, as an audit finds too."""
    recipe, count, expected = merge_cases(parents)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    assert not audit(tmp_path / "out", AuditOptions(1.0), INLINE).problems
    for name, outcomes in merged_values(parents[:count], expected).items():
        if name in parents[0].quantised:
            have = _numbers(tmp_path / "out", layout, name)
            errors = np.abs(outcomes - have.values).min(0)
            # Of symmetric codes there is one more below 0 than above.
            most = np.where(np.abs(have.values) < have.limits, 0.5, 0.55)
            assert (errors <= have.steps * most + 1e-7).all(), name


def test_cuts_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither segments nor threads: matrices are cut where rows share no zero points."""
    layout = LAYOUTS["INT4 with zero points"]
    models = [integer_llama(tmp_path / name, seed, layout) for seed, name in enumerate("ab")]
    merge(mean_of(*models), tmp_path / "one", RunOptions(inline=True, threads=1))
    monkeypatch.setattr(segments, "_segment_target", lambda _: 1)
    merge(mean_of(*models), tmp_path / "two", RunOptions(inline=True, threads=2))
    one, two = (digests(tmp_path / each) for each in ("one", "two"))
    weights = [name for name in one if name.endswith(".safetensors")]
    assert [one[name] for name in weights] == [two[name] for name in weights]


@pytest.mark.sample(3)
def test_plain_numbers_are_made_of_them(
    layout: Integers, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    model = parents[0]
    merge(one_model(model, out_format="bf16"), tmp_path / "out")
    stored = read_tensors(tmp_path / "out")
    for name in model.quantised:
        assert torch.equal(stored[name], torch.from_numpy(model.values[name]).float().bfloat16())
    assert "quantization_config" not in read_config(tmp_path / "out")


def test_other_codes_are_made_of_them(tmp_path: Path) -> None:
    model = integer_llama(tmp_path / "a", 1, Integers(4, symmetric=False, group=32), hidden=64)
    merge(one_model(model, out_format="int4"), tmp_path / "out")
    stored, table = read_tensors(tmp_path / "out"), read_config(tmp_path / "out")["quantization_config"]
    for name in model.quantised:
        have = Integers(4, symmetric=True).read(stored, name.removesuffix(".weight"))
        assert (np.abs(have.values - model.values[name]) <= have.steps * 0.55).all()
    assert not [name for name in stored if "zero_point" in name]
    assert table["config_groups"]["group_0"]["weights"]["symmetric"] is True
