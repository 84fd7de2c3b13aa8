"""Replay: derive a checkpoint's provenance anew from its recipe and sources, and compare.

The recipe is planned again over the sources as they are now; every file is compared with that plan and the
sources, and every byte of the tensors with the record's digests. Nothing is merged or written but a copy of a
remote checkpoint's record, and nothing is fetched but from servers that the user names: the record is not
trusted that far."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from raymerge.checkpoints.files import MODEL_CARD
from raymerge.checkpoints.source import CONFIG_FILE, Checkpoint, files_at
from raymerge.errors import CheckpointError, Problem, UserError, VerificationError, shortlist
from raymerge.execute.receipts import op_digests
from raymerge.merge_plan.plan import weight_files
from raymerge.merge_plan.tables import Plan, index_names, load_plan
from raymerge.planner.inputs.sources import (
    Opener,
    holdings,
    models_with_components,
    open_reference,
    pickles_read,
)
from raymerge.planner.merges import PlannedMerge, plan_merges
from raymerge.publish import finish
from raymerge.publish.chunks import output_store
from raymerge.publish.output_place import steps_directory
from raymerge.publish.record import NAME, RECORD, STAGES, Ledger, difference
from raymerge.publish.staging import NUMERICS, RECIPE, numerics_bytes
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.load import parse_recipe
from raymerge.recipes.order import merge_order
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.hub import is_hub_place
from raymerge.storage.open import USUAL, Lookup, open_store
from raymerge.storage.store import ReadStore
from raymerge.verifier.audit import differing_ops
from raymerge.verifier.structure import (
    PROVENANCE_FILE,
    RECORD_PLAN,
    changed_copies,
    changed_file,
    file_digest,
    may_be_added,
    verify_structure,
)

_AGAIN = "Merge again, or take the checkpoint from where it is whole."


@dataclass(frozen=True, slots=True)
class Output:
    place: str
    store: ReadStore
    record: Path

    @property
    def name(self) -> str:
        return shown(self.place)

    @property
    def ledger(self) -> Path:
        return self.record / RECORD / NAME

    def problem(self, key: str, what: str, remedy: str = _AGAIN) -> Problem:
        return Problem(f"{self.name}/{key}", what, remedy)


def changed_files(output: Output, plan: Plan, recorded: finish.Provenance) -> Iterator[Problem]:
    """Files that differ from the record in the checkpoint, bytes of tensors aside."""
    yield from verify_structure(output.place).problems
    try:
        finish.check_shards(plan, output.store)
    except UserError as error:
        yield from (replace(each, where=f"{output.name}/{each.where}") for each in error.problems)
    yield from changed_copies(plan, output.place)
    # All other files beside the weights are part of the structure.
    if MODEL_CARD in recorded.files:
        yield from changed_file(output.store, MODEL_CARD, recorded.files[MODEL_CARD], output.name)
    yield from _record_changed(output, plan, recorded)


def files_apart(output: Output, merge: PlannedMerge, recorded: finish.Provenance) -> Iterator[Problem]:
    """Files beside the weights that differ from what the merge, planned anew, makes."""
    donor = merge.sources[int(merge.plan.manifest["donor"])].checkpoint
    expected = finish.finished_files(merge.plan, donor.companions)
    for file in output.store.files():
        # Any other file is a problem of the structure.
        if file.key not in expected and file.key.partition("/")[0] != RECORD and may_be_added(file.key):
            yield output.problem(file.key, "the merge writes no such file.", "Take it away, or merge again.")
    digests = {
        name: xxhash.xxh3_128_hexdigest(content) for name, content in finish.written_files(merge.plan).items()
    }
    # What another merge makes on the way is on no disk.
    if donor.unwritten is None:
        with open_store(donor.root) as files:
            companions = finish.kept_companions(merge.plan, donor.companions)
            digests |= {key: file_digest(files, key) for key in companions}
            for key, content in finish.config_files(merge.plan, files, donor.config).items():
                if not _holds(output.store, key, content):
                    yield output.problem(key, "it is not what the plan makes.")
    for key in sorted(expected - {*weight_files(merge.plan), CONFIG_FILE, *index_names(merge.plan)}):
        if key not in recorded.files:
            yield output.problem(PROVENANCE_FILE, f"it has no digest of {key}, which such a merge writes.")
        elif recorded.files[key] != digests.get(key, recorded.files[key]):
            whose = f"what {donor.name} has" if key in donor.companions else "what the plan makes"
            yield output.problem(key, f"by its digest in the provenance it is not {whose}.")


def _record_changed(output: Output, plan: Plan, recorded: finish.Provenance) -> Iterator[Problem]:
    ledger, numerics = f"{RECORD}/{NAME}", f"{RECORD}/{NUMERICS}"
    otherwise = "it does not say the device and the torch that the provenance says."
    if plan.digest != recorded.plan:
        what = f"it is of the plan {recorded.plan}, and {plan.digest} stands beside it."
        yield output.problem(PROVENANCE_FILE, what)
    recipe = recorded.recipes[-1] if recorded.recipes else ""
    if not _holds(output.store, f"{RECORD}/{RECIPE}", recipe.encode()):
        yield output.problem(f"{RECORD}/{RECIPE}", "it is not the recipe that the provenance has.")
    conditions = Ledger.conditions(output.ledger)
    if conditions is None:
        yield output.problem(ledger, "is missing, or what it was begun under cannot be read.")
    elif conditions.get("numerics") != dict(recorded.numerics):
        yield output.problem(ledger, otherwise)
    if not _holds(output.store, numerics, numerics_bytes(recorded.numerics)):
        yield output.problem(numerics, otherwise)


def _holds(store: ReadStore, key: str, content: bytes) -> bool:
    info = store.info(key)
    return info is not None and info.nbytes == len(content) and store.read(key, 0, info.nbytes) == content


_CACHE = Lookup(offline=True)
_SECTIONS = {
    "plan": "the plan",
    "method": "the method",
    "seed": "the seed",
    "sources": "the sources",
    "tensors": "what became of tensors",
}


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """Empty ``problems`` mean that the record can be derived anew and the bytes match it."""

    path: str
    plan: str
    sources: int
    tensors: int
    digested_nbytes: int
    """Bytes of tensors compared with their digests."""
    notes: tuple[str, ...]
    num_problems: int
    problems: tuple[Problem, ...]
    """Differences; of tensors with other bytes, the first."""

    def require(self) -> ReplayVerdict:
        if self.problems:
            raise VerificationError(self.problems)
        return self


@dataclass(frozen=True, slots=True)
class _SourceLookup:
    places: Mapping[str, str]
    """Where they were, or where the user says, by their names."""
    given: frozenset[str]
    revisions: Mapping[str, str]
    pickled: bool = True
    whole: frozenset[ModelReference] = frozenset()
    """Models of which weights are merged wherever they lie."""


def replay_checkpoint(place: Path | str, places: Mapping[str, str]) -> ReplayVerdict:
    """Derive the provenance of a checkpoint anew; differences are in the verdict, never raised.

    ``places`` gives where sources are now, by their names in the recipe; the others are looked for where they
    were."""
    try:
        with open_store(str(place)) as store, finish.record_at(str(place)) as record:
            files_at(store)
            output = Output(str(place), store, record)
            recorded = finish.Provenance.from_json(
                finish.read_record(store, PROVENANCE_FILE), f"{output.name}/{PROVENANCE_FILE}"
            )
            story = finish.read_record(store, finish.STORY)
            plan = load_plan(record / RECORD_PLAN)
            sources = _SourceLookup(
                places={**finish.places_in(story), **places},
                given=frozenset(places),
                revisions={
                    each.name: each.revision for each in recorded.sources if each.revision is not None
                },
            )
            return _replayed(output, plan, recorded, sources)
    except UserError as error:
        return ReplayVerdict(shown(str(place)), "", 0, 0, 0, (), len(error.problems), error.problems)


def _replayed(
    output: Output, plan: Plan, recorded: finish.Provenance, sources: _SourceLookup
) -> ReplayVerdict:
    digests = op_digests(Ledger.read(output.ledger).values())
    with output_store(plan, output.place) as tensors:
        findings = differing_ops(plan, tensors, digests, output.name)
    problems = [
        *changed_files(output, plan, recorded),
        *findings.problems,
        *_unknown(sources.given, recorded),
    ]
    notes = list(_notes(recorded))
    try:
        merge = _planned_again(output, plan, recorded, sources)
        problems += _differences(output, plan, merge, recorded, digests)
        if not merge.plan.problems:
            problems += files_apart(output, merge, recorded)
    except UserError as error:
        problems += error.problems
    else:
        notes += _written_since(output, merge)
    return ReplayVerdict(
        path=output.name,
        plan=plan.digest,
        sources=len(plan.manifest["sources"]),
        tensors=len(recorded.tensors),
        digested_nbytes=findings.digested,
        notes=tuple(notes),
        num_problems=len(problems) + findings.num_problems - len(findings.problems),
        problems=tuple(problems),
    )


def _planned_again(
    output: Output, plan: Plan, recorded: finish.Provenance, sources: _SourceLookup
) -> PlannedMerge:
    """The merge, planned anew; raises UserError where a source is gone, or no longer fits."""
    where = f"{output.name}/{PROVENANCE_FILE}"
    # What lies in the current directory says nothing of what names meant where it was made.
    recipes = merge_order([parse_recipe(text, where) for text in recorded.recipes], exists=lambda _: False)
    opener = _opener(replace(sources, pickled=pickles_read(recipes), whole=models_with_components(recipes)))
    version = str(plan.manifest["raymerge"])
    steps = steps_directory(output.place)
    stages = output.record / RECORD / STAGES
    merges = plan_merges(recipes, steps, version=version, opener=opener, lookup=_CACHE, recorded=stages)
    return merges[-1]


def _opener(sources: _SourceLookup) -> Opener:
    """Opens models, under the recipes' names, where the user says or where they were."""
    places = sources.places

    def open_one(reference: ModelReference) -> Checkpoint:
        name = next((each for each in (str(reference), reference.path) if each in places), None)
        if name is None or (name not in sources.given and not os.path.exists(places[name])):
            return _open_by_name(reference, places.get(str(name)), sources)
        # What the user names may be asked for; what the record names is a stranger's word.
        lookup = USUAL if name in sources.given and is_remote(places[name]) else _CACHE
        opened = open_reference(
            ModelReference(places[name]),
            pickled=sources.pickled,
            lookup=lookup,
            with_components=reference in sources.whole,
        )
        return replace(opened, name=str(reference))

    return open_one


