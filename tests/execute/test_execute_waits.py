"""How often a merge waits for a GPU beside the copies that it waits for anyway."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from kits.counted_gpu import counted_waits
from kits.merge_cases import make_family, recipes
from kits.segment_bench import make_bench

from raymerge import device_numerics, devices


class _Stream:
    """A stream or an event that all is done on at once."""

    def __init__(self, _: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in {
        "make_stream": _Stream,
        "record_event": _Stream,
        "on_stream": lambda _: nullcontext(),
        "pinned_buffer": lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
        "peak_bytes": lambda _: 0,
    }.items():
        monkeypatch.setattr(devices, name, stand_in)
    monkeypatch.setattr(device_numerics, "check_full_float32", lambda _: None)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "most"), [("linear", 0), ("dare_ties", 0), ("slerp", 1), ("ties", 2), ("sce", 3)]
)
def test_a_merge_waits_for_passes_alone(name: str, most: int, tmp_path: Path) -> None:
    """For each tensor at most: its sample, and what each pass has found."""
    recipe = recipes(make_family(tmp_path / "models", hidden=256, layers=1))[name]
    expected = make_bench(recipe, tmp_path / "cpu")
    for number in expected.segments:
        expected.runner.run(number)
    with counted_waits() as waits:
        bench = make_bench(recipe, tmp_path / "gpu", device="meta")
        # What it is warmed up with is no part of it.
        waits.clear()
        assert not any(bench.runner.run(number).note for number in bench.segments)
        assert waits.total() <= most * len(bench.plan["tensors"])
    assert dict(bench.written()) == dict(expected.written())
