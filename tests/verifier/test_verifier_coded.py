"""The blocks of quantised weights, and the bytes of copies, as an audit looks at them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.verifier.audit import check_bytes, constant_bytes
from raymerge.verifier.findings import Findings
from raymerge.verifier.stored import Blocks

COLUMNS, WIDTH, HEIGHT, ROWS = 10, 4, 2, 6


class _Known(Blocks):
    """Blocks of ``HEIGHT`` rows and ``WIDTH`` columns of known numbers; the last of a row is narrower."""

    def __init__(self, magnitudes: NDArray[np.float32]) -> None:
        encoding = SimpleNamespace(format=FP8_BLOCK, band=HEIGHT, block=(HEIGHT, WIDTH))
        codes = SimpleNamespace(encoding=encoding, columns=COLUMNS, total=magnitudes.size)
        super().__init__(cast(Any, codes), first=0, total=magnitudes.size, is_joined=False)
        self._magnitudes = magnitudes

    def _rows_of(self, band: int) -> NDArray[np.float32]:
        return self._magnitudes[band * HEIGHT : (band + 1) * HEIGHT]


def test_every_block_that_a_run_touches_has_its_largest_element_looked_at() -> None:
    magnitudes = (
        np.random.default_rng(3).permutation(ROWS * COLUMNS).astype(np.float32).reshape(ROWS, COLUMNS)
    )
    blocks = _Known(magnitudes)
    places = np.arange(magnitudes.size).reshape(ROWS, COLUMNS)
    for start in range(magnitudes.size):
        for stop in range(start + 1, magnitudes.size + 1):
            rows, columns = np.divmod(np.arange(start, stop), COLUMNS)
            touched = set(zip((rows // HEIGHT).tolist(), (columns // WIDTH).tolist(), strict=True))
            largest = set()
            for band, left in touched:
                block = np.s_[band * HEIGHT : (band + 1) * HEIGHT, left * WIDTH : (left + 1) * WIDTH]
                largest.add(int(places[block].flat[magnitudes[block].argmax()]))
            assert largest <= set(blocks.peaks(start, stop))


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_copy_is_compared_to_its_end_however_it_is_read(place: int) -> None:
    content = bytearray(range(12))
    wanted = constant_bytes(bytes(content))
    content[place] ^= 1
    row = SimpleNamespace(tensor="a", made_by=0, place=SimpleNamespace(key="f", offset=0, nbytes=12))
    output = SimpleNamespace(read=lambda _, offset, nbytes: bytes(content[offset : offset + nbytes]))
    findings = Findings(most=9)
    digests = {0: xxhash.xxh3_128_hexdigest(bytes(content))}
    check_bytes(cast(Any, row), cast(Any, output), digests, findings, where="here", wanted=wanted, chunk=4)
    (problem,) = findings.problems
    assert f"from its byte {place} on it is not what the plan says" in problem.what
