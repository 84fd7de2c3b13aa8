"""``--memory``, as every command reads it."""

from __future__ import annotations

from raymerge.errors import OptionError, Problem
from raymerge.units import parse_size


def read_memory(memory: str | None) -> int | None:
    """The bytes meant by ``--memory``.

    Raises:
        OptionError: it is no size.
    """
    if memory is None:
        return None
    try:
        return parse_size(memory)
    except ValueError as error:
        raise OptionError(
            Problem("--memory", f"{error}.", "The memory of one worker is a number with a unit.")
        ) from error
