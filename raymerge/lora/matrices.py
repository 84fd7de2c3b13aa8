"""Matrices read from files, and the two factors that say a change best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymerge.checkpoints.header import StoredTensor
from raymerge.errors import NonFiniteError, Problem
from raymerge.storage.store import ReadStore

PIECE_NBYTES = 16 * 2**20
"""Bytes of a tensor that are looked at together where it need not be whole."""


@dataclass(frozen=True, slots=True)
class Factors:
    """``up @ down``, the nearest matrix of its rank to some matrix."""

    down: torch.Tensor
    """float32 [rank, in], on the CPU."""
    up: torch.Tensor
    """float32 [out, rank], on the CPU."""
    kept: float
    """Sum of the squared singular values that are in the product."""
    total: float
    """Sum of all squared singular values."""

    @property
    def rank(self) -> int:
        """Rows of ``down``."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the factors of a matrix may become."""

    rank: int
    """Largest rank."""
    energy: float | None = None
    """Share of the sum of squared singular values that is enough; None for no limit but the rank."""

    def rank_of(self, squares: torch.Tensor) -> int:
        """The rank for squared singular values [n] in falling order; at least 1."""
        rank = min(self.rank, squares.numel())
        if self.energy is None:
            return rank
        sums = squares.cumsum(0)
        enough = int((sums < self.energy * sums[-1]).sum()) + 1
        return min(rank, enough)


def read_tensor(store: ReadStore, tensor: StoredTensor) -> torch.Tensor:
    """A stored tensor of a plain float dtype, in that dtype and its own shape."""
    return _as_tensor(store.read(tensor.key, tensor.offset, tensor.nbytes), tensor).view(tensor.shape)


def read_pieces(store: ReadStore, tensor: StoredTensor) -> Iterator[bytes]:
    """The bytes of a tensor in order, some at a time."""
    for done in range(0, tensor.nbytes, PIECE_NBYTES):
        yield store.read(tensor.key, tensor.offset + done, min(PIECE_NBYTES, tensor.nbytes - done))


def factorise(matrix: torch.Tensor, limits: Limits, *, where: str) -> Factors:
    """The factors of largest energy under ``limits``, by an exact singular value decomposition.

    The square roots of the singular values go to both sides, so that neither factor is much larger.

    Args:
        matrix: float32 or float64 [out, in], on any device.
        limits: how large they may become.
        where: what messages call the matrix.

    Raises:
        NonFiniteError: it has an element that is NaN or infinite.
    """
    check_finite(matrix, where)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return _cut(left, values, right, limits)


def factorise_product(up: torch.Tensor, down: torch.Tensor, limits: Limits, *, where: str) -> Factors:
    """The same for ``up @ down`` (float64 [out, n] and [n, in]), without that product.

    Raises:
        NonFiniteError: a factor has an element that is NaN or infinite.
    """
    check_finite(up, where)
    check_finite(down, where)
    left, core_left = torch.linalg.qr(up)
    right, core_right = torch.linalg.qr(down.T)
    inner_left, values, inner_right = torch.linalg.svd(core_left @ core_right.T, full_matrices=False)
    return _cut(left @ inner_left, values, inner_right @ right.T, limits)


def check_finite(values: torch.Tensor, where: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteError: there is one.
    """
    if not bool(torch.isfinite(values).all()):
        what = "has elements that are NaN or infinite, so its change has no singular values."
        raise NonFiniteError(Problem(where, what, "Take a checkpoint without such elements."))


def squared_difference(
    first: ReadStore, one: StoredTensor, second: ReadStore, other: StoredTensor
) -> float | None:
    """Squared distance of two tensors of one shape, or None where their elements are equal.

    Tensors that do not hold plain floats have distance 0 when their bytes differ.
    """
    is_equal, total = True, 0.0
    are_numbers = one.dtype.is_mergeable and other.dtype.is_mergeable
    for begin, end in _pieces(one.num_elements):
        left, right = _elements(first, one, begin, end), _elements(second, other, begin, end)
        if one.dtype == other.dtype and left == right:
            continue
        if are_numbers:
            difference = _as_tensor(left, one).double() - _as_tensor(right, other).double()
            # Not a comparison: NaN differs from itself, and stands for a change that nobody can measure.
            is_equal = is_equal and not bool(difference.count_nonzero())
            total += float(difference.square().sum())
        else:
            is_equal = False
    return None if is_equal else total


def _elements(store: ReadStore, tensor: StoredTensor, begin: int, end: int) -> bytes:
    """The bytes of a run of elements."""
    start = tensor.dtype.nbytes(begin)
    return store.read(tensor.key, tensor.offset + start, tensor.dtype.nbytes(end) - start)


def _pieces(num_elements: int) -> Iterator[tuple[int, int]]:
    # A multiple of 8 elements is a whole number of bytes in every dtype.
    step = PIECE_NBYTES // 8
    for begin in range(0, num_elements, step):
        yield begin, min(begin + step, num_elements)


def _cut(left: torch.Tensor, values: torch.Tensor, right: torch.Tensor, limits: Limits) -> Factors:
    squares = values.double().cpu().square()
    rank = limits.rank_of(squares)
    roots = values[:rank].sqrt()
    return Factors(
        down=(roots[:, None] * right[:rank]).float().cpu().contiguous(),
        up=(left[:, :rank] * roots).float().cpu().contiguous(),
        kept=float(squares[:rank].sum()),
        total=float(squares.sum()),
    )


def _as_tensor(data: bytes, tensor: StoredTensor) -> torch.Tensor:
    """The bytes as a vector of the tensor's dtype."""
    dtype: torch.dtype = getattr(torch, str(tensor.dtype.torch_name))
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
