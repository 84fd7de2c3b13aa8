"""Models of the Hugging Face Hub in its local cache: the commit of a revision, and which files are there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raymerge.errors import CheckpointError, NotCachedError, Problem
from raymerge.storage.file_rules import NOT_FETCHED
from raymerge.storage.hub.addresses import HubPlace, hub_place
from raymerge.storage.hub.store import HubStore, asked, repository_info
from raymerge.storage.local.store import LocalStore
from raymerge.storage.retry import RetryPolicy, changed
from raymerge.storage.store import NO_FILES, FileInfo

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_SNAPSHOT = re.compile(r"(?:models--[^/]+/snapshots/|^hf://[^@]+@)([0-9a-f]{40})(?:/|$)")
_CACHED = re.compile(r"(?P<cache>.*)/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_NAME = 96
LOOKUP_SECONDS = 5.0
_PICKLED = ("pytorch_model*",)
"""Names of transformers' pickled weights and their index, fetched only if there are no others."""
NOT_WANTED = (*NOT_FETCHED, *_PICKLED)
_REASONS = {
    "RepositoryNotFoundError": "it has no such repository, or it is private",
    "GatedRepoError": "access to it must be asked for on its page first",
    "RevisionNotFoundError": "it has no such revision",
    "LocalEntryNotFoundError": "the Hub did not answer, and its local cache has no copy",
    "IncompleteSnapshotError": "the Hub did not answer, and its local cache has only a part",
}


def resolve_model(
    path: str,
    revision: str | None = None,
    *,
    offline: bool = False,
    cache_dir: Path | None = None,
    pickled: bool = False,
) -> Path:
    """The local directory of a model given by path or by Hub name (``org/name``).

    An existing directory wins. Otherwise the model's safetensors and small files are fetched into the Hub's
    cache, or with ``offline`` only looked up there. With ``pickled``, a model without safetensors gets its
    pickled weights.

    Raises:
        CheckpointError: no such directory, and no such model on the Hub.
        NotCachedError: the same where only the cache was searched.
    """
    # os.path and not pathlib, which raises on names too long for the file system.
    directory = os.path.expanduser(path)
    if os.path.isdir(directory):
        if revision is not None:
            raise CheckpointError(_revision_of_directory(path, revision))
        return Path(directory)
    is_file = os.path.exists(directory)
    if is_file or not is_hub_name(path):
        raise CheckpointError(_no_directory(path or "''", is_file=is_file))
    try:
        found = _snapshot(path, revision, offline=offline, cache_dir=cache_dir)
        if pickled and not any(found.glob("*.safetensors")):
            found = _snapshot(path, revision, offline=offline, cache_dir=cache_dir, only=_PICKLED)
        return found
    except Exception as error:  # the client raises a dozen unrelated kinds, also those of its HTTP library
        kind = NotCachedError if offline else CheckpointError
        raise kind(_no_repository(path, revision, error)) from error


def snapshot_revision(root: str) -> str | None:
    """The commit of a directory in the Hub's cache, or of an ``hf://`` address; None for other places."""
    found = _SNAPSHOT.search(root if root.startswith("hf://") else Path(root).as_posix())
    return None if found is None else found.group(1)


def blob_digest(root: str, key: str, version: str) -> str | None:
    """SHA-256 of a large file of the Hub, which is part of its ``version``; None if it is not known."""
    if root.startswith("hf://"):
        return version if _SHA256.fullmatch(version) else None
    try:
        name = Path(os.readlink(Path(root) / key)).name
    except OSError:
        return None
    return name if _SHA256.fullmatch(name) else None


def unfetched_files(root: str, files: Sequence[FileInfo]) -> tuple[FileInfo, ...]:
    """Files of a repository on the Hub that a snapshot of it lacks.

    Empty for other places, and if the Hub's cache does not know.

    Args:
        files: those that are there.
    """
    found = _CACHED.fullmatch(Path(root).as_posix())
    if found is None:
        return ()
    try:
        # Versions of the client before 2.0 have no such list.
        from huggingface_hub import get_cached_repo_tree

        listed = get_cached_repo_tree(
            found["repo"].replace("--", "/"), revision=found["commit"], cache_dir=found["cache"]
        )
    except Exception:  # the client raises a dozen unrelated kinds for what it does not know
        return ()
    present = {info.key for info in files}
    others = (FileInfo(str(each.path), int(each.size), str(each.blob_id)) for each in listed)
    return tuple(info for info in others if info.key not in present)


