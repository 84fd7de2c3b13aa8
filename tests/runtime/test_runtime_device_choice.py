"""The choice between processors and GPUs: laws of the prediction, and what a plan amounts to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.merge_cases import Family, recipes

from raymerge.api import plan
from raymerge.runtime.device_choice import Amounts, Choice, Probe, amounts_of, choose

GB = 10**9
PROBE = Probe(
    read=2 * GB, write=GB, to_device=25 * GB, from_device=25 * GB, cpu=5 * GB, gpu=900 * GB, name="X"
)
LINEAR = Amounts(60 * GB, 20 * GB, 60 * GB, 20 * GB, 60.0 * GB, 60.0 * GB)
SPEEDS = st.floats(1e6, 1e13)


def _choice(
    probe: Probe = PROBE, amounts: Amounts = LINEAR, *, cpu_workers: int = 1, gpus: int = 1
) -> Choice:
    return choose(probe, amounts, cpu_workers=cpu_workers, gpus=gpus)


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
    assert _choice(amounts=heavy, cpu_workers=64).device == "cpu"
    slow = replace(PROBE, gpu=6 * GB)
    assert _choice(slow, heavy).device == "cuda"
    assert _choice(slow, heavy, cpu_workers=8, gpus=8).device == "cuda"
    assert _choice(slow, heavy, cpu_workers=8, gpus=2).device == "cpu"


@settings(deadline=None, max_examples=200)
@given(
    probe=st.builds(Probe, SPEEDS, SPEEDS, SPEEDS, SPEEDS, SPEEDS, SPEEDS, st.just("X")),
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
    assert _choice(amounts=Amounts(0, 0, 0, 0, 0.0, 0.0)).device == "cpu"


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
    assert ties.cpu_work / ties.computed == 4
    assert linear.cpu_work / linear.computed == 1


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
