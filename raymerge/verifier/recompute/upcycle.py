"""upcycle: neurons drawn anew, noise and a scale, in float64."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from raymerge.methods import random_key
from raymerge.verifier.recompute.random import hashes, normal_numbers
from raymerge.verifier.recompute.tensor import DOUBT, Block, Expected, LogicalTensor


class Upcycled:
    """One source as an expert."""

    def __init__(self, tensor: LogicalTensor) -> None:
        self._settings = tensor.settings
        (self._source,) = tensor.settings.sources
        self._chosen = self._neurons()
        self._mean = self._deviation = 0.0
        if self._chosen is None:
            return
        count, total, squares = 0, 0.0, 0.0
        for block in tensor.blocks():
            replaced = block.sources[0][self._marks(block)]
            count, total = count + len(replaced), total + float(replaced.sum())
            squares += float((replaced**2).sum())
        if count:
            self._mean = total / count
            self._deviation = float(np.sqrt(max(0.0, squares / count - self._mean**2)))

    def __call__(self, block: Block) -> Expected:
        (key,), indices = self._settings.keys, block.indices
        noise_scale, scale = self._number("noise_scale"), self._number("scale")
        values = block.sources[0].copy()
        largest = np.abs(values)
        if self._chosen is not None:
            marks = self._marks(block)
            drawn = normal_numbers(random_key(key, "redrawn", 0), indices[marks])
            values[marks] = drawn * self._deviation + self._mean
            largest[marks] = np.abs(drawn) * self._deviation + abs(self._mean)
        if noise_scale:
            noise = noise_scale * normal_numbers(key, indices)
            values, largest = values + noise, largest + np.abs(noise)
        return Expected(values * scale, (DOUBT * largest + block.input_doubt) * abs(scale))

    def _number(self, name: str) -> float:
        return float(self._source[name] or 0.0)

    def _neurons(self) -> NDArray[np.bool_] | None:
        """Which of the tensor's own neurons are redrawn; None where none is."""
        shape, axis = self._settings.shape, int(self._number("neuron_axis"))
        if axis >= len(shape):
            return None
        count = int(self._number("num_neurons")) or shape[axis]
        wanted = round(self._number("reinit_fraction") * count)
        if not wanted:
            return None
        key = random_key(int(self._number("neuron_key")), "neurons", 0)
        order = np.argsort(hashes(key, np.arange(count, dtype=np.int64)).view(np.int64))
        chosen = np.zeros(count, dtype=bool)
        chosen[order[:wanted]] = True
        first = int(self._number("neuron_first"))
        return chosen[first : first + shape[axis]]

    def _marks(self, block: Block) -> NDArray[np.bool_]:
        """Which elements belong to redrawn neurons."""
        assert self._chosen is not None
        run = prod(self._settings.shape[int(self._number("neuron_axis")) + 1 :])
        return self._chosen[block.indices // run % len(self._chosen)]
