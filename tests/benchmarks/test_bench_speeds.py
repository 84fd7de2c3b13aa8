"""How fast methods are said to be: what a lane does with BF16 is what is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import speeds
from benchmarks.speeds import Speed, SpeedBench, speed_of
from kits.method_kit import method_named

from raymerge.methods import Kernel, StoredKernel
from raymerge.runtime.workers.sizing import cores_here


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> SpeedBench:
    root = tmp_path_factory.mktemp("speeds")
    return SpeedBench(root, shape=(272, 256), brief=(16, 256), matrix=(24, 16))


@pytest.fixture(autouse=True)
def _no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_LEAST_ELEMENTS", 1)


def _noting(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    assert isinstance(kernel, StoredKernel)
    apply_stored: Callable[..., None] = kernel.apply_stored

    def noting(stored: Any, *rest: Any) -> None:
        counts.append(stored.count)
        apply_stored(stored, *rest)

    monkeypatch.setattr(type(kernel), "apply_stored", lambda _, *given: noting(*given))
    return counts


@pytest.mark.parametrize("name", ["linear", "ties", "slerp"])
def test_bf16_is_measured_as_lanes_take_it(
    name: str, bench: SpeedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_named(name)
    counts = _noting(method.kernel, monkeypatch)
    pieces: list[object] = []
    monkeypatch.setattr(type(method.kernel), "apply", lambda *given: pieces.append(given))
    with monkeypatch.context() as patched:
        # Warming up computes in both forms.
        patched.setattr("raymerge.execute.segment.warm_up", lambda *_: None)
        found = bench.method_speed(method, rounds=2)
    assert found.element + found.tensor > 0
    # A round to warm up, and each of them on as many lanes as there are cores.
    assert sum(counts) == cores_here() * 3 * (272 + 16) * 256
    assert pieces == []


def test_two_lengths_tell_elements_from_tensors() -> None:
    assert speed_of((100.0, 7.0), (10.0, 2.5)) == Speed(element=0.05, tensor=2.0)
    assert speed_of((100.0, 5.0)) == Speed(element=0.05, tensor=0.0)
    # What a measurement says that cannot be is taken for nothing.
    assert speed_of((100.0, 10.0), (10.0, 0.5)).tensor == 0
    assert speed_of((100.0, 1.0), (10.0, 2.0)) == Speed(element=0.0, tensor=2.0)
