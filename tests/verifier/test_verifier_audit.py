"""Audits of numbers: what is computed anew, also of codes, and compared."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash
import yaml
from kits.adapter_maker import tiny_lora
from kits.chains import documents
from kits.checkpoint_maker import TOKENIZER_FILES, llama_config, read_tensors, tiny_llama, write_checkpoint
from kits.codec_reference import reference_decode
from kits.marks import one_in
from kits.merge_cases import Family, make_family, merge, recipes
from kits.merges import make_models
from kits.quantised_models import deepseek_v3, gpt_oss, kimi_k2_thinking
from kits.recipe_maker import linear
from kits.tensor_scaled_models import fp8_llama, nvfp4_llama
from numpy.typing import NDArray
from safetensors.torch import load_file

from raymerge.api import AuditOptions, AuditVerdict, RunOptions, audit, submit
from raymerge.checkpoints.quantisation.block_codec import StoredScales, store_scales
from raymerge.checkpoints.quantisation.encoding import Format, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of, formats
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_TENSOR
from raymerge.dtypes import DType
from raymerge.errors import OptionError
from raymerge.methods import keep_mask, normal
from raymerge.methods.reference import (
    RankThreshold,
    element_numbers,
    magnitudes_of_ranks,
    normal_numbers,
    number_limit,
)
from raymerge.runtime.driver import examine
from raymerge.verifier.audit import Expectation, Findings, Sampling, check_bytes
from raymerge.verifier.numbers import (
    code_elements,
    code_steps,
    coded_numbers,
    least_peaks,
    nearest_coded_distance,
    nearest_distance,
    plain_numbers,
    scale_numbers,
    spread,
    zero_elements,
)
from raymerge.verifier.stored import Blocks

EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yml"))
RECIPES = [path for path in EXAMPLES if "texts:" not in path.read_text(encoding="utf-8")]
"""Those that run models on texts are audited where that is tested."""
INLINE = RunOptions(inline=True, threads=1)
NUDGED = "model.layers.{}.mlp.down_proj.weight"


def audited(output: Path, sample: float = 1.0, **more: Any) -> AuditVerdict:
    options = more.pop("options", INLINE)
    return audit(output, AuditOptions(sample, seed=3, **more), options)


def assert_proved(verdict: AuditVerdict) -> None:
    assert not verdict.num_problems, "\n".join(map(str, verdict.problems))
    assert verdict.skipped == ()
    assert verdict.recomputed + verdict.copied + verdict.scales == verdict.tensors


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A folder in which the models that a shipped recipe names are tiny ones, as deep as it takes."""
    made: dict[int, Path] = {}

    def folder(recipe: Path) -> Path:
        layers = 6 if "layer_range" in recipe.read_text() else 1
        if layers not in made:
            made[layers] = root = tmp_path_factory.mktemp("quickstart")
            models = root / "configs" / "quickstart" / "models"
            make_models(models, ("base", "code", "english", "french"), layers=layers)
            for name, content in TOKENIZER_FILES.items():
                for each in models.iterdir():
                    (each / name).write_text(content)
        return made[layers]

    return folder


@pytest.mark.sample(4)
@pytest.mark.parametrize("recipe", one_in(3, RECIPES), ids=lambda path: path.stem)
def test_what_a_shipped_recipe_makes_is_proved(
    recipe: Path, quickstart: Callable[[Path], Path], tmp_path: Path
) -> None:
    with contextlib.chdir(quickstart(recipe)):
        merge(str(recipe), tmp_path / "out")
        verdict = audited(tmp_path / "out")
    assert_proved(verdict)
    elements = sum(t.numel() for t in read_tensors(tmp_path / "out").values())
    if verdict.recomputed == verdict.tensors:
        # Of small tensors of which sce selects a few, it may hang on rounding which.
        assert verdict.judged + verdict.open == elements
        assert verdict.open < elements / 20
    name = NUDGED.format(4 if recipe.stem == "passthrough" else 0)
    _nudge(tmp_path / "out", name)
    with contextlib.chdir(quickstart(recipe)):
        said = str(audited(tmp_path / "out").problems)
    assert f"{name}[5, 7]" in said
    assert "recomputed from the sources" in said


