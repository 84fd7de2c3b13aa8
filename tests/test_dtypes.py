"""The dtypes agree with torch about sizes, and with recipes about names."""

from __future__ import annotations

import pytest
import torch

from raymerge.dtypes import DType, dtype_names, parse_dtype


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.torch_name])
def test_sizes_are_those_of_torch(dtype: DType) -> None:
    assert dtype.bits == getattr(torch, str(dtype.torch_name)).itemsize * 8


def test_a_whole_number_of_bytes_is_asked_of_narrow_elements() -> None:
    assert DType.F4.nbytes(6) == 3
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        DType.F4.nbytes(3)


def test_arithmetic_is_for_plain_floats_only() -> None:
    assert {dtype for dtype in DType if dtype.is_mergeable} == {DType.F16, DType.BF16, DType.F32, DType.F64}
    assert all(dtype.bits <= 8 for dtype in DType if dtype.is_narrow_float)
    assert not any(dtype.is_mergeable and dtype.is_narrow_float for dtype in DType)


@pytest.mark.parametrize("name", dtype_names())
def test_every_recipe_name_means_a_mergeable_dtype_with_and_without_prefix(name: str) -> None:
    assert parse_dtype(name).is_mergeable
    assert parse_dtype(f"torch.{name}") is parse_dtype(name.upper())


@pytest.mark.parametrize("name", ["int64", "float8_e4m3fn", "bfloat", ""])
def test_other_names_are_unknown(name: str) -> None:
    with pytest.raises(KeyError):
        parse_dtype(name)
