"""What is wrong with quantised sources is told with the tensor's name and both facts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint, write_json
from kits.merge_cases import merge
from kits.packed_headers import W4, compressed
from kits.quantised_merges import MAKERS, plain_twin
from kits.quantised_models import KIMI_TABLE, QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raymerge.api import plan
from raymerge.errors import NonFiniteError, UserError

INDEX = "model.safetensors.index.json"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"
FUSED = "model.layers.1.mlp.experts.down_proj"


def _mean(*roots: Path, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(root), "parameters": {"weight": 0.5}} for root in roots]
    return {"merge_method": "linear", "models": entries, **more}


def _file_of(root: Path, name: str) -> Path:
    index = json.loads((root / INDEX).read_text())
    return root / str(index["weight_map"][name])


def _change(root: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Put another tensor in place of one, or none."""
    path = _file_of(root, name)
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    if changed is None:
        index = json.loads((root / INDEX).read_text())
        del index["weight_map"][name]
        write_json(root / INDEX, index)
    save_file(tensors if changed is None else {**tensors, name: changed}, path, metadata={"format": "pt"})


def _with_byte(place: int, byte: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8).view(-1)[place] = byte
        return tensor

    return change


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[1] = float("nan")
    return tensor


def _start(path: Path, name: str) -> int:
    """Byte of a file at which a tensor begins."""
    with open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    begin: int = header[name]["data_offsets"][0]
    return 8 + size + begin


