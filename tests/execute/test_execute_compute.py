"""Computing: threads, warm-up, and the heap."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.marks import slow_but

from raymerge.checkpoints.quantisation.encoding import Encoding, Format, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import formats
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.views import View
from raymerge.devices import DeviceError
from raymerge.dtypes import DType
from raymerge.execute import segment
from raymerge.execute.compute import PartComputation, Scratch
from raymerge.execute.decoding import decode, encode, rounded
from raymerge.execute.segment import HeapWatch, Resident, warm_up
from raymerge.merge_plan.elements import torch_dtype
from raymerge.merge_plan.expressions import (
    Expression,
    Read,
    conversion_expression,
    copy_expression,
    make_expression,
)
from raymerge.merge_plan.jobs import JobPart
from raymerge.methods import Access, BaseUse, Method, Settings, find_method, methods

CPU = torch.device("cpu")
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64, DType.F8_E4M3, DType.F8_E5M2)


def _input(dtype: DType, view: View | None = None) -> Read:
    return Read(0, 0, "model.safetensors", 0, 0, dtype, view)


def _raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_decoding_never_gives_the_raw_memory(dtype: DType) -> None:
    stored = torch.ones(8).to(torch_dtype(dtype))
    raw = _raw(stored).clone()
    before = raw.clone()
    decode(raw, _input(dtype), CPU).mul_(3)
    assert torch.equal(raw, before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_encoding_rounds_once_and_reading_it_back_is_exact(dtype: DType) -> None:
    values = torch.randn(513, generator=torch.Generator().manual_seed(2))
    data = rounded(values, dtype)
    assert data.dtype == torch.uint8
    assert data.numel() == dtype.nbytes(513)
    assert torch.equal(data.view(torch_dtype(dtype)).float(), values.to(torch_dtype(dtype)).float())
    assert torch.equal(rounded(decode(data, _input(dtype), CPU), dtype), data)


@pytest.mark.parametrize("shift", range(9))
@pytest.mark.parametrize("dtype", FLOATS)
def test_elements_may_begin_at_any_byte(dtype: DType, shift: int) -> None:
    """Files may hold tensors at odd places, and outputs follow on others of odd length."""
    values = torch.randn(99, generator=torch.Generator().manual_seed(3))
    memory = torch.zeros(shift + dtype.nbytes(99), dtype=torch.uint8)
    encode(values, dtype, memory[shift:])
    assert torch.equal(memory[shift:], rounded(values, dtype))
    assert torch.equal(decode(memory[shift:], _input(dtype), CPU), values.to(torch_dtype(dtype)).float())


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
@settings(deadline=None, max_examples=30)
def test_a_permuted_view_is_gathered_in_logical_order(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    lead = data.draw(st.integers(0, 7))
    flat = torch.arange(float(lead + prod(shape) + 3))
    wanted = flat[lead : lead + prod(shape)].view(shape).permute(order)
    view = View(lead, tuple(wanted.shape), tuple(wanted.stride()))
    assert torch.equal(decode(_raw(flat), _input(DType.F32, view), CPU), wanted.flatten())


def test_an_unknown_method_is_refused_before_anything_is_computed() -> None:
    expression = Expression("telepathy", False, '{"sources":[{}],"values":{}}', DType.F32)
    with pytest.raises(ValueError, match="telepathy"):
        PartComputation(
            expression, JobPart("t", (1,), None, ()), num_elements=1, seed=0, scratch=Scratch(CPU)
        )


def test_a_conversion_computes_nothing() -> None:
    stored = torch.tensor([1.0, 2.5, -3.0], dtype=torch.bfloat16)
    part = JobPart("t", (3,), None, (_input(DType.BF16),))
    made = PartComputation(
        conversion_expression(DType.F32), part, num_elements=3, seed=0, scratch=Scratch(CPU)
    )
    (piece,) = made.pieces([_raw(stored)], 0, 3)
    assert torch.equal(made.apply(piece), stored.float())


NUMBERS = {"weight": 0.3, "t": 0.5, "density": 0.5, "lambda": 1.0, "gamma": 0.02, "epsilon": 0.1}


def _settings(method: Method, count: int) -> Settings:
    values: dict[str, dict[str, Any]] = {"global": {}, "source": {}}
    for each in method.parameters:
        values[each.scope][each.name] = NUMBERS.get(each.name, each.default)
    return Settings(values["global"], (values["source"],) * count)


def _expression(name: str, count: int = 2) -> Expression:
    method = find_method(name)
    assert method is not None
    settings = _settings(method, min(count, method.max_sources or count))
    return make_expression(method, settings, has_base=method.base is BaseUse.REQUIRED, cast=DType.BF16)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Notes with what was computed: methods, and how many sources they had."""
    found: list[tuple[str, int]] = []
    whole = segment._compute

    def compute(method: Method, settings: Settings, device: torch.device, *, has_base: bool) -> None:
        found.append((method.name, len(settings.sources)))
        whole(method, settings, device, has_base=has_base)

    monkeypatch.setattr(segment, "_compute", compute)
    return found


