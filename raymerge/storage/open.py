"""From what a recipe calls a model to its place, and from a place to the store that serves it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType

from raymerge.errors import CheckpointError, OptionError, Problem
from raymerge.storage.addresses import (
    NO_OPTIONS,
    STORES,
    StoreOptions,
    is_remote,
    parse_place,
    shown,
    with_options,
)
from raymerge.storage.hub.addresses import USUAL_REVISION, HubPlace, hub_place, is_hub_place
from raymerge.storage.hub.cache import is_hub_name, resolve_model, snapshot_revision
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import NO_FILES, FileInfo, ReadStore


def open_store(
    place: str, *, patience: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
) -> ReadStore:
    """The store that a place is read from: a local path, or an address; nothing is asked of it yet.

    Args:
        patience: how often to try again what fails for a moment; None for the usual.
        expected: files as they must be when they are read; others may be as they like.

    Raises:
        OptionError: the address is of a kind that raymerge does not read here.
    """
    opener: Callable[..., ReadStore] = resolve_name(STORES[parse_place(place).scheme])
    return opener(place, patience=patience, expected=expected)


def local_store(
    place: str, *, patience: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
) -> LocalStore:
    """The store at a local path or a ``file://`` address; the rest is as ``LocalStore`` takes it.

    Raises:
        OptionError: the place is elsewhere.
    """
    if is_remote(place):
        what = "is not a directory of this machine."
        raise OptionError(Problem(shown(place), what, "Copy it to a local directory and give that path."))
    return LocalStore(Path(parse_place(place).text), patience=patience, expected=expected)


Commits = Mapping[str, str]
"""What revisions on the Hub meant when they were last looked up: a commit for each ``hf://`` address."""
NO_COMMITS: Commits = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Lookup:
    """How the places of models are found."""

    offline: bool = False
    """Whether no server is asked: of the Hub only its local cache is."""
    fetches: bool = True
    """Whether a model named as ``org/name`` that is not in the Hub's local cache is fetched as a whole.
    Headers of what has an address are read either way, unless ``offline``."""
    options: StoreOptions = NO_OPTIONS
    """How object stores are reached."""
    commits: Commits = field(default_factory=lambda: NO_COMMITS)
    """Those that are to be taken, whatever their revisions mean now."""


USUAL = Lookup()
"""The Hub is asked, and everything else is as the environment has it."""
UNFETCHED = Lookup(fetches=False)
"""The same, but no model is fetched."""


def resolve_source(
    path: str, revision: str | None = None, *, lookup: Lookup = USUAL, pickled: bool = False
) -> str:
    """The place of a model that a recipe names: a directory, or an address that can be opened.

    A Hub name (``org/name``) is fetched into the Hub's cache, and its directory there is the place. An
    address of the Hub (``hf://``) becomes the one of a commit, and nothing is fetched.

    Args:
        pickled: whether a model that has no safetensors is fetched with its pickled weights.

    Raises:
        CheckpointError: there is no such model, the address says no place, or it may not be asked for.
        NotCachedError: of the Hub only the cache was looked at, and has it not.
        TransientError: the Hub does not answer.
    """
    if is_hub_place(path):
        from raymerge.storage.hub.cache import at_commit

        place = hub_place(path, revision)
        known = lookup.commits.get(str(place))
        return str(at_commit(place, offline=lookup.offline) if known is None else place.at(known))
    if not is_remote(path):
        return str(resolve_model(_local(path), revision, offline=_is_offline(lookup), pickled=pickled))
    try:
        address = parse_place(with_options(path, lookup.options))
    except OptionError as error:
        raise CheckpointError(error.problems) from error
    if lookup.offline:
        what = "lies on a server, and nothing is asked of servers here unless you say so."
        raise CheckpointError(Problem(shown(path), what, f"Say so: --source 'NAME={shown(path)}'."))
    if revision is not None:
        what = f"revision {revision!r} is asked for, but only models of the Hub have revisions."
        remedy = "Take it out; where '@' belongs to the address, write {path: ADDRESS}."
        raise CheckpointError(Problem(shown(path), what, remedy))
    return str(address)


def listed_repository(path: str, revision: str | None, lookup: Lookup) -> ReadStore | None:
    """The repository that ``resolve_source`` would fetch, as it is on the Hub, to look at its files before.

    None for what is not fetched, and where the Hub does not tell.
    """
    if is_hub_place(path) or is_remote(path) or _is_offline(lookup):
        return None
    from raymerge.storage.hub.cache import is_barred, listed_store

    name = _local(path)
    if is_barred() or os.path.exists(os.path.expanduser(name)) or not is_hub_name(name):
        return None
    return listed_store(HubPlace(name, revision or USUAL_REVISION))


def _is_offline(lookup: Lookup) -> bool:
    """Whether of Hub names only the local cache is looked at."""
    if lookup.offline or lookup.fetches:
        return lookup.offline
    from raymerge.storage.hub.cache import is_barred

    # Where the Hub may not be asked at all, what its cache lacks is not to be had: no open question.
    return not is_barred()


def _local(path: str) -> str:
    """A path or Hub name, also where it is written as a ``file://`` address."""
    try:
        return parse_place(path).text
    except OptionError as error:
        raise CheckpointError(error.problems) from error


def commit_asked(path: str, revision: str | None, root: str) -> tuple[str, str] | None:
    """The ``hf://`` address that a recipe names, and the commit that was taken; None for what is none."""
    if not is_hub_place(path):
        return None
    commit = snapshot_revision(root)
    return None if commit is None else (str(hub_place(path, revision)), commit)
