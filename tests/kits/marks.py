"""Which of the values that a test is tried with are left to the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The same values, of which all but those that are named are tried only where slow tests run."""
    return [value if value in kept else _slow(value) for value in values]


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """The same values, of which all but the first of so many are tried only where slow tests run."""
    return [_slow(value) if index % number else value for index, value in enumerate(values)]


def _slow(value: Any) -> Any:
    values = value if type(value) is tuple else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
