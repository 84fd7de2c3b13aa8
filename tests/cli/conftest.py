"""What every test of the command line stands on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores, wherever the tests run: what a plan says of memory goes by them."""
    monkeypatch.setattr("raymerge.runtime.workers.sizing.cores_here", lambda: 2)
