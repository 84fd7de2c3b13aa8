"""A method that nothing but one line of the table knows is planned, run, audited and documented."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.merge_cases import INLINE, default_recipe, make_family, merge, recipes
from kits.method_kit import kit_of
from kits.method_table import DOCUMENT, with_table

from raymerge.api import AuditOptions, audit
from raymerge.methods import (
    Access,
    BaseUse,
    Block,
    Expected,
    LogicalTensor,
    Method,
    Parameter,
    Settings,
    Takes,
    Tile,
    methods,
    table,
)
from raymerge.methods.kernel import Kernel
from raymerge.methods.reference import combination, elementwise


class _PullKernel(Kernel):
    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.require_base() + settings.number("pull") * tile.sources.mean(0)


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    return combination(block, [tensor.settings.number("pull") / tensor.num_sources] * tensor.num_sources)


TOY = Method(
    name="toy",
    summary="The base pulled towards the mean of the sources.",
    paper="-",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=_PullKernel(),
    reference=elementwise(_reference),
    parameters=(Parameter("pull", "float", "global", "How far", required=True, minimum=0.25),),
    scratch=2.0,
)
TestToy = kit_of(TOY)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_METHODS", {**methods(), "toy": TOY})


def test_a_line_of_the_table_is_all_that_a_method_needs(registered: None, tmp_path: Path) -> None:
    family = make_family(tmp_path / "family")
    assert recipes(family)["toy"] == default_recipe(family, TOY)
    merge(default_recipe(family, TOY), tmp_path / "out")
    assert not audit(tmp_path / "out", AuditOptions(1.0), INLINE).num_problems
    row = f"| `toy` | {TOY.summary} | element | required | `pull` (required) | - |"
    assert row in with_table(DOCUMENT.read_text(), methods().values())


def test_an_audit_finds_an_element_that_a_toy_method_did_not_make(registered: None, tmp_path: Path) -> None:
    merge(default_recipe(make_family(tmp_path / "family"), TOY), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    said = str(audit(tmp_path / "out", AuditOptions(1.0), INLINE).problems)
    assert "recomputed from the sources" in said
