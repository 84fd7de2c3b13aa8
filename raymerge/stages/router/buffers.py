"""Buffers that a model of transformers computes and does not save, such as the frequencies of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def compute_buffers(decoder: Any, part: nn.Module, *, but: str | None, device: torch.device) -> list[str]:
    """Compute the unsaved buffers of a part of a model whose parameters are all on the meta device.

    They are made on the CPU, for every device alike, by what transformers itself makes them with once it has
    read a checkpoint.

    Args:
        decoder: the model.
        part: the decoder itself, or one of its layers.
        but: name of a child of ``part`` that is passed over.
        device: where they are wanted.

    Returns:
        Names of the buffers that nothing computes.
    """
    left: list[str] = []
    for path, module in part.named_modules():
        if but is not None and (path == but or path.startswith(f"{but}.")):
            continue
        names = [
            name
            for name in module._non_persistent_buffers_set
            if (found := module._buffers.get(name)) is not None and found.is_meta
        ]
        if names:
            # What is computed does not depend on what was there before.
            first, second = (_computed(decoder, module, names, fill) for fill in (0, 1))
            left += [f"{path}.{name}" for name in names if not torch.equal(first[name], second[name])]
            module._buffers.update({name: found.to(device) for name, found in second.items()})
    return left


def _computed(decoder: Any, module: nn.Module, names: list[str], fill: int) -> Mapping[str, torch.Tensor]:
    for name in names:
        module._buffers[name] = torch.full_like(module.get_buffer(name), fill, device="cpu")
    with torch.no_grad():
        decoder._init_weights(module)
    return {name: module.get_buffer(name) for name in names}
