"""The reference's observed results on single matrices (``golden.json``), and how raymerge's compare.

A case's inputs are rounded to its dtype, merged in float32 as the executor does, and rounded once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.conformance import Judged
from kits.method_kit import Case, make_settings, merge

from raymerge.methods import BaseUse, Method, Value, find_method, methods

MERGEKIT_METHODS = (
    "linear",
    "slerp",
    "nuslerp",
    "passthrough",
    "model_stock",
    "arcee_fusion",
    "karcher",
    "task_arithmetic",
    "ties",
    "dare_ties",
    "dare_linear",
    "breadcrumbs",
    "breadcrumbs_ties",
    "della",
    "della_linear",
    "multislerp",
    "nearswap",
    "sce",
    "ram",
    "ramplus_tl",
)
"""The names in mergekit's registry."""

TOLERANCE = {
    # Both compute in float32 and round a few times, not in the same order.
    "float32": (1e-5, 1e-6),
    # mergekit rounds every intermediate, and the weights, to 8 bits: up to 2^-9 of each, half a dozen times
    # over. raymerge rounds once. These are also the conformance pack's numbers for bfloat16.
    "bfloat16": (0.016, 0.001),
}
"""Relative and absolute tolerance by the dtype of the inputs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Why raymerge does not reproduce a case, and how far it may be off."""

    reason: str
    """For the table."""
    elements: int
    """Elements, of 24, that are allowed beyond the tolerance."""


_MASKS = Difference(
    "masks come from another generator; the pack's dare and della recipes compare statistics", 24
)
DIFFERS: Mapping[tuple[str, str], Difference] = {
    **{
        (method, dtype): _MASKS
        for method in ("dare_linear", "dare_ties", "della", "della_linear")
        for dtype in TOLERANCE
    },
    ("arcee_fusion", "bfloat16"): Difference("mergekit keeps what divergences in bfloat16 decide", 4),
}
"""Cases that raymerge does not reproduce, by method and dtype."""


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One observed merge."""

    name: str
    """Method, position in the file, dtype."""
    method: str
    """Name of the method."""
    dtype: str
    """Of the inputs; the arithmetic's and the output's in mergekit, the output's here."""
    settings: Case
    """Its parameters."""
    base: torch.Tensor | None
    """float32 values that ``dtype`` holds; None when the method uses no base."""
    sources: tuple[torch.Tensor, ...]
    """The same, in recipe order and without the base."""
    expected: torch.Tensor
    """float64, what mergekit gave."""

    @property
    def difference(self) -> Difference | None:
        """Why raymerge differs; None when it does not."""
        return DIFFERS.get((self.method, self.dtype))

    def result(self) -> torch.Tensor:
        """What raymerge gives, rounded to the dtype; float64."""
        method = _registered(self.method)
        settings = make_settings(method, self.settings, self.expected.shape)
        merged = merge(method, settings, self.base, self.sources)
        return merged.to(getattr(torch, self.dtype)).double()

    def judged(self) -> Judged:
        """The case's line of the table."""
        relative, absolute = TOLERANCE[self.dtype]
        off = (self.result() - self.expected).abs()
        beyond = int((off > absolute + relative * self.expected.abs()).sum())
        worst = f"{float(off.max()):.2g}"
        if not beyond:
            return Judged("PASS", self.name, worst)
        known = self.difference
        if known is not None and beyond <= known.elements:
            return Judged("DIFFERS", self.name, worst, known.reason)
        return Judged("FAIL", self.name, worst, f"{beyond} of {off.numel()} elements are off")


def golden_cases(path: Path) -> tuple[GoldenCase, ...]:
    """The cases of the methods that raymerge has; none where there is no file."""
    if not path.is_file():
        return ()
    found = json.loads(path.read_text())
    return tuple(
        _case(index, entry, found["inputs"])
        for index, entry in enumerate(found["cases"])
        if entry["method"] in methods()
    )


def _case(index: int, entry: Mapping[str, Any], inputs: Mapping[str, Any]) -> GoldenCase:
    method, dtype = _registered(entry["method"]), str(entry["input_dtype"])
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


def _registered(name: str) -> Method:
    method = find_method(name)
    assert method is not None
    return method


def _coerced(method: Method, given: Mapping[str, float]) -> dict[str, Value]:
    """Parameters as the planner reads them."""
    found: dict[str, Value] = {}
    for name, value in given.items():
        parameter = method.parameter(name)
        assert parameter is not None, f"{method.name} has no parameter {name}"
        found[name] = parameter.coerce(value)
    return found


def _rounded(rows: Sequence[Sequence[float]], dtype: str) -> torch.Tensor:
    return torch.tensor(rows).to(getattr(torch, dtype)).float()