NOT_FINITE: dict[str, tuple[str, str, str, Callable[[torch.Tensor], torch.Tensor], int]] = {
    "a code of FP8": ("DeepSeek-V3 F32", O_PROJ, O_PROJ, _with_byte(701, 0xFF), 701),
    "a scale in F32": ("DeepSeek-V3 F32", O_PROJ, f"{O_PROJ}_scale_inv", _with_nan, 4),
    "a scale in F8_E8M0": ("DeepSeek-V3 F8_E8M0", O_PROJ, f"{O_PROJ}_scale_inv", _with_byte(1, 255), 1),
    "a scale in U8": ("DeepSeek-V3 U8", O_PROJ, f"{O_PROJ}_scale_inv", _with_byte(1, 255), 1),
    "a scale of MXFP4": ("gpt-oss", f"{FUSED}_blocks", f"{FUSED}_scales", _with_byte(70, 255), 70),
    "a scale of INT4": ("Kimi-K2-Thinking", f"{DOWN}_packed", f"{DOWN}_scale", _with_nan, 2),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_what_is_not_finite_is_refused_where_it_is(case: str, tmp_path: Path) -> None:
    """The message names the model, the output's tensor, and the first byte in the source that is at fault."""
    kind, codes, harmed, change, place = NOT_FINITE[case]
    good, bad = (MAKERS[kind](tmp_path / name, seed).root for seed, name in enumerate(("good", "bad")))
    path = _file_of(bad, harmed)
    _change(bad, harmed, change)
    where = f"holds NaN or infinity, here first at byte {_start(path, harmed) + place} of {path.name}"
    with pytest.raises(NonFiniteError, match=where) as caught:
        merge(_mean(good, bad), tmp_path / "out")
    assert str(caught.value).startswith(f"{bad}: {codes}: ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(NonFiniteError, match=where):
        merge(_mean(good, bad, dtype="bfloat16"), tmp_path / "out")


BEYOND: dict[str, tuple[str, str, tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...]]] = {
    "FP8": (
        "DeepSeek-V3 F32",
        O_PROJ,
        (
            (f"{O_PROJ}_scale_inv", lambda scale: scale.fill_(1e36)),
            (O_PROJ, lambda codes: codes.fill_(448.0)),
        ),
    ),
    "MXFP4": (
        "gpt-oss",
        FUSED,
        (
            (f"{FUSED}_scales", lambda scales: scales.fill_(254)),
            (f"{FUSED}_blocks", lambda codes: codes.fill_(0x77)),
        ),
    ),
}


@pytest.mark.parametrize("form", BEYOND)
def test_scales_that_make_numbers_beyond_float32_are_told_as_such(form: str, tmp_path: Path) -> None:
    """No code and no scale is NaN or infinite, but their products are."""
    kind, name, changes = BEYOND[form]
    bad = MAKERS[kind](tmp_path / "bad", 1).root
    for harmed, change in changes:
        _change(bad, harmed, change)
    where = f"byte {_start(_file_of(bad, harmed), harmed)} of {_file_of(bad, harmed).name}"
    what = f"{bad}: {name}: the source holds codes with scales that make numbers beyond float32"
    with pytest.raises(NonFiniteError, match=f"^{re.escape(what)}, here first at {where}"):
        merge(_mean(bad, dtype="bfloat16"), tmp_path / "out")


def test_a_merge_too_large_for_float32_is_not_blamed_on_codes(tmp_path: Path) -> None:
    models = [deepseek_v3(tmp_path / name, seed).root for seed, name in enumerate("ab")]
    for root in models:
        _change(root, f"{O_PROJ}_scale_inv", lambda scale: scale * 1e4)
    large = {"role": "attention", "layers": 1, "parameters": {"weight": 3e38, "normalize": False}}
    recipe = _mean(*models, methods=[large])
    with pytest.raises(NonFiniteError, match=r"the sources are finite, but .* do not fit F32") as caught:
        merge(recipe, tmp_path / "out")
    assert str(caught.value).startswith(f"{O_PROJ}: ")


def _said(*roots: Path) -> str:
    """What a plan of the mean has against it."""
    try:
        problems = plan(_mean(*roots)).problems
    except UserError as error:
        problems = error.problems
    assert problems
    return "\n".join(str(problem) for problem in problems)


MISSING: dict[str, tuple[Callable[[Path, int], QuantisedModel], str, str]] = {
    "FP8": (deepseek_v3, O_PROJ, f"{O_PROJ}_scale_inv"),
    "MXFP4": (gpt_oss, f"{FUSED}_blocks", f"{FUSED}_scales"),
    "INT4": (kimi_k2_thinking, f"{DOWN}_packed", f"{DOWN}_scale"),
}


@pytest.mark.parametrize("form", MISSING)
def test_codes_without_scales_and_scales_without_codes_are_refused_with_both_names(
    form: str, tmp_path: Path
) -> None:
    make, codes, scales = MISSING[form]
    good = make(tmp_path / "good", 0).root
    for stays, lost, fault in (
        (codes, scales, "is codes without scales"),
        (scales, codes, "is a scale without codes"),
    ):
        bad = make(tmp_path / fault, 1).root
        _change(bad, lost, lambda _: None)
        said = _said(good, bad)
        assert said.startswith(f"{bad}: {stays} ")
        assert fault in said
        assert lost in said


def test_a_config_of_fp8_with_weights_in_bfloat16_is_refused_with_both_facts(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "model", 1)
    bad = plain_twin(model, tmp_path / "bad").root
    table = json.loads((model.root / "config.json").read_text())["quantization_config"]
    config = json.loads((bad / "config.json").read_text())
    write_json(bad / "config.json", {**config, "quantization_config": table})
    said = _said(model.root, bad)
    assert said.startswith(f"{bad}: ")
    assert "config.json says that weights are quantised by fp8" in said
    assert "no tensor is: all are BF16, F32" in said


def test_codes_that_the_config_does_not_tell_of_are_refused_with_both_facts(tmp_path: Path) -> None:
    good, bad = (deepseek_v3(tmp_path / name, seed).root for seed, name in enumerate(("good", "bad")))
    config = json.loads((bad / "config.json").read_text())
    del config["quantization_config"]
    write_json(bad / "config.json", config)
    said = _said(good, bad)
    assert said.startswith(f"{bad}: ")
    assert "is fp8_block in blocks of 128x128, but config.json has no quantization_config" in said


def _gptq(root: Path, seed: int) -> Path:
    """A tiny Llama whose matrices are stored as GPTQ does."""
    plain = tiny_llama(root / f"plain{seed}", seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(plain).items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        module, (rows, columns) = name.removesuffix(".weight"), tensor.shape
        tensors[f"{module}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[f"{module}.qzeros"] = torch.zeros(1, rows // 8, dtype=torch.int32)
        tensors[f"{module}.scales"] = torch.ones(1, rows, dtype=torch.float16)
        tensors[f"{module}.g_idx"] = torch.zeros(columns, dtype=torch.int32)
    table = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config = {**llama_config(), "quantization_config": table}
    return write_checkpoint(root / f"gptq{seed}", tensors, config)


def test_gptq_is_refused_by_its_name_and_copied_as_it_is(tmp_path: Path) -> None:
    one, other = (_gptq(tmp_path, seed) for seed in (1, 2))
    said = _said(one, other)
    assert "tensors are quantised as gptq, which raymerge can neither combine nor convert" in said
    merge({"merge_method": "passthrough", "models": [{"model": str(one)}]}, tmp_path / "out")
    with safe_open(one / "model.safetensors", "pt") as stored:
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert found.keys() == set(stored.keys())
        assert all(torch.equal(found[name], stored.get_tensor(name)) for name in found)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("fp8", "quantization_config is 'fp8', not a table of fields"),
        ([{"quant_method": "fp8"}], "not a table of fields"),
        (
            {**KIMI_TABLE, "transform_config": {"config_groups": {"R2": {}}}, "rotated": True},
            "has rotated, which",
        ),
    ],
)
def test_a_table_that_is_not_understood_is_refused(table: Any, words: str, tmp_path: Path) -> None:
    model = kimi_k2_thinking(tmp_path / "model", 1)
    config = json.loads((model.root / "config.json").read_text())
    write_json(model.root / "config.json", {**config, "quantization_config": table})
    with pytest.raises(UserError) as caught:
        merge(_mean(model.root, model.root), tmp_path / "out")
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def _padded(root: Path, seed: int) -> Path:
    """A model with a matrix of 300 columns, packed to rows of 304 codes."""
    module, numbers = "model.layers.0.mlp.up_proj", torch.Generator().manual_seed(seed)
    tensors = dict(read_tensors(tiny_llama(root / "plain", seed)))
    rows = tensors.pop(f"{module}.weight").shape[0]
    tensors[f"{module}.weight_packed"] = torch.randint(
        -(2**31), 2**31 - 1, (rows, 38), dtype=torch.int32, generator=numbers
    )
    tensors[f"{module}.weight_scale"] = torch.ones(rows, 1, dtype=torch.bfloat16)
    tensors[f"{module}.weight_shape"] = torch.tensor([rows, 300])
    config = json.loads((root / "plain" / "config.json").read_text())
    table = compressed({**W4, "strategy": "channel", "group_size": None})
    return write_checkpoint(root / "packed", tensors, {**config, "quantization_config": table})


def test_rows_that_end_with_unused_codes_are_copied_and_not_merged(tmp_path: Path) -> None:
    one, other = (_padded(tmp_path / f"{seed}", seed) for seed in (1, 2))
    merge({"merge_method": "passthrough", "models": [{"model": str(one)}]}, tmp_path / "out")
    before, after = read_tensors(one), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    models = [{"model": str(each), "parameters": {"weight": 0.5}} for each in (one, other)]
    problems = plan({"merge_method": "linear", "models": models}).problems
    assert len(problems) == 2
    assert all("packed codes with 4 unused ones at the end of each row" in str(each) for each in problems)
