"""What the simulated GPU of the kit does with code that is right, and with code that is not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from kits.simulated_gpu import SimulatedGpu, simulated_gpu, without_gpu

pytestmark = without_gpu

SEEDS = range(12)
POISONED = torch.full((4,), 0xCB, dtype=torch.uint8).view(torch.float32).item()


def _outcomes(run: Callable[[SimulatedGpu], float]) -> set[float]:
    found = set()
    for seed in SEEDS:
        with simulated_gpu(seed) as gpu:
            found.add(run(gpu))
    return found


def _pinned(value: float) -> torch.Tensor:
    return torch.empty(4, pin_memory=True).fill_(value)


def test_it_is_there_and_gone() -> None:
    with simulated_gpu():
        assert torch.cuda.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        made = torch.arange(3.0, device="cuda") * 2
        assert (made.device, made.is_cuda) == (torch.device("cuda", 0), True)
        assert made.tolist() == [0, 2, 4]
        assert _pinned(1.0).is_pinned()
    assert not torch.cuda.is_available()
    assert torch.accelerator.current_accelerator() is None
    with pytest.raises(NotImplementedError, match="CUDA"):
        torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="is gone"):
        made.add(1)


def test_streams_overtake_each_other_and_events_keep_the_order() -> None:
    def computed(is_ordered: bool) -> Callable[[SimulatedGpu], float]:
        def run(gpu: SimulatedGpu) -> float:
            first, second = torch.cuda.Stream(), torch.cuda.Stream()
            data = torch.zeros(4, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(first):
                data.add_(1.0)
                event = first.record_event()
            with torch.cuda.stream(second):
                if is_ordered:
                    second.wait_event(event)
                data.mul_(3.0)
            torch.cuda.synchronize()
            return float(data.sum())

        return run

    assert _outcomes(computed(True)) == {12.0}
    assert _outcomes(computed(False)) == {12.0, 4.0}


def test_pinned_memory_is_read_and_written_late_other_memory_at_once() -> None:
    def uploaded(host: torch.Tensor) -> float:
        host.fill_(1.0)
        data = host.to("cuda", non_blocking=True)
        host.fill_(2.0)
        return float(data[0])

    def downloaded(host: torch.Tensor) -> float:
        host.copy_(torch.full((4,), 5.0, device="cuda"), non_blocking=True)
        return float(host[0])

    assert _outcomes(lambda _: uploaded(_pinned(0.0))) == {1.0, 2.0}
    assert _outcomes(lambda _: uploaded(torch.empty(4))) == {1.0}
    assert _outcomes(lambda _: downloaded(_pinned(0.0))) == {0.0, 5.0}
    assert _outcomes(lambda _: downloaded(torch.zeros(4))) == {5.0}
    # Numbers of another type go by memory that is not pinned.
    assert _outcomes(lambda _: downloaded(torch.empty(4, dtype=torch.float64, pin_memory=True))) == {5.0}


def test_memory_is_poisoned_before_and_after() -> None:
    def used(is_recorded: bool) -> Callable[[SimulatedGpu], float]:
        def run(gpu: SimulatedGpu) -> float:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                data = torch.ones(4, device="cuda")
            side.synchronize()
            total = data * 2.0
            if is_recorded:
                data.record_stream(torch.cuda.current_stream())
            del data
            side.synchronize()
            return float(total[0])

        return run

    assert _outcomes(lambda _: float(torch.empty(1, device="cuda"))) == {POISONED}
    assert _outcomes(used(True)) == {2.0}
    assert _outcomes(used(False)) == {2.0, 2 * POISONED}


def test_what_a_gpu_refuses() -> None:
    with simulated_gpu(), pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
        torch.zeros(2, device="cuda").numpy()
    with simulated_gpu(), pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.zeros(2, device="cuda").add(torch.ones(2))
    with simulated_gpu():
        assert torch.zeros(2, device="cuda").add(torch.tensor(2.0)).tolist() == [2, 2]


def test_memory_is_counted_and_has_an_end() -> None:
    with simulated_gpu(memory_bytes=4096) as gpu:
        data = torch.zeros(512, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            data + 1.0, data + 2.0, torch.empty(513, device="cuda")
        del data
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 4096)
        assert gpu.peak_bytes == 4096


def test_operations_fail_as_they_are_told_to() -> None:
    with simulated_gpu() as gpu:
        gpu.fault = lambda name: torch.AcceleratorError("CUDA error: x") if name == "mm" else None
        data = torch.eye(2, device="cuda")
        with pytest.raises(torch.AcceleratorError, match="CUDA error: x"):
            torch.mm(data, data)


def test_numbers_are_divided_by_their_reciprocals() -> None:
    values = torch.linspace(1, 2, 1000)
    with simulated_gpu():
        by_number = (values.to("cuda") / 3.0).cpu()
        by_tensor = (values.to("cuda") / torch.full((), 3.0, device="cuda")).cpu()
    assert torch.equal(by_number, values * (1 / torch.tensor(3.0)))
    assert not torch.equal(by_number, values / 3.0)
    assert torch.equal(by_tensor, values / 3.0)


def test_every_thread_has_it_and_a_stream_of_its_own() -> None:
    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(float(torch.ones(3, device="cuda").sum()))

    with simulated_gpu():
        found: list[float] = []
        threads = [threading.Thread(target=run) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert found == [3.0, 3.0]
