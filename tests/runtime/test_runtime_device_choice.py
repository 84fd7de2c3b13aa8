"""The choice between processors and GPUs: laws of the prediction, and what a plan amounts to."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import write_checkpoint
from kits.merge_cases import Family, recipes

from raymerge.api import plan
from raymerge.planner.simulation import measured_speeds
from raymerge.runtime.devices.choice import Amounts, Choice, Probe, amounts_of, choose
from raymerge.runtime.workers.sizing import WorkerGroupSize

GB = 10**9
PROBE = Probe(
    read=2 * GB, write=GB, to_device=25 * GB, from_device=25 * GB, cpu=5 * GB, gpu=900 * GB, name="X"
)
LINEAR = Amounts(60 * GB, 20 * GB, 60 * GB, 20 * GB, 60.0 * GB, 60.0 * GB)
SPEEDS = st.floats(1e6, 1e13)
STORAGE = st.none() | SPEEDS
ONE = WorkerGroupSize(workers=1, machines=1)


def _choice(
    probe: Probe = PROBE, amounts: Amounts = LINEAR, *, cpu: WorkerGroupSize = ONE, gpu: WorkerGroupSize = ONE
) -> Choice:
    return choose(probe, amounts, cpu=cpu, gpu=gpu)


def test_where_storage_is_the_limit_the_gpu_is_left_alone() -> None:
    found = _choice()
    assert found == Choice("cpu", "reading takes 0:30, and the GPU would not help", PROBE)
    assert _choice(replace(PROBE, write=GB // 2)).reason == "writing takes 0:40, and the GPU would not help"


def test_arithmetic_that_takes_longer_than_storage_goes_to_the_gpu() -> None:
    heavy = replace(LINEAR, cpu_work=2000.0 * GB, gpu_work=9000.0 * GB)
    found = _choice(amounts=heavy)
    assert found.device == "cuda"
    assert found.reason == ("predicted 0:30 on the GPU, 6:40 on the CPU, where arithmetic would be the limit")


def test_copies_and_slow_gpus_speak_against_them() -> None:
    heavy = replace(LINEAR, cpu_work=200.0 * GB)
    slow = _choice(replace(PROBE, to_device=GB), heavy)
    assert slow.device == "cpu"
    assert slow.reason == "predicted 0:40 on the CPU, 1:01 on the GPU, where copying would be the limit"
    assert _choice(replace(PROBE, gpu=GB), heavy).device == "cpu"


def test_a_tenth_is_the_least_gain() -> None:
    def device(cpu_seconds: float) -> str:
        return _choice(amounts=replace(LINEAR, cpu_work=cpu_seconds * PROBE.cpu)).device

    assert [device(seconds) for seconds in (29.0, 33.0, 33.4, 300.0)] == ["cpu", "cpu", "cuda", "cuda"]


def test_workers_and_gpus_count() -> None:
    heavy = replace(LINEAR, cpu_work=2000.0 * GB, gpu_work=2000.0 * GB)
    assert _choice(amounts=heavy, cpu=WorkerGroupSize(64, 1)).device == "cpu"
    slow = replace(PROBE, gpu=6 * GB)
    assert _choice(slow, heavy).device == "cuda"
    assert _choice(slow, heavy, cpu=WorkerGroupSize(8, 1), gpu=WorkerGroupSize(8, 1)).device == "cuda"
    assert _choice(slow, heavy, cpu=WorkerGroupSize(8, 1), gpu=WorkerGroupSize(2, 1)).device == "cpu"


def test_storage_counts_for_each_machine_and_that_is_said() -> None:
    """What is one machine's limit need not be that of four."""
    heavy = replace(LINEAR, cpu_work=400.0 * GB, gpu_work=400.0 * GB)
    four = WorkerGroupSize(workers=4, machines=4)
    assert _choice(amounts=heavy).device == "cuda"
    assert _choice(amounts=heavy, cpu=four, gpu=four).reason == (
        "predicted 7.5 s on the GPU, 0:20 on the CPU, where arithmetic would be the limit; storage was "
        "measured on one machine and counted for each (4 with CPU workers, 4 with GPUs)"
    )
    # All GPUs are in one machine, and what it reads is read by it alone.
    found = _choice(amounts=heavy, cpu=four, gpu=WorkerGroupSize(workers=8, machines=1))
    assert (found.device, found.reason.split(";")[0]) == (
        "cpu",
        "predicted 0:20 on the CPU, 0:30 on the GPU, where reading would be the limit",
    )


def test_storage_that_could_not_be_measured_is_no_limit_and_said() -> None:
    unread = replace(PROBE, read=None)
    assert _choice(unread).reason == (
        "writing takes 0:20, and the GPU would not help; reading could not be measured"
    )
    unknown = replace(unread, write=None)
    found = _choice(unknown, cpu=WorkerGroupSize(4, 2), gpu=WorkerGroupSize(2, 2))
    assert found.device == "cuda"
    assert found.reason.endswith("the limit; reading and writing could not be measured")
    assert Probe.from_json(json.loads(json.dumps(unknown.to_json()))) == unknown


