"""The staging directory: where a checkpoint grows beside its place, until it is verified and renamed into it.

It is named by the plan's digest. Whoever writes a segment of that plan writes the same bytes to the same place,
so a worker that was given up and goes on writing does no harm.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raymerge.errors import OptionError, Problem, TargetError
from raymerge.planner.tables import Plan, save_plan
from raymerge.runtime.ledger import NAME, Ledger
from raymerge.units import format_size

RECORD = "raymerge"
"""Directory of the run record within a checkpoint: plan, ledger and recipe."""
_LOCK = ".lock"


class Staging:
    """The staging directory of one plan for one output place."""

    def __init__(self, output: Path, plan: Plan) -> None:
        self.output = output
        self.root = output.parent / f"{_prefix(output)}{plan.digest[:16]}"
        self._plan = plan

    @property
    def ledger_path(self) -> Path:
        """Where the ledger is."""
        return self.root / RECORD / NAME

    def prepare(self, conditions: Mapping[str, Any], *, replace: bool) -> Ledger:
        """Make or take up the directory.

        Raises:
            TargetError: the output place is taken, or an unfinished run differs from this one.
            OptionError: there is not enough room.
        """
        self.check(replace=replace)
        self._discard_others()
        self._check_conditions(conditions, replace=replace)
        if not self.ledger_path.exists():
            self._check_room()
            self.root.mkdir(parents=True, exist_ok=True)
            save_plan(self._plan, self.root / RECORD / "plan")
            recipe = self.root / RECORD / "recipe.yml"
            recipe.write_text(str(self._plan.manifest["recipe_text"]), encoding="utf-8")
        return Ledger(self.ledger_path, conditions)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory against a second driver on this machine.

        Raises:
            TargetError: another process holds it.
        """
        with (self.root / _LOCK).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise TargetError(
                    Problem(
                        str(self.output), "another raymerge process is making this very checkpoint now.",
                        "Wait for it, or stop it first.",
                    )
                ) from error
            yield

    def check(self, *, replace: bool) -> None:
        """Find what is wrong with the output place, changing nothing.

        Raises:
            TargetError: it is taken, or an unfinished run of another plan is beside it.
        """
        self._check_output(replace=replace)
        for other in () if replace else self._others():
            difference = _difference(_manifest(other), self._plan.manifest)
            raise TargetError(
                Problem(
                    str(self.output),
                    f"an unfinished run is in {other.name}, and it was of another plan: {difference}.",
                    "Go back to that recipe and those sources to resume it, or give --replace to discard it.",
                )
            )

    def publish(self, *, replace: bool) -> None:
        """Rename the directory into the output place, durably; what was there goes only after that."""
        (self.root / _LOCK).unlink(missing_ok=True)
        old = self.output.parent / f".{self.output.name}.replaced"
        self._check_output(replace=replace)
        if self.output.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.output.rename(old)
        self.root.rename(self.output)
        _sync_directory(self.output.parent)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _check_output(self, *, replace: bool) -> None:
        if self.output.is_dir():
            if any(self.output.iterdir()) and not replace:
                raise TargetError(
                    Problem(
                        str(self.output), "this directory is not empty.",
                        "Choose another -o, or give --replace to replace it once the merge is verified.",
                    )
                )
        elif self.output.exists():
            raise TargetError(
                Problem(str(self.output), "a file is in the place of the output directory.", "Choose another -o.")
            )

    def _others(self) -> list[Path]:
        """Staging directories of other plans for the same place."""
        found = sorted(self.output.parent.glob(glob.escape(_prefix(self.output)) + "*"))
        return [other for other in found if other != self.root]

    def _discard_others(self) -> None:
        for other in self._others():
            shutil.rmtree(other, ignore_errors=True)

    def _check_conditions(self, conditions: Mapping[str, Any], *, replace: bool) -> None:
        before = Ledger.conditions(self.ledger_path)
        if before is None or before == json.loads(json.dumps(conditions)):
            if before is None and self.root.exists():
                self.discard()
            return
        if replace:
            self.discard()
            return
        raise TargetError(
            Problem(
                str(self.output),
                f"an unfinished run of this recipe was begun under other conditions: "
                f"{_difference(before, conditions)}.",
                "Restore them to resume it, or give --replace to start again.",
            )
        )

    def _check_room(self) -> None:
        wanted = sum(self._plan["shards"].column("nbytes").to_pylist())
        place = self.output.parent
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if free < wanted:
            raise OptionError(
                Problem(
                    str(self.output.parent),
                    f"the output takes {format_size(wanted)}, and {format_size(free)} are free there.",
                    "Free some space or choose another -o.",
                )
            )


def _prefix(output: Path) -> str:
    return f".{output.name}.raymerge-"


def _manifest(root: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((root / RECORD / "plan" / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first few facts in which two records differ, as one phrase."""
    if not old:
        return "its record cannot be read"
    keys = ("recipe", "sources", "raymerge", "numerics", "versions")
    found: list[str] = []
    for key in keys:
        found += _differences(key, old.get(key), json.loads(json.dumps(new.get(key))))
    shown = found[:4] + ([f"and {len(found) - 4} more"] if len(found) > 4 else [])
    return "; ".join(shown) or "it was planned by another version of raymerge"


def _differences(place: str, old: Any, new: Any) -> list[str]:
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [each for key in keys for each in _differences(f"{place}.{key}", old.get(key), new.get(key))]
    if _are_lists(old, new) and len(old) == len(new):
        pairs = zip(old, new, strict=True)
        return [each for i, (a, b) in enumerate(pairs) for each in _differences(f"{place}[{i}]", a, b)]
    return [f"{place} was {json.dumps(old)}, is {json.dumps(new)}"]


def _are_lists(old: Any, new: Any) -> bool:
    return isinstance(old, Sequence) and isinstance(new, Sequence) and not isinstance(old, str | bytes)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
