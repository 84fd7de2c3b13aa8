"""What is encoded on a GPU, of which the host learns late that it is not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from kits.counted_gpu import GPU, counted_waits

from raymerge.checkpoints.quantisation.encoding import Format, usual_quant_spec
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_TENSOR
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4
from raymerge.execute.encoding import TensorScale, encoded
from raymerge.execute.output import NotFinite
from raymerge.merge_plan.jobs import OpJob


@pytest.mark.parametrize("format_", [FP8_BLOCK, FP8_TENSOR, MXFP4], ids=lambda each: each.name)
@pytest.mark.parametrize("broken", [math.nan, -math.inf])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_not_finite_is_refused(format_: Format, broken: float, device: str) -> None:
    encoding = usual_quant_spec(format_, (4, 64)).encoding
    part, expression = (
        SimpleNamespace(columns=64, inputs=(), shape=(4, 64), view=None),
        SimpleNamespace(encode=encoding),
    )
    op = cast("OpJob", SimpleNamespace(tensor="t", encoding=encoding, parts=[part], expression=expression))
    values = torch.linspace(-1.0, 1.0, 256)
    with counted_waits() as waits:
        one = TensorScale(torch.ones(()).to(device), is_kept=False) if encoding.tensor_scale_dtype else None
        encoded(op, values.to(device), [], one)
        assert waits.total() == (torch.device(device) == GPU)
        values[200] = broken
        with pytest.raises(NotFinite):
            encoded(op, values.to(device), [], one)
