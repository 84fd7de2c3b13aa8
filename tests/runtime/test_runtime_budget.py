"""The default budget, and the budget that this machine cannot keep."""

from __future__ import annotations

import psutil
import pytest

from raymerge.errors import OptionError
from raymerge.merge_plan.memory import SMALLEST_BUDGET, Projection
from raymerge.options import RunOptions
from raymerge.runtime.workers import sizing
from raymerge.runtime.workers import sizing as budget_module
from raymerge.runtime.workers.sizing import check_free, fit_budget, fit_units, usual_budget

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 cores and 100 GiB of free memory, without a GPU."""
    memory = psutil.virtual_memory()._replace(available=100 * GIB, total=128 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(sizing, "cores_here", lambda: 64)
    monkeypatch.setattr("raymerge.devices.list_gpus", list)


def test_the_default_is_half_of_what_is_free_shared_out() -> None:
    assert usual_budget(RunOptions(), 4 * GIB) == GIB // 4
    assert usual_budget(RunOptions(inline=True), 16 * GIB) == GIB // 2
    assert usual_budget(RunOptions(inline=True), GIB // 2) == GIB // 4
    assert usual_budget(RunOptions(), 0) == SMALLEST_BUDGET


def _default_for(least: int, options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> int:
    """The budget that a plan gets whose least is given."""

    def projected(plan: None, budget: int, *, lanes: int) -> Projection:
        assert plan is None
        return Projection(budget, lanes, 0, "a", least, "a", "linear")

    monkeypatch.setattr(budget_module, "project", projected)
    return fit_budget(None, options).budget  # type: ignore[arg-type]


def test_a_plan_that_needs_more_than_is_usual_gets_it_where_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget_module, "free_memory", lambda: 16 * GIB)
    inline = RunOptions(inline=True)
    assert _default_for(GIB // 4, inline, monkeypatch) == GIB // 2
    assert _default_for(3 * GIB, inline, monkeypatch) == 3 * GIB
    for least, options in (
        (9 * GIB, inline),
        (3 * GIB, RunOptions(inline=True, memory=2 * GIB)),
        (3 * GIB, RunOptions(address="far:6379")),
        (3 * GIB, RunOptions(workers=8)),
    ):
        with pytest.raises(OptionError, match=f"smallest budget that works is {least} bytes"):
            _default_for(least, options, monkeypatch)


def test_a_running_cluster_is_not_judged_by_this_machine() -> None:
    far = RunOptions(address="far:6379", memory=1 << 50)
    assert usual_budget(far, 0) == GIB
    check_free(far)


def test_more_than_is_free_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "free_memory", lambda: 6_000_000_000)
    check_free(RunOptions(workers=2, memory=3_000_000_000))
    check_free(RunOptions(workers=200))
    said = (
        r"--memory: 2 workers with 4\.00 GB each would use 8\.00 GB, and 6\.00 GB are free here\. "
        r"Give at most 3\.00 GB, or fewer --workers\."
    )
    with pytest.raises(OptionError, match=said):
        check_free(RunOptions(workers=2, memory=4_000_000_000))
    with pytest.raises(OptionError, match="1 worker with"):
        check_free(RunOptions(inline=True, memory=7_000_000_000))


# Units of stages


def _units(options: RunOptions, *, least: int, num_units: int = 1) -> int:
    return fit_units(options, least=least, num_units=num_units, title="router rows")


def test_a_unit_gets_what_a_merge_would_get() -> None:
    assert _units(RunOptions(workers=2), least=GIB // 4) == GIB // 2
    assert _units(RunOptions(memory=3 * GIB), least=GIB) == 3 * GIB
    assert _units(RunOptions(address="auto"), least=GIB) == GIB


def test_a_unit_that_needs_more_gets_it_from_half_of_what_is_free() -> None:
    """Units that are fewer than the workers leave some of these idle."""
    assert _units(RunOptions(workers=8), least=40 * GIB, num_units=1) == 40 * GIB
    assert _units(RunOptions(workers=8), least=6 * GIB, num_units=100) == 6 * GIB
    with pytest.raises(OptionError, match=r"--memory: .* too little for router rows\. .* 42949672960 bytes"):
        _units(RunOptions(workers=8), least=40 * GIB, num_units=2)


@pytest.mark.parametrize("options", [RunOptions(memory=GIB), RunOptions(address="auto")])
def test_what_the_user_or_a_cluster_has_is_not_passed_over(options: RunOptions) -> None:
    with pytest.raises(OptionError, match=rf"smallest budget that works is {2 * GIB} bytes"):
        _units(options, least=2 * GIB)
