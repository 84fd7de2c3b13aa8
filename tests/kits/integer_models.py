"""Tiny models whose matrices are integers as compressed-tensors stores them, and what such files mean.

Parents of one layout are the same model plus a little that hangs on the seed, each quantised by itself. Both
ways are written from compressed-tensors' definitions, and nothing here is raymerge's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kits.checkpoint_maker import TOKENIZER_FILES, llama_config, llama_shapes, write_checkpoint
from kits.quantised_merges import Numbers
from kits.quantised_models import QuantisedModel
from kits.quantised_numbers import Values, int4_codes, int4_words, parent_numbers, plain


@dataclass(frozen=True, slots=True)
class Integers:
    """How weights are stored."""

    num_bits: int
    symmetric: bool
    group: int | None = None
    """None for one scale a row."""
    scales: torch.dtype = torch.bfloat16
    is_odd: bool = False
    """Whether rows end within an integer."""

    @property
    def table(self) -> dict[str, Any]:
        weights = {
            "dynamic": False,
            "group_size": self.group,
            "num_bits": self.num_bits,
            "strategy": "group" if self.group else "channel",
            "symmetric": self.symmetric,
            "type": "int",
        }
        inputs = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"}
        group = {
            "input_activations": inputs if self.num_bits == 8 else None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": weights,
        }
        return {
            "config_groups": {"group_0": group},
            "format": "int-quantized" if self.num_bits == 8 else "pack-quantized",
            "ignore": ["lm_head"],
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }

    def stored(self, module: str, values: Values) -> tuple[Mapping[str, torch.Tensor], Values]:
        """The tensors of a module, and what they mean."""
        least, greatest = -(1 << (self.num_bits - 1)), (1 << (self.num_bits - 1)) - 1
        runs = values.reshape(len(values), -1, self.group or values.shape[1])
        low, high = runs.min(2).clip(max=0), runs.max(2).clip(min=0)
        range_ = high - low if not self.symmetric else 2 * np.abs(runs).max(2)
        scales = torch.from_numpy(range_ / (greatest - least)).to(self.scales)
        exact = scales.double().numpy()
        zeros = np.zeros_like(exact)
        if not self.symmetric:
            zeros = np.clip(np.rint(least - low / exact), least, greatest)
        codes = np.clip(np.rint(runs / exact[..., None] + zeros[..., None]), least, greatest)
        meaning = ((codes - zeros[..., None]) * exact[..., None]).reshape(values.shape)
        parts = {"weight_scale": scales, **self._codes(codes.reshape(values.shape))}
        if not self.symmetric:
            packed = int4_words(zeros.T).T if self.num_bits == 4 else zeros.astype(np.int8)
            parts["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(packed))
        return {f"{module}.{part}": tensor for part, tensor in parts.items()}, meaning

    def _codes(self, codes: Values) -> dict[str, torch.Tensor]:
        if self.num_bits == 8:
            return {"weight": torch.from_numpy(codes.astype(np.int8))}
        return {
            "weight_packed": torch.from_numpy(int4_words(codes)),
            "weight_shape": torch.tensor(codes.shape),
        }

    def read(self, stored: Mapping[str, torch.Tensor], module: str) -> Numbers:
        scales = stored[f"{module}.weight_scale"].double().numpy()
        zeros = stored.get(f"{module}.weight_zero_point")
        if self.num_bits == 8:
            codes = stored[f"{module}.weight"].double().numpy()
            offsets = np.zeros_like(scales) if zeros is None else zeros.double().numpy()
        else:
            columns = int(stored[f"{module}.weight_shape"][1])
            codes = int4_codes(stored[f"{module}.weight_packed"].numpy())[:, :columns]
            offsets = np.zeros_like(scales)
            if zeros is not None:
                offsets = int4_codes(np.ascontiguousarray(zeros.numpy().T)).T[: len(codes)]
        width = codes.shape[1] // scales.shape[1]
        spread, offsets = scales.repeat(width, 1), offsets.repeat(width, 1)
        greatest = (1 << (self.num_bits - 1)) - 1
        # Where there are zero points no number is beyond what codes can mean.
        limits = greatest * spread if self.symmetric else np.full(codes.shape, 1e9)
        return Numbers((codes - offsets) * spread, spread, limits)


LAYOUTS: Mapping[str, Integers] = {
    "INT4 with zero points": Integers(4, symmetric=False, group=36),
    "INT4 by channel with zero points": Integers(4, symmetric=False, scales=torch.float16),
    "INT4 by channel": Integers(4, symmetric=True),
    "INT4 by channel with unused codes": Integers(4, symmetric=True, is_odd=True),
    "INT4 by channel with zero points and unused codes": Integers(4, symmetric=False, is_odd=True),
    "INT8": Integers(8, symmetric=True),
    "INT8 with zero points": Integers(8, symmetric=False, scales=torch.float32),
}


def integer_llama(root: Path, seed: int, layout: Integers, *, hidden: int = 72) -> QuantisedModel:
    """A dense model of which rows of matrices are no whole number of eight."""
    config = llama_config(layers=1, hidden=hidden)
    if layout.is_odd:
        config["intermediate_size"] = 101
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Values] = {}
    quantised = set()
    for name, shape in llama_shapes(config).items():
        numbers = parent_numbers(name, shape, seed)
        if not name.endswith("_proj.weight"):
            tensors[name], values[name] = plain(numbers, torch.bfloat16)
            continue
        # Most of the numbers on one side, and one run all above 0.
        numbers[:, ::3] = np.abs(numbers[:, ::3])
        numbers[0, :36] = np.abs(numbers[0, :36])
        parts, values[name] = layout.stored(name.removesuffix(".weight"), numbers)
        tensors |= parts
        quantised.add(name)
    write_checkpoint(
        root, tensors, {**config, "quantization_config": layout.table}, files=3, extra=TOKENIZER_FILES
    )
    return QuantisedModel(root, values, frozenset(quantised))
