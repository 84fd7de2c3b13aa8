"""Finishes a directory whose shards are written: companions, card, config, provenance, and the index last.

Provenance is what a checkpoint was made of, by what, and what came out, tensor by tensor. Two equal merges
have equal provenance, byte by byte: it does not depend on time or number of workers, and on the place of
sources only by what the Hub knows of them, a commit and SHA-256. Everything else goes into the story of the
run, a file of its own."""

from __future__ import annotations

import json
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

import xxhash
from pydantic import TypeAdapter, ValidationError

from raymerge.checkpoints.json_files import json_bytes
from raymerge.checkpoints.source import Checkpoint, Holding
from raymerge.documents.positions import yaml_text
from raymerge.errors import CheckpointError, Problem, VerificationError
from raymerge.merge_plan.dispositions import Use
from raymerge.merge_plan.plan import weight_files
from raymerge.merge_plan.tables import Plan, index_bytes, index_names
from raymerge.planner.explain import tensor_lines
from raymerge.planner.inputs.sources import Prepared, Source, holdings
from raymerge.publish.record import RECORD
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.hub import blob_digest, hub_place, is_hub_name, is_hub_place, snapshot_revision
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore, WriteStore, is_key
from raymerge.storage.temporary import fetched
from raymerge.verifier.structure import PROVENANCE_FILE


def finish_companions(
    plan: Plan, donor: ReadStore, target: WriteStore, *, companions: Sequence[str], parents: Sequence[Parent]
) -> None:
    copy_companions(donor, target, kept_companions(plan, companions))
    for name, content in written_files(plan).items():
        target.write_atomic(name, content)
    target.write_atomic("README.md", model_card(plan.manifest, plan.digest, parents).encode())


def kept_companions(plan: Plan, companions: Sequence[str]) -> tuple[str, ...]:
    """The donor's companions but those that the plan replaces or leaves out."""
    others = {*plan["files"].column("name").to_pylist(), *plan.manifest["left_out"], *weight_files(plan)}
    return tuple(key for key in companions if key not in others)


def written_files(plan: Plan) -> Mapping[str, bytes]:
    return {row["name"]: row["content"] for row in plan["files"].to_pylist()}


def check_shards(plan: Plan, target: ReadStore) -> None:
    """Compare sizes and headers of the files of tensors with the plan; raises VerificationError."""
    files, headers = (
        {file.key: file for file in target.files()},
        dict(plan.columns("shards", "name", "header")),
    )
    problems: list[Problem] = []
    for key, nbytes in weight_files(plan).items():
        file, header = files.get(key), headers.get(key, b"")
        if file is None or file.nbytes != nbytes:
            size = "absent" if file is None else f"{file.nbytes} bytes long"
            problems.append(Problem(key, f"it is {size}, the plan says {nbytes} bytes.", "Merge again."))
        elif target.read(key, 0, len(header)) != header:
            problems.append(Problem(key, "its header is not the planned one.", "Merge again."))
    if problems:
        raise VerificationError(problems)


def finish_config(
    plan: Plan, donor: ReadStore, target: WriteStore, *, donor_config: Mapping[str, Any]
) -> None:
    """Write config.json, unless only tensors are merged, and then the index; keeps an unchanged config's
    bytes."""
    for name, content in config_files(plan, donor, donor_config).items():
        target.write_atomic(name, content)
    target.sync_directory()


def config_files(plan: Plan, donor: ReadStore, donor_config: Mapping[str, Any]) -> Mapping[str, bytes]:
    """What ``finish_config`` writes, by name, in its order."""
    config, files = plan.manifest["config"], dict[str, bytes]()
    own = donor.info("config.json")
    if config and (config != dict(donor_config) or own is None):
        # A training checkpoint may have that of another model.
        files["config.json"] = json_bytes(config)
    elif own is not None and config:
        files["config.json"] = donor.read("config.json", 0, own.nbytes)
    return files | {key: index_bytes(plan, key) for key in index_names(plan)}


