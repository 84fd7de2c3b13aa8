"""Texts in blocks of windows that do not depend on workers or memory, and a model's walk over a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from raymerge.checkpoints.header import TensorSpec
from raymerge.deferred import torch
from raymerge.planner.inputs.sources import Source
from raymerge.stages.router.results import TensorFile
from raymerge.stages.streamed_model import Finish, LayerStream, Purpose, Shape, Watch, check_finite
from raymerge.stages.texts import Text, Window

FEW_TOKENS = 32
"""Tokens of an expert below which what is measured of it says little."""

UNIT_TOKENS = 16384
"""Tokens of a unit: it reads all of the model."""
BATCH_TOKENS = 2048
"""Tokens that go through a layer at once."""


class Batch(NamedTuple):
    """Windows of one length: there is no padding."""

    tokens: torch.Tensor
    """int64 ``[B, T]``."""
    is_judged: torch.Tensor
    """bool ``[B, T]``: whether the text has the token of its own accord, and not as what windows begin with,
    or, in a conversation, whether the assistant says it."""
    texts: tuple[int, ...]
    """The text of each window."""

    @property
    def shape(self) -> Shape:
        return Shape(*self.tokens.shape)


Block: TypeAlias = tuple[Batch, ...]
"""What one unit runs."""


def tokens_of_few(texts: Sequence[Text], num_blocks: int) -> int:
    """Tokens of a block where there are to be about so many, or fewer."""
    whole = sum(len(window.tokens) for text in texts for window in text.windows)
    return max(UNIT_TOKENS, -(-whole // num_blocks))


def blocks_of(texts: Sequence[Text], *, most_tokens: int | None = None) -> tuple[Block, ...]:
    """The windows of all texts in order, cut into blocks, by length within a block. ``most_tokens``: of a
    block, unless one window has more; None for ``UNIT_TOKENS``."""
    limit, blocks, filled = most_tokens or UNIT_TOKENS, list[list[tuple[int, Window]]](), 0
    for number, text in enumerate(texts):
        for window in text.windows:
            if not blocks or filled + len(window.tokens) > limit:
                blocks.append([])
                filled = 0
            blocks[-1].append((number, window))
            filled += len(window.tokens)
    return tuple(tuple(_batches(each)) for each in blocks)


def _batches(placed: Sequence[tuple[int, Window]]) -> Iterator[Batch]:
    def length_of(each: tuple[int, Window]) -> int:
        return -len(each[1].tokens)

    for length, group in groupby(sorted(placed, key=length_of), key=length_of):
        windows, count = list(group), max(1, BATCH_TOKENS // -length)
        for first in range(0, len(windows), count):
            some = windows[first : first + count]
            yield Batch(
                torch.from_numpy(np.stack([window.tokens for _, window in some])),
                torch.from_numpy(np.stack([window.is_judged for _, window in some])),
                tuple(text for text, _ in some),
            )


def num_tokens(block: Block) -> int:
    return sum(batch.shape.num_tokens for batch in block)


@dataclass(frozen=True, slots=True)
class Walk:
    """One unit's block, and what the model may use for it."""

    model: Source
    stream: LayerStream
    block: Block
    names: Sequence[str]
    """Of the texts."""
    device: torch.device
    budget: int
    """Bytes of memory for running the model."""
    spill: Path
    tell: Callable[[int], None]

    def read(self, *, watch: Watch, finish: Finish = lambda *_: 0) -> int:
        """Run the model on the block's batches; as ``LayerStream.read``. Raises NonFiniteError: states hold
        NaN or infinity."""

        def visit(layer: int, batch: int, hidden: torch.Tensor, _: torch.Tensor) -> None:
            self.check(hidden, batch, f"layer {layer - 1}" if layer else "the embedding")

        def finished(*args: Any) -> int:
            model, states, room = args
            for batch in range(len(self.block)):
                self.check(states[batch], batch, "the last layer")
            return finish(model, states, room)

        return self.stream.read(
            [batch.tokens for batch in self.block],
            visit,
            device=self.device,
            budget=self.budget,
            spill=self.spill,
            tell=self.tell,
            watch=watch,
            finish=finished,
        )

    def check(self, values: torch.Tensor, batch: int, where: str) -> None:
        """As ``check_finite``, for a batch."""
        texts = [self.names[text] for text in self.block[batch].texts]
        check_finite(values, where, model=self.model.name, texts=texts)


class Write(Protocol):
    def __call__(self, name: str, tensor: torch.Tensor, first: int | None = None) -> None:
        """As ``TensorFile.write``."""


class Statistics(Protocol):
    """One kind of statistics of a model. Sums are made by block, and added in the blocks' order."""

    @property
    def purpose(self) -> Purpose: ...

    @property
    def num_blocks(self) -> int | None:
        """About how many blocks there are at most, where the sums of one are large; None for any number."""

    def check(self, stream: LayerStream) -> None:
        """From headers and config; raises PlanError with every problem."""

    def sums(self, block: Block) -> Sequence[TensorSpec]:
        """What a unit leaves, by name."""

    def own_nbytes(self, blocks: Sequence[Block], stream: LayerStream) -> int:
        """Bytes of memory beside running the model, in a unit, and in ``conclude``."""

    def num_kept(self, stream: LayerStream) -> int:
        """How often the hidden states of a block are kept beside those on their way, in memory or spilled."""

    def collect(self, walk: Walk, write: Write) -> int:
        """Make the sums of a block; returns bytes read."""

    def conclude(self, units: Sequence[TensorFile], result: TensorFile) -> Mapping[str, object]:
        """Write the result of the sums of all units; returns what the report has besides."""


def added(units: Sequence[TensorFile], name: str) -> torch.Tensor:
    """A tensor of sums over all units, in their order."""
    total = units[0].read(name)
    for unit in units[1:]:
        total += unit.read(name)
    return total
