"""From an address to the store that serves it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from raymerge.errors import OptionError, Problem
from raymerge.storage.local import LocalStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(uri: str) -> LocalStore:
    """The store at a plain path or a ``file://`` address.

    Raises:
        OptionError: the address is of a kind that raymerge does not read.
    """
    match = _SCHEME.match(uri)
    if match is None:
        return LocalStore(Path(uri).expanduser())
    parts = urlsplit(uri)
    if match.group(1).lower() == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(Path(unquote(parts.path)))
    what = f"addresses of the kind {match.group(1)}:// are not readable yet."
    raise OptionError(Problem(uri, what, "Copy it to a local directory and give that path."))
