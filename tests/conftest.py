"""What every test may count on: no network, no waiting for the disk or for other threads, and the reference
packs where they lie beside the checkout."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Inherited by every subprocess that a test starts. PYTHONHASHSEED stays as it is: no result depends on it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads of torch that wait for each other would keep the cores of the other tests busy meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# numpy's sums of products have threads of their own, which do not heed that.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Every merge asks for the versions of the same packages, and each answer parses a long file.
importlib.metadata.version = functools.cache(importlib.metadata.version)
# What is imported stays: looking through it for garbage again and again takes seconds.
gc.disable()

settings.register_profile("usual", max_examples=50)
settings.load_profile("usual")

TESTS = Path(__file__).resolve().parent
SHARED = TESTS.parents[1] / "shared"
OF_DISKS = tuple(TESTS / name for name in ("benchmarks", "storage"))
"""Tests that want files on the disk, or out of the cache, when they were synced."""
COMPILING = "test_shared_conformance.py"
"""The first of all files: it compiles most loops."""
WITHOUT_LOOPS = ("planner", "recipes", "architectures", "manifests", "profiles", "documents")
"""Folders for the other processes meanwhile, which would compile the same loops for other tests."""
LONG = (
    "runtime/test_runtime_remote.py",
    "runtime/test_runtime_ray.py",
    "runtime/test_runtime_chain.py",
    "runtime/test_runtime_stage.py",
    "chaos/test_chaos_sample.py",
    "runtime/test_runtime_bytes.py",
    "quantised/test_quantised_merges.py",
    "model_types/test_model_types_merge.py",
    "moe_families/test_moe_families_merge.py",
    "gpu/test_gpu_merges.py",
    "gpu/test_gpu_worker.py",
    "gpu/test_gpu_mutants.py",
    "methods/test_methods_kit.py",
    "methods/test_methods_sce.py",
    "methods/test_methods_arcs.py",
    "planner/test_planner_planned.py",
    "planner/test_planner_adapted.py",
)
"""Files that take ten seconds or more, and those among plans that use loops: before the rest, so that no
process has one to itself at the end."""


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no earlier test of this process had connected it to Ray."""
    if ray := sys.modules.get("ray"):
        monkeypatch.setattr(ray, "is_initialized", lambda: False)


def pytest_collection_finish() -> None:
    if comparison := sys.modules.get("torch.testing._comparison"):
        # Else assert_close imports a second's worth of modules, for tensors on many machines.
        comparison.__dict__["_HAS_DTENSOR"] = False
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unsampled(items)
    names = (COMPILING, *WITHOUT_LOOPS, *LONG)
    place = {TESTS / name: number for number, name in enumerate(names)}
    rest = len(names)
    items.sort(key=lambda item: place.get(item.path, place.get(item.path.parent, rest)))


def mark_unsampled(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked ``sample(n)`` all but n, evenly spread, are slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        marker = each[0].get_closest_marker("sample")
        assert marker is not None
        (number,) = marker.args
        usual = {index * len(each) // number for index in range(number)}
        for index, item in enumerate(each):
            if index not in usual:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """A merge syncs dozens of small files. No test cuts the power, so in this process nobody waits for that;
    a descriptor that is none is still refused."""
    with pytest.MonkeyPatch.context() as patched:
        if not any(item.path.is_relative_to(each) for each in OF_DISKS):
            for name in ("fsync", "fdatasync"):
                patched.setattr(os, name, _is_open, raising=False)
        return (yield)


def _is_open(descriptor: int) -> None:
    os.fstat(descriptor)


@pytest.fixture(scope="session")
def shared_root() -> Path:
    """The folder ``../shared`` beside the checkout, with the conformance and the behaviour pack."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside the checkout")
    return SHARED
