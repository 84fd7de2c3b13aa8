"""The compiled loops, each module loaded when it is first used: importing numba takes a third of a second."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymerge.kernels import combine, deviations, elect, hashes, ranks, selection, sums

__all__ = ["combine", "deviations", "elect", "hashes", "ranks", "selection", "sums"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    module = globals()[name] = import_module(f"raymerge.kernels.{name}")
    return module
