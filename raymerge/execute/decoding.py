"""Stored bytes as float32 tensors, and float32 tensors as stored bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from raymerge.checkpoints.quantisation.block_codec import Encoded, load_scales
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.views import View, whole_view
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.execute.reading import Raw, RawCodes, RawInput
from raymerge.merge_plan.elements import strided, torch_dtype
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import JobPart, OpJob


def typed(raw: torch.Tensor, source: Read, device: torch.device) -> torch.Tensor:
    """Stored bytes as the elements that they are: ``[n]`` on the device, in logical order."""
    if not is_aligned(raw, source.dtype):
        raw = raw.clone()
    stored = raw.view(torch_dtype(source.dtype)).to(device)
    return stored if source.view is None else strided(stored, source.view).contiguous().flatten()


def is_aligned(raw: torch.Tensor, dtype: DType) -> bool:
    """Whether uint8 bytes can be taken for elements of a dtype where they are."""
    size = torch_dtype(dtype).itemsize
    return not raw.storage_offset() % size and not raw.data_ptr() % size


def decode(raw: torch.Tensor, source: Read, device: torch.device) -> torch.Tensor:
    """Stored bytes as a new float32 ``[n]`` tensor on the device, in logical order; see ``typed``."""
    return typed(raw, source, device).to(torch.float32, copy=True)


def numbers(raw: RawCodes, *, out: torch.Tensor | None = None, in_order: bool = True) -> torch.Tensor:
    """Codes with scales as float32 ``[n]`` on their device: in logical order, or as they are stored."""
    columns, view = raw.layout.columns, raw.read.view if in_order else None
    quant_spec = raw.layout.encoding.quant_spec((raw.count // columns, columns))
    into = None if out is None else out.view(quant_spec.shape)
    decoded = codec_of(quant_spec.format).decode(quant_spec, with_scales(raw), out=into).flatten()
    return decoded if view is None else strided(decoded, view).contiguous().flatten()


def with_scales(raw: RawCodes) -> Encoded:
    """Codes with what they are stored with, as codecs take them."""
    dtype = raw.layout.encoding.tensor_scale_dtype
    whole = None if dtype is None else load_scales(dtype, raw.tensor_scale).squeeze(0)
    return Encoded(raw.codes, raw.scales, raw.zero_points, whole)


def rounded(result: torch.Tensor, dtype: DType) -> torch.Tensor:
    """float32 results rounded once to the output's dtype, as bytes where they are: uint8 ``[nbytes]``."""
    return result.to(torch_dtype(dtype)).contiguous().view(torch.uint8)


def encode(result: torch.Tensor, dtype: DType, target: torch.Tensor) -> None:
    """Round float32 results once to the output's dtype, in place."""
    if is_aligned(target, dtype):
        target.view(torch_dtype(dtype)).copy_(result)
    else:
        target.copy_(rounded(result, dtype))


def scatter(results: Sequence[torch.Tensor], op: OpJob) -> torch.Tensor:
    """The results of an op's parts, each at its place in the op: float32 ``[num_elements]``."""
    if len(results) == 1 and op.parts[0].view is None:
        return results[0]
    is_full = sum(prod(part.shape) for part in op.parts) == op.num_elements
    new = torch.empty if is_full else torch.zeros
    whole = new(op.num_elements, dtype=torch.float32, device=results[0].device)
    for result, part in zip(results, op.parts, strict=True):
        view = part.view or View(0, part.shape, ())
        target = strided(whole, view) if view.strides else whole.view(part.shape)
        target.copy_(result.view(part.shape))
    return whole


def take_elements(raw: RawInput, source: Read, shape: tuple[int, ...], begin: int, out: torch.Tensor) -> None:
    """Some elements of an input in logical order, as float32."""
    if isinstance(raw, RawCodes):
        numbers(rows_of_codes(raw, begin, out.numel()), out=out, in_order=False)
        return
    assert isinstance(raw, torch.Tensor)
    view = source.view or _flat(prod(shape))
    for first, count, box in _boxes(begin, begin + out.numel(), view.shape):
        part = _box(raw, source.dtype, view, box)
        out[first - begin : first - begin + count].view(part.shape).copy_(part)