def finished_files(plan: Plan, companions: Sequence[str]) -> frozenset[str]:
    """Every file of a finished checkpoint but the record of its run."""
    index = index_names(plan)
    config = ["config.json"] if plan.manifest["config"] else []
    donor_files = kept_companions(plan, companions)
    return frozenset((*weight_files(plan), *index, *config, "README.md", *donor_files, *written_files(plan)))


def parents_of(sources: Sequence[Source]) -> tuple[Parent, ...]:
    parents = []
    for source in sources:
        path, commit = source.reference.path, snapshot_revision(source.checkpoint.root)
        # What the Hub calls a model of its own; of others what the recipe does.
        name = hub_place(path).repository if is_hub_place(path) else path
        parents.append(Parent(name, commit or source.reference.revision, is_local=commit is None))
    return tuple(parents)


_DRIVE = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_NOT_IN_PATHS = r"\s\"'`,;:\[\]{}()<>|*?#+@"
_PLACES = re.compile(
    # Two parts at least, since "</s>" of a template is no path; and nothing before that makes it an address.
    rf"(?<![\w./:~<\\-])(?:~|file://)?/[^{_NOT_IN_PATHS}/]+/[^{_NOT_IN_PATHS}]*"
    rf"|~/[^{_NOT_IN_PATHS}]+"
    rf"|\b[A-Za-z]:[\\/][^{_NOT_IN_PATHS}]+"
    rf"|(?<!\\)\\\\[^{_NOT_IN_PATHS}\\]+\\[^{_NOT_IN_PATHS}]+"
)


_PLAN = "Plan digest: "


@dataclass(frozen=True, slots=True)
class Parent:
    name: str
    revision: str | None = None
    is_local: bool = False
    """Whether it was read from a local directory, so that its name is not one of the Hub's."""


def model_card(manifest: Mapping[str, Any], digest: str, parents: Sequence[Parent]) -> str:
    # Without a config they are single files of tensors, which no library is known to load.
    is_raw = not manifest["config"]
    names, method = [parent.name for parent in parents], _code(str(manifest["method"]))
    base = str(manifest["recipe"].get("base_model") or "")
    on_base = f" on the base {_code(without_places(base, names))}" if base else ""
    matter = _front_matter(() if is_raw else parents, is_raw=is_raw)
    lines = [
        "---",
        yaml_text(matter).rstrip("\n"),
        "---",
        "# Merged model",
        "",
        f"Merged by raymerge {manifest['raymerge']} with the method {method}{on_base}.",
        "",
        "## Parents",
        "",
        *(_parent_line(parent) for parent in parents),
        "",
        "## Recipe",
        "",
        _fenced(without_places(str(manifest["recipe_text"]), names)),
        "",
        "## Getting the same bytes",
        "",
        "The same recipe on the same parents gives the same plan. "
        f"{_PLAN}{_code(digest)}. Seed: {manifest['seed']}.",
        "",
    ]
    return "\n".join(lines)


def plan_in(card: str) -> str | None:
    """The digest of the plan that a model card names; None for a card that is not raymerge's."""
    match = re.search(rf"^The same recipe .*{_PLAN}`([0-9a-f]+)`", card, re.MULTILINE)
    return match[1] if match is not None else None


def shown_name(name: str) -> str:
    """A parent's name fit for publication: of a path that begins elsewhere only the last two parts."""
    name = name.removeprefix("file://")
    path = PureWindowsPath(name) if _DRIVE.match(name) else PurePosixPath(name)
    if not path.is_absolute() and path.parts[:1] not in (("~",), ("..",)):
        return name
    return "/".join([part for part in path.parts if part not in (path.anchor, "~", "..")][-2:])


def without_places(text: str, names: Sequence[str] = ()) -> str:
    """The text with absolute paths, and those of ``names`` that are such, as ``shown_name`` has them. Names
    are given because they may hold any character."""
    for name in sorted(set(names), key=len, reverse=True):
        if (shown := shown_name(name)) != name:
            plain = shown.replace("\\", r"\\")
            text = re.sub(rf"{re.escape(name)}(?![\w./-])", plain, text)
    return _PLACES.sub(lambda match: shown_name(match.group()), text)


