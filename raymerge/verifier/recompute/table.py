"""How each method is recomputed. A method that is not here is told as not audited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from raymerge.methods import Settings
from raymerge.verifier.recompute import combined, interpolate, sce, sparsify, spectral, upcycle
from raymerge.verifier.recompute.tensor import Block, Expected, LogicalTensor

Formula: TypeAlias = Callable[[Block], Expected]
"""What a run of elements should be."""
Prepare: TypeAlias = Callable[[LogicalTensor], Formula]
"""Looks at as much of the tensor as the formula has to know of it."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """How a method is recomputed."""

    prepare: Prepare
    """Makes the formula of one tensor."""
    by_row: bool = False
    """Whether it takes whole rows."""
    whole: bool = False
    """Whether it holds the whole tensor at once."""


def _each(formula: Callable[[LogicalTensor, Block], Expected]) -> Recomputation:
    """A formula that needs to know nothing of the rest of the tensor."""
    return Recomputation(lambda tensor: partial(formula, tensor))


def _nuslerp(tensor: LogicalTensor) -> Formula:
    settings = tensor.settings
    if settings.flag("nuslerp_flatten") or len(settings.shape) < 2:
        return interpolate.nuslerp_whole(tensor)
    if settings.flag("nuslerp_row_wise"):
        return interpolate.NuslerpColumns(tensor)
    return interpolate.NuslerpRows(tensor)


_METHODS: Mapping[str, Recomputation] = MappingProxyType(
    {
        "linear": _each(combined.linear),
        "passthrough": _each(combined.passthrough),
        "slerp": Recomputation(interpolate.slerp),
        "nuslerp": Recomputation(_nuslerp, by_row=True),
        "multislerp": Recomputation(interpolate.multislerp),
        "karcher": Recomputation(interpolate.karcher),
        "slerp_delta": Recomputation(interpolate.slerp_delta),
        "geometric_median": Recomputation(interpolate.geometric_median),
        "nearswap": _each(combined.nearswap),
        "arcee_fusion": Recomputation(sce.ArceeFusion, by_row=True),
        "task_arithmetic": _each(combined.task_arithmetic),
        "ties": Recomputation(partial(sparsify.Trimmed, name="ties", elects=True)),
        "dare_linear": _each(partial(sparsify.dare, elects=False)),
        "dare_ties": _each(partial(sparsify.dare, elects=True)),
        "breadcrumbs": Recomputation(partial(sparsify.Trimmed, name="breadcrumbs", elects=False)),
        "breadcrumbs_ties": Recomputation(partial(sparsify.Trimmed, name="breadcrumbs", elects=True)),
        "della": Recomputation(lambda tensor: partial(sparsify.della, tensor, elects=True), by_row=True),
        "della_linear": Recomputation(
            lambda tensor: partial(sparsify.della, tensor, elects=False), by_row=True
        ),
        "sce": Recomputation(sce.Sce),
        "ram": _each(combined.ram),
        "ramplus_tl": Recomputation(combined.RamPlus),
        "consensus_ta": _each(combined.consensus_ta),
        "lines": _each(combined.lines),
        "model_stock": Recomputation(interpolate.model_stock, by_row=True),
        "iso_c": Recomputation(partial(spectral.Spectral, name="iso_c"), whole=True),
        "tsv_m": Recomputation(partial(spectral.Spectral, name="tsv_m"), whole=True),
        "largest": _each(combined.largest),
        "upcycle": Recomputation(upcycle.Upcycled),
    }
)


def recomputation_of(method: str, settings: Settings) -> Recomputation | None:
    """How a method is recomputed under these settings; None where it is not.

    A vector has no matrix to be decomposed.
    """
    found = _METHODS.get(method)
    if found is not None and found.whole and len(settings.shape) < 2:
        return Recomputation(found.prepare)
    return found


def recomputed() -> frozenset[str]:
    """Names of all methods that are."""
    return frozenset(_METHODS)
