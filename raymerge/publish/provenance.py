"""Provenance: what a checkpoint was made of, by what, and what came out, tensor by tensor.

Two equal merges have equal provenance, byte by byte: nothing in it hangs on when or by how many workers a
merge was made, and on where its sources lay only what the Hub knows of them, a commit and SHA-256.
What else differs is told apart from it, in the story of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import xxhash
from pydantic import TypeAdapter, ValidationError

from raymerge.errors import CheckpointError, Problem
from raymerge.merge_plan.dispositions import Disposition, Holding
from raymerge.merge_plan.tables import Plan
from raymerge.planner.explain import tensor_lines
from raymerge.planner.inputs.source import Source, holdings
from raymerge.storage.hub.cache import blob_digest, snapshot_revision
from raymerge.storage.store import is_key


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of weights that was read."""

    name: str
    """Its name in the source."""
    nbytes: int
    """Its size."""
    header: str
    """xxh3-128 of its header, in hex."""
    sha256: str | None
    """Of its bytes, where it was the Hub's, which knows it; else None."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A model, an adapter, or the result of a stage that was read."""

    name: str
    """As the recipe calls it."""
    revision: str | None
    """Commit on the Hub, where it was read there or from its cache; else None."""
    config: str | None
    """xxh3-128 of a model's config, as JSON with sorted keys; None for what has none."""
    made_by: str | None
    """Digest of the plan or stage that made it; None for what was there."""
    files: tuple[SourceFile, ...]
    """Its files of weights."""
    dispositions: Mapping[str, int]
    """How many of its tensors were merged, copied, converted, or dropped by which rule."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor that was written."""

    disposition: Literal["merged", "copied", "converted"]
    """What was done to make it; the strongest where its parts differ."""
    sources: tuple[int, ...]
    """Which sources it was made of, by their positions."""
    digest: str
    """xxh3-128 of its bytes, in hex; of several pieces, of their digests in hex, one behind the other."""
    pieces: int
    """Pieces that it was made in, as the plan has them."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a checkpoint comes from."""

    format: Literal[1]
    """Version of what the fields mean."""
    plan: str
    """Digest of its plan, which stands beside."""
    recipes: tuple[str, ...]
    """Texts of all recipes that it takes to make it, its own last."""
    method: str
    """Merge method of what no rule speaks of."""
    seed: int
    """Seed of the recipe."""
    versions: Mapping[str, str]
    """Versions of what computed it, by name."""
    numerics: Mapping[str, str]
    """What bytes depend on beside the plan: the kind of device, the version of torch."""
    sources: tuple[SourceRecord, ...]
    """What it was made of, in the order of the plan."""
    tensors: Mapping[str, TensorRecord]
    """What was written, by name."""
    files: Mapping[str, str]
    """xxh3-128 of every companion and of the model card, by their keys."""

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> Provenance:
        """Inverse of ``to_json``.

        Raises:
            CheckpointError: it is no provenance, or one of another version; ``where`` names it.
        """
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
    """What a run knows beside its plan. The fields are those of ``Provenance``."""

    recipes: Sequence[str]
    versions: Mapping[str, str]
    numerics: Mapping[str, str]
    files: Mapping[str, str]
    digests: Mapping[int, str]
    """xxh3-128 of the bytes of each row of the plan that was made, in hex."""


def provenance(plan: Plan, sources: Sequence[Source], made: Made) -> Provenance:
    """The provenance of a checkpoint that is made.

    Args:
        plan: what was made.
        sources: what of, opened.
        made: what the run adds.
    """
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
    """Digests of the pieces of each tensor in order; of what was copied from another row, that row's."""
    names = plan["tensors"].column("name").to_pylist()
    pieces: dict[str, list[str]] = {name: [] for name in names}
    for index, row in enumerate(plan["rows"].select(["tensor", "copy_of"]).to_pylist()):
        made = row["copy_of"] if row["copy_of"] >= 0 else index
        pieces[names[row["tensor"]]].append(digests.get(made, ""))
    return pieces


def _sources(plan: Plan, sources: Sequence[Source]) -> Iterator[SourceRecord]:
    """Fingerprints as the plan has them, what is known of the contents, and what became of the tensors."""
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
            dispositions=_told(counts, index),
        )


def _files(
    holding: Holding, planned: Sequence[tuple[str, int, str]], *, is_known: bool
) -> Iterator[SourceFile]:
    versions = {file.key: file.version for file in holding.files}
    for key, nbytes, header in planned:
        digest = blob_digest(holding.root, key, versions.get(key, "")) if is_known else None
        yield SourceFile(key, nbytes, header, digest)


def _told(counts: Mapping[tuple[int, str, str], int], source: int) -> dict[str, int]:
    """How many tensors became what; of those that were dropped, by which rule."""
    found: Counter[str] = Counter()
    for (index, disposition, rule), count in counts.items():
        if index == source:
            is_dropped = disposition == Disposition.DROPPED
            found[f"{disposition}: {rule}" if is_dropped else disposition] += count
    return dict(sorted(found.items()))
