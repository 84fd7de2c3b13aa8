"""What a run takes over from an earlier one: nothing that the files do not prove."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import INLINE, Family, digests, merge, recipes

from raymerge.api import submit
from raymerge.errors import IncompleteError
from raymerge.events import Event, Planned, SegmentDone, Started
from raymerge.publish import shards as shards_module
from raymerge.publish.shards import Shards
from raymerge.storage.local.store import LocalStore


class Crash(BaseException):
    """A process that ends here; nothing in raymerge catches it."""


@pytest.fixture(scope="module")
def recipe(medium: Family) -> dict[str, Any]:
    """Several shards, of a few segments each."""
    return {**recipes(medium)["linear"], "shard_size": 1_000_000}


@pytest.fixture(scope="module")
def expected(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(recipe, output)
    return digests(output)


def _stopped(recipe: dict[str, Any], output: Path, *, after: int) -> int:
    """Stop a run at once after some segments; how many were done before and in it.

    That is as many as have receipts, of which those that came with the last one were not told of.
    """
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, SegmentDone) and sum(isinstance(each, SegmentDone) for each in events) == after:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(IncompleteError):
        submit(recipe, output, INLINE, on_event=on_event)
    (started,) = (event for event in events if isinstance(event, Started))
    done = len(_receipts(output))
    assert done >= started.done_segments + after
    return done


def _staging(output: Path) -> Path:
    (found,) = output.parent.glob(f".{output.name}.raymerge-*")
    return found


def _receipts(output: Path) -> dict[int, dict[str, str]]:
    """Digests of the rows by segment, as the ledger has them."""
    lines = (_staging(output) / "raymerge" / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line)["receipt"] for line in lines[1:]]
    return {entry["segment"]: entry["digests"] for entry in entries}


def _plan_rows(recipe: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    from raymerge.api import plan

    made = plan(recipe)
    return made["shards"].column("name").to_pylist(), made["rows"].to_pylist()


def _shard_of_a_receipt(recipe: dict[str, Any], output: Path) -> tuple[Path, dict[str, Any], int]:
    """A growing shard that a receipt speaks of, one row in it, and the segment."""
    names, rows = _plan_rows(recipe)
    segment, found = next(iter(_receipts(output).items()))
    row = rows[int(next(iter(found)))]
    return _staging(output) / f"{names[row['shard']]}.part", row, segment


@pytest.mark.parametrize("harm", ["removed", "truncated"])
def test_a_lost_shard_is_made_again_even_if_the_next_run_stops_too(
    harm: str, recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    """The run after the next finds the shard in full length, and must not believe the first run's lines."""
    output = tmp_path / "out"
    _stopped(recipe, output, after=12)
    shard, _, segment = _shard_of_a_receipt(recipe, output)
    shard.unlink() if harm == "removed" else os.truncate(shard, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "_open", _after(Shards._open, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    assert shard.exists()
    assert segment not in _receipts(output)
    merge(recipe, output)
    assert digests(output) == expected


def _after(call: Any, error: type[BaseException]) -> Any:
    """The call, and then the end of the process."""

    def ending(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        raise error

    return ending


def test_the_ledger_forgets_before_a_file_is_made_anew(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _stopped(recipe, output, after=12)
    shard, _, segment = _shard_of_a_receipt(recipe, output)
    shard.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "create", _refusing(LocalStore.create))
        with pytest.raises(Crash):
            merge(recipe, output)
    assert not shard.exists()
    assert segment not in _receipts(output)
    merge(recipe, output)
    assert digests(output) == expected


def _refusing(call: Any) -> Any:
    """Makes any file but a shard."""

    def create(self: LocalStore, key: str, nbytes: int) -> None:
        if key.startswith("model"):
            raise Crash
        call(self, key, nbytes)

    return create


def test_other_shards_keep_their_receipts(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    done = _stopped(recipe, output, after=20)
    shard, _, _ = _shard_of_a_receipt(recipe, output)
    names, rows = _plan_rows(recipe)
    gone = names.index(shard.name.removesuffix(".part"))
    lost = {s for s, found in _receipts(output).items() if any(rows[int(r)]["shard"] == gone for r in found)}
    shard.unlink()
    merged = merge(recipe, output)
    assert 0 < len(lost) < done
    assert merged.of(Started)[0].done_segments == done - len(lost)
    assert lost <= {event.segment for event in merged.of(SegmentDone)}
    assert digests(output) == expected


def test_bytes_that_a_power_cut_took_are_made_again(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_CHUNK", 1000)
    output = tmp_path / "out"
    done = _stopped(recipe, output, after=12)
    shard, row, segment = _shard_of_a_receipt(recipe, output)
    with shard.open("r+b") as file:
        file.seek(row["offset"] + row["nbytes"] - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    merged = merge(recipe, output)
    assert merged.of(Started)[0].done_segments == done - 1
    assert segment in {event.segment for event in merged.of(SegmentDone)}
    assert digests(output) == expected


def test_a_copy_that_was_lost_is_made_again_with_its_original(small: Family, tmp_path: Path) -> None:
    """A row that is written to two places is proved by both."""
    span = {"sources": [{"model": str(small.base), "layer_range": [0, 1]}]}
    recipe = {"merge_method": "passthrough", "slices": [span, span]}
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "complete", _after(lambda *_: None, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    _, rows = _plan_rows(recipe)
    copy = next(row for row in rows if row["copy_of"] >= 0)
    with (_staging(output) / "model.safetensors.part").open("r+b") as file:
        file.seek(copy["offset"])
        file.write(b"\x00" * copy["nbytes"])
    merged = merge(recipe, output)
    assert len(merged.of(SegmentDone)) > 0
    merge(recipe, tmp_path / "fresh")
    assert digests(output) == digests(tmp_path / "fresh")


def test_a_crash_between_a_shard_and_its_header_is_resumed(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    write_at = LocalStore.write_at

    def ends_at_shards(self: LocalStore, key: str, offset: int, buffer: bytes) -> None:
        if key.startswith("model"):
            raise Crash
        write_at(self, key, offset, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "write_at", ends_at_shards)
        with pytest.raises(Crash):
            merge(recipe, output)
    assert any(_staging(output).glob("model-*.part"))
    merge(recipe, output)
    assert digests(output) == expected


def test_shards_with_their_final_names_grow_again_when_a_segment_is_lost(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.runtime.driver.run.finish_companions", _after(lambda *_, **__: None, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    names, rows = _plan_rows(recipe)
    with (_staging(output) / names[0]).open("r+b") as file:
        file.seek(next(row["offset"] for row in rows if row["shard"] == 0))
        file.write(b"\x01\x02")
    merged = merge(recipe, output)
    assert 0 < len(merged.of(SegmentDone)) < merged.of(Planned)[0].segments
    assert digests(output) == expected


def test_finished_shards_are_not_touched_again(
    recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.runtime.driver.run.check_shards", _after(lambda *_: None, Crash))
        with pytest.raises(Crash):
            merge(recipe, output)
    before = {path.name: path.stat().st_mtime_ns for path in _staging(output).glob("*.safetensors")}
    merged = merge(recipe, output)
    assert merged.of(SegmentDone) == []
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")} == before
    assert digests(output) == expected