@pytest.mark.parametrize("name", slow_but(methods(), *(methods().keys() - {"sce"})))
def test_every_method_warms_up_or_says_why_not(name: str, computed: list[tuple[str, int]]) -> None:
    method = find_method(name)
    assert method is not None
    expression = _expression(name)
    warm_up([expression], CPU)
    is_left = method.bound_to_shape or method.access_with(_settings(method, 2)) is Access.MATRIX
    assert [found for found, _ in computed] == ([] if is_left else [name])


def test_each_method_is_computed_once_for_each_number_of_sources(computed: list[tuple[str, int]]) -> None:
    again = replace(_expression("linear"), cast=DType.F32)
    warm_up([copy_expression(DType.BF16), _expression("linear"), again, _expression("linear", 3)], CPU)
    assert computed == [("linear", 2), ("linear", 3)]


def test_settings_of_one_shape_are_not_tried_on_another() -> None:
    """A slice of neurons of a wider matrix than the one that is warmed up with."""
    method = find_method("upcycle")
    assert method is not None
    settings = _settings(method, 1)
    source = {**settings.sources[0], "reinit_fraction": 0.5, "neuron_first": 4, "num_neurons": 8}
    settings = replace(settings, sources=(source,))
    warm_up([make_expression(method, settings, has_base=False, cast=DType.BF16)], CPU)


def test_a_gpu_that_cannot_be_begun_with_is_told_apart() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceError):
        warm_up([], torch.device("cuda"))


@pytest.mark.parametrize("form", list(formats()))
def test_every_format_warms_up(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a segment calls was called before: all loops of the codec, and the sum in one call."""
    called: list[str] = []
    for name in ("is_summed_at_once", "warm_up_sums", "codec_of"):
        original = getattr(segment, name)

        def noting(*args: Any, of: Any = original, name: str = name) -> Any:
            called.append(name)
            return of(*args)

        monkeypatch.setattr(segment, name, noting)
    encode = usual_quant_spec(form, (256, 256)).encoding
    warm_up([replace(_expression("linear"), encode=encode)], CPU)
    assert "codec_of" in called
    assert ("warm_up_sums" in called) == (form in (FP8_BLOCK, FP8_CHANNEL))


@pytest.mark.parametrize("columns", [96, 304, 512])
def test_groups_that_do_not_divide_the_usual_columns_warm_up(columns: int) -> None:
    """INT4 by groups of 512, or with one scale for each row."""
    encode = Encoding(INT4, (1, columns), DType.BF16, power_of_two=False)
    warm_up([replace(_expression("linear"), encode=encode)], CPU)


class _Process:
    """A process whose memory is what the test says, of which releasing frees some."""

    def __init__(self, resident: int, *, free: int) -> None:
        self.resident, self.free, self.released = resident, free, 0

    def release(self) -> None:
        self.released += 1
        self.resident -= self.free


def _watch(process: _Process, limit: int = 100) -> HeapWatch:
    return HeapWatch(limit, process.release, lambda: Resident(process.resident, 0, 0))


def test_free_memory_is_given_back_above_the_limit_only() -> None:
    process = _Process(1000, free=80)
    watch = _watch(process)
    process.resident = 1100
    watch.check()
    assert process.released == 0
    process.resident = 1101
    watch.check()
    assert (process.released, process.resident) == (1, 1021)


def test_what_does_not_go_away_is_not_asked_for_again() -> None:
    process = _Process(1000, free=0)
    watch = _watch(process)
    process.resident = 5000
    for _ in range(3):
        watch.check()
    assert process.released == 1
    process.resident = 5051
    watch.check()
    assert process.released == 2


def test_the_peak_is_the_most_that_was_found_beyond_the_idle_process() -> None:
    process = _Process(1000, free=80)
    watch = HeapWatch(1000, resident=lambda: Resident(process.resident + 200, 1500, 200))
    for resident in (1040, 1250, 1010):
        process.resident = resident
        watch.check()
    assert watch.peak_bytes == 250


@pytest.mark.parametrize(("before", "peak"), [(1500, 700), (2199, 700), (2200, 40), (9000, 40)])
def test_the_system_knows_of_peaks_between_two_looks(before: int, peak: int) -> None:
    """But not where the process had been as large before."""
    process, most = _Process(1300, free=0), [before]
    watch = HeapWatch(1000, resident=lambda: Resident(process.resident + 200, most[0], 200))
    process.resident = 1340
    watch.check()
    most[0] = max(before, 2200)
    assert watch.peak_bytes == peak


@pytest.mark.slow
def test_what_was_freed_again_before_anybody_looked_is_in_the_peak() -> None:
    """In a process of its own, which was never larger before."""
    code = (
        "from raymerge.execute.segment import HeapWatch\n"
        "watch = HeapWatch(1 << 40)\n"
        "memory = b'x' * (150 << 20)\n"
        "del memory\n"
        "watch.check()\n"
        "assert 140 << 20 < watch.peak_bytes < 170 << 20, watch.peak_bytes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
