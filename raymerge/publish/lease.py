"""The lease of an output place: one run at a time makes it, on any machine; and requests to stop that run.

It names the holder, which shows every few seconds that it lives. Beside a directory it is a file that is
touched; in an object store an object that is rewritten on the condition that nobody else wrote it. System
locks (``flock``) answer faster where they work; on many shared file systems they do not, and the file alone
decides. What a lease cannot prevent is harmless: a run that was paused past the deadline may wake beside its
successor. With the same plan it writes the same bytes to the same places; with another it writes to a
directory that is no longer used, or the store refuses. Before publishing it checks who holds the place.

A request to stop is left at the output place from any machine that sees it. It names the process that is
asked, so that no later run heeds it."""

from __future__ import annotations

import errno
import fcntl
import getpass
import glob
import json
import os
import secrets
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from raymerge.errors import HeldError, IncompleteError, Problem, RaymergeError, TargetError, TransientError
from raymerge.options import RunOptions
from raymerge.publish.record import RECORD
from raymerge.storage.addresses import is_object_place, with_options
from raymerge.storage.objects.writer import ObjectWriter, unconditional

LEASE = f"{RECORD}/lease.json"
"""Key of the lease in an object store."""
STOP = f"{RECORD}/stop.json"
"""Key of a request to stop in an object store."""
STEPS_LEASE = f"{RECORD}/steps-lease.json"
"""Key of the lease of who makes, in a directory elsewhere, what comes before."""
_MOST_PID = 1 << 31


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    run: str
    """Random; distinguishes leases of one process."""
    what: str
    """Digest of what is made."""
    machine: str
    """Where the process number is valid: one boot of one system, and one namespace of processes."""
    host: str
    """Its name: a clone of a running machine differs in nothing else."""
    pid: int
    began: str
    """Start of the process by its system's clock; "" where unknown."""
    user: str
    since: str
    """When it took the lease, by its own clock; informative."""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


def myself(what: str) -> LeaseHolder:
    """This process as a holder; ``what`` is the digest of what it makes."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    began = _began(os.getpid()) or ""
    run, host = uuid.uuid4().hex[:8], socket.gethostname()
    return LeaseHolder(run, what, _machine(), host, os.getpid(), began, user, since)


def holder_from(text: bytes) -> LeaseHolder | None:
    """A holder from JSON, of its own or within a lease; None where that cannot be read."""
    try:
        fields = json.loads(text)
        fields = fields.get("holder", fields)
        holder = LeaseHolder(**fields)
    except (AttributeError, ValueError, TypeError, RecursionError):
        return None
    is_whole = all(type(value) is (int if name == "pid" else str) for name, value in fields.items())
    return holder if is_whole and 0 < holder.pid < _MOST_PID else None


def is_same_process(one: LeaseHolder, other: LeaseHolder) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("machine", "host", "pid", "began"))


def is_here(holder: LeaseHolder) -> bool:
    return (holder.machine, holder.host) == (_machine(), socket.gethostname())


def runs_here(holder: LeaseHolder) -> bool:
    """Whether the process that took the lease still runs on this machine."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    began = _began(holder.pid)
    return began is None or began == holder.began or not holder.began


def _began(pid: int) -> str | None:
    """Start of a process; "" if it has ended, None where unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    facts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with suppress(OSError):  # many containers lack the second, other systems than Linux both
            facts.append(Path(path).read_text(errors="replace").strip())
    with suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


BEAT_SECONDS = 5.0
"""How often a holder shows that it lives."""
DEAD_SECONDS = 30.0
"""How long a holder on another machine may show nothing before its lease may be taken over."""
_STALE_SECONDS = DEAD_SECONDS / 2
"""For how long the last beat is believed without another look."""
_REQUEST_SECONDS = 5.0
"""How long one beat in a store may take: several must fit into the time after which others take over."""
_REFUSALS = 5
"""How often a store may refuse to write what is not there."""
_MOST_BYTES = 1 << 16
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a lease is opened: what is no file must not be waited for."""
_WITHOUT_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class LeaseState:
    holder: LeaseHolder | None
    """None if unreadable."""
    sign: float | str
    """Changes with each sign of life: time of change by the file system's clock, or version of an object."""
    is_locked: bool = False


@dataclass(frozen=True, slots=True)
class LeaseView:
    holder: LeaseHolder | None
    """None if unreadable."""
    silent_seconds: float
    """Since the last sign of life, by the clock of this machine."""
    is_alive: bool
    """As far as can be told from here."""


