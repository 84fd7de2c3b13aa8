"""Which commits of the Hub a run reads: taken when it is planned, and kept until its output is there.

A branch may move while a run is under way or interrupted. The same command then goes on with the commits that
the run began with, as its record has them; a run that replaces it takes those of now.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raymerge.planner.inputs.sources import Source
from raymerge.publish.ledger import NAME
from raymerge.publish.run_records import entries_of, records_of
from raymerge.recipes import AnyRecipe, references
from raymerge.storage.hub.addresses import hub_place, is_hub_place
from raymerge.storage.local.store import LocalStore
from raymerge.storage.resolve import NO_COMMITS, Commits, commit_asked

_KEY = "commits"
_STEPS = "commits.json"


def commits_taken(sources: Iterable[Source]) -> dict[str, str]:
    """The commits of all branches and tags that these sources were named by."""
    found: dict[str, str] = {}
    for source in sources:
        named = source.reference
        asked = [commit_asked(named.path, named.revision, source.checkpoint.root)]
        if source.adapter is not None and named.lora_path is not None:
            asked.append(commit_asked(named.lora_path, named.lora_revision, source.adapter.root))
        found |= dict(each for each in asked if each is not None and hub_place(each[0]).commit is None)
    return found


def condition_of(sources: Sequence[Source]) -> dict[str, Any]:
    """What the conditions of a run say of its commits; nothing where it reads none by a branch or a tag."""
    found = commits_taken(sources)
    return {_KEY: found} if found else {}


def keep_commits(steps: Path, sources: Iterable[Source]) -> None:
    """Have the commits of a submission of several steps durable before the first of them begins."""
    found = commits_taken(sources)
    if found:
        with LocalStore(steps) as store:
            store.write_atomic(_STEPS, (json.dumps(found, sort_keys=True) + "\n").encode())


def forget_commits(steps: Path) -> None:
    """Have the next submission take the commits of then: this one is over, whatever of its steps is kept."""
    # The output is in place by now: nothing may turn that into a failure.
    with suppress(OSError):
        (steps / _STEPS).unlink()


def commits_begun(recipes: Iterable[AnyRecipe], output: Path | str, steps: Path) -> Commits:
    """The commits that an unfinished run towards an output began with; none where there is no such run.

    Nobody is asked for recipes that name no model of the Hub by its address.

    Args:
        recipes: what is to be merged.
        output: the output place, with its options.
        steps: where the results between are.

    Raises:
        OptionError: the output is in an object store that cannot be spoken to from here.
        CheckpointError: it may not be looked at.
        TransientError: its server failed for longer than is waited.
    """
    named = (each for recipe in recipes for _, each in references(recipe))
    if not any(is_hub_place(path) for each in named for path in (each.path, each.lora_path or "")):
        return NO_COMMITS
    record = records_of(str(output)).begun()
    # The conditions are the first line of a ledger.
    begun = {} if record is None else _first(record(NAME)).get("conditions")
    kept = begun.get(_KEY) if isinstance(begun, Mapping) else None
    return {**_texts(_kept_of(steps)), **_texts(kept)}


def _kept_of(steps: Path) -> dict[str, Any]:
    try:
        return _first((steps / _STEPS).read_bytes())
    except OSError:
        return {}


def _first(text: bytes) -> dict[str, Any]:
    return next(entries_of(text), {})


def _texts(found: Any) -> dict[str, str]:
    """What of a record are commits by addresses."""
    pairs = found.items() if isinstance(found, Mapping) else ()
    return {key: value for key, value in pairs if isinstance(key, str) and isinstance(value, str)}
