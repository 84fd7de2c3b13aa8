"""A model on the Hub as a store: only the requested byte ranges are fetched."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from raymerge.errors import CheckpointError, Problem, UnreadableError
from raymerge.storage.hub.addresses import HubPlace
from raymerge.storage.local.store import as_bytes
from raymerge.storage.remote import Pieces, RemoteStore
from raymerge.storage.retry import RetryPolicy, changed, ends_before, reading
from raymerge.storage.store import NO_FILES, FileInfo, is_key

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


def asked(request: Callable[[], _Result], where: str) -> _Result:
    """Raises:
    OSError: transient, with an errno of ``retry.TRANSIENT``.
    UnreadableError: the Hub refuses it, or this machine may not ask.
    CheckpointError: the answer makes no sense.
    """
    try:
        return request()
    except CheckpointError:
        raise
    except Exception as error:  # the client raises a dozen unrelated kinds, also those of its HTTP library
        raise _meaning(error, where) from error


def refusal(status: int, where: str) -> OSError | CheckpointError:
    if status >= 500 or status in _BUSY:
        return OSError(errno.EAGAIN, f"the server answered {status}")
    if status == 401:
        return UnreadableError(Problem(where, "the Hub does not accept who asks (401).", _LOG_IN))
    if status == 403:
        return UnreadableError(Problem(where, "the Hub forbids to read it (403).", _ACCESS))
    if status == 404:
        what, remedy = _REFUSALS["EntryNotFoundError"]
        return UnreadableError(Problem(where, what, remedy))
    what = f"the Hub answered with the status {status}."
    return CheckpointError(
        Problem(where, what, "Check the address, HF_ENDPOINT and the proxy if there is one.")
    )


def _meaning(error: Exception, where: str) -> OSError | CheckpointError:
    names = [kind.__name__ for kind in type(error).__mro__]
    for name in names:
        if name in _REFUSALS:
            return UnreadableError(Problem(where, *_REFUSALS[name]))
    if _LOST.intersection(names):
        number = errno.ETIMEDOUT if "TimeoutException" in names else errno.ECONNRESET
        return OSError(number, f"{type(error).__name__}: {_first_line(error)}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return refusal(status, where)
    # Its text may hold a signed address.
    what = f"the Hub's client failed with {type(error).__name__}."
    return CheckpointError(Problem(where, what, "Check HF_ENDPOINT, and the proxy if there is one."))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:_MOST_LETTERS] if text else "no answer"


_LOOK_SECONDS = 30.0
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TRIES = 2
_NO_LONGER_VALID = frozenset({400, 401, 403, 404, 410})


class HubFiles:
    """Asks the Hub once where each file's bytes are, and reads them there. Thread-safe.

    The Hub redirects requests for large files to a signed address on another server, used for all ranges
    until it is refused. Credentials go to the Hub alone. Addresses are in no message: whoever has one may
    read.
    """

    def __init__(self, place: HubPlace) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._finding: dict[str, threading.Lock] = {}
        self._found: dict[str, str] = {}

    def listing(self) -> tuple[FileInfo, ...]:
        told = asked(lambda: repository_info(self._place, files=True), str(self._place))
        found = (self._info(each) for each in told.siblings or ())
        return tuple(sorted((each for each in found if each is not None), key=lambda info: info.key))

    def chunks(self, info: FileInfo, offset: int, nbytes: int) -> Iterator[bytes]:
        """Bytes of a range; fewer if the file or the connection ends before."""
        where = self.where(info.key)
        with self._opened(info, f"bytes={offset}-{offset + nbytes - 1}") as response:
            _check_range(response, offset, nbytes, where)
            chunks = response.iter_raw()
            left = nbytes
            while left and (chunk := asked(lambda: next(chunks, b""), where)):
                yield chunk[:left]
                left -= len(chunk[:left])

    def where(self, key: str) -> str:
        return f"{self._place}/{key}"

    def forget(self, key: str) -> None:
        with self._lock:
            self._found.pop(key, None)

    @contextmanager
    def _opened(self, info: FileInfo, wanted: str) -> Iterator[Any]:
        """The response to a range request; an expired address is renewed."""
        for _ in range(_TRIES):
            url = self._address(info)
            with _answer(url, wanted, self.where(info.key)) as response:
                if _is_of_hub(url) or response.status_code not in _NO_LONGER_VALID:
                    yield response
                    return
                status = response.status_code
            self._drop(info.key, url)
        raise OSError(errno.EAGAIN, f"the server that the Hub sent us to refused the address ({status})")

    def _address(self, info: FileInfo) -> str:
        """Where the bytes of a file are; requested once for all threads."""
        with self._lock:
            finding = self._finding.setdefault(info.key, threading.Lock())
        with finding:
            found = self._found.get(info.key)
            if found is None:
                found = self._resolved(info)
                with self._lock:
                    self._found[info.key] = found
            return found

    def _drop(self, key: str, url: str) -> None:
        with self._lock:
            if self._found.get(key) == url:
                del self._found[key]

    def _resolved(self, info: FileInfo) -> str:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        place, where = self._place, self.where(info.key)
        url = hf_hub_url(place.repository, place.path(info.key), revision=place.revision)
        told = asked(lambda: get_hf_file_metadata(url, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT), where)
        digest = told.etag if told.etag is not None and _DIGEST.fullmatch(told.etag) else info.version
        if digest != info.version or told.size not in (None, info.nbytes):
            raise CheckpointError(changed(where))
        return str(told.location)

    def _info(self, told: Any) -> FileInfo | None:
        """A file of the repository as one of the place; None if it is not below it, or hidden."""
        before = f"{self._place.directory}/" if self._place.directory else ""
        key = str(told.rfilename).removeprefix(before)
        is_hidden = any(part.startswith(".") for part in key.split("/")[:-1])
        if not str(told.rfilename).startswith(before) or is_hidden or not is_key(key):
            return None
        version = told.blob_id if told.lfs is None else told.lfs.sha256
        if told.size is None or version is None:
            what = "the Hub does not tell its size and content."
            raise CheckpointError(
                Problem(self.where(key), what, "Check HF_ENDPOINT: a mirror may lack that.")
            )
        return FileInfo(key, int(told.size), str(version))


def repository_info(place: HubPlace, *, files: bool, seconds: float = _LOOK_SECONDS) -> Any:
    """The Hub's record of a repository at a revision, with sizes and hashes of its files or without."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    return api.model_info(place.repository, revision=place.revision, files_metadata=files, timeout=seconds)


