"""Regular expressions that come with a checkpoint, matched for so long and no longer.

A pattern of thirty characters can take longer than the universe is old on a path of thirty. No rule tells
the honest ones from the others, so the matching itself is bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import regex

from raymerge.errors import CheckpointError, Problem

_MOST_SECONDS = 5.0
# A match takes microseconds; so long it takes only where it would not end.
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ForeignPattern:
    """A pattern of somebody else's, as ``re`` understands it."""

    pattern: str
    """Its text."""
    _compiled: regex.Pattern[str] = field(repr=False, compare=False)

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the beginning of ``path``.

        Raises:
            CheckpointError: that cannot be found out in reasonable time.
        """
        try:
            return self._compiled.match(path, timeout=_MOST_SECONDS) is not None
        except TimeoutError as error:
            shown = self.pattern if len(self.pattern) <= _SHOWN else f"{self.pattern[: _SHOWN - 3]}..."
            what = (
                f"this pattern of its config is still not matched after {_MOST_SECONDS:g} seconds: {shown}."
            )
            remedy = "No honest tool writes such a pattern: do not use this checkpoint unless you know why."
            raise CheckpointError(Problem(path, what, remedy)) from error


def foreign_pattern(text: str) -> ForeignPattern:
    """A pattern that came with a checkpoint.

    Raises:
        ValueError: it is no regular expression; says why.
    """
    try:
        # What both take is meant in the one way that they share.
        re.compile(text)
        return ForeignPattern(text, regex.compile(text))
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error
