"""Guess which known word a misspelled one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6


def closest(word: str, choices: Iterable[str], *, cutoff: float = _CUTOFF) -> str | None:
    """The choice most like ``word``, whatever its case and with ``-`` for ``_``; None if none is close.

    Args:
        word: what was written.
        choices: what is known.
        cutoff: how like it must be, from 0 to 1.
    """
    by_folded = {_fold(choice): choice for choice in choices}
    matches = difflib.get_close_matches(_fold(word), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``"Did you mean 'density'?"``, or an empty text when no choice is close to ``word``."""
    match = closest(word, choices)
    return f"Did you mean '{match}'?" if match is not None else ""


def _fold(word: str) -> str:
    return word.lower().strip("-").replace("-", "_")
