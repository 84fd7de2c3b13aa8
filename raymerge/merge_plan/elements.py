"""Stored bytes as elements of logical tensors, and what of a plan is copied without being computed."""

from __future__ import annotations

import numpy as np
import torch

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.columns import Flags, ints
from raymerge.merge_plan.plan import Plan


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a stored dtype.

    Raises:
        ValueError: torch has none; such tensors are only ever copied.
    """
    if dtype.torch_name is None:
        raise ValueError(f"{dtype.value} has no torch dtype; it can only be copied")
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


def strided(flat: torch.Tensor, view: View) -> torch.Tensor:
    """The elements of a view in a flat tensor, in logical shape; shares its memory."""
    return torch.as_strided(flat, view.shape, view.strides, flat.storage_offset() + view.offset)


def computed_rows(plan: Plan) -> Flags:
    """Whether something is computed for a row ``[rows]``; not for those that are written with another row.

    Only of bytes that pass untouched, or stand in the plan, is it certain that devices agree. All else counts
    as computed: also a change of dtype alone, and rows that are only put elsewhere, which go through float32.
    """
    rows = plan["rows"]
    is_made = (ints(rows, "copy_of") < 0) & (ints(rows, "made_with") < 0)
    computes = np.array([not (each.is_copy or each.is_constant) for each in plan.expressions], dtype=np.bool_)
    return np.asarray(is_made & computes[ints(rows, "expression")])


def copied_segments(plan: Plan) -> frozenset[int]:
    """Numbers of the segments in which nothing is computed."""
    before = np.concatenate([[0], np.cumsum(computed_rows(plan))])
    first, count = (ints(plan["segments"], name) for name in ("first_row", "num_rows"))
    return frozenset(np.flatnonzero(before[first + count] == before[first]).tolist())
