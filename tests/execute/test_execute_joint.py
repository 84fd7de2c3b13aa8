"""Several plans made of one read give what each gives by itself, byte by byte."""

from __future__ import annotations

import json
import pickle
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import fields, read_tensors, tiny_llama, write_checkpoint
from kits.joint_merges import elsewhere, joint_work, made_apart, made_together, planned, written
from kits.marks import slow_but
from kits.memory_meter import AllocationMeter
from kits.merge_cases import Family, make_family, recipes
from kits.quantised_merges import entries
from kits.quantised_models import deepseek_v3, gpt_oss, kimi_k2_thinking, three_formats
from kits.recipe_maker import linear, slerp
from kits.segment_bench import counted_buffers
from kits.tensor_scaled_models import fp8_llama, fp8_mixture, nvfp4_llama

from raymerge.api import plan, plan_sweep
from raymerge.errors import NonFiniteError
from raymerge.execute.receipts import JointReceipt, Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.execute.transfers import HostTransfers
from raymerge.merge_plan import segments
from raymerge.merge_plan.joint import joint_groups, joint_read_bytes
from raymerge.merge_plan.memory import project
from raymerge.methods import methods

MIB = 1 << 20
OBJECTS = 512 << 10
"""Bytes of Python's own objects, which are counted too."""
ROOMY = 256 * MIB

CHANGES: Mapping[str, Callable[[float], float]] = {
    "weight": lambda value: value * 0.75,
    "density": lambda value: value * 0.8,
    "t": lambda value: value * 0.5,
    "lambda": lambda value: value * 0.9,
    "scale": lambda value: value * 0.5,
}


def _changed(value: Any, names: tuple[str, ...]) -> Any:
    """A recipe with other numbers under these names."""
    if isinstance(value, list):
        return [_changed(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: CHANGES[key](each) if key in names and isinstance(each, int | float) else _changed(each, names)
        for key, each in value.items()
    }


def _sweep(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Recipes whose weights, whose densities and whose seed differ, and one that is there twice."""
    alike = {**recipe, "seed": 11}
    return [
        recipe,
        _changed(recipe, ("weight", "t", "lambda", "scale")),
        _changed(recipe, ("density",)),
        alike,
        recipe,
    ]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), hidden=160)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Models whose embeddings are several loads of a small budget."""
    root = tmp_path_factory.mktemp("wide")
    base = tiny_llama(root / "base", 0, hidden=512, vocab=8192, layers=1)
    tunes = tuple(
        tiny_llama(root / str(seed), seed, hidden=512, vocab=8192, layers=1, base=base) for seed in (1, 2, 3)
    )
    return Family(base, tunes)


def _check(sweep: list[dict[str, Any]], root: Path, budget: int) -> tuple[int, int]:
    """Bytes read together, and by all plans by themselves."""
    works = [planned(each, root / f"apart{n}", budget) for n, each in enumerate(sweep)]
    assert joint_groups([each.plan for each in works]) == (tuple(range(len(works))),)
    expected = [made_apart(each) for each in works]
    assert works[0].projection.most_outputs >= len(works)
    together = joint_work([elsewhere(each, root / f"together{n}") for n, each in enumerate(works)])
    receipts = made_together(together)
    for work, own in zip(together.works, expected, strict=True):
        assert written(work.plan, work.staging) == own
    if budget == ROOMY:
        most = int(joint_read_bytes([work.plan for work in works]).sum())
        # Codes that share one scale are counted as if each looked at the others for itself.
        is_exact = not any(
            each for work in works for each in work.plan["ops"].column("joined_with").to_pylist()
        )
        read = sum(each.read_bytes for each in receipts)
        assert read == most if is_exact else most / 2 < read <= most
    apart = sum(cost for work in works for cost in work.plan["segments"].column("cost").to_pylist())
    return sum(each.read_bytes for each in receipts), apart


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_but(sorted(methods()), "linear", "ties", "slerp", "dare_ties", "iso_c"))
def test_outputs_of_one_read_are_those_of_separate_merges(name: str, family: Family, tmp_path: Path) -> None:
    recipe = recipes(family)[name]
    read, apart = _check(_sweep(recipe), tmp_path, ROOMY)
    places = [Path(each["statistics"]) for each in recipe.get("models", ()) if "statistics" in each]
    statistics = sum((place / "model.safetensors").stat().st_size for place in places)
    inputs = len({str(family.base), *map(str, family.tunes)})
    one = sum(path.stat().st_size for path in family.base.glob("*.safetensors"))
    assert read <= inputs * one + statistics
    assert read < apart


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["linear", "ties", "slerp", "della", "model_stock", "sce"], "ties"))
def test_little_memory_changes_no_byte_and_is_kept(name: str, wide: Family, tmp_path: Path) -> None:
    sweep = _sweep(recipes(wide)[name])[:3]
    budget = 12 * MIB + max(project(plan(each).require(), MIB).least_budget for each in sweep)
    _check(sweep, tmp_path, budget)
    work = joint_work([planned(each, tmp_path / f"measured{n}", budget) for n, each in enumerate(sweep)])
    assert work.projection.peak == budget
    with counted_buffers() as buffers, AllocationMeter() as meter:
        made_together(work)
    assert budget / 4 < meter.peak_bytes + buffers.most <= budget + OBJECTS


