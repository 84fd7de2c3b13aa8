"""How the tests of methods are run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kits.method_kit import threads


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For all tests that do not ask for more: on a busy machine threads spend most of their time waiting."""
    with threads(1):
        yield
