"""Weighted means of FP8 with scales of blocks, which stay such: decoded, combined and encoded in one call.

Of quantised giants nearly all bytes are of this kind. Piece by piece, with float32 in between, numbers go
through memory several times, and calls take longer than the arithmetic.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from raymerge.checkpoints.quantisation.codec import ErrorSums, load_scales, store_scales
from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL
from raymerge.dtypes import DType
from raymerge.execute.compute import PartComputation
from raymerge.execute.gathers import Raw, RawCodes
from raymerge.execute.output import NotFinite
from raymerge.execute.tiles import TileJob
from raymerge.merge_plan.expressions import Read
from raymerge.methods import AnchoredSum

_FORMATS = (FP8_BLOCK, FP8_CHANNEL)
_SCALES = (DType.F32, DType.BF16)


class CodedSum:
    """One tile: whole bands of a matrix, from inputs that are all stored as the result will be."""

    def __init__(
        self,
        tile: TileJob,
        encode: Encoding,
        inputs: list[RawCodes],
        memory: NDArray[np.uint8],
        total: AnchoredSum,
    ) -> None:
        """
        Args:
            tile: what is made.
            encode: how inputs and result are stored.
            inputs: their bytes.
            memory: what holds the codes of all of them.
            total: what is computed.
        """
        columns = tile.row.parts[0].columns
        self._row = tile.row
        self._encode = encode
        self._columns = columns
        self._packing = encode.packing((tile.count // columns, columns))
        self._total = total
        self._memory = memory
        self._places = np.array([each.codes.storage_offset() for each in inputs], dtype=np.int64)
        bands = -1, self._packing.scales_per_band
        steps = [load_scales(encode.scale_dtype, each.scales).view(bands) for each in inputs]
        self._steps = torch.stack(steps).numpy()
        self._made = np.empty_like(self._steps[0])
        self.errors = ErrorSums(0.0, 0.0)
        """What encoding changed in all that was made so far."""

    @property
    def unit_bytes(self) -> int:
        """Codes of a band, which are made together."""
        return self._packing.band * self._columns

    def fill(self, done: int, target: torch.Tensor) -> None:
        """Write some bands of codes.

        Args:
            done: codes before them.
            target: uint8 ``[n]``.

        Raises:
            NotFinite: they hold NaN or infinity.
        """
        from raymerge.kernels.blockwise import combine_and_encode

        first = done // self.unit_bytes
        stop = first + -(-target.numel() // self.unit_bytes)
        is_finite, errors, values = combine_and_encode(
            target.numpy().reshape(-1, self._columns),
            self._made[first:stop],
            self._memory,
            self._places + done,
            np.ascontiguousarray(self._steps[:, first:stop]),
            self._packing.block,
            np.array(self._total.coefficients),
            self._total.anchor,
            self._total.excess,
            0,
            (self._encode.power_of_two, self._encode.scale_dtype is DType.BF16),
        )
        if not is_finite:
            raise NotFinite(self._row)
        self.errors = ErrorSums(self.errors.squared_errors + errors, self.errors.squared_values + values)

    def stored_scales(self) -> torch.Tensor:
        """The scales of all that was made, uint8."""
        return store_scales(self._encode.scale_dtype, torch.from_numpy(self._made))


def is_summed_at_once(encode: Encoding) -> bool:
    """Whether there is such a call for this format."""
    return encode.format in _FORMATS and encode.scale_dtype in _SCALES


def warm_up_sums() -> None:
    """Have what computes sums ready."""
    from raymerge.kernels.blockwise import combine_and_encode

    codes, step = np.zeros((1, 1), np.uint8), np.ones((1, 1, 1), np.float32)
    places, alone = np.zeros(1, np.int64), np.ones(1)
    combine_and_encode(codes, step[0], codes[0], places, step, (1, 1), alone, 0, 0.0, 0, (False, False))


def coded_sum(tile: TileJob, raw: Raw, part: PartComputation) -> CodedSum | None:
    """The tile, if it can be made in one call; None where it has to be made in pieces."""
    encode, columns = tile.row.expression.encode, part.columns
    if encode is None or not is_summed_at_once(encode):
        return None
    total, inputs = part.anchored(), [each for each in raw if isinstance(each, RawCodes)]
    alike = [
        each
        for each in tile.row.inputs
        if isinstance(each, Read)
        and each.view is None
        and each.scales is not None
        and (each.scales.encoding, each.scales.columns) == (encode, columns)
    ]
    if (
        total is None
        or not len(raw) == len(inputs) == len(alike)
        or tile.row.expression.cast is not encode.format.code_dtype
    ):
        return None
    memory = inputs[0].codes.untyped_storage()
    if any(each.codes.untyped_storage().data_ptr() != memory.data_ptr() for each in inputs):
        return None
    data = torch.as_strided(inputs[0].codes, (memory.nbytes(),), (1,), 0).numpy()
    return CodedSum(tile, encode, inputs, data, total)