MAKERS: Mapping[str, Callable[..., Any]] = {
    "block FP8": deepseek_v3,
    "INT4": kimi_k2_thinking,
    "MXFP4 stacks": gpt_oss,
    "three formats": three_formats,
    "FP8 by tensor": fp8_llama,
    "NVFP4": nvfp4_llama,
    "experts under one scale": fp8_mixture,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_but(MAKERS, "MXFP4 stacks", "NVFP4"))
def test_codes_of_one_read_are_those_of_separate_merges(name: str, tmp_path: Path) -> None:
    parents = [MAKERS[name](tmp_path / str(seed), seed) for seed in (1, 2)]
    # Sums that are larger than the parents have other scales, which matrices share in their own output alone.
    sums = [
        {"merge_method": "linear", "models": entries(parents, weights), "parameters": {"normalize": False}}
        for weights in ((1.2, 1.8), (0.5, 0.5), (0.9, 0.1))
    ]
    arcs = [slerp(*(each.root for each in parents), t=t) for t in (0.3, 0.6)]
    _check(sums, tmp_path / "sums", ROOMY)
    _check(arcs, tmp_path / "arcs", ROOMY)


@pytest.mark.slow
def test_windows_of_the_same_checkpoints_read_each_once(
    wide: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_SEGMENTS_WANTED", 8)
    models = [wide.base, *wide.tunes]
    windows = [linear(*models[-count:]) for count in (2, 3, 4)]
    read, _ = _check(windows, tmp_path, ROOMY)
    size = sum(tensor.nbytes for model in models for tensor in read_tensors(model).values())
    assert read == size


def test_one_output_that_is_not_finite_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = SegmentRunner.made

    def counted(self: SegmentRunner, segment: int, *args: Any, **more: Any) -> dict[int, Receipt]:
        made.append(segment)
        return make(self, segment, *args, **more)

    monkeypatch.setattr(segments, "_SMALLEST", 1)
    monkeypatch.setattr(SegmentRunner, "made", counted)
    root, values = tmp_path / "model", torch.full((64, 64), 60_000.0, dtype=torch.float16)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
    parent = write_checkpoint(root, {"model.norm.weight": values[0], "lm_head.weight": values}, config)
    sweep = [linear(parent, parameters={"weight": weight, "normalize": False}) for weight in (0.5, 4.0, 0.25)]
    works = [planned(each, tmp_path / str(n), 16 * MIB) for n, each in enumerate(sweep)]
    receipts = made_together(joint_work(works))
    assert all(
        isinstance(each.failures[1], NonFiniteError) and set(each.by_output) == {0, 2} for each in receipts
    )
    # Only where it is seen first a segment is made again.
    assert made == [0, *range(len(receipts))]
    assert len(receipts) > 1
    for number, factor in ((0, 0.5), (2, 0.25)):
        stored = written(works[number].plan, works[number].staging)["lm_head.weight"]
        assert stored == (values * factor).numpy().tobytes()


def test_receipts_are_those_of_each_plan(family: Family, tmp_path: Path) -> None:
    sweep = _sweep(recipes(family)["ties"])[:2]
    works = [planned(each, tmp_path / str(n), ROOMY) for n, each in enumerate(sweep)]
    receipts = made_together(joint_work(works))
    for number, work in enumerate(works):
        own = [each.by_output[number] for each in receipts]
        made = {int(op) for each in own for op in each.digests}
        assert made == set(range(len(work.plan["ops"])))
        assert json.dumps([each.to_json() for each in own])


def test_plans_of_a_sweep_travel_as_one(family: Family) -> None:
    sweep = {**recipes(family)["ties"], "sweep": {"w": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}}
    sweep["models"] = [{**each, "parameters": {"weight": "$w", "density": 0.5}} for each in sweep["models"]]
    plans = [each.merges[-1].plan for each in plan_sweep(sweep)]
    assert len({each.digest for each in plans}) == 6
    sizes = [len(pickle.dumps([each.tables for each in some])) for some in (plans[:1], plans)]
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("beside", [2 * MIB, ROOMY])
def test_adapters_of_one_output_never_reach_another(beside: int, tmp_path: Path) -> None:
    """However many of them are made with a read of their own, for want of memory."""
    base = tiny_llama(tmp_path / "base", 0, hidden=512, vocab=1024, layers=1)
    tune = tiny_llama(tmp_path / "tune", 1, hidden=512, vocab=1024, layers=1, base=base)
    tensors = read_tensors(base)
    adapters = [tiny_lora(tmp_path / f"adapter{seed}", tensors, seed) for seed in range(6)]
    sweep = [linear(f"{base}+{adapter}", tune) for adapter in adapters]
    least = max(project(plan(each).require(), MIB).least_budget for each in sweep)
    _check(sweep, tmp_path, least + beside)


@pytest.mark.slow
def test_experts_made_in_place_keep_the_memory_limit(tmp_path: Path) -> None:
    models = [_mixture(tmp_path / str(seed), seed) for seed in (1, 2)]
    sweep = [slerp(*models, t=t) for t in (0.2, 0.4, 0.7)]
    budget = 5 * MIB // 2 + max(project(plan(each).require(), MIB).least_budget for each in sweep)
    _check(sweep, tmp_path, budget)
    work = joint_work([planned(each, tmp_path / f"measured{n}", budget) for n, each in enumerate(sweep)])
    with counted_buffers() as buffers, AllocationMeter() as meter:
        made_together(work)
    assert meter.peak_bytes + buffers.most <= work.projection.peak + OBJECTS


def _mixture(root: Path, seed: int) -> Path:
    experts, width, hidden = 2, 3072, 512
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.norm.weight": (hidden,),
        "model.layers.0.mlp.router.weight": (experts, hidden),
        "model.layers.0.mlp.experts.gate_up_proj": (experts, hidden, 2 * width),
        "model.layers.0.mlp.experts.down_proj": (experts, width, hidden),
    }
    config = fields(
        "model_type: gpt_oss, architectures: [GptOssForCausalLM], num_hidden_layers: 1, "
        f"num_local_experts: {experts}, hidden_size: {hidden}, intermediate_size: {width}, "
        "torch_dtype: bfloat16"
    )
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return write_checkpoint(root, made, config)


