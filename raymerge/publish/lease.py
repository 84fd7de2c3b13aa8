"""The lease of an output place: one run at a time makes it, on whatever machine it runs.

It says who holds the place, and its holder shows every few seconds that it lives. Beside a directory it is a
file that is touched; in an object store an object that is written again, on the condition that nobody else
has written it. Locks of the system (``flock``) tell more quickly where they are passed on; where they are
not, as on many shared file systems, the file alone decides. What a lease cannot prevent does no harm. A run
that was paused for longer than others wait may wake and go on beside the one that took over: of the same plan
it writes the same bytes to the same places, of another it writes to a directory that nobody uses any more, or
is refused by the store. And before it publishes it looks who holds the place.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import glob
import json
import os
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
from typing import Protocol

from raymerge.errors import HeldError, IncompleteError, Problem, RaymergeError, TargetError, TransientError
from raymerge.publish.attempt import RECORD
from raymerge.storage.objects.writer import ObjectWriter, unconditional

LEASE = f"{RECORD}/lease.json"
"""Key of the lease in an object store."""
STEPS_LEASE = f"{RECORD}/steps-lease.json"
"""Key of the lease of who makes, in a directory elsewhere, what comes before."""
_MOST_PID = 1 << 31


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a place, as its lease says."""

    run: str
    """Chance; tells two leases of one process apart."""
    what: str
    """Digest of what is made."""
    machine: str
    """Where the number of the process means something: the same system since it was started, and what else
    numbers processes by itself there."""
    host: str
    """Its name: a copy of a running machine has all else of it."""
    pid: int
    began: str
    """When the process began, as its system counts; "" where that is not known."""
    user: str
    since: str
    """When it took the lease, by its own clock; for people."""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


def myself(what: str) -> Holder:
    """This process, as the holder of a lease of what has the digest ``what``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    began = _began(os.getpid()) or ""
    run, host = uuid.uuid4().hex[:8], socket.gethostname()
    return Holder(run, what, _machine(), host, os.getpid(), began, user, since)


def holder_from(text: bytes) -> Holder | None:
    """The holder that was written as JSON; None where that cannot be read."""
    try:
        fields = json.loads(text)
        holder = Holder(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    is_whole = all(type(value) is (int if name == "pid" else str) for name, value in fields.items())
    return holder if is_whole and 0 < holder.pid < _MOST_PID else None


def is_same_process(one: Holder, other: Holder) -> bool:
    """Whether two holders are one process, whatever it holds."""
    return _process(one) == _process(other)


def is_here(holder: Holder) -> bool:
    """Whether the holder's process has its number from this machine."""
    return (holder.machine, holder.host) == (_machine(), socket.gethostname())


def runs_here(holder: Holder) -> bool:
    """Whether a process of this machine runs, and is the one that took the lease."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    began = _began(holder.pid)
    return began is None or (began != "" and began == holder.began) or not holder.began


def _process(holder: Holder) -> tuple[str, str, int, str]:
    return holder.machine, holder.host, holder.pid, holder.began


def _began(pid: int) -> str | None:
    """When a process began, as the system counts; "" for one that has ended, None where it is not known."""
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
_LOOK_SECONDS = 0.1
_OBJECT_LOOK_SECONDS = 1.0
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
    """A lease that is there."""

    holder: Holder | None
    """None where it cannot be read."""
    sign: float | str
    """Another one with each sign of life: when a file was touched, by its file system's clock, or the version
    of an object."""
    is_locked: bool = False
    """Whether some process has the system's lock on it."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease as somebody sees it who does not want it."""

    holder: Holder | None
    """None where it cannot be read."""
    silent_seconds: float
    """For how long its holder has shown nothing, by the clock of this machine."""
    is_alive: bool
    """Whether the holder lives, as far as can be told from here."""


class LeaseStore(Protocol):
    """Where the lease of one place lies."""

    @property
    def place(self) -> str:
        """The place, for messages."""

    @property
    def location(self) -> str:
        """The lease itself, for messages."""

    @property
    def look_seconds(self) -> float:
        """How long to wait between two looks."""

    def look(self, *, is_hasty: bool = False) -> LeaseState | None:
        """The lease as it is now, None where there is none; ``is_hasty`` asks a store once and briefly."""

    def wanting(self, me: Holder) -> AbstractContextManager[None]:
        """What is needed to take the lease, and to hold it until the block ends."""

    def put_new(self, me: Holder) -> bool:
        """Take the lease if there is none; of all who try at once, on any machine, one succeeds."""

    def put_over(self, me: Holder, dead: LeaseState) -> bool:
        """Take the lease over, if it is still as it was seen; of all who try at once, one succeeds."""

    def silent_seconds(self, there: LeaseState) -> float:
        """For how long its holder has shown nothing, as far as the store says."""

    def settle(self) -> None:
        """Clear up once the lease is taken."""

    def beat(self, me: Holder) -> bool:
        """Show that its holder lives; False where another has it by now."""

    def remove(self) -> None:
        """Remove the lease."""


