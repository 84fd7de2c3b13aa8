"""How fast methods compute: measured figures, for plans that are simulated and not run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

_NANO, _MICRO = 1e-9, 1e-6


@dataclass(frozen=True, slots=True)
class MethodSpeeds:
    """What one thread needs for a merge, while all cores are busy."""

    by_method: Mapping[str, float]
    """Seconds for each element of every source, by the method's name."""
    other: float
    """The same for methods that are not listed: a cautious guess."""
    copied_byte: float
    """Seconds for a byte that is copied as it is."""
    by_tensor: Mapping[str, float]
    """Seconds for each tensor, or piece of one, beyond those for its elements, by the method's name."""
    decoded: float = 0.0
    """Seconds for each element of a source that is stored as codes with scales, beyond those."""
    encoded: float = 0.0
    """The same for each element of the output that is written as codes with scales."""

    def per_element(self, method: str) -> float:
        """Seconds for each element of every source."""
        return self.by_method.get(method, self.other)

    def per_tensor(self, method: str) -> float:
        """Seconds for each tensor beyond those for its elements; none where that was not measured."""
        return self.by_tensor.get(method, 0.0)

    def knows(self, method: str) -> bool:
        """Whether the method was measured."""
        return method in self.by_method


def measured_speeds() -> MethodSpeeds:
    """The figures that came with this version."""
    text = (files("raymerge.planner") / "simulate_speeds.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return MethodSpeeds(
        {name: value * _NANO for name, value in table["methods"].items()},
        table["other"] * _NANO,
        table["copied_byte"] * _NANO,
        {name: value * _MICRO for name, value in table["tensors"].items()},
        decoded=table["decoded"] * _NANO,
        encoded=table["encoded"] * _NANO,
    )
