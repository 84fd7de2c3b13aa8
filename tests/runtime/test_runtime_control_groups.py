"""What control groups allow: of both versions, the process's own and all that it lies in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raymerge.errors import OptionError
from raymerge.runtime.workers.ray_environment import check_limits
from raymerge.runtime.workers.sizing import (
    available_memory,
    available_processes,
    core_quotas,
    cores_here,
    free_memory,
    oom_kills,
)

GIB = 1 << 30
V2 = "sys/fs/cgroup"


def _machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine whose process is in these groups, with files of groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_group_of_version_2_above_the_process_counts(tmp_path: Path) -> None:
    files = {
        f"{V2}/cpu.max": "900000 100000\n",
        f"{V2}/job/cpu.max": "max 100000\n",
        f"{V2}/job/step/cpu.max": "150000 50000\n",
        f"{V2}/other/cpu.max": "100000 100000\n",
        f"{V2}/job/memory.max": f"{4 * GIB}\n",
        f"{V2}/job/memory.current": f"{3 * GIB}\n",
        f"{V2}/job/memory.stat": f"inactive_file {GIB}\n",
        f"{V2}/job/step/memory.max": "max\n",
    }
    root = _machine(tmp_path, "0::/job/step\n", files)
    assert sorted(core_quotas(root)) == [3.0, 9.0]
    assert list(available_memory(root)) == [2 * GIB]


def test_groups_of_version_1_count_for_what_they_limit(tmp_path: Path) -> None:
    files = {
        f"{V2}/cpu/batch/job/cpu.cfs_quota_us": "250000\n",
        f"{V2}/cpu/batch/job/cpu.cfs_period_us": "100000\n",
        f"{V2}/cpu/batch/cpu.cfs_quota_us": "-1\n",
        f"{V2}/cpu/batch/cpu.cfs_period_us": "100000\n",
        f"{V2}/cpu/cpu.cfs_quota_us": "800000\n",
        f"{V2}/cpu/cpu.cfs_period_us": "100000\n",
        f"{V2}/cpuset/batch/cpu.cfs_quota_us": "100000\n",
        f"{V2}/cpuset/batch/cpu.cfs_period_us": "100000\n",
        f"{V2}/memory/memory.limit_in_bytes": f"{GIB}\n",
        f"{V2}/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
        f"{V2}/memory/memory.stat": f"total_inactive_file {GIB // 4}\n",
    }
    groups = "9:cpuset:/batch\n5:cpu,cpuacct:/batch/job\n4:memory:/gone\n1:name=systemd:/x\n"
    root = _machine(tmp_path, groups, files)
    assert sorted(core_quotas(root)) == [2.5, 8.0]
    assert list(available_memory(root)) == [3 * GIB // 4]
    assert free_memory(root) <= 3 * GIB // 4


@pytest.mark.parametrize(
    ("groups", "files", "rooms"),
    [
        ("0::/pod/a\n", {"pod/a/pids.max": "max", "pod/pids.max": "300", "pod/pids.current": "180"}, [120]),
        ("0::/pod/a\n", {"pod/a/pids.max": "150", "pod/a/pids.current": "151", "pids.max": "9"}, [-1, 9]),
        # In a container the path may be the host's, and the mounted group its own.
        ("8:pids:/docker/abc\n0::/\n", {"pids/pids.max": "100", "pids/pids.current": "4"}, [96]),
        ("8:pids:/\n", {"pids/pids.max": "max", "pids/pids.current": "4", "pids.max": "1"}, []),
    ],
)
def test_an_embedded_ray_is_refused_where_a_group_has_too_few_processes_left(
    groups: str, files: dict[str, str], rooms: list[int], tmp_path: Path
) -> None:
    root = _machine(tmp_path, groups, {f"{V2}/{name}": f"{text}\n" for name, text in files.items()})
    assert list(available_processes(root)) == rooms
    if not rooms:
        check_limits(root)
        return
    with pytest.raises(OptionError) as caught:
        check_limits(root)
    (problem,) = caught.value.problems
    assert problem.where == "ray"
    assert f"more than 128 threads, and no more than {max(0, min(rooms))} may be started here" in problem.what
    assert "of the container (pids.max)" in problem.what
    assert problem.remedy == "Raise it, or give --inline to run without Ray."


@pytest.mark.parametrize("text", ["", "odd\n", "max\n", "0 100000\n", "100000 0\n", "-1 5\n", "\u00b2 1\n"])
def test_what_says_no_number_is_no_limit(tmp_path: Path, text: str) -> None:
    assert list(core_quotas(_machine(tmp_path, "0::/\n", {f"{V2}/cpu.max": text}))) == []


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("odd", 8)],
)
def test_cores_are_those_of_the_affinity_and_the_narrowest_quota(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores_here(tmp_path) == 8
    files = {f"{V2}/job/cpu.max": quota, f"{V2}/cpu.max": "700000 100000" if cores < 8 else "max 1"}
    assert cores_here(_machine(tmp_path, "0::/job\n", files)) == cores


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job\n", {f"{V2}/job/memory.events": "low 0\noom 4\noom_kill 3\n"}, 3),
        ("4:memory:/job\n", {f"{V2}/memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n"}, 2),
        # A group that counts comes before the machine, whose other groups are no business of ours.
        (
            "0::/job\n",
            {f"{V2}/job/memory.events": "oom_kill 0\n", "proc/vmstat": "nr_free_pages 7\noom_kill 9\n"},
            0,
        ),
        ("0::/job\n", {"proc/vmstat": "nr_free_pages 7\noom_kill 9\n"}, 9),
        ("0::/job\n", {"proc/vmstat": "nr_free_pages 7\n"}, None),
        ("", {}, None),
    ],
)
def test_processes_that_were_ended_for_want_of_memory_are_counted(
    groups: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    assert oom_kills(_machine(tmp_path, groups, files)) == expected
