"""A format that nothing but one line of the table knows is read, merged, written, verified and audited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.codec_kit import CodecKit
from kits.codec_reference import ELEMENTS
from kits.merge_cases import INLINE, make_family, merge
from kits.recipe_maker import linear
from safetensors.torch import save_file

from raymerge.api import AuditOptions, audit, verify
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation import formats
from raymerge.checkpoints.quantisation.block_codec import (
    BlockValues,
    Blockwise,
    Codec,
    InTorch,
    quotients,
    storable_scales,
)
from raymerge.checkpoints.quantisation.config import Declared, Scheme
from raymerge.checkpoints.quantisation.detect import QuantMethod, Search
from raymerge.checkpoints.quantisation.encoding import WHOLE, Format, QuantSpec, Reference, usual_quant_spec
from raymerge.dtypes import DType

TOY = Format(
    "toy",
    (1, WHOLE),
    code_dtype=DType.I8,
    code_bits=8,
    scale_dtypes=frozenset({DType.F32}),
    usual_scale=DType.F32,
    reference=Reference(tuple(float(code - 256 * (code > 127)) for code in range(256)), top=127.0),
    parts={"codes": "", "scales": "_scale"},
)


class _Toy(Codec):
    """Whole numbers of 8 bits, with a scale for each row."""

    in_torch: ClassVar[Blockwise] = InTorch(
        lambda codes: codes.view(torch.int8).float(),
        lambda quotients: quotients.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8),
    )

    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> torch.Tensor:
        return storable_scales(quant_spec.scale_dtype, quotients(blocks.largest, 127.0))


def _add(search: Search, codes: StoredTensor) -> None:
    scales = search.partner(codes, [f"{codes.name}_scale"])
    if scales is not None:
        search.add(codes.name, codes, scales, (), (TOY, (1, codes.shape[1]), codes.shape))


METHOD = QuantMethod(
    "toy",
    {TOY: _Toy()},
    read_table=lambda _: Declared("toy", (Scheme(TOY, None),)),
    are_codes=lambda tensor, _: tensor.dtype is DType.I8,
    add=_add,
    codes_of=lambda scale: (scale.name.removesuffix("_scale"),) if scale.name.endswith("_scale") else (),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_METHODS", (*formats._METHODS, METHOD))
    monkeypatch.setitem(ELEMENTS, TOY, np.arange(256).astype(np.int8).astype(np.float64))


class TestToy(CodecKit):
    quant_specs = (usual_quant_spec(TOY, (5, 96)),)


def _decoded(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[name].float() * tensors[f"{name}_scale"]


def _quantise(root: Path) -> Path:
    """Store the matrices of the layers of a model as codes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(root).items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scales = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor.float() / scales).round().to(torch.int8)
            tensors[f"{name}_scale"] = scales
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy"}
    (root / "config.json").write_text(json.dumps(config))
    return root


def test_a_line_of_the_table_is_all_that_a_format_needs(tmp_path: Path) -> None:
    family = make_family(tmp_path / "family")
    parents = [_quantise(family.base), _quantise(family.tunes[0])]
    merge(linear(*parents), tmp_path / "out")
    merged, sources = read_tensors(tmp_path / "out"), [read_tensors(each) for each in parents]
    assert {name: (each.dtype, each.shape) for name, each in merged.items()} == {
        name: (each.dtype, each.shape) for name, each in sources[0].items()
    }
    for name in (name for name, each in merged.items() if each.dtype is torch.int8):
        mean = (_decoded(sources[0], name) + _decoded(sources[1], name)) / 2
        assert ((_decoded(merged, name) - mean).abs() <= 0.51 * merged[f"{name}_scale"]).all()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "toy"}
    assert not verify(tmp_path / "out").problems
    assert not audit(tmp_path / "out", AuditOptions(1.0), INLINE).num_problems


def test_codes_without_scales_of_a_toy_format_are_refused(tmp_path: Path) -> None:
    parent = _quantise(make_family(tmp_path / "family").base)
    tensors = {name: each for name, each in read_tensors(parent).items() if not name.endswith("_scale")}
    save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match="is codes without scales"):
        merge(linear(parent, parent), tmp_path / "out")
