"""Results as codes with scales: scale row by scale row, with the old scales where they serve as well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.checkpoints.quantisation.block_codec import (
    Encoded,
    ErrorSums,
    Exactness,
    NotFiniteError,
    StoredScales,
    load_scales,
    store_scales,
)
from raymerge.checkpoints.quantisation.encoding import Encoding, QuantSpec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.execute.compute import PartComputation
from raymerge.execute.decoding import with_scales
from raymerge.execute.output import NotFinite
from raymerge.execute.reading import Raw, RawCodes, TileJob
from raymerge.merge_plan.jobs import OpJob
from raymerge.methods import AnchoredSum


class TensorScale(NamedTuple):
    """The one scale that all codes of a matrix share."""

    scale: torch.Tensor
    is_kept: bool
    """Whether it is the one that a source has, whose scales of blocks may be kept with it."""

    def stored(self, op: OpJob) -> torch.Tensor:
        dtype = op.encoding.tensor_scale_dtype
        assert dtype is not None
        return store_scales(dtype, self.scale)


class Observed(NamedTuple):
    """What is to be known of a matrix for the one scale of all its codes."""

    largest: torch.Tensor
    had: torch.Tensor | None
    """The scale that a source has for it, float32 []; None for none."""
    fits: bool
    """Whether every number of it is exactly a code times that source's scales."""


def observe(op: OpJob, results: Iterable[tuple[torch.Tensor, Raw]]) -> Observed:
    """Look at all of a matrix, whole rows at a time, for the one scale that its codes are to share.

    NaN and infinity are not refused here, where a GPU would be waited for, but when the matrix that has them
    is encoded. Until then others that it is joined with may be made, with a scale that is never published."""
    seen: list[torch.Tensor] = []
    had, fits = None, True
    for result, raw in results:
        quant_spec, values = _quant_spec(op, result)
        codec = codec_of(quant_spec.format)
        seen.append(codec.largest(quant_spec, values))
        held = _held(op, raw, result.numel())
        if held is None:
            fits = False
            continue
        # A copy, as it lies in the memory of a load.
        had = None if held.tensor_scale is None else held.tensor_scale.clone()
        fits = fits and bool(codec.fits(quant_spec, values, held).all())
    return Observed(torch.stack(seen).amax(), had, fits and had is not None)


def shared_scale(op: OpJob, seen: Sequence[Observed]) -> TensorScale:
    """The one scale of a matrix, which all that servers join it with have too.

    A source's is kept if, with its scales of blocks, every number of every one of the matrices is exactly a
    code times its scales: what was decoded and not changed then becomes the bytes that it came from. Of a
    format without scales of blocks, which servers encode anew, these may be several."""
    own, encode = seen[0], op.encoding
    may_differ = encode.format.tensor_scale == "only"
    if own.had is not None and all(each.fits and (may_differ or each.had == own.had) for each in seen):
        return TensorScale(own.had, is_kept=True)
    quant_spec = encode.quant_spec((encode.scale_row_height, op.parts[0].columns))
    largest = torch.stack([each.largest for each in seen]).amax()
    held = [each.had for each in seen if each.had is not None]
    # Of those that numbers are divided by, the smallest is for the largest ones.
    of_largest = torch.amax if encode.format.tensor_scale == "factor" else torch.amin
    had = of_largest(torch.stack(held)) if held else None
    scale = codec_of(encode.format).fresh_tensor_scale(quant_spec, largest, had=had)
    return TensorScale(scale, is_kept=own.had is not None and bool(scale == own.had))


class EncodedRows(NamedTuple):
    coded: Encoded
    errors: ErrorSums
    exactness: Exactness | None
    """Of numbers that come from one source alone, as in a conversion; None for what is merged."""


def encoded(op: OpJob, result: torch.Tensor, raw: Raw, shared: TensorScale | None) -> EncodedRows:
    """Whole scale rows of an op as codes with scales, and what that changed.

    Raises NotFinite: the result holds NaN or infinity."""
    quant_spec, values = _quant_spec(op, result)
    codec = codec_of(quant_spec.format)
    held = _held(op, raw, result.numel()) if shared is None or shared.is_kept else None
    given = (held or StoredScales())._replace(tensor_scale=None if shared is None else shared.scale)
    try:
        coded = codec.encode(quant_spec, values, given)
    except NotFiniteError as error:
        raise NotFinite(op) from error
    sums = codec.error_sums(quant_spec, values, coded)
    if not math.isfinite(sums.squared_values):
        raise NotFinite(op)
    rows = EncodedRows(coded, sums, _exactness(op, values, coded, sums))
    _clear_padding(op, coded.codes)
    return rows


def _exactness(op: OpJob, values: torch.Tensor, coded: Encoded, sums: ErrorSums) -> Exactness | None:
    """Nothing is told of what a GPU encodes, which the host would have to wait for once more."""
    quant_spec = op.encoding.quant_spec(values.shape)
    is_single = all(len(part.inputs) == 1 for part in op.parts)
    if not (is_single and values.is_cpu and quant_spec.scale_row_length):
        return None
    if not sums.squared_errors:
        return Exactness(math.prod(quant_spec.grid), 0, 0.0)
    return codec_of(quant_spec.format).exactness(quant_spec, values, coded)


