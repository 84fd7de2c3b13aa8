"""Segments are made as in a worker, whose threads each compute with one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kits.method_kit import threads


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with threads(1):
        yield
