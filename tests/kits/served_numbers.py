"""What a server makes of NVFP4: numbers under the one scale that it takes for all matrices that it joins.

Written from what vLLM does; nothing here is raymerge's. Among experts it takes the scale of the first matrix
(gate's), and elsewhere the largest stored number. compressed-tensors' scale of the matrix divides, and
ModelOpt's is a factor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from kits.checkpoint_maker import read_tensors
from kits.quantised_merges import e2m1_numbers
from kits.quantised_numbers import Values

_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_DIVISOR, _FACTOR = ".weight_global_scale", ".weight_scale_2"


def joined_modules(stored: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, ...]]:
    """Modules with a scale of the whole matrix that a server joins, in its order."""
    scaled = {
        name.removesuffix(each) for name in stored for each in (_DIVISOR, _FACTOR) if name.endswith(each)
    }
    for words in _JOINED:
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in sorted(scaled)):
            modules = [f"{parent}.{word}" for word in words if f"{parent}.{word}" in scaled]
            if len(modules) > 1:
                yield tuple(modules)


def served_numbers(root: Path) -> dict[str, tuple[Values, Values]]:
    """By module the numbers that a server computes with, and those that the file means."""
    stored = read_tensors(root)
    by_module: dict[str, tuple[Values, Values]] = {}
    for modules in joined_modules(stored):
        ending = _DIVISOR if f"{modules[0]}{_DIVISOR}" in stored else _FACTOR
        scales = [stored[f"{module}{ending}"].double() for module in modules]
        is_expert = re.search(r"\.experts\.\d+\.", modules[0])
        taken = scales[0] if is_expert else torch.stack(scales).amax(0)
        for module, own in zip(modules, scales, strict=True):
            codes = stored[f"{module}.weight_packed" if ending == _DIVISOR else f"{module}.weight"]
            blocks = stored[f"{module}.weight_scale"].double()
            steps = (blocks / each if ending == _DIVISOR else blocks * each for each in (taken, own))
            pairs = codes.view(*blocks.shape, 8).numpy()
            served, meant = (e2m1_numbers(pairs, each.float().double().numpy()).values for each in steps)
            by_module[module] = served, meant
    return by_module


def served_as_stored(root: Path) -> bool:
    by_module = served_numbers(root)
    assert by_module
    return all(np.array_equal(served, meant) for served, meant in by_module.values())
