"""The reference's observed results on single matrices (``golden.json``), and how raymerge's compare.

A case's inputs are rounded to its dtype, merged in float32 as the executor does, and rounded once. Where a
method keeps elements by chance, the elements that its draws give must be the same ones.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kits.conformance import Judged
from kits.method_kit import Case, make_settings, merge, method_named

from raymerge.methods import BaseUse, Method, Settings, Value, methods, random_key

MERGEKIT_METHODS = (
    *("linear", "slerp", "nuslerp", "passthrough", "model_stock", "arcee_fusion", "karcher"),
    *("task_arithmetic", "ties", "dare_ties", "dare_linear", "breadcrumbs", "breadcrumbs_ties"),
    *("della", "della_linear", "multislerp", "nearswap", "sce", "ram", "ramplus_tl"),
)

TOLERANCE = {
    # Both compute in float32 and round a few times, not in the same order.
    "float32": (1e-5, 1e-6),
    # mergekit rounds every intermediate, and the weights, to 8 bits: up to 2^-9 of each, half a dozen times
    # over. raymerge rounds once. These are also the conformance pack's numbers for bfloat16.
    "bfloat16": (0.016, 0.001),
}


@dataclass(frozen=True, slots=True)
class Difference:
    reason: str
    elements: int
    """Elements, of 24, that are allowed beyond the tolerance."""


DIFFERS: Mapping[tuple[str, str], Difference] = {
    ("arcee_fusion", "bfloat16"): Difference("mergekit keeps what divergences in bfloat16 decide", 4)
}

MASKED = ("dare_linear", "dare_ties", "della", "della_linear")
_SEEDS = 256
"""Enough for every combination of kept and dropped: the rarest has a chance of 0.35 ** 3."""


@dataclass(frozen=True, slots=True)
class GoldenCase:
    name: str
    method: str
    dtype: str
    settings: Case
    base: torch.Tensor | None
    sources: tuple[torch.Tensor, ...]
    expected: torch.Tensor

    @property
    def difference(self) -> Difference | None:
        return DIFFERS.get((self.method, self.dtype))

    def _off(self) -> torch.Tensor:
        """How far each element is from what mergekit gave; float64.

        mergekit rescales what is left of a delta to the sum of magnitudes that it had, raymerge by one over
        the probability. So where masks are drawn, the deltas are given mergekit's factors, and nothing is
        rescaled again. Then some draw agrees with mergekit's in each element, and every draw has elements
        that the method's definition gives for some combination of kept and dropped.
        """
        method = method_named(self.method)
        settings = make_settings(method, self.settings, self.expected.shape)
        if self.method not in MASKED:
            return (self._merged(method, settings, self.sources) - self.expected).abs()
        assert self.base is not None
        base, (factors, possible) = self.base.double(), self._mergekit_factors()
        sources = [
            (base + factor * (source.double() - base)).float()
            for factor, source in zip(factors, self.sources, strict=True)
        ]
        settings = replace(settings, values={**settings.values, "rescale": False})
        keys = [
            tuple(random_key(seed, "tensor", each) for each in range(len(sources))) for seed in range(_SEEDS)
        ]
        draws = torch.stack([self._merged(method, replace(settings, keys=each), sources) for each in keys])
        observed = (draws - self.expected).abs().amin(dim=0)
        strayed = (draws[:, None] - base - possible).abs().amin(dim=1).amax(dim=0)
        return torch.maximum(observed, strayed)

    def _merged(self, method: Method, settings: Settings, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return merge(method, settings, self.base, sources).to(getattr(torch, self.dtype)).double()

    def _tolerance(self) -> torch.Tensor:
        relative, absolute = TOLERANCE[self.dtype]
        return absolute + relative * self.expected.abs()

    def _mergekit_factors(self) -> tuple[list[float], torch.Tensor]:
        """mergekit's factor of each source, and what it may add to the base then: [combinations, *shape].

        Where one source alone is left of an element, the change shows that source's factor. So all
        combinations of what elements show are tried: the right one explains every element.
        """
        assert self.base is not None
        deltas = torch.stack([source.double() - self.base for source in self.sources]).flatten(1)
        weights = torch.tensor([float(own["weight"]) for own in self.settings.sources], dtype=torch.float64)
        elects = self.method in ("dare_ties", "della")
        normalizes = self.method == "della"
        change = (self.expected - self.base).flatten()
        shown = change / (deltas if normalizes else weights[:, None] * deltas)
        factors = torch.cartesian_prod(*(each[(each > 1) & (each < 5)] for each in shown))
        changes = _changes(factors[:, :, None] * deltas, weights, elects=elects, normalizes=normalizes)
        explained = (changes - change).abs().amin(dim=1) <= self._tolerance().flatten()
        best = explained.sum(dim=1).argmax()
        assert bool(explained[best].all())
        return factors[best].tolist(), changes[best].unflatten(1, self.expected.shape)

    def judged(self) -> Judged:
        off = self._off()
        beyond = int((off > self._tolerance()).sum())
        worst = f"{float(off.max()):.2g}"
        if not beyond:
            return Judged("PASS", self.name, worst)
        known = self.difference
        if known is not None and beyond <= known.elements:
            return Judged("DIFFERS", self.name, worst, known.reason)
        return Judged("FAIL", self.name, worst, f"{beyond} of {off.numel()} elements are off")


def _changes(deltas: torch.Tensor, weights: torch.Tensor, *, elects: bool, normalizes: bool) -> torch.Tensor:
    """What a merge adds to the base for every combination of kept and dropped, by the methods' definition.

    Args:
        deltas: [cases, sources, elements].
        weights: [sources].
        elects: whether only what agrees with the sign of the sum is added.
        normalizes: whether it is divided by the weights of what is added.

    Returns:
        [cases, combinations, elements].
    """
    kept = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(weights))), dtype=torch.float64)
    terms = kept[:, :, None] * (weights[:, None] * deltas)[:, None]
    if not elects:
        return terms.sum(dim=2)
    sign = torch.where(terms.sum(dim=2, keepdim=True) >= 0, 1.0, -1.0)
    agreeing = (terms.sign() == sign).double()
    total = (agreeing * weights[:, None]).sum(dim=2)
    added = (terms * agreeing).sum(dim=2)
    return added / torch.where(total == 0, 1.0, total) if normalizes else added


def golden_cases(path: Path) -> tuple[GoldenCase, ...]:
    if not path.is_file():
        return ()
    found = json.loads(path.read_text())
    return tuple(
        _case(index, entry, found["inputs"])
        for index, entry in enumerate(found["cases"])
        if entry["method"] in methods()
    )


def _case(index: int, entry: Mapping[str, Any], inputs: Mapping[str, Any]) -> GoldenCase:
    method, dtype = method_named(entry["method"]), str(entry["input_dtype"])
    base = None if method.base is BaseUse.UNUSED else entry["base_model"]
    names = [name for name in entry["models"] if name != base]
    own = tuple(_coerced(method, entry["tensor_parameters"][name]) for name in names)
    return GoldenCase(
        name=f"{method.name}-{index}-{dtype}",
        method=method.name,
        dtype=dtype,
        settings=Case(_coerced(method, entry["parameters"]), own),
        base=None if base is None else _rounded(inputs[base], dtype),
        sources=tuple(_rounded(inputs[name], dtype) for name in names),
        expected=torch.tensor(entry["output"], dtype=torch.float64),
    )


def _coerced(method: Method, given: Mapping[str, float]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, value in given.items():
        parameter = method.parameter(name)
        assert parameter is not None, f"{method.name} has no parameter {name}"
        found[name] = parameter.coerce(value)
    return found


def _rounded(rows: Sequence[Sequence[float]], dtype: str) -> torch.Tensor:
    return torch.tensor(rows).to(getattr(torch, dtype)).float()
