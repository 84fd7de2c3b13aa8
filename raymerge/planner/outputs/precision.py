"""The dtype of each output tensor.

What goes in comes out: without a ``dtype`` in the recipe every tensor keeps the lead checkpoint's. With one,
it replaces the checkpoint's main dtype; tensors that were kept in float32 on purpose stay so.
"""

from __future__ import annotations

from raymerge.architectures import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType


def output_dtype(wanted: DType | None, tensor: StoredTensor, role: Role, main: DType) -> DType:
    """Dtype in which an output tensor is written.

    Args:
        wanted: what the recipe asks for; None for the checkpoint's own.
        tensor: the lead checkpoint's tensor.
        role: its role; a router's selection bias stays float32 whatever the recipe says.
        main: dtype of most of the lead checkpoint's bytes.
    """
    if wanted is None or not tensor.dtype.is_mergeable:
        return tensor.dtype
    kept_on_purpose = tensor.dtype is DType.F32 and (main is not DType.F32 or role is Role.ROUTER_BIAS)
    return tensor.dtype if kept_on_purpose else wanted