def rows_of_codes(raw: RawCodes, begin: int, count: int) -> RawCodes:
    """The codes of some whole rows of an input, with their scales."""
    columns = raw.layout.columns
    rows = _rows(raw.read.view, columns, begin, count)
    codes = raw.codes.view(-1, raw.read.dtype.nbytes(columns))[rows]
    scales = raw.scales.view(-1, raw.layout.encoding.scales_nbytes(columns))[rows]
    return replace(raw, codes=codes.reshape(-1), scales=scales.reshape(-1))


class PlacedResults:
    """The finished bytes of an op, to which the results of its parts come in any order."""

    def __init__(self, op: OpJob, raw: Raw, device: torch.device) -> None:
        self._op = op
        first = raw[0]
        if op.need.in_place and isinstance(first, torch.Tensor):
            self.data = first
        else:
            nbytes = op.expression.cast.nbytes(op.num_elements)
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        """uint8 [nbytes]: numbers, or codes."""
        self.scales = torch.empty(0, dtype=torch.uint8, device=device)
        """uint8: those of the codes."""
        if op.expression.encode is not None:
            columns = op.parts[0].columns
            nbytes = op.encoding.scales_nbytes(columns)
            self.scales = torch.empty(op.num_elements // columns * nbytes, dtype=torch.uint8, device=device)

    def put(self, part: JobPart, begin: int, result: torch.Tensor) -> None:
        """Put elements of a part, rounded to the output's dtype, into their places."""
        cast, view = self._op.expression.cast, part.view or _flat(prod(part.shape))
        for first, count, box in _boxes(begin, begin + result.numel(), view.shape):
            chosen = result[first - begin : first - begin + count]
            if is_aligned(self.data, cast):
                target = _box(self.data, cast, view, box)
                target.copy_(chosen.view(target.shape))
            else:
                bytes_ = _bytes_of(self.data, cast, view)[box]
                bytes_.copy_(rounded(chosen, cast).view(bytes_.shape))

    def put_codes(self, part: JobPart, begin: int, count: int, made: Encoded) -> None:
        if not count:
            return
        rows = _rows(part.view, part.columns, begin, count)
        for target, data in ((self.data, made.codes), (self.scales, made.scales)):
            num_rows = self._op.num_elements // part.columns
            target.view(num_rows, -1)[rows] = data.view(count // part.columns, -1)


def _flat(num_elements: int) -> View:
    return whole_view((num_elements,))


def _rows(view: View | None, columns: int, begin: int, count: int) -> slice:
    """The rows of a stored matrix that some elements of a view are, which is made of whole rows of it."""
    start, step = (view.offset // columns, view.strides[0] // columns) if view is not None else (0, 1)
    first, num_rows = begin // columns, count // columns
    return slice(start + step * first, start + step * (first + num_rows - 1) + 1, step)


def _boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[slice, ...]]]:
    """Some elements of a vector or a matrix as boxes of it: the end of a row, whole rows, the begin of one.
    Yields each box with the index of its first element and their number."""
    if len(shape) < 2:
        yield begin, end - begin, (slice(begin, end),)[: len(shape)]
        return
    columns = shape[1]
    while begin < end:
        row, column = divmod(begin, columns)
        if not column and end - begin >= columns:
            stop_row = end // columns
            box, count = (slice(row, stop_row), slice(0, columns)), (stop_row - row) * columns
        else:
            count = min(columns - column, end - begin)
            box = (slice(row, row + 1), slice(column, column + count))
        yield begin, count, box
        begin += count


def _box(raw: torch.Tensor, dtype: DType, view: View, box: tuple[slice, ...]) -> torch.Tensor:
    """The elements of a box of a view, of their own dtype; where bytes lie well they share the memory."""
    if is_aligned(raw, dtype):
        return strided(raw.view(torch_dtype(dtype)), view)[box]
    return _bytes_of(raw, dtype, view)[box].contiguous().view(torch_dtype(dtype)).squeeze(-1)


def _bytes_of(raw: torch.Tensor, dtype: DType, view: View) -> torch.Tensor:
    """The bytes of a view's elements, uint8 ``[*shape, bytes]``; shares the memory."""
    size = dtype.nbytes(1)
    strides = (*(size * each for each in view.strides), 1)
    return torch.as_strided(raw, (*view.shape, size), strides, raw.storage_offset() + size * view.offset)
