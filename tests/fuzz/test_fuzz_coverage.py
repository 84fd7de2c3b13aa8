"""A little of ``make fuzz``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent
QUICK = ("header", "index", "signed manifest", "table", "ledger")

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no build for this Python or system"
)


@pytest.mark.slow
@needs_atheris
def test_inputs_that_reach_new_code_are_refused_or_taken(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FUZZ), "--runs", "200", "--targets", ",".join(QUICK), "--found", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(tmp_path.iterdir())