def _fill(root: Path, name: str) -> None:
    _put(root, name, torch.full_like(load_file(root / "model.safetensors")[name], 12345.0))


def _nudge(root: Path, name: str) -> None:
    tensor = load_file(root / "model.safetensors")[name]
    tensor.view(torch.int16)[5, 7] += 2
    _put(root, name, tensor)


def _put(root: Path, name: str, tensor: torch.Tensor) -> None:
    raw = bytearray((root / "model.safetensors").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    first, stop = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    raw[8 + length + first : 8 + length + stop] = tensor.view(torch.uint8).numpy().tobytes()
    (root / "model.safetensors").write_bytes(raw)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["linear", "nuslerp", "model_stock", "multislerp", "breadcrumbs"])
def test_other_settings_and_dtypes_are_proved(method: str, family: Family, tmp_path: Path) -> None:
    """float32 output, rows and columns, a base, noise, a scale."""
    asked = recipes(family)[method]
    if method == "breadcrumbs":
        asked = {**asked, "parameters": {"rescale": True, "normalize": True}}
    merge(asked, tmp_path / "out")
    assert_proved(audited(tmp_path / "out"))


@pytest.mark.parametrize("method", ["ties", "karcher"])
def test_inputs_with_adapters_are_proved(method: str, family: Family, tmp_path: Path) -> None:
    """What a product adds is rounded in float32, so that the order of elements is open in places."""
    tiny_lora(tmp_path / "lora", read_tensors(family.tunes[0]), 5)
    asked = recipes(family)[method]
    entry = asked["models"][0]
    first = {**entry, "model": f"{entry['model']}+{tmp_path / 'lora'}"}
    merge({**asked, "models": [first, *asked["models"][1:]]}, tmp_path / "out")
    verdict = audited(tmp_path / "out")
    assert not verdict.num_problems, "\n".join(map(str, verdict.problems))
    assert verdict.open < verdict.judged / 10


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "make", [deepseek_v3, kimi_k2_thinking, gpt_oss, fp8_llama, nvfp4_llama], ids=lambda make: make.__name__
)
def test_codes_are_proved(make: Any, tmp_path: Path) -> None:
    roots = [make(tmp_path / name, seed).root for seed, name in enumerate(("base", "one"))]
    merge(linear(*roots), tmp_path / "out")
    assert_proved(audited(tmp_path / "out", 0.05))


