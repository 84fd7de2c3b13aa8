"""Finishes a directory whose shards are all written: companions, card, config, and the index last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from raymerge.checkpoints.files import INDEX_FILE
from raymerge.errors import CheckpointError, Problem, VerificationError
from raymerge.merge_plan.tables import Plan, index_bytes
from raymerge.planner.config import config_bytes
from raymerge.planner.inputs.sources import Source
from raymerge.storage.hub import hub_place, is_hub_place, snapshot_revision
from raymerge.storage.store import ReadStore, WriteStore


def finish_companions(
    plan: Plan, donor: ReadStore, target: WriteStore, *, companions: Sequence[str], parents: Sequence[Parent]
) -> None:
    """Copy the donor's companions, and write those of the plan and the model card."""
    copy_companions(donor, target, kept_companions(plan, companions))
    for name, content in written_files(plan).items():
        target.write_atomic(name, content)
    target.write_atomic("README.md", model_card(plan.manifest, plan.digest, parents).encode())


def kept_companions(plan: Plan, companions: Sequence[str]) -> tuple[str, ...]:
    """The donor's companions but those that the plan replaces or leaves out."""
    others = {*plan["files"].column("name").to_pylist(), *plan.manifest["left_out"]}
    return tuple(key for key in companions if key not in others)


def written_files(plan: Plan) -> Mapping[str, bytes]:
    """The plan's own files beside the weights, by name."""
    return {row["name"]: row["content"] for row in plan["files"].to_pylist()}


def check_shards(plan: Plan, target: ReadStore) -> None:
    """Compare every shard's header with the plan; raises VerificationError."""
    files = {file.key: file for file in target.files()}
    problems: list[Problem] = []
    for shard in plan["shards"].to_pylist():
        file = files.get(shard["name"])
        if file is None or file.nbytes != shard["nbytes"]:
            size = "absent" if file is None else f"{file.nbytes} bytes long"
            what = f"it is {size}, the plan says {shard['nbytes']} bytes."
            problems.append(Problem(shard["name"], what, "Merge again."))
        elif target.read(shard["name"], 0, len(shard["header"])) != shard["header"]:
            problems.append(Problem(shard["name"], "its header is not the planned one.", "Merge again."))
    if problems:
        raise VerificationError(problems)


def finish_config(
    plan: Plan, donor: ReadStore, target: WriteStore, *, donor_config: Mapping[str, Any]
) -> None:
    """Write config.json, unless only tensors are merged, and then the index; keeps an unchanged config's
    bytes.
    """
    for name, content in config_files(plan, donor, donor_config).items():
        target.write_atomic(name, content)
    target.sync_directory()


def config_files(plan: Plan, donor: ReadStore, donor_config: Mapping[str, Any]) -> Mapping[str, bytes]:
    """What ``finish_config`` writes, by name, in its order."""
    config, found = plan.manifest["config"], dict[str, bytes]()
    if config:
        found["config.json"] = _donor_text(donor) if config == dict(donor_config) else config_bytes(config)
    shards = plan["shards"].column("name").to_pylist()
    if len(shards) > 1:
        found[INDEX_FILE] = index_bytes(plan)
    return found


def finished_files(plan: Plan, companions: Sequence[str]) -> frozenset[str]:
    """Every file of a finished checkpoint but the record of its run."""
    shards = plan["shards"].column("name").to_pylist()
    index = [INDEX_FILE] if len(shards) > 1 else []
    config = ["config.json"] if plan.manifest["config"] else []
    kept = kept_companions(plan, companions)
    return frozenset((*shards, *index, *config, "README.md", *kept, *written_files(plan)))


def parents_of(sources: Sequence[Source]) -> tuple[Parent, ...]:
    parents = []
    for source in sources:
        path, commit = source.reference.path, snapshot_revision(source.checkpoint.root)
        # What the Hub calls a model of its own; of others what the recipe does.
        name = hub_place(path).repository if is_hub_place(path) else path
        parents.append(Parent(name, commit or source.reference.revision, is_local=commit is None))
    return tuple(parents)


def _donor_text(donor: ReadStore) -> bytes:
    size = next(file.nbytes for file in donor.files() if file.key == "config.json")
    return donor.read("config.json", 0, size)


