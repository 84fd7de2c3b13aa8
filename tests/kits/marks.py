"""Marks for some of the values that a test is tried with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The same values, of which all but some are tried only where slow tests run."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
