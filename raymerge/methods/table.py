"""The table of merge methods. A new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from raymerge.methods.dare import DARE_LINEAR, DARE_TIES
from raymerge.methods.linear import LINEAR
from raymerge.methods.method import Method
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.methods.slerp import SLERP
from raymerge.methods.task_arithmetic import TASK_ARITHMETIC
from raymerge.methods.ties import TIES

_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (LINEAR, PASSTHROUGH, TASK_ARITHMETIC, SLERP, TIES, DARE_LINEAR, DARE_TIES)
    }
)


def methods() -> Mapping[str, Method]:
    """All methods by name, in the order of the documentation."""
    return _METHODS


def find_method(name: str) -> Method | None:
    """The method that a recipe's ``merge_method`` names, or None."""
    return _METHODS.get(name)
