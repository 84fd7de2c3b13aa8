"""How the loops of this package are compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile a function when it is first called, once for each combination of argument types.

    Other threads run meanwhile, as in all that it calls. Divisions by zero follow IEEE 754. Additions are
    made in the order in which they are written: nothing lets the compiler reorder or fuse them.
    """
    made = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    if not _bind_to_sources(made):
        made = numba.njit(nogil=True, error_model="numpy")(function)
    return cast(_Function, made)


def inlined(function: _Function) -> _Function:
    """The same for a small part of such functions, which becomes part of each that calls it.

    A call of its own would count the references to all arrays that it is given, at the cost of some dozens
    of elements, and hides from the compiler what it needs to know for vectors.
    """
    return cast(_Function, numba.njit(nogil=True, error_model="numpy", inline="always")(function))


def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    files = (each for each in resources.files(__package__).iterdir() if each.name.endswith(".py"))
    for file in sorted(files, key=lambda each: each.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


_SOURCES = _sources_digest()


def _bind_to_sources(made: Any) -> bool:
    """Have what is kept on disk hold for the whole package as it is now; whether that could be done.

    numba looks at the function's own file alone. A loop that calls one of another file would go on with that
    one's old form after it was changed.
    """
    kept = getattr(getattr(made, "_cache", None), "_cache_file", None)
    stamp = getattr(kept, "_source_stamp", None)
    if kept is None or stamp is None:
        return False
    kept._source_stamp = (stamp, _SOURCES)
    return True