def test_outputs_that_failed_hold_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, values = tmp_path / "model", torch.full((256, 256), 60_000.0, dtype=torch.float16)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
    parent = write_checkpoint(root, {"model.norm.weight": values[0], "lm_head.weight": values}, config)
    sweep = [linear(parent, parameters={"weight": weight, "normalize": False}) for weight in (0.5, 4.0, 5.0)]
    work = joint_work([planned(each, tmp_path / str(n), 16 * MIB) for n, each in enumerate(sweep)])
    got: weakref.WeakSet[object] = weakref.WeakSet()
    buffer = HostTransfers.buffer

    def counted(self: HostTransfers, nbytes: int) -> torch.Tensor:
        got.add(made := buffer(self, nbytes))
        return made

    monkeypatch.setattr(HostTransfers, "buffer", counted)
    with closing(work.open(torch.device("cpu"), "worker")) as runner:
        receipts = [runner.run(segment) for segment in work.todo]
        assert all(isinstance(each, JointReceipt) and len(each.failures) == 2 for each in receipts)
        # A load's, and one for each output.
        assert len(got) <= 1 + len(sweep)


def test_what_one_plan_reads_twice_counts_twice(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_SEGMENTS_WANTED", 1)
    stacks = [
        {
            "merge_method": "passthrough",
            "slices": [
                {"sources": [{"model": str(model), "layer_range": [0, 1], "parameters": {"scale": scale}}]}
                for scale in (0.5, last)
            ],
        }
        for model, last in ((family.base, 0.25), (family.tunes[0], 0.75))
    ]
    _check(stacks, tmp_path, ROOMY)
