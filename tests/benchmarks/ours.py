"""raymerge, as a user starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_PROGRAM = str(Path(sys.executable).with_name("raymerge"))


def submit(recipe: Path, *options: str) -> Callable[[Path], Sequence[str]]:
    return lambda output: [_PROGRAM, "submit", str(recipe), "-o", str(output), "--json", *options]


def plan(recipe: Path) -> Callable[[Path], Sequence[str]]:
    return lambda output: [_PROGRAM, "plan", str(recipe), "-o", str(output)]
