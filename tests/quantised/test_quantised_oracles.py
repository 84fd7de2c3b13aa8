"""Other libraries' decoders, on what merges wrote: the numbers are those that raymerge decodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits import torchao_decoder
from kits.checkpoint_maker import TOKENIZER_FILES, read_config, read_tensors, tiny_llama, write_checkpoint
from kits.integer_models import LAYOUTS, integer_llama
from kits.merge_cases import merge
from kits.packed_headers import BLOCK, GROUP, compressed
from kits.quantised_models import deepseek_v4
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one as one_model
from safetensors.torch import load_file

# Codecs are held by a reference of their own; importing other libraries takes seconds.
pytestmark = pytest.mark.slow

FRESH = (
    *("fp8_channel", "fp8_tensor", "mxfp4", "nvfp4", "int4", "int4_channel", "int4_asymmetric"),
    *("int4_channel_asymmetric", "int8_channel", "int8_asymmetric"),
)
"""Formats that codes of plain numbers are made in, with a table of compressed-tensors."""
READ: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fp8_block": ("float-quantized", {**BLOCK, "symmetric": True}),
    "mxfp8": ("mxfp8-quantized", {**GROUP, "symmetric": True, "scale_dtype": "torch.uint8"}),
}
"""Formats that are made with tables of others, and come out with one of compressed-tensors where the parents
have it."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("plain")
    return tiny_llama(root / "a", 1, layers=1, hidden=128), tiny_llama(root / "b", 2, layers=1, hidden=128)


def _decoded(root: Path) -> dict[str, torch.Tensor]:
    """What raymerge decodes, in float32."""
    out = root.parent / f"{root.name}-decoded"
    merge(one_model(root, out_format="bf16", out_dtype="float32"), out)
    return read_tensors(out)


def _by_module(root: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The names of weights in codes, and their stored parts by what follows the module."""
    stored = read_tensors(root)
    for name in sorted(stored):
        module, _, part = name.rpartition(".")
        if part == "weight_scale":
            names = {each for each in stored if each.rpartition(".")[0] == module}
            yield f"{module}.weight", {each.rpartition(".")[2]: stored[each] for each in names}


def _check_compressed(root: Path) -> None:
    # Takes seconds to import: not for every process that collects tests.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    table = read_config(root)["quantization_config"]
    scheme = QuantizationScheme(**table["config_groups"]["group_0"])
    compressor, ours = BaseCompressor.get_value_from_registry(table["format"]), _decoded(root)
    checked = 0
    for name, parts in _by_module(root):
        if parts["weight_scale"].dtype in (torch.bfloat16, torch.float16):
            # It computes in the dtype of the scales.
            parts["weight_scale"] = parts["weight_scale"].float()
        theirs = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(theirs, ours[name].to(theirs.dtype)), name
        checked += 1
    assert checked == 7


@pytest.mark.parametrize("form", FRESH)
def test_compressed_tensors_decodes_codes_of_plain_numbers(
    form: str, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    merge(mean_of(*plain, out_format=form), tmp_path / "out")
    _check_compressed(tmp_path / "out")


@pytest.mark.parametrize("form", READ)
def test_compressed_tensors_decodes_what_has_no_table_of_its_own(
    form: str, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    word, weights = READ[form]
    for parent in plain:
        made = tmp_path / f"{parent.name}-made"
        merge(one_model(parent, out_format=form), made)
        tensors = {name.removesuffix("_inv"): tensor for name, tensor in read_tensors(made).items()}
        table = compressed(weights, format=word, ignore=["lm_head"])
        config = {**read_config(made), "quantization_config": table}
        write_checkpoint(tmp_path / parent.name, tensors, config, extra=TOKENIZER_FILES)
    merge(mean_of(tmp_path / "a", tmp_path / "b"), tmp_path / "out")
    _check_compressed(tmp_path / "out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_tensors_decodes_integers_of_every_layout(layout: str, tmp_path: Path) -> None:
    models = [integer_llama(tmp_path / name, seed, LAYOUTS[layout]) for seed, name in enumerate("ab")]
    merge(mean_of(*models), tmp_path / "out")
    _check_compressed(tmp_path / "out")


def test_torchao_decodes_what_it_has_tensors_for(plain: tuple[Path, Path], tmp_path: Path) -> None:
    """Not installed beside the others, as transformers would import it wherever it is imported."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(tmp_path / "torchao")]
    if subprocess.run([*pip, "torchao==0.18.0"], check=False).returncode:
        pytest.skip("pip reaches no index that has torchao")
    outs = []
    for form in ("fp8_block", "mxfp4", "mxfp8", "nvfp4_modelopt"):
        outs.append(tmp_path / form)
        merge(mean_of(*plain, out_format=form), outs[-1])
    outs.append(tmp_path / "v4")
    merge(mean_of(*(deepseek_v4(tmp_path / name, seed) for seed, name in enumerate("ab"))), outs[-1])
    command = [sys.executable, torchao_decoder.__file__, *map(str, outs)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path / "torchao")})
    for out in outs:
        ours, theirs = _decoded(out), load_file(out / torchao_decoder.DECODED)
        assert len(theirs) >= 7
        for name, numbers in theirs.items():
            assert torch.equal(numbers, ours[name]), name
