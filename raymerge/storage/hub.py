"""Models of the Hugging Face Hub: their addresses, ``hf://org/name[@revision][/directory]``, their files read
by ranges, and the Hub's local cache."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from raymerge.errors import CheckpointError, NotCachedError, Problem, UnreadableError, first_line
from raymerge.storage.file_rules import NOT_FETCHED
from raymerge.storage.local.store import LocalStore
from raymerge.storage.remote import RangedStore
from raymerge.storage.retry import RetryPolicy, changed
from raymerge.storage.store import NO_FILES, Buffer, FileInfo, is_key, is_listed

USUAL_REVISION = "main"
_SCHEME = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_MOST_NAME = 96
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# What the Hub keeps of pull requests and conversions has slashes in its names; other names have %2F for them.
_REVISION = re.compile(r"(refs/(?:pr|convert)/[^/]+|[^/]+)(?:/(.*))?")
_USER = re.compile(r"(?<=://)[^/@]*:[^/@]*@")
_PLAIN = re.compile(r"refs/(?:pr|convert)/[^/@%]+|[^/@%]+")
_FORM = "Write hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME@REVISION/DIRECTORY."


@dataclass(frozen=True, slots=True)
class HubPlace:
    repository: str
    revision: str = USUAL_REVISION
    directory: str = ""
    """Path within the repository, without slashes at its ends; "" for the root."""

    @property
    def commit(self) -> str | None:
        """The commit, if the revision is a full one: then the place never changes."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    def at(self, commit: str) -> HubPlace:
        return replace(self, revision=commit)

    def path(self, key: str) -> str:
        return f"{self.directory}/{key}" if self.directory else key

    def __str__(self) -> str:
        behind = f"/{self.directory}" if self.directory else ""
        is_plain = _PLAIN.fullmatch(self.revision) is not None
        revision = self.revision if is_plain else quote(self.revision, safe="")
        return f"{_SCHEME}{self.repository}@{revision}{behind}"


def is_hub_place(text: str) -> bool:
    return text[: len(_SCHEME)].lower() == _SCHEME


def hub_place(text: str, revision: str | None = None) -> HubPlace:
    """Parse an address. ``revision``: what a recipe has after the first ``@``: ``main``, or
    ``main/directory``. Raises CheckpointError: not a valid address, or one with two revisions."""
    text = text if revision is None else _with_revision(text, revision)
    inner = text[len(_SCHEME) :].rstrip("/")
    organization, _, rest = inner.partition("/")
    name, at, behind = rest.partition("@")
    if not at:
        name, _, directory = rest.partition("/")
        named = USUAL_REVISION
    else:
        match = _REVISION.fullmatch(behind)
        named, directory = (unquote(match[1]), match[2] or "") if match else ("", "")
    repository = f"{organization}/{name}"
    is_good = _REPOSITORY.fullmatch(repository) and ".." not in repository and len(repository) <= _MOST_NAME
    if not is_good or not _is_name(named) or "@" in directory or (directory and not is_key(directory)):
        what = "is not the address of a model on the Hub."
        raise CheckpointError(Problem(_shown(text), what, _FORM))
    return HubPlace(repository, named, directory)


def _is_name(revision: str) -> bool:
    """Whether Git allows such a name: parts of dots alone would lead to other paths."""
    return revision.isprintable() and not any(part in ("", ".", "..") for part in revision.split("/"))


def _shown(text: str) -> str:
    """An address, valid or not, without possible secrets."""
    return _USER.sub("", text).partition("?")[0]


def _with_revision(text: str, revision: str) -> str:
    organization, _, rest = text[len(_SCHEME) :].partition("/")
    name, _, directory = rest.partition("/")
    if "@" in rest:
        what = f"names a revision, and {revision!r} is asked for beside it."
        raise CheckpointError(Problem(_shown(text), what, "Name one."))
    if directory:
        # In a map they stand apart, so that the revision is all of it.
        return f"{_SCHEME}{organization}/{name}@{quote(revision, safe='')}/{directory}"
    return f"{_SCHEME}{organization}/{name}@{revision}"


