"""Structure: names, shapes, dtypes, index both ways, sizes, config, companions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import xxhash

from raymerge.architectures.rules import rules_of
from raymerge.checkpoints.dcp.layout import SIDECARS, read_layout
from raymerge.checkpoints.dcp.metadata import METADATA_FILE
from raymerge.checkpoints.dcp.target import TargetLayout, ranges_beside
from raymerge.checkpoints.files import INDEX_FILE, MODEL_CARD, RECORD_DIRECTORY, holds_weights
from raymerge.checkpoints.header import MODEL_STEM, shards_by_stem
from raymerge.checkpoints.json_files import load_json, read_bounded
from raymerge.checkpoints.quantisation.encoding import SPELL_RIGHT
from raymerge.checkpoints.source import CONFIG_FILE, Checkpoint, open_checkpoint
from raymerge.errors import Problem, UserError, VerificationError
from raymerge.merge_plan.dispositions import Use
from raymerge.merge_plan.plan import planned_layout, weight_files
from raymerge.merge_plan.tables import Plan, index_bytes, index_names, load_plan
from raymerge.planner.explain import tensor_lines
from raymerge.planner.inputs.consistency import config_problems
from raymerge.planner.inputs.served_scales import joined_scales, misread, misread_text, misspelt, scale_values
from raymerge.planner.inputs.sources import collector_paused
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.file_rules import EXPORT, HIDDEN
from raymerge.storage.open import open_store
from raymerge.storage.store import FileInfo, Range, ReadStore, is_key
from raymerge.storage.temporary import fetched

RECORD_PLAN = Path("raymerge") / "plan"
_MADE = frozenset({f"{RECORD_PLAN.parent.as_posix()}/{name}" for name in ("ledger.jsonl", "run.json")})
"""Files that only a merge writes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Empty ``problems`` mean that the checkpoint is sound."""

    path: str
    tensors: int
    nbytes: int
    files: int
    against_plan: bool
    problems: tuple[Problem, ...]
    are_tensors_sound: bool
    """Whether tensors, config and index are sound, whatever other files are."""
    notes: tuple[str, ...] = ()
    """What is no fault of the checkpoint's, and its user should know."""

    def require(self) -> Verdict:
        if self.problems:
            raise VerificationError(self.problems)
        return self


@collector_paused()
def verify_structure(place: Path | str) -> Verdict:
    """The structure of a checkpoint, wherever it is; of one that raymerge made also against its plan. Faults
    are in the verdict, never raised."""
    root, name = str(place), shown(str(place))
    try:
        checkpoint = open_checkpoint(root, name, pickled=True)
        with open_store(root) as store:
            files = {info.key: info for info in store.files()}
        plan = _recorded_plan(root, files)
        misread_problems, notes = _misread(checkpoint, plan)
    except UserError as error:
        return Verdict(name, 0, 0, 0, False, error.problems, are_tensors_sound=False)
    problems = [*config_problems(checkpoint), *misread_problems]
    shards = shards_by_stem(file.key for file in checkpoint.files).get(MODEL_STEM, ())
    if INDEX_FILE not in files and checkpoint.chunks is None and len(shards) > 1:
        # A complete set of files can be read without an index, but loaders want one.
        what = f"it has {len(shards)} weight files and no {INDEX_FILE}, so that no loader finds them."
        remedy = "Copy the index from where the files come from, or merge again."
        problems.insert(0, Problem(name, what, remedy))
    if plan is not None:
        problems += (
            Problem(where, what, "Merge again.") for where, what in _contradictions(checkpoint, plan)
        )
    try:
        beside = () if plan is None else tuple(_file_problems(checkpoint, files, plan))
    except UserError as error:
        beside = error.problems
    return Verdict(
        path=name,
        tensors=len(checkpoint.tensors),
        nbytes=sum(file.nbytes for file in checkpoint.files),
        files=len(checkpoint.files),
        against_plan=plan is not None,
        problems=(*problems, *beside),
        are_tensors_sound=not problems,
        notes=notes,
    )


