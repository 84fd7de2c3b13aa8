"""The bytes of single experts in stored tensors, and what is computed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Fate, Rule
from raymerge.merge_plan.expressions import (
    Expression,
    Part,
    Read,
    Row,
    conversion_expression,
    copy_expression,
    make_expression,
)
from raymerge.methods import Settings
from raymerge.methods.linear import LINEAR


@dataclass(frozen=True, slots=True)
class Share:
    """What one expert has in a stored tensor: a run of its elements."""

    source: int
    """Index of the model."""
    tensor: StoredTensor
    """The tensor."""
    start: int
    """Its first element."""
    num_elements: int
    """Its length."""

    def read(self) -> Read:
        """The bytes of it."""
        dtype = self.tensor.dtype
        first = self.tensor.offset + dtype.nbytes(self.start)
        return Read(0, self.source, self.tensor.key, first, dtype.nbytes(self.num_elements), dtype, None)

    def joined(self, other: Share) -> Share | None:
        """Both as one, where ``other`` lies behind this one in the same tensor; else None."""
        same = (self.source, self.tensor.name) == (other.source, other.tensor.name)
        if not same or self.start + self.num_elements != other.start:
            return None
        return replace(self, num_elements=self.num_elements + other.num_elements)


def share_row(share: Share, shape: tuple[int, ...], output: str, dtype: DType) -> tuple[Row, Fate]:
    """A row of bytes as they are, or of their values in another dtype; and what that means for their tensor.

    Args:
        share: what is taken.
        shape: its shape.
        output: the tensor that it goes into.
        dtype: what that is written in.
    """
    is_copy = share.tensor.dtype is dtype
    expression = copy_expression(dtype) if is_copy else conversion_expression(dtype)
    return matrix_row([share.read()], shape, output, expression), fate_of(1, output, is_copy=is_copy)


def matrix_row(reads: Sequence[Read], shape: tuple[int, ...], logical: str, expression: Expression) -> Row:
    """A row of one logical tensor that lies in it as it is."""
    return Row(prod(shape), expression, (Part(logical, shape, None),), tuple(reads))


def mean_expression(weights: Sequence[float], dtype: DType) -> Expression:
    """The weighted mean in float32, rounded once; of one alone its own values."""
    if len(weights) == 1:
        return conversion_expression(dtype)
    settings = Settings(values={"normalize": True}, sources=tuple({"weight": each} for each in weights))
    return make_expression(LINEAR, settings, has_base=False, cast=dtype)


def fate_of(num_origins: int, output: str, *, is_copy: bool = False) -> Fate:
    """What becomes of tensors of which so many experts make one."""
    if num_origins > 1:
        return Fate(Disposition.MERGED, Rule.METHOD, output)
    if is_copy:
        return Fate(Disposition.COPIED, Rule.ONE_SOURCE, output)
    return Fate(Disposition.CONVERTED, Rule.DTYPE, output)
