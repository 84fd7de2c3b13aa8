"""Scales of codes that are read, as rows of the plan's tables, each distinct one once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.merge_plan.expressions import Scales


class ScaleNumbers:
    """Numbers scales in the order in which inputs name them, and encodings in that of scales."""

    def __init__(self) -> None:
        self._numbers: dict[Scales, int] = {}
        self._encodings: dict[Encoding, int] = {}

    def number(self, scales: Scales | None) -> int:
        """Number of some scales; -1 for none."""
        if scales is None:
            return -1
        self._encodings.setdefault(scales.encoding, len(self._encodings))
        return self._numbers.setdefault(scales, len(self._numbers))

    def rows(self) -> list[tuple[Any, ...]]:
        """Rows of the table ``scales``."""
        return [
            (
                self._encodings[each.encoding],
                each.columns,
                each.key,
                each.offset,
                each.nbytes,
                each.tensor_key,
                each.tensor_offset,
            )
            for each in self._numbers
        ]

    def encodings(self) -> list[Encoding]:
        """What the codes mean, in the order of their numbers."""
        return list(self._encodings)


def read_scales(row: Sequence[Any], encodings: Sequence[Encoding]) -> Scales:
    """Scales from their row of ``scales``."""
    encoding, columns, key, offset, nbytes, tensor_key, tensor_offset = row
    return Scales(encodings[encoding], columns, key, offset, nbytes, tensor_key, tensor_offset)