class Lease:
    """A place that is held."""

    def __init__(self, store: LeaseStore, me: Holder) -> None:
        self._store = store
        self._me = me
        self._seen = time.monotonic()
        self._is_lost = False
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def check(self) -> None:
        """See that it is still held, without a look at it while beats go well.

        Raises:
            IncompleteError: another run took it over, as was seen by now.
        """
        if self._is_lost:
            self.confirm()
        elif time.monotonic() - self._seen > _STALE_SECONDS:
            # This process may have slept meanwhile. Storage that is away says nothing of the lease.
            self._seen = time.monotonic()
            with suppress(TransientError, OSError):
                self._confirm(self._store.look(is_hasty=True))

    def confirm(self) -> None:
        """See that it is still held, by a look at it.

        Raises:
            IncompleteError: another run took it over.
        """
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
        """Show until the block ends that this process lives."""
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        try:
            yield
        finally:
            # Not waited for: storage that hangs may have it for long. Who has no lease beats no more.
            self._ended.set()

    def release(self) -> None:
        """Remove it, if it is still ours."""
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
    """Hold a place; ``what`` is the digest of what is made there.

    Of a process on another machine that holds it, it is waited for the next sign of life.

    Raises:
        HeldError: another process holds it.
        TargetError: what has the name of the lease can be none, or the store knows no conditions.
        OSError: nothing can be written beside it.
    """
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
    """Find out whether another process of this machine holds a place, changing nothing.

    Raises:
        HeldError: one does.
    """
    try:
        there = store.look()
    except OSError:  # which will be told of when the lease is taken
        return
    if there is not None and _is_held_here(there):
        raise HeldError(_held(store.place, there.holder, myself(what)))


def lease_view(place: Path) -> LeaseView | None:
    """Who holds a directory; None for nobody.

    Raises:
        OSError: it cannot be looked at.
    """
    there = LeaseFile(place).look()
    if there is None:
        return None
    silent = time.time() - float(there.sign)
    return LeaseView(there.holder, max(0.0, silent), not _is_dead(there, silent))


def _acquire(store: LeaseStore, me: Holder, sleep: Callable[[float], None] = time.sleep) -> None:
    """Take the lease; raises HeldError where a living process has it."""
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
            elif _is_known_alive(there) or (first is not None and there != first):
                raise HeldError(_held(store.place, there.holder, me))
            first = first or there
        sleep(store.look_seconds)
    store.settle()


def _is_dead(there: LeaseState, silent_seconds: float) -> bool:
    """Whether the holder is surely gone, or has shown nothing for too long where nothing else is known."""
    holder = there.holder
    if holder is not None and is_here(holder):
        return not _is_held_here(there)
    if holder is None and there.is_locked:
        return False
    return silent_seconds > DEAD_SECONDS


def _is_held_here(there: LeaseState) -> bool:
    """Whether the holder is a process of this machine that runs."""
    holder = there.holder
    if holder is None or not is_here(holder):
        return False
    return there.is_locked or runs_here(holder)


def _is_known_alive(there: LeaseState) -> bool:
    """Whether nobody need wait for a sign of life, of a lease that is not known to be dead."""
    return there.is_locked or (there.holder is not None and is_here(there.holder))


def _held(place: str, holder: Holder | None, me: Holder) -> Problem:
    if holder is None:
        return Problem(place, "another run holds it.", "Wait for it, or stop it first.")
    what = "this very checkpoint" if holder.what == me.what else "another checkpoint"
    remedy = "Wait for it, or stop it first."
    if not is_here(holder):
        remedy += f" Should its machine die, this command takes over {DEAD_SECONDS:g} s later."
    return Problem(place, f"another run makes {what} here now: {holder}.", remedy)


