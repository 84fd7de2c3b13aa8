"""A dense feed-forward matrix as one expert of a mixture: some neurons redrawn, noise added, scaled.

Redrawn neurons are those of Drop-Upcycling (Nakamura et al., ICLR 2025, arXiv 2502.19261), the same for all
matrices with one ``neuron_key``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from raymerge.deferred import torch
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, Method, Parameter
from raymerge.methods.random import hashed, normal, random_key
from raymerge.methods.reduce import PIECE, PieceSums, bring_to_host, chunks
from raymerge.methods.reference import (
    DOUBT,
    Block,
    Expected,
    LogicalTensor,
    Reference,
    hashes,
    normal_numbers,
)

_LEAST_WORD = -(1 << 63)


@dataclass(frozen=True, slots=True)
class _Neurons:
    key: int
    limit: int
    """Largest hash, as an int64, of a redrawn neuron."""
    first: int
    own: int
    run: int
    """Consecutive elements of one neuron."""

    def mark(self, start: int, count: int, device: torch.device) -> torch.Tensor:
        """bool ``[count]``: whether the elements ``[start, start + count)`` are redrawn; count is not 0."""
        first, last = start // self.run, (start + count - 1) // self.run
        neurons = torch.arange(first, last + 1, dtype=torch.int64, device=device)
        chosen = hashed(self.key, neurons.remainder_(self.own).add_(self.first)).le(self.limit)
        if self.run == 1:
            return chosen
        elements = torch.full((len(chosen),), self.run, dtype=torch.int64, device=device)
        # Less what the first and the last one have outside.
        elements[0] -= start - first * self.run
        elements[-1] -= (last + 1) * self.run - (start + count)
        return chosen.repeat_interleave(elements, output_size=count)


@dataclass(slots=True)
class _Redrawn:
    neurons: _Neurons | None
    count: torch.Tensor
    """int64 []."""
    sums: PieceSums = field(default_factory=lambda: PieceSums(2))
    """Of the replaced elements and of their squares."""
    mean: float = 0.0
    deviation: float = 0.0


class UpcycleKernel(Kernel):
    """``scale * (R + noise_scale * N)``: R is the source with its chosen neurons drawn from a normal
    distribution of the mean and the standard deviation of what they replace, N is normal."""

    def passes(self, settings: Settings) -> int:
        return 1 if _is_redrawn(settings) else 0

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Redrawn:
        """Raises ValueError where the tensor has neurons beyond ``num_neurons``."""
        return _Redrawn(_choose(settings), torch.zeros((), dtype=torch.int64, device=device))

    def observe(self, state: _Redrawn, tile: Tile, settings: Settings, pass_index: int) -> None:
        if state.neurons is None:
            return
        (source,) = tile.sources
        for chunk in chunks(source.numel(), source.device):
            mask = state.neurons.mark(tile.start + chunk.start, chunk.stop - chunk.start, source.device)
            # Chosen by the mask, not a product with it: NaN elsewhere is no part of this.
            replaced = torch.where(mask, source[chunk], 0.0)
            state.count.add_(mask.sum())
            state.sums.add_values(0, replaced)
            state.sums.add_squares(1, replaced)

    def conclude(self, state: _Redrawn, settings: Settings, pass_index: int) -> bool:
        counts = [state.count]
        bring_to_host(counts, state.sums.pending)
        (total, squares), count = state.sums.totals.tolist(), int(counts[0])
        if count:
            state.mean = total / count
            state.deviation = math.sqrt(max(0.0, squares / count - state.mean**2))
        return False

    def apply(self, tile: Tile, settings: Settings, state: _Redrawn | None) -> torch.Tensor:
        source: torch.Tensor = tile.sources[0]
        (key,) = settings.keys
        (noise_scale,), (scale,) = settings.per_source("noise_scale"), settings.per_source("scale")
        result = source.clone()
        for chunk in chunks(result.numel(), result.device):
            part, start = result[chunk], tile.start + chunk.start
            if state is not None and state.neurons is not None:
                _redraw_(part, start, state, state.neurons, key)
            if noise_scale:
                part.add_(normal(key, start, part.numel(), part.device).mul_(noise_scale))
        return result.mul_(scale)


def _redraw_(part: torch.Tensor, start: int, state: _Redrawn, neurons: _Neurons, key: int) -> None:
    """Redraw the elements of chosen neurons in ``part``, float32 ``[n]`` from ``start`` on. NaN and infinity
    are in the mean, and stay visible."""
    drawn = normal(random_key(key, "redrawn", 0), start, part.numel(), part.device)
    drawn.mul_(state.deviation).add_(state.mean)
    torch.where(neurons.mark(start, part.numel(), part.device), drawn, part, out=part)


def _choose(settings: Settings) -> _Neurons | None:
    axis, first, num_neurons = (
        int(settings.per_source(name)[0]) for name in ("neuron_axis", "neuron_first", "num_neurons")
    )
    if axis >= len(settings.shape):
        return None
    own = settings.shape[axis]
    num_neurons = num_neurons or own
    if first + own > num_neurons:
        raise ValueError(f"a tensor of the neurons {first} to {first + own - 1} has more than {num_neurons}")
    num_chosen = round(settings.per_source("reinit_fraction")[0] * num_neurons)
    if not num_chosen:
        return None
    key = random_key(int(settings.per_source("neuron_key")[0]), "neurons", 0)
    limit = _limit(key, num_neurons, num_chosen)
    return _Neurons(key, limit, first, own, math.prod(settings.shape[axis + 1 :]))


def _limit(key: int, num_neurons: int, rank: int) -> int:
    """The ``rank``-th smallest hash of the numbers below ``num_neurons``; no two are equal. Halves the
    range until few enough hashes lie in it for memory."""
    low, high, inside = _LEAST_WORD, -_LEAST_WORD - 1, num_neurons
    while inside > PIECE:
        middle = (low + high) // 2
        lower = sum(len(hashes) for hashes in _hashes_within(key, num_neurons, low, middle))
        if lower >= rank:
            high, inside = middle, lower
        else:
            low, inside, rank = middle + 1, inside - lower, rank - lower
    left = torch.cat(tuple(_hashes_within(key, num_neurons, low, high)))
    return int(left.kthvalue(rank).values)


def _hashes_within(key: int, num_neurons: int, low: int, high: int) -> Iterator[torch.Tensor]:
    for begin in range(0, num_neurons, PIECE):
        hashes = hashed(key, torch.arange(begin, min(begin + PIECE, num_neurons), dtype=torch.int64))
        yield hashes[hashes.ge(low).logical_and_(hashes.le(high))]


def _is_redrawn(settings: Settings) -> bool:
    return settings.per_source("reinit_fraction")[0] > 0


def _access(settings: Settings) -> Access:
    return Access.TENSOR if _is_redrawn(settings) else Access.ELEMENT


def _check(settings: Settings) -> str | None:
    (first,), (num_neurons,) = settings.per_source("neuron_first"), settings.per_source("num_neurons")
    if first and first >= num_neurons:
        return f"neuron_first is {first:.0f} and must be below num_neurons, which is {num_neurons:.0f}"
    return None


def _identity(settings: Settings) -> int | None:
    (source,) = settings.sources
    changes = source["scale"] != 1 or source["noise_scale"] or _is_redrawn(settings)
    return None if changes else 0


class _Reference:
    def __init__(self, tensor: LogicalTensor) -> None:
        self._settings = tensor.settings
        (self._source,) = tensor.settings.sources
        self._chosen = self._neurons()
        self._mean = self._deviation = 0.0
        if self._chosen is None:
            return
        count, total, squares = 0, 0.0, 0.0
        for block in tensor.blocks():
            replaced = block.sources[0][self._marks(block)]
            count, total = count + len(replaced), total + float(replaced.sum())
            squares += float((replaced**2).sum())
        if count:
            self._mean = total / count
            self._deviation = float(np.sqrt(max(0.0, squares / count - self._mean**2)))

    def __call__(self, block: Block) -> Expected:
        (key,), indices = self._settings.keys, block.indices
        noise_scale, scale = self._number("noise_scale"), self._number("scale")
        values = block.sources[0].copy()
        largest = np.abs(values)
        if self._chosen is not None:
            marks = self._marks(block)
            drawn = normal_numbers(random_key(key, "redrawn", 0), indices[marks])
            values[marks] = drawn * self._deviation + self._mean
            largest[marks] = np.abs(drawn) * self._deviation + abs(self._mean)
        if noise_scale:
            noise = noise_scale * normal_numbers(key, indices)
            values, largest = values + noise, largest + np.abs(noise)
        return Expected(values * scale, (DOUBT * largest + block.input_doubt) * abs(scale))

    def _number(self, name: str) -> float:
        return float(self._source[name] or 0.0)

    def _neurons(self) -> NDArray[np.bool_] | None:
        """Which of the tensor's own neurons are redrawn; None where none is."""
        shape, axis = self._settings.shape, int(self._number("neuron_axis"))
        if axis >= len(shape):
            return None
        count = int(self._number("num_neurons")) or shape[axis]
        num_chosen = round(self._number("reinit_fraction") * count)
        if not num_chosen:
            return None
        key = random_key(int(self._number("neuron_key")), "neurons", 0)
        order = np.argsort(hashes(key, np.arange(count, dtype=np.int64)).view(np.int64))
        chosen = np.zeros(count, dtype=bool)
        chosen[order[:num_chosen]] = True
        first = int(self._number("neuron_first"))
        return chosen[first : first + shape[axis]]

    def _marks(self, block: Block) -> NDArray[np.bool_]:
        assert self._chosen is not None
        run = math.prod(self._settings.shape[int(self._number("neuron_axis")) + 1 :])
        return self._chosen[block.indices // run % len(self._chosen)]


_whole = partial(Parameter, kind="int", scope="source", default=0, minimum=0)

UPCYCLE = Method(
    name="upcycle",
    summary="One source as an expert: some neurons drawn anew, noise added, multiplied by a scale.",
    paper="2502.19261",
    access=Access.TENSOR,
    kernel=UpcycleKernel(),
    reference=Reference(_Reference),
    parameters=(
        Parameter("scale", "float", "source", "factor on every element", default=1.0),
        Parameter(
            "noise_scale", "float", "source", "standard deviation of added noise", default=0.0, minimum=0.0
        ),
        Parameter.fraction("reinit_fraction", "fraction of the neurons drawn anew", 0.0),
        _whole("neuron_axis", doc="0 where neurons are the rows, 1 where they are the columns", maximum=1),
        _whole("neuron_key", doc="chooses the neurons; the same for matrices that share them", maximum=2**53),
        _whole("neuron_first", doc="of a slice of the neurons, the first one"),
        _whole("num_neurons", doc="of a slice, the neurons of the whole; 0: the tensor's own"),
    ),
    max_sources=1,
    scratch=2.5,
    random=True,
    bound_to_shape=True,
    access_of=_access,
    identity=_identity,
    check=_check,
)
