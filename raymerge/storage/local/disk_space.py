"""Room on the disks of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from raymerge.errors import OptionError, Problem
from raymerge.units import format_size


def check_room(place: Path, wanted: int, *, what: str = "the output", option: str = "-o") -> None:
    """See that the file system below ``place`` takes so many bytes.

    Args:
        place: need not exist.

    Raises:
        OptionError: it has less room.
    """
    free = shutil.disk_usage(nearest(place)).free
    if free < wanted:
        raise OptionError(
            Problem(
                str(place),
                f"{what} takes {format_size(wanted)}, and {format_size(free)} are free there.",
                f"Free some space or choose another {option}.",
            )
        )


def nearest(path: Path) -> Path:
    """The path, or the closest place above it that exists."""
    while not path.exists():
        path = path.parent
    return path
