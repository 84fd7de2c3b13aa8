"""The stored tensors of an output in a format that its source does not have it in."""

from __future__ import annotations

from collections.abc import Mapping

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.layout import TensorSpec
from raymerge.checkpoints.numbers import PartNames, fresh_names, part_name
from raymerge.checkpoints.quantisation.detect import Packed
from raymerge.checkpoints.quantisation.encoding import Packing
from raymerge.dtypes import DType
from raymerge.merge_plan.expressions import Output, PackedAs, Part, Row, constant_expression

_SHAPE_DTYPE = DType.I64


def fresh_parts(
    output: str, packing: Packing, like: Packed | None, stored: Mapping[str, StoredTensor]
) -> PackedAs:
    """What an output becomes: named and stored as its neighbours are, or else as publishers do it.

    Args:
        output: its name.
        packing: how its numbers are stored.
        like: a neighbour in the same format; None where there is none.
        stored: the tensors of the neighbour's source.
    """
    names = fresh_names(output, packing.format) if like is None else _names_like(like, output)
    dtype = stored[like.shape_tensor].dtype if like is not None and like.shape_tensor else _SHAPE_DTYPE
    shape = (shape_tensor(names.shape, dtype, packing),) if names.shape else ()
    one = packing.tensor_scale_dtype
    of_all = None if one is None else TensorSpec(names.tensor_scale, one, (1,))
    return PackedAs(packing, names.codes, names.scales, shape, of_all)


def _names_like(like: Packed, output: str) -> PartNames:
    """What the parts of a tensor are called that is stored as a neighbour is."""
    one = like.tensor_scale
    scales = None if like.scales == one else like.scales
    held = (like.codes, scales, one, like.shape_tensor)
    return PartNames(*("" if part is None else part_name(like.name, part, output) for part in held))


def shape_tensor(name: str, dtype: DType, packing: Packing) -> Output:
    """The tensor in which compressed-tensors repeats rows and columns.

    What is made never has a source's: no header tells whether that is true.
    """
    size = dtype.bits // 8
    content = b"".join(each.to_bytes(size, "little") for each in (packing.rows, packing.columns))
    row = Row(2, constant_expression(dtype, content), (Part(name, (2,), None),), ())
    return Output(name, dtype, (2,), (row,), False)