@pytest.mark.slow
def test_router_rows_are_told_unless_they_were_kept(
    quickstart: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = RECIPES[0].parent / "moe" / "moe-fine-grained.yml"
    recipe = yaml.safe_load(path.read_text())
    with contextlib.chdir(quickstart(path)):
        merge(recipe, tmp_path / "out")
        without = audited(tmp_path / "out", 0.1)
        merge(recipe, tmp_path / "out", RunOptions(inline=True, replace=True, keep_intermediates=True))
        kept = audited(tmp_path / "out", 0.1)
    assert not without.num_problems
    (skipped,) = without.skipped
    assert skipped.tensors == 1
    assert "--keep-intermediates" in skipped.reason
    assert "gate" in skipped.example
    assert_proved(kept)


@pytest.mark.slow
def test_results_of_other_merges_are_told_unless_they_were_kept(tmp_path: Path) -> None:
    make_models(tmp_path, layers=1)
    asked = documents(root=str(tmp_path))
    submit(asked, tmp_path / "out", INLINE)
    without = audited(tmp_path / "out")
    assert not without.num_problems
    assert sum(each.tensors for each in without.skipped) == without.tensors
    again = replace(INLINE, replace=True, keep_intermediates=True)
    submit(asked, tmp_path / "out", again)
    assert_proved(audited(tmp_path / "out"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """The mean of the models ``one`` and ``two``, and of ``one`` its attention as it is."""
    make_models(tmp_path, layers=1)
    rule = {"role": "attention", "merge_method": "passthrough", "sources": ["one"]}
    with contextlib.chdir(tmp_path):
        merge(linear("one", "two", methods=[rule]), tmp_path / "out")
        yield tmp_path


def test_a_source_that_is_gone_is_told_and_the_rest_is_audited(small: Path) -> None:
    (small / "two").rename(small / "elsewhere")
    verdict = audited(small / "out")
    assert verdict.num_problems == 1
    assert "two is not there" in str(verdict.problems[0])
    assert "--source 'two=DIRECTORY'" in verdict.problems[0].remedy
    assert verdict.recomputed == 0
    assert verdict.copied > 0
    assert sum(each.tensors for each in verdict.skipped) + verdict.copied == verdict.tensors
    assert verdict.digested == sum(t.nbytes for t in read_tensors(small / "out").values())
    assert_proved(audited(small / "out", sources={"two": str(small / "elsewhere")}))
    strange = audited(small / "out", sources={"twoo": str(small / "elsewhere")})
    assert "no source of this name" in str(strange.problems[0])


def test_what_is_left_open_is_no_proof_and_garbage_there_is_found(tmp_path: Path) -> None:
    """Sources that cancel out: float32 arithmetic says nothing of the digits of what is left."""
    make_models(tmp_path, layers=1)
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    recipe = linear(tmp_path / "one", tmp_path / "same", parameters={"normalize": False}, dtype="bfloat16")
    for entry, weight in zip(recipe["models"], (1.0, -1.0), strict=True):
        entry["parameters"] = {"weight": weight}
    merge(recipe, tmp_path / "out")
    verdict = audited(tmp_path / "out")
    assert (verdict.num_problems, verdict.judged, verdict.recomputed) == (0, 0, 0)
    assert verdict.is_by_bytes_alone
    (skipped,) = verdict.skipped
    assert skipped.tensors == verdict.tensors
    assert "leaves open" in skipped.reason
    name = NUDGED.format(0)
    _fill(tmp_path / "out", name)
    found = audited(tmp_path / "out").problems
    assert any(name in each.where and "recomputed from the sources 0" in each.what for each in found)


def test_a_source_that_was_written_to_is_told(small: Path) -> None:
    path = small / "two" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    verdict = audited(small / "out")
    assert "written to since it was merged" in str(verdict.problems[0])
    assert verdict.recomputed == 0
    # Who says that it is the source all the same is believed, and what it gives is compared.
    assert "recomputed from the sources" in str(audited(small / "out", sources={"two": "two"}).problems[0])


def test_another_file_in_the_place_of_a_source_is_told(small: Path) -> None:
    shutil.rmtree(small / "two")
    tiny_llama(small / "two", 1, layers=2)
    verdict = audited(small / "out", sources={"two": "two"})
    assert "another file than was merged" in str(verdict.problems[0])


@pytest.fixture
def in_little_memory(monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    """Less than an audit takes at least, so that small tensors are large."""
    monkeypatch.setattr(examine, "LEAST_BUDGET", 1)
    monkeypatch.setattr(examine, "_FIXED", 0)
    return RunOptions(inline=True, threads=1, memory=50_000)


def test_what_does_not_fit_the_memory_is_told(
    family: Family, tmp_path: Path, in_little_memory: RunOptions
) -> None:
    merge(recipes(family)["iso_c"], tmp_path / "out")
    verdict = audited(tmp_path / "out", options=in_little_memory)
    assert not verdict.num_problems
    assert any("give more --memory" in each.reason for each in verdict.skipped)
    assert verdict.recomputed > 0


@pytest.mark.parametrize("method", ["ties", "arcee_fusion"])
def test_statistics_of_a_tensor_are_taken_in_little_memory(
    method: str, family: Family, tmp_path: Path, in_little_memory: RunOptions
) -> None:
    merge(recipes(family)[method], tmp_path / method)
    assert_proved(audited(tmp_path / method, options=in_little_memory))


def test_a_checkpoint_of_others_cannot_be_audited(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", read_tensors(tiny_llama(tmp_path / "x", 0)), llama_config())
    verdict = audited(model)
    assert verdict.num_problems == 1
    assert "keeps no plan" in verdict.problems[0].what


@pytest.mark.parametrize("wrong", [{"sample": 0}, {"sample": 1.5}, {"seed": -1}, {"most": 0}])
def test_what_cannot_be_asked_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        AuditOptions(**wrong)


@pytest.mark.parametrize(
    ("span", "share", "unit", "most"),
    [
        ((0, 1), 0.1, 1, 5000),
        ((0, 100_000), 1.0, 1, 50_000),
        ((4096, 9000), 0.1, 1, 5000),
        ((7, 70_007), 0.001, 33, 66),
    ],
)
def test_samples_are_runs_of_the_span(span: tuple[int, int], share: float, unit: int, most: int) -> None:
    runs = list(Sampling(share, 1).runs("name", span, unit=unit, most=most))
    taken = np.concatenate([np.arange(*run) for run in runs])
    assert len(np.unique(taken)) == len(taken)
    assert span[0] <= taken.min() <= taken.max() < span[1]
    assert all((start - span[0]) % unit == 0 and 0 < stop - start <= max(unit, most) for start, stop in runs)
    if share == 1.0:
        assert len(taken) == span[1] - span[0]
    else:
        assert len(taken) <= max(share * 2 * (span[1] - span[0]), 4096, unit)
    assert runs == list(Sampling(share, 1).runs("name", span, unit=unit, most=most))


def test_another_seed_or_tensor_is_sampled_elsewhere() -> None:
    def runs(seed: int, name: str) -> list[tuple[int, int]]:
        return list(Sampling(0.01, seed).runs(name, (0, 10**8), unit=1, most=4096))

    assert len({str(runs(1, "a")), str(runs(2, "a")), str(runs(1, "b"))}) == 3


COLUMNS, WIDTH, HEIGHT, ROWS = 10, 4, 2, 6


class _Known(Blocks):
    """Blocks of ``HEIGHT`` rows and ``WIDTH`` columns of known numbers; the last of a row is narrower."""

    def __init__(self, magnitudes: NDArray[np.float32]) -> None:
        encoding = SimpleNamespace(format=FP8_BLOCK, scale_row_height=HEIGHT, block=(HEIGHT, WIDTH))
        codes = SimpleNamespace(encoding=encoding, columns=COLUMNS, width=WIDTH)
        super().__init__(cast(Any, codes))
        self._magnitudes = magnitudes

    def _rows_of(self, scale_row: int) -> NDArray[np.float32]:
        return self._magnitudes[scale_row * HEIGHT : (scale_row + 1) * HEIGHT]


def test_every_block_that_a_run_touches_has_its_largest_element_looked_at() -> None:
    order = np.random.default_rng(3).permutation(ROWS * COLUMNS)
    magnitudes = order.astype(np.float32).reshape(ROWS, COLUMNS)
    blocks = _Known(magnitudes)
    places = np.arange(magnitudes.size).reshape(ROWS, COLUMNS)
    for start in range(magnitudes.size):
        for stop in range(start + 1, magnitudes.size + 1):
            rows, columns = np.divmod(np.arange(start, stop), COLUMNS)
            touched = set(zip((rows // HEIGHT).tolist(), (columns // WIDTH).tolist(), strict=True))
            largest = set()
            for scale_row, left in touched:
                block = np.s_[
                    scale_row * HEIGHT : (scale_row + 1) * HEIGHT, left * WIDTH : (left + 1) * WIDTH
                ]
                largest.add(int(places[block].flat[magnitudes[block].argmax()]))
            assert largest <= set(blocks.peaks(start, stop))


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_copy_is_compared_to_its_end_however_it_is_read(place: int) -> None:
    content, original = bytearray(range(12)), bytes(range(12))
    wanted = Expectation("what the plan says", lambda begin, count: original[begin : begin + count])
    content[place] ^= 1
    row = SimpleNamespace(tensor="a", made_by=0, places=(("f", 0),), nbytes=12)
    output = SimpleNamespace(read=lambda _, offset, nbytes: bytes(content[offset : offset + nbytes]))
    findings = Findings(most=9)
    digests = {0: xxhash.xxh3_128_hexdigest(bytes(content))}
    check_bytes(
        cast(Any, row), cast(Any, output), digests, findings, where="here", expectation=wanted, chunk=4
    )
    (problem,) = findings.problems
    assert f"from its byte {place} on it is not what the plan says" in problem.what


TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}
CPU = torch.device("cpu")


def _values(seed: int, count: int = 4000) -> Any:
    """Numbers of all sizes, some of them on the border between two that can be stored."""
    found = np.random.default_rng(seed).normal(size=count) * np.exp2(np.arange(count) % 30 - 20.0)
    found[::7] = np.round(found[::7], 2)
    return found


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_plain_numbers_are_torchs(dtype: DType) -> None:
    stored = torch.from_numpy(_values(1)).to(TORCH[dtype])
    raw = stored.view(torch.uint8).numpy()
    assert (plain_numbers(dtype, raw) == stored.float().double().numpy()).all()


def test_float64_is_read_as_float32() -> None:
    values = torch.from_numpy(_values(2))
    found = plain_numbers(DType.F64, values.view(torch.uint8).numpy())
    assert (found == values.float().double().numpy()).all()


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_what_is_rounded_is_as_near_as_can_be(dtype: DType) -> None:
    values = _values(3)
    nearest = torch.from_numpy(values).to(TORCH[dtype]).double().numpy()
    np.testing.assert_allclose(nearest_distance(dtype, values), np.abs(nearest - values), atol=1e-300)


@pytest.mark.parametrize("form", list(formats()))
def test_codes_are_what_the_format_says(form: Format) -> None:
    quant_spec = usual_quant_spec(form, (256, 256))
    chance = np.random.default_rng(4)
    codes = chance.integers(0, 256, quant_spec.codes_nbytes(256), dtype=np.uint8)
    if form.is_fp8:
        codes[(codes & 127) == 127] = 8
    grid = (chance.random(quant_spec.scales_nbytes(256) or 1) * 60 + 30).astype(np.uint8)
    stored = grid
    if quant_spec.scale_dtype is DType.BF16:
        stored = torch.rand(len(grid) // 2 or 1).bfloat16().view(torch.uint8).numpy()
    elif quant_spec.scale_dtype is DType.F32:
        stored = torch.rand(len(grid) // 4).view(torch.uint8).numpy()
    encoding = quant_spec.encoding
    whole = torch.tensor([3.5], dtype=torch.bfloat16 if form == FP8_TENSOR else torch.float32)
    tensor_scale = whole.view(torch.uint8).numpy()
    steps = code_steps(encoding, stored, tensor_scale, rows=(0, 256), columns=256)
    zeros = by_block = packed = None
    if form.zero_points is not None:
        packed = chance.integers(0, 256, encoding.made_nbytes("zero_points", 256, 256), dtype=np.uint8)
        by_block = zero_elements(form, packed, quant_spec.grid[1])
        zeros = spread(by_block, quant_spec.block[1], 256)
    found = coded_numbers(encoding, codes, steps, by_block, columns=256)
    steps = spread(steps, quant_spec.block[1], 256)
    assert (found == reference_decode(quant_spec, codes, stored, 3.5, packed)).all()
    # What codes mean is at no distance from what codes can be, but for the rounding to float32.
    distance = nearest_coded_distance(form, found, steps, zeros)
    assert (distance <= 2.0**-20 * np.abs(steps)).all() or zeros is None
    assert (distance <= 2.0**-22 * np.abs(found)).all() or zeros is not None
    assert (nearest_coded_distance(form, found * 0 + 1e9, steps, zeros) == -1).all()


@pytest.mark.parametrize("form", list(formats()), ids=lambda form: form.name)
def test_a_scale_that_is_made_for_its_block_is_told_from_a_larger_one(form: Format) -> None:
    quant_spec = usual_quant_spec(form, (256, 256))
    sizes = torch.logspace(-3, 2, 256 * 256).view(256, 256)[:, torch.randperm(256)]
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)) * sizes
    codec, whole = codec_of(form), None
    if quant_spec.tensor_scale_dtype is not None:
        whole = codec.fresh_tensor_scale(quant_spec, codec.largest(quant_spec, values))
    made = codec.encode(quant_spec, values, StoredScales(tensor_scale=whole))
    encoding = quant_spec.encoding
    elements = code_elements(form, made.codes.numpy(), 256).reshape(256, 256)
    peaks = np.abs(elements)
    if made.zero_points is not None:
        zeros = zero_elements(form, made.zero_points.numpy(), quant_spec.grid[1])
        apart = (elements - zeros.repeat(quant_spec.block[1], 1)).reshape(*quant_spec.grid, -1)
        reach = apart.max(2).clip(min=0) - apart.min(2).clip(max=0)
        peaks = reach.repeat(quant_spec.block[1], 1)
    stored = made.scales.numpy()
    if form.tensor_scale == "only":
        assert whole is not None
        stored = store_scales(quant_spec.scale_dtype, whole).numpy()
    scales = scale_numbers(quant_spec.scale_dtype, stored)
    height, width = quant_spec.block
    peaks = peaks.reshape(256 // height, height, 256 // width, width).max((1, 3)).reshape(-1)
    least = least_peaks(encoding, scales)
    assert (peaks >= least).all()
    # With a scale of four times, codes are a quarter.
    assert (peaks / 4 < least_peaks(encoding, scales * 4)).all()


def test_chance_is_the_one_that_methods_draw_by() -> None:
    for key in (0, 1, 2**63 + 12345, 2**64 - 1):
        for start in (0, 1, 2**40 + 7):
            indices = np.arange(start, start + 1001, dtype=np.int64)
            kept = keep_mask(key, start, 1001, 0.37, CPU).numpy()
            assert ((element_numbers(key, indices) < number_limit(0.37)) == kept).all()
            drawn = normal(key, start, 1001, CPU).numpy()
            np.testing.assert_allclose(normal_numbers(key, indices), drawn, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("digits", [1, 2, 9])
def test_magnitudes_of_ranks_are_those_of_a_sort(digits: int) -> None:
    """With many equal ones, and without."""
    values = np.abs(np.round(_values(5), digits)).astype(np.float32).astype(np.float64)
    ordered, ranks = np.sort(values)[::-1], [0, 1, 37, 2000, len(values)]
    # A second kind of numbers, of which none is asked for.
    runs = [np.stack([part, part[::-1]]) for part in (values[:1000], values[1000:])]
    found, nothing = magnitudes_of_ranks(lambda: iter(runs), [ranks, []])
    assert nothing == []
    for rank, cut in zip(ranks, found, strict=True):
        if not rank:
            assert cut == RankThreshold(np.inf)
            continue
        assert cut.threshold == ordered[rank - 1]
        tied, above = int((values == cut.threshold).sum()), int((values > cut.threshold).sum())
        assert cut.limit == number_limit((rank - above) / tied)
        kept = int(cut.keeps(values, np.arange(len(values))).sum())
        assert above <= kept <= above + tied
