"""How fast methods are said to be: what a lane does with BF16 is what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import method_speed, speeds
from benchmarks.speeds import Clock, SpeedBench, expression_of

from raymerge.dtypes import DType
from raymerge.methods import Method, StoredKernel, find_method, methods
from raymerge.storage.local import LocalStore


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> SpeedBench:
    """Tensors of a block and a bit."""
    return SpeedBench(tmp_path_factory.mktemp("speeds"), shape=(272, 256), matrix=(24, 16))


def _method(name: str) -> Method:
    found = find_method(name)
    assert found is not None
    return found


def _busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_what_is_set_aside_does_not_count() -> None:
    clock = Clock()

    def work() -> None:
        clock.without(lambda: _busy(0.1))
        _busy(0.02)

    assert 0.02 <= clock.seconds(work) < 0.1
    assert clock.aside >= 0.1


def _noting(kernel: StoredKernel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each result that a kernel makes as it is stored."""
    counts: list[int] = []
    apply_stored: Callable[..., bool] = kernel.apply_stored

    def noting(stored: Any, *rest: Any) -> bool:
        counts.append(stored.count)
        return apply_stored(stored, *rest)

    monkeypatch.setattr(type(kernel), "apply_stored", lambda _, *given: noting(*given))
    return counts


@pytest.mark.parametrize("name", ["linear", "ties", "slerp"])
def test_bf16_is_measured_as_lanes_take_it(
    name: str, bench: SpeedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles as they are stored, and none of them piece by piece."""
    method = _method(name)
    assert isinstance(method.kernel, StoredKernel)
    counts = _noting(method.kernel, monkeypatch)
    pieces: list[object] = []
    monkeypatch.setattr(type(method.kernel), "apply", lambda *given: pieces.append(given))
    with monkeypatch.context() as patched:
        # Warming up computes in both forms.
        patched.setattr("raymerge.execute.segment.warm_up", lambda *_: None)
        assert bench.method_seconds(method, rounds=2) > 0
    assert sum(counts) == 3 * 272 * 256
    assert pieces == []


def test_reading_and_writing_do_not_count(bench: SpeedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = _method("linear")
    before = bench.method_seconds(linear)
    read_extent = LocalStore.read_extent

    def slow(*args: Any, **options: Any) -> int:
        _busy(0.1)
        return read_extent(*args, **options)

    monkeypatch.setattr(LocalStore, "read_extent", slow)
    monkeypatch.setattr(LocalStore, "write_extent", lambda *_: pytest.fail("something was written"))
    after = bench.method_seconds(linear, rounds=1)
    # One read of a tenth of a second would be 500 ns for each element.
    assert after < before + 100e-9


@pytest.mark.parametrize("name", list(methods()))
def test_every_method_has_a_speed(name: str, bench: SpeedBench) -> None:
    assert 0 < bench.method_seconds(_method(name), rounds=1) < 1e-3
    assert expression_of(_method(name)).cast is DType.BF16


def test_a_copy_is_faster_than_any_method(bench: SpeedBench) -> None:
    assert 0 < bench.copied_byte_seconds() < bench.method_seconds(_method("arcee_fusion"), rounds=1)


def test_the_shortest_round_counts(bench: SpeedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(speeds.Clock, "seconds", lambda *_: next(taken))
    assert bench.method_seconds(_method("slerp")) == pytest.approx(1.0 / (2 * 272 * 256))


def _forms(name: str) -> list[str]:
    return [line.split()[1] for line in method_speed.lines_of(_method(name), rounds=1)]


def test_kernels_are_timed_in_each_form_that_they_have() -> None:
    assert _forms("linear") == ["pieces", "stored"]
    assert _forms("slerp") == ["pieces", "stored"]
    assert _forms("passthrough") == ["pieces"]


def test_a_kernel_that_wants_pieces_after_all_is_timed_with_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(_method("linear").kernel), "apply_stored", lambda *_: False)
    assert _forms("linear") == ["pieces"]


def test_an_unknown_method_is_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        method_speed.main(["liner"])
    assert "no method is called liner; there are linear, passthrough" in capsys.readouterr().err