_LOG_IN = "Log in with 'hf auth login' or set HF_TOKEN, on every machine that reads it."
_ACCESS = f"Ask for access on its page. {_LOG_IN}"
_REFUSALS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "OfflineModeIsEnabled": (
            "it is not whole in the Hub's local cache, and the Hub may not be asked (HF_HUB_OFFLINE is set).",
            "Unset HF_HUB_OFFLINE, or fetch it first with 'hf download'.",
        ),
        "GatedRepoError": ("the Hub gives it only to those who were granted access.", _ACCESS),
        "DisabledRepoError": ("the Hub has disabled this repository.", "Take another model."),
        "RepositoryNotFoundError": (
            "the Hub has no such repository, or it is private.",
            f"Check the name. If it is private: {_LOG_IN[0].lower()}{_LOG_IN[1:]}",
        ),
        "RevisionNotFoundError": (
            "the repository has no such revision.",
            "Check the branch, tag or commit behind the '@'.",
        ),
        "EntryNotFoundError": ("the repository has no such file at this revision.", "Check the address."),
        "FileMetadataError": (
            "what answered does not speak as the Hub does.",
            "Check HF_ENDPOINT, and the proxy if there is one.",
        ),
    }
)
"""What a failure means and what to do, by class name: the same in all versions of the client."""
_LOST = frozenset({"NetworkError", "RemoteProtocolError", "TimeoutException"})
"""Connection failures of the client's HTTP library, whichever that is."""
_BUSY = frozenset({408, 425, 429})
_MOST_LETTERS = 120

_Result = TypeVar("_Result")


def _asked(request: Callable[[], _Result], where: str) -> _Result:
    """Raises OSError: transient, with an errno of ``retry.TRANSIENT``; UnreadableError: the Hub refuses it,
    or this machine may not ask; CheckpointError: the answer makes no sense."""
    try:
        return request()
    except CheckpointError:
        raise
    except Exception as error:  # the client raises a dozen unrelated kinds, also those of its HTTP library
        raise meaning(error, where) from error


def _refusal(status: int, where: str) -> OSError | CheckpointError:
    if status >= 500 or status in _BUSY:
        return OSError(errno.EAGAIN, f"the server answered {status}")
    if status == 401:
        return UnreadableError(Problem(where, "the Hub does not accept who asks (401).", _LOG_IN))
    if status == 403:
        return UnreadableError(Problem(where, "the Hub forbids to read it (403).", _ACCESS))
    if status == 404:
        return UnreadableError(Problem(where, *_REFUSALS["EntryNotFoundError"]))
    what = f"the Hub answered with the status {status}."
    remedy = "Check the address, HF_ENDPOINT and the proxy if there is one."
    return CheckpointError(Problem(where, what, remedy))


