"""How fast methods compute: segments made as a worker makes them, without the time of reading and writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from kits.assembly_maker import Stock, expression, make_stock, plan_of
from kits.checkpoint_maker import sparse_checkpoint

from raymerge.checkpoints.layout import TensorSpec
from raymerge.checkpoints.source import open_checkpoint
from raymerge.dtypes import DType
from raymerge.execute.segment import SegmentRunner
from raymerge.methods import Access, BaseUse, Method, find_method
from raymerge.planner.expressions import Expression, Output, Part, Row, copy_expression
from raymerge.planner.projection import project
from raymerge.planner.tables import Plan
from raymerge.storage.local import LocalStore
from raymerge.storage.store import ReadStore

BUDGET = 512 << 20
"""Bytes of memory that a worker has by itself."""
LANES = 4
"""Segments that it makes side by side, on two cores."""
SHAPE = (4096, 4096)
"""Of the tensors that are merged."""
MATRIX_SHAPE = (2048, 1024)
"""The same for methods that decompose matrices: what they take for an element grows with the matrix."""
ROUNDS = 3
"""Repetitions, of which the shortest counts."""

_SOURCES = 3
_REST, _TIMES = "rest", 64
"""The rest of the plan that a tensor is part of, and how many times as large it is."""
_ROWS = 512
"""Rows of noise; large tensors repeat them."""
_NUMBERS = {"weight": 0.3, "density": 0.3, "t": 0.5, "lambda": 1.0, "gamma": 0.02, "epsilon": 0.1}
_T = TypeVar("_T")


class Clock:
    """Processor seconds of this thread that are not to count."""

    def __init__(self) -> None:
        self.aside = 0.0
        """How many there were."""

    def without(self, work: Callable[[], _T]) -> _T:
        """Do something that is not to count."""
        began = time.thread_time()
        try:
            return work()
        finally:
            self.aside += time.thread_time() - began

    def seconds(self, work: Callable[[], object]) -> float:
        """Processor seconds that some work takes, but for what is not to count."""
        began = time.thread_time() - self.aside
        work()
        return time.thread_time() - self.aside - began


class Source(LocalStore):
    """A source that is read without counting."""

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self._clock = clock

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Read as ever."""
        self._clock.without(lambda: super(Source, self).read_into(key, offset, buffer))

    def read_extent(
        self, key: str, offset: int, nbytes: int, buffer: memoryview, *, again: bool = False
    ) -> int:
        """Read as ever."""
        read = super().read_extent
        return self._clock.without(lambda: read(key, offset, nbytes, buffer, again=again))


class Nowhere(LocalStore):
    """Takes what is written and keeps nothing of it."""

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Do nothing."""

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """Copy nothing by itself, so that bytes pass through the lane."""
        return 0

    def sync(self, key: str) -> None:
        """Do nothing."""


class SpeedBench:
    """Models in BF16 whose tensors are merged again and again: a base and fine-tunes of it."""

    def __init__(
        self, root: Path, *, shape: tuple[int, int] = SHAPE, matrix: tuple[int, int] = MATRIX_SHAPE
    ) -> None:
        """
        Args:
            root: directory for the models; made if absent.
            shape: of the tensors.
            matrix: of those of methods that decompose.
        """
        self._root = root
        self._shapes = {"flat": shape, "matrix": matrix, _REST: (_TIMES * shape[0], shape[1])}
        models = [
            {name: _weights(seed, self._shapes[name]) for name in ("flat", "matrix")}
            for seed in range(1 + _SOURCES)
        ]
        rest = TensorSpec(_REST, DType.BF16, self._shapes[_REST])
        place = sparse_checkpoint(root / _REST, [[rest]], {"architectures": ["Odd"], "model_type": "odd"})
        self._stock = Stock((*make_stock(root, *models).sources, open_checkpoint(place, _REST)))

    def method_seconds(self, method: Method, *, rounds: int = ROUNDS) -> float:
        """Seconds of one thread for each element of every input, the base counted.

        Taking it from its stored form, all passes of the method, rounding and the digest are in it.
        """
        return self.seconds(expression_of(method), rounds=rounds)

    def copied_byte_seconds(self, *, rounds: int = ROUNDS) -> float:
        """Seconds of one thread for a byte that is copied as it is, and its digest."""
        return self.seconds(copy_expression(DType.BF16), rounds=rounds) / 2

    def seconds(self, made_of: Expression, *, rounds: int = ROUNDS) -> float:
        """Seconds of one thread for each element of every input; the least of some rounds."""
        method = find_method(made_of.method)
        settings = made_of.bind(keys=(), shape=self._shapes["matrix"])
        is_whole = method is not None and method.access_with(settings) is Access.MATRIX
        name = "matrix" if is_whole else "flat"
        inputs = max(1, len(settings.sources) + made_of.has_base)
        clock = Clock()
        with ExitStack() as stack:
            stores = [
                stack.enter_context(closing(Source(Path(each.root), clock))) for each in self._stock.sources
            ]
            run = self._work(self._plan(made_of, name, inputs), stores)
            run()
            taken = min(clock.seconds(run) for _ in range(rounds))
        return taken / (inputs * prod(self._shapes[name]))

    def _plan(self, made_of: Expression, name: str, inputs: int) -> Plan:
        """One tensor, and a copy that is never made: a plan's segments are as long as it is large."""
        first = 0 if made_of.has_base or made_of.is_copy else 1
        reads = {name: tuple(self._stock.read(name, first + number) for number in range(inputs))}
        reads[_REST] = (self._stock.read(_REST, 1 + _SOURCES),)
        made = {name: made_of, _REST: copy_expression(DType.BF16)}
        rows = {
            each: Row(
                prod(self._shapes[each]), made[each], (Part(each, self._shapes[each], None),), reads[each]
            )
            for each in reads
        }
        return plan_of(
            self._stock, [Output(each, DType.BF16, self._shapes[each], (rows[each],), True) for each in reads]
        )

    def _work(self, plan: Plan, stores: Sequence[Source]) -> Callable[[], None]:
        """What makes the first of a plan's tensors once."""
        runner = SegmentRunner(
            plan,
            stores,
            Nowhere(self._root),
            device=torch.device("cpu"),
            projection=project(plan, BUDGET, lanes=LANES),
            threads=1,
            name="speed",
        )
        tensors = plan["rows"].column("tensor").to_pylist()
        first_rows = plan["segments"].column("first_row").to_pylist()
        segments = [number for number, row in enumerate(first_rows) if tensors[row] == 0]

        def run() -> None:
            for segment in segments:
                runner.run(segment)

        return run


def expression_of(method: Method) -> Expression:
    """A merge of three sources, or of as many as a method takes, into BF16."""
    count = min(_SOURCES, method.max_sources or _SOURCES)
    has_base = method.base is BaseUse.REQUIRED
    return expression(method, sources=count, has_base=has_base, cast=DType.BF16, **_NUMBERS)


def _weights(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    """Elements like those of a model, with seed 0, and of fine-tunes of it: BF16 of that shape."""
    rows, columns = shape
    size = (min(rows, _ROWS), columns)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.02
    if seed:
        noise += 0.001 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return noise.bfloat16().repeat(-(-rows // size[0]), 1)[:rows].contiguous()
