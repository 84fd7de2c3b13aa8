"""Tiles of codes in pieces: the same numbers, from whole bands; and what is made in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.segment_bench import make_bench

from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec, encoding_of, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4_ROWS
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError
from raymerge.execute import encoding, lane
from raymerge.execute.decoding import numbers
from raymerge.execute.lane import pieces
from raymerge.execute.ops import JobPart, RawCodes, RowJob
from raymerge.execute.tiles import TileJob
from raymerge.merge_plan.expressions import Read, Scales, conversion_expression

ROWS, COLUMNS = 300, 384
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
NAME = "model.layers.0.mlp.up_proj.weight"
TABLE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _tile(packing: QuantSpec, codes_nbytes: int, *, piece: int) -> TileJob:
    """A tile that is a whole matrix, read from the beginning of a file."""
    dtype = DType.F8_E4M3 if packing.format.is_fp8 else DType.F4
    scales = Scales(encoding_of(packing), packing.columns, "f", 1 << 20, packing.scales_nbytes(packing.rows))
    read = Read(0, 0, "f", 0, codes_nbytes, dtype, None, scales=scales)
    part = JobPart("t", packing.shape, None, (read,))
    count = packing.rows * packing.columns
    row = RowJob(0, "t", True, conversion_expression(DType.F32), 0, count, True, (part,), (("f", 0),))
    return TileJob(row, 0, count, piece)


@pytest.mark.parametrize("form", [FP8_BLOCK, FP8_CHANNEL, INT4, MXFP4_ROWS])
@pytest.mark.parametrize("bands", [1, 2, 100])
def test_pieces_are_decoded_as_the_whole(form: Format, bands: int) -> None:
    packing = usual_quant_spec(form, (ROWS, COLUMNS))
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    codes, scales = codec_of(form).encode(packing, values)
    tile = _tile(packing, codes.numel(), piece=bands * packing.band * COLUMNS)
    source = tile.row.parts[0].inputs[0]
    assert isinstance(source, Read)
    whole = RawCodes(codes, scales, torch.empty(0, dtype=torch.uint8))
    found, starts = [], []
    for piece, (raw,) in pieces(tile, (whole,)):
        assert isinstance(raw, RawCodes)
        assert not piece.piece
        starts.append((piece.start, piece.count))
        found.append(numbers(raw, source))
    assert torch.equal(torch.cat(found), numbers(whole, source))
    assert [start for start, _ in starts] == list(range(0, ROWS * COLUMNS, tile.piece))
    assert sum(count for _, count in starts) == tile.count


def _model(root: Path, seed: int, *, nan_at: tuple[int, int] | None = None) -> Path:
    packing = usual_quant_spec(FP8_BLOCK, (ROWS, COLUMNS))
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.02
    codes, scales = codec_of(FP8_BLOCK).encode(packing, values)
    if nan_at is not None:
        codes.view(ROWS, COLUMNS)[nan_at] = 0x7F
    tensors = {
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
        NAME: codes.view(torch.float8_e4m3fn).view(ROWS, COLUMNS),
        f"{NAME}_scale_inv": scales.view(torch.float32).view(packing.grid),
    }
    return write_checkpoint(root, tensors, {**CONFIG, "quantization_config": TABLE})


def _merge(method: str, *models: Path, **more: Any) -> dict[str, Any]:
    each = {"parameters": {"weight": 0.5}}
    return {"merge_method": method, "models": [{"model": str(m), **each} for m in models], **more}


def _made(recipe: Mapping[str, Any], place: Path, budget: int) -> dict[str, bytes]:
    bench = make_bench(recipe, place, budget=budget)
    for segment in bench.segments:
        bench.runner.run(segment)
    return dict(bench.written())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of FP8, and one of bfloat16."""
    root = tmp_path_factory.mktemp("bands")
    plain = {"model.norm.weight": torch.ones(64).bfloat16(), NAME: torch.ones(ROWS, COLUMNS).bfloat16()}
    return {
        "one": _model(root / "one", 1),
        "two": _model(root / "two", 2),
        "plain": write_checkpoint(root / "plain", plain, CONFIG),
    }


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each tile was made in one call."""
    found: list[bool] = []
    original = encoding.coded_sum

    def noting(*args: Any) -> encoding.CodedSum | None:
        made = original(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(lane, "coded_sum", noting)
    return found


def test_bytes_are_the_same_in_one_call_and_in_pieces(
    models: Mapping[str, Path], tmp_path: Path, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _merge("linear", models["one"], models["two"])
    found = [_made(recipe, tmp_path / f"{budget}", budget << 20) for budget in (16, 256)]
    assert calls
    assert all(calls)
    monkeypatch.setattr(lane, "coded_sum", lambda *_: None)
    found += [_made(recipe, tmp_path / f"pieces-{budget}", budget << 20) for budget in (16, 256)]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("method", "others", "more"),
    [
        ("linear", ("plain",), {}),
        ("linear", ("two",), {"out_format": "bf16"}),
        ("linear", ("two",), {"parameters": {"normalize": False}}),
        ("multislerp", ("two",), {}),
    ],
)
def test_what_is_no_mean_of_codes_is_made_in_pieces(
    method: str,
    others: tuple[str, ...],
    more: Mapping[str, Any],
    models: Mapping[str, Path],
    tmp_path: Path,
    calls: list[bool],
) -> None:
    recipe = _merge(method, models["one"], *(models[name] for name in others), **more)
    _made(recipe, tmp_path, 16 << 20)
    assert calls
    assert not any(calls)


def test_nan_in_codes_is_named(models: Mapping[str, Path], tmp_path: Path) -> None:
    broken = _model(tmp_path / "broken", 3, nan_at=(299, 5))
    with pytest.raises(NonFiniteError, match=rf"{NAME}.*NaN"):
        _made(_merge("linear", models["one"], broken), tmp_path / "out", 16 << 20)
