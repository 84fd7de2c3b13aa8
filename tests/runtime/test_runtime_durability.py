"""The order of syncs, renames and records: what a power cut at any moment may not take."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits.durability import Durability, record_durability
from kits.merge_cases import Family, merge, recipes

from raymerge.options import RunOptions
from raymerge.publish.shards import Shards

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the paths of descriptors in /proc")

REPLACE = RunOptions(inline=True, replace=True)
JOURNAL = "events.jsonl"
"""For people: what a power cut takes of it is missed by nobody."""


class Crash(BaseException):
    """A process that ends here; nothing in raymerge catches it."""


def _not_durable(seen: Durability, call: str, path: Path) -> list[str] | None:
    """What a program needs that lives through power cuts.

    A file has its data before it gets its name (records, shards, leases), a directory all that is in it.
    What was thrown away keeps its other name before its files go: otherwise half of it might be taken up.
    A receipt is believed later, so the ledger and the shards of which it speaks are there under their names.
    """
    if call in ("rename", "link") and path.is_file():
        return [] if seen.has_data(path) else ["its data"]
    if call == "rename" and path.is_dir():
        return [name for name in seen.lost(path) if name != JOURNAL]
    discarded = next((each for each in path.parents if ".discarded-" in each.name), None)
    if call == "unlink" and discarded is not None:
        return [] if seen.has_name(discarded) else [f"the name of {discarded.name}"]
    if call == "write" and path.name == "ledger.jsonl":
        staging = path.parents[1]
        spoken_of = (staging, path.parent, path, *staging.glob("*.safetensors*"))
        return [each.name for each in spoken_of if not seen.has_name(each)]
    return None


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Durability]:
    with pytest.MonkeyPatch.context() as patch:
        yield record_durability(patch, tmp_path, _not_durable)


@pytest.fixture
def linear(small: Family) -> dict[str, Any]:
    return recipes(small)["linear"]


def _crash(*_: object, **__: object) -> None:
    raise Crash


def _stopped_before(target: Any, name: str, recipe: dict[str, Any], output: Path) -> None:
    """A run that ends where a function would be called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, _crash)
        with pytest.raises(Crash):
            merge(recipe, output)


def test_what_a_merge_needs_is_durable_in_time(
    linear: dict[str, Any], tmp_path: Path, seen: Durability
) -> None:
    merge(linear, tmp_path / "out")
    assert seen.violations == []
    assert seen.checked == {"write", "rename", "link"}
    assert seen.has_name(tmp_path / "out")
    assert seen.lost(tmp_path / "out") == [JOURNAL]


def test_a_resumed_merge_syncs_the_headers_that_it_wrote_again(
    linear: dict[str, Any], tmp_path: Path, seen: Durability
) -> None:
    _stopped_before(Shards, "complete", linear, tmp_path / "out")
    merge(linear, tmp_path / "out")
    assert seen.violations == []
    assert seen.lost(tmp_path / "out") == [JOURNAL]


def test_what_is_thrown_away_is_so_durably_before_its_files_are_deleted(
    linear: dict[str, Any], small: Family, tmp_path: Path, seen: Durability
) -> None:
    _stopped_before(Shards, "complete", linear, tmp_path / "out")
    merge(recipes(small)["slerp"], tmp_path / "out", REPLACE)
    assert "unlink" in seen.checked
    assert seen.violations == []


def test_the_old_output_goes_after_the_new_one_is_durably_in_its_place(
    linear: dict[str, Any], small: Family, tmp_path: Path, seen: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(linear, tmp_path / "out")
    names: list[bool] = []
    remove = shutil.rmtree

    def removes(path: Path, **options: Any) -> None:
        if ".replaced" in path.name:
            names.append(seen.has_name(tmp_path / "out"))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", removes)
    merge(recipes(small)["slerp"], tmp_path / "out", REPLACE)
    assert names == [True]
    assert seen.violations == []
