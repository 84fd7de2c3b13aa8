"""The tensors that repeat the shape of packed integers, read where only they tell the number of columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.storage.store import ReadStore

SHAPE_ENDING = ".weight_shape"
"""Of the names of tensors that repeat the shape of packed integers."""

_RUN_NBYTES = 64 << 10
_MOST_CHECKS = 64
"""Requests for shapes that can say nothing new, and are only compared with what is stored."""


def read_shapes(
    store: ReadStore, tensors: Mapping[str, StoredTensor], readers: int
) -> dict[str, tuple[int, int]]:
    """What the tensors say that repeat the shape of packed integers; those that say only 0 are left out.

    All of those that tell how many columns there are, and of the others as many as few requests give: where
    shapes are I32, each lies between two matrices, and a large model has ten thousands.

    Args:
        store: what holds the tensors.
        tensors: all of a checkpoint, by name.
        readers: requests at a time.
    """
    shapes = [
        tensor
        for name, tensor in tensors.items()
        if name.endswith(SHAPE_ENDING) and tensor.dtype in (DType.I32, DType.I64) and tensor.shape == (2,)
    ]
    shapes.sort(key=lambda tensor: (tensor.key, tensor.offset))
    is_open = [_is_open(tensors, tensor.name.removesuffix(SHAPE_ENDING)) for tensor in shapes]
    needed = [tensor for tensor, each in zip(shapes, is_open, strict=True) if each]
    others = [tensor for tensor, each in zip(shapes, is_open, strict=True) if not each]
    runs = [*_runs(needed), *list(_runs(others))[:_MOST_CHECKS]]
    with ThreadPoolExecutor(max_workers=readers) as pool:
        found = pool.map(lambda run: _read(store, run), runs)
        return {name: shape for each in found for name, shape in each if any(shape)}


def _is_open(tensors: Mapping[str, StoredTensor], module: str) -> bool:
    """Whether codes and scales leave open how many columns there are.

    They do not where there are so many groups of equal size that a smaller size would leave a whole integer
    of each row unused.
    """
    codes, scales = tensors.get(f"{module}.weight_packed"), tensors.get(f"{module}.weight_scale")
    if codes is None or scales is None or not codes.shape or not scales.shape or not scales.shape[-1]:
        return False
    per_element, groups = codes.dtype.bits // 4, scales.shape[-1]
    return groups < per_element or codes.shape[-1] * per_element % groups != 0


def _read(store: ReadStore, run: Sequence[StoredTensor]) -> list[tuple[str, tuple[int, int]]]:
    found = []
    first, last = run[0], run[-1]
    content = store.read(first.key, first.offset, last.offset + last.nbytes - first.offset)
    for tensor in run:
        begin, size = tensor.offset - first.offset, tensor.nbytes // 2
        pair = (content[begin : begin + size], content[begin + size : begin + 2 * size])
        rows, columns = (int.from_bytes(each, "little", signed=True) for each in pair)
        found.append((tensor.name, (rows, columns)))
    return found


def _runs(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Tensors that lie close together in a file, of some in the order of their places."""
    run: list[StoredTensor] = []
    for tensor in tensors:
        is_near = run and run[-1].key == tensor.key
        if is_near and tensor.offset + tensor.nbytes - run[0].offset <= _RUN_NBYTES:
            run.append(tensor)
            continue
        if run:
            yield run
        run = [tensor]
    if run:
        yield run
