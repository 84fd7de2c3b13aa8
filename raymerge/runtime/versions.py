"""Which files a run reads, and that they stay the same from its plan to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymerge.errors import CheckpointError, Problem
from raymerge.planner.sources import Source, holdings
from raymerge.planner.stages import Prepared
from raymerge.storage.open import open_store


def file_versions(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Versions of all files that are read, as a run's ledger keeps them.

    That of a stage's result is the digest of its bytes: made again, it is the same.
    """
    return [
        {"name": each.name, "files": [[file.key, file.version] for file in each.files]}
        for each in holdings(sources)
    ]


def check_unchanged(sources: Sequence[Source]) -> None:
    """Find files that were written again since the plan was made: their bytes may be of two kinds.

    What stages prepared is not looked at.

    Raises:
        CheckpointError: with every such file.
    """
    problems = []
    for each in holdings(sources):
        if isinstance(each, Prepared):
            continue
        with open_store(each.root) as store:
            now = {file.key: store.info(file.key) for file in each.files}
        problems += [
            Problem(
                f"{each.name}: {file.key}",
                "the file was changed while it was merged.",
                "Leave the sources alone, and start again with --replace.",
            )
            for file in each.files
            if (found := now[file.key]) is None or found.version != file.version
        ]
    if problems:
        raise CheckpointError(problems)
