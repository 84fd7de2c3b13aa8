"""Models of the Hugging Face Hub as local directories."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from raymerge.errors import CheckpointError, NotCachedError, Problem
from raymerge.storage.file_rules import NOT_FETCHED
from raymerge.storage.store import FileInfo

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_SNAPSHOT = re.compile(r"(?:models--[^/]+/snapshots/|^hf://[^@]+@)([0-9a-f]{40})(?:/|$)")
_CACHED = re.compile(r"(?P<cache>.*)/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_NAME = 96
LOOKUP_SECONDS = 5.0
"""How long the Hub may take to tell of a repository that its cache may have."""
_PICKLED = ("pytorch_model*",)
"""The names that transformers gives pickled weights and their index, fetched where there are no others."""
NOT_WANTED = (*NOT_FETCHED, *_PICKLED)
"""Files of a repository that are not fetched at first. Weights that no rule is about are refused before."""
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

    An existing directory wins. Otherwise the model's safetensors and small files are fetched into the
    Hub's cache (``cache_dir``, by default where its own tools keep it); ``offline`` looks only there. With
    ``pickled``, a model that has no safetensors gets its pickled weights as well.

    Raises:
        CheckpointError: there is no such directory, and the Hub gave no such model.
        NotCachedError: the same where only the cache was looked at.
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
    """The commit of a directory in the Hub's cache, or of an ``hf://`` address; None for any other place."""
    found = _SNAPSHOT.search(root if root.startswith("hf://") else Path(root).as_posix())
    return None if found is None else found.group(1)


def blob_digest(root: str, key: str, version: str) -> str | None:
    """SHA-256 of a file of the Hub, which names large files by it; None where it does not say.

    Args:
        version: the store's version of it.
    """
    if root.startswith("hf://"):
        return version if _SHA256.fullmatch(version) else None
    try:
        name = Path(os.readlink(Path(root) / key)).name
    except OSError:
        return None
    return name if _SHA256.fullmatch(name) else None


def unfetched_files(root: str, files: Sequence[FileInfo]) -> tuple[FileInfo, ...]:
    """What a repository of the Hub has beside the files that lie in a snapshot of it.

    Nothing for other places, and where the Hub's cache does not know.

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
    """Whether a text may be the name of a repository."""
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