def _front_matter(parents: Sequence[Parent], *, is_raw: bool) -> dict[str, Any]:
    matter: dict[str, Any] = {}
    bases = list(dict.fromkeys(parent.name for parent in parents if _is_of_hub(parent)))
    if bases:
        matter["base_model"] = bases
        if len(parents) > 1:
            matter["base_model_relation"] = "merge"
    if not is_raw:
        matter["library_name"] = "transformers"
    return matter | {"tags": ["merge", "raymerge"]}


def _is_of_hub(parent: Parent) -> bool:
    return not parent.is_local and is_hub_name(parent.name)


def _parent_line(parent: Parent) -> str:
    revision = f", revision {_code(parent.revision)}" if parent.revision else ""
    return f"- {_code(shown_name(parent.name))}{revision}"


def _fenced(text: str) -> str:
    """A fenced block that no run of backticks inside can close."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}yaml\n{text.rstrip()}\n{fence}"


def _code(text: str) -> str:
    """A code span on one line that no backtick inside can close."""
    flat = " ".join(text.split())
    run = _longest_run(flat)
    return f"`{flat}`" if run == 0 else f"{'`' * (run + 1)} {flat} {'`' * (run + 1)}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


_CHUNK = 8 << 20


def copy_companions(source: ReadStore, target: WriteStore, keys: Iterable[str]) -> None:
    """Copy files byte for byte and durably, in order.

    Raises CheckpointError if a file is absent (before anything is copied), or shrinks while it is read."""
    ordered = tuple(keys)
    sizes = {file.key: file.nbytes for file in source.files()}
    what = "this companion is gone since the plan was made."
    problems = [Problem(source.location(key), what, "Plan again.") for key in ordered if key not in sizes]
    if problems:
        raise CheckpointError(problems)
    for key in ordered:
        target.create(key, sizes[key])
        for offset in range(0, sizes[key], _CHUNK):
            target.write_at(key, offset, source.read(key, offset, min(_CHUNK, sizes[key] - offset)))
        target.sync(key)


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
    """xxh3-128 of every companion and of the model card, by their keys; of the files of a layout, of all that
    they hold beside elements of tensors."""

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> Provenance:
        """Raises CheckpointError if it is no provenance, or of another version; ``where`` names it."""
        try:
            provenance = _ADAPTER.validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            what = f"it is no provenance that this version of raymerge knows: {place}: {first['msg']}."
            raise CheckpointError(
                Problem(where, what, "Use the raymerge that made it, or merge again.")
            ) from error
        for key in provenance.files:
            if not is_key(key):
                what = f"it has a digest of {key!r}, which is no file of a checkpoint."
                raise CheckpointError(Problem(where, what, "Merge again."))
        return provenance


_ADAPTER = TypeAdapter(Provenance)


def provenance(
    plan: Plan,
    sources: Sequence[Source],
    *,
    recipes: Sequence[str],
    versions: Mapping[str, str],
    numerics: Mapping[str, str],
    files: Mapping[str, str],
    digests: Mapping[int, str],
) -> Provenance:
    """``digests`` are xxh3-128 in hex of each op that was made, by its number."""
    return Provenance(
        format=1,
        plan=plan.digest,
        recipes=tuple(recipes),
        method=str(plan.manifest["method"]),
        seed=int(plan.manifest["seed"]),
        versions=dict(versions),
        numerics=dict(numerics),
        sources=tuple(_sources(plan, sources)),
        tensors=dict(_tensors(plan, digests)),
        files=dict(files),
    )


def _tensors(plan: Plan, digests: Mapping[int, str]) -> Iterator[tuple[str, TensorRecord]]:
    by_tensor = _tensor_digests(plan, digests)
    for line in tensor_lines(plan):
        pieces = by_tensor[line.name]
        digest = pieces[0] if len(pieces) == 1 else xxhash.xxh3_128_hexdigest("".join(pieces).encode())
        yield line.name, TensorRecord(_disposition(line.disposition), line.sources, digest, len(pieces))


def _disposition(use: str) -> Literal["merged", "copied", "converted"]:
    if use == Use.MERGED:
        return "merged"
    return "copied" if use == Use.COPIED else "converted"


def _tensor_digests(plan: Plan, digests: Mapping[int, str]) -> dict[str, list[str]]:
    """Digests of the pieces of each tensor in order; an op copied from another has that op's."""
    names = plan["tensors"].column("name").to_pylist()
    pieces: dict[str, list[str]] = {name: [] for name in names}
    for index, row in enumerate(plan["ops"].select(["tensor", "copy_of"]).to_pylist()):
        made = row["copy_of"] if row["copy_of"] >= 0 else index
        pieces[names[row["tensor"]]].append(digests.get(made, ""))
    return pieces