_DRIVE = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_NOT_IN_PATHS = r"\s\"'`,;:\[\]{}()<>|*?#+@"
_PLACES = re.compile(
    # Two parts at least, since "</s>" of a template is no path; and nothing before that makes it an address.
    rf"(?<![\w./:~<\\-])(?:~|file://)?/[^{_NOT_IN_PATHS}/]+/[^{_NOT_IN_PATHS}]*"
    rf"|~/[^{_NOT_IN_PATHS}]+"
    rf"|\b[A-Za-z]:[\\/][^{_NOT_IN_PATHS}]+"
    rf"|(?<!\\)\\\\[^{_NOT_IN_PATHS}\\]+\\[^{_NOT_IN_PATHS}]+"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Parent:
    name: str
    revision: str | None = None
    is_local: bool = False
    """Whether it was read from a local directory, so that its name is not one of the Hub's."""


def model_card(manifest: Mapping[str, Any], digest: str, parents: Sequence[Parent]) -> str:
    """README.md, with every model of the recipe in recipe order."""
    # Without a config they are single files of tensors, which no library is known to load.
    is_raw = not manifest["config"]
    names, method = [parent.name for parent in parents], _code(str(manifest["method"]))
    base = str(manifest["recipe"].get("base_model") or "")
    on_base = f" on the base {_code(without_places(base, names))}" if base else ""
    matter = _front_matter(() if is_raw else parents, is_raw=is_raw)
    lines = [
        "---",
        yaml.safe_dump(matter, sort_keys=False, allow_unicode=True).rstrip("\n"),
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
        f"Plan digest: {_code(digest)}. Seed: {manifest['seed']}.",
        "",
    ]
    return "\n".join(lines)


def shown_name(name: str) -> str:
    """A parent's name fit for publication: only the last two parts of an absolute path."""
    name = name.removeprefix("file://")
    path = PureWindowsPath(name) if _DRIVE.match(name) else PurePosixPath(name)
    if not path.is_absolute() and not name.startswith("~"):
        return name
    return "/".join([part for part in path.parts if part not in (path.anchor, "~")][-2:])


def without_places(text: str, names: Sequence[str] = ()) -> str:
    """The text with absolute paths, and those of ``names`` that are such, as ``shown_name`` has them. Names
    are given because they may hold any character.
    """
    for name in sorted(set(names), key=len, reverse=True):
        if (shown := shown_name(name)) != name:
            plain = shown.replace("\\", r"\\")
            text = re.sub(rf"{re.escape(name)}(?![\w./-])", plain, text)
    return _PLACES.sub(lambda found: shown_name(found.group()), text)


def _front_matter(parents: Sequence[Parent], *, is_raw: bool) -> dict[str, Any]:
    matter: dict[str, Any] = {}
    bases = list(dict.fromkeys(parent.name for parent in parents if _is_of_hub(parent)))
    if bases:
        matter["base_model"] = bases
    if not is_raw:
        matter["library_name"] = "transformers"
    return matter | {"tags": ["merge", "raymerge"]}


def _is_of_hub(parent: Parent) -> bool:
    return not parent.is_local and _HUB_ID.fullmatch(parent.name) is not None


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
_OURS = frozenset({"config.json", "README.md"})
_NAMED_AS_OURS = (
    "this companion has the name of a file that the merge writes.",
    "Rename it in the source, or take it out there.",
)
_GONE = ("this companion is gone since the plan was made.", "Plan again.")


def copy_companions(source: ReadStore, target: WriteStore, keys: Iterable[str]) -> None:
    """Copy files byte for byte and durably, in order.

    Raises CheckpointError if a file is absent or has the name of a file that the merge writes (before
    anything is copied), or if it shrinks while it is read.
    """
    wanted = tuple(keys)
    sizes = {file.key: file.nbytes for file in source.files()}
    problems = [
        Problem(source.location(key), *_NAMED_AS_OURS if _is_ours(key) else _GONE)
        for key in wanted
        if _is_ours(key) or key not in sizes
    ]
    if problems:
        raise CheckpointError(problems)
    for key in wanted:
        target.create(key, sizes[key])
        for offset in range(0, sizes[key], _CHUNK):
            target.write_at(key, offset, source.read(key, offset, min(_CHUNK, sizes[key] - offset)))
        target.sync(key)


def _is_ours(key: str) -> bool:
    ends = (".safetensors", ".safetensors.index.json")
    return key in _OURS or key.startswith("raymerge/") or key.endswith(ends)
