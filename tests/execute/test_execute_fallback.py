"""When a GPU fails: the segment is made on the processor, with the same bytes, and the receipt says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.merge_cases import Family, make_family, recipes
from kits.recipe_maker import linear
from kits.segment_bench import Bench, counted_buffers, make_bench

from raymerge import device_numerics
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError
from raymerge.execute import segment as module
from raymerge.execute.reading import Load, Raw
from raymerge.execute.transfers import Arrival, HostTransfers

Failure = Callable[[], Exception]
"""Makes a new error each time: one that was raised keeps alive what it came through."""


def _full() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.\nGPU 0 has ...")


def _broken() -> Exception:
    kind: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
    error = kind.__new__(kind)
    error.args = ("CUDA error: an illegal memory access was encountered\nCompile with ...",)
    return error


def _cublas() -> Exception:
    return RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, m)`")


def _cusolver() -> Exception:
    return RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXsyevd()`")


class _Gpu(HostTransfers):
    """Stands in for a GPU: computes on the processor, and fails at one of the places where a GPU can."""

    def __init__(self, place: str, error: Failure | None) -> None:
        self._place, self._error = place, error

    @property
    def device(self) -> torch.device:
        """The processor by another name, so that no lane of it takes this one's memory."""
        return torch.device("cpu", 0)

    def _reach(self, place: str) -> None:
        if place == self._place and self._error is not None:
            raise self._error()

    def buffer(self, nbytes: int) -> torch.Tensor:
        self._reach("buffer")
        return super().buffer(nbytes)

    def upload(self, load: Load, raws: Sequence[Raw]) -> tuple[tuple[Raw, ...], None]:
        self._reach("upload")
        return super().upload(load, raws)

    def download(  # type: ignore[override]
        self, result: torch.Tensor, dtype: DType, target: torch.Tensor
    ) -> Arrival:
        self._reach("download")
        super().download(result, dtype, target)
        return self

    def synchronize(self) -> None:
        """As the arrival of every result."""
        self._reach("synchronize")


class _Machine:
    """A machine with such a GPU; its failure can be mended."""

    def __init__(self, place: str, error: Failure | None) -> None:
        self.place, self.error = place, error
        self.asked: list[str] = []

    def transfers_for(self, device: torch.device) -> HostTransfers:
        self.asked.append(device.type)
        return _Gpu(self.place, self.error) if device.type == "cuda" else HostTransfers()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("models"), hidden=256)


@pytest.fixture(autouse=True)
def _full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU, which is none, computes in full."""
    monkeypatch.setattr(device_numerics, "check_full_float32", lambda _: None)


def _bench(family: Family, root: Path, machine: _Machine, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(module, "transfers_for", machine.transfers_for)
    monkeypatch.setattr(module, "warm_up", lambda *_: None)
    return make_bench(recipes(family)["linear"], root, device="cuda")


PLACES = ["buffer", "upload", "download", "synchronize"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [_full, _broken, _cublas, _cusolver], ids=["full", "broken", "cublas", "cusolver"]
)
def test_wherever_it_fails_the_processor_gives_the_bytes(
    place: str, error: Failure, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_bench(recipes(family)["linear"], tmp_path / "alone")
    alone = [expected.runner.run(number) for number in expected.segments]
    bench = _bench(family, tmp_path / "gpu", _Machine(place, error), monkeypatch)
    receipts = [bench.runner.run(number) for number in bench.segments]
    assert dict(bench.written()) == dict(expected.written())
    assert [each.digests for each in receipts] == [each.digests for each in alone]
    assert [each.read_bytes for each in receipts] == [each.read_bytes for each in alone]
    assert all(each.note for each in receipts)
    assert all(each.peak_device == 0 for each in receipts)


@pytest.mark.parametrize(
    ("place", "error", "note", "is_tried_again"),
    [
        ("upload", _full, "has too little memory: CUDA out of memory. Tried to allocate 4.00 MiB.", True),
        ("download", _broken, "failed: CUDA error: an illegal memory access was encountered", False),
    ],
    ids=["too little memory", "broken"],
)
def test_only_for_too_little_memory_the_gpu_is_tried_again(
    place: str,
    error: Failure,
    note: str,
    is_tried_again: bool,
    family: Family,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = _Machine(place, error)
    bench = _bench(family, tmp_path, machine, monkeypatch)
    first = bench.runner.run(0)
    machine.error = None
    second = bench.runner.run(1)
    assert (first.note, second.note) == (f"the GPU {note}", "" if is_tried_again else f"the GPU {note}")
    # The second segment on the processor has the memory of the first.
    assert machine.asked == ["cuda", "cpu", *(["cuda"] if is_tried_again else [])]


def test_memory_for_the_gpu_makes_way_for_memory_for_the_processor(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that changes its device does not hold the memory of both."""
    machine = _Machine("upload", None)
    bench = _bench(family, tmp_path, machine, monkeypatch)
    assert bench.projection.lanes == 1
    with counted_buffers() as buffers:
        bench.runner.run(0)
        alone = buffers.most
        for error in (_full, None, _full):
            machine.error = error
            bench.runner.run(1)
        # Of its share a lane asks for half on a GPU, where it may become twice as much, and for all else.
        assert buffers.most <= 2 * alone
    assert machine.asked == ["cuda", "cuda", "cpu", "cuda", "cuda", "cpu"]


def test_what_is_not_the_gpu_s_fault_is_raised(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk would come again on the processor, and no note may hide it."""
    machine = _Machine("upload", lambda: OSError("broken"))
    bench = _bench(family, tmp_path, machine, monkeypatch)
    with pytest.raises(OSError, match="broken"):
        bench.runner.run(0)
    assert machine.asked == ["cuda"]


def test_a_bad_value_is_blamed_on_its_source_and_not_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architectures": ["Odd"], "model_type": "odd"}
    tensors = {name: torch.full((100,), value) for name, value in (("one", 1.0), ("two", float("nan")))}
    roots = [write_checkpoint(tmp_path / n, {"a.weight": each}, config) for n, each in tensors.items()]
    machine = _Machine("", None)
    monkeypatch.setattr(module, "transfers_for", machine.transfers_for)
    monkeypatch.setattr(module, "warm_up", lambda *_: None)
    bench = make_bench(linear(*roots), tmp_path / "out", device="cuda")
    with pytest.raises(NonFiniteError, match=r"two: a\.weight"):
        bench.runner.run(0)
    assert machine.asked == ["cuda"]


def test_a_gpu_that_works_has_no_note(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _Machine("", None)
    bench = _bench(family, tmp_path, machine, monkeypatch)
    assert {bench.runner.run(number).note for number in bench.segments} == {""}
    assert set(machine.asked) == {"cuda"}
