"""What is computed besides segments, on the simulated GPU: router rows, orders of experts, adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits import permuted_experts as mixtures
from kits.adapter_merges import adapter, recipe
from kits.checkpoint_maker import tiny_llama
from kits.gate_stages import make, random_texts, reading_base, stage_of, three_experts
from kits.marks import slow_but
from kits.merge_cases import make_family, merge, recipes
from kits.router_merges import RouterMerge
from kits.simulated_gpu import simulated_gpu, without_gpu
from kits.transplants import BYTE_LEVEL, METASPACE, byte_level, metaspace, plain_text, transplant, write_model

import raymerge
from raymerge.api import merge_adapters
from raymerge.events import Started
from raymerge.lora.extract import ExtractOptions, Limits, extract_lora
from raymerge.options import Device, RunOptions
from raymerge.stages.loss import Evaluation

pytestmark = without_gpu

GPU = torch.device("cuda")
MODES = ("hidden", "hidden_last", "hidden_avg", "cheap_embed", "router_input", "centroid", "ridge")
Make = Callable[[Device, Path], Path]


def _check(name: str, root: Path, make: Make, seeds: range = range(2)) -> None:
    """What is made on each device, by the bytes of a file of it."""
    expected = (make("cpu", root / "cpu") / name).read_bytes()
    for seed in seeds:
        with simulated_gpu(seed) as gpu:
            found = (make("cuda", root / f"{seed}") / name).read_bytes()
        assert found == expected, seed
        assert gpu.operations > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", slow_but(MODES, "router_input", "ridge"))
def test_router_rows(mode: str, tmp_path: Path) -> None:
    """Of hidden states, for which transformers runs the model's layers on it."""
    has_negatives = mode not in ("centroid", "ridge")
    stage = stage_of(reading_base(tmp_path / "base"), mode, three_experts(negative=has_negatives))
    expected = make(stage, tmp_path / "cpu")
    for seed in range(2):
        with simulated_gpu(seed) as gpu:
            found = make(stage, tmp_path / f"{seed}", device=GPU)
        assert found.data == expected.data
        assert gpu.operations > 0


def test_losses(tmp_path: Path) -> None:
    reading_base(tmp_path / "model")
    (tmp_path / "t.txt").write_text(random_texts(1, 100)[0])

    def measured(device: Device) -> Evaluation:
        return raymerge.evaluate(tmp_path / "model", [tmp_path / "t.txt"], length=32, device=device)

    expected = measured("cpu")
    for seed in range(2):
        with simulated_gpu(seed) as gpu:
            found = measured("cuda")
        assert found == replace(expected, device="cuda")
        assert gpu.operations > 0


@pytest.mark.slow
def test_routers_are_repaired(tmp_path: Path) -> None:
    routers = RouterMerge(tmp_path, "gpt_oss")

    def make(device: Device, root: Path) -> Path:
        return routers.submit(str(root), options=RunOptions(inline=True, device=device))

    _check("model.safetensors", tmp_path / "out", make)


@pytest.mark.slow
def test_experts_are_put_in_order(tmp_path: Path) -> None:
    family = mixtures.MIXTRAL
    model = mixtures.make_model(family, 1)
    tuned = mixtures.moved(mixtures.noisy(model, 2, 0.1), family, 3)
    roots = [mixtures.store(tmp_path / name, each, family) for name, each in (("one", model), ("two", tuned))]
    models = [{"model": {"model": str(r), "override_architecture": "Mixture"}} for r in roots]
    aligned = {"merge_method": "linear", "align": "experts", "models": models, "parameters": {"weight": 1}}

    def merged(device: Device, out: Path) -> Path:
        raymerge.submit(aligned, out, RunOptions(inline=True, device=device))
        return out

    _check("model.safetensors", tmp_path, merged)


def test_adapters_are_extracted(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", 0, dtype=torch.float32)
    tuned = tiny_llama(tmp_path / "tuned", 1, base=base, dtype=torch.float32)

    def extracted(device: Device, out: Path) -> Path:
        notes = extract_lora(tuned, base, out, ExtractOptions(Limits(8), device=device)).notes
        assert not any("on the processor" in note for note in notes)
        return out

    _check("adapter_model.safetensors", tmp_path, extracted)


def test_adapters_are_merged(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / f"adapter {seed}", seed) for seed in range(2)]

    def merged(device: Device, out: Path) -> Path:
        merge_adapters(recipe("ties", roots), out, RunOptions(inline=True, threads=1, device=device))
        return out

    _check("adapter_model.safetensors", tmp_path, merged)


@pytest.mark.slow
def test_rows_of_tokens_are_pursued(tmp_path: Path) -> None:
    base_tokens, donor_tokens = byte_level(420, plain_text("english")), metaspace(460, plain_text("code"))
    base = write_model(tmp_path / "base", base_tokens, BYTE_LEVEL, seed=1)
    donor = write_model(tmp_path / "donor", donor_tokens, METASPACE, seed=2, hidden=48)

    def made(device: Device, out: Path) -> Path:
        return transplant(base, donor, out, k=4, device=device)

    _check("model.safetensors", tmp_path, made)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("method", "chosen"), [("linear", "cpu"), ("iso_c", "cuda")])
def test_auto_takes_it_where_it_is_of_use(method: str, chosen: str, tmp_path: Path) -> None:
    auto = RunOptions(inline=True, memory=64 << 20)
    made = recipes(make_family(tmp_path / "models", layers=1))[method]
    with simulated_gpu() as gpu:
        (started,) = merge(made, tmp_path / "auto", auto).of(Started)
        before = gpu.peak_bytes
    assert started.device == chosen
    merge(made, tmp_path / "cpu", replace(auto, device="cpu"))
    files = [tmp_path / name / "model.safetensors" for name in ("auto", "cpu")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (before > 1 << 20) == (chosen == "cuda")


def test_auto_does_not_take_one_that_fails(tmp_path: Path) -> None:
    def broken(name: str) -> Exception | None:
        return RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED") if name == "mm" else None

    made = recipes(make_family(tmp_path / "models", layers=1))["iso_c"]
    with simulated_gpu() as gpu:
        gpu.fault = broken
        (started,) = merge(made, tmp_path / "out", RunOptions(inline=True)).of(Started)
    assert (started.device, started.device_reason) == ("cpu", "no GPU works where workers look for one")
