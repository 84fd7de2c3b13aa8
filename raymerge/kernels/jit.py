"""How the loops of this package are compiled and cached."""

from __future__ import annotations

import hashlib
import os
import pickle
import uuid
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache
from numba.core.extending import overload
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

_Function = TypeVar("_Function", bound=Callable[..., object])
_DIGEST_SIZE = 16


def compiled(function: _Function) -> _Function:
    """Compile a function when first called, once for each combination of argument types.

    Releases the GIL. Divisions by zero follow IEEE 754. Additions keep their order: nothing lets the compiler
    reorder or fuse them."""
    return _compiled(function)


def summing(function: _Function) -> _Function:
    """``compiled`` with additions in any order, which takes a fraction of the time: only for reported
    numbers, whose last digits differ from processor to processor."""
    return _compiled(function, {"reassoc", "nsz"})


def _compiled(function: _Function, fastmath: set[str] | bool = False) -> _Function:
    made: Any = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    # Where neither the package nor the user has a directory for it, every process compiles anew.
    with suppress(RuntimeError):
        made._cache = _LoopCache(function)
    return cast(_Function, made)


def cache_directory() -> Path | None:
    """Where compiled code is kept; None where nothing may be written, so that every process compiles anew."""
    try:
        return Path(_LoopCache(cache_directory)._cache_path)
    except RuntimeError:
        return None


def inlined(function: _Function) -> _Function:
    """A small part of such functions, inlined: a call would count references to all its arrays, at the cost
    of some dozens of elements, and keep the compiler from vectorising."""
    return cast(_Function, numba.njit(nogil=True, error_model="numpy", inline="always")(function))


def by_type(declared: Callable[..., object]) -> Callable[[_Function], _Function]:
    """A small part of such functions that depends on types: the decorated function gets the declared
    function's argument types and returns the function for them.

    Inlining is left to LLVM: numba loses variables where it inlines such a function into a loop that has
    others inlined."""
    return cast(Callable[[_Function], _Function], overload(declared, strict=False))


class _LoopCache(FunctionCache):
    """numba's function cache with other files, and with captured functions known by name: numba's own pickles
    of these differ from process to process."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file: Any = _CodeFiles(Path(self._cache_path), self._impl.filename_base)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._py_func.__code__.co_code, _name_of(self._py_func)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for these types, or None.

        numba initialises its compiler before it looks, several times the import time of numba and 20 MB of
        memory. Cached code needs only what it calls, and the compiler initialises itself if needed after all.
        """
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """A full or read-only disk does not prevent computing."""
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class _CodeFiles:
    """Compiled code of one function: a file for each combination of types, processor and sources.

    numba numbers its files in an index, and checks the function's own source file alone. After a half-failed
    write, or two at once, a number led to code of an older release or of other types; and a loop kept the old
    form of a callee in another file. Here a file's name has all that its code depends on, and its first bytes
    prove it complete."""

    def __init__(self, directory: Path, stem: str) -> None:
        self._directory = directory
        self._stem = stem

    def load(self, key: object) -> Any:
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, data = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        return pickle.loads(data) if digest == _digest(data) else None

    def save(self, key: object, compiled_code: object) -> None:
        """Save under a key, and delete what was compiled of other sources. Raises OSError where it cannot be
        written."""
        path = self._path(key)
        data: bytes = dumps(compiled_code)  # type: ignore[no-untyped-call]
        part = path.with_suffix(f".{uuid.uuid4().hex[:12]}.part")
        try:
            part.write_bytes(_digest(data) + data)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        for other in self._directory.glob(f"{self._stem}.*"):
            if not other.name.startswith(f"{self._stem}.{_SOURCES}."):
                other.unlink(missing_ok=True)

    def _path(self, key: object) -> Path:
        name = _digest(f"{numba.__version__} {key!r}".encode()).hex()
        return self._directory / f"{self._stem}.{_SOURCES}.{name}.nbc"


def _name_of(value: Any) -> str:
    """A function's name, with those of what it captures; other values by repr."""
    function = getattr(value, "py_func", value)
    if not isinstance(function, FunctionType):
        return repr(value)
    captured = (_name_of(cell.cell_contents) for cell in function.__closure__ or ())
    return f"{function.__qualname__}({', '.join(captured)})"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE).digest()


def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    files = (each for each in resources.files(__package__).iterdir() if each.name.endswith(".py"))
    for file in sorted(files, key=lambda each: each.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


_SOURCES = _sources_digest()
