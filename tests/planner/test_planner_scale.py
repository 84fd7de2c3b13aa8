"""Models of the true size, planned from headers within time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config, llama_shapes, sparse_checkpoint
from kits.deepseek_headers import (
    KIMI_CONFIG,
    KIMI_NUM_TENSORS,
    V3_CONFIG,
    V3_NBYTES,
    V3_NUM_TENSORS,
    deepseek_v3_names,
    deepseek_v3_specs,
    kimi_k2_thinking_specs,
)
from kits.fused_headers import (
    GPT_OSS_CONFIG,
    GPT_OSS_NUM_TENSORS,
    MAVERICK_CONFIG,
    gpt_oss_120b_specs,
    maverick_specs,
)
from kits.kimi_k3_headers import K3_CONFIG, K3_NBYTES, K3_NUM_EXPERT_TENSORS, kimi_k3_specs
from kits.plan_maker import good, header_checkpoint
from kits.qwen3_headers import QWEN3_CONFIG, QWEN3_NBYTES, QWEN3_NUM_TENSORS, qwen3_235b_specs
from kits.recipe_maker import linear, piece, stack

from raymerge.checkpoints.header import TensorSpec, shard_names, split_into_shards
from raymerge.dtypes import DType
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.plan import SCHEMAS, input_bytes
from raymerge.planner.inputs.sources import open_models
from raymerge.planner.matching import logical
from raymerge.planner.merges import build_plan, plan_merges
from raymerge.recipes.load import recipe_from_mapping


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("v3")
    specs = deepseek_v3_specs()
    a, b = (sparse_checkpoint(root / n, specs, V3_CONFIG, names=deepseek_v3_names()) for n in "ab")
    return a, b


@pytest.mark.slow
def test_stacking_copies_every_tensor_of_the_layers_taken(models: tuple[Path, Path]) -> None:
    """Layers 0 to 60 of one, then 3 to 60 of the other with its prediction layer behind them."""
    a, b = models
    report = _report("DeepSeek-V3, stacked", stack(piece(a, 0, 61), piece(b, 3, 61)))
    assert report["problems"] == []
    assert report["distinct"] == len(report["dispositions"]) == 2 * V3_NUM_TENSORS
    counts = Counter(map(tuple, report["dispositions"]))
    assert set(counts) == {(source, kind) for source in (0, 1) for kind in ("copied", "dropped")}
    prediction = 1564
    assert counts[0, "copied"] + counts[0, "dropped"] == V3_NUM_TENSORS
    assert counts[0, "dropped"] == prediction + 2
    names = [name for name, _, _ in report["tensors"]]
    assert len(names) == counts[0, "copied"] + counts[1, "copied"]
    assert V3_NBYTES < report["nbytes"] < 2 * V3_NBYTES
    assert report["config"]["num_hidden_layers"] == 61 + 58
    last = [name for name in names if name.startswith("model.layers.119.")]
    assert len(last) == prediction
    assert sum(name.endswith("_scale_inv") for name in last) == 776
    assert report["peak"] < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["x{}.0.w.weight", "x{}.weight", "model.layers.{}.w.weight", "model.layers.0.mlp.experts.{}.w.weight"],
    ids=["one stack each", "outside layers", "one layer each", "experts"],
)
@pytest.mark.parametrize("method", ["passthrough", "ties"])
def test_a_tensor_more_costs_as_many_calls_however_many_there_are(
    tmp_path: Path, name: str, method: str
) -> None:
    # The first plan of all calls more, for what is imported on the way.
    _, few, more, most = (
        _calls(tmp_path / str(number), name, number, method=method) for number in (1, 100, 300, 500)
    )
    assert most - more < 1.1 * (more - few)


def _calls(root: Path, name: str, number: int, *, method: str) -> int:
    """Calls of Python functions, steps of generators counted, to plan so many tensors, copied or merged."""
    specs = [TensorSpec(name.format(each), DType.BF16, (2, 3)) for each in range(number)]
    models = [sparse_checkpoint(root / each, [specs], {"model_type": "any"}) for each in "ab"]
    data: dict[str, Any] = {"merge_method": method, "models": [{"model": str(each)} for each in models]}
    if method == "passthrough":
        data["models"].pop()
    else:
        data["parameters"] = {"weight": 0.5}
    if method == "ties":
        data["base_model"] = data["models"].pop(0)["model"]
    recipe = recipe_from_mapping(data)
    count = 0

    def see(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        build_plan(recipe, open_models(recipe).require(), version="0").require()
    finally:
        sys.setprofile(None)
    return count


MOST_BYTES = 2_000_000_000
"""Peak memory of a planning process."""
MOST_WORKER_BYTES = 4 << 30
"""The largest budget that these plans may need of a worker."""

CHILD = """
import json, sys, time
def peak():
    # Not ru_maxrss, which begins with what the parent had.
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
from raymerge.api import plan
from raymerge.merge_plan.memory import project
began = time.perf_counter(), time.process_time()
plan = plan(json.loads(sys.argv[1]))
seconds, busy = time.perf_counter() - began[0], time.process_time() - began[1]
worker, most = project(plan, 16 << 30), peak()
table, tensors = plan["dispositions"], plan["tensors"]
rows = list(zip(*(table.column(key).to_pylist() for key in ("source", "name", "disposition"))))
print(json.dumps({
    "seconds": seconds,
    "busy": busy,
    "peak": most,
    "problems": [str(problem) for problem in plan.problems],
    "dispositions": [(source, disposition) for source, _, disposition in rows],
    "distinct": len({(source, name) for source, name, _ in rows}),
    "tensors": list(zip(*(tensors.column(key).to_pylist() for key in ("name", "dtype", "shape")))),
    "nbytes": sum(tensors.column("nbytes").to_pylist()),
    "segments": len(plan["segments"]),
    "worker": worker.peak,
    "least": worker.least_budget,
    "config": plan.manifest["config"],
}))
"""


def _report(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What becomes of a recipe, planned in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(recipe, default=str)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    print(
        f"{name}: planned in {report['seconds']:.1f} s ({report['busy']:.1f} s of a core), "
        f"peak {report['peak'] / 1e9:.2f} GB, "
        f"{report['segments']} segments; a worker needs {report['least'] / 2**20:.0f} MiB at least, "
        f"and takes {report['worker'] / 2**30:.2f} of 16 GiB"
    )
    return report


def _check(report: dict[str, Any], specs: Sequence[Sequence[TensorSpec]], config: Mapping[str, Any]) -> None:
    """Everything that is stored has a disposition in each parent, and is in the output as it was."""
    stored = {spec.name: (spec.dtype.value, list(spec.shape)) for file in specs for spec in file}
    assert report["problems"] == []
    assert report["distinct"] == len(report["dispositions"]) == 2 * len(stored)
    assert {name: (dtype, shape) for name, dtype, shape in report["tensors"]} == stored
    merged = {(source, "merged"): len(stored) for source in (0, 1)}
    assert Counter(map(tuple, report["dispositions"])) == merged
    assert report["nbytes"] == sum(spec.nbytes for file in specs for spec in file)
    assert report["config"]["quantization_config"] == config["quantization_config"]
    assert report["peak"] < MOST_BYTES
    assert 0 < report["least"] < MOST_WORKER_BYTES
    assert report["worker"] >= report["least"]


@pytest.mark.slow
def test_two_deepseek_v3_are_planned_whole(models: tuple[Path, Path]) -> None:
    report = _report("DeepSeek-V3", linear(*models))
    assert len(report["tensors"]) == V3_NUM_TENSORS
    assert report["nbytes"] == V3_NBYTES
    _check(report, deepseek_v3_specs(), V3_CONFIG)


@pytest.mark.slow
def test_two_kimi_k2_thinking_are_planned_whole(tmp_path: Path) -> None:
    specs = kimi_k2_thinking_specs()
    models = [sparse_checkpoint(tmp_path / name, specs, KIMI_CONFIG) for name in "ab"]
    report = _report("Kimi-K2-Thinking", linear(*models))
    assert len(report["tensors"]) == KIMI_NUM_TENSORS
    _check(report, specs, KIMI_CONFIG)


@pytest.mark.slow
def test_two_kimi_k3_are_planned_whole(tmp_path: Path) -> None:
    specs = kimi_k3_specs()
    assert sum(".experts." in spec.name for file in specs for spec in file) == K3_NUM_EXPERT_TENSORS
    models = [sparse_checkpoint(tmp_path / name, specs, K3_CONFIG) for name in "ab"]
    report = _report("Kimi-K3", linear(*models))
    assert report["nbytes"] == K3_NBYTES
    _check(report, specs, K3_CONFIG)


@pytest.mark.slow
def test_roles_of_two_qwen3_are_planned_in_their_own_ways(tmp_path: Path) -> None:
    """Experts along the arc, routers of the second, norms of the first, the mean of the rest."""
    files = split_into_shards(qwen3_235b_specs(), 4 << 30)
    models = one, two = [str(sparse_checkpoint(tmp_path / name, files, QWEN3_CONFIG)) for name in "ab"]
    rules = [
        {"role": "expert", "merge_method": "slerp", "parameters": {"t": 0.6}},
        {"role": "norm", "merge_method": "passthrough", "sources": [one]},
    ]
    report = _report("Qwen3-235B-A22B", linear(*models, base_model=one, methods=rules, router=two))
    assert report["problems"] == []
    assert (len(report["tensors"]), report["nbytes"]) == (QWEN3_NUM_TENSORS, QWEN3_NBYTES)
    assert report["distinct"] == 2 * QWEN3_NUM_TENSORS
    norms, routers = 4 * 94 + 1, 94
    both = {"merged": QWEN3_NUM_TENSORS - norms - routers}
    counts = {0: {"copied": norms, "dropped": routers}, 1: {"copied": routers, "dropped": norms}}
    assert Counter(map(tuple, report["dispositions"])) == {
        (source, fate): count for source, own in counts.items() for fate, count in {**own, **both}.items()
    }
    assert report["peak"] < MOST_BYTES


TENSORS, BILLIONS = 1_739, 140.621
"""Tensors and parameters of the published Mixtral-8x22B."""


def _dense(root: Path) -> Path:
    config = llama_config(layers=56, hidden=6144, vocab=32_000) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 16_384,
        "sliding_window": None,
    }
    return header_checkpoint(root, {n: (DType.BF16, s) for n, s in llama_shapes(config).items()}, config)


@pytest.mark.slow
def test_a_mixtral_8x22b_is_planned_whole(tmp_path: Path) -> None:
    base, other = _dense(tmp_path / "base"), _dense(tmp_path / "other")
    asked = {
        "base_model": str(base),
        "gate_mode": "random",
        "experts": [
            {"source_model": str(base), "copies": 4, "noise_scale": 0.01},
            {"source_model": str(other), "copies": 4},
        ],
    }
    began = time.monotonic()
    (merge,) = plan_merges([recipe_from_mapping(asked)], tmp_path / "steps", version="0")
    print(f"Mixtral-8x22B of dense models: planned in {time.monotonic() - began:.1f} s")
    merge.plan.require()
    assert len(merge.plan["tensors"]) == TENSORS
    parameters = sum(merge.plan["tensors"].column("nbytes").to_pylist()) / DType.BF16.nbytes(1)
    assert round(parameters / 1e9, 3) == BILLIONS


USUAL_BUDGET = 512 << 20
"""Bytes that a worker on one machine may use, where the user does not say."""
FUSED: Mapping[str, tuple[list[TensorSpec], Mapping[str, Any]]] = {
    "gpt-oss-120b": (gpt_oss_120b_specs(), GPT_OSS_CONFIG),
    "Maverick": (maverick_specs(), MAVERICK_CONFIG),
}


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """Three checkpoints of each model, whose data is a hole."""
    assert len(FUSED["gpt-oss-120b"][0]) == GPT_OSS_NUM_TENSORS
    root = tmp_path_factory.mktemp("fused")
    found: dict[str, list[str]] = {}
    for model, (specs, config) in FUSED.items():
        files = split_into_shards(specs, 20 << 30)
        made = [
            sparse_checkpoint(root / model / n, files, config, names=shard_names(len(files))) for n in "abc"
        ]
        found[model] = [str(path) for path in made]
    return found


def _recipe(method: str, base: str, *others: str) -> dict[str, Any]:
    if method == "linear":
        models = [{"model": path, "parameters": {"weight": 0.5}} for path in (base, *others)]
        return {"merge_method": method, "models": models}
    models = [{"model": path, "parameters": {"weight": 0.5, "density": 0.5}} for path in others]
    return {"merge_method": method, "base_model": base, "models": models}


@pytest.mark.slow
@pytest.mark.parametrize("model", list(FUSED))
@pytest.mark.parametrize(
    "method", ["linear", "ties", "della"], ids=["element by element", "matrix by matrix", "row by row"]
)
def test_fused_stacks_are_read_once_and_with_the_usual_memory(
    parents: Mapping[str, list[str]], model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[object] = []
    blocks = logical.blocks

    def noted(*asked: Any) -> Any:
        looked_up.append(asked)
        return blocks(*asked)

    monkeypatch.setattr(logical, "blocks", noted)
    plan = good(_recipe(method, *parents[model])).plan
    specs = FUSED[model][0]
    assert input_bytes(plan).sum() == 3 * sum(spec.nbytes for spec in specs)
    assert project(plan, USUAL_BUDGET).shortage() is None
    # Once for a stack of each parent, not once for each of its experts.
    assert len(looked_up) <= 3 * len([spec for spec in specs if ".experts." in spec.name])
    # A row for each expert where one is needed by itself, and else no more than a run is cut into.
    num_made = sum(each < 0 for each in plan["ops"].column("made_with").to_pylist())
    cut = plan["segments"].num_rows + len(specs)
    assert num_made <= (cut if method == "linear" else 30_000)


@pytest.mark.parametrize("is_coded", [True, False])
def test_experts_made_as_the_first_are_as_each_by_itself(tmp_path: Path, is_coded: bool) -> None:
    """Where a selector may tell tensors apart by name, each is looked at, even if it matches none."""
    odd = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    config, specs = {**K3_CONFIG, "num_experts": 3, "num_hidden_layers": 4}, kimi_k3_specs(3)
    specs[4:93] = []
    if not is_coded:
        config.pop("quantization_config")
        specs = [[_plain(each) for each in file if not each.name.endswith("_scale")] for file in specs]
    of_layer = [each for each in specs[1] if not each.name.startswith(odd)]
    other = TensorSpec(odd, DType.BF16 if is_coded else DType.F32, (1600, 7168))
    mixed = [specs[0], [*of_layer, other], *specs[2:]]
    models = [
        sparse_checkpoint(tmp_path / "a", mixed, config),
        sparse_checkpoint(tmp_path / "b", specs, config),
    ]
    named = {"weight": [{"filter": "no such tensor", "value": 0.25}, {"value": 1.0}]}
    alike, alone = (good(linear(*models, **more)).plan for more in ({}, {"parameters": named}))
    assert all(alike[name].equals(alone[name]) for name in SCHEMAS)


def _plain(spec: TensorSpec) -> TensorSpec:
    """Codes as the numbers that they stand for."""
    name = spec.name.removesuffix("_packed")
    return spec if name == spec.name else TensorSpec(name, DType.BF16, (spec.shape[0], spec.shape[1] * 2))