class Lease:
    def __init__(self, store: LeaseStore, me: LeaseHolder) -> None:
        self._store = store
        self._me = me
        self._seen = time.monotonic()
        self._is_lost = False
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises IncompleteError if a beat found a successor; looks only when beats fail."""
        if self._is_lost:
            self.confirm()
        elif time.monotonic() - self._seen > _STALE_SECONDS:
            # This process may have slept meanwhile. Storage that is away says nothing of the lease.
            self._seen = time.monotonic()
            with suppress(TransientError, OSError):
                self._confirm(self._store.look(is_hasty=True))

    def confirm(self) -> None:
        """Raises IncompleteError if, by a look at the lease, another run took over."""
        self._confirm(self._store.look())

    def _confirm(self, there: LeaseState | None) -> None:
        holder = there.holder if there is not None else None
        if holder != self._me:
            by = "it was removed" if there is None else f"another run took it over: {holder}"
            raise IncompleteError(
                f"{self._store.location}: the lease of this run is gone, {by}. That happens to a run that "
                f"shows no sign of life for {DEAD_SECONDS:g} s. Nothing was published. What is done is kept: "
                "the same command goes on from there, once nobody else does."
            )

    @contextmanager
    def beating(self) -> Iterator[None]:
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        try:
            yield
        finally:
            # Not waited for: storage that hangs may have it for long. Who has no lease beats no more.
            self._ended.set()

    def release(self) -> None:
        # What cannot be removed is a dead process's lease, for whoever comes next.
        with suppress(RaymergeError, OSError), self._lock:
            there = self._store.look()
            if there is not None and there.holder == self._me:
                self._store.remove()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # Storage that is away for a moment has nobody else take over, nor do credentials that expire.
            with suppress(Exception), self._lock:
                if self._ended.is_set():
                    return
                if not self._store.beat(self._me):
                    self._is_lost = True
                    return
                self._seen = time.monotonic()


@contextmanager
def leased(store: LeaseStore, what: str) -> Iterator[Lease]:
    """Hold a place; ``what`` is the digest of what is made there. Waits for a sign of life where a process on
    another machine holds it.

    Raises HeldError if another process holds it, TargetError if something else has the lease's name or the
    store knows no conditions, OSError if nothing can be written beside it."""
    me = myself(what)
    with store.wanting(me):
        _acquire(store, me)
        lease = Lease(store, me)
        try:
            with lease.beating():
                yield lease
        finally:
            lease.release()


def check_unheld(store: LeaseStore, what: str) -> None:
    """Raises HeldError if another process of this machine holds a place; changes nothing."""
    try:
        there = store.look()
    except OSError:  # which will be told of when the lease is taken
        return
    if there is not None and _is_held_here(there):
        raise HeldError(_held(store.place, there.holder, myself(what)))


def lease_view(place: Path) -> LeaseView | None:
    """The holder of a directory, or None; raises OSError if it cannot be looked at."""
    there = LeaseFile(place).look()
    if there is None:
        return None
    silent = time.time() - float(there.sign)
    return LeaseView(there.holder, max(0.0, silent), not _is_dead(there, silent))


def _acquire(store: LeaseStore, me: LeaseHolder, sleep: Callable[[float], None] = time.sleep) -> None:
    """Raises HeldError where a living process has it."""
    first: LeaseState | None = None
    began = time.monotonic()
    while not store.put_new(me):
        there = store.look()
        if there is not None:
            # One that says of itself that it was touched in the future is watched by our own clock.
            is_still = there == first and time.monotonic() - began > DEAD_SECONDS
            if _is_dead(there, store.silent_seconds(there)) or (is_still and not there.is_locked):
                if store.put_over(me, there):
                    break
            elif (
                # No wait for a sign of life is needed, or there was one.
                there.is_locked
                or (there.holder is not None and is_here(there.holder))
                or (first is not None and there != first)
            ):
                raise HeldError(_held(store.place, there.holder, me))
            first = first or there
        sleep(store.look_seconds)
    store.settle()


def _is_dead(there: LeaseState, silent_seconds: float) -> bool:
    """Whether the holder is certainly gone, or silent for too long where nothing else is known."""
    holder = there.holder
    if holder is not None and is_here(holder):
        return not _is_held_here(there)
    if holder is None and there.is_locked:
        return False
    return silent_seconds > DEAD_SECONDS


def _is_held_here(there: LeaseState) -> bool:
    holder = there.holder
    if holder is None or not is_here(holder):
        return False
    return there.is_locked or runs_here(holder)


def _held(place: str, holder: LeaseHolder | None, me: LeaseHolder) -> Problem:
    if holder is None:
        return Problem(place, "another run holds it.", "Wait for it, or stop it first.")
    what = "this very checkpoint" if holder.what == me.what else "another checkpoint"
    remedy = "Wait for it, or stop it first."
    if not is_here(holder):
        remedy += f" Should its machine die, this command takes over {DEAD_SECONDS:g} s later."
    return Problem(place, f"another run makes {what} here now: {holder}.", remedy)


class LeaseFile:
    """The lease of a directory, which need not exist: a file beside it."""

    look_seconds = 0.1

    def __init__(self, place: Path) -> None:
        self.place = str(place)
        self._path = place.parent / f".{place.name}.raymerge.lock"
        self.location = str(self._path)
        self._mine = self._path
        """A file of our own that becomes the lease; the lease itself while nobody wants it."""

    def look(self, *, is_hasty: bool = False) -> LeaseState | None:  # noqa: ARG002 - no server is asked
        """Opens the file anew, so that clients of a file server ask the server."""
        try:
            descriptor = os.open(self._path, _READING)
        except FileNotFoundError:
            return None
        try:
            # Shared, so that nobody who looks is taken for a holder.
            is_locked = not _lock(descriptor, fcntl.LOCK_SH)
            holder = holder_from(os.pread(descriptor, _MOST_BYTES, 0))
            return LeaseState(holder, os.fstat(descriptor).st_mtime, is_locked)
        finally:
            os.close(descriptor)

    @contextmanager
    def wanting(self, me: LeaseHolder) -> Iterator[None]:
        """Have what is needed to take and hold the lease: a file that names this process, with the system's
        lock on it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._mine = self._path.with_name(f"{self._path.name}.{me.run}")
        descriptor = os.open(self._mine, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, json.dumps(asdict(me)).encode())
            os.fsync(descriptor)
            _lock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            self._mine.unlink(missing_ok=True)
            os.close(descriptor)

    def put_new(self, me: LeaseHolder) -> bool:  # noqa: ARG002 - the file of our own says it
        """Take the lease if there is none; of all concurrent attempts, on any machine, one succeeds."""
        if _has_linked(self._mine, self._path):
            return True
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self._path.lstat().st_mode):
                what = f"{self._path} is no file, so that no lease can be held there."
                raise TargetError(Problem(self.place, what, "Remove it, if nobody needs it."))
        return False

    def put_over(self, me: LeaseHolder, dead: LeaseState) -> bool:  # noqa: ARG002 - as in ``put_new``
        """Take over the lease if it is still as it was seen; of all concurrent attempts one succeeds.

        A briefly held second name decides who may: a slow process would otherwise replace the lease of a
        quicker one."""
        turn = self._path.with_name(f"{self._path.name}.turn")
        if not _has_linked(self._mine, turn):
            with suppress(OSError):
                if self._now() - turn.stat().st_mtime > DEAD_SECONDS:
                    turn.unlink()
            return False
        try:
            if self.look() != dead:
                return False
            self._mine.replace(self._path)
            return True
        finally:
            turn.unlink(missing_ok=True)

    def silent_seconds(self, there: LeaseState) -> float:
        """Since the holder's last sign of life, as far as the store says."""
        return self._now() - float(there.sign)

    def settle(self) -> None:
        """Remove the files used for taking it, and those of processes that died while they tried."""
        for left in self._path.parent.glob(f"{glob.escape(self._path.name)}.*"):
            with suppress(OSError):
                if left == self._mine or self._path.stat().st_mtime - left.stat().st_mtime > DEAD_SECONDS:
                    left.unlink()

    def beat(self, me: LeaseHolder) -> bool:
        """Show that the holder lives; False if another process has the lease."""
        there = self.look()
        if there is None or there.holder != me:
            return False
        os.utime(self._path)
        return True

    def remove(self) -> None:
        self._path.unlink()

    def _now(self) -> float:
        """Time by the file system's clock: the other machine's and ours may differ."""
        os.utime(self._mine)
        return self._mine.stat().st_mtime