def _misread(checkpoint: Checkpoint, plan: Plan | None) -> tuple[Sequence[Problem], tuple[str, ...]]:
    """What servers read otherwise than it is: scales of the other spelling, and those of several matrices of
    which they take one. Problems, and notes where a merge copied all of it unchanged. Raises CheckpointError:
    a scale cannot be read."""
    matrices = joined_scales(checkpoint.tensors, rules_of(checkpoint.config))
    with open_store(checkpoint.place) as store:
        values = scale_values(store, matrices)
    if not (misread(matrices, values) or any(misspelt(matrices, values))):
        return (), ()
    lines = () if plan is None else tensor_lines(plan)
    copied = frozenset(line.name for line in lines if line.disposition == Use.COPIED)
    unchanged = [each for each in matrices if copied.issuperset(each.names)]
    made = [each for each in matrices if not copied.issuperset(each.names)]
    notes = [each.removesuffix(".") for each in misspelt(unchanged, values)]
    if factors := misread(unchanged, values):
        notes.append(misread_text(factors))
    problems = [Problem(checkpoint.name, each, SPELL_RIGHT) for each in misspelt(made, values)]
    if not problems and (factors := misread(made, values)):
        problems = [Problem(checkpoint.name, f"{misread_text(factors)}.", _JOIN)]
    return problems, tuple(f"{each}, as in the model that they come from" for each in notes)


_JOIN = (
    "Merge the model with itself (linear, with the model named twice), which gives one scale to what is "
    "joined, or serve it where each matrix keeps its own."
)


def _recorded_plan(root: str, keys: Collection[str]) -> Plan | None:
    """The plan that a checkpoint was made by; None where it has no record of raymerge. Raises PlanError where
    its record has no complete plan."""
    plan = f"{RECORD_PLAN.as_posix()}/"
    is_made = any(key in _MADE or key.startswith(plan) for key in keys)
    # No store lists a directory that lost its files; on this machine it is there all the same.
    if not is_made and (is_remote(root) or not Path(parse_place(root).text, RECORD_PLAN).is_dir()):
        return None
    with fetched(root, [key for key in keys if key.startswith(plan)]) as here:
        return load_plan(here / RECORD_PLAN)


def _contradictions(checkpoint: Checkpoint, plan: Plan) -> Iterator[tuple[str, str]]:
    shards, is_chunked = plan["shards"].column("name").to_pylist(), planned_layout(plan) is not None
    # Where chunks lie is said by files of their own.
    planned = {
        name: (dtype, tuple(shape), *(() if is_chunked else (shards[shard], offset)))
        for name, dtype, shape, shard, offset in plan.columns(
            "tensors", "name", "dtype", "shape", "shard", "offset"
        )
    }
    for name, tensor in checkpoint.tensors.items():
        place = () if is_chunked else (tensor.key, tensor.offset)
        stored = (tensor.dtype.value, tensor.shape, *place)
        if name not in planned:
            yield f"{checkpoint.name}: {name}", "the plan has no such tensor."
        elif planned[name] != stored:
            yield f"{checkpoint.name}: {name}", f"it is {stored}, the plan says {planned[name]}."
    missing = [name for name in planned if name not in checkpoint.tensors]
    if missing:
        listed = ", ".join(missing[:3])
        yield checkpoint.name, f"{len(missing)} tensors of the plan are missing, such as {listed}."
    if dict(checkpoint.config) != plan.manifest["config"]:
        yield f"{checkpoint.name}/config.json", "it is not the config that the plan says."


PROVENANCE_FILE = f"{RECORD_DIRECTORY}/provenance.json"
_AGAIN = "Merge again, or take the checkpoint from where it is whole."
_DOCUMENTS = (
    *("*.md", "LICENSE*", "LICENCE*", "NOTICE*"),
    *("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp"),
)
_CHUNK = 8 << 20
_MOST = 1 << 30
_READERS = 4
# A provenance names every tensor.


def may_be_added(key: str) -> bool:
    """Whether a file may be added after publication, since no loader reads it: a document, a hidden file, or
    the model in a format for other software."""
    name = key.rpartition("/")[2]
    is_document = any(fnmatchcase(name, pattern) for pattern in _DOCUMENTS)
    return is_document or HIDDEN.matches(key) or EXPORT.matches(key)


