"""Finds what an output was made of, as it was then."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymerge.checkpoints.header import read_header
from raymerge.documents.faults import FaultError
from raymerge.errors import CheckpointError, Problem
from raymerge.merge_plan.files_read import SourceFile
from raymerge.merge_plan.plan import Plan
from raymerge.planner.inputs.raw import names_file
from raymerge.publish.attempt import RECORD
from raymerge.publish.ledger import NAME, Ledger
from raymerge.publish.record import STORY
from raymerge.recipes import ModelReference, parse_reference
from raymerge.runtime.driver.stage_results import stage_record
from raymerge.storage.addresses import is_remote, parent_and_name
from raymerge.storage.open import open_store
from raymerge.storage.resolve import Lookup, resolve_source
from raymerge.verifier.structure import RECORD_PLAN

_NOT_KEPT = "it is made of what a stage or another merge made, which was not kept (--keep-intermediates)"


@dataclass(slots=True)
class Located:
    """The sources of an output, by their index in its plan."""

    roots: list[str] = field(default_factory=list)
    """Their directories; "." for those that are not there."""
    files: list[SourceFile] = field(default_factory=list)
    """Their files."""
    absent: dict[int, str] = field(default_factory=dict)
    """Why tensors that read a source cannot be audited."""
    problems: list[Problem] = field(default_factory=list)
    """What the user can change about that."""


def locate_sources(plan: Plan, output: Path, given: Mapping[str, str], steps: Path) -> Located:
    """Find the sources of an output, where they were when it was made or where the user says.

    A source that is gone or no longer what it was is told, and is not in the way of the others.

    Args:
        plan: the plan that it was made by.
        output: its directory, or one that has its record.
        given: directories of sources by the names that the recipe has for them.
        steps: where the results between are, if they were kept.
    """
    found, entries = Located(), plan.manifest["sources"]
    found.problems += _unknown(given, [entry["name"] for entry in entries])
    versions = Ledger.versions(output / RECORD / NAME)
    places = _places(output)
    for number, entry in enumerate(entries):
        if "made_by" in entry:
            root, lack = _intermediate(steps, entry), _NOT_KEPT
            before: Mapping[str, str] = {}
        else:
            root, lack = _root(entry["name"], given, places), f"{entry['name']} is not there"
            is_given = entry["name"] in given
            before = {} if is_given or number >= len(versions) else versions[number]
        files = [] if root is None else _files(number, root, entry)
        if root is not None:
            lack = _changed(files, entry, before)
        found.roots.append(root or ".")
        if not lack:
            found.files += files
            continue
        found.absent[number] = lack
        if "made_by" not in entry:
            remedy = f"Say where it is as it was: --source '{entry['name']}=DIRECTORY'."
            found.problems.append(Problem(f"source {entry['name']}", f"{lack}.", remedy))
    return found


def _unknown(given: Mapping[str, str], names: list[str]) -> Iterator[Problem]:
    for name in given:
        if name not in names:
            what = f"the output has no source of this name; its sources are {', '.join(names)}."
            yield Problem(f"--source {name}", what, "Name one of these.")


def _places(output: Path) -> Mapping[str, str]:
    """Where sources lay, as the story of the run tells it."""
    try:
        found = json.loads((output / STORY).read_text(encoding="utf-8"))["places"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _intermediate(steps: Path, entry: Mapping[str, Any]) -> str | None:
    """Where the result of a stage, or of another merge, is kept; None where it is not."""
    for place in sorted(steps.iterdir()) if steps.is_dir() else ():
        if stage_record(place).get("digest") == entry["made_by"]:
            return str(place)
        try:
            manifest = json.loads((place / RECORD_PLAN / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict) and manifest.get("digest") == entry["made_by"]:
            return str(place)
    return None


def _root(name: str, given: Mapping[str, str], places: Mapping[str, str]) -> str | None:
    """The directory of a source; None where there is none."""
    try:
        reference = parse_reference(name, exists=os.path.isdir)
    except FaultError:
        return None
    tried: list[tuple[str | None, str | None]] = [(given.get(name), None)]
    if name not in given:
        tried = [(places.get(name), None), (reference.path, reference.revision)]
    for path, revision in tried:
        if path is None:
            continue
        expanded = os.path.expanduser(str(path))
        # Servers are asked for what the user names, and not for what a record says.
        is_asked = name in given and is_remote(expanded)
        if names_file(ModelReference(expanded)) and (is_asked or not is_remote(expanded)):
            return parent_and_name(expanded)[0]
        try:
            return resolve_source(expanded, revision, lookup=Lookup(offline=not is_asked))
        except CheckpointError:
            continue
    return None


def _files(number: int, root: str, entry: Mapping[str, Any]) -> list[SourceFile]:
    """The files of a source that are there."""
    with open_store(root) as store:
        infos = store.infos([key for key, _, _ in entry["files"]])
    return [
        SourceFile(number, root, each.key, each.nbytes, each.version)
        for each in infos.values()
        if each is not None
    ]


def _changed(files: list[SourceFile], entry: Mapping[str, Any], before: Mapping[str, str]) -> str:
    """How a source differs from what was read; "" where it does not, as far as headers and times tell."""
    name, there = entry["name"], {file.key: file for file in files}
    for key, nbytes, digest in entry["files"]:
        file = there.get(key)
        if file is None:
            return f"{name} has no {key} any more"
        if file.nbytes != nbytes or not _has_header(file, digest):
            return f"{key} of {name} is another file than was merged"
        if before.get(key, file.version) != file.version:
            return f"{key} of {name} was written to since it was merged"
    return ""


def _has_header(file: SourceFile, digest: str) -> bool:
    if not file.key.endswith(".safetensors"):
        return True
    try:
        with open_store(file.root) as store:
            return read_header(store, file.key, file.nbytes, file.version).digest == digest
    except CheckpointError:
        return False
