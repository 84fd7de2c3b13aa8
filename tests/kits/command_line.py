"""The ``raymerge`` command, run inside the test's process: no interpreter to start, no imports to repeat."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

WIDE = {"COLUMNS": "1000", "TERM": "dumb", "NO_COLOR": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    text: str
    """Standard output and standard error, in the order of writing."""

    def check_refusal(self, *words: str) -> None:
        """It ended with exit code 2 and says all of these, in sentences."""
        assert self.code == 2, self.text
        assert all(each in self.text for each in words), self.text
        assert "Traceback" not in self.text


def run_command(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> Outcome:
    from raymerge.cli.main import main

    written = io.StringIO()
    with (
        contextlib.chdir(cwd),
        patch("sys.argv", ["raymerge", *args]),
        patch.dict(os.environ, {**WIDE, **(env or {})}),
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(written),
    ):
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
    return Outcome(code if isinstance(code, int) else int(code is not None), written.getvalue())
