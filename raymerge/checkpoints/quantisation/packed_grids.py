"""Which blocks a grid of scales can mean: FP8 tensors and their scales, from the two shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raymerge.checkpoints.quantisation.encoding import Format

Blocks = tuple[Format, tuple[int, int]]
"""A format, and the rows and columns that share a scale."""


def fp8_blocks(
    shape: tuple[int, ...], scales: tuple[int, ...], named: Sequence[tuple[int, int]]
) -> Iterator[Blocks]:
    """Every reading of FP8 codes [..., rows, columns] with scales of a shape, the likeliest first.

    A grid does not always tell what its blocks are ([200, 64] is [2, 1] in blocks of 128 and of 100), so
    those that a config names go before those that the grid implies.

    Args:
        shape: of the codes, at least two dimensions; what is before the last two is a stack.
        scales: shape of the stored scales.
        named: blocks to try first.
    """
    stack, (rows, columns) = shape[:-2], shape[-2:]
    for block in named:
        if scales == (*stack, -(-rows // block[0]), -(-columns // block[1])):
            yield Format.FP8_BLOCK, block
    if scales in ((*stack, 1), (*stack, 1, 1), stack):
        yield Format.FP8_TENSOR, (rows, columns)
    if scales in ((*stack, rows), (*stack, rows, 1)):
        yield Format.FP8_CHANNEL, (1, columns)
    if len(scales) == len(shape) and scales[:-2] == stack:
        block = implied_block(rows, scales[-2]), implied_block(columns, scales[-1])
        if all(block):
            yield Format.FP8_BLOCK, block


def turned_fp8(
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    named: Sequence[tuple[int, int]],
    allows: Callable[[Format, tuple[int, int], tuple[int, ...]], bool],
) -> str | None:
    """What to call a stack of matrices [rows, columns] whose scales are those of [columns, rows], or None.

    Experts that are stored [in, out] may have been quantised as [out, in].

    Args:
        shape: of the codes.
        scales: shape of the stored scales.
        named: blocks to try first.
        allows: whether the config means a format with blocks and a shape.
    """
    if len(shape) < 3:
        return None
    turned = _turned(shape)
    grids = (scales, _turned(scales)) if len(scales) == len(shape) else (scales,)
    found = (each for grid in grids for each in fp8_blocks(turned, grid, named) if allows(*each, turned))
    form = next((form for form, _ in found), None)
    return None if form is None else f"{form.value} with scales of the transposed matrices"


def implied_block(size: int, count: int) -> int:
    """Rows (or columns) of a block when ``count`` blocks cover ``size`` rows; 0 where no block does.

    Of several that would, a power of two, as all that are published; else the smallest.
    """
    if not 0 < count <= size:
        return 0
    smallest = -(-size // count)
    largest = size if count == 1 else -(-size // (count - 1)) - 1
    if smallest > largest:
        return 0
    power = 1 << (smallest - 1).bit_length()
    return power if power <= largest else smallest


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
