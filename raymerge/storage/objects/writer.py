"""Writes to an object store: small objects at once, large ones as streams that are complete or absent."""

from __future__ import annotations

import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from raymerge import errors
from raymerge.storage.addresses import Place, parse_place, shown
from raymerge.storage.objects.store import (
    ObjectClient,
    asking,
    chain_of,
    lacks_credentials,
    object_client,
    server_message,
)
from raymerge.storage.retry import KEPT, RetryPolicy
from raymerge.storage.store import Buffer, FileInfo, as_bytes

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

SMALLEST_PART = 8 << 20
STREAM_PARTS = 2
LARGEST_OBJECT = 5 << 40
_MOST_PARTS = 9000
"""Stores take ten thousand."""
_AT_ONCE = 1 << 20


def part_bytes(nbytes: int) -> int:
    return max(SMALLEST_PART, -(-nbytes // _MOST_PARTS))


def stream_bytes(nbytes: int) -> int:
    """Peak memory of a stream in bytes, without bytes that come early."""
    if nbytes <= part_bytes(nbytes):
        # Ours, and the client's of the one request.
        return 2 * nbytes + 2 * _AT_ONCE
    # Those on their way, one that is filled, and one that goes from hand to hand.
    return min(nbytes, (STREAM_PARTS + 2) * part_bytes(nbytes)) + 2 * _AT_ONCE


class ObjectStream(ABC):
    """Takes the bytes of an object, each once, roughly in order. For one thread.

    Bytes that come early are kept until those before them are there. As a context it is aborted by whatever
    leaves the block before ``finish``: the store then keeps what it had."""

    def __init__(self, location: str, nbytes: int) -> None:
        self._location = location
        self._nbytes = nbytes
        self._early: dict[int, bytes] = {}
        self._is_open = True
        self.done_bytes = 0
        self.early_bytes = 0
        """Bytes kept, because some before them are missing."""

    def __enter__(self) -> ObjectStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, offset: int, buffer: Buffer) -> None:
        """Take bytes at an offset; the buffer is free afterwards. Raises TransientError, TargetError: the
        store failed, for a while or for good."""
        view = as_bytes(buffer)
        if offset < self.done_bytes or offset + len(view) > self._nbytes or offset in self._early:
            raise ValueError(f"{self._location}: bytes from {offset} on are not awaited")
        if offset > self.done_bytes:
            self._early[offset] = bytes(view)
            self.early_bytes += len(view)
            return
        self._send(view)
        while (early := self._early.pop(self.done_bytes, None)) is not None:
            self.early_bytes -= len(early)
            self._send(memoryview(early))

    def finish(self) -> None:
        """Complete the object; returns when it is there. Raises TransientError, TargetError: as ``write``;
        IncompleteError: bytes are missing, or the guard of the stream refuses it."""
        if self.done_bytes != self._nbytes:
            raise errors.IncompleteError(
                f"{self._location}: {self.done_bytes} of {self._nbytes} bytes came; it is not there. {KEPT}"
            )
        self._complete()
        self._is_open = False

    def abort(self) -> None:
        """Discard what was written, unless finished."""
        if not self._is_open:
            return
        self._is_open = False
        self._early.clear()
        self._drop()

    @abstractmethod
    def _send(self, view: memoryview) -> None: ...

    @abstractmethod
    def _complete(self) -> None: ...

    @abstractmethod
    def _drop(self) -> None: ...


class OneRequest(ObjectStream):
    def __init__(self, put: Callable[[bytearray], None], location: str, nbytes: int) -> None:
        super().__init__(location, nbytes)
        self._put = put
        self._data = bytearray(nbytes)

    def _send(self, view: memoryview) -> None:
        self._data[self.done_bytes : self.done_bytes + len(view)] = view
        self.done_bytes += len(view)

    def _complete(self) -> None:
        self._put(self._data)

    def _drop(self) -> None:
        self._data = bytearray()


class Upload(ObjectStream):
    def __init__(
        self, writer: Any, place: Place, location: str, nbytes: int, guard: Callable[[], None]
    ) -> None:
        super().__init__(location, nbytes)
        self._writer = writer
        self._place = place
        self._guard = guard

    def _complete(self) -> None:
        self._guard()
        self._asked(self._writer.close)

    def _drop(self) -> None:
        from obstore.exceptions import BaseError

        try:
            # The client aborts where it hears of an error, and only there. It breaks off the parts on their
            # way, and aborts again where that fails for a moment, as an abort that meets parts may.
            self._writer.__exit__(errors.IncompleteError, errors.IncompleteError(), None)
        except (BaseError, OSError):
            # What cannot be aborted now is when the next run begins, or by a rule of the store.
            return

    def _send(self, view: memoryview) -> None:
        for start in range(0, len(view), _AT_ONCE):
            # The client keeps what it is given until it is sent; the caller's memory is used again before.
            piece = bytes(view[start : start + _AT_ONCE])
            self._asked(partial(self._writer.write, piece))
        self.done_bytes += len(view)

    def _asked(self, action: Callable[[], object]) -> None:
        # Outermost, since what is refused for good is an OSError too.
        with refusing(self._place, self._location):
            try:
                with asking(self._place, self._location):
                    action()
            except OSError as error:
                is_gone = isinstance(error, FileNotFoundError)
                fault = "the store no longer knows of the upload" if is_gone else error.strerror or error
                what = f"writing at byte {self.done_bytes} failed: {fault}."
                raise errors.TransientError(f"{self._location}: {what} {KEPT}") from error


@contextmanager
def refusing(place: Place, location: str) -> Iterator[None]:
    """Turn refused credentials and missing buckets into ``TargetError``."""
    try:
        yield
    except errors.UnreadableError as error:
        cause = error.__cause__
        if isinstance(cause, Exception) and lacks_credentials(cause):
            raise errors.TargetError(error.problems) from error
        message = server_message(cause) if isinstance(cause, Exception) else ""
        what, remedy = f"the store refuses it: {message}.", "Check the place and the options in storage:."
        if message.removeprefix("status ")[:3] in ("", "401", "403"):
            what = f"the store refuses it to the credentials of this machine: {message or 'there are none'}."
            chain = chain_of(place.scheme)
            remedy = f"Looked for were {chain}. They must be allowed to list, read, write and delete."
        raise errors.TargetError(errors.Problem(location, what, remedy)) from error
    except errors.CheckpointError as error:
        raise errors.TargetError(error.problems) from error


_STREAM_RETRIES = 8
"""Retries of a part by the client itself: a stream cannot go back."""
_DELETED_AT_ONCE = 1000
_ASKED_AT_ONCE = 8
_TRIED = 4
"""How often an object is written over what was just seen there."""
_STAMP = "raymerge"
"""Attribute with the writer of an object; some stores allow no special characters in it."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    nbytes: int
    version: str
    """Version for ``put_over``; some stores change it with each write of the same bytes, or have none."""
    stamp: str


class ObjectWriter:
    """Writes below one place of an object store. Thread-safe."""

    def __init__(
        self, place: str, *, retry_policy: RetryPolicy | None = None, seconds: float | None = None
    ) -> None:
        """``seconds``: limit of one request, which is then not retried; None for the usual limit and retries.
        Raises OptionError: the client package is not installed; CheckpointError: no credentials."""
        self.place = place
        self._retry_policy = retry_policy or RetryPolicy()
        self._address = parse_place(place)
        if seconds is None:
            self._objects = object_client(self._address)
        else:
            self._retry_policy.end()
            self._objects = object_client(
                self._address, read_seconds=seconds, retries=0, whole_seconds=seconds
            )
        self._patient: Client | None = None
        self._lock = threading.Lock()

    @property
    def _store(self) -> Client:
        return self._objects.store

    def _streams(self) -> Client:
        with self._lock:
            self._patient = self._patient or object_client(self._address, retries=_STREAM_RETRIES).store
        return self._patient

    def location(self, key: str) -> str:
        return f"{shown(self.place)}/{key}" if key else shown(self.place)

    def files(self) -> tuple[FileInfo, ...]:
        infos = self._have("", "listing", lambda: list(self._objects.listed()))
        return tuple(sorted(infos, key=lambda each: each.key))

    def info(self, key: str) -> ObjectInfo | None:
        def attempt() -> ObjectInfo | None:
            try:
                result = self._store.get(self._objects.path(key), options={"head": True})
            except FileNotFoundError:
                return None
            stamp = str(result.attributes.get(_STAMP, ""))
            return ObjectInfo(int(result.meta["size"]), _version(result.meta), stamp)

        return self._have(key, "reading", attempt)

    def infos(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
            return dict(zip(keys, threads.map(self.info, keys), strict=True))

    def get(self, key: str) -> tuple[bytes, str] | None:
        """A small object and its version; None if there is none."""

        def attempt() -> tuple[bytes, str] | None:
            try:
                result = self._store.get(self._objects.path(key))
                return bytes(result.bytes()), _version(result.meta)
            except FileNotFoundError:
                return None

        return self._have(key, "reading", attempt)

    def content(self, key: str) -> bytes:
        """Of a small object; empty if there is none."""
        there = self.get(key)
        return b"" if there is None else there[0]

    def get_range(self, key: str, nbytes: int) -> bytes:
        path = self._objects.path(key)
        return self._have(key, "reading", lambda: bytes(self._store.get_range(path, start=0, length=nbytes)))

    def put(self, key: str, data: bytes) -> str:
        path = self._objects.path(key)
        done = self._have(key, "writing", lambda: self._store.put(path, data, use_multipart=False))
        return _version(done)

    def put_new(self, key: str, data: Buffer, *, stamp: str = "") -> str | None:
        """Write a small object if there is none; its version, or None if there is one.

        After a lost answer and a repeated request, the existing one may be this one."""
        return self._put_if(key, data, "create", stamp)

    def put_over(self, key: str, data: Buffer, version: str, *, stamp: str = "") -> str | None:
        """Replace a small object of this version; its new version, or None if it has another. A lost answer
        is as in ``put_new``."""
        # Stores know an object by one of these or by the other.
        e_tag, _, generation = version.partition(" ")
        known = {"e_tag": e_tag, "version": generation}
        return self._put_if(key, data, {name: text for name, text in known.items() if text}, stamp)

    def put_only(self, key: str, data: Buffer, guard: Callable[[], None], *, stamp: str = "") -> None:
        """Write a small object where there is none, or over the version seen before ``guard`` passed.

        However late a request arrives (clients retry after their machine was suspended), it overwrites
        nothing newer.

        ``guard``: raises if nothing more may be written; called before each request that writes. ``stamp``:
        shown by ``info``. An object of this size and stamp counts as written. Raises TransientError: others
        keep writing there, or the store failed for too long; TargetError: it is refused."""
        there: ObjectInfo | None = None
        for _ in range(_TRIED):
            guard()
            if there is None:
                done = self.put_new(key, data, stamp=stamp)
            else:
                done = self.put_over(key, data, there.version, stamp=stamp)
            if done is not None:
                return
            # Looked at before the guard is asked, so that it was there while the place was still ours.
            there = self.info(key)
            if stamp and there is not None and (there.nbytes, there.stamp) == (len(data), stamp):
                return
        raise errors.TransientError(f"{self.location(key)}: another process goes on writing there. {KEPT}")

    def _put_if(self, key: str, data: Buffer, mode: Any, stamp: str) -> str | None:
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        path, attributes = self._objects.path(key), _attributes(stamp)

        def attempt() -> str | None:
            try:
                done = self._store.put(path, data, mode=mode, attributes=attributes, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return None
            except (NotSupportedError, NotImplementedError) as error:
                raise errors.OptionError(unconditional(self.location(""))) from error
            return _version(done)

        return self._have(key, "writing", attempt)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are fine."""
        paths = [self._objects.path(key) for key in keys]
        for start in range(0, len(paths), _DELETED_AT_ONCE):
            some = paths[start : start + _DELETED_AT_ONCE]
            self._have("", "deleting", partial(_delete, self._store, some))

    def stream(
        self, key: str, nbytes: int, *, stamp: str = "", guard: Callable[[], None] = lambda: None
    ) -> ObjectStream:
        """A stream for an object of ``nbytes`` bytes, which appears when it is finished; until then the key
        is unchanged.

        An object of a single part is written as by ``put_only``.

        ``guard``: called just before the object is completed; raises if it may not be."""
        import obstore

        path, size = self._objects.path(key), part_bytes(nbytes)
        if nbytes <= size:
            put = partial(self.put_only, key, guard=guard, stamp=stamp)
            return OneRequest(put, self.location(key), nbytes)
        writer = obstore.open_writer(
            self._streams(),
            path,
            attributes=_attributes(stamp),
            buffer_size=size,
            max_concurrency=STREAM_PARTS,
        )
        return Upload(writer, self._address, self.location(key), nbytes, guard)

    def abort_uploads(self, is_ours: Callable[[str], bool]) -> int:
        """Abort uploads that killed processes left; how many. ``is_ours`` gets keys below the place.

        Only on S3 and with boto3: other stores clear them by their own rules."""
        if self._address.scheme != "s3" or self._address.options.anonymous:
            return 0

        attempt = partial(abort_uploads, self._address, self._objects, is_ours)
        return self._retry_policy.have(attempt, path=self.location(""), doing="listing")

    def _have(self, key: str, doing: str, attempt: Callable[[], _Result]) -> _Result:
        location = self.location(key)

        def tried() -> _Result:
            with refusing(self._address, location), asking(self._address, location):
                return attempt()

        return self._retry_policy.have(tried, path=location, doing=doing)


def unconditional(location: str) -> errors.Problem:
    what = "this store has no conditional writes, so that two runs could not be told apart."
    return errors.Problem(
        location, what, "Take a store that has them (S3, GCS, Azure, MinIO, SeaweedFS), or a local directory."
    )


def _delete(store: Client, paths: list[str]) -> None:
    try:
        store.delete(paths)
    except FileNotFoundError:
        # Some stores say so of what is not there, and may not have looked at the others.
        for path in paths:
            with suppress(FileNotFoundError):
                store.delete(path)


def _attributes(stamp: str) -> dict[str, str] | None:
    return {_STAMP: stamp} if stamp else None


def _version(meta: Any) -> str:
    """The condition to replace an object: its tag, and its generation if the store has one."""
    return f"{meta['e_tag'] or ''} {meta['version'] or ''}".strip()


_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 5, 10, 2
_SIGNED = timedelta(minutes=1)
_FOR_A_MOMENT = frozenset({429, 500, 502, 503, 504})


def abort_uploads(address: Place, objects: ObjectClient, is_ours: Callable[[str], bool]) -> int:
    """As ``ObjectWriter.abort_uploads``; 0 also without the right to list uploads: the bucket's lifecycle
    clears them. Raises OSError: a transient failure; call again for the rest."""
    try:
        import boto3
    except ImportError:
        return 0
    done, prefix = 0, objects.path("")
    payer = {"RequestPayer": "requester"} if address.options.requester_pays else {}
    with _unless_refused():
        client = _client(boto3, address, objects)
        listing = client.get_paginator("list_multipart_uploads")
        for page in listing.paginate(Bucket=address.bucket, Prefix=prefix, **payer):
            # Some servers list more than what they were asked for.
            below = (each for each in page.get("Uploads", ()) if each["Key"].startswith(prefix))
            for each in (each for each in below if is_ours(each["Key"].removeprefix(prefix))):
                # Its own process may have ended it since it was listed.
                with _unless_refused():
                    client.abort_multipart_upload(
                        Bucket=address.bucket, Key=each["Key"], UploadId=each["UploadId"], **payer
                    )
                    done += 1
    return done


@contextmanager
def _unless_refused() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, SSLError
    from obstore.exceptions import BaseError

    try:
        yield
    except SSLError:
        # It knows other authorities than the client that writes.
        return
    except HTTPClientError as error:
        raise OSError(errno.ECONNRESET, str(error)) from error
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in _FOR_A_MOMENT:
            raise OSError(errno.EIO, str(error)) from error
    except (BotoCoreError, BaseError):
        # There are no credentials of boto3's, or it does not speak to such a server.
        return


def _client(boto3: Any, address: Place, objects: ObjectClient) -> Any:
    import obstore
    from botocore.config import Config
    from obstore.store import S3Store

    assert isinstance(objects.store, S3Store)
    # What a client has made of options and environment, it shows in the addresses alone that it signs.
    signed = urlsplit(obstore.sign(objects.store, "GET", "x", _SIGNED))
    path, is_virtual = unquote(signed.path).removesuffix("/x"), True
    if path.endswith(f"/{address.bucket}"):
        path, is_virtual = path.removesuffix(f"/{address.bucket}"), False
    server = signed.netloc.removeprefix(f"{address.bucket}.") if is_virtual else signed.netloc
    region = parse_qs(signed.query)["X-Amz-Credential"][0].split("/")[-3]
    session = boto3.Session(profile_name=address.options.profile, region_name=region)
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"total_max_attempts": _ATTEMPTS},
        s3={"addressing_style": "virtual" if is_virtual else "path"},
    )
    return session.client("s3", endpoint_url=f"{signed.scheme}://{server}{path}", config=config)
