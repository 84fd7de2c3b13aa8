"""The limit program copies the right bytes and reads all others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks import limit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def _file(path: Path, nbytes: int) -> Path:
    path.write_bytes(os.urandom(nbytes))
    return path


@given(
    nbytes=st.lists(st.integers(0, 40_000), min_size=1, max_size=4),
    block=st.sampled_from([4096, 8192, 32768]),
)
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("direct", [False, True])
def test_the_first_input_is_copied(
    direct: bool, nbytes: list[int], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [_file(tmp_path / f"in{number}", size) for number, size in enumerate(nbytes)]
    with monkeypatch.context() as patched:
        patched.setattr(limit, "BLOCK_NBYTES", block)
        limit.run_limit(inputs, tmp_path / "out", direct=direct)
    assert (tmp_path / "out").read_bytes() == inputs[0].read_bytes()
    assert not (tmp_path / "out.part").exists()


def test_every_byte_of_every_input_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [_file(tmp_path / f"in{number}", 10_000 * number + 1) for number in range(4)]
    requests: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def noting(fd: int, buffers: list[memoryview], offset: int) -> int:
        found = preadv(fd, buffers, offset)
        requests.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, found))
        return found

    monkeypatch.setattr(limit, "BLOCK_NBYTES", 4096)
    monkeypatch.setattr(os, "preadv", noting)
    limit.run_limit(inputs, tmp_path / "out")
    for path in inputs:
        runs = sorted((offset, found) for name, offset, found in requests if name == path.name)
        assert sum(found for _, found in runs) == path.stat().st_size
        assert [offset for offset, _ in runs] == list(range(0, path.stat().st_size, 4096))
