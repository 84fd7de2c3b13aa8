"""When a GPU fails: the segment is made on the processor, with the same bytes, and the receipt says so."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.merge_cases import Family, make_family, recipes
from kits.recipe_maker import linear
from kits.segment_bench import Bench, counted_buffers, make_bench
from kits.simulated_gpu import SimulatedGpu, never, simulated_gpu, without_gpu

from raymerge.errors import NonFiniteError

pytestmark = without_gpu

Failure = Callable[[], Exception]
"""Makes a new error each time: one that was raised keeps alive what it came through."""


def _full() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.\nGPU 0 has ...")


def _broken() -> Exception:
    kind: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
    return kind("CUDA error: an illegal memory access was encountered\nCompile with ...")


def _cublas() -> Exception:
    return RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, m)`")


def _cusolver() -> Exception:
    return RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXsyevd()`")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("models"), hidden=128, layers=1)


@pytest.fixture(scope="module")
def alone(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """What the processor makes."""
    made = make_bench(recipes(family)["linear"], tmp_path_factory.mktemp("alone"))
    for segment in made.segments:
        made.runner.run(segment)
    return made


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu(seed=4) as made:
        yield made


def _fail(gpu: SimulatedGpu, place: str, error: Failure) -> None:
    gpu.fault = lambda name: error() if name == place else None


PLACES = ("pin", "allocate", "copy_", "sub_", "synchronize")


@pytest.mark.sample(7)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [_full, _broken, _cublas, _cusolver], ids=["full", "broken", "cublas", "cusolver"]
)
def test_wherever_it_fails_the_processor_gives_the_bytes(
    place: str, error: Failure, family: Family, alone: Bench, gpu: SimulatedGpu, tmp_path: Path
) -> None:
    bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    _fail(gpu, place, error)
    receipts = [bench.runner.run(number) for number in bench.segments]
    assert dict(bench.written()) == dict(alone.written())
    assert all(each.note for each in receipts)
    assert all(each.peak_device == 0 for each in receipts)


@pytest.mark.parametrize(
    ("place", "error", "note", "is_tried_again"),
    [
        ("copy_", _full, "has too little memory: CUDA out of memory. Tried to allocate 4.00 MiB.", True),
        ("synchronize", _broken, "failed: CUDA error: an illegal memory access was encountered", False),
    ],
    ids=["too little memory", "broken"],
)
def test_only_for_too_little_memory_the_gpu_is_tried_again(
    place: str,
    error: Failure,
    note: str,
    is_tried_again: bool,
    family: Family,
    gpu: SimulatedGpu,
    tmp_path: Path,
) -> None:
    bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    _fail(gpu, place, error)
    first = bench.runner.run(0)
    gpu.fault, before = never, gpu.operations
    second = bench.runner.run(1)
    assert (first.note, second.note) == (f"the GPU {note}", "" if is_tried_again else f"the GPU {note}")
    assert (gpu.operations > before) == is_tried_again


def test_memory_that_runs_out_is_the_processor_s_after_all(
    family: Family, alone: Bench, tmp_path: Path
) -> None:
    with simulated_gpu(memory_bytes=1 << 20) as gpu:
        bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
        notes = {bench.runner.run(number).note for number in bench.segments}
        assert all(each.startswith("the GPU has too little memory: CUDA out of memory.") for each in notes)
        assert dict(bench.written()) == dict(alone.written())
        del bench
        # Nothing keeps what was on the GPU.
        assert (gpu.allocated_bytes, gpu.peak_bytes) == (0, 1 << 20)


@pytest.mark.slow
def test_memory_for_the_gpu_makes_way_for_memory_for_the_processor(
    family: Family, gpu: SimulatedGpu, tmp_path: Path
) -> None:
    """A lane that changes its device does not hold the memory of both."""
    bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    assert bench.projection.lanes == 1
    with counted_buffers() as buffers:
        for fault in (never, lambda _: _full(), never, lambda _: _full()):
            gpu.fault = fault
            note = bench.runner.run(1).note
            gpu.fault = never
            # What is still under way keeps its memory.
            torch.cuda.synchronize()
            gc.collect()
            assert (gpu.pinned_bytes > 0, buffers.live > 0) == ((False, True) if note else (True, False))


def test_a_gpu_that_fails_at_once_leaves_every_segment_to_the_processor(
    family: Family, alone: Bench, gpu: SimulatedGpu, tmp_path: Path
) -> None:
    _fail(gpu, "allocate", lambda: RuntimeError("CUDA unknown error\nmore of it"))
    bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    gpu.fault = never
    assert {bench.runner.run(number).note for number in bench.segments} == {
        "the GPU failed: CUDA unknown error"
    }
    assert dict(bench.written()) == dict(alone.written())


def test_a_gpu_whose_memory_is_taken_is_tried_by_the_segments(
    family: Family, gpu: SimulatedGpu, tmp_path: Path
) -> None:
    _fail(gpu, "allocate", _full)
    bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    assert bench.runner.run(0).note.startswith("the GPU has too little memory: CUDA out of memory.")
    gpu.fault = never
    assert bench.runner.run(1).note == ""


def test_what_is_not_the_gpu_s_fault_is_raised(family: Family, gpu: SimulatedGpu, tmp_path: Path) -> None:
    """An error of the disk would come again on the processor, and no note may hide it."""
    bench = make_bench(recipes(family)["linear"], tmp_path, device="cuda")
    _fail(gpu, "copy_", lambda: OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        bench.runner.run(0)


def test_a_defect_of_a_method_ends_the_worker(family: Family, gpu: SimulatedGpu, tmp_path: Path) -> None:
    """On a GPU as on a processor: no note may hide it."""
    _fail(gpu, "sub_", lambda: ValueError("no such axis"))
    with pytest.raises(ValueError, match="no such axis"):
        make_bench(recipes(family)["linear"], tmp_path, device="cuda")


def test_a_bad_value_is_blamed_on_its_source_and_not_on_the_gpu(gpu: SimulatedGpu, tmp_path: Path) -> None:
    config = {"architectures": ["Odd"], "model_type": "odd"}
    tensors = {name: torch.full((100,), value) for name, value in (("one", 1.0), ("two", float("nan")))}
    roots = [write_checkpoint(tmp_path / n, {"a.weight": each}, config) for n, each in tensors.items()]
    bench = make_bench(linear(*roots), tmp_path / "out", device="cuda")
    with pytest.raises(NonFiniteError, match=r"two: a\.weight"):
        bench.runner.run(0)