def _open_by_name(reference: ModelReference, was: str | None, sources: _SourceLookup) -> Checkpoint:
    """A model by its name; of the Hub only from its cache, at the commit that was read."""
    revision = sources.revisions.get(str(reference)) if reference.revision is None else None
    pinned = replace(reference, revision=revision or reference.revision)
    if was and is_hub_place(was):
        # With the commit that was read, whatever its branch means in the cache.
        pinned = ModelReference(was)
    is_local = os.path.exists(os.path.expanduser(reference.path))
    try:
        opened = open_reference(
            reference if is_local else pinned,
            pickled=sources.pickled,
            lookup=_CACHE,
            with_components=reference in sources.whole,
        )
        return replace(opened, name=str(reference))
    except CheckpointError as error:
        place = (
            f"it was at {was} and is not there any more" if was else "the record does not say where it was"
        )
        remedy = f"Say where it is now: --source '{reference}=PATH'."
        if was and is_remote(was):
            place = f"it was at {was}, and servers are asked only for what you name"
            remedy = f"Name it: --source '{reference}={was}'."
        raise CheckpointError(Problem(str(reference), f"{place}.", remedy)) from error


def _differences(
    output: Output, plan: Plan, merge: PlannedMerge, recorded: finish.Provenance, digests: Mapping[int, str]
) -> Iterator[Problem]:
    if merge.plan.problems:
        yield from merge.plan.problems
        return
    derived = finish.provenance(
        merge.plan,
        merge.sources,
        recipes=recorded.recipes,
        versions=recorded.versions,
        numerics=recorded.numerics,
        files=recorded.files,
        digests=digests,
    )
    recorded = replace(recorded, sources=_as_known(recorded.sources, derived.sources))
    derived = replace(derived, sources=_as_known(derived.sources, recorded.sources))
    for key, name in _SECTIONS.items():
        before, after = getattr(recorded, key), getattr(derived, key)
        if before != after:
            facts = f" ({difference(plan.manifest, merge.plan.manifest)})" if key == "plan" else ""
            what = f"derived anew, {name} differ: {_apart(before, after)}{facts}."
            remedy = "Put the sources back as they were, or merge again."
            yield output.problem(PROVENANCE_FILE, what, remedy)


