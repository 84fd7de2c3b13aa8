"""Provenance: what a checkpoint was made of, by what, and what came out, tensor by tensor.

Two equal merges have equal provenance, byte by byte: it does not depend on time or number of workers, and on
the place of sources only by what the Hub knows of them, a commit and SHA-256. Everything else goes into the
story of the run, a file of its own.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import TypeAdapter, ValidationError

from raymerge.checkpoints.source import Checkpoint
from raymerge.errors import CheckpointError, Problem
from raymerge.merge_plan.dispositions import Disposition, Holding
from raymerge.merge_plan.tables import Plan
from raymerge.planner.explain import tensor_lines
from raymerge.planner.inputs.sources import Prepared, Source, holdings
from raymerge.publish.attempt import RECORD
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.hub import blob_digest, snapshot_revision
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore, WriteStore, is_key
from raymerge.storage.temporary import fetched
from raymerge.verifier.structure import PROVENANCE_FILE, file_digest


@dataclass(frozen=True, slots=True)
class SourceFile:
    name: str
    nbytes: int
    header: str
    """xxh3-128 of its header, in hex."""
    sha256: str | None
    """As the Hub states it; else None."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A source: a model, an adapter, or the result of a stage."""

    name: str
    revision: str | None
    """Commit on the Hub, where it was read there or from its cache; else None."""
    config: str | None
    """xxh3-128 of a model's config, as JSON with sorted keys; None for what has none."""
    made_by: str | None
    """Digest of the plan or stage that made it; None for a source from outside."""
    files: tuple[SourceFile, ...]
    dispositions: Mapping[str, int]
    """How many of its tensors were merged, copied, converted, or dropped by which rule."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    disposition: Literal["merged", "copied", "converted"]
    """The strongest where its parts differ."""
    sources: tuple[int, ...]
    digest: str
    """xxh3-128 in hex of its bytes; for several pieces, of their digests in hex, concatenated."""
    pieces: int


@dataclass(frozen=True, slots=True)
class Provenance:
    format: Literal[1]
    plan: str
    recipes: tuple[str, ...]
    """Texts of all recipes needed to make it, its own last."""
    method: str
    seed: int
    versions: Mapping[str, str]
    """Of the libraries that computed it, by name."""
    numerics: Mapping[str, str]
    """What bytes depend on beside the plan: kind of device, version of torch."""
    sources: tuple[SourceRecord, ...]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, str]
    """xxh3-128 of every companion and of the model card, by their keys."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> Provenance:
        """Raises CheckpointError if it is no provenance, or of another version; ``where`` names it."""
        try:
            found = _ADAPTER.validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            what = f"it is no provenance that this version of raymerge knows: {place}: {first['msg']}."
            raise CheckpointError(
                Problem(where, what, "Use the raymerge that made it, or merge again.")
            ) from error
        for key in found.files:
            if not is_key(key):
                what = f"it has a digest of {key!r}, which is no file of a checkpoint."
                raise CheckpointError(Problem(where, what, "Merge again."))
        return found


_ADAPTER = TypeAdapter(Provenance)


@dataclass(frozen=True, slots=True)
class Made:
    """The fields of ``Provenance`` that a run knows beside its plan."""

    recipes: Sequence[str]
    versions: Mapping[str, str]
    numerics: Mapping[str, str]
    files: Mapping[str, str]
    digests: Mapping[int, str]
    """xxh3-128 in hex of each row that was made."""


def provenance(plan: Plan, sources: Sequence[Source], made: Made) -> Provenance:
    return Provenance(
        format=1,
        plan=plan.digest,
        recipes=tuple(made.recipes),
        method=str(plan.manifest["method"]),
        seed=int(plan.manifest["seed"]),
        versions=dict(made.versions),
        numerics=dict(made.numerics),
        sources=tuple(_sources(plan, sources)),
        tensors=dict(_tensors(plan, made.digests)),
        files=dict(made.files),
    )


def _tensors(plan: Plan, digests: Mapping[int, str]) -> Iterator[tuple[str, TensorRecord]]:
    found = _tensor_digests(plan, digests)
    for line in tensor_lines(plan):
        pieces = found[line.name]
        digest = pieces[0] if len(pieces) == 1 else xxhash.xxh3_128_hexdigest("".join(pieces).encode())
        yield line.name, TensorRecord(_disposition(line.disposition), line.sources, digest, len(pieces))


