"""Which files a run reads, and that they stay the same from its plan to its end; which commits of the Hub.

A branch may move while a run is under way or interrupted. The same command goes on with the commits in its
record; a run that replaces it takes the current ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raymerge.checkpoints.source import Checkpoint, Holding
from raymerge.errors import CheckpointError, IncompleteError, Problem, UnreadableError, UserError
from raymerge.merge_plan.files_read import SourceFile
from raymerge.merge_plan.plan import Plan, weight_files
from raymerge.planner.inputs.sources import RESULT_FILE, STAGE_RECORD, Prepared, Source
from raymerge.publish.record import NAME, conditions_in, object_at
from raymerge.publish.run_records import records_of
from raymerge.publish.shards import ranges_digest
from raymerge.publish.staging import is_untouched
from raymerge.recipes.order import AnyRecipe, references
from raymerge.storage.hub import hub_place, is_hub_place
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import NO_COMMITS, Commits, commit_asked, open_store
from raymerge.storage.store import FileInfo, Range

_START_AGAIN = "Leave the sources alone, and start again with --replace."


def file_versions(held: Sequence[Holding]) -> list[dict[str, Any]]:
    """Versions of all files that are read, as a run's ledger keeps them. Results of stages and other merges
    have digests of their contents: made again, they are the same."""
    return [
        {"name": each.name, "files": [[file.key, _contents(each) or file.version] for file in each.files]}
        for each in held
    ]


def source_files(held: Sequence[Holding]) -> tuple[SourceFile, ...]:
    """What workers read, as planned with. Stages may write results again, with the same bytes."""
    return tuple(
        SourceFile(
            number, each.root, file.key, file.nbytes, "" if isinstance(each, Prepared) else file.version
        )
        for number, each in enumerate(held)
        for file in each.files
    )


def companion_versions(donor: Source) -> list[list[str]] | None:
    """Key and version of all copied files; None while they are not made yet."""
    if donor.checkpoint.unwritten is not None:
        return None
    with open_store(donor.checkpoint.root) as store:
        infos = store.infos(donor.checkpoint.companions)
    return [[key, info.version] for key, info in infos.items() if info is not None]


def check_companions(donor: Source, before: Sequence[Sequence[str]] | None) -> None:
    """Raises CheckpointError with every companion that is not the one from when the run began. Results of
    other merges must not have been written to since."""
    if problems := _touched(donor.checkpoint):
        raise CheckpointError(problems)
    _check_same(donor.name, before or (), companion_versions(donor) or ())


def layout_versions(plan: Plan, layout: Holding | None) -> list[list[str]]:
    """Key and version of every file that is copied with the layout of a checkpoint; none without one."""
    if layout is None:
        return []
    with open_store(layout.root) as store:
        infos = store.infos([*weight_files(plan)])
    return [[key, info.version] for key, info in infos.items() if info is not None]


def check_layout(plan: Plan, layout: Holding | None, before: Sequence[Sequence[str]]) -> None:
    """Raises CheckpointError with every such file that is not the one from when the run began."""
    if layout is not None:
        _check_same(layout.name, before, layout_versions(plan, layout))


def _check_same(name: str, before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> None:
    versions = {each[0]: each[1] for each in now}
    changed = [key for key, version in before if versions.get(key) != version]
    if changed:
        raise CheckpointError(
            Problem(
                f"{name}: {key}",
                f"the file was {'changed' if key in versions else 'removed'} while the model was merged.",
                _START_AGAIN,
            )
            for key in changed
        )


@contextmanager
def checking_sources(held: Sequence[Holding]) -> Iterator[None]:
    """Attributes an error to a source that changed: raises CheckpointError if files were changed (whatever
    was found in them), IncompleteError if files are gone, or not readable now."""
    try:
        yield
    except UserError as error:
        check_unchanged(held)
        if isinstance(error, UnreadableError):
            raise IncompleteError(f"{error} What is done is kept.") from error
        raise


def check_unchanged(held: Sequence[Holding], *, only_made: bool = False) -> None:
    """Find files written again since the plan was made: their bytes may be of two kinds. Results of stages
    are not looked at; with ``only_made`` only results of other merges are.

    Raises CheckpointError with every such file; IncompleteError if none was changed, but some are gone, as
    with unmounted storage, or not readable now."""
    problems: list[Problem] = []
    gone: list[str] = []
    is_given = False  # by the user, so that nothing makes it again
    for each in held:
        if isinstance(each, Prepared) or (only_made and not _contents(each)):
            continue
        with open_store(each.root) as store:
            try:
                now = store.infos([file.key for file in each.files])
            except UnreadableError as error:
                raise IncompleteError(f"{error} What is done is kept.") from error
        missing = [f"{each.name}: {file.key}" for file in each.files if now[file.key] is None]
        gone += missing
        is_given = is_given or (bool(missing) and not _contents(each))
        pairs = ((FileInfo(f.key, f.nbytes, f.version), now[f.key]) for f in each.files)
        problems += ([] if missing else _touched(each)) or [
            Problem(
                f"{each.name}: {was.key}",
                f"the file was changed while it was merged: {_change(was, current)}.",
                _again(each),
            )
            for was, current in pairs
            if current is not None and current != was
        ]
    if problems:
        raise CheckpointError(problems)
    if gone:
        more = f" and {len(gone) - 1} more files are" if gone[1:] else " is"
        then = "goes on when what is gone is back as it was" if is_given else "makes it again"
        raise IncompleteError(
            f"{gone[0]}{more} gone since the merge was planned. What is done is kept: the same command "
            f"{then}."
        )


def _contents(holding: Holding) -> str:
    return holding.contents if isinstance(holding, Checkpoint) else ""


def _touched(holding: Holding) -> list[Problem]:
    """What is wrong with the result of another merge, companions included, if anybody wrote to it. Times
    alone do not tell: it may be exchanged for another with the same ones."""
    if not _contents(holding) or is_untouched(Path(holding.root)):
        return []
    return [Problem(holding.name, "a file of it was changed while it was merged.", _again(holding))]


def _again(holding: Holding) -> str:
    return f"Leave {holding.root} alone, and give the command again." if _contents(holding) else _START_AGAIN


def _change(was: FileInfo, now: FileInfo) -> str:
    if now.nbytes != was.nbytes:
        return f"it had {was.nbytes} bytes and has {now.nbytes}"
    return f"it has {was.nbytes} bytes as before, but was written to"


_CHUNK = 1 << 20


def digests_of(staging: Path, files: Mapping[str, Sequence[Range]]) -> dict[str, str]:
    """xxh3_128 hex by the key of ranges of files, in order; none of files that are not whole."""
    digests: dict[str, str] = {}
    buffer = memoryview(bytearray(_CHUNK))
    with LocalStore(staging) as store:
        for key, ranges in files.items():
            if (file := store.info(key)) is not None:
                with suppress(CheckpointError):
                    digests[key] = ranges_digest(store, key, ranges or [Range(0, file.nbytes)], buffer)
    return digests


def stage_record(place: Path) -> dict[str, Any]:
    """Title and digest of the stage, size and digest of its result, the report; or empty."""
    return object_at(place / STAGE_RECORD)


def result_digest(place: Path) -> str | None:
    """xxh3_128 hex of a result's file as it was published, or None."""
    try:
        return str(stage_record(place)["result"]["digest"])
    except (KeyError, TypeError):
        return None