def _file_problems(checkpoint: Checkpoint, files: Mapping[str, FileInfo], plan: Plan) -> Iterator[Problem]:
    """Companions that were changed, removed or added since publication. Of the files of a layout only those
    that describe it are read; ``changed_copies`` reads the others.

    The model card may be edited, and what ``may_be_added`` allows may be added."""
    name, layout = checkpoint.name, planned_layout(plan)
    copied = {} if layout is None else layout.files
    with open_store(checkpoint.place) as store:
        digests = _digests(store, files.get(PROVENANCE_FILE))
        if digests is None:
            what = "is missing or damaged, and it alone says what the tokenizer and other companions must be."
            yield Problem(f"{name}/{PROVENANCE_FILE}", what, _AGAIN)
            return
        for key, digest in digests.items():
            if key != MODEL_CARD and not (key in copied and key not in (METADATA_FILE, *SIDECARS)):
                yield from changed_file(store, key, digest, name)
        for key in index_names(plan):
            index = files.get(key)
            if index is not None and store.read(key, 0, index.nbytes) != index_bytes(plan, key):
                yield Problem(f"{name}/{key}", "it is not the index that the plan makes.", _AGAIN)
    for key, nbytes in copied.items():
        if key not in files or files[key].nbytes != nbytes:
            size = f"has {files[key].nbytes} bytes" if key in files else "is missing"
            yield Problem(f"{name}/{key}", f"it {size}, and the plan says {nbytes} bytes.", _AGAIN)
    for key in files.keys() - {*weight_files(plan), *index_names(plan), CONFIG_FILE, MODEL_CARD, *digests}:
        if key.startswith(f"{RECORD_DIRECTORY}/") or may_be_added(key):
            continue
        more = " Loaders that take every file of weights would read it." if holds_weights(key) else ""
        what = f"the merge writes no such file.{more}"
        yield Problem(f"{name}/{key}", what, "Take it away, or merge again.")


def changed_file(store: ReadStore, key: str, digest: str, name: str) -> Iterator[Problem]:
    """``name`` is what messages call the checkpoint."""
    current = file_digest(store, key)
    if current != digest:
        what = "is missing." if not current else "its bytes are not those that were published."
        yield Problem(f"{name}/{key}", what, _AGAIN)


def file_digest(store: ReadStore, key: str) -> str:
    """xxh3-128 of a file's bytes, in hex; "" where there is none."""
    info = store.info(key)
    if info is None:
        return ""
    digest = xxhash.xxh3_128()
    for offset in range(0, info.nbytes, _CHUNK):
        digest.update(store.read(key, offset, min(_CHUNK, info.nbytes - offset)))
    return digest.hexdigest()


def copied_digests(plan: Plan, place: str) -> dict[str, str]:
    """xxh3-128 in hex, by key, of all that the files of an output in the layout of a training checkpoint hold
    beside the elements of tensors; none for other outputs."""
    layout = planned_layout(plan)
    if layout is None:
        return {}
    with open_store(place) as store, ThreadPoolExecutor(_READERS) as pool:
        elements = TargetLayout(read_layout(store, store.files()), drops_state=False).elements()

        def digest(key: str) -> str:
            hasher, own = xxhash.xxh3_128(), [each for each, _ in elements.get(key, ())]
            for each in ranges_beside(own, Range(0, layout.files[key])):
                hasher.update(store.read(key, each.offset, each.nbytes))
            return hasher.hexdigest()

        return dict(zip(layout.files, pool.map(digest, layout.files), strict=True))


def changed_copies(plan: Plan, place: str) -> Iterator[Problem]:
    """Files of a layout in which what is no element of a tensor was changed since publication."""
    now = copied_digests(plan, place)
    with open_store(place) as store:
        before = _digests(store, store.info(PROVENANCE_FILE)) or {}
    for key, digest in now.items():
        if before.get(key) != digest:
            what = "what it holds beside the tensors of the model is not what was published."
            yield Problem(f"{shown(place)}/{key}", what, _AGAIN)


def _digests(store: ReadStore, info: FileInfo | None) -> Mapping[str, str] | None:
    if info is None:
        return None
    try:
        record = load_json(read_bounded(store, info.key, info.nbytes, most=_MOST))
    except (ValueError, RecursionError):
        return None
    files = record.get("files") if isinstance(record, dict) else None
    if not isinstance(files, dict) or not all(is_key(k) and isinstance(v, str) for k, v in files.items()):
        return None
    return files
