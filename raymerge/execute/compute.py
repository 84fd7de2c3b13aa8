"""What is computed of a logical tensor: float32 tiles of its inputs, deltas, and the method's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from raymerge.execute.assembled import AssembledInput, Input, Raw, RawInput, RawRows
from raymerge.execute.assembler import Assembler
from raymerge.execute.decoding import decode
from raymerge.execute.jobs import JobPart
from raymerge.execute.threads import one_thread
from raymerge.methods import Access, Method, Settings, Takes, Tile, find_method, random_key
from raymerge.planner.expressions import Expression, Read


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
        self._assemblers = [_assembler(each, device) for each in part.inputs]
        self._settings = _settings(expression, method, part, seed)
        self.passes = method.kernel.passes(self._settings)
        self._state: Any = method.kernel.begin(self._settings, num_elements, device) if self.passes else None

    def load(self, raw: Raw) -> None:
        """Take up what the first tile of a row brings for all of them."""
        for assembler, rows in self._assembled(raw):
            assembler.load(rows)

    def pad(self, raw: Raw, *, ends_pass: bool) -> None:
        """Take one tile into the mean rows of padded inputs."""
        for assembler, rows in self._assembled(raw):
            if rows.num_rows:
                assembler.observe(rows)
            if ends_pass:
                assembler.conclude()

    def observe(self, raw: Raw, start: int, pass_index: int) -> None:
        """Take one tile into the statistics of a pass."""
        tile = self._tile(raw, start)
        with self._threads():
            self._method.kernel.observe(self._state, tile, self._settings, pass_index)

    def conclude(self, pass_index: int) -> None:
        """End a pass."""
        self._method.kernel.conclude(self._state, self._settings, pass_index)

    def apply(self, raw: Raw, start: int) -> torch.Tensor:
        """The result of one tile: float32 ``[n]`` on the device."""
        tile = self._tile(raw, start)
        with self._threads():
            return self._method.kernel.apply(tile, self._settings, self._state)

    def _threads(self) -> AbstractContextManager[None]:
        """One thread for the decompositions of matrices; what is cut into tiles may have any number."""
        is_matrix = self._method.access_with(self._settings) is Access.MATRIX
        return one_thread() if is_matrix else nullcontext()

    def _assembled(self, raw: Raw) -> Iterator[tuple[Assembler, RawRows]]:
        for assembler, rows in zip(self._assemblers, raw, strict=True):
            if assembler is not None and isinstance(rows, RawRows):
                yield assembler, rows

    def _tile(self, raw: Raw, start: int) -> Tile:
        values = [self._values(*each) for each in zip(raw, self._part.inputs, self._assemblers, strict=True)]
        base = values.pop(0) if self._has_base else None
        if base is not None and self._method.takes is Takes.DELTAS:
            for value in values:
                value.sub_(base)
        return Tile(base, torch.stack(values), start)

    def _values(self, raw: RawInput, source: Input, assembler: Assembler | None) -> torch.Tensor:
        """One input's elements of a tile: float32 ``[n]``, memory of its own."""
        if isinstance(raw, torch.Tensor) and isinstance(source, Read):
            return decode(raw, source, self._device)
        if isinstance(raw, RawRows) and assembler is not None:
            return assembler.elements(raw)
        raise TypeError(f"an input of {self._part.logical} was read as another kind of input")


def _assembler(source: Input, device: torch.device) -> Assembler | None:
    return Assembler(source, device) if isinstance(source, AssembledInput) else None


def _settings(expression: Expression, method: Method, part: JobPart, seed: int) -> Settings:
    num_sources = len(part.inputs) - (1 if expression.has_base else 0)
    keys = (
        tuple(random_key(seed, part.logical, source) for source in range(num_sources))
        if method.random
        else ()
    )
    return expression.bind(keys=keys, shape=part.shape)