class LeaseFile:
    """The lease of a directory, which need not exist: a file beside it."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)
        self._path = place.parent / f".{place.name}.raymerge.lock"
        self._mine = self._path
        """A file of our own that becomes the lease; the lease itself while nobody wants it."""

    @property
    def location(self) -> str:
        return str(self._path)

    @property
    def look_seconds(self) -> float:
        return _LOOK_SECONDS

    def look(self, *, is_hasty: bool = False) -> LeaseState | None:  # noqa: ARG002 - no server is asked
        """It is opened anew, which has a file server's clients ask it."""
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
    def wanting(self, me: Holder) -> Iterator[None]:
        """Have a file that says who we are, and the system's lock on it."""
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

    def put_new(self, me: Holder) -> bool:  # noqa: ARG002 - the file of our own says it
        if _has_linked(self._mine, self._path):
            return True
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self._path.lstat().st_mode):
                what = f"{self._path} is no file, so that no lease can be held there."
                raise TargetError(Problem(self.place, what, "Remove it, if nobody needs it."))
        return False

    def put_over(self, me: Holder, dead: LeaseState) -> bool:  # noqa: ARG002 - as in ``put_new``
        """Whoever may is told by a second name, which is held for a moment: otherwise one who is slow would
        replace the lease of one who was quicker, in place of the dead one."""
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
        return self._now() - float(there.sign)

    def settle(self) -> None:
        """Remove what we took it with, and what processes left that died while they tried to."""
        for left in self._path.parent.glob(f"{glob.escape(self._path.name)}.*"):
            with suppress(OSError):
                if left == self._mine or self._path.stat().st_mtime - left.stat().st_mtime > DEAD_SECONDS:
                    left.unlink()

    def beat(self, me: Holder) -> bool:
        there = self.look()
        if there is None or there.holder != me:
            return False
        os.utime(self._path)
        return True

    def remove(self) -> None:
        self._path.unlink()

    def _now(self) -> float:
        """The time by the file system's clock: the other machine's and ours may differ."""
        os.utime(self._mine)
        return self._mine.stat().st_mtime


def _has_linked(mine: Path, path: Path) -> bool:
    """Give a file a second name, if nothing has it; of all who try at once, on any machine, one succeeds."""
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
    """The same on a file system where no file has two names."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(mine.read_bytes())
    return True


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file; False where another process has. A file system without locks says of all that none has."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class LeaseObject:
    """The lease of a place in an object store: an object, of whose writers the store refuses all but one."""

    def __init__(self, writer: ObjectWriter, key: str) -> None:
        self._writer = writer
        # The next beat is the second attempt; one that waits for the store would be late.
        self._hasty = ObjectWriter(writer.place, seconds=_REQUEST_SECONDS)
        self._key = key
        self._version = ""
        self._beats = self._refusals = 0

    @property
    def place(self) -> str:
        return self._writer.location("")

    @property
    def location(self) -> str:
        return self._writer.location(self._key)

    @property
    def look_seconds(self) -> float:
        return _OBJECT_LOOK_SECONDS

    def look(self, *, is_hasty: bool = False) -> LeaseState | None:
        there = (self._hasty if is_hasty else self._writer).get(self._key)
        return None if there is None else LeaseState(_holder(there[0]), there[1])

    def wanting(self, me: Holder) -> AbstractContextManager[None]:  # noqa: ARG002 - an object is put at once
        return nullcontext()

    def put_new(self, me: Holder) -> bool:
        if self._has_put(me, self._writer.put_new(self._key, self._text(me))):
            return True
        if self._refusals >= _REFUSALS:
            raise TargetError(unconditional(self.place))
        return False

    def put_over(self, me: Holder, dead: LeaseState) -> bool:
        return self._has_put(me, self._writer.put_over(self._key, self._text(me), str(dead.sign)))

    def silent_seconds(self, there: LeaseState) -> float:  # noqa: ARG002 - its clock need not be ours
        """0: who looks again finds out."""
        return 0.0

    def settle(self) -> None: ...

    def beat(self, me: Holder) -> bool:
        self._beats += 1
        written = self._hasty.put_over(self._key, self._text(me), self._version)
        return self._has_put(me, written, is_hasty=True)

    def remove(self) -> None:
        self._writer.delete([self._key])

    def _has_put(self, me: Holder, version: str | None, *, is_hasty: bool = False) -> bool:
        if version is None:
            # An answer may have been lost, and the request been repeated by the client.
            there = self.look(is_hasty=is_hasty)
            self._refusals += there is None
            if there is None or there.holder != me:
                return False
            version = str(there.sign)
        self._version = version
        return True

    def _text(self, me: Holder) -> bytes:
        return json.dumps({"holder": asdict(me), "beats": self._beats}).encode()


def _holder(text: bytes) -> Holder | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return holder_from(json.dumps(fields.get("holder")).encode()) if isinstance(fields, dict) else None