def is_hub_name(path: str) -> bool:
    return len(path) <= _MAX_NAME and ".." not in path and _HUB_ID.fullmatch(path) is not None


def _snapshot(
    name: str,
    revision: str | None,
    *,
    offline: bool,
    cache_dir: Path | None,
    only: Sequence[str] | None = None,
) -> Path:
    # Imported here because it takes long and most models are local.
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        name,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=offline,
        etag_timeout=LOOKUP_SECONDS,
        allow_patterns=None if only is None else list(only),
        ignore_patterns=None if only is not None else list(NOT_WANTED),
    )
    return Path(found)


def _no_repository(path: str, revision: str | None, error: Exception) -> Problem:
    text = str(error).strip()
    reason = _REASONS.get(type(error).__name__) or (text.splitlines()[0][:120] if text else repr(error))
    where = path if revision is None else f"{path}@{revision}"
    what = f"there is no such directory, and the Hub gave no such model ({reason})."
    remedy = "Check the path (it is taken from the current directory) or the Hub name and your access to it."
    return Problem(where, what, remedy)


def _no_directory(path: str, *, is_file: bool) -> Problem:
    if is_file:
        what = "is a file, but a model is a directory with config.json and its safetensors files."
        return Problem(path, what, "Give the directory.")
    return Problem(path, "there is no such directory.", "Check the path.")


def _revision_of_directory(path: str, revision: str) -> Problem:
    what = f"revision {revision!r} is asked for, but this is a local directory, which has no revisions."
    return Problem(path, what, "Take the revision out, or give a Hub name that is not also a directory here.")


_INDEX_NBYTES = 64 << 20
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class SnapshotStore(LocalStore):
    """A commit in the Hub's cache; its files have the Hub's versions, the same on all machines."""

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
    place: HubPlace | str, *, patience: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
) -> SnapshotStore | HubStore:
    """The store of a commit: its copy in the Hub's cache if that is complete, else the Hub.

    A branch or a tag is looked up first; raises what ``at_commit`` raises.
    """
    place = hub_place(place) if isinstance(place, str) else place
    place = place if place.commit is not None else at_commit(place)
    snapshot = cached_snapshot(place)
    if snapshot is not None:
        return SnapshotStore(snapshot, patience=patience, expected=expected)
    return HubStore(place, patience=patience, expected=expected)


def at_commit(place: HubPlace, *, offline: bool = False) -> HubPlace:
    """The place at the current commit of its revision.

    If the Hub does not answer, or ``offline``, the local cache tells the commit at the time of its fetch. A
    commit needs no request.

    Raises:
        CheckpointError: the Hub refuses it, or ``offline`` and the cache is not complete.
        TransientError: the Hub did not answer, and the cache is not complete.
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
    return place.at(RetryPolicy().have(ask, path=str(place), doing="looking"))


def listed_store(place: HubPlace) -> HubStore | None:
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
    """The directory of a place in the Hub's local cache; None if it is not complete.

    On a filesystem without links the cache does not know the Hub's names of files, so that versions would
    differ between machines: such a copy is used only if the Hub may not be asked.
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
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_whole(directory: Path) -> bool:
    """Whether there are weights and all files of their index: not every version of the client checks."""
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
    """Whether no link leads out of the cache, to files that are not of the model."""
    from huggingface_hub import constants

    cache = os.path.realpath(constants.HF_HUB_CACHE) + os.sep
    links = (path for path in directory.rglob("*") if path.is_symlink())
    return all(os.path.realpath(path).startswith(cache) for path in links)


def _has_versions(directory: Path) -> bool:
    return all(_blob(path) is not None for path in directory.rglob("*") if path.is_file())


def _blob(path: str | Path) -> str | None:
    """The Hub's name of a file in the cache; None if it is unknown."""
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:  # a cache on a file system without links
        return None
    return name if _BLOB.fullmatch(name) else None


def _commit_of(snapshot: Path, place: HubPlace) -> str:
    depth = len(Path(place.directory).parts)
    return snapshot.parts[-1 - depth]
