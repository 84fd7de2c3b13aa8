"""Weighted sums of sources, and what is decided for each element by itself, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raymerge.methods import Settings
from raymerge.verifier.numbers import Floats
from raymerge.verifier.recompute.tensor import DOUBT, Block, Expected, LogicalTensor, doubt_of


def combination(block: Block, coefficients: Sequence[float] | Floats, *, origin: bool = False) -> Expected:
    """``sum c T``; on the base ``B + sum c d``, or from the base as origin ``B + sum c (T - B)``.

    Args:
        block: the inputs.
        coefficients: one for each source, ``[N]`` or ``[N, n]``.
        origin: whether sources are weights that differences to the base are taken of.
    """
    each = np.asarray(coefficients, dtype=np.float64)
    each = each[:, None] if each.ndim == 1 else each
    if block.base is None:
        values = (each * block.sources).sum(0)
    else:
        sources = block.sources - block.base if origin else block.sources
        values = block.base + (each * sources).sum(0)
    return Expected(values, doubt_of(block, np.abs(each).sum(0)))


def linear(tensor: LogicalTensor, block: Block) -> Expected:
    """The weighted sum, or mean."""
    return combination(block, _shares(tensor.settings, "normalize"))


def passthrough(tensor: LogicalTensor, block: Block) -> Expected:
    """The one source times its scale."""
    scale = tensor.settings.sources[0].get("scale")
    factor = 1.0 if scale is None else float(scale)
    doubt = abs(factor) * (DOUBT * block.largest + block.input_doubt)
    return Expected(factor * block.sources[0], doubt)


def largest(tensor: LogicalTensor, block: Block) -> Expected:
    """The largest source, or the smallest."""
    values = block.sources.min(0) if tensor.settings.flag("smallest") else block.sources.max(0)
    return Expected(values, block.input_doubt * np.ones_like(values))


def task_arithmetic(tensor: LogicalTensor, block: Block) -> Expected:
    """The base plus the sum of the deltas."""
    settings = tensor.settings
    factor = settings.number("lambda") / total_weight(settings)
    return combination(block, [factor * weight for weight in settings.per_source("weight")])


def lines(tensor: LogicalTensor, block: Block) -> Expected:
    """The same, scaled with the depth."""
    settings = tensor.settings
    alpha, beta = settings.values["alpha"], settings.values["beta"]
    first = 1.0 / len(settings.sources) if alpha is None else float(alpha)
    factor = first + (1.0 - first if beta is None else float(beta)) * settings.position
    return combination(block, [factor * weight for weight in settings.per_source("weight")])


def nearswap(tensor: LogicalTensor, block: Block) -> Expected:
    """The source within ``t`` of the base, elsewhere the base moved by ``t``."""
    assert block.base is not None
    change = block.sources[0] - block.base
    share = np.clip(tensor.settings.number("t") / np.maximum(np.abs(change), 1e-6), 0.0, 1.0)
    return Expected(block.base + share * change, doubt_of(block, 1.0))


def consensus_ta(tensor: LogicalTensor, block: Block) -> Expected:
    """The summed deltas where enough sources use the element."""
    assert block.base is not None
    settings = tensor.settings
    terms = np.array(settings.per_source("weight"))[:, None] * block.sources
    merged = terms.sum(0)
    limits = np.array(settings.per_source("mask_lambda"))[:, None] * np.abs(merged - terms)
    margin = np.abs(terms) - limits
    near = DOUBT * np.abs(terms).sum(0) + block.input_doubt * len(terms)
    wanted = settings.number("consensus")
    factor = settings.number("lambda")
    surely, maybe = (margin > near).sum(0) >= wanted, (margin >= -near).sum(0) >= wanted
    doubt = doubt_of(block, abs(factor) * float(np.abs(settings.per_source("weight")).sum()))
    changed = block.base + factor * merged
    # Where nothing changes it does not matter who uses it.
    places = np.flatnonzero((surely != maybe) & (np.abs(factor * merged) > doubt))
    return Expected(np.where(surely, changed, block.base), doubt, [(places, changed[places])])


def ram(tensor: LogicalTensor, block: Block) -> Expected:
    """The mean of the deltas that change the element."""
    return _mean_change(tensor, block, [1.0] * tensor.num_sources)


class RamPlus:
    """The same with what one delta alone changes enlarged, by counts over the tensor."""

    def __init__(self, tensor: LogicalTensor) -> None:
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

    def __call__(self, block: Block) -> Expected:
        found = _mean_change(self._tensor, block, self._gains)
        r = abs(self._tensor.settings.number("r") * self._tensor.settings.number("alpha"))
        found.doubt += min(1.0, self._share) * r * np.abs(block.sources).max(0)
        return found

    def _gain(self, shared: float, unique: float) -> float:
        if not unique:
            return 1.0
        settings = self._tensor.settings
        ratio = shared / max(unique, settings.number("epsilon"))
        return 1.0 + settings.number("r") * min(max(ratio, 0.0), settings.number("alpha"))


def _mean_change(tensor: LogicalTensor, block: Block, gains: Sequence[float]) -> Expected:
    """The base plus the changes over their number; a change that is alone times its source's gain."""
    assert block.base is not None
    epsilon = tensor.settings.number("epsilon")
    near = _near_epsilon(block, epsilon)
    own = np.array(gains)[:, None]
    doubt = doubt_of(block, max(1.0, *map(abs, gains)))

    def merged(changed: Floats) -> Floats:
        count = changed.sum(0)
        factors = np.where(count == 1, own, 1.0) * changed / np.maximum(count, 1.0)
        assert block.base is not None
        return np.asarray(block.base + (factors * block.sources).sum(0))

    changed = (np.abs(block.sources) > np.float32(epsilon)).astype(np.float64)
    found = Expected(merged(changed), doubt)
    for source in range(len(gains)):
        places = np.flatnonzero(near[source])
        if len(places):
            turned = changed.copy()
            turned[source] = 1.0 - turned[source]
            found.others.append((places, merged(turned)[places]))
    return found


def _near_epsilon(block: Block, epsilon: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Where it is open whether a delta changes an element."""
    doubts = 0.0 if block.doubts is None else block.doubts
    return np.asarray(np.abs(np.abs(block.sources) - epsilon) <= doubts + 2.0**-22 * epsilon)


def total_weight(settings: Settings) -> float:
    """Divisor of a whole sum under ``normalize``."""
    if not settings.flag("normalize"):
        return 1.0
    total = math.fsum(settings.per_source("weight"))
    return total if abs(total) >= 1e-8 else 1.0


def _shares(settings: Settings, normalize: str) -> list[float]:
    """The weights, divided by their sum under a flag."""
    weights = settings.per_source("weight")
    total = math.fsum(weights) if settings.flag(normalize) else 1.0
    return [weight / total for weight in weights]
