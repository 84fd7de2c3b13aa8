"""RAM, reinforced agent merging: average what several deltas change, keep what only one changes whole (ram)
or enlarge it (ramplus_tl) (arXiv 2601.13572)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import reference
from raymerge.methods.combine import on_base
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.task_arithmetic import sum_of_terms


class RamKernel(Kernel):
    """Averages each element over the deltas that change it by more than epsilon."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        epsilon = settings.number("epsilon")
        return _merge(tile, epsilon, _count_changes(tile, epsilon), (1.0,) * len(tile.sources))


@dataclass(slots=True)
class _Changes:
    counts: torch.Tensor
    """How many elements each delta changes, and how many of them no other does: int64 ``[N, 2]``."""
    gains: tuple[float, ...] = ()
    """Set after the pass."""


def _gain(changed: int, unique: int, settings: Settings) -> float:
    if not unique:
        return 1.0
    ratio = (changed - unique) / max(unique, settings.number("epsilon"))
    return 1.0 + settings.number("r") * min(max(ratio, 0.0), settings.number("alpha"))


class RamPlusKernel(Kernel):
    """As ram, with unshared changes enlarged: the more, the more of the source's changes are shared, since
    those shrink by averaging."""

    def passes(self, settings: Settings) -> int:
        return 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _Changes:
        return _Changes(torch.zeros(len(settings.sources), 2, dtype=torch.int64, device=device))

    def observe(self, state: _Changes, tile: Tile, settings: Settings, pass_index: int) -> None:
        epsilon = settings.number("epsilon")
        unique = _count_changes(tile, epsilon).eq_(1.0)
        changed = torch.empty_like(unique)
        for counts, delta in zip(state.counts, tile.sources, strict=True):
            counts[0] += torch.count_nonzero(_write_changed(delta, epsilon, changed))
            counts[1] += torch.count_nonzero(changed.mul_(unique))

    def conclude(self, state: _Changes, settings: Settings, pass_index: int) -> bool:
        state.gains = tuple(_gain(changed, unique, settings) for changed, unique in state.counts.tolist())
        return False

    def apply(self, tile: Tile, settings: Settings, state: _Changes) -> torch.Tensor:
        epsilon = settings.number("epsilon")
        return _merge(tile, epsilon, _count_changes(tile, epsilon), state.gains)


def _merge(tile: Tile, epsilon: float, counts: torch.Tensor, gains: tuple[float, ...]) -> torch.Tensor:
    """Base plus the changes, each divided by how many deltas change the element, or times its gain if
    alone."""

    def term(index: int, out: torch.Tensor) -> None:
        # A product with the mask, not a choice by it: NaN is above no threshold, and must stay.
        _write_changed(tile.sources[index], epsilon, out).mul_(tile.sources[index])
        if gains[index] != 1.0:
            out.mul_(counts.eq(1.0).to(out.dtype).mul_(gains[index] - 1.0).add_(1.0))

    return on_base(sum_of_terms(tile, term).div_(counts.clamp_min_(1.0)), tile)


def _count_changes(tile: Tile, epsilon: float) -> torch.Tensor:
    """Number of deltas that change each element, float32 ``[n]``."""
    counts, changed = torch.zeros_like(tile.sources[0]), torch.empty_like(tile.sources[0])
    for delta in tile.sources:
        counts.add_(_write_changed(delta, epsilon, changed))
    return counts


def _write_changed(delta: torch.Tensor, epsilon: float, out: torch.Tensor) -> torch.Tensor:
    return torch.abs(delta, out=out).gt_(epsilon)


_EPSILON = Parameter(
    "epsilon", "float", "global", "size of a change that counts as one", default=1e-5, minimum=0.0
)


def _reference(tensor: reference.LogicalTensor, block: reference.Block) -> reference.Expected:
    return _mean_change(tensor, block, [1.0] * tensor.num_sources)


class _RamPlusReference:
    def __init__(self, tensor: reference.LogicalTensor) -> None:
        self._tensor = tensor
        epsilon = tensor.settings.number("epsilon")
        shared, unique = np.zeros((2, tensor.num_sources))
        self._doubtful = 0
        for block in tensor.blocks():
            changed = np.abs(block.sources) > np.float32(epsilon)
            alone = changed & (changed.sum(0) == 1)
            unique += alone.sum(1)
            shared += (changed & ~alone).sum(1)
            self._doubtful += int(_near_epsilon(block, epsilon).any(0).sum())
        self._gains = [self._gain(s, u) for s, u in zip(shared, unique, strict=True)]
        # Each element that may be counted otherwise moves a gain by its share of the rest at most.
        rest = np.maximum(1.0, np.minimum(unique, shared + unique))
        self._share = float((self._doubtful / rest).max()) if self._doubtful else 0.0

    def __call__(self, block: reference.Block) -> reference.Expected:
        expected = _mean_change(self._tensor, block, self._gains)
        r = abs(self._tensor.settings.number("r") * self._tensor.settings.number("alpha"))
        expected.doubt += min(1.0, self._share) * r * np.abs(block.sources).max(0)
        return expected

    def _gain(self, shared: float, unique: float) -> float:
        if not unique:
            return 1.0
        settings = self._tensor.settings
        ratio = shared / max(unique, settings.number("epsilon"))
        return 1.0 + settings.number("r") * min(max(ratio, 0.0), settings.number("alpha"))


def _mean_change(
    tensor: reference.LogicalTensor, block: reference.Block, gains: Sequence[float]
) -> reference.Expected:
    assert block.base is not None
    epsilon = tensor.settings.number("epsilon")
    near = _near_epsilon(block, epsilon)
    own = np.array(gains)[:, None]
    doubt = reference.doubt_of(block, max(1.0, *map(abs, gains)))

    def merged(changed: reference.Floats) -> reference.Floats:
        count = changed.sum(0)
        factors = np.where(count == 1, own, 1.0) * changed / np.maximum(count, 1.0)
        assert block.base is not None
        return np.asarray(block.base + (factors * block.sources).sum(0))

    changed = (np.abs(block.sources) > np.float32(epsilon)).astype(np.float64)
    expected = reference.Expected(merged(changed), doubt)
    for source in range(len(gains)):
        places = np.flatnonzero(near[source])
        if len(places):
            turned = changed.copy()
            turned[source] = 1.0 - turned[source]
            expected.others.append((places, merged(turned)[places]))
    return expected


def _near_epsilon(block: reference.Block, epsilon: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Where rounding decides whether a delta changes an element."""
    doubts = 0.0 if block.doubts is None else block.doubts
    return np.asarray(np.abs(np.abs(block.sources) - epsilon) <= doubts + 2.0**-22 * epsilon)


RAM = Method(
    name="ram",
    summary="The base plus, for each element, the mean of the deltas that change it.",
    paper="2601.13572",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=RamKernel(),
    reference=reference.elementwise(_reference),
    parameters=(_EPSILON,),
    scratch=2.5,
)

RAMPLUS_TL = Method(
    name="ramplus_tl",
    summary="The base plus the mean of the changes that deltas share, and those of one delta alone enlarged.",
    paper="2601.13572",
    access=Access.TENSOR,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=RamPlusKernel(),
    reference=reference.Reference(_RamPlusReference),
    parameters=(
        Parameter("r", "float", "global", "how much of the shared share the enlargement takes", default=0.1),
        Parameter("alpha", "float", "global", "largest share that counts", default=0.2, minimum=0.0),
        _EPSILON,
    ),
    scratch=3.5,
)
