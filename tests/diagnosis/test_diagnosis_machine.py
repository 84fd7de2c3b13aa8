"""What is said of this machine, with limits and devices that a test makes up; and questions unanswered."""

from __future__ import annotations

import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymerge import devices
from raymerge.diagnosis import machine
from raymerge.diagnosis.check import Check, Question, examine, ok
from raymerge.errors import OptionError, Problem

GIB = 1 << 30


def _said(checks: Iterator[Check]) -> list[tuple[str, str]]:
    return [(check.verdict.value, check.fact) for check in checks]


def _asked(ask: Callable[[], Any], *, seconds: float = 5, is_far: bool = False) -> Question:
    return Question("it", ask, seconds, "Look there.", is_far=is_far)


def test_a_question_without_answer_is_left_behind() -> None:
    began, free = time.monotonic(), threading.Event()
    checks = list(examine([_asked(free.wait, seconds=0.05), _asked(lambda: [ok("next", "well")])]))
    free.set()
    assert [(each.verdict, each.topic) for each in checks] == [("problem", "it"), ("ok", "next")]
    assert (checks[0].fact, checks[0].remedy) == ("no answer within 0 seconds.", "Look there.")
    assert time.monotonic() - began < 2


def test_what_waits_for_others_waits_beside_the_rest_and_is_told_in_order() -> None:
    meeting = threading.Barrier(2)

    def far() -> list[Check]:
        meeting.wait(5)
        return [ok("far", "")]

    checks = examine(
        [_asked(lambda: [ok("near", "")]), *[_asked(far, is_far=True)] * 1, _asked(far, is_far=True)]
    )
    assert [each.topic for each in checks] == ["near", "far", "far"]


@pytest.mark.parametrize(
    ("error", "fact", "remedy"),
    [
        (OptionError(Problem("s3://b", "is away.", "Wake it.")), "s3://b: is away.", "Wake it."),
        (OptionError(Problem("--address", "is away.", "Wake it.")), "is away.", "Wake it."),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied.", "Look there."),
        (RuntimeError("odd\nmore"), "looking at it failed: RuntimeError: odd", "Look there."),
    ],
)
def test_a_question_that_fails_is_a_problem(error: Exception, fact: str, remedy: str) -> None:
    def ask() -> Iterator[Check]:
        raise error
        yield

    (check,) = examine([_asked(ask)])
    assert (check.verdict, check.fact, check.remedy) == ("problem", fact, remedy)


def test_packages_that_do_not_fit_are_named_with_what_to_install() -> None:
    needed = [
        "torch>=2.6",
        "numpy>=99",
        "no-such-package>=1",
        "pip>=999; extra == 'docs'",
        "x; python_version < '3'",
    ]
    checks = list(machine.packages(needed))
    assert [check.verdict for check in checks] == ["problem", "problem"]
    assert re.fullmatch(r"numpy [0-9.]+; raymerge needs >=99\.", checks[0].fact)
    assert checks[0].remedy == "Run: pip install 'numpy>=99'"
    assert checks[1].fact == "no-such-package is not installed; raymerge needs >=1."


def test_the_packages_here_are_those_that_raymerge_needs() -> None:
    ((verdict, fact),) = _said(machine.packages())
    assert verdict == "ok"
    assert f"torch {torch.__version__}" in fact


def test_a_gpu_that_torch_cannot_use_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_gpus", tuple)
    monkeypatch.setattr(devices, "build_of_torch", str)
    driver = tmp_path / "version"
    assert _said(machine.gpus(driver)) == [("ok", "none; merges compute on processors")]
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n")
    ((verdict, fact),) = _said(machine.gpus(driver))
    assert verdict == "note"
    assert re.search(r"driver 570\.86\.10, and .* is built without CUDA\.$", fact)


def test_a_gpu_whose_kernels_fail_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(device: torch.device) -> None:
        if device.index == 1:
            raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(devices, "list_gpus", lambda: [torch.device("cuda", index) for index in range(2)])
    monkeypatch.setattr(devices, "name_of", lambda _: "H100")
    monkeypatch.setattr(devices, "memory_of", lambda _: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(devices, "build_of_torch", lambda: "CUDA 12.8")
    monkeypatch.setattr(machine, "check_full_float32", check)
    checks = list(machine.gpus(tmp_path / "no driver"))
    assert [check.verdict for check in checks] == ["ok", "problem"]
    assert checks[0].fact == "0: H100, 70.00 GB free of 80.00 GB, CUDA 12.8; kernels run in full float32"
    assert "no kernel image" in checks[1].fact


def test_loops_that_are_compiled_anew_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _said(machine.kernels())[0][0] == "ok"
    monkeypatch.setattr("raymerge.kernels.jit.cache_directory", lambda: None)
    (check,) = machine.kernels()
    assert (check.verdict, "NUMBA_CACHE_DIR" in check.remedy) == ("note", True)


def _group(root: Path, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    group = root / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    for name, text in files.items():
        (group / name.replace("_", ".", 1)).write_text(text)
    return root


def test_memory_and_cores_of_a_container_are_those_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    root = _group(
        tmp_path, memory_max=str(2 * GIB), memory_current="0", memory_stat="", cpu_max="300000 100000"
    )
    assert _said(machine.memory(root)) == [
        ("note", "2.15 GB free of 68.72 GB, less than the machine has: a control group limits it")
    ]
    ((verdict, fact),) = _said(machine.cores(root))
    assert (verdict, fact) == (
        "ok",
        "3 of 16: affinity or a control group limits them; by default 1 worker of 3 threads",
    )
    (root / "sys/fs/cgroup/pod/memory.current").write_text(str(2 * GIB - 10**8))
    assert _said(machine.memory(root))[0][0] == "problem"


def test_limits_that_hinder_ray_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _group(tmp_path, pids_max="100", pids_current="90")
    real, unlimited = resource.getrlimit, resource.RLIM_INFINITY
    limits = {resource.RLIMIT_NOFILE: (256, 256), resource.RLIMIT_NPROC: (unlimited, unlimited)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind) or real(kind))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    checks = {check.topic: check for check in machine.limits(root, tmp_path)}
    assert [check.verdict for check in checks.values()] == ["problem", "note", "note"]
    assert "no more than 10 may be started here" in checks["processes"].fact
    assert "--shm-size" in checks[str(tmp_path)].remedy
