"""The lease of an output place in an object store: an object that one run at a time has.

Its holder writes it again every few seconds, with conditions, so that of two who would have it the store
refuses one. As with the lease of a directory, what it cannot prevent does no harm: a run that wakes after
another took over is refused when it writes next, and looks who holds the place before it publishes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from raymerge.errors import HeldError, Problem, RaymergeError, TargetError, TransientError
from raymerge.publish.lease import (
    BEAT_SECONDS,
    DEAD_SECONDS,
    Holder,
    held,
    holder_from,
    is_here,
    lost,
    myself,
    runs_here,
)
from raymerge.storage.objects.writer import ObjectWriter, unconditional

_LOOK_SECONDS = 1.0
_REQUEST_SECONDS = 5.0
"""How long one beat may take: several must fit into the time after which others take over."""
_STALE_SECONDS = DEAD_SECONDS / 2
"""For how long the last beat is believed without another look."""
_REFUSALS = 5
"""How often a store may refuse to write what is not there."""
PROBE = "probe"
"""What the names of objects begin with that are written only to find out whether that goes."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A lease that is there."""

    holder: Holder | None
    """None where it cannot be read."""
    version: str
    """Another one with each sign of life."""


class RemoteLease:
    """A place that is held."""

    def __init__(self, writer: ObjectWriter, key: str, me: Holder, version: str) -> None:
        """
        Args:
            writer: of the output place.
            key: of the lease.
            me: its holder.
            version: of the object, as it was written.
        """
        self._writer = writer
        # The next beat is the second attempt; one that waits for the store would be late.
        self._hasty = ObjectWriter(writer.place, seconds=_REQUEST_SECONDS)
        self._key = key
        self._me = me
        self._version = version
        self._beats = 0
        self._seen = time.monotonic()
        self._is_lost = False
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def check(self) -> None:
        """See that it is still held, without asking the store while beats go well.

        Raises:
            IncompleteError: another run took it over, as was seen by now.
        """
        if self._is_lost:
            self.confirm()
        elif time.monotonic() - self._seen > _STALE_SECONDS:
            # This process may have slept meanwhile. A store that is away says nothing of the lease.
            self._seen = time.monotonic()
            with suppress(TransientError, OSError):
                self._confirm(self._hasty)

    def confirm(self) -> None:
        """See that it is still held, by the object.

        Raises:
            IncompleteError: another run took it over.
        """
        self._confirm(self._writer)

    def _confirm(self, writer: ObjectWriter) -> None:
        found = look(writer, self._key)
        if found is None or found.holder != self._me:
            by = "it was removed" if found is None else f"another run took it over: {found.holder}"
            raise lost(self._writer.location(self._key), by)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show until the block ends that this process lives."""
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def release(self) -> None:
        """Remove the object, if it is still ours."""
        # What cannot be removed is a dead process's lease, for whoever comes next.
        with suppress(RaymergeError, OSError), self._lock:
            found = look(self._writer, self._key)
            if found is not None and found.holder == self._me:
                self._writer.delete([self._key])

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # A store that is away for a moment has nobody else take over, nor do credentials that expire.
            with suppress(Exception), self._lock:
                if not self._ended.is_set() and not self._has_written():
                    self._is_lost = True
                    return

    def _has_written(self) -> bool:
        self._beats += 1
        version = self._hasty.put_over(self._key, _text(self._me, self._beats), self._version)
        if version is None:
            # The answer to an earlier beat may have been lost.
            found = look(self._hasty, self._key)
            version = found.version if found is not None and found.holder == self._me else None
        self._version = version or self._version
        if version is not None:
            self._seen = time.monotonic()
        return version is not None


@contextmanager
def leased(writer: ObjectWriter, key: str, what: str) -> Iterator[RemoteLease]:
    """Hold an output place.

    Of a process on another machine that holds it, it is waited for the next sign of life.

    Args:
        writer: of the place.
        key: of the lease.
        what: digest of what is made there.

    Raises:
        HeldError: another process holds it.
    """
    me = myself(what)
    lease = RemoteLease(writer, key, me, _acquired(writer, key, me))
    try:
        with lease.beating():
            yield lease
    finally:
        lease.release()


def look(writer: ObjectWriter, key: str) -> _Found | None:
    """The lease; None where there is none."""
    found = writer.get(key)
    return None if found is None else _Found(_holder(found[0]), found[1])


def check_unheld(writer: ObjectWriter, key: str, what: str) -> None:
    """Find out whether another process of this machine holds a place, changing nothing.

    Raises:
        HeldError: one does.
    """
    found = look(writer, key)
    if found is not None and found.holder is not None and is_here(found.holder) and runs_here(found.holder):
        raise HeldError(held(writer.location(""), found.holder, myself(what)))


def check_writable(writer: ObjectWriter, directory: str) -> None:
    """Find out whether objects can be written and deleted at a place, and only if there are none; and whether
    they keep what is put down with them.

    Args:
        writer: of the place.
        directory: key that the object which is tried with lies below; it is gone afterwards.

    Raises:
        TargetError: that is refused, or something drops what is put down.
        OptionError: the store knows no conditions.
    """
    run = myself("").run
    key = f"{directory}/{PROBE}-{run}"
    try:
        writer.put_new(key, b"raymerge looks whether it can write here\n", stamp=run)
        is_refused = writer.put_new(key, b"") is None
        found = writer.info(key)
    finally:
        writer.delete([key])
    if not is_refused:
        raise TargetError(unconditional(writer.location("")))
    if found is not None and found.stamp != run:
        what = "objects here do not keep their metadata, by which a run knows its own shards."
        remedy = "Have the server, or what stands before it, keep it; or take another store or a directory."
        raise TargetError(Problem(writer.location(""), what, remedy))


def _acquired(writer: ObjectWriter, key: str, me: Holder, sleep: Callable[[float], None] = time.sleep) -> str:
    """Version of the lease once it is ours; raises HeldError where a living process has it, and TargetError
    where nothing can be written on a condition."""
    first: _Found | None = None
    began, refusals = time.monotonic(), 0
    while (version := _taken(writer, key, me, None)) is None:
        found = look(writer, key)
        if found is None:
            refusals += 1
            if refusals == _REFUSALS:
                raise TargetError(unconditional(writer.location("")))
            sleep(_LOOK_SECONDS)
            continue
        holder = found.holder
        is_dead = holder is not None and is_here(holder) and not runs_here(holder)
        is_still = found == first and time.monotonic() - began > DEAD_SECONDS
        if is_dead or is_still:
            version = _taken(writer, key, me, found.version)
            if version is not None:
                break
        elif (holder is not None and is_here(holder)) or (first is not None and found != first):
            raise HeldError(held(writer.location(""), holder, me))
        first = first or found
        sleep(_LOOK_SECONDS)
    return version


def _taken(writer: ObjectWriter, key: str, me: Holder, over: str | None) -> str | None:
    """Version of our lease, where there was none or that of version ``over``; None where there is another."""
    text = _text(me, 0)
    version = writer.put_new(key, text) if over is None else writer.put_over(key, text, over)
    if version is not None:
        return version
    # An answer may have been lost, and the request been repeated by the client.
    found = look(writer, key)
    return found.version if found is not None and found.holder == me else None


def _text(holder: Holder, beats: int) -> bytes:
    return json.dumps({"holder": asdict(holder), "beats": beats}).encode()


def _holder(text: bytes) -> Holder | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return holder_from(json.dumps(found.get("holder")).encode()) if isinstance(found, dict) else None