def _disposition(text: str) -> Literal["merged", "copied", "converted"]:
    if text == Disposition.MERGED:
        return "merged"
    return "copied" if text == Disposition.COPIED else "converted"


def _tensor_digests(plan: Plan, digests: Mapping[int, str]) -> dict[str, list[str]]:
    """Digests of the pieces of each tensor in order; a row copied from another has that row's."""
    names = plan["tensors"].column("name").to_pylist()
    pieces: dict[str, list[str]] = {name: [] for name in names}
    for index, row in enumerate(plan["rows"].select(["tensor", "copy_of"]).to_pylist()):
        made = row["copy_of"] if row["copy_of"] >= 0 else index
        pieces[names[row["tensor"]]].append(digests.get(made, ""))
    return pieces


def _sources(plan: Plan, sources: Sequence[Source]) -> Iterator[SourceRecord]:
    """Fingerprints as the plan has them, what is known of the contents, and the fates of the tensors."""
    fates = plan["dispositions"].select(["source", "disposition", "rule"]).to_pylist()
    counts = Counter((row["source"], row["disposition"], row["rule"]) for row in fates)
    planned_and_held = zip(plan.manifest["sources"], holdings(sources), strict=False)
    for index, (planned, holding) in enumerate(planned_and_held):
        config = sources[index].checkpoint.config if index < len(sources) else None
        text = None if config is None else json.dumps(config, sort_keys=True)
        revision = snapshot_revision(holding.root)
        yield SourceRecord(
            name=str(planned["name"]),
            revision=revision,
            config=None if text is None else xxhash.xxh3_128_hexdigest(text.encode()),
            made_by=planned.get("made_by"),
            files=tuple(_files(holding, planned["files"], is_known=revision is not None)),
            dispositions=_disposition_counts(counts, index),
        )


def _files(
    holding: Holding, planned: Sequence[tuple[str, int, str]], *, is_known: bool
) -> Iterator[SourceFile]:
    versions = {file.key: file.version for file in holding.files}
    for key, nbytes, header in planned:
        digest = blob_digest(holding.root, key, versions.get(key, "")) if is_known else None
        yield SourceFile(key, nbytes, header, digest)


def _disposition_counts(counts: Mapping[tuple[int, str, str], int], source: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (index, disposition, rule), count in counts.items():
        if index == source:
            is_dropped = disposition == Disposition.DROPPED
            found[f"{disposition}: {rule}" if is_dropped else disposition] += count
    return dict(sorted(found.items()))


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
    """Write the provenance and the story of a run whose shards and companions are written; returns their
    keys.

    ``recipes`` are the texts of all recipes, the checkpoint's own last; ``digests`` xxh3-128 of each row that
    was made, by its number; ``files`` the keys of the companions and the model card; ``run`` its name, "" for
    none.
    """
    kept = {key: file_digest(store, key) for key in sorted(files)}
    made = Made(recipes, versions(), numerics, kept, digests)
    _write(store, PROVENANCE, provenance(plan, sources, made).to_json())
    _write(store, STORY, _story(sources, seconds, run))
    return PROVENANCE, STORY


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


@contextmanager
def record_at(place: str) -> Iterator[Path]:
    """A local directory with a checkpoint's record: itself, or a temporary copy; raises CheckpointError."""
    if not is_remote(place):
        yield Path(parse_place(place).text).absolute()
        return
    with open_store(place) as store:
        keys = [each.key for each in store.files() if each.key.startswith(f"{RECORD}/")]
    with fetched(place, keys) as found:
        yield found


def read_record(store: ReadStore, key: str) -> dict[str, Any]:
    """A JSON object of the record; raises CheckpointError where it is absent or none."""
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
    """Where a source lies, as an absolute path or an address; for a single file, that file."""
    root = shown(holding.root) if is_remote(holding.root) else os.path.abspath(holding.root)
    is_file = isinstance(holding, Checkpoint) and holding.is_single_file
    return f"{root}/{holding.files[0].key}" if is_file else root


def _write(store: WriteStore, key: str, content: Mapping[str, Any]) -> None:
    store.write_atomic(key, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
