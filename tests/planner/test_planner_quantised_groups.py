"""What an inspection tells of quantised tensors: format, blocks, scales and bits, and what is amiss."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
from kits.packed_headers import FP8, GOOD, X, f8, f32
from kits.plan_maker import Specs, header_checkpoint

from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.dtypes import DType
from raymerge.planner.inspection import inspect_checkpoint, quantised_groups


def _opened(root: Path, specs: Specs, table: Mapping[str, Any]) -> Checkpoint:
    return open_checkpoint(
        header_checkpoint(root, specs, {"model_type": "llama", "quantization_config": table}), "a model"
    )


@pytest.mark.parametrize("kind", GOOD)
def test_every_layout_that_is_read_is_one_line(kind: str, tmp_path: Path) -> None:
    specs, table, (form, shape, block) = GOOD[kind]
    (group,), faults = quantised_groups(_opened(tmp_path / "a", specs, table))
    assert faults == ()
    assert (group.name, group.tensors) == (form.word, len(specs))
    assert group.nbytes == sum(dtype.nbytes(prod(size)) for dtype, size in specs.values())
    assert group.bits_per_weight == pytest.approx(group.nbytes * 8 / prod(shape), abs=1e-4)
    assert group.block is not None
    wanted = zip(group.block, block, shape[-2:], strict=True)
    assert all(said == have or (said == 0 and have == whole) for said, have, whole in wanted)
    assert group.scales in {dtype.value for dtype, _ in specs.values()}


def test_ways_of_storing_are_lines_of_their_own_and_the_largest_is_first(tmp_path: Path) -> None:
    specs: Specs = {
        "a.weight": f8(256, 256),
        "a.weight_scale_inv": f32(2, 2),
        "b.weight": f8(256, 512),
        "b.weight_scale_inv": (DType.F8_E8M0, (2, 4)),
        "c.weight": f8(512, 256),
        "c.weight_scale_inv": f32(4, 2),
        "d.weight": (DType.I8, (4, 4)),
        "d.weight_means": (DType.BF16, (4,)),
    }
    groups, _ = quantised_groups(_opened(tmp_path / "a", specs, FP8))
    assert [(each.name, each.block, each.scales, each.power_of_two, each.tensors) for each in groups] == [
        ("fp8_block", (128, 128), "F32", False, 4),
        ("fp8_block", (128, 128), "F8_E8M0", True, 2),
        ("I8 codes", None, "", False, 2),
    ]
    assert groups[-1].bits_per_weight is None


def test_what_is_amiss_is_a_note_with_its_remedy(tmp_path: Path) -> None:
    found = inspect_checkpoint(_opened(tmp_path / "a", {f"{X}.weight": f8(256, 256)}, FP8))
    (note,) = found.notes
    assert f"{X}.weight F8_E4M3[256, 256]" in note
    assert "is codes without scales: there is no" in note
    assert note.endswith("or use one that is converted to bfloat16.")
    assert [group.block for group in found.quantised] == [None]
