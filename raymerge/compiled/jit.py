"""How the loops of this package are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile a function when it is first called, once for each combination of argument types.

    Other threads run meanwhile, as in all that it calls. Divisions by zero follow IEEE 754. Additions are
    made in the order in which they are written: nothing lets the compiler reorder or fuse them.
    """
    return cast(_Function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))
