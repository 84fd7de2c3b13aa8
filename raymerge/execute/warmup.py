"""Has everything ready that a plan's methods compute with, before the first segment."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from raymerge.checkpoints.codecs import codec_of
from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.device_numerics import DeviceError
from raymerge.dtypes import DType
from raymerge.execute.fp8_sums import is_summed_at_once, warm_up_sums
from raymerge.execute.non_finite import first_non_finite
from raymerge.merge_plan.expressions import Expression
from raymerge.methods import (
    BLOCK,
    ROW_GROUP,
    SAMPLE_LENGTH,
    SAMPLE_RUNS,
    Access,
    Method,
    Settings,
    Stored,
    StoredKernel,
    StoredTile,
    Takes,
    Tile,
    find_method,
    gather,
    sample_of,
)

_CODED_COLUMNS = 256
"""Some blocks of every format, or one where they are longer."""
_CODES_OF_ELEMENT = 8
"""Codes of an element of packed integers, which holds more than those of other formats."""
_SHAPE = (ROW_GROUP, (SAMPLE_RUNS * SAMPLE_LENGTH + BLOCK) // ROW_GROUP)
"""Long enough for a sample, and whole groups of rows."""


def warm_up(expressions: Sequence[Expression], device: torch.device) -> None:
    """Compute a little with each method, on zeros.

    Loops are compiled, or loaded, when they are first called: that takes time and memory that no segment
    should be charged with, and of which the idle worker's measure is to know. Decompositions, and methods
    whose settings are made for one shape, warm up as they go.

    Raises:
        DeviceError: the device cannot be used at all.
        RuntimeError: a GPU failed, or has too little memory, as ``failure_of`` tells.
    """
    if device.type != "cpu":
        _reach(device)
    # Copies are looked at, too.
    first_non_finite(np.zeros(64, np.uint8), DType.BF16)
    done: set[tuple[str, int]] = set()
    for expression in expressions:
        method = find_method(expression.method)
        settings = expression.bind(keys=(), shape=_SHAPE)
        key = (expression.method, len(settings.sources))
        if method is None or key in done or method.bound_to_shape:
            continue
        if method.access_with(settings) is not Access.MATRIX:
            keys = tuple(range(1, len(settings.sources) + 1)) if method.random else ()
            bound = expression.bind(keys=keys, shape=_SHAPE)
            _compute(method, bound, device, has_base=expression.has_base)
            done.add(key)
    for encode in {each.encode for each in expressions if each.encode is not None}:
        _encode(encode, device)


def _reach(device: torch.device) -> None:
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        # Beginning to use a GPU fails with errors of any kind.
        raise DeviceError(str(error)) from error


def _encode(encode: Encoding, device: torch.device) -> None:
    """Encode and decode a little, as rows of this format are."""
    unit = math.lcm(encode.block[1] or 1, _CODES_OF_ELEMENT)
    packing = encode.packing((encode.band, -(-_CODED_COLUMNS // unit) * unit))
    codec, values = codec_of(encode.format), torch.zeros(packing.shape, device=device)
    whole = None if encode.tensor_scale_dtype is None else torch.ones((), device=device)
    encoded = codec.encode(packing, values, tensor_scale=whole)
    kept = encoded.scales if packing.scales_per_band else None
    codec.encode(packing, values, kept=kept, tensor_scale=whole)
    codec.error_sums(
        packing, codec.decode(packing, *encoded, tensor_scale=whole), encoded, tensor_scale=whole
    )
    if device.type == "cpu" and is_summed_at_once(encode):
        warm_up_sums()


def _compute(method: Method, settings: Settings, device: torch.device, *, has_base: bool) -> None:
    count = _SHAPE[0] * _SHAPE[1]
    sources = torch.zeros(len(settings.sources), count, device=device)
    # Two kinds of numbers, for what does not look twice at tensors that are equal.
    sources[:, ::3] = 1.0 if method.takes is Takes.WEIGHTS else 0.0
    tile = Tile(torch.zeros(count, device=device) if has_base else None, sources, 0)
    kernel, inputs = method.kernel, len(settings.sources) + has_base
    state = gather(method, settings, count, device, tiles=lambda: (tile,), sample=lambda: sample_of(tile))
    kernel.apply(tile, settings, state)
    if isinstance(kernel, StoredKernel) and device.type == "cpu":
        stored = Stored(np.zeros(inputs * count, np.uint16), np.arange(inputs) * count, count, 0)
        state = gather(
            method,
            settings,
            count,
            device,
            tiles=lambda: (StoredTile(stored, lambda: (tile,)),),
            sample=lambda: sample_of(tile),
        )
        kernel.apply_stored(stored, settings, state, np.empty(count, np.uint16))
