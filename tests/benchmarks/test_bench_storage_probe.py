"""What is measured of storage and cores: all that is written, in any length, with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.storage_probe import WRITE_NBYTES, measure_machine

from raymerge.runtime.workers.sizing import cores_here
from raymerge.storage.local.store import LocalStore


@pytest.mark.parametrize("nbytes", [5000, WRITE_NBYTES, 3 * WRITE_NBYTES + 4097])
def test_a_file_of_any_length_is_measured(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, place = tmp_path / "model", tmp_path / "place"
    file.write_bytes(b"x" * nbytes)
    place.mkdir()
    written: list[tuple[int, int]] = []
    write_extent = LocalStore.write_extent

    def noting(store: LocalStore, key: str, offset: int, buffer: memoryview) -> None:
        written.append((offset, buffer.nbytes))
        write_extent(store, key, offset, buffer)

    monkeypatch.setattr(LocalStore, "write_extent", noting)
    gives = measure_machine(file, place)
    assert min(gives.read, gives.write, gives.per_core) > 0
    assert gives.cores == cores_here()
    # Every byte once, in blocks.
    ends = [offset + length for offset, length in sorted(written)]
    assert [0, *ends] == [*(offset for offset, _ in sorted(written)), nbytes]
    assert list(place.iterdir()) == []
