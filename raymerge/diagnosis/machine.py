"""This machine: interpreter, packages, GPUs, memory, cores and limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from raymerge import devices
from raymerge.device_numerics import check_full_float32
from raymerge.diagnosis.check import Check, note, ok, problem
from raymerge.errors import OptionError, UserError, first_line
from raymerge.options import RunOptions
from raymerge.runtime.workers.ray_environment import OBJECT_STORE_BYTES, check_limits
from raymerge.runtime.workers.sizing import available_memory, cores_here, free_memory, layout_of
from raymerge.units import format_size

_MAIN = ("torch", "ray", "transformers", "safetensors", "pyarrow", "numba")
"""Packages that are named with their versions; the others only where they do not fit."""
_LEAST_MEMORY = 1 << 30
_GOOD_MEMORY = 4 << 30
_GOOD_FILES = 4096


def python() -> Iterator[Check]:
    where = f"{platform.system()} {platform.machine()}"
    yield ok("Python", f"{platform.python_version()} on {where}, {sys.executable}")


def packages(texts: Sequence[str] | None = None) -> Iterator[Check]:
    """Versions of what raymerge needs; ``texts``: its requirements, None for those of its installation."""
    needed = [Requirement(text) for text in (requires("raymerge") or () if texts is None else texts)]
    own = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    installed = {each.name: _version(each.name) for each in own}
    wrong = [each for each in own if not _fits(each, installed[each.name])]
    for each in wrong:
        present = installed[each.name]
        fact = f"{each.name} {present or 'is not installed'}; raymerge needs {each.specifier}."
        yield problem("packages", fact, f"Run: pip install '{each}'")
    if not wrong:
        named = ", ".join(f"{name} {installed[name]}" for name in _MAIN if installed.get(name))
        yield ok(
            "packages", f"raymerge {version('raymerge')}, {named}; all {len(own)} in the versions needed"
        )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fits(requirement: Requirement, present: str | None) -> bool:
    return present is not None and requirement.specifier.contains(present, prereleases=True)


def gpus(driver: Path = Path("/proc/driver/nvidia/version")) -> Iterator[Check]:
    build, found = devices.build_of_torch(), devices.list_gpus()
    if not found:
        yield from _without_gpu(build, driver)
    for gpu in found:
        free, total = devices.memory_of(gpu)
        name = f"{gpu.index}: {devices.name_of(gpu)}, {format_size(free)} free of {format_size(total)}"
        try:
            check_full_float32(gpu)
        except (RuntimeError, AssertionError, OptionError) as error:
            remedy = (
                "Give --device cpu, or mend driver and torch; `nvidia-smi`, `rocm-smi` or `xpu-smi` shows "
            )
            remedy += "what the driver sees."
            yield problem("GPU", f"{name}; a kernel fails there: {first_line(error)}", remedy)
        else:
            yield ok("GPU", f"{name}, {build}{_driver(driver)}; kernels run in full float32")


def _without_gpu(build: str, driver: Path) -> Iterator[Check]:
    if driver.exists():
        fact = f"the system has an NVIDIA GPU{_driver(driver)}, and torch {version('torch')} "
        fact += f"(built for {build}) cannot use it." if build else "is built without CUDA."
        remedy = "Install a build of torch that fits the driver (pytorch.org/get-started); without it "
        yield note("GPU", fact, f"{remedy}merges compute on processors.")
    else:
        yield ok("GPU", "none; merges compute on processors")


def _driver(path: Path) -> str:
    try:
        match = re.search(r"Module\s+(?:for \S+\s+)?([0-9.]+)", path.read_text(encoding="utf-8"))
    except OSError:
        match = None
    return f", driver {match[1]}" if match else ""


def kernels() -> Iterator[Check]:
    # Numba takes long to load, and no merge of Ray's needs it in its driver.
    from raymerge.kernels.jit import cache_directory

    directory = cache_directory()
    if directory is None:
        fact = "compiled loops can be kept nowhere: every process compiles them anew, for seconds."
        yield note("compiled loops", fact, "Set NUMBA_CACHE_DIR to a directory that may be written.")
    else:
        yield ok("compiled loops", f"kept in {directory}")


def memory(root: Path = Path("/")) -> Iterator[Check]:
    free, total = free_memory(root), int(psutil.virtual_memory().total)
    groups = min(available_memory(root), default=None)
    limit = ", less than the machine has: a control group limits it" if _is_less(groups) else ""
    fact = f"{format_size(free)} free of {format_size(total)}{limit}"
    if free < _LEAST_MEMORY:
        yield problem("memory", f"{fact}; a worker needs some 500 MB.", "Free some, or raise the limit.")
    elif free < _GOOD_MEMORY:
        yield note("memory", fact, "Few workers fit; `raymerge plan RECIPE` says what a merge needs.")
    else:
        yield ok("memory", fact)


def _is_less(groups: int | None) -> bool:
    return groups is not None and groups < int(psutil.virtual_memory().available)


def cores(root: Path = Path("/")) -> Iterator[Check]:
    usable, present = cores_here(root), os.cpu_count() or 1
    layout = layout_of(RunOptions(device="cpu"), (usable,), 0)
    limited = f" of {present}: affinity or a control group limits them" if usable < present else ""
    threads = f"{layout.threads} thread{'' if layout.threads == 1 else 's'}"
    workers = f"{layout.workers} worker{'' if layout.workers == 1 else 's'} of {threads}"
    yield ok("cores", f"{usable}{limited}; by default {workers}")


def limits(root: Path = Path("/"), shared: Path = Path("/dev/shm")) -> Iterator[Check]:
    """What Ray needs of the system."""
    try:
        check_limits(root)
    except UserError as error:
        yield from (problem("processes", each.what, each.remedy) for each in error.problems)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _GOOD_FILES:
        remedy = "Raise it: ulimit -n 65536."
        yield note("open files", f"{files} at once; large clusters and many shards need more.", remedy)
    else:
        yield ok("open files", "unlimited" if files == resource.RLIM_INFINITY else f"{files} at once")
    yield from shared_memory(shared)


def shared_memory(shared: Path) -> Iterator[Check]:
    try:
        free = shutil.disk_usage(shared).free
    except OSError:
        yield note(str(shared), "is not there; Ray keeps what it shares in files.", "Mount a tmpfs there.")
        return
    if free < OBJECT_STORE_BYTES:
        fact = (
            f"{format_size(free)} free; Ray shares {format_size(OBJECT_STORE_BYTES)} there, or takes files."
        )
        yield note(str(shared), fact, "Start the container with --shm-size=1g, or a larger emptyDir.")
    else:
        yield ok(str(shared), f"{format_size(free)} free, for what Ray's processes share")
