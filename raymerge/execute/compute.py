"""From stored bytes to stored bytes: decode to float32, take deltas, run the kernel, round once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.execute.jobs import JobPart, RowJob
from raymerge.methods import Method, Settings, Takes, Tile, find_method, random_key
from raymerge.planner.expressions import Expression, Read

Raw = Sequence[torch.Tensor]
"""One uint8 tensor on the host for each input of a part."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a stored dtype.

    Raises:
        ValueError: torch has none; such tensors are only ever copied.
    """
    if dtype.torch_name is None:
        raise ValueError(f"{dtype.value} has no torch dtype; it can only be copied")
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


class PartComputation:
    """The statistics and the application of one expression on one logical tensor."""

    def __init__(
        self, expression: Expression, part: JobPart, *, num_elements: int, seed: int, device: torch.device
    ) -> None:
        method = find_method(expression.method)
        if method is None:
            raise ValueError(
                f"the plan names a method '{expression.method}' that this raymerge does not have"
            )
        self._method: Method = method
        self._has_base = expression.has_base
        self._part = part
        self._device = device
        self._settings = _settings(expression, method, part, seed)
        self.passes = method.kernel.passes(self._settings)
        self._state: Any = method.kernel.begin(self._settings, num_elements, device) if self.passes else None

    def observe(self, raw: Raw, start: int, pass_index: int) -> None:
        """Take one tile into the statistics of a pass."""
        self._method.kernel.observe(self._state, self._tile(raw, start), self._settings, pass_index)

    def conclude(self, pass_index: int) -> None:
        """End a pass."""
        self._method.kernel.conclude(self._state, self._settings, pass_index)

    def apply(self, raw: Raw, start: int) -> torch.Tensor:
        """The result of one tile: float32 ``[n]`` on the device."""
        return self._method.kernel.apply(self._tile(raw, start), self._settings, self._state)

    def _tile(self, raw: Raw, start: int) -> Tile:
        values = [
            decode(each, source, self._device) for each, source in zip(raw, self._part.inputs, strict=True)
        ]
        base = values.pop(0) if self._has_base else None
        if base is not None and self._method.takes is Takes.DELTAS:
            for value in values:
                value.sub_(base)
        return Tile(base, tuple(values), start)


def _settings(expression: Expression, method: Method, part: JobPart, seed: int) -> Settings:
    num_sources = len(part.inputs) - (1 if expression.has_base else 0)
    keys = (
        tuple(random_key(seed, part.logical, source) for source in range(num_sources))
        if method.random
        else ()
    )
    return expression.bind(keys=keys, shape=part.shape)


def decode(raw: torch.Tensor, source: Read, device: torch.device) -> torch.Tensor:
    """Stored bytes as a new float32 ``[n]`` tensor on the device, in logical order.

    Args:
        raw: uint8 bytes of the input, on the host.
        source: their dtype and view.
        device: where the arithmetic runs.
    """
    stored = raw.view(torch_dtype(source.dtype)).to(device)
    if source.view is not None:
        stored = _strided(stored, source.view).contiguous().flatten()
    return stored.to(torch.float32, copy=True)


def encode(result: torch.Tensor, dtype: DType) -> torch.Tensor:
    """float32 results rounded once to the output's dtype, as bytes on the host: uint8 ``[nbytes]``."""
    return result.to(torch_dtype(dtype)).contiguous().cpu().view(torch.uint8)


def scatter(results: Sequence[torch.Tensor], row: RowJob) -> torch.Tensor:
    """The results of a row's parts, each at its place in the row: float32 ``[num_elements]``."""
    if len(results) == 1 and row.parts[0].view is None:
        return results[0]
    whole = torch.empty(row.num_elements, dtype=torch.float32, device=results[0].device)
    for result, part in zip(results, row.parts, strict=True):
        view = part.view or View(0, part.shape, ())
        target = _strided(whole, view) if view.strides else whole.view(part.shape)
        target.copy_(result.view(part.shape))
    return whole


def _strided(flat: torch.Tensor, view: View) -> torch.Tensor:
    return torch.as_strided(flat, view.shape, view.strides, flat.storage_offset() + view.offset)
