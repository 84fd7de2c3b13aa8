"""A sample of what ``make chaos`` injects: the same faults, less often."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from chaos.faults import FAULTS, Fault, tried
from chaos.nodes import NODE_FAULTS
from chaos.storage import STORAGE_FAULTS
from chaos.table import LEAST_KILLS, Row, table, total
from chaos.yard import Yard, make_yard
from kits.marks import slow_but

ROOT = Path(__file__).resolve().parents[2]
LISTED = (*FAULTS, *STORAGE_FAULTS, *NODE_FAULTS)
SAMPLED = [fault for fault in LISTED if fault.sample]
QUICK = [fault for fault in SAMPLED if fault.inject.__name__ == "disk_errors"]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return make_yard(tmp_path_factory.mktemp("yard"), layers=12, is_forked=True)


@pytest.mark.parametrize("fault", slow_but(SAMPLED, *QUICK), ids=lambda fault: fault.inject.__name__)
def test_a_fault_costs_only_what_was_in_work(fault: Fault, yard: Yard) -> None:
    row = tried(fault, yard, times=fault.sample, seed=0)
    if row.skipped:
        pytest.skip(row.skipped)
    assert row.is_kept, table([row])


def test_a_broken_promise_shows() -> None:
    """The table itself is tested: what must not happen is a line that says no."""
    kept = Row("a", injected=3, redone=2, right=2, runs=2)
    assert kept.verdict == "kept"
    assert "| a | 3 | 2 | 0 | yes, 2 of 2 | 0 |" in table([kept])
    left_out = Row("c", skipped="mounting takes root")
    assert left_out.verdict == "left out"
    assert not left_out.is_kept
    assert not left_out.is_broken
    assert "| c | left out: mounting takes root |" in table([left_out])
    for broken in (
        Row("b", injected=3, right=1, runs=2),
        Row("b", injected=3, right=2, runs=2, lost_bytes=1),
        Row("b", injected=0, right=2, runs=2),
        Row("b", injected=3, wanted=4, right=2, runs=2),
        Row("b", injected=3, right=2, runs=2, broken="exit code 1"),
    ):
        assert broken.verdict == "BROKEN"
        assert "**no**" in table([broken])


def test_a_whole_says_how_much_it_has_shown_and_is_not_content_with_less() -> None:
    workers = Row("a", injected=91, wanted=91, right=7, runs=7, is_random=True)
    drivers = Row("b", injected=109, wanted=109, right=13, runs=13, is_random=True)
    others = Row("c", injected=500, right=9, runs=9), Row("d", skipped="mounting takes root")
    whole = total([workers, drivers, *others])
    assert whole.is_enough
    shown = "random kills: 200 in 20 runs, of which 20 are right; lines broken: 0, left out: 1"
    assert str(whole) == shown
    for less in (
        [workers, *others],
        [workers, replace(drivers, injected=108, wanted=108), *others],
        [workers, replace(drivers, right=12, runs=12), *others],
        [workers, replace(drivers, right=12), *others],
        [workers, drivers, replace(others[0], lost_bytes=1)],
    ):
        assert not total(less).is_enough


def test_the_list_asks_for_as_many_kills_as_a_whole_is_to_have() -> None:
    assert sum(fault.times for fault in LISTED if fault.is_random) >= LEAST_KILLS


def test_the_page_names_every_fault_and_tests_that_exist() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    _, section = page.split("## What is promised, and which test shows it")
    rows = [line.split("|")[1:-1] for line in section.split("## Limits")[0].splitlines() if line[:1] == "|"]
    lines = {line.strip() for row in rows[2:] for line in row[1].split(";") if line.strip()}
    assert lines == {fault.title for fault in LISTED}
    named = re.findall(r"`(tests/[\w./]+)`", section)
    assert [name for name in named if not (ROOT / name).exists()] == []