def is_whole(place: Path) -> bool:
    """Whether a result has the published bytes. Reads it only if its file was written to since, as by a
    worker that was given up and writes the same bytes."""
    digest = result_digest(place)
    if digest is None:
        return False
    return is_untouched(place) or digests_of(place, {RESULT_FILE: ()}) == {RESULT_FILE: digest}


def check_results(held: Sequence[Holding]) -> None:
    """Compare results of stages and other merges with what the sources were opened with. Raises
    CheckpointError with every changed file, IncompleteError if one is gone."""
    check_unchanged(held, only_made=True)
    problems = [
        Problem(
            f"{each.name}: {RESULT_FILE}",
            "the file was changed while it was merged.",
            f"Leave {each.root} alone, and give the command again; what may be of it does not count.",
        )
        for each in held
        if isinstance(each, Prepared)
        and not (
            [file.version for file in each.files] == [result_digest(Path(each.root))]
            and is_whole(Path(each.root))
        )
    ]
    if problems:
        raise CheckpointError(problems)


_KEY = "commits"
_STEPS = "commits.json"


def commits_taken(sources: Iterable[Source]) -> dict[str, str]:
    """The commits of all branches and tags that these sources were named by."""
    named = [(each.reference.path, each.reference.revision, each.checkpoint.root) for each in sources]
    for each in sources:
        if each.adapter is not None and each.reference.lora_path is not None:
            named.append((each.reference.lora_path, each.reference.lora_revision, each.adapter.root))
    return commits_of(named)


def commits_of(named: Iterable[tuple[str, str | None, str]]) -> dict[str, str]:
    """Of these paths with their revisions, and the roots that they were opened at."""
    asked = (commit_asked(*each) for each in named)
    return dict(each for each in asked if each is not None and hub_place(each[0]).commit is None)


def condition_of(commits: Mapping[str, str]) -> dict[str, Any]:
    """The commits in a run's conditions; nothing where it reads none by a branch or a tag."""
    return {_KEY: dict(commits)} if commits else {}


def keep_commits(steps: Path, sources: Iterable[Source]) -> None:
    """Make the commits of a submission of several steps durable before the first begins."""
    commits = commits_taken(sources)
    if commits:
        with LocalStore(steps) as store:
            store.write_atomic(_STEPS, (json.dumps(commits, sort_keys=True) + "\n").encode())


def forget_commits(steps: Path) -> None:
    """Let the next submission take current commits: this one is over, even if steps are kept."""
    # The output is in place by now: nothing may turn that into a failure.
    with suppress(OSError):
        (steps / _STEPS).unlink()


def commits_begun(
    recipes: Iterable[AnyRecipe], output: Path | str, steps: Path, *, or_published: bool = False
) -> Commits:
    """The commits that an unfinished run towards an output began with, if any; with ``or_published`` else
    those that a published one is of. No server is asked for recipes without addresses on the Hub.

    Raises OptionError without the client of the output's store, CheckpointError if it may not be read,
    TransientError if its server fails for too long."""
    named = (each for recipe in recipes for _, each in references(recipe))
    if not any(is_hub_place(path) for each in named for path in (each.path, each.lora_path or "")):
        return NO_COMMITS
    records = records_of(str(output))
    record = records.begun() or (records.published() if or_published else None)
    begun = conditions_in(b"" if record is None else record(NAME)) or {}
    return {**_texts(object_at(steps / _STEPS)), **_texts(begun.get(_KEY))}


def _texts(record: Any) -> dict[str, str]:
    pairs = record.items() if isinstance(record, Mapping) else ()
    return {key: value for key, value in pairs if isinstance(key, str) and isinstance(value, str)}