def _has_linked(mine: Path, path: Path) -> bool:
    """Give a file a second name if that is free; of all concurrent attempts, on any machine, one succeeds."""
    try:
        os.link(mine, path)
    except FileExistsError:
        # The answer of a file server may have been lost, and the question been repeated by the system.
        with suppress(OSError):
            return os.path.samefile(mine, path)
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        return _has_copied(mine, path)
    return True


def _has_copied(mine: Path, path: Path) -> bool:
    """``_has_linked`` for file systems without hard links."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(mine.read_bytes())
    return True


def _lock(descriptor: int, kind: int) -> bool:
    """False if another process has the lock. A file system without locks grants every request."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class LeaseObject:
    """The lease of a place in an object store: an object that one writer at a time may replace."""

    look_seconds = 1.0

    def __init__(self, writer: ObjectWriter, key: str) -> None:
        self._writer = writer
        # The next beat is the second attempt; one that waits for the store would be late.
        self._hasty = ObjectWriter(writer.place, seconds=_REQUEST_SECONDS)
        self._key = key
        self._version = ""
        self._beats = self._refusals = 0
        self.place, self.location = writer.location(""), writer.location(key)

    def look(self, *, is_hasty: bool = False) -> LeaseState | None:
        """``is_hasty`` asks the store once and briefly."""
        there = (self._hasty if is_hasty else self._writer).get(self._key)
        return None if there is None else LeaseState(holder_from(there[0]), there[1])

    def wanting(self, me: LeaseHolder) -> AbstractContextManager[None]:  # noqa: ARG002 - an object is put at once
        return nullcontext()

    def put_new(self, me: LeaseHolder) -> bool:
        if self._has_put(me, self._writer.put_new(self._key, self._text(me))):
            return True
        if self._refusals >= _REFUSALS:
            raise TargetError(unconditional(self.place))
        return False

    def put_over(self, me: LeaseHolder, dead: LeaseState) -> bool:
        return self._has_put(me, self._writer.put_over(self._key, self._text(me), str(dead.sign)))

    def silent_seconds(self, there: LeaseState) -> float:  # noqa: ARG002 - its clock need not be ours
        return 0.0

    def settle(self) -> None: ...

    def beat(self, me: LeaseHolder) -> bool:
        self._beats += 1
        written = self._hasty.put_over(self._key, self._text(me), self._version)
        return self._has_put(me, written, is_hasty=True)

    def remove(self) -> None:
        self._writer.delete([self._key])

    def _has_put(self, me: LeaseHolder, version: str | None, *, is_hasty: bool = False) -> bool:
        if version is None:
            # An answer may have been lost, and the request been repeated by the client.
            there = self.look(is_hasty=is_hasty)
            self._refusals += there is None
            if there is None or there.holder != me:
                return False
            version = str(there.sign)
        self._version = version
        return True

    def _text(self, me: LeaseHolder) -> bytes:
        return json.dumps({"holder": asdict(me), "beats": self._beats}).encode()