@contextmanager
def _answer(url: str, wanted: str, where: str) -> Iterator[Any]:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    headers = build_hf_headers(token=None if _is_of_hub(url) else False)
    headers |= {"Range": wanted, "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # On the way to another server the library leaves out what identifies the user.
    stream = get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout)
    response = asked(stream.__enter__, where)
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
        raise refusal(status, where)
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != offset:
        raise OSError(errno.EAGAIN, "the server gave other bytes than were asked for")


class HubStore(RemoteStore):
    """The files of a commit on the Hub, listed once. Thread-safe; pickles as its place and the expected
    files.
    """

    def __init__(
        self,
        place: HubPlace,
        *,
        patience: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
    ) -> None:
        """Raises:
        ValueError: the place is of a branch or a tag.
        """
        if place.commit is None:
            raise ValueError(f"{place} is no commit: what it holds may change")
        self.root = self._top = str(place)
        self._place = place
        self._expected = dict(expected)
        self._patience = patience or RetryPolicy()
        self._files = HubFiles(place)
        self._pieces = Pieces()
        self._lock = threading.Lock()
        self._listed: dict[str, FileInfo] | None = None

    def __getstate__(self) -> tuple[HubPlace, dict[str, FileInfo]]:
        return self._place, self._expected

    def __setstate__(self, state: tuple[HubPlace, dict[str, FileInfo]]) -> None:
        self.__init__(state[0], expected=state[1])  # type: ignore[misc]

    def close(self) -> None:
        self._pieces.close()

    def files(self) -> tuple[FileInfo, ...]:
        return tuple(self._listing().values())

    def info(self, key: str) -> FileInfo | None:
        self.location(key)
        return self._listing().get(key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        view = as_bytes(buffer)
        if not len(view):
            return
        info = self._wanted(key)
        if offset + len(view) > info.nbytes:
            place = self.location(key)
            raise CheckpointError(ends_before(place, offset, wanted=len(view), nbytes=info.nbytes))
        self._pieces.fetch(lambda begin, piece: self._fetch(info, begin, piece), offset, view)

    def _listing(self) -> Mapping[str, FileInfo]:
        with self._lock:
            if self._listed is None:
                found = self._patience.have(self._files.listing, path=self.root, doing="listing")
                self._listed = {info.key: info for info in found}
            return self._listed

    def _wanted(self, key: str) -> FileInfo:
        where, info = self.location(key), self._expected.get(key) or self._listing().get(key)
        if info is None:
            with reading(where, 0):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
        return info

    def _fetch(self, info: FileInfo, offset: int, view: memoryview) -> None:
        """Fill a view; each attempt continues where the last one broke off."""
        done = 0

        def go_on() -> None:
            nonlocal done
            for chunk in self._files.chunks(info, offset + done, len(view) - done):
                view[done : done + len(chunk)] = chunk
                done += len(chunk)
            if done < len(view):
                raise OSError(errno.ECONNRESET, "the connection ended in the middle of an answer")

        self._patience.have(
            go_on,
            path=self.location(info.key),
            doing="reading",
            offset=offset,
            again=lambda _: self._files.forget(info.key),
        )