@settings(deadline=None, max_examples=200)
@given(
    probe=st.builds(Probe, STORAGE, STORAGE, SPEEDS, SPEEDS, SPEEDS, SPEEDS, st.just("X")),
    work=st.floats(0, 1e15),
    faster=st.floats(1, 100),
)
def test_faster_parts_only_speak_for_their_own_device(probe: Probe, work: float, faster: float) -> None:
    amounts = replace(LINEAR, cpu_work=work, gpu_work=work)
    found = _choice(probe, amounts)
    assert found.reason
    better_gpu = replace(
        probe,
        gpu=probe.gpu * faster,
        to_device=probe.to_device * faster,
        from_device=probe.from_device * faster,
    )
    if found.device == "cuda":
        assert _choice(better_gpu, amounts).device == "cuda"
    else:
        assert _choice(replace(probe, cpu=probe.cpu * faster), amounts).device == "cpu"


def test_nothing_to_do_needs_no_gpu() -> None:
    found = _choice(amounts=Amounts(60 * GB, 60 * GB, 0, 0, 0.0, 0.0))
    assert (found.device, found.reason) == ("cpu", "there is nothing to compute")


def test_a_choice_travels_as_json() -> None:
    assert Probe.from_json(PROBE.to_json()) == PROBE
    assert _choice().to_json()["probe"] == PROBE.to_json()
    assert Choice("cuda", "because").to_json() == {"device": "cuda", "reason": "because", "probe": None}


# What a plan amounts to


def _amounts(recipe: dict[str, Any]) -> Amounts:
    return amounts_of([plan(recipe)])


def test_a_linear_merge_reads_all_and_computes_it(small: Family) -> None:
    found, wanted = _amounts(recipes(small)["linear"]), plan(recipes(small)["linear"])
    assert found.written == sum(wanted["tensors"].column("nbytes").to_pylist())
    assert 0 < found.made <= found.written
    assert found.read == sum(wanted["inputs"].column("nbytes").to_pylist())
    assert 0 < found.computed <= found.read
    assert found.cpu_work == found.gpu_work == found.computed


def test_heavier_methods_count_more(small: Family) -> None:
    linear, ties = (_amounts(recipes(small)[name]) for name in ("linear", "ties"))
    speeds = measured_speeds()
    ratio = speeds.per_element("ties") / speeds.per_element("linear")
    assert ties.cpu_work / ties.computed == pytest.approx(ratio)
    assert ties.gpu_work / ties.computed == 3
    assert linear.cpu_work / linear.computed == 1


def _one_tensor(root: Path, shape: tuple[int, ...], method: str) -> Amounts:
    """What a merge of one tensor of this shape amounts to."""
    config = {"architectures": ["Odd"], "model_type": "odd"}
    models = [write_checkpoint(root / name, {"a.weight": torch.ones(shape)}, config) for name in "bx"]
    recipe = {"merge_method": method, "base_model": str(models[0]), "models": [{"model": str(models[1])}]}
    return _amounts(recipe)


@pytest.mark.parametrize("method", ["iso_c", "tsv_m"])
def test_decompositions_cost_the_more_the_larger_the_matrix(method: str, tmp_path: Path) -> None:
    costs = {}
    for shape in ((256, 512), (512, 1024), (1024, 512), (512, 4, 256)):
        found = _one_tensor(tmp_path / f"{shape}", shape, method)
        costs[shape] = found.cpu_work / found.computed
        assert found.gpu_work / found.computed == pytest.approx(1.5 * min(shape[0], math.prod(shape[1:])))
    assert costs[512, 1024] == pytest.approx(2 * costs[256, 512])
    assert costs[512, 1024] == costs[1024, 512] == costs[512, 4, 256]
    speeds = measured_speeds()
    assert costs[512, 1024] == pytest.approx(
        speeds.per_element(method) / speeds.per_element("linear") * 512 / 1024
    )


def test_of_vectors_there_is_no_decomposition(tmp_path: Path) -> None:
    found = _one_tensor(tmp_path, (4096,), "iso_c")
    assert found.cpu_work == found.gpu_work == found.computed > 0


def test_a_matrix_that_is_not_decomposed_costs_no_more_for_its_size(tmp_path: Path) -> None:
    """nuslerp by the first dimension sees a whole matrix at once, and only adds along it."""
    models = []
    for name in ("one", "two"):
        tensors = {"a.weight": torch.ones(2048, 512)}
        root = write_checkpoint(tmp_path / name, tensors, {"architectures": ["Odd"], "model_type": "odd"})
        models.append({"model": str(root), "parameters": {"weight": 0.5}})
    own = {"nuslerp_flatten": False}
    found = _amounts({"merge_method": "nuslerp", "models": models, "parameters": own})
    assert found.cpu_work < 10 * found.computed
    assert found.gpu_work < 10 * found.computed


def test_copies_cost_storage_alone(small: Family) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(small.base)}]}
    found = _amounts(recipe)
    assert found.read == found.written > 0
    assert (found.computed, found.made, found.cpu_work, found.gpu_work) == (0, 0, 0.0, 0.0)


def test_merges_add_up(small: Family) -> None:
    plans = [plan(recipes(small)[name]) for name in ("linear", "ties")]
    assert amounts_of(plans) == amounts_of(plans[:1]) + amounts_of(plans[1:])
    assert amounts_of([]) == Amounts(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("name", ["linear", "ties"])
def test_amounts_are_whole_bytes(small: Family, name: str) -> None:
    found = _amounts(recipes(small)[name])
    assert all(isinstance(value, int) for value in (found.read, found.written, found.computed, found.made))
