"""Ways to and from a device: the same bytes on each, and nothing used before it has arrived or left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.assembly_maker import expression, made, make_stock, plan_of, row_of, whole
from kits.merge_cases import make_family, recipes
from kits.segment_bench import make_bench

from raymerge.dtypes import DType
from raymerge.execute import transfers as module
from raymerge.execute.ops import RawRows
from raymerge.execute.tiles import Load, TileJob
from raymerge.execute.transfers import CudaTransfers, HostTransfers
from raymerge.merge_plan.expressions import Expression, Output, Part, Read, Row, assembled, copy_expression
from raymerge.storage.local.buffers import ALIGNMENT

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _load(*expressions: Expression) -> Load:
    """A tile of each of some expressions over one input."""
    read = Read(0, 0, "f", 0, 8, DType.F32, None)
    rows = [row_of(each, [read], (2,), index=index) for index, each in enumerate(expressions)]
    return Load(tuple(TileJob(row, 0, 2, 0) for row in rows), 0, 0)


# The processor


@pytest.mark.parametrize("nbytes", [0, 1, ALIGNMENT, 3 << 20])
def test_a_buffer_is_whole_pages_of_what_was_asked_for_at_least(nbytes: int) -> None:
    buffer = HostTransfers().buffer(nbytes)
    assert buffer.dtype is torch.uint8
    assert buffer.data_ptr() % ALIGNMENT == 0
    assert nbytes <= buffer.numel() <= nbytes + ALIGNMENT


# The order of calls


class _Stream:
    """Stands in for a stream: notes what happens on it."""

    names: Iterator[str] = iter(())
    log: list[str]

    def __init__(self, _: torch.device) -> None:
        self.name = next(type(self).names)

    def wait_event(self, event: _Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for all on {other.name}")


class _Event:
    log: list[str]

    def __init__(self) -> None:
        self.name = ""

    def record(self, stream: _Stream) -> None:
        self.name = f"the event on {stream.name}"
        self.log.append(f"record on {stream.name}")


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and notes who uses it."""

    notes: list[str] = []

    def to(self, *args: Any, **how: Any) -> torch.Tensor:
        if isinstance(args[0], torch.dtype):
            return super().to(*args, **how)
        self.notes.append(f"to the GPU, waiting: {not how.get('non_blocking')}")
        return self

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: _Stream) -> None:  # type: ignore[override]
        self.notes.append(f"in use on {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams, events and tensors note, with those of torch replaced."""
    notes: list[str] = []

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        notes.append(f"on {stream.name}:")
        yield
        notes.append("end")

    for kind, name in ((_Stream, "log"), (_Event, "log"), (_OnGpu, "notes")):
        monkeypatch.setattr(kind, name, notes, raising=False)
    monkeypatch.setattr(_Stream, "names", iter(("up", "compute", "down")))
    for name, stand_in in (("Stream", _Stream), ("Event", _Event), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return notes


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(_OnGpu)


def test_inputs_are_copied_on_their_own_stream_and_waited_for(log: list[str]) -> None:
    transfers = CudaTransfers(torch.device("cuda"))
    load = _load(expression("linear", sources=1), copy_expression(DType.F32))
    raws = [[_on_gpu(torch.zeros(8, dtype=torch.uint8))], [_on_gpu(torch.ones(8, dtype=torch.uint8))]]
    moved, arrival = transfers.upload(load, raws)
    # What is only copied stays on the host.
    assert log == ["on up:", "to the GPU, waiting: False", "record on up", "end"]
    assert moved[1] is raws[1]
    log.clear()
    transfers.arrive(moved[:1], arrival)
    assert log == ["compute waits for the event on up", "in use on compute"]
    log.clear()
    with transfers.computing():
        assert log == ["on compute:"]


def test_rows_to_assemble_stay_on_the_host_until_they_are_used(log: list[str]) -> None:
    transfers = CudaTransfers(torch.device("cuda"))
    rows = RawRows(0, 0, 0, 0, (), (), ())
    moved, arrival = transfers.upload(_load(expression("linear", sources=1)), [[rows]])
    assert moved[0][0] is rows
    transfers.arrive(moved, arrival)
    assert "in use on compute" not in log


def test_results_leave_when_they_are_computed_and_their_memory_is_kept_so_long(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = CudaTransfers(torch.device("cuda"))
    monkeypatch.setattr(module, "rounded", lambda *_: _on_gpu(torch.arange(4, dtype=torch.uint8)))
    target = torch.zeros(4, dtype=torch.uint8)
    transfers.download(torch.zeros(2), DType.BF16, target)
    assert target.tolist() == [0, 1, 2, 3]
    assert log == [
        *("down waits for all on compute", "on down:"),
        *("in use on down", "record on down", "end"),
    ]


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_what_is_on_its_way_is_not_where_the_next_piece_is_put(
    dtype: DType, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 result may lie in the memory of its piece, which the next piece will overwrite."""
    del log
    sent: list[Any] = []
    monkeypatch.setattr(_OnGpu, "copy_", lambda _, data, **__: sent.append(data), raising=False)
    transfers = CudaTransfers(torch.device("cuda"))
    result = _on_gpu(torch.ones(2))
    transfers.download(result, dtype, _on_gpu(torch.zeros(dtype.nbytes(2), dtype=torch.uint8)))
    (data,) = sent
    assert data.untyped_storage().data_ptr() != result.untyped_storage().data_ptr()


# A GPU


@needs_cuda
@pytest.mark.parametrize("name", ["linear", "ties", "slerp", "dare_linear", "passthrough"])
@pytest.mark.parametrize("budget", [16 << 20, 1 << 30])
def test_a_gpu_gives_the_bytes_that_the_processor_gives(name: str, budget: int, tmp_path: Path) -> None:
    recipe = recipes(make_family(tmp_path / "models", hidden=640, layers=2))[name]
    found = []
    for device in ("cpu", "cuda"):
        bench = make_bench(recipe, tmp_path / device, budget=budget, device=device)
        receipts = [bench.runner.run(number) for number in bench.segments]
        assert not any(receipt.note for receipt in receipts)
        found.append(dict(bench.written()))
    assert found[0] == found[1]


@needs_cuda
def test_a_gpu_assembles_the_rows_that_the_processor_assembles(tmp_path: Path) -> None:
    stock = make_stock(tmp_path / "s", {"a": torch.randn(3000, 640)}, {"a": torch.randn(3000, 640)})
    reads = tuple(assembled(0, whole(stock.term("a", source), 640)) for source in (0, 1))
    made_of = expression("linear", sources=2, weight=0.5)
    row = Row(3000 * 640, made_of, (Part("out", (3000, 640), None),), reads)
    plan = plan_of(stock, [Output("out", DType.F32, (3000, 640), (row,), True)])
    found = [made(stock, plan, tmp_path / device, device=device) for device in ("cpu", "cuda")]
    assert found[0] == found[1]