def _as_known(
    sources: Sequence[finish.SourceRecord], others: Sequence[finish.SourceRecord]
) -> tuple[finish.SourceRecord, ...]:
    """Sources without what the Hub's cache tells of them, where it does not tell the same of the others."""
    records = list(sources)
    for number, (source, other) in enumerate(zip(sources, others, strict=False)):
        known = {file.name: file.sha256 for file in other.files}
        records[number] = replace(
            source,
            revision=source.revision if other.revision else None,
            files=tuple(replace(f, sha256=f.sha256 if known.get(f.name) else None) for f in source.files),
        )
    return tuple(records)


def _apart(recorded: Any, derived: Any) -> str:
    if isinstance(recorded, Mapping) and isinstance(derived, Mapping):
        names = {**recorded, **derived}
        return shortlist([name for name in names if recorded.get(name) != derived.get(name)])
    if isinstance(recorded, tuple) and isinstance(derived, tuple):
        pairs = zip(recorded, derived, strict=False)
        return "; ".join(_source_apart(*each) for each in pairs if each[0] != each[1])
    return f"the record says {recorded}, and it is {derived}"


def _source_apart(recorded: finish.SourceRecord, derived: finish.SourceRecord) -> str:
    files, now = ({file.name: file for file in each.files} for each in (recorded, derived))
    changed = [name for name in {**files, **now} if files.get(name) != now.get(name)]
    others = [
        name for name in finish.SourceRecord.__slots__ if getattr(recorded, name) != getattr(derived, name)
    ]
    return f"of {recorded.name}, {shortlist(changed or others)}"


