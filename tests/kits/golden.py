"""Text that was looked at once and must stay: compared with files in ``tests/golden``."""

from __future__ import annotations

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare a text with ``tests/golden/NAME.txt``; ``UPDATE_GOLDEN=1`` writes it first."""
    found = "".join(f"{_settled(line)}\n" for line in text.rstrip().splitlines())
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def _settled(line: str) -> str:
    return re.sub(r"\b[0-9a-f]{40}\b", "DIGEST", line).rstrip()