def meaning(error: Exception, where: str) -> OSError | CheckpointError:
    """What a failure of the Hub's client says, as the errors of ``_asked``."""
    names = [kind.__name__ for kind in type(error).__mro__]
    for name in names:
        if name in _REFUSALS:
            return UnreadableError(Problem(where, *_REFUSALS[name]))
    if _LOST.intersection(names):
        number = errno.ETIMEDOUT if "TimeoutException" in names else errno.ECONNRESET
        return OSError(number, f"{type(error).__name__}: {first_line(error)[:_MOST_LETTERS]}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return _refusal(status, where)
    # Its text may hold a signed address.
    what = f"the Hub's client failed with {type(error).__name__}."
    return CheckpointError(Problem(where, what, "Check HF_ENDPOINT, and the proxy if there is one."))


_LOOK_SECONDS = 30.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TRIES = 2
_NO_LONGER_VALID = frozenset({400, 401, 403, 404, 410})


class HubStore(RangedStore):
    """The files of a commit on the Hub, listed once. Thread-safe.

    The Hub redirects requests for large files to a signed address on another server, used for all ranges
    until it is refused. Credentials go to the Hub alone. Addresses are in no message: whoever has one may
    read."""

    def __init__(
        self,
        place: HubPlace | str,
        *,
        retry_policy: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
    ) -> None:
        """Raises ValueError: the place is of a branch or a tag."""
        place = hub_place(place) if isinstance(place, str) else place
        if place.commit is None:
            raise ValueError(f"{place} is no commit: what it holds may change")
        super().__init__(str(place), retry_policy, expected)
        self._place = place
        self._listed: dict[str, FileInfo] | None = None
        self._urls: dict[str, str] = {}
        self._resolving: dict[str, threading.Lock] = {}

    def files(self) -> tuple[FileInfo, ...]:
        return tuple(self._listing().values())

    def info(self, key: str) -> FileInfo | None:
        self.location(key)
        return self._current(key)

    def _current(self, key: str) -> FileInfo | None:
        return self._listing().get(key)

    def _chunks(self, info: FileInfo, location: str, offset: int, nbytes: int) -> Iterator[Buffer]:
        with self._opened(info, location, f"bytes={offset}-{offset + nbytes - 1}") as response:
            _check_range(response, offset, nbytes, location)
            chunks = response.iter_raw()
            left = nbytes
            while left and (chunk := _asked(lambda: next(chunks, b""), location)):
                yield chunk[:left]
                left -= len(chunk[:left])

    def _forget(self, key: str) -> None:
        with self._lock:
            self._urls.pop(key, None)

    def _listing(self) -> Mapping[str, FileInfo]:
        with self._lock:
            if self._listed is None:
                record = self._retry_policy.have(
                    lambda: _asked(lambda: _repository_info(self._place, files=True), self.root),
                    path=self.root,
                    doing="listing",
                )
                listed = (self._info(each) for each in record.siblings or ())
                infos = sorted((each for each in listed if each is not None), key=lambda info: info.key)
                self._listed = {info.key: info for info in infos}
            return self._listed

    def _info(self, sibling: Any) -> FileInfo | None:
        """A file of the repository as one of the place; None if it is not below it, or hidden."""
        before = f"{self._place.directory}/" if self._place.directory else ""
        path = str(sibling.rfilename)
        key = path.removeprefix(before)
        if not path.startswith(before) or not is_listed(key):
            return None
        version = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
        if sibling.size is None or version is None:
            what = "the Hub does not tell its size and content."
            remedy = "Check HF_ENDPOINT: a mirror may lack that."
            raise CheckpointError(Problem(self.location(key), what, remedy))
        return FileInfo(key, int(sibling.size), str(version))

    @contextmanager
    def _opened(self, info: FileInfo, location: str, byte_range: str) -> Iterator[Any]:
        """The response to a range request; an expired address is renewed."""
        for _ in range(_TRIES):
            url = self._url(info, location)
            with _answer(url, byte_range, location) as response:
                if _is_of_hub(url) or response.status_code not in _NO_LONGER_VALID:
                    yield response
                    return
                status = response.status_code
            with self._lock:
                if self._urls.get(info.key) == url:
                    del self._urls[info.key]
        raise OSError(errno.EAGAIN, f"the server that the Hub sent us to refused the address ({status})")

    def _url(self, info: FileInfo, location: str) -> str:
        """Where the bytes of a file are; requested once for all threads."""
        with self._lock:
            resolving = self._resolving.setdefault(info.key, threading.Lock())
        with resolving:
            url = self._urls.get(info.key)
            if url is None:
                url = self._resolved(info, location)
                with self._lock:
                    self._urls[info.key] = url
            return url

    def _resolved(self, info: FileInfo, location: str) -> str:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        place, seconds = self._place, constants.HF_HUB_DOWNLOAD_TIMEOUT
        url = hf_hub_url(place.repository, place.path(info.key), revision=place.revision)
        metadata = _asked(lambda: get_hf_file_metadata(url, timeout=seconds), location)
        etag = metadata.etag
        digest = etag if etag is not None and _DIGEST.fullmatch(etag) else info.version
        if digest != info.version or metadata.size not in (None, info.nbytes):
            raise CheckpointError(changed(location))
        return str(metadata.location)


def _repository_info(place: HubPlace, *, files: bool, seconds: float = _LOOK_SECONDS) -> Any:
    """The Hub's record of a repository at a revision, with sizes and hashes of its files or without."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    return api.model_info(place.repository, revision=place.revision, files_metadata=files, timeout=seconds)


@contextmanager
def _answer(url: str, byte_range: str, where: str) -> Iterator[Any]:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    headers = build_hf_headers(token=None if _is_of_hub(url) else False)
    headers |= {"Range": byte_range, "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # On the way to another server the library leaves out what identifies the user.
    stream = get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout)
    response = _asked(stream.__enter__, where)
    try:
        yield response
    finally:
        stream.__exit__(None, None, None)


def _is_of_hub(url: str) -> bool:
    """Whether an address is the Hub's own: the only one that gets credentials."""
    from huggingface_hub import constants

    return _origin(url) == _origin(constants.ENDPOINT)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _check_range(response: Any, offset: int, nbytes: int, where: str) -> None:
    status = int(response.status_code)
    if status == 416:
        what = f"it has no byte {offset}."
        raise UnreadableError(Problem(where, what, "The file is cut off: take another revision."))
    if status == 200 and offset == 0 and response.headers.get("Content-Length") == str(nbytes):
        return
    if status != 206:
        if status < 400:
            what = "its server gives no ranges of files."
            remedy = "Name it without hf://, and it is downloaded."
            raise CheckpointError(Problem(where, what, remedy))
        raise _refusal(status, where)
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != offset:
        raise OSError(errno.EAGAIN, "the server gave other bytes than were asked for")


_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_SNAPSHOT = re.compile(r"(?:models--[^/]+/snapshots/|^hf://[^@]+@)([0-9a-f]{40})(?:/|$)")
_CACHED = re.compile(r"(?P<cache>.*)/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
LOOKUP_SECONDS = 5.0
_PICKLED = ("pytorch_model*",)
"""Names of transformers' pickled weights and their index, fetched only if there are no others."""
_METADATA, _CHUNKS = ".metadata", ("__*.distcp",)
"""The file that describes a training checkpoint, and its chunks, fetched only if there are no others; those
in directories are of other things."""
NOT_WANTED = (*NOT_FETCHED, *_PICKLED)
_REASONS = {
    **{name: what.rstrip(".") for name, (what, _) in _REFUSALS.items()},
    "LocalEntryNotFoundError": "the Hub did not answer, and its local cache has no copy",
    "IncompleteSnapshotError": "the Hub did not answer, and its local cache has only a part",
}


def resolve_model(
    path: str, revision: str | None = None, *, offline: bool = False, pickled: bool = False
) -> Path:
    """The local directory of a model given by path or by Hub name (``org/name``).

    An existing directory wins. Otherwise the model's safetensors and small files are fetched into the Hub's
    cache, or with ``offline`` only looked up there. A model without safetensors gets the chunks of its
    training checkpoint, or with ``pickled`` its pickled weights.

    Raises CheckpointError: no such directory, and no such model on the Hub; NotCachedError: the same where
    only the cache was searched."""
    # os.path and not pathlib, which raises on names too long for the file system.
    directory = os.path.expanduser(path)
    if os.path.isdir(directory):
        if revision is not None:
            what = (
                f"revision {revision!r} is asked for, but this is a local directory, which has no revisions."
            )
            remedy = "Take the revision out, or give a Hub name that is not also a directory here."
            raise CheckpointError(Problem(path, what, remedy))
        return Path(directory)
    if os.path.exists(directory):
        what = "is a file, but a model is a directory with config.json and its safetensors files."
        raise CheckpointError(Problem(path, what, "Give the directory."))
    if not is_hub_name(path):
        what = "there is no such directory."
        raise CheckpointError(Problem(path or "''", what, f"{_meant(directory)}Check the path."))
    try:
        snapshot = _snapshot(path, revision, offline=offline)
        if any(snapshot.glob("*.safetensors")):
            return snapshot
        if (snapshot / _METADATA).is_file():
            return _snapshot(path, revision, offline=offline, only=_CHUNKS)
        if pickled:
            snapshot = _snapshot(path, revision, offline=offline, only=_PICKLED)
        return snapshot
    except Exception as error:  # the client raises a dozen unrelated kinds, also those of its HTTP library
        kind = NotCachedError if offline else CheckpointError
        raise kind(_no_repository(path, revision, error)) from error


def snapshot_revision(root: str) -> str | None:
    """The commit of a directory in the Hub's cache, or of an ``hf://`` address; None for other places."""
    match = _SNAPSHOT.search(root if root.startswith("hf://") else Path(root).as_posix())
    return None if match is None else match.group(1)


def blob_digest(root: str, key: str, version: str) -> str | None:
    """SHA-256 of a large file of the Hub, which is part of its ``version``; None if it is not known."""
    digest = version if root.startswith("hf://") else _blob(Path(root) / key)
    return digest if digest is not None and _SHA256.fullmatch(digest) else None


def unfetched_files(root: str, files: Sequence[FileInfo]) -> tuple[FileInfo, ...]:
    """Files of a repository on the Hub that a snapshot of it lacks.

    Empty for other places, and if the Hub's cache does not know.

    ``files``: those that are there."""
    match = _CACHED.fullmatch(Path(root).as_posix())
    if match is None:
        return ()
    try:
        # Versions of the client before 2.0 have no such list.
        from huggingface_hub import get_cached_repo_tree

        listed = get_cached_repo_tree(
            match["repo"].replace("--", "/"), revision=match["commit"], cache_dir=match["cache"]
        )
    except Exception:  # the client raises a dozen unrelated kinds for what it does not know
        return ()
    present = {info.key for info in files}
    others = (FileInfo(str(each.path), int(each.size), str(each.blob_id)) for each in listed)
    return tuple(info for info in others if info.key not in present)


def is_hub_name(path: str) -> bool:
    return len(path) <= _MOST_NAME and ".." not in path and _HUB_ID.fullmatch(path) is not None


def _snapshot(name: str, revision: str | None, *, offline: bool, only: Sequence[str] | None = None) -> Path:
    # Imported here because it takes long and most models are local.
    from huggingface_hub import snapshot_download

    directory = snapshot_download(
        name,
        revision=revision,
        local_files_only=offline,
        etag_timeout=LOOKUP_SECONDS,
        allow_patterns=None if only is None else list(only),
        ignore_patterns=None if only is not None else list(NOT_WANTED),
    )
    return Path(directory)


def _no_repository(path: str, revision: str | None, error: Exception) -> Problem:
    reason = _REASONS.get(type(error).__name__) or first_line(error)[:_MOST_LETTERS]
    where = path if revision is None else f"{path}@{revision}"
    what = f"there is no such directory, and the Hub gave no such model ({reason})."
    remedy = "Check the path (it is taken from the current directory) or the Hub name and your access to it."
    return Problem(where, what, f"{_meant(os.path.expanduser(path))}{remedy}")


def _meant(path: str) -> str:
    """The directory that was probably meant, as the start of a remedy; "" for none."""
    from raymerge.documents.fields import closest

    above, name = os.path.split(path.rstrip("/"))
    try:
        with os.scandir(above or ".") as entries:
            names = sorted(each.name for each in entries if each.is_dir())
    except (OSError, ValueError):
        return ""
    guess = closest(name, names)
    return "" if guess is None else f"Did you mean '{os.path.join(above, guess)}'? "


_INDEX_NBYTES = 64 << 20


class SnapshotStore(LocalStore):
    """A commit in the Hub's cache; its files have the Hub's versions, the same on all machines."""

    def __init__(
        self,
        root: Path,
        *,
        retry_policy: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
    ) -> None:
        super().__init__(root, retry_policy=retry_policy, expected=expected)
        self._first: dict[str, tuple[int, int]] = {}

    def _info(self, key: str, status: os.stat_result) -> FileInfo:
        info, blob = super()._info(key, status), _blob(self.location(key))
        return info if blob is None else replace(info, version=blob)

    def _compare(self, path: str, status: os.stat_result) -> None:
        super()._compare(path, status)
        # The link keeps its name when somebody writes to what it leads to.
        state = (status.st_mtime_ns, status.st_ino)
        if path in self._expected and self._first.setdefault(path, state) != state:
            raise CheckpointError(changed(path))


def open_hub(
    place: HubPlace | str,
    *,
    retry_policy: RetryPolicy | None = None,
    expected: Mapping[str, FileInfo] = NO_FILES,
) -> SnapshotStore | HubStore:
    """The store of a commit: its copy in the Hub's cache if that is complete, else the Hub.

    A branch or a tag is looked up first; raises what ``at_commit`` raises."""
    place = hub_place(place) if isinstance(place, str) else place
    place = place if place.commit is not None else at_commit(place)
    snapshot = cached_snapshot(place)
    if snapshot is not None:
        return SnapshotStore(snapshot, retry_policy=retry_policy, expected=expected)
    return HubStore(place, retry_policy=retry_policy, expected=expected)


def at_commit(place: HubPlace, *, offline: bool = False) -> HubPlace:
    """The place at the current commit of its revision.

    If the Hub does not answer, or ``offline``, the local cache tells the commit at the time of its fetch. A
    commit needs no request.

    Raises CheckpointError: the Hub refuses it, or ``offline`` and the cache is not complete; TransientError:
    the Hub did not answer, and the cache is not complete."""
    cached = cached_snapshot(place) if offline or place.commit is None else None
    known = None if cached is None else snapshot_revision(str(cached))
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
        return str(_asked(lambda: _repository_info(place, files=False), str(place)).sha)

    try:
        return place.at(ask())
    except OSError:
        if known is not None:
            return place.at(known)
    return place.at(RetryPolicy().have(ask, path=str(place), doing="looking"))


def listed_store(place: HubPlace) -> HubStore | None:
    """The repository, listed; None if the Hub fails at it."""
    retry_policy = RetryPolicy()
    retry_policy.end()
    try:
        record = _repository_info(place, files=False, seconds=LOOKUP_SECONDS)
        store = HubStore(place.at(str(record.sha)), retry_policy=retry_policy)
        store.files()
    except Exception:  # the client raises a dozen unrelated kinds; who fetches it meets the same again
        return None
    return store


def cached_snapshot(place: HubPlace) -> Path | None:
    """The directory of a place in the Hub's local cache; None if it is not complete.

    On a filesystem without links the cache does not know the Hub's names of files, so that versions would
    differ between machines: such a copy is used only if the Hub may not be asked."""
    # Imported here because it takes long and most models are elsewhere.
    from huggingface_hub import snapshot_download

    below = f"{place.directory}/" if place.directory else ""
    try:
        snapshot = snapshot_download(
            place.repository,
            revision=place.revision,
            local_files_only=True,
            allow_patterns=[f"{below}*"] if below else None,
            ignore_patterns=[f"{below}{pattern}" for pattern in NOT_WANTED],
        )
    except Exception:  # the client raises a dozen unrelated kinds for what is not there
        return None
    directory = Path(snapshot) / place.directory
    if not _is_whole(directory) or not _stays_inside(directory):
        return None
    has_versions = all(_blob(path) is not None for path in directory.rglob("*") if path.is_file())
    return directory if has_versions or is_barred() else None


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


def _blob(path: str | Path) -> str | None:
    """The Hub's name of a file in the cache; None if it is unknown."""
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:  # a cache on a file system without links
        return None
    return name if _DIGEST.fullmatch(name) else None
