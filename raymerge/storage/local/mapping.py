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
_FAST = frozenset({"ext4", "xfs"})
"""File systems whose cache has long pages. In memory they are short, and take longer to map than to copy."""
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10
_POPULATE_READ = 22
_WITH_INFORMATION = 4
_FAULT_ADDRESS = 16
"""Where ``siginfo_t`` has the address that was touched, if addresses have 64 bits."""
_ADDRESS_BITS = 64


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C libraries of Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class PageMaps:
    """Maps ranges of files over buffers of this process. Thread-safe for buffers of one thread each."""

    def __init__(self) -> None:
        self.lost_pages = 0
        """Pages of zeros so far."""
        self._buffers: dict[int, int] = {}
        """The end of every live buffer by its address."""
        self._mapped: dict[int, int] = {}
        """The end of what was mapped, by its address."""
        self._is_fast: dict[int, bool] = {}
        """By device of a file."""
        self._lock = threading.RLock()
        self._before: _Action | None = None
        # For as long as the system may call it.
        self._handler = _Handler(self._lose)
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        # Keeping the interpreter's lock, which takes longer to get again, but where pages may be fetched.
        self._map: Callable[..., int | None] = _function(
            ctypes.PyDLL(None).mmap, address, (address, size, number, number, number, ctypes.c_long)
        )
        self._advise: Callable[..., int] = _function(
            ctypes.CDLL(None, use_errno=True).madvise, number, (address, size, number)
        )
        self._act: Callable[..., int] = _function(
            ctypes.PyDLL(None).sigaction, number, (number, address, address)
        )

    def watch(self, buffer: memoryview, owner: object) -> None:
        """Let files be mapped over a page-aligned buffer that lives as long as ``owner`` does."""
        is_known = sys.platform == "linux" and 8 * ctypes.sizeof(ctypes.c_void_p) == _ADDRESS_BITS
        if is_known and mmap.PAGESIZE == ALIGNMENT:
            address = address_of(buffer)
            self._buffers[address] = address + buffer.nbytes
            weakref.finalize(owner, self._forget, address).atexit = False

    def map(self, descriptor: int, offset: int, nbytes: int, buffer: memoryview) -> bool:
        """Put the pages of a file that hold a range into the first ones of a buffer. False where that is
        slower than copying, or fails."""
        address, begin = address_of(buffer), offset % ALIGNMENT
        if not self._holds(address) or not self._maps_fast(descriptor):
            return False
        self._listen()
        length = round_up(begin + nbytes)
        self._cut(address, address + length)
        self._mapped[address] = address + length
        # Private: who writes there after all writes to a copy.
        private = mmap.MAP_PRIVATE | _FIXED
        is_mapped = self._map(address, length, _ACCESS, private, descriptor, offset - begin) == address
        # All at once, and with an error where one is missing. Systems before 5.14 do so page by page.
        if is_mapped and (
            not self._advise(address, length, _POPULATE_READ) or ctypes.get_errno() == errno.EINVAL
        ):
            return True
        self.release(buffer)
        return False

    def release(self, buffer: memoryview) -> None:
        """Give a buffer memory of its own again, where it has pages of files."""
        address = address_of(buffer) if self._mapped else 0
        if address and self._cut(address, address + buffer.nbytes):
            self._clear(address, buffer.nbytes)

    def _cut(self, first: int, last: int) -> bool:
        """Forget what is mapped between two addresses; whether anything was."""
        cut = [(begin, end) for begin, end in tuple(self._mapped.items()) if begin < last and first < end]
        for begin, end in cut:
            del self._mapped[begin]
            if begin < first:
                self._mapped[begin] = first
            if last < end:
                self._mapped[last] = end
        return bool(cut)

    def _clear(self, address: int, nbytes: int) -> bool:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        return self._map(address, nbytes, _ACCESS, flags, -1, 0) == address

    def _holds(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in tuple(self._buffers.items()))

    def _maps_fast(self, descriptor: int) -> bool:
        device = os.fstat(descriptor).st_dev
        if device not in self._is_fast:
            self._is_fast[device] = mount_of(device)[0] in _FAST
        return self._is_fast[device]

    def _forget(self, address: int) -> None:
        """The memory is gone, and with it what was mapped there; the last one has the handler go too."""
        self._cut(address, self._buffers.pop(address))
        with self._lock:
            if not self._buffers and self._before is not None:
                self._act(signal.SIGBUS, ctypes.byref(self._before), None)
                self._before = None

    def _listen(self) -> None:
        with self._lock:
            if self._before is None:
                before, handler = _Action(), ctypes.cast(self._handler, ctypes.c_void_p)
                mine = _Action(handler=handler, flags=_WITH_INFORMATION)
                self._act(signal.SIGBUS, ctypes.byref(mine), ctypes.byref(before))
                self._before = before

    def _lose(self, number: int, information: int, _: Any) -> None:
        """The signal, in the thread that touched the page. It goes on where it was; on a page of others the
        signal comes again, and is for whoever was there before."""
        address: int = ctypes.c_void_p.from_address(information + _FAULT_ADDRESS).value or 0
        if self._holds(address) and self._clear(address - address % ALIGNMENT, ALIGNMENT):
            self.lost_pages += 1
        elif self._before is not None:
            self._act(number, ctypes.byref(self._before), None)


def _function(function: Any, result: Any, arguments: tuple[Any, ...]) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
