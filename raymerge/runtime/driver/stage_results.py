"""What finished stages left: the record beside a result, and whether that is still what was recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from raymerge.errors import CheckpointError, Problem
from raymerge.planner.inputs.sources import Source, holdings
from raymerge.planner.inputs.stages import RESULT_FILE, Prepared
from raymerge.publish.attempt import RECORD
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.staging import file_marks, is_untouched
from raymerge.runtime.driver.unit_files import digests_of
from raymerge.runtime.driver.versions import check_unchanged
from raymerge.storage.local.store import LocalStore

_STAGE = "stage.json"


def write_stage_record(place: Path, record: Mapping[str, Any]) -> None:
    """Write down, durably, what is known of the result that is in ``place``, and the marks of its file."""
    with LocalStore(place) as store:
        text = json.dumps(record, indent=2, sort_keys=True) + "\n"
        store.write_atomic(f"{RECORD}/{_STAGE}", text.encode())
    mark_result(place)


def mark_result(place: Path) -> None:
    """Note the marks that the file of a result has now."""
    Ledger(place / RECORD / NAME, {}).record_files({RESULT_FILE: file_marks(place)[RESULT_FILE]})


def stage_record(place: Path) -> dict[str, Any]:
    """What is known of a result: title and digest of its stage, size and digest of its file, the report.

    Empty where there is no finished result.
    """
    try:
        found = json.loads((place / RECORD / _STAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def result_digest(place: Path) -> str | None:
    """xxh3_128 hex of a result's file, as it was published; None where no result was."""
    try:
        return str(stage_record(place)["result"]["digest"])
    except (KeyError, TypeError):
        return None


def is_whole(place: Path) -> bool:
    """Whether a result has the bytes that were published.

    It is read only where its file was written to since, as by a worker that was given up and goes on writing
    the same bytes.
    """
    digest = result_digest(place)
    if digest is None:
        return False
    return is_untouched(place) or digests_of(place, {RESULT_FILE: ()}) == {RESULT_FILE: digest}


def check_results(sources: Sequence[Source]) -> None:
    """Find results of stages and of other merges that are no longer what the sources were opened with.

    Raises:
        CheckpointError: with every such file.
        IncompleteError: one is gone.
    """
    check_unchanged(sources, only_made=True)
    problems = [
        Problem(
            f"{each.name}: {RESULT_FILE}",
            "the file was changed while it was merged.",
            f"Leave {each.root} alone, and give the command again; what may be of it does not count.",
        )
        for each in holdings(sources)
        if isinstance(each, Prepared) and not _is_as_opened(each)
    ]
    if problems:
        raise CheckpointError(problems)


def clear(directory: Path, keep: Collection[str]) -> None:
    """Delete everything in a directory but what has these names."""
    for path in directory.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            # What goes on writing there may be as fast.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_as_opened(prepared: Prepared) -> bool:
    place = Path(prepared.root)
    return [file.version for file in prepared.files] == [result_digest(place)] and is_whole(place)
