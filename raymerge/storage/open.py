"""From a recipe's name of a model to its place, and from a place to its store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType

from raymerge.errors import CheckpointError, OptionError, Problem
from raymerge.storage import addresses, hub
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import NO_FILES, FileInfo, ReadStore


def open_store(
    place: str, *, retry_policy: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
) -> ReadStore:
    """The store at a place; sends no request yet. ``expected``: versions that these files must have when they
    are read. Raises OptionError: raymerge does not read this kind of address here."""
    files = addresses.files_of_chunked(place)
    if files is not None:
        whole: Callable[[ReadStore], ReadStore] = resolve_name(addresses.CHUNKED_STORE)
        return whole(open_store(files, retry_policy=retry_policy, expected=expected))
    opener: Callable[..., ReadStore] = resolve_name(addresses.STORES[addresses.parse_place(place).scheme])
    return opener(place, retry_policy=retry_policy, expected=expected)


def local_store(
    place: str, *, retry_policy: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
) -> LocalStore:
    return LocalStore(Path(addresses.parse_place(place).text), retry_policy=retry_policy, expected=expected)


Commits = Mapping[str, str]
"""The commit of each ``hf://`` address when it was last looked up."""
NO_COMMITS: Commits = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Lookup:
    offline: bool = False
    """Ask no server; of the Hub use only the local cache."""
    fetches: bool = True
    """Fetch models named ``org/name`` that are not in the Hub's local cache. Headers of addresses are read
    either way, unless ``offline``."""
    options: addresses.StoreOptions = addresses.NO_OPTIONS
    commits: Commits = field(default_factory=lambda: NO_COMMITS)
    """Commits to use, whatever their revisions mean now."""


USUAL = Lookup()
UNFETCHED = Lookup(fetches=False)


def resolve_source(
    path: str, revision: str | None = None, *, lookup: Lookup = USUAL, pickled: bool = False
) -> str:
    """The place of a model that a recipe names: a directory, or an address that can be opened.

    A Hub name (``org/name``) is fetched into the Hub's cache. An ``hf://`` address becomes that of a commit;
    nothing is fetched.

    ``pickled``: also fetch pickled weights where a model has no safetensors. Raises CheckpointError: no such
    model, no valid address, or access refused; NotCachedError: only the Hub's cache was searched, and lacks
    it; TransientError: the Hub does not answer."""
    if hub.is_hub_place(path):
        place = hub.hub_place(path, revision)
        known = lookup.commits.get(str(place))
        return str(hub.at_commit(place, offline=lookup.offline) if known is None else place.at(known))
    if not addresses.is_remote(path):
        return str(hub.resolve_model(_local(path), revision, offline=_is_offline(lookup), pickled=pickled))
    try:
        address = addresses.parse_place(addresses.with_options(path, lookup.options))
    except OptionError as error:
        raise CheckpointError(error.problems) from error
    if lookup.offline:
        what = "lies on a server, and nothing is asked of servers here unless you say so."
        raise CheckpointError(
            Problem(addresses.shown(path), what, f"Say so: --source 'NAME={addresses.shown(path)}'.")
        )
    if revision is not None:
        what = f"revision {revision!r} is asked for, but only models of the Hub have revisions."
        remedy = "Take it out; where '@' belongs to the address, write {path: ADDRESS}."
        raise CheckpointError(Problem(addresses.shown(path), what, remedy))
    return str(address)


def listed_repository(path: str, revision: str | None, lookup: Lookup) -> ReadStore | None:
    """The repository on the Hub that ``resolve_source`` would fetch; None if nothing is fetched or the Hub
    fails."""
    if hub.is_hub_place(path) or addresses.is_remote(path) or _is_offline(lookup):
        return None
    name = _local(path)
    if hub.is_barred() or os.path.exists(os.path.expanduser(name)) or not hub.is_hub_name(name):
        return None
    return hub.listed_store(hub.HubPlace(name, revision or hub.USUAL_REVISION))


def _is_offline(lookup: Lookup) -> bool:
    if lookup.offline or lookup.fetches:
        return lookup.offline
    # Where the Hub may not be asked at all, what its cache lacks is not to be had: no open question.
    return not hub.is_barred()


def _local(path: str) -> str:
    try:
        return addresses.parse_place(path).text
    except OptionError as error:
        raise CheckpointError(error.problems) from error


def commit_asked(path: str, revision: str | None, root: str) -> tuple[str, str] | None:
    """The ``hf://`` address that a recipe names and its commit; None for other places."""
    if not hub.is_hub_place(path):
        return None
    commit = hub.snapshot_revision(root)
    return None if commit is None else (str(hub.hub_place(path, revision)), commit)