def _unknown(given: frozenset[str], recorded: finish.Provenance) -> Iterator[Problem]:
    names = [source.name for source in recorded.sources]
    # A model with an adapter on it may be called by its own name.
    known = {*names, *(name.partition("+")[0].partition("@")[0] for name in names)}
    for name in sorted(given):
        # Of several recipes, sources of the earlier ones are in their texts alone.
        if name not in known and len(recorded.recipes) == 1:
            what = f"the recipe has no source '{name}'; it has {', '.join(names)}."
            yield Problem("--source", what, "Give a name as the recipe has it.")


def _notes(recorded: finish.Provenance) -> Iterator[str]:
    now = finish.library_versions()
    apart = [
        f"{name} {was} (here {now.get(name) or 'none'})"
        for name, was in recorded.versions.items()
        if was != now.get(name)
    ]
    if apart:
        yield f"it was made with {', '.join(apart)}: merged here, its bytes may differ by rounding"


def _written_since(output: Output, merge: PlannedMerge) -> Iterator[str]:
    before = Ledger.versions(output.ledger)
    for known, holding in zip(before, holdings(merge.sources), strict=False):
        newer = [file.key for file in holding.files if file.version and known.get(file.key) != file.version]
        if newer:
            yield (
                f"of {holding.name}, {shortlist(newer)} was written or copied since: its header is the same; "
                "whether its numbers are, --level audit finds out"
            )
