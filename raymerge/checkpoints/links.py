"""Files of a model that are links: one that leads elsewhere would publish what is no part of the model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from raymerge.checkpoints.files import LINK_RULE, LeftOut, holds_weights, rule_by_name
from raymerge.errors import Problem

_MAX_FILES = 10_000
"""How many files behind a link are looked at; one with more may hold weights."""


def linked_directories(root: Path) -> Iterator[LeftOut]:
    """Links to directories below a local source, which are not followed.

    One that may lead to weights outside of the source has no rule, so that a merge refuses it.
    """
    for folder, directories, _ in os.walk(root):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in directories:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                key = Path(path).relative_to(root).as_posix() + "/"
                rule = rule_by_name(key) or (None if _may_hold_weights(path, key, root) else LINK_RULE)
                yield LeftOut(key, 0, rule, is_weights=rule is None)


def _may_hold_weights(link: str, key: str, root: Path) -> bool:
    """Whether weights that no rule is about may lie behind a link, outside of the source."""
    target, inside = os.path.realpath(link), os.path.realpath(root)
    if os.path.commonpath((target, inside)) == inside:
        return False
    errors: list[OSError] = []
    num_files = 0
    for folder, directories, names in os.walk(target, onerror=errors.append):
        num_files += len(names)
        below = Path(key) / Path(folder).relative_to(target)
        is_linked = any(os.path.islink(os.path.join(folder, name)) for name in directories)
        has_weights = any(
            holds_weights(name) and rule_by_name((below / name).as_posix()) is None for name in names
        )
        if is_linked or has_weights or num_files > _MAX_FILES:
            return True
    return bool(errors)


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
