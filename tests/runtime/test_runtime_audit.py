"""An audit by workers of Ray finds what one in this process finds; a stopped one says so."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import Family, merge, recipes

from raymerge.api import AuditOptions, AuditVerdict, RunOptions, audit
from raymerge.errors import IncompleteError
from raymerge.events import Event, Planned, SegmentDone, Started
from raymerge.publish.ledger import Ledger
from raymerge.runtime.driver import interruptions
from raymerge.verifier.audit import Auditor
from raymerge.verifier.findings import Findings

INLINE = RunOptions(inline=True, threads=1)


@pytest.fixture(scope="module")
def damaged(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge of dozens of segments, with a byte in three places turned round."""
    root = tmp_path_factory.mktemp("damaged") / "out"
    merge(recipes(medium)["ties"], root)
    (shard,) = root.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    for part in (3, 5, 7):
        content[len(content) * part // 8] ^= 0x40
    shard.write_bytes(content)
    return root


def _found(verdict: AuditVerdict) -> AuditVerdict:
    """What does not hang on time."""
    return replace(verdict, seconds=0.0)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_workers_find_what_one_process_finds(damaged: Path) -> None:
    wanted, events = AuditOptions(0.5, seed=9), list[Event]()
    alone = audit(damaged, wanted, INLINE)
    spread = audit(damaged, wanted, RunOptions(workers=2, threads=1), on_event=events.append)
    assert _found(spread) == _found(alone)
    assert alone.num_problems >= 3
    made = [event for event in events if isinstance(event, SegmentDone)]
    (planned,) = (event for event in events if isinstance(event, Planned))
    assert len(made) == planned.segments > 12
    (started,) = (event for event in events if isinstance(event, Started))
    # Which of the two makes how many of so short segments is chance.
    assert started.workers == ("worker-0", "worker-1")
    assert {event.worker for event in made} <= {*started.workers}


def test_problems_beyond_those_that_are_shown_are_counted(damaged: Path) -> None:
    everything = audit(damaged, AuditOptions(1.0, seed=9), INLINE)
    few = audit(damaged, AuditOptions(1.0, seed=9, most=1), INLINE)
    assert len(few.problems) == 1
    assert few.num_problems == everything.num_problems == len(everything.problems) > 1
    assert few.problems == everything.problems[:1]


def test_without_a_seed_other_elements_are_drawn_each_time(damaged: Path) -> None:
    seeds = {audit(damaged, options=INLINE).seed for _ in range(3)}
    assert len(seeds) == 3


def test_an_audit_leaves_the_checkpoint_as_it_is(damaged: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in damaged.parent.rglob("*")
            if path.is_file()
        }

    before = state()
    audit(damaged, AuditOptions(0.01), INLINE)
    assert state() == before


def test_without_a_ledger_no_byte_counts_as_proved(damaged: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(damaged, tmp_path / "out"))
    (root / "raymerge" / "ledger.jsonl").unlink()
    verdict = audit(root, AuditOptions(0.01), INLINE)
    assert verdict.num_problems >= verdict.tensors
    assert "no digest" in str(verdict.problems)


def test_a_stopped_audit_ends_with_3(damaged: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, SegmentDone):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(IncompleteError, match=r"stopped with \d+ of \d+ segments audited"):
        audit(damaged, AuditOptions(0.01), INLINE, on_event=stop)


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)])
def test_a_segment_in_hand_is_given_up(
    signals: tuple[int, ...], damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that would go on for long ends when the time after a signal is over."""
    plainly = Auditor.audit

    def hang(self: Auditor, segment: int) -> tuple[Findings, int]:
        for each in signals:
            os.kill(os.getpid(), each)
        assert self._aborted.wait(20)
        return plainly(self, segment)

    monkeypatch.setattr(Auditor, "audit", hang)
    monkeypatch.setattr(interruptions, "GRACE_SECONDS", 0.0)
    with pytest.raises(IncompleteError, match=r"stopped at once\. The same command begins anew"):
        audit(damaged, AuditOptions(0.01), INLINE)


def _with_versions(line: dict[str, Any], versions: list[Any]) -> None:
    if "conditions" in line:
        line["conditions"]["versions"] = versions


def _with_row(line: dict[str, Any]) -> None:
    if "receipt" in line:
        line["receipt"]["digests"]["x"] = "y"


def test_versions_that_are_damaged_are_none(damaged: Path, tmp_path: Path) -> None:
    versions = [5, {"files": [1]}, {"files": [["a"]]}, {"name": "a"}, {"files": [["a", "b"], [3, "c"]]}]
    root = _edited(damaged, tmp_path, lambda line: _with_versions(line, versions))
    assert Ledger.versions(root / "raymerge" / "ledger.jsonl") == [{}, {}, {}, {}, {"a": "b"}]
    assert audit(root, AuditOptions(0.01, seed=1), INLINE).num_problems >= 1


def test_receipts_of_no_rows_are_none(damaged: Path, tmp_path: Path) -> None:
    root = _edited(damaged, tmp_path, _with_row)
    assert "no digest" in str(audit(root, AuditOptions(0.01, seed=1), INLINE).problems)


def _edited(damaged: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy with every line of its ledger changed."""
    root = Path(shutil.copytree(damaged, tmp_path / "out"))
    ledger = root / "raymerge" / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines:
        change(line)
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root
