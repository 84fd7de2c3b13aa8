"""NaN and infinity are found in stored bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.dtypes import DType
from raymerge.execute.non_finite import first_non_finite
from raymerge.merge_plan.elements import torch_dtype

FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


def _bytes(values: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] = values.contiguous().view(torch.uint8).numpy()
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 32_767, 32_768, 70_000])
def test_the_first_bad_element_is_named(dtype: DType, bad: float, place: int) -> None:
    values = torch.ones(70_001, dtype=torch_dtype(dtype))
    values[place] = bad
    values[-1] = bad
    assert first_non_finite(_bytes(values), dtype) == place


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_are_finite(dtype: DType) -> None:
    limits = torch.finfo(torch_dtype(dtype))
    values = torch.tensor(
        [limits.max, limits.min, limits.tiny, limits.smallest_normal, 0.0], dtype=torch_dtype(dtype)
    )
    assert first_non_finite(_bytes(values), dtype) is None


@given(patterns=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_bit_pattern_is_judged_as_torch_does(dtype: DType, patterns: list[int]) -> None:
    data = np.array(patterns, np.uint16)
    bad = ~torch.from_numpy(data.view(np.int16)).view(torch_dtype(dtype)).isfinite()
    expected = int(bad.int().argmax()) if bool(bad.any()) else None
    assert first_non_finite(data.view(np.uint8), dtype) == expected
