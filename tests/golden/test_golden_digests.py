"""What merges give is what it was: the digests of every file, written by ``tests/golden/digests.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_merges_give_what_they_gave() -> None:
    """In a process of its own, since digests hang on the number of threads."""
    ended = subprocess.run(
        [sys.executable, str(HERE / "digests.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_every_method_has_a_digest() -> None:
    from raymerge.methods import methods

    own = json.loads((HERE / "digests.json").read_text(encoding="utf-8"))["own"]
    assert set(methods()) <= own.keys()
