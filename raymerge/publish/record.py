"""What a run leaves of itself in the checkpoint beside its plan: the provenance, and the story of the run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raymerge.checkpoints.source import Checkpoint
from raymerge.errors import CheckpointError, Problem
from raymerge.merge_plan.dispositions import Holding
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.source import Prepared, Source, holdings
from raymerge.publish.attempt import RECORD
from raymerge.publish.provenance import Made, provenance
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore, WriteStore
from raymerge.storage.temporary import fetched
from raymerge.verifier.structure import PROVENANCE_FILE, file_digest

PROVENANCE = PROVENANCE_FILE
"""What the checkpoint was made of and what came out: the same for two equal merges."""
STORY = f"{RECORD}/run.json"
"""When and where it was made, and where the sources lay: another for each run."""
_PACKAGES = ("raymerge", "torch", "numpy", "ray", "transformers")


def write_provenance(
    store: WriteStore,
    plan: Plan,
    sources: Sequence[Source],
    *,
    recipes: Sequence[str],
    numerics: Mapping[str, str],
    digests: Mapping[int, str],
    files: Collection[str],
    seconds: float,
    run: str = "",
) -> tuple[str, ...]:
    """Write the provenance of a checkpoint whose shards and companions are written, and the story of its run.

    Args:
        store: where the checkpoint grows.
        plan: what was made.
        sources: what of.
        recipes: texts of all recipes that it takes, its own last.
        numerics: what bytes depend on beside the plan.
        digests: xxh3-128 of the bytes of each row that was made, by its number.
        files: keys of the companions and the model card.
        seconds: how long the run has taken so far.
        run: its name; "" for none.

    Returns:
        The keys that were written.
    """
    kept = {key: file_digest(store, key) for key in sorted(files)}
    made = Made(recipes, versions(), numerics, kept, digests)
    _write(store, PROVENANCE, provenance(plan, sources, made).to_json())
    _write(store, STORY, _story(sources, seconds, run))
    return PROVENANCE, STORY


def versions() -> dict[str, str]:
    """Versions of what computes, by name."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


@contextmanager
def record_at(place: str) -> Iterator[Path]:
    """A directory of this machine that has a checkpoint's record under its own keys: the checkpoint itself,
    or a copy of the record alone that goes when the block ends.

    Args:
        place: the checkpoint: a path, or an address with its options.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not is_remote(place):
        yield Path(parse_place(place).text).absolute()
        return
    with open_store(place) as store:
        keys = [each.key for each in store.files() if each.key.startswith(f"{RECORD}/")]
    with fetched(place, keys) as found:
        yield found


def read_record(store: ReadStore, key: str) -> dict[str, Any]:
    """A file of the record that holds a JSON object.

    Raises:
        CheckpointError: it is absent, or no such file.
    """
    info = store.info(key)
    where = store.location(key)
    if info is None:
        what = "is missing: this checkpoint does not tell what it was made of."
        raise CheckpointError(Problem(where, what, "Only what raymerge has merged does; merge again."))
    try:
        found = json.loads(store.read(key, 0, info.nbytes))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(Problem(where, f"is not JSON ({error}).", "Merge again.")) from error
    if not isinstance(found, dict):
        raise CheckpointError(Problem(where, "is no JSON object.", "Merge again."))
    return found


def _story(sources: Sequence[Source], seconds: float, run: str) -> dict[str, Any]:
    return {
        **({"run": run} if run else {}),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "host": {"system": platform.system(), "machine": platform.machine()},
        "places": {
            each.name: _place(each)
            for each in holdings(sources)
            if not isinstance(each, Prepared) and (not isinstance(each, Checkpoint) or each.unwritten is None)
        },
    }


def _place(holding: Holding) -> str:
    """Where a source lies, as an absolute path or an address: of a single file, that file."""
    root = shown(holding.root) if is_remote(holding.root) else os.path.abspath(holding.root)
    is_file = isinstance(holding, Checkpoint) and holding.is_single_file
    return f"{root}/{holding.files[0].key}" if is_file else root


def _write(store: WriteStore, key: str, content: Mapping[str, Any]) -> None:
    store.write_atomic(key, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
