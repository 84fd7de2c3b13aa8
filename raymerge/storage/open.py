"""From an address to the store that serves it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from raymerge.errors import OptionError, Problem
from raymerge.storage.local import LocalStore
from raymerge.storage.patience import Patience
from raymerge.storage.store import NO_FILES, FileInfo

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(
    uri: str,
    *,
    patience: Patience | None = None,
    expected: Mapping[str, FileInfo] = NO_FILES,
    guard: Callable[[], None] | None = None,
) -> LocalStore:
    """The store at a plain path or a ``file://`` address; the rest is as ``LocalStore`` takes it.

    Raises:
        OptionError: the address is of a kind that raymerge does not read.
    """
    match = _SCHEME.match(uri)
    if match is None:
        return LocalStore(Path(uri).expanduser(), patience=patience, expected=expected, guard=guard)
    parts = urlsplit(uri)
    if match.group(1).lower() == "file" and parts.netloc in ("", "localhost"):
        path = Path(unquote(parts.path))
        return LocalStore(path, patience=patience, expected=expected, guard=guard)
    what = f"addresses of the kind {match.group(1)}:// are not readable yet."
    raise OptionError(Problem(uri, what, "Copy it to a local directory and give that path."))
