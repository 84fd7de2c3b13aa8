"""How fast methods are said to be: what a lane does with BF16 is what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import speeds
from benchmarks.speeds import Speed, SpeedBench, expression_of, speed_of
from kits.method_kit import method_named

from raymerge.merge_plan.expressions import Expression
from raymerge.methods import Kernel, StoredKernel
from raymerge.runtime.workers.sizing import cores_here
from raymerge.storage.local.store import LocalStore


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


def test_reading_and_writing_do_not_count(bench: SpeedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = method_named("linear")
    before = bench.method_speed(linear)
    read_extent = LocalStore.read_extent

    def slow(*args: Any, **options: Any) -> int:
        time.sleep(0.1)
        return read_extent(*args, **options)

    monkeypatch.setattr(LocalStore, "read_extent", slow)
    monkeypatch.setattr(LocalStore, "write_extent", lambda *_: pytest.fail("something was written"))
    after = bench.method_speed(linear, rounds=1)
    # Three reads of a tenth of a second for each tensor.
    assert after.tensor < before.tensor + 0.1
    assert after.element < before.element + 500e-9


def test_waiting_for_leave_does_not_count(bench: SpeedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = method_named("linear")
    monkeypatch.setattr(speeds, "cores_here", lambda: 3)
    assert isinstance(linear.kernel, StoredKernel)
    apply_stored = type(linear.kernel).apply_stored

    def slow(*args: Any) -> None:
        time.sleep(0.01)
        apply_stored(*args)

    monkeypatch.setattr(type(linear.kernel), "apply_stored", slow)
    made_of = expression_of(linear)
    # Three lanes that compute one after the other, each for as long as if it were alone.
    alone, among = (_long_seconds(bench, made_of, threads) for threads in (3, 1))
    assert among < 2 * alone


def _long_seconds(bench: SpeedBench, made_of: Expression, threads: int) -> float:
    found = bench.speed(made_of, rounds=1, threads=threads)
    return found.element * 3 * 272 * 256 + found.tensor


def test_two_lengths_tell_elements_from_tensors() -> None:
    assert speed_of((100.0, 7.0), (10.0, 2.5)) == Speed(element=0.05, tensor=2.0)
    assert speed_of((100.0, 5.0)) == Speed(element=0.05, tensor=0.0)
    # What a measurement says that cannot be is taken for nothing.
    assert speed_of((100.0, 10.0), (10.0, 0.5)).tensor == 0
    assert speed_of((100.0, 1.0), (10.0, 2.0)) == Speed(element=0.0, tensor=2.0)
