"""From a place to the store that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raymerge.errors import OptionError, Problem
from raymerge.storage.addresses import HUB_SCHEME, OBJECT_SCHEMES, is_remote, parse_place, shown
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import Patience
from raymerge.storage.store import NO_FILES, FileInfo, ReadStore


def open_store(
    place: str,
    *,
    patience: Patience | None = None,
    expected: Mapping[str, FileInfo] = NO_FILES,
) -> ReadStore:
    """The store that a place is read from: a local path, or an address; nothing is asked of it yet.

    Args:
        place: as ``storage.addresses`` describes it.
        patience: how often to try again what fails for a moment; None for the usual.
        expected: files as they must be when they are read; others may be as they like.

    Raises:
        OptionError: the address is of a kind that raymerge does not read here.
    """
    scheme = parse_place(place).scheme
    if not is_remote(place):
        return local_store(place, patience=patience, expected=expected)
    if scheme in OBJECT_SCHEMES:
        from raymerge.storage.objects.store import ObjectStore

        return ObjectStore(place, patience=patience, expected=expected)
    if scheme == HUB_SCHEME:
        from raymerge.storage.hub.addresses import hub_place
        from raymerge.storage.hub.commits import open_hub

        return open_hub(hub_place(place), patience=patience, expected=expected)
    from raymerge.storage.arrow import ArrowStore

    return ArrowStore(place, patience=patience, expected=expected)


def local_store(
    place: str, *, patience: Patience | None = None, expected: Mapping[str, FileInfo] = NO_FILES
) -> LocalStore:
    """The store at a local path or a ``file://`` address; the rest is as ``LocalStore`` takes it.

    Raises:
        OptionError: the place is elsewhere.
    """
    if is_remote(place):
        what = "is not a directory of this machine."
        raise OptionError(Problem(shown(place), what, "Copy it to a local directory and give that path."))
    return LocalStore(Path(parse_place(place).text), patience=patience, expected=expected)
