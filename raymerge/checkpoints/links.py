"""Files of a model that are links: one that leads elsewhere would publish what is no part of the model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from raymerge.errors import Problem


def stray_links(root: Path, keys: Sequence[str]) -> Iterator[Problem]:
    """Companions that are links to files outside of the model's directory, of which they would be copies.

    The Hub's cache is made of links, to files that it keeps for the model or for all models.
    """
    allowed = _places(os.path.realpath(root))
    for key in keys:
        path = os.path.join(root, key)
        if not os.path.islink(path):
            continue
        target = os.path.realpath(path)
        if not any(target.startswith(place + os.sep) for place in allowed):
            what = f"is a link to {target}, outside of the model, and would be copied into the result."
            yield Problem(
                path,
                what,
                f"If it belongs to the model, copy it there: cp --remove-destination {target} {path}",
            )


def _places(root: str) -> list[str]:
    """The directory itself, and those where the Hub's cache keeps the files of a snapshot."""
    above, _ = os.path.split(root)
    repository, name = os.path.split(above)
    if name != "snapshots":
        return [root]
    return [root, os.path.join(repository, "blobs"), os.path.join(os.path.dirname(repository), "blobs")]
