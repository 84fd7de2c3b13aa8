"""Where the results between are: beside the output, or in a directory that the user names.

Such a directory may hold those of many outputs: each has one of its own there, which the same command finds
again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import xxhash

from raymerge.storage.addresses import is_remote, parse_place

_MOST_NAME = 64
"""Characters of an output's name that tell people what a directory is of; the digest tells them apart."""


def steps_directory(output: Path | str, steps: str | None = None) -> Path:
    """Where the results between are, each by its name.

    Args:
        output: the output place, with its options.
        steps: the directory that the user names for results between; None for beside the output, out of
            sight. Beside a place in an object store there are none: that directory is never made.
    """
    if steps is not None:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", Path(_identity(output)).name)[-_MOST_NAME:]
        digest = xxhash.xxh3_128_hexdigest(_identity(output).encode("utf-8", "surrogateescape"))
        return Path(os.path.realpath(os.path.expanduser(steps))) / f"{name}-{digest[:16]}"
    if is_remote(str(output)):
        return Path(os.devnull) / "steps"
    return steps_beside(Path(os.path.realpath(output)))


def steps_beside(output: Path) -> Path:
    """The directory for results between that lies beside an output.

    Args:
        output: an absolute path without links.
    """
    return output.parent / f".{output.name}.raymerge.steps"


def _identity(output: Path | str) -> str:
    """What tells an output place from all others."""
    if not is_remote(str(output)):
        return os.path.realpath(output)
    address = parse_place(str(output))
    # Two servers may each have a bucket of one name.
    server = address.options.endpoint or ""
    return f"{server}|{address.scheme}://{address.text}"
