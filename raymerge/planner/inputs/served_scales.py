"""What servers make of matrices that each have a scale of the whole matrix beside those of blocks.

They join several matrices (q, k and v; gate and up) and take one of these scales for all, without a look at
the others: vLLM the first one among experts, and the largest number elsewhere. What has another scale is then
read so many times too large or too small. FP8 with one scale a matrix needs none of this: it is decoded, and
encoded again under the largest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.architectures.roles import EXPERT_NUMBER, JoinedMatrix, joined_matrix
from raymerge.architectures.rules import Rules
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.checkpoints.quantisation.formats import formats
from raymerge.dtypes import DType
from raymerge.storage.store import ReadStore, num_readers, read_together

_WEIGHT = ".weight"
ScaleValues: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Numbers of the scales of whole matrices, by name."""


@dataclass(frozen=True, slots=True)
class JoinedScales:
    """The scales of the whole matrix that the parts of a joined matrix have."""

    is_expert: bool
    format: Format
    scales: tuple[StoredTensor, ...]
    """In the order in which their matrices are joined."""

    @property
    def names(self) -> Iterator[str]:
        return (each.name for each in self.scales)

    def factors(self, values: ScaleValues) -> Mapping[str, float]:
        """How many times as large as they are servers take the numbers of each part, by its scale's name."""
        own = np.stack([values[each.name] for each in self.scales])
        taken = own[0] if self.is_expert else own.max(axis=0)
        is_divisor = self.format.tensor_scale == "divisor"
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(own == taken, 1.0, own / taken if is_divisor else taken / own)
            farthest = np.abs(np.log(times)).argmax(axis=1)
        return dict(zip(self.names, times[np.arange(len(own)), farthest].tolist(), strict=True))


def joined_scales(stored: Mapping[str, StoredTensor], rules: Rules) -> tuple[JoinedScales, ...]:
    """Those of all stored tensors of which servers join several."""
    endings = {f"{_WEIGHT}{form.parts['tensor_scale']}": form for form in formats() if form.has_two_scales}
    by_matrix: dict[tuple[JoinedMatrix, str], dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        ending = next((each for each in endings if name.endswith(each)), None)
        part = name.removesuffix(ending or "")
        joined = joined_matrix(f"{part}{_WEIGHT}", rules) if ending else None
        if ending and joined and tensor.dtype is DType.F32:
            by_matrix.setdefault((joined, ending), {})[part] = tensor
    return tuple(
        JoinedScales(EXPERT_NUMBER.search(matrix.module + ".") is not None, endings[ending], ordered)
        for (matrix, ending), own in by_matrix.items()
        for ordered in (tuple(own[part] for part in matrix.parts if part in own),)
        if len(ordered) > 1 and len({each.shape for each in ordered}) == 1
    )


def scale_values(store: ReadStore, matrices: Sequence[JoinedScales]) -> ScaleValues:
    """Raises CheckpointError: a scale cannot be read."""
    scales = [scale for each in matrices for scale in each.scales]
    stored = read_together(store, scales, readers=num_readers(store))
    return {scale.name: np.frombuffer(data, "<f4").astype(np.float64) for scale, data in stored}


def misread(matrices: Sequence[JoinedScales], values: ScaleValues) -> list[Mapping[str, float]]:
    """The factors of the matrices that have other than 1."""
    factors = (each.factors(values) for each in matrices)
    return [each for each in factors if any(times != 1 for times in each.values())]


def misspelt(matrices: Sequence[JoinedScales], values: ScaleValues) -> Iterator[str]:
    """A sentence for each format whose scales look like those of its other spelling."""
    for form in dict.fromkeys(each.format for each in matrices):
        own = [name for each in matrices if each.format == form for name in each.names]
        if sentence := form.misspelt({name: values[name][0] for name in own}):
            yield sentence


def misread_text(matrices: Sequence[Mapping[str, float]]) -> str:
    """A sentence, but for its end, about what ``misread`` gives; the matrix that is farthest off is named."""
    parts = [each for factors in matrices for each in factors.items()]
    name, times = max(parts, key=lambda each: abs(math.log(each[1])) if each[1] > 0 else math.inf)
    return (
        f"{len(matrices)} times matrices that servers join have different scales of the whole matrix. vLLM "
        f"takes one for all of them, and so serves what has {name} {times:.3g} times as large as it is"
    )
