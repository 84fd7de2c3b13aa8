"""What every test may count on: no network, and the reference packs where they lie beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Inherited by every subprocess that a test starts. PYTHONHASHSEED stays as it is: no result depends on it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_root() -> Path:
    """The folder ``../shared`` beside the checkout, with the conformance and the behaviour pack."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside the checkout")
    return SHARED
