"""Commits of the Hub: which one a revision means, and what of them lies in the Hub's local cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from raymerge.errors import CheckpointError, Problem
from raymerge.storage.hub.addresses import HubPlace
from raymerge.storage.hub.download import LOOKUP_SECONDS, NOT_WANTED
from raymerge.storage.hub.refusals import asked
from raymerge.storage.hub.store import HubStore, repository_info
from raymerge.storage.local.store import LocalStore
from raymerge.storage.refusals import changed
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import NO_FILES, FileInfo

_INDEX_NBYTES = 64 << 20
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class SnapshotStore(LocalStore):
    """A commit in the Hub's cache, whose files have the versions that the Hub gives them.

    So what is read here and what is read from the Hub is the same on all machines and in every run.
    """

    def __init__(
        self, root: Path, *, patience: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
    ) -> None:
        super().__init__(root, patience=patience, expected=expected)
        self._first: dict[str, tuple[int, int]] = {}

    def _info(self, key: str, status: os.stat_result) -> FileInfo:
        info, blob = super()._info(key, status), _blob(self.location(key))
        return info if blob is None else replace(info, version=blob)

    def _compare(self, path: str, status: os.stat_result) -> None:
        super()._compare(path, status)
        # The link keeps its name when somebody writes to what it leads to.
        mark = (status.st_mtime_ns, status.st_ino)
        if path in self._expected and self._first.setdefault(path, mark) != mark:
            raise CheckpointError(changed(path))


def open_hub(
    place: HubPlace, *, patience: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
) -> SnapshotStore | HubStore:
    """The store of a commit: its copy in the Hub's cache where that is whole, else the Hub.

    A place of a branch or a tag is looked up first; raises what ``at_commit`` raises then.
    """
    place = place if place.commit is not None else at_commit(place)
    snapshot = cached_snapshot(place)
    if snapshot is not None:
        return SnapshotStore(snapshot, patience=patience, expected=expected)
    return HubStore(place, patience=patience, expected=expected)


def at_commit(place: HubPlace, *, offline: bool = False) -> HubPlace:
    """The place at the commit that its revision means now.

    The Hub is asked; only if it does not answer, or ``offline``, its local cache, which knows what the
    revision meant when it was fetched. A commit needs no answer.

    Raises:
        CheckpointError: the Hub refuses it, or ``offline`` and the cache does not have all of it.
        TransientError: the Hub did not answer, and the cache does not have all of it.
    """
    cached = cached_snapshot(place) if offline or place.commit is None else None
    known = None if cached is None else _commit_of(cached, place)
    if offline:
        if known is None:
            what = "it is not in the Hub's local cache as a whole, and nothing is fetched here."
            raise CheckpointError(Problem(str(place), what, "Fetch it first with 'hf download'."))
        return place.at(known)
    if place.commit is not None:
        return place
    if known is not None and is_barred():
        return place.at(known)

    def ask() -> str:
        return str(asked(lambda: repository_info(place, files=False), str(place)).sha)

    try:
        return place.at(ask())
    except OSError:
        if known is not None:
            return place.at(known)
    return place.at(RetryPolicy().have(ask, path=str(place), doing="looking", again=lambda _: None))


def listed_store(place: HubPlace) -> HubStore | None:
    """A repository as the Hub has it now, its files listed; None where the Hub does not tell."""
    patience = RetryPolicy()
    patience.end()
    try:
        told = repository_info(place, files=False, seconds=LOOKUP_SECONDS)
        store = HubStore(place.at(str(told.sha)), patience=patience)
        store.files()
    except Exception:  # the client raises a dozen unrelated kinds; who fetches it meets the same again
        return None
    return store


def cached_snapshot(place: HubPlace) -> Path | None:
    """The directory of a place in the Hub's local cache; None where it is not there as a whole.

    On a file system without links the cache does not say what the Hub calls its files, and another machine
    would not find the same: such a copy is taken only where the Hub may not be asked.
    """
    # Imported here because it takes long and most models are elsewhere.
    from huggingface_hub import snapshot_download

    below = f"{place.directory}/" if place.directory else ""
    try:
        found = snapshot_download(
            place.repository,
            revision=place.revision,
            local_files_only=True,
            allow_patterns=[f"{below}*"] if below else None,
            ignore_patterns=[f"{below}{pattern}" for pattern in NOT_WANTED],
        )
    except Exception:  # the client raises a dozen unrelated kinds for what is not there
        return None
    directory = Path(found) / place.directory
    if not _is_whole(directory) or not _stays_inside(directory):
        return None
    return directory if is_barred() or _has_versions(directory) else None


def is_barred() -> bool:
    """Whether the user has the Hub's client ask nothing (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_whole(directory: Path) -> bool:
    """Whether there are weights, and all that an index speaks of: not every version of the client looks."""
    kinds = ("*.safetensors", "pytorch_model*.bin")
    kind = next((kind for kind in kinds if any(directory.glob(kind))), None)
    if kind is None:
        return False
    for index in directory.glob(f"{kind}.index.json"):
        try:
            if index.stat().st_size > _INDEX_NBYTES:
                return False
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        if not all((directory / str(shard)).is_file() for shard in shards):
            return False
    return True


def _stays_inside(directory: Path) -> bool:
    """Whether no link leads out of the cache: what it leads to would be taken for a file of the model."""
    from huggingface_hub import constants

    cache = os.path.realpath(constants.HF_HUB_CACHE) + os.sep
    links = (path for path in directory.rglob("*") if path.is_symlink())
    return all(os.path.realpath(path).startswith(cache) for path in links)


def _has_versions(directory: Path) -> bool:
    """Whether every file is a link to what the Hub calls it."""
    return all(_blob(path) is not None for path in directory.rglob("*") if path.is_file())


def _blob(path: str | Path) -> str | None:
    """What the Hub calls a file of the cache; None where the cache does not say it."""
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:  # a cache on a file system without links
        return None
    return name if _BLOB.fullmatch(name) else None


def _commit_of(snapshot: Path, place: HubPlace) -> str:
    """The name of a snapshot's directory, which is that of its commit."""
    depth = len(Path(place.directory).parts)
    return snapshot.parts[-1 - depth]