LeaseStore: TypeAlias = LeaseFile | LeaseObject


_ASK_SECONDS = 2.0
_ASK_STORE_SECONDS = 5.0


def _opened(path: str, _: int) -> int:
    return os.open(path, _READING)


class StopRequest:
    def __init__(self, place: Path | ObjectWriter) -> None:
        """``place`` is a directory, which the request is left beside, or an object store."""
        self._writer = place if isinstance(place, ObjectWriter) else None
        real = Path() if isinstance(place, ObjectWriter) else Path(os.path.realpath(place))
        self._path = real.parent / f".{real.name}.raymerge-stop"
        self._pause = _ASK_SECONDS if self._writer is None else _ASK_STORE_SECONDS
        # A store is first asked after a while, as most runs in one end with no request.
        self._looked_at = -self._pause if self._writer is None else time.monotonic()
        self._look: threading.Thread | None = None
        self._is_seen = False

    def make(self, holder: LeaseHolder) -> None:
        """Ask the holder of the place's lease to stop.

        Raises OSError where nothing can be written, TransientError for a passing failure of the store,
        TargetError where it refuses."""
        text = json.dumps(asdict(holder)).encode()
        if self._writer is not None:
            self._writer.put(STOP, text)
            return
        temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(text)
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def is_made(self) -> bool:
        """Whether this process is asked to stop, as last seen; true once.

        It looks every few seconds; in a store from a thread, so that the caller never waits."""
        is_looking = self._look is not None and self._look.is_alive()
        if not is_looking and time.monotonic() - self._looked_at >= self._pause:
            self._looked_at = time.monotonic()
            if self._writer is not None:
                self._look = threading.Thread(target=self._see, name="stop request", daemon=True)
                self._look.start()
            else:
                self._see()
        is_seen, self._is_seen = self._is_seen, False
        return is_seen

    def withdraw(self) -> None:
        """Remove a request to this process, which is ending; raises nothing."""
        with suppress(Exception):
            asked = self._asked()
            if asked is not None and is_same_process(asked, myself("")):
                self._remove()

    def _see(self) -> None:
        # Storage that is away for a moment says nothing, and is asked again.
        with suppress(Exception):
            asked = self._asked()
            if asked is not None:
                self._is_seen = is_same_process(asked, myself(""))
                # Gone once it was seen, and so is one to a process that has ended.
                self._remove()

    def _asked(self) -> LeaseHolder | None:
        """The process that is asked; None for none, or an unreadable request."""
        if self._writer is not None:
            return holder_from(self._writer.content(STOP))
        with suppress(FileNotFoundError), open(self._path, "rb", opener=_opened) as file:
            return holder_from(file.read(_MOST_BYTES))
        return None

    def _remove(self) -> None:
        if self._writer is None:
            self._path.unlink(missing_ok=True)
        else:
            self._writer.delete([STOP])


def stop_request_at(output: Path | str, options: RunOptions) -> StopRequest:
    """Raises OptionError without the client of the place's store, CheckpointError without credentials."""
    if not is_object_place(str(output)):
        return StopRequest(Path(output))
    return StopRequest(ObjectWriter(with_options(str(output), options.storage), seconds=_REQUEST_SECONDS))