def _clear_padding(op: OpJob, codes: torch.Tensor) -> None:
    """Have 4-bit codes at the end of rows that are no numbers be 0, as compressed-tensors has them."""
    (part, *_), form = op.parts, op.encoding.format
    used = part.shape[-1]
    if len(op.parts) > 1 or form.code_bits != 4 or part.view is None or used == part.columns:
        return
    if part.view.strides[-1] != 1 or part.view.strides[0] != part.columns:
        return
    rows = codes.view(-1, part.columns // 2)
    rows[:, used // 2] &= 15 if used % 2 else 0
    rows[:, used // 2 + 1 :] = 0


def _quant_spec(op: OpJob, result: torch.Tensor) -> tuple[QuantSpec, torch.Tensor]:
    values = result.view(-1, op.parts[0].columns)
    return op.encoding.quant_spec(values.shape), values


def _held(op: OpJob, raw: Raw, num_elements: int) -> StoredScales | None:
    """The scales that a tile had in the first input that is stored as the output is: one that is fused
    otherwise has other rows there."""
    layout = num_elements, op.parts[0].columns, op.expression.encode
    codes = [each for each in raw[: len(op.parts[0].inputs)] if isinstance(each, RawCodes)]
    alike = (each for each in codes if (each.count, each.layout.columns, each.layout.encoding) == layout)
    return next((with_scales(each).stored for each in alike), None)


_SCALES = (DType.F32, DType.BF16)


class CodedSum:
    """One tile: whole scale rows of a matrix, from inputs that are all stored as the result will be."""

    def __init__(
        self,
        tile: TileJob,
        encode: Encoding,
        inputs: list[RawCodes],
        memory: NDArray[np.uint8],
        total: AnchoredSum,
    ) -> None:
        columns = tile.op.parts[0].columns
        self._op = tile.op
        self._encode = encode
        self._columns = columns
        self._quant_spec = encode.quant_spec((tile.count // columns, columns))
        self._total = total
        self._memory = memory
        self._places = np.array([each.codes.storage_offset() for each in inputs], dtype=np.int64)
        scale_rows = -1, self._quant_spec.scale_row_length
        steps = [load_scales(encode.scale_dtype, each.scales).view(scale_rows) for each in inputs]
        self._steps = torch.stack(steps).numpy()
        self._made = np.empty_like(self._steps[0])
        self.errors = ErrorSums(0.0, 0.0)
        """What encoding changed in all that was made so far."""

    @property
    def unit_bytes(self) -> int:
        """Codes of a scale row, which are made together."""
        return self._quant_spec.scale_row_height * self._columns

    def fill(self, done: int, target: torch.Tensor) -> None:
        """Write some scale rows of codes. Raises NotFinite: they hold NaN or infinity."""
        from raymerge.kernels.block_scales import combine_and_encode

        first = done // self.unit_bytes
        stop = first + -(-target.numel() // self.unit_bytes)
        is_finite, errors, values = combine_and_encode(
            target.numpy().reshape(-1, self._columns),
            self._made[first:stop],
            self._memory,
            self._places + done,
            np.ascontiguousarray(self._steps[:, first:stop]),
            self._quant_spec.block,
            np.array(self._total.coefficients),
            self._total.anchor,
            self._total.excess,
            0,
            (self._encode.power_of_two, self._encode.scale_dtype is DType.BF16),
        )
        if not is_finite:
            raise NotFinite(self._op)
        self.errors = ErrorSums(self.errors.squared_errors + errors, self.errors.squared_values + values)

    def stored_scales(self) -> torch.Tensor:
        return store_scales(self._encode.scale_dtype, torch.from_numpy(self._made))


def is_summed_at_once(encode: Encoding) -> bool:
    form = encode.format
    return form.is_fp8 and form.tensor_scale == "none" and encode.scale_dtype in _SCALES


def warm_up_sums() -> None:
    from raymerge.kernels.block_scales import combine_and_encode

    codes, step = np.zeros((1, 1), np.uint8), np.ones((1, 1, 1), np.float32)
    places, alone = np.zeros(1, np.int64), np.ones(1)
    combine_and_encode(codes, step[0], codes[0], places, step, (1, 1), alone, 0, 0.0, 0, (False, False))


def coded_sum(tile: TileJob, raw: Raw, part: PartComputation) -> CodedSum | None:
    """The tile, if it can be made in one call; None where it has to be made in pieces."""
    encode = tile.op.expression.encode
    if encode is None or not is_summed_at_once(encode):
        return None
    total, layout = part.anchored(), (encode, tile.op.parts[0].columns, None)
    inputs = [
        each
        for each in raw
        if isinstance(each, RawCodes)
        and (each.layout.encoding, each.layout.columns, each.read.view) == layout
    ]
    is_whole_codes = tile.op.expression.cast is encode.format.code_dtype
    if total is None or len(inputs) < len(raw) or not is_whole_codes:
        return None
    memory = inputs[0].codes.untyped_storage()
    if any(each.codes.untyped_storage().data_ptr() != memory.data_ptr() for each in inputs):
        return None
    data = torch.as_strided(inputs[0].codes, (memory.nbytes(),), (1,), 0).numpy()
    return CodedSum(tile, encode, inputs, data, total)
