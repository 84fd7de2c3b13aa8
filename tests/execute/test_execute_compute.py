"""Stored bytes to float32 and back, for every float format and every view."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.checkpoints.views import FusedKind, View, blocks, fused_views
from raymerge.dtypes import DType
from raymerge.execute.compute import PartComputation, Scratch
from raymerge.execute.decoding import decode, encode, rounded, scatter
from raymerge.execute.ops import JobPart, RowJob
from raymerge.merge_plan.elements import torch_dtype
from raymerge.merge_plan.expressions import Expression, Read, conversion_expression, copy_expression

CPU = torch.device("cpu")
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64, DType.F8_E4M3, DType.F8_E5M2)


def _input(dtype: DType, view: View | None = None) -> Read:
    return Read(0, 0, "model.safetensors", 0, 0, dtype, view)


def _raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def _row(parts: tuple[JobPart, ...], num_elements: int) -> RowJob:
    return RowJob(0, "t", True, copy_expression(DType.F32), 0, num_elements, False, parts, ())


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
@settings(deadline=None, max_examples=60)
def test_a_permuted_view_is_gathered_in_logical_order(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    lead = data.draw(st.integers(0, 7))
    flat = torch.arange(float(lead + prod(shape) + 3))
    wanted = flat[lead : lead + prod(shape)].view(shape).permute(order)
    view = View(lead, tuple(wanted.shape), tuple(wanted.stride()))
    assert torch.equal(decode(_raw(flat), _input(DType.F32, view), CPU), wanted.flatten())


@pytest.mark.parametrize(
    ("kind", "shape", "projections"),
    [
        ("out_in", (3, 8, 5), 2),
        ("in_out", (3, 5, 8), 2),
        ("in_out_interleaved", (3, 5, 8), 2),
        ("in_out_interleaved", (3, 8), 2),
        ("rows", (12, 5), 1),
        ("rows_transposed", (12, 5), 1),
    ],
)
def test_fused_experts_come_apart_and_together_again(
    kind: FusedKind, shape: tuple[int, ...], projections: int
) -> None:
    whole = torch.arange(float(prod(shape)))
    views = fused_views(kind, shape, projections, 3)
    for block in blocks(kind, shape, projections, 3):
        region = whole[block.start : block.start + block.num_elements]
        local = [
            View(views[member].offset - block.start, views[member].shape, views[member].strides)
            for member in block.members
        ]
        parts = tuple(JobPart(str(i), view.shape, view, ()) for i, view in enumerate(local))
        results = [decode(_raw(region), _input(DType.F32, view), CPU) for view in local]
        assert torch.equal(scatter(results, _row(parts, block.num_elements)), region)


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
