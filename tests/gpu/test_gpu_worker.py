"""Workers of Ray that have the simulated GPU, on a cluster that offers it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kits.merge_cases import make_family, merge, receipts_of, recipes
from kits.simulated_gpu import without_gpu

pytestmark = [pytest.mark.ray, without_gpu]

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_worker_gives_the_bytes_of_the_processor(tmp_path: Path) -> None:
    """Asked for a GPU, and free to take it."""
    made = recipes(make_family(tmp_path / "models", layers=1))
    cases = {"ties": "cuda", "iso_c": "auto"}
    jobs = [(made[name], device, str(tmp_path / name)) for name, device in cases.items()]
    # The driver, and the workers that it starts.
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    found = subprocess.run(
        [sys.executable, "-m", "kits.gpu_worker", json.dumps(jobs)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert found.returncode == 0, found.stderr
    started = [json.loads(line) for line in found.stdout.splitlines()]
    assert started == [["cuda", ""], ["cuda", "iso_c decomposes matrices"]]
    for name in cases:
        merge(made[name], tmp_path / f"{name} alone")
        alone, together = (tmp_path / each / "model.safetensors" for each in (f"{name} alone", name))
        assert together.read_bytes() == alone.read_bytes()
        receipts = receipts_of(tmp_path / name)
        assert all(each["peak_device"] > 0 and not each["note"] for each in receipts)