def _sources(plan: Plan, sources: Sequence[Source]) -> Iterator[SourceRecord]:
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for row in plan["dispositions"].select(["source", "disposition", "rule"]).to_pylist():
        disposition = row["disposition"]
        is_dropped = disposition == Use.DROPPED
        counts[row["source"]][f"{disposition}: {row['rule']}" if is_dropped else disposition] += 1
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
            dispositions=dict(sorted(counts[index].items())),
        )


def _files(
    holding: Holding, planned: Sequence[tuple[str, int, str]], *, is_known: bool
) -> Iterator[SourceFile]:
    versions = {file.key: file.version for file in holding.files}
    for key, nbytes, header in planned:
        digest = blob_digest(holding.root, key, versions.get(key, "")) if is_known else None
        yield SourceFile(key, nbytes, header, digest)


STORY = f"{RECORD}/run.json"
"""When and where it was made, and where the sources lay: another for each run."""
_PACKAGES = ("raymerge", "torch", "numpy", "ray", "transformers")


def write_provenance(
    store: WriteStore, record: Provenance, sources: Sequence[Source], *, seconds: float, run: str
) -> tuple[str, ...]:
    """Write the provenance and the story of a run, of this name if it has one; returns their keys."""
    _write(store, PROVENANCE_FILE, asdict(record))
    _write(store, STORY, _story(sources, seconds, run))
    return PROVENANCE_FILE, STORY


def library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


@contextmanager
def record_at(place: str) -> Iterator[Path]:
    """A local directory with a checkpoint's record: itself, or a temporary copy; raises CheckpointError."""
    if not is_remote(place):
        yield Path(parse_place(place).text).absolute()
        return
    with open_store(place) as store:
        keys = [each.key for each in store.files() if each.key.startswith(f"{RECORD}/")]
    with fetched(place, keys) as directory:
        yield directory


def read_record(store: ReadStore, key: str) -> dict[str, Any]:
    """A JSON object of the record; raises CheckpointError where it is absent or none."""
    info = store.info(key)
    where = store.location(key)
    if info is None:
        what = "is missing: this checkpoint does not tell what it was made of."
        raise CheckpointError(Problem(where, what, "Only what raymerge has merged does; merge again."))
    try:
        record = json.loads(store.read(key, 0, info.nbytes))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(Problem(where, f"is not JSON ({error}).", "Merge again.")) from error
    if not isinstance(record, dict):
        raise CheckpointError(Problem(where, "is no JSON object.", "Merge again."))
    return record


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


def places_in(story: Mapping[str, Any]) -> dict[str, str]:
    places = story.get("places")
    return {str(name): str(place) for name, place in places.items()} if isinstance(places, Mapping) else {}


def _place(holding: Holding) -> str:
    """Where a source lies, as an absolute path or an address; for a single file, that file."""
    root = shown(holding.root) if is_remote(holding.root) else os.path.abspath(holding.root)
    is_file = isinstance(holding, Checkpoint) and holding.is_single_file
    return f"{root}/{holding.files[0].key}" if is_file else root


def _write(store: WriteStore, key: str, content: Mapping[str, Any]) -> None:
    store.write_atomic(key, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
