"""The ledger: what it says after any crash."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.execute.receipts import Receipt
from raymerge.publish.ledger import Ledger

CONDITIONS = {"numerics": {"device": "cpu"}, "versions": []}


def _receipt(segment: int) -> Receipt:
    sums = {"3": (0.1 * segment, 1e-30)}
    return Receipt(segment, 10, 20, 0.5, "worker-0", {"3": "ab" * 16}, encoding_errors=sums)


def _filled(path: Path, count: int) -> Ledger:
    ledger = Ledger(path, CONDITIONS)
    for segment in range(count):
        ledger.record(_receipt(segment))
    return ledger


def test_receipts_come_back_as_they_were(tmp_path: Path) -> None:
    ledger = _filled(tmp_path / "ledger", 3)
    assert ledger.receipts() == {segment: _receipt(segment) for segment in range(3)}
    assert Ledger(tmp_path / "ledger", {"other": 1}).receipts() == ledger.receipts()


def test_the_files_are_those_that_were_published_last(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = _filled(path, 2)
    assert Ledger.files(path) is None
    for size in (1, 2):
        ledger.record_files({"model.safetensors": [size, 5, 6]})
    assert Ledger.files(path) == {"model.safetensors": [2, 5, 6]}
    assert ledger.receipts() == {segment: _receipt(segment) for segment in range(2)}
    with path.open("a") as file:
        file.write('{"files": 3}\n')
    assert Ledger.files(path) == {"model.safetensors": [2, 5, 6]}
    ledger.begin(ledger.receipts())
    assert Ledger.files(path) is None


def test_nothing_was_published_without_a_ledger(tmp_path: Path) -> None:
    assert Ledger.files(tmp_path / "absent") is None


def test_conditions_are_those_it_was_begun_under(tmp_path: Path) -> None:
    _filled(tmp_path / "ledger", 1)
    Ledger(tmp_path / "ledger", {"numerics": {"device": "cuda"}})
    assert Ledger.conditions(tmp_path / "ledger") == CONDITIONS


def test_there_are_no_conditions_without_a_ledger(tmp_path: Path) -> None:
    assert Ledger.conditions(tmp_path / "absent") is None


@pytest.mark.parametrize("text", ["", '{"condit', "[1]\n", '{"receipt": {}}\n', '{"conditions": 3}\n'])
def test_a_ledger_without_a_readable_first_line_has_no_conditions(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text(text)
    assert Ledger.conditions(path) is None


@given(kept=st.integers(1, 400))
@settings(deadline=None, max_examples=40)
def test_cut_anywhere_it_keeps_whole_lines_and_can_be_continued(
    kept: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "ledger"
    _filled(path, 3)
    first = len(path.read_bytes().split(b"\n")[0]) + 1
    os.truncate(path, min(path.stat().st_size, first + kept))
    ledger = Ledger(path, CONDITIONS)
    before = ledger.receipts()
    assert before == {segment: _receipt(segment) for segment in range(len(before))}
    ledger.record(_receipt(9))
    assert ledger.receipts() == {**before, 9: _receipt(9)}
    assert Ledger.conditions(path) == CONDITIONS


def test_a_line_that_is_no_text_is_passed_over(tmp_path: Path) -> None:
    ledger = _filled(tmp_path / "ledger", 2)
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b"\xff\xfe\x00garbage\n")
    assert set(ledger.receipts()) == {0, 1}


def test_a_ledger_begun_anew_has_only_what_it_is_given(tmp_path: Path) -> None:
    ledger = _filled(tmp_path / "ledger", 3)
    ledger.begin({1: _receipt(1)})
    assert ledger.receipts() == {1: _receipt(1)}
    assert Ledger.conditions(tmp_path / "ledger") == CONDITIONS
    ledger.record(_receipt(2))
    assert set(ledger.receipts()) == {1, 2}


def test_a_crash_while_a_ledger_is_begun_anew_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = _filled(tmp_path / "ledger", 3)

    def no_disk(*_: object) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(os, "replace", no_disk)
    with pytest.raises(OSError, match="on fire"):
        ledger.begin({})
    assert set(ledger.receipts()) == {0, 1, 2}


def test_every_line_is_json_and_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(1), fsync(descriptor)))
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(1), fdatasync(descriptor)))
    _filled(tmp_path / "ledger", 2)
    lines = (tmp_path / "ledger").read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["conditions", "receipt", "receipt"]
    # The first line with its file's name, then each receipt.
    assert len(synced) == 4


def test_receipts_that_come_together_are_made_durable_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, synced = Ledger(tmp_path / "ledger", CONDITIONS), list[int]()
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(1), fdatasync(descriptor)))
    ledger.record(*map(_receipt, range(5)))
    ledger.record()
    assert len(synced) == 1
    assert ledger.receipts() == {segment: _receipt(segment) for segment in range(5)}
