"""Matrices read from files, and their best factors of low rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from raymerge.checkpoints.adapters import Adapter
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.deferred import torch
from raymerge.documents.fields import FaultError
from raymerge.errors import CheckpointError, NonFiniteError, Problem
from raymerge.planner.inputs.sources import open_adapter_reference, refuse_unread, unread_problem
from raymerge.recipes.entry import ModelReference, parse_reference
from raymerge.storage.addresses import shown
from raymerge.storage.open import USUAL, Lookup, resolve_source
from raymerge.storage.store import ReadStore

PIECE_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Factors:
    """``up @ down``, the best approximation of a matrix at this rank."""

    down: torch.Tensor
    """float32 [rank, in], on the CPU."""
    up: torch.Tensor
    """float32 [out, rank], on the CPU."""
    kept: float
    """Sum of the squared singular values in the product."""
    total: float
    """Sum of all squared singular values."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class Limits:
    rank: int
    energy: float | None = None
    """Sufficient share of the sum of squared singular values; None for no limit but the rank."""

    def rank_of(self, squares: torch.Tensor) -> int:
        """The rank for squared singular values [n] in falling order; at least 1."""
        rank = min(self.rank, squares.numel())
        if self.energy is None:
            return rank
        sums = squares.cumsum(0)
        enough = int((sums < self.energy * sums[-1]).sum()) + 1
        return min(rank, enough)


def read_tensor(store: ReadStore, tensor: StoredTensor) -> torch.Tensor:
    return _as_tensor(store.read(tensor.key, tensor.offset, tensor.nbytes), tensor).view(tensor.shape)


def read_pieces(store: ReadStore, tensor: StoredTensor) -> Iterator[bytes]:
    for done in range(0, tensor.nbytes, PIECE_NBYTES):
        yield store.read(tensor.key, tensor.offset + done, min(PIECE_NBYTES, tensor.nbytes - done))


def factorise(matrix: torch.Tensor, limits: Limits, *, where: str) -> Factors:
    """The factors of largest energy under ``limits``, by an exact SVD. Both sides get the square roots of the
    singular values, so that neither is much larger. Raises NonFiniteError."""
    check_finite(matrix, where)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return _cut(left, values, right, limits)


def factorise_product(up: torch.Tensor, down: torch.Tensor, limits: Limits, *, where: str) -> Factors:
    """As ``factorise`` for ``up @ down`` (float64 [out, n] and [n, in]), without forming the product."""
    check_finite(up, where)
    check_finite(down, where)
    left, core_left = torch.linalg.qr(up)
    right, core_right = torch.linalg.qr(down.T)
    inner_left, values, inner_right = torch.linalg.svd(core_left @ core_right.T, full_matrices=False)
    return _cut(left @ inner_left, values, inner_right @ right.T, limits)


def check_finite(values: torch.Tensor, where: str) -> None:
    if not bool(torch.isfinite(values).all()):
        what = "has elements that are NaN or infinite, so its change has no singular values."
        raise NonFiniteError(Problem(where, what, "Take a checkpoint without such elements."))


def squared_difference(
    first: ReadStore, one: StoredTensor, second: ReadStore, other: StoredTensor
) -> float | None:
    """Squared distance of two tensors of one shape, or None where their elements are equal.

    0 for unequal bytes of a dtype other than plain floats."""
    is_equal, total = True, 0.0
    are_numbers = one.dtype.is_mergeable and other.dtype.is_mergeable
    # A multiple of 8 elements is a whole number of bytes in every dtype.
    step = PIECE_NBYTES // 8
    for begin in range(0, one.num_elements, step):
        end = min(begin + step, one.num_elements)
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
    start = tensor.dtype.nbytes(begin)
    return store.read(tensor.key, tensor.offset + start, tensor.dtype.nbytes(end) - start)


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
    dtype: torch.dtype = getattr(torch, str(tensor.dtype.torch_name))
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def open_named_model(text: str) -> Checkpoint:
    """Headers only; raises CheckpointError: absent, broken, or of an unsupported kind."""
    reference = parsed_model(text)
    if reference.lora_path is not None:
        what = "this names an adapter on a model, and an adapter is made from two models."
        remedy = "Merge the adapter into its model first, and name the result."
        raise CheckpointError(Problem(text, what, remedy))
    refuse_unread(reference, pickled=True, lookup=USUAL)
    root = resolve_source(reference.path, reference.revision, pickled=True)
    checkpoint = open_checkpoint(root, str(reference), pickled=True, with_components=False)
    _check_read(checkpoint)
    return checkpoint


def open_named_adapter(reference: ModelReference, *, pickled: bool = True, lookup: Lookup = USUAL) -> Adapter:
    """Headers only; raises CheckpointError: absent, broken, or of an unsupported kind."""
    if reference.lora_path is not None:
        what = "this names an adapter on a model, in a merge of adapters."
        raise CheckpointError(Problem(str(reference), what, "Name the adapter alone."))
    adapter = open_adapter_reference(reference, pickled=pickled, lookup=lookup)
    _check_read(adapter)
    return adapter


def _check_read(opened: Checkpoint | Adapter) -> None:
    """Raises CheckpointError: a weight file is neither read nor left out by a rule."""
    unknown = [each.key for each in opened.left_out if each.rule is None]
    if unknown:
        raise CheckpointError(unread_problem(opened.name, unknown))


def parsed_model(text: str) -> ModelReference:
    """Raises CheckpointError: no directory and no name on the Hub."""
    try:
        return parse_reference(text, exists=os.path.isdir)
    except FaultError as error:
        raise CheckpointError(
            [Problem(shown(text), fault.what, fault.remedy) for fault in error.faults]
        ) from error
