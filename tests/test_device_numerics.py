"""Float32 in full on every device, and what is done where a GPU fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from kits.gpu_arithmetic import multiply_in_tf32

from raymerge import device_numerics
from raymerge.device_numerics import Fallback, check_full_float32, full_float32, set_full_float32
from raymerge.errors import OptionError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MEMORY, FAILED = "the GPU has too little memory: ", "the GPU failed: "


@pytest.fixture
def settings() -> Iterator[None]:
    """Settings of torch that a test may change."""
    with full_float32():
        yield


def _settings() -> list[object]:
    """What torch says of its precision; the switch of each operation is the last word of newer versions."""
    found: list[object] = [each.fp32_precision for each in device_numerics._operations()]
    for read in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            found.append(read())
        except RuntimeError:
            found.append("mixed")
    return found


# Full float32


def _short_in_all() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True


def _short_by_operation() -> None:
    for each in device_numerics._operations():
        each.fp32_precision = "tf32"


def _short_by_default() -> None:
    torch.backends.fp32_precision = "tf32"


@pytest.mark.parametrize("shorten", [lambda: None, _short_in_all, _short_by_operation, _short_by_default])
def test_whatever_was_set_is_full_within_and_put_back(shorten: Callable[[], None], settings: None) -> None:
    is_new = hasattr(torch.backends, "fp32_precision")
    if shorten is _short_by_default and not is_new:
        pytest.skip("this version of torch has one switch for all")
    before_all = torch.backends.fp32_precision if is_new else None
    try:
        shorten()
        before = _settings()
        with full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.backends.cuda.matmul.allow_tf32 is False
            assert torch.backends.cudnn.allow_tf32 is False
            assert {each.fp32_precision for each in device_numerics._operations()} <= {"ieee"}
        assert _settings() == before
    finally:
        if is_new:
            torch.backends.fp32_precision = before_all


def test_a_product_tells_whether_numbers_are_cut(settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_tf32(monkeypatch)
    torch.set_float32_matmul_precision("high")
    with pytest.raises(OptionError, match=r"--device: float32 numbers .* NVIDIA_TF32_OVERRIDE"):
        check_full_float32(CPU)
    set_full_float32()
    check_full_float32(CPU)


def test_what_is_stronger_than_the_settings_is_seen(settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_tf32(monkeypatch, is_forced=True)
    set_full_float32()
    with pytest.raises(OptionError, match="not multiplied with all of their bits"):
        check_full_float32(CPU)


# GPUs that fail


class _Gpu:
    """Computes where it is asked to; on the GPU it fails with what is given."""

    def __init__(self, *failures: Exception | None) -> None:
        self._failures = list(failures)
        self.tried: list[str] = []

    def make(self, device: torch.device, note: str) -> str:
        self.tried.append(device.type)
        if device.type == "cuda" and (error := self._failures.pop(0)) is not None:
            raise error
        return note


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that are looked at, which all compute in full."""
    seen: list[torch.device] = []
    monkeypatch.setattr(device_numerics, "check_full_float32", seen.append)
    return seen


def test_a_gpu_that_failed_is_not_used_again_one_without_memory_is(full: list[torch.device]) -> None:
    short, broken = torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("cusolver error: 7")
    gpu, fallback = _Gpu(None, short, None, broken), Fallback(GPU)
    notes = [fallback.run(gpu.make) for _ in range(5)]
    assert notes == ["", MEMORY + "CUDA out of memory.", "", *[FAILED + "cusolver error: 7"] * 2]
    assert gpu.tried == ["cuda", "cuda", "cpu", "cuda", "cuda", "cpu", "cpu"]
    assert full == [GPU]


def test_a_defect_is_raised_on_a_gpu_as_on_a_processor(full: list[torch.device]) -> None:
    gpu = _Gpu(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    with pytest.raises(RuntimeError, match="must match"):
        Fallback(GPU).run(gpu.make)
    assert gpu.tried == ["cuda"]


def test_what_was_on_the_gpu_is_gone_before_the_processor_begins(full: list[torch.device]) -> None:
    """It is as much as the processor is going to take."""

    class Held:
        """Stands for what was computed with."""

    held: list[weakref.ref[Held]] = []

    def make(device: torch.device, note: str) -> bool:
        if device.type == "cuda":
            mine = Held()
            held.append(weakref.ref(mine))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        gc.collect()
        return held[0]() is None

    assert Fallback(GPU).run(make)


def test_a_gpu_is_looked_at_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing computed with short numbers goes unseen, though the GPU was busy when the worker started."""
    found: list[Exception] = [RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")]

    def check(_: torch.device) -> None:
        raise found.pop() if found else AssertionError("cut")

    monkeypatch.setattr(device_numerics, "check_full_float32", check)
    gpu, fallback = _Gpu(None), Fallback(GPU)
    assert fallback.run(gpu.make).startswith(MEMORY)
    with pytest.raises(AssertionError, match="cut"):
        fallback.run(gpu.make)
    assert gpu.tried == ["cpu"]


def test_the_version_of_torch_is_read_without_torch() -> None:
    """Whoever unpickles torch's own type of it loads torch: the driver, of what workers answer."""
    assert type(device_numerics.numerics_of(torch.device("cpu"))["torch"]) is str
