"""The lease of an output place: one run at a time makes it, on whatever machine it runs.

It is a file beside the place that says who holds it, and is touched every few seconds for as long as that
process lives. Locks of the system (``flock``) tell more quickly where they are passed on; where they are
not, as on many shared file systems, the file alone decides. What it cannot prevent does no harm. A run that
was paused for longer than others wait may wake and go on beside the one that took over: of the same plan it
writes the same bytes to the same places, of another it writes to a directory that nobody uses any more. And
before it publishes it looks who holds the place.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from raymerge.errors import HeldError, IncompleteError, Problem, TargetError

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
    """Number of the process."""
    began: str
    """When the process began, as its system counts; "" where that is not known."""
    user: str
    """Whose process it is."""
    since: str
    """When it took the lease, by its own clock; for people."""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


def myself(what: str) -> Holder:
    """This process, as the holder of a lease.

    Args:
        what: digest of what it makes.
    """
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
        found = json.loads(text)
        holder = Holder(**found)
    except (ValueError, TypeError, RecursionError):
        return None
    is_whole = all(type(value) is (int if name == "pid" else str) for name, value in found.items())
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
    """When a process began, as the system counts; "" for one that has ended, None where it is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    found = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with suppress(OSError):  # many containers lack the second, other systems than Linux both
            found.append(Path(path).read_text(errors="replace").strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


BEAT_SECONDS = 5.0
"""How often a holder shows that it lives."""
DEAD_SECONDS = 30.0
"""How long a holder on another machine may show nothing before its lease may be taken over."""
_LOOK_SECONDS = 0.1
_MOST_BYTES = 1 << 16
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a lease is opened: what is no file must not be waited for."""
_WITHOUT_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class _Found:
    """A lease that is there."""

    holder: Holder | None
    """None where it cannot be read."""
    touched: float
    """When its holder last showed that it lives, by the file system's clock."""
    is_locked: bool
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


class Lease:
    """A place that is held."""

    def __init__(self, path: Path, me: Holder) -> None:
        """
        Args:
            path: the lease file.
            me: its holder.
        """
        self._path = path
        self._me = me
        self._is_lost = False
        self._ended = threading.Event()

    def check(self) -> None:
        """See that it is still held, without a look at the file.

        Raises:
            IncompleteError: another run took it over, as was seen by now.
        """
        if self._is_lost:
            self.confirm()

    def confirm(self) -> None:
        """See that it is still held, by the file.

        Raises:
            IncompleteError: another run took it over.
        """
        holder = _holder(self._path)
        if holder != self._me:
            by = "it was removed" if holder is None else f"another run took it over: {holder}"
            raise lost(self._path, by)

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
        """Remove the file, if it is still ours."""
        # What cannot be removed is a dead process's lease, for whoever comes next.
        with suppress(OSError):
            if _holder(self._path) == self._me:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # Storage that is away for a moment has nobody else take over.
            with suppress(OSError):
                if _holder(self._path) != self._me:
                    self._is_lost = True
                    return
                os.utime(self._path)


@contextmanager
def leased(place: Path, what: str) -> Iterator[Lease]:
    """Hold ``place``, beside which the lease is as long as it is held.

    Of a process on another machine that holds it, it is waited for the next sign of life.

    Args:
        place: the output place; need not exist.
        what: digest of what is made there.

    Raises:
        HeldError: another process holds it.
        OSError: nothing can be written beside it.
    """
    path = _lease_of(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    me = myself(what)
    mine = path.with_name(f"{path.name}.{me.run}")
    descriptor = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            os.write(descriptor, json.dumps(asdict(me)).encode())
            os.fsync(descriptor)
            _lock(descriptor, fcntl.LOCK_EX)
            _acquire(path, mine, me, place)
        finally:
            mine.unlink(missing_ok=True)
        lease = Lease(path, me)
        try:
            with lease.beating():
                yield lease
        finally:
            lease.release()
    finally:
        os.close(descriptor)


def check_unheld(place: Path, what: str) -> None:
    """Find out whether another process of this machine holds a place, changing nothing.

    Raises:
        HeldError: one does.
    """
    try:
        found = _look(_lease_of(place))
    except OSError:  # which will be told of when the lease is taken
        return
    if found is not None and _is_held_here(found):
        raise HeldError(held(place, found.holder, myself(what)))


def hold_of(place: Path) -> LeaseView | None:
    """Who holds a place; None for nobody.

    Raises:
        OSError: it cannot be looked at.
    """
    found = _look(_lease_of(place))
    if found is None:
        return None
    now = time.time()
    return LeaseView(found.holder, max(0.0, now - found.touched), not _is_dead(found, now))


def _lease_of(place: Path) -> Path:
    return place.parent / f".{place.name}.raymerge.lock"


def _acquire(path: Path, mine: Path, me: Holder, place: Path) -> None:
    """Give the file ``mine`` the name of the lease; raises HeldError where a living process has it."""
    first: _Found | None = None
    began = time.monotonic()
    while not _has_linked(mine, path):
        _check_kind(path, place)
        found = _look(path)
        if found is None:
            continue
        # One that says of itself that it was touched in the future is watched by our own clock.
        is_still = found == first and time.monotonic() - began > DEAD_SECONDS
        if _is_dead(found, _now(mine)) or (is_still and not found.is_locked):
            if _has_taken_over(path, mine, found):
                break
        elif _is_known_alive(found) or (first is not None and found != first):
            raise HeldError(held(place, found.holder, me))
        first = first or found
        time.sleep(_LOOK_SECONDS)
    _sweep(path, mine)


def _check_kind(path: Path, place: Path) -> None:
    """See that what has the name of the lease can be one; raises TargetError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            what = f"{path} is no file, so that no lease can be held there."
            raise TargetError(Problem(str(place), what, "Remove it, if nobody needs it."))


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


def _has_taken_over(path: Path, mine: Path, dead: _Found) -> bool:
    """Take the place of a dead lease; of all who try at once, one succeeds.

    Whoever may is told by a second name, which is held for a moment: otherwise one who is slow would replace
    the lease of one who was quicker, in place of the dead one.
    """
    turn = path.with_name(f"{path.name}.turn")
    if not _has_linked(mine, turn):
        with suppress(OSError):
            if _now(mine) - turn.stat().st_mtime > DEAD_SECONDS:
                turn.unlink()
        return False
    try:
        if _look(path) != dead:
            return False
        mine.replace(path)
        return True
    finally:
        turn.unlink(missing_ok=True)


def _look(path: Path) -> _Found | None:
    """The lease; None where there is none. It is opened anew, which has a file server's clients ask it."""
    try:
        descriptor = os.open(path, _READING)
    except FileNotFoundError:
        return None
    try:
        # Shared, so that nobody who looks is taken for a holder.
        is_locked = not _lock(descriptor, fcntl.LOCK_SH)
        return _Found(_read(descriptor), os.fstat(descriptor).st_mtime, is_locked)
    finally:
        os.close(descriptor)


def _holder(path: Path) -> Holder | None:
    try:
        descriptor = os.open(path, _READING)
    except FileNotFoundError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Holder | None:
    return holder_from(os.pread(descriptor, _MOST_BYTES, 0))


def _is_dead(found: _Found, now: float) -> bool:
    """Whether the holder is surely gone, or has shown nothing for too long where nothing else is known."""
    holder = found.holder
    if holder is not None and is_here(holder):
        return not _is_held_here(found)
    if holder is None and found.is_locked:
        return False
    return now - found.touched > DEAD_SECONDS


def _is_held_here(found: _Found) -> bool:
    """Whether the holder is a process of this machine that runs."""
    holder = found.holder
    if holder is None or not is_here(holder):
        return False
    return found.is_locked or runs_here(holder)


def _is_known_alive(found: _Found) -> bool:
    """Whether nobody need wait for a sign of life."""
    return found.is_locked or (found.holder is not None and is_here(found.holder))


def _now(mine: Path) -> float:
    """The time by the file system's clock: the other machine's and ours may differ."""
    os.utime(mine)
    return mine.stat().st_mtime


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file; False where another process has. A file system without locks says of all that none has."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def lost(lease: Path | str, by: str) -> IncompleteError:
    """Says that the lease of this run is gone.

    Args:
        lease: where it was.
        by: how that came, as a part of a sentence.
    """
    return IncompleteError(
        f"{lease}: the lease of this run is gone, {by}. That happens to a run that shows no sign of life for "
        f"{DEAD_SECONDS:g} s. Nothing was published. What is done is kept: the same command goes on from "
        "there, once nobody else does."
    )


def held(place: Path | str, holder: Holder | None, me: Holder) -> Problem:
    """Says that another process holds a place, for whoever wants it."""
    if holder is None:
        return Problem(str(place), "another run holds it.", "Wait for it, or stop it first.")
    what = "this very checkpoint" if holder.what == me.what else "another checkpoint"
    remedy = "Wait for it, or stop it first."
    if not is_here(holder):
        remedy += f" Should its machine die, this command takes over {DEAD_SECONDS:g} s later."
    return Problem(str(place), f"another run makes {what} here now: {holder}.", remedy)


def _sweep(path: Path, mine: Path) -> None:
    """Remove what processes left that died while they tried to get the lease."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*"):
        with suppress(OSError):
            if left != mine and path.stat().st_mtime - left.stat().st_mtime > DEAD_SECONDS:
                left.unlink()
