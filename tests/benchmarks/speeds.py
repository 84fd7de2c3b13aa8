"""How fast methods compute: segments made as a worker makes them, without the time of reading and writing.

Side by side, as lanes are: while some compute others read, and all share memory, caches and the interpreter's
lock.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from kits.checkpoint_maker import sparse_checkpoint
from kits.gather_maker import Stock, expression, make_stock, plan_of

from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.quantisation.encoding import usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.checkpoints.source import open_checkpoint
from raymerge.dtypes import DType
from raymerge.execute.segment import PlanOutput, SegmentRunner
from raymerge.merge_plan.expressions import Expression, Op, Output, Part, copy_expression
from raymerge.merge_plan.memory import lanes_of, project
from raymerge.merge_plan.tables import Plan
from raymerge.methods import Access, BaseUse, Method, find_method
from raymerge.runtime.workers.sizing import cores_here
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import ReadStore

BUDGET = 512 << 20
LANES = 4
"""Segments that it makes side by side, on two cores."""
SHAPE = (4096, 2048)
BRIEF_SHAPE = (512, 1024)
"""Of brief ones: what these take longer for each element is what a tensor takes beyond its elements."""
MATRIX_SHAPE = (2048, 1024)
"""The same for methods that decompose matrices: what they take for an element grows with the matrix."""
ROUNDS = 5

_SOURCES = 3
_REST, _TIMES = "rest", 64
"""The rest of the plan that a tensor is part of, and how many times as large it is."""
_LEAST_ELEMENTS = 1 << 25
"""Elements of one round."""
_ROWS = 512
_NUMBERS = {"weight": 0.3, "density": 0.3, "t": 0.5, "lambda": 1.0, "gamma": 0.02, "epsilon": 0.1}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Speed:
    element: float
    """For each element of every input, the base counted."""
    tensor: float
    """For each tensor beyond that."""


@dataclass(frozen=True, slots=True)
class _Task:
    run: Callable[[], None]
    elements: int
    pieces: int
    """In how many pieces it is made, each as a tensor by itself."""


class Clock(threading.local):
    def __init__(self) -> None:
        self.aside = 0.0

    def without(self, work: Callable[[], _T]) -> _T:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.aside += time.perf_counter() - began

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter() - self.aside
        work()
        return time.perf_counter() - self.aside - began


class Source(LocalStore):
    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self._clock = clock

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._clock.without(lambda: super(Source, self).read_into(key, offset, buffer))

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,
        like: int | None = None,
    ) -> int:
        read = super().read_extent
        return self._clock.without(lambda: read(key, offset, nbytes, buffer, again=again, like=like))

    def map_extent(self, *args: Any) -> int | None:
        map_extent = super().map_extent
        return self._clock.without(lambda: map_extent(*args))


class Nowhere(LocalStore):
    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None: ...

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        return 0

    def sync(self, key: str) -> None: ...


class _Turns(threading.Semaphore):
    def __init__(self, threads: int, clock: Clock) -> None:
        super().__init__(threads)
        self._clock = clock

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        take = super().acquire
        return self._clock.without(lambda: take(blocking, timeout))


class SpeedBench:
    def __init__(
        self,
        root: Path,
        *,
        shape: tuple[int, int] = SHAPE,
        brief: tuple[int, int] = BRIEF_SHAPE,
        matrix: tuple[int, int] = MATRIX_SHAPE,
    ) -> None:
        self._root = root
        self._shapes = {"flat": shape, "brief": brief, "matrix": matrix}
        self._shapes[_REST] = (_TIMES * shape[0], shape[1])
        models = [
            {name: _weights(seed, self._shapes[name]) for name in ("flat", "brief", "matrix")}
            for seed in range(1 + _SOURCES)
        ]
        rest = TensorSpec(_REST, DType.BF16, self._shapes[_REST])
        place = sparse_checkpoint(root / _REST, [[rest]], {"architectures": ["Odd"], "model_type": "odd"})
        self._stock = Stock((*make_stock(root, *models).sources, open_checkpoint(place, _REST)))

    def method_speed(self, method: Method, *, rounds: int = ROUNDS) -> Speed:
        return self.speed(expression_of(method), rounds=rounds)

    def copied_byte_seconds(self) -> float:
        return self.speed(copy_expression(DType.BF16)).element / 2

    def code_seconds(self) -> tuple[float, float]:
        """Seconds of one thread for an element of block FP8 that is decoded, and for one that is encoded.

        Scales that a source had are tried, and what encoding changes is added up, as lanes do.
        """
        quant_spec = usual_quant_spec(FP8_BLOCK, self._shapes["flat"])
        codec, values = codec_of(quant_spec.format), _weights(1, quant_spec.shape).float()
        had = codec.encode(quant_spec, values)
        out = torch.empty_like(values)

        def encode() -> None:
            codec.error_sums(quant_spec, values, codec.encode(quant_spec, values, had.stored))

        values = values + 1e-3
        clock, taken = Clock(), []
        for work in (lambda: codec.decode(quant_spec, had, out=out), encode):
            work()
            taken.append(statistics.median(clock.seconds(work) for _ in range(ROUNDS)))
        decoded, encoded = (seconds / prod(quant_spec.shape) for seconds in taken)
        return decoded, encoded

    def speed(self, made_of: Expression, *, rounds: int = ROUNDS, threads: int = 0) -> Speed:
        threads = threads or cores_here()
        method = find_method(made_of.method)
        settings = made_of.bind(keys=(), shape=self._shapes["matrix"])
        is_whole = method is not None and method.access_with(settings) is Access.MATRIX
        clock = Clock()
        with ExitStack() as stack:
            stores = [
                stack.enter_context(closing(Source(Path(each.root), clock))) for each in self._stock.sources
            ]
            # No more than there are cores: what waits for a core is not to count.
            lanes = min(lanes_of(threads), cores_here())
            pool = stack.enter_context(ThreadPoolExecutor(lanes))
            inputs = max(1, len(settings.sources) + made_of.has_base)
            found = []
            for name in ("matrix",) if is_whole else ("flat", "brief"):
                turns = _Turns(threads, clock)
                task = self._task(self._plan(made_of, name, inputs), name, stores, turns)
                crew = _Crew(pool, lanes, clock)
                found.append((task.elements / task.pieces, crew.usual(task, rounds) / task.pieces))
        return speed_of(*found)

    def _plan(self, made_of: Expression, name: str, inputs: int) -> Plan:
        first = 0 if made_of.has_base or made_of.is_copy else 1
        reads = {name: tuple(self._stock.read(name, first + number) for number in range(inputs))}
        reads[_REST] = (self._stock.read(_REST, 1 + _SOURCES),)
        made = {name: made_of, _REST: copy_expression(DType.BF16)}
        ops = {
            each: Op(
                prod(self._shapes[each]), made[each], (Part(each, self._shapes[each], None),), reads[each]
            )
            for each in reads
        }
        return plan_of(
            self._stock, [Output(each, DType.BF16, self._shapes[each], (ops[each],), True) for each in reads]
        )

    def _task(self, plan: Plan, name: str, stores: Sequence[Source], turns: _Turns) -> _Task:
        runner = SegmentRunner(
            [PlanOutput(plan, Nowhere(self._root), range(len(stores)))],
            stores,
            device=torch.device("cpu"),
            projection=project(plan, BUDGET, lanes=max(LANES, cores_here())),
            threads=cores_here(),
            name="speed",
        )
        runner._turns = turns
        tensors = plan["ops"].column("tensor").to_pylist()
        first_rows = plan["segments"].column("first_op").to_pylist()
        segments = [number for number, row in enumerate(first_rows) if tensors[row] == 0]

        def run() -> None:
            # Libraries of linear algebra go by the number of the thread that calls them.
            torch.set_num_threads(1)
            for segment in segments:
                runner.run(segment)

        inputs = plan["ops"].column("num_inputs").to_pylist()[tensors.index(0)]
        return _Task(run, inputs * prod(self._shapes[name]), tensors.count(0))


@dataclass(frozen=True, slots=True)
class _Crew:
    pool: ThreadPoolExecutor
    lanes: int
    clock: Clock

    def usual(self, task: _Task, rounds: int) -> float:
        self._together(task)
        # Brief ones are over before the others have begun: more of them.
        enough = max(1, round(_LEAST_ELEMENTS / task.elements))
        return statistics.median(
            sum(self._together(task) for _ in range(enough)) / enough for _ in range(rounds)
        )

    def _together(self, task: _Task) -> float:
        begun = [self.pool.submit(self.clock.seconds, task.run) for _ in range(self.lanes)]
        return sum(each.result() for each in begun) / self.lanes


def speed_of(long: tuple[float, float], short: tuple[float, float] | None = None) -> Speed:
    if short is None:
        return Speed(long[1] / long[0], 0.0)
    element = max(0.0, (long[1] - short[1]) / (long[0] - short[0]))
    return Speed(element, max(0.0, short[1] - element * short[0]))


def expression_of(method: Method) -> Expression:
    count = min(_SOURCES, method.max_sources or _SOURCES)
    has_base = method.base is BaseUse.REQUIRED
    return expression(method, sources=count, has_base=has_base, cast=DType.BF16, **_NUMBERS)


def _weights(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    rows, columns = shape
    size = (min(rows, _ROWS), columns)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.02
    if seed:
        noise += 0.001 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return noise.bfloat16().repeat(-(-rows // size[0]), 1)[:rows].contiguous()
