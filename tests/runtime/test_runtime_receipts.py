"""What receipts say of memory and of devices that failed: told as events, and kept in the ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kits.merge_cases import Family, merge, recipes

from raymerge.events import DeviceFailed, SegmentDone
from raymerge.execute.receipts import Receipt
from raymerge.options import RunOptions
from raymerge.publish.ledger import Ledger
from raymerge.publish.segment_work import SegmentsRunner

SMALL = RunOptions(inline=True, memory=16 << 20)


def _marking(monkeypatch: pytest.MonkeyPatch, **marks: dict[int, object]) -> None:
    """Have receipts of segments say more: a field's values by the segment."""
    run = SegmentsRunner.run

    def marked(self: SegmentsRunner, number: int, budget: int | None = None) -> Receipt:
        given = {name: values[number] for name, values in marks.items() if number in values}
        return replace(run(self, number, budget), **given)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentsRunner, "run", marked)


def test_a_failed_device_is_an_event_and_stays_in_the_record(
    medium: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _marking(monkeypatch, note={3: "an illegal access"})
    merged = merge(recipes(medium)["linear"], tmp_path / "out", SMALL)
    assert merged.of(DeviceFailed) == [DeviceFailed("inline", 3, "an illegal access")]
    kept = Ledger(tmp_path / "out" / "raymerge" / "ledger.jsonl", {}).receipts()
    assert [number for number, receipt in kept.items() if receipt.note] == [3]
    assert kept[3].note == "an illegal access"


def test_the_larger_peak_is_told(medium: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _marking(monkeypatch, peak_rss={0: 5, 1: 7}, peak_device={0: 9, 1: 0})
    merged = merge(recipes(medium)["linear"], tmp_path / "out", SMALL)
    peaks = {event.segment: event.peak_bytes for event in merged.of(SegmentDone)}
    assert (peaks[0], peaks[1]) == (9, 7)


def test_a_ledger_of_before_is_still_read(tmp_path: Path) -> None:
    receipt = {
        "segment": 4,
        "read_bytes": 1,
        "written_bytes": 2,
        "seconds": 0.5,
        "worker": "worker-0",
        "digests": {"7": "ab"},
    }
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"conditions": {}}\n' + json.dumps({"receipt": receipt}) + "\n")
    (found,) = Ledger(path, {}).receipts().values()
    assert (found.segment, found.note, found.peak_rss, found.peak_device) == (4, "", 0, 0)
    assert found.encoding_errors == {}
