"""Merges on the simulated GPU give the processor's bytes: methods, formats, mixtures, adapters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from golden.digests import own_cases
from kits.adapter_maker import lora_config, tiny_lora, write_adapter
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.expert_models import sparse, write_model
from kits.joint_merges import elsewhere, joint_work, made_apart, made_together, planned, written
from kits.marks import slow_but
from kits.merge_cases import digests, make_family, receipts_of, recipes
from kits.quantised_merges import entries
from kits.quantised_models import QuantisedModel, gpt_oss, kimi_k2_thinking
from kits.segment_bench import Bench, make_bench
from kits.simulated_gpu import simulated_gpu, without_gpu
from kits.tensor_scaled_models import fp8_llama, nvfp4_llama
from safetensors.torch import load_file

import raymerge
from raymerge.events import Planned
from raymerge.execute.receipts import Receipt
from raymerge.methods import methods
from raymerge.options import RunOptions

pytestmark = without_gpu

Recipe = Mapping[str, Any]


def _segments(bench: Bench) -> dict[str, bytes]:
    notes = {bench.runner.run(segment).note for segment in bench.segments}
    assert notes == {""}
    return dict(bench.written())


def _check_segments(recipe: Recipe, root: Path, seeds: range, **settings: Any) -> None:
    expected = _segments(make_bench(recipe, root / "cpu", **settings))
    for seed in seeds:
        with simulated_gpu(seed) as gpu:
            bench = make_bench(recipe, root / f"{seed}", device="cuda", **settings)
            # What it is warmed up and checked with is no part of it.
            bench.runner.on_device(lambda *_: cast("Receipt", None))
            gpu.peak_bytes = 0
            made = _segments(bench)
        assert made == expected, seed
        assert 0 < gpu.peak_bytes <= bench.projection.gpu_peak


def _check_merge(recipe: Recipe | str, root: Path, seed: int = 0, **options: Any) -> None:
    raymerge.submit(recipe, root / "cpu", RunOptions(inline=True, threads=1, device="cpu"))
    with simulated_gpu(seed) as gpu:
        options, events = RunOptions(inline=True, threads=1, device="cuda"), []
        raymerge.submit(recipe, root / "gpu", options, on_event=events.append)
    planned = max(each.projected_peak for each in events if isinstance(each, Planned))
    assert 0 < gpu.peak_bytes <= planned
    assert _files(root / "gpu") == _files(root / "cpu")
    # No segment was made on the processor after all.
    assert not any(each["note"] for each in receipts_of(root / "gpu"))


def _files(output: Path) -> dict[str, str]:
    """But for the records, which name the device."""
    return {name: digest for name, digest in digests(output).items() if not name.startswith("raymerge/")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_but(sorted(methods()), "ties", "sce", "slerp", "iso_c", "della"))
def test_every_method(name: str, tmp_path: Path) -> None:
    """That its kernels do, with settings of all kinds, is in the kit of methods."""
    family = make_family(tmp_path / "models", layers=1)
    _check_segments(recipes(family)[name], tmp_path, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_in_many_tiles(name: str, tmp_path: Path) -> None:
    family = make_family(tmp_path / "models", hidden=256, layers=1)
    _check_segments(recipes(family)[name], tmp_path, range(3), lanes=4)


MAKERS: Mapping[str, Callable[[Path, int], QuantisedModel]] = {
    "packed int4": kimi_k2_thinking,
    "MXFP4": gpt_oss,
    "FP8": fp8_llama,
    "NVFP4": nvfp4_llama,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", MAKERS)
def test_formats_in_and_out(form: str, tmp_path: Path) -> None:
    models = [MAKERS[form](tmp_path / f"{seed}", seed) for seed in range(2)]
    merge = {"merge_method": "linear", "models": entries(models, (0.3, 0.7))}
    _check_segments(merge, tmp_path / "same", range(1, 2))
    _check_segments({**merge, "out_format": "bf16"}, tmp_path / "bf16", range(2, 3))


def test_a_mixture_is_built_with_adapters(tmp_path: Path) -> None:
    """Its experts are a model with what a LoRA adds, and the same with the magnitudes of a DoRA."""
    base = tiny_llama(tmp_path / "base", 0, dtype=torch.float32, scale=0.3)
    lora = tiny_lora(tmp_path / "lora", read_tensors(base), 1)
    sources = [f"{base}+{lora}", f"{base}+{_as_dora(lora, read_tensors(base), tmp_path / 'dora')}"]
    experts = [{"source_model": each} for each in sources]
    recipe = {"base_model": str(base), "gate_mode": "random", "experts": experts}
    _check_merge(recipe, tmp_path, seed=1)


def _as_dora(lora: Path, base: Mapping[str, torch.Tensor], root: Path) -> Path:
    tensors = load_file(lora / "adapter_model.safetensors")
    for name in [each for each in tensors if each.endswith("lora_B.weight")]:
        module = name.removesuffix(".lora_B.weight")
        lengths = base[module.removeprefix("base_model.model.") + ".weight"].norm(dim=1)
        tensors[f"{module}.lora_magnitude_vector"] = lengths * 1.1
    config = json.loads((lora / "adapter_config.json").read_text())
    return write_adapter(root, tensors, lora_config(use_dora=True, target_modules=config["target_modules"]))


def test_experts_are_left_out_and_merged(tmp_path: Path) -> None:
    write_model(tmp_path / "mixture", sparse("mixtral"), 1)
    for seed, change in enumerate(({"keep": [0, 2]}, {"merge": [[0, 1], [2, 3]]})):
        recipe = {"base_model": str(tmp_path / "mixture"), "experts": change}
        _check_merge(recipe, tmp_path / f"{seed}", seed)


@pytest.mark.slow
def test_all_golden_merges(tmp_path: Path) -> None:
    for seed, (name, recipe, place) in enumerate(own_cases(tmp_path / "in")):
        with contextlib.chdir(place):
            _check_merge(recipe, tmp_path / name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["ties", "linear", "slerp", "della", "iso_c"], "ties"))
def test_several_plans_are_made_of_one_read(name: str, tmp_path: Path) -> None:
    recipe = recipes(make_family(tmp_path / "family", hidden=256))[name]
    seeds = [{**recipe, "seed": seed} for seed in (1, 2)]
    _check_together([*seeds, recipe], tmp_path)


def test_several_plans_of_codes_are_made_of_one_read(tmp_path: Path) -> None:
    parents = [gpt_oss(tmp_path / str(seed), seed) for seed in (1, 2)]
    weights = ((0.5, 0.5), (0.2, 0.8))
    _check_together(
        [{"merge_method": "linear", "models": entries(parents, each)} for each in weights], tmp_path
    )


def _check_together(sweep: list[dict[str, Any]], root: Path) -> None:
    works = [planned(each, root / f"apart{number}", 64 << 20) for number, each in enumerate(sweep)]
    expected = [made_apart(each) for each in works]
    for seed in range(2):
        mine = [elsewhere(each, root / f"gpu{seed}-{number}") for number, each in enumerate(works)]
        together = joint_work(mine)
        with simulated_gpu(seed) as gpu:
            receipts = made_together(together, "cuda")
        assert 0 < gpu.peak_bytes <= together.projection.gpu_peak
        assert {receipt.note for receipt in receipts} == {""}
        assert [written(each.plan, each.staging) for each in mine] == expected
