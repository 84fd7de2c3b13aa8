"""raymerge, as a user starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_PROGRAM = str(Path(sys.executable).with_name("raymerge"))


def submit(recipe: Path, *options: str) -> Callable[[Path], Sequence[str]]:
    """What merges, given the output place; its events tell when the work began and when it was published."""
    return lambda output: [_PROGRAM, "submit", str(recipe), "-o", str(output), "--json", *options]


def plan(recipe: Path) -> Callable[[Path], Sequence[str]]:
    """What plans; nothing is written to the output place."""
    return lambda output: [_PROGRAM, "plan", str(recipe), "-o", str(output)]
