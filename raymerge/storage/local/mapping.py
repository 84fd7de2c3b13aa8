"""Pages of the page cache in the place of a buffer's own: cached bytes need not be copied to be read.

Who touches a page that its file has lost (it was cut short, or the disk fails) is sent SIGBUS, which ends the
process. Here such a page becomes one of zeros and is counted: what was made of it is of no use."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from raymerge.storage.local.buffers import ALIGNMENT, address_of, round_up
from raymerge.storage.local.copying import mount_of

MAP_LEAST = 256 << 10
"""Bytes that are mapped faster than copied."""
_FAST = frozenset({"ext4", "tmpfs", "xfs"})
"""Of the file systems that were measured those where mapping takes less processor time than copying."""
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10
_POPULATE_READ = 22
_WITH_INFORMATION = 4
_FAULT_ADDRESS = 16
"""Where ``siginfo_t`` has the address that was touched, if addresses have 64 bits."""
_ADDRESS_BITS = 64
_MACHINES = frozenset({"x86_64", "aarch64"})
"""Others have the fields of ``struct sigaction`` in another order (s390x, mips64)."""


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C libraries of Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


_ADDRESS, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
# Keeping the interpreter's lock, which takes longer to get again, but where pages may be fetched.
_mmap: Callable[..., int | None] = _function(
    ctypes.PyDLL(None).mmap, _ADDRESS, _ADDRESS, _SIZE, _NUMBER, _NUMBER, _NUMBER, ctypes.c_long
)
_madvise: Callable[..., int] = _function(
    ctypes.CDLL(None, use_errno=True).madvise, _NUMBER, _ADDRESS, _SIZE, _NUMBER
)
_sigaction: Callable[..., int] = _function(ctypes.PyDLL(None).sigaction, _NUMBER, _NUMBER, _ADDRESS, _ADDRESS)


class _LostPages:
    """What this process does at SIGBUS: a page of zeros where a buffer is, and elsewhere what it did before.

    It stays installed, and is never freed: whoever installs something later may go back to it at any time."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[int, PageMaps]] = {}
        """The end of every live buffer by its address, and who maps files there."""
        self._before = _Action()
        self._handler = _Handler(self._on_sigbus)
        self._action = _Action(handler=ctypes.cast(self._handler, ctypes.c_void_p), flags=_WITH_INFORMATION)

    def maps_at(self, address: int) -> PageMaps | None:
        # Copied at once: a buffer may go while this makes objects.
        ends = self.buffers.copy()
        return next((maps for begin, (end, maps) in ends.items() if begin <= address < end), None)

    def install(self) -> None:
        """Before every map: others may have installed something since the last one."""
        current = _Action()
        _sigaction(signal.SIGBUS, None, ctypes.byref(current))
        if current.handler != self._action.handler:
            self._before = current
            _sigaction(signal.SIGBUS, ctypes.byref(self._action), None)

    def _on_sigbus(self, number: int, information: int, _: Any) -> None:
        """In the thread that touched the page. It goes on where it was: on a page of others the signal comes
        again, for what was there before; should that come back to here, the process ends as by default."""
        address: int = ctypes.c_void_p.from_address(information + _FAULT_ADDRESS).value or 0
        maps = self.maps_at(address)
        if maps is not None and _map_anonymous(address - address % ALIGNMENT, ALIGNMENT):
            maps.lost_pages += 1
            return
        before, self._before = self._before, _Action()
        _sigaction(number, ctypes.byref(before), None)


_LOST_PAGES = _LostPages()
"""One for the process, as the system has one answer to a signal for a process."""


class PageMaps:
    """Maps ranges of files over buffers of this process. Thread-safe for ranges of one thread each."""

    def __init__(self) -> None:
        self.lost_pages = 0
        """Pages of zeros so far."""
        self._mapped: dict[int, int] = {}
        """The end of what was mapped, by its address."""
        # Reentrant, as a buffer may go at any time.
        self._lock = threading.RLock()
        self._is_fast: dict[int, bool] = {}
        """By device of a file."""

    @property
    def mapped_bytes(self) -> int:
        return sum(end - begin for begin, end in self._mapped.copy().items())

    def watch(self, buffer: memoryview, owner: object) -> None:
        """Let files be mapped over a page-aligned buffer that lives as long as ``owner`` does."""
        if _is_known() and mmap.PAGESIZE == ALIGNMENT:
            address = address_of(buffer)
            _LOST_PAGES.buffers[address] = address + buffer.nbytes, self
            weakref.finalize(owner, self._forget, address).atexit = False

    def map(self, descriptor: int, offset: int, nbytes: int, buffer: memoryview) -> bool:
        """Put the pages of a file that hold a range into the first ones of a buffer. False where that is
        slower than copying, or fails."""
        address, begin = address_of(buffer), offset % ALIGNMENT
        if _LOST_PAGES.maps_at(address) is not self or not self._maps_fast(descriptor):
            return False
        _LOST_PAGES.install()
        length = round_up(begin + nbytes)
        self._forget_range(address, address + length)
        self._mapped[address] = address + length
        # Private: who writes there after all writes to a copy.
        private = mmap.MAP_PRIVATE | _FIXED
        is_mapped = _mmap(address, length, _ACCESS, private, descriptor, offset - begin) == address
        # All at once, and with an error where one is missing. Systems before 5.14 do so page by page.
        if is_mapped and (
            not _madvise(address, length, _POPULATE_READ) or ctypes.get_errno() == errno.EINVAL
        ):
            return True
        self.release(buffer)
        return False

    def release(self, buffer: memoryview) -> None:
        """Give a buffer memory of its own again, where it has pages of files. Raises MemoryError."""
        if not self._mapped or not buffer.nbytes:
            return
        address = address_of(buffer)
        if self._forget_range(address, address + buffer.nbytes):
            if not _map_anonymous(address, buffer.nbytes):
                raise MemoryError("the system gives a buffer no memory in the place of a file's pages.")
            # As ``aligned_buffer`` has it. A kernel without huge pages refuses.
            _madvise(address, buffer.nbytes, mmap.MADV_HUGEPAGE)

    def _forget_range(self, first: int, last: int) -> bool:
        """Forget what is mapped between two addresses; whether anything was."""
        with self._lock:
            mapped = self._mapped.copy()
            cut = [(begin, end) for begin, end in mapped.items() if begin < last and first < end]
            for begin, end in cut:
                del self._mapped[begin]
                if begin < first:
                    self._mapped[begin] = first
                if last < end:
                    self._mapped[last] = end
        return bool(cut)

    def _maps_fast(self, descriptor: int) -> bool:
        device = os.fstat(descriptor).st_dev
        if device not in self._is_fast:
            self._is_fast[device] = mount_of(device)[0] in _FAST
        return self._is_fast[device]

    def _forget(self, address: int) -> None:
        """The memory is gone, and with it what was mapped there."""
        end, _ = _LOST_PAGES.buffers.pop(address)
        self._forget_range(address, end)


def _is_known() -> bool:
    """Whether the structures of signals are laid out as they are here."""
    is_64_bit = 8 * ctypes.sizeof(ctypes.c_void_p) == _ADDRESS_BITS
    return sys.platform == "linux" and is_64_bit and os.uname().machine in _MACHINES


def _map_anonymous(address: int, nbytes: int) -> bool:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
    return _mmap(address, nbytes, _ACCESS, flags, -1, 0) == address
