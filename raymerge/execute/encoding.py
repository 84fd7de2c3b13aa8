"""Results as codes with scales: band by band, with the old scales where they serve as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from raymerge.checkpoints.quantisation.codec import Encoded, ErrorSums, NotFiniteError, store_scales
from raymerge.checkpoints.quantisation.encoding import Encoding, Packing
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.execute.decoding import tensor_scale
from raymerge.execute.gathers import Raw, RawCodes
from raymerge.execute.ops import RowJob
from raymerge.execute.output import NotFinite
from raymerge.merge_plan.expressions import Read, Scales


class TensorScale(NamedTuple):
    """The one scale that all codes of a matrix share."""

    scale: torch.Tensor
    """float32 []."""
    is_kept: bool
    """Whether it is the one that a source has, whose scales of blocks may be kept with it."""

    def stored(self, row: RowJob) -> torch.Tensor:
        """Its bytes, uint8.

        Args:
            row: of the matrix.
        """
        dtype = encoding_of(row).tensor_scale_dtype
        if dtype is None:
            raise TypeError(f"{row.tensor} has no scale of a whole matrix")
        return store_scales(dtype, self.scale)


class Observed(NamedTuple):
    """What is to be known of a matrix for the one scale of all its codes."""

    largest: torch.Tensor
    """Its largest magnitude, float32 []."""
    had: torch.Tensor | None
    """The scale that a source has for it, float32 []; None for none."""
    fits: bool
    """Whether every number of it is exactly a code times that source's scales."""


class TensorScaleChoice:
    """Looks at all of a matrix for the one scale that its codes are to share."""

    def __init__(self, row: RowJob) -> None:
        self._row = row
        self._largest: torch.Tensor | None = None
        self._had: torch.Tensor | None = None
        self._fits = True

    def observe(self, result: torch.Tensor, raw: Raw) -> None:
        """Look at whole rows of the matrix.

        Args:
            result: float32, flat.
            raw: what they were made of.

        Raises:
            NotFinite: they hold NaN or infinity.
        """
        packing, values = _packing(self._row, result)
        codec = codec_of(packing.format)
        largest = codec.largest(packing, values)
        if not bool(largest.isfinite()):
            raise NotFinite(self._row)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        held = _held(self._row, raw, result.numel())
        if held is None:
            self._fits = False
            return
        codes, scales = held
        scale = tensor_scale(codes, scales)
        # A copy, as it lies in the memory of a load.
        self._had = None if scale is None else scale.clone()
        if self._fits:
            fits = codec.fits(packing, values, codes.scales, tensor_scale=scale)
            self._fits = bool(fits.all())

    def observed(self) -> Observed:
        """What was seen, after all rows were looked at."""
        if self._largest is None:
            raise ValueError(f"nothing of {self._row.tensor} was looked at")
        return Observed(self._largest, self._had, self._fits and self._had is not None)


def shared_scale(row: RowJob, seen: Sequence[Observed]) -> TensorScale:
    """The one scale of a matrix, which all that servers join it with have too.

    A source's is kept if, with its scales of blocks, every number of every one of the matrices is exactly a
    code times its scales: what was decoded and not changed then becomes the bytes that it came from.

    Args:
        row: of the matrix.
        seen: what was seen of it, and after it of the others.
    """
    own = seen[0]
    if own.had is not None and all(each.fits and each.had == own.had for each in seen):
        return TensorScale(own.had, is_kept=True)
    encode = encoding_of(row)
    packing = encode.packing((encode.band, row.parts[0].columns))
    largest = torch.stack([each.largest for each in seen]).amax()
    held = [each.had for each in seen if each.had is not None]
    # Numbers are divided by it, so that the smallest is for the largest ones.
    had = torch.stack(held).amin() if held else None
    scale = codec_of(encode.format).fresh_tensor_scale(packing, largest, had=had)
    return TensorScale(scale, is_kept=own.had is not None and bool(scale == own.had))


def encoded(
    row: RowJob, result: torch.Tensor, raw: Raw, shared: TensorScale | None
) -> tuple[Encoded, ErrorSums]:
    """Whole bands of a row as codes with scales, and what that changed.

    Args:
        row: the row.
        result: float32, flat.
        raw: what the bands were made of.
        shared: the one scale of the matrix, where it has one.

    Raises:
        NotFinite: the result holds NaN or infinity.
    """
    packing, values = _packing(row, result)
    codec = codec_of(packing.format)
    held = _held(row, raw, result.numel()) if shared is None or shared.is_kept else None
    scales = None if held is None else held[0].scales
    whole = None if shared is None else shared.scale
    try:
        found = codec.encode(packing, values, kept=scales, tensor_scale=whole)
    except NotFiniteError as error:
        raise NotFinite(row) from error
    return found, codec.error_sums(packing, values, found, tensor_scale=whole)


def encoding_of(row: RowJob) -> Encoding:
    """How the results of a row of codes are encoded."""
    encode = row.expression.encode
    if encode is None:
        raise TypeError(f"{row.tensor} is made of numbers that are not encoded")
    return encode


def _packing(row: RowJob, result: torch.Tensor) -> tuple[Packing, torch.Tensor]:
    """How whole rows of a matrix are stored, and they as such."""
    values = result.view(-1, row.parts[0].columns)
    rows, columns = values.shape
    return encoding_of(row).packing((rows, columns)), values


def _held(row: RowJob, raw: Raw, num_elements: int) -> tuple[RawCodes, Scales] | None:
    """The codes that a tile had in the first input that is stored as the output is, with their scales: one
    that is fused otherwise has other rows there."""
    for source, held in zip(row.parts[0].inputs, raw, strict=False):
        if not isinstance(source, Read) or source.scales is None or not isinstance(held, RawCodes):
            continue
        is_alike = source.scales.columns == row.parts[0].columns
        is_alike &= held.codes.numel() * 8 == num_elements * source.dtype.bits
        if is_alike and source.scales.encoding == row.expression.encode:
            return held, source.scales
    return None
