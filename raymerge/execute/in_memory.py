"""Makes ops of a plan into memory, for whoever wants the bytes of a merge without its files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.deferred import torch
from raymerge.device_numerics import numerics_of
from raymerge.execute.receipts import UNFINISHED, Receipt
from raymerge.execute.segment import PlanOutput, SegmentRunner
from raymerge.merge_plan.memory import Projection
from raymerge.merge_plan.plan import ints, makers
from raymerge.merge_plan.tables import Plan
from raymerge.storage.store import ReadStore

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Window(NamedTuple):
    """A range of a shard that is wanted, and where its bytes go."""

    shard: str
    offset: int
    target: Bytes


class MemorySink:
    """Keeps the bytes of some windows, and drops all others."""

    def __init__(self, windows: Iterable[Window]) -> None:
        """They do not overlap."""
        self._by_shard: dict[str, tuple[list[int], list[Bytes]]] = {}
        for shard, offset, target in sorted(windows, key=lambda each: each[:2]):
            begins, targets = self._by_shard.setdefault(shard + UNFINISHED, ([], []))
            begins.append(offset)
            targets.append(target)

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        begins, targets = self._by_shard.get(key, ([], []))
        data, end = np.frombuffer(buffer, np.uint8), offset + len(buffer)
        for at in range(max(0, bisect_right(begins, offset) - 1), len(begins)):
            begin, target = begins[at], targets[at]
            if begin >= end:
                break
            first, stop = max(begin, offset), min(begin + len(target), end)
            if first < stop:
                target[first - begin : stop - begin] = data[first - offset : stop - offset]

    def copy_range(self, key: str, offset: int, **_: Any) -> int:  # noqa: ARG002 - no file system has them
        return 0

    def sync(self, key: str) -> None:
        """Memory is as durable as it gets."""

    def close(self) -> None:
        """Let go of the windows, whoever still has the sink."""
        self._by_shard.clear()


class OpMaker:
    """Makes ops of one plan, in threads of its own: as many at a time as the projection has lanes. Close it,
    or use it as a context; its sources stay open."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ReadStore],
        *,
        device: torch.device,
        projection: Projection,
        threads: int,
    ) -> None:
        output = PlanOutput(plan, MemorySink(()), range(len(sources)))
        self._runner = SegmentRunner(
            [output], sources, device=device, projection=projection, threads=threads, name="inline"
        )
        self.lanes = projection.lanes
        self.numerics = numerics_of(device)
        """What the bytes hang on beside plan and sources."""
        self._sources = sources
        self._makers, self._firsts = makers(plan), ints(plan["segments"], "first_op")
        # Libraries of linear algebra go by the number of threads of who calls them, and round by it.
        one_thread = partial(torch.set_num_threads, 1)
        self._torch_threads = torch.get_num_threads()
        self._lanes = ThreadPoolExecutor(projection.lanes, "raymerge", initializer=one_thread)

    def __enter__(self) -> OpMaker:
        return self

    def __exit__(self, *_: object) -> None:
        """What is under way fails at its next load, and is waited for."""
        self._runner.abort()
        self._lanes.shutdown(cancel_futures=True)
        # Some of these libraries have one number for the whole process.
        torch.set_num_threads(self._torch_threads)

    def maker(self, op: int) -> int:
        """The op that is carried out to make the bytes of another, or itself."""
        return int(self._makers[op])

    def submit(self, ops: Sequence[int], windows: Sequence[Window]) -> Future[Receipt]:
        """Have the bytes of these ops, in order of their places, written into windows. The result raises as
        ``SegmentRunner.run``."""
        return self._lanes.submit(self._made, ops, MemorySink(windows))

    def _made(self, ops: Sequence[int], sink: MemorySink) -> Receipt:
        by_maker: dict[int, list[int]] = {}
        for op in ops:
            by_maker.setdefault(self.maker(op), []).append(op)
        makings = [(maker, tuple(own)) for maker, own in by_maker.items()]
        segment = int(np.searchsorted(self._firsts, ops[0], side="right")) - 1

        def make(device: torch.device, note: str) -> Receipt:
            return self._runner.made(segment, device, note, sinks={0: sink}, makings=makings)[0]

        try:
            receipt = self._runner.on_device(make)
        finally:
            sink.close()
        # Bytes that were read while a file was written to are of no use.
        for source in self._sources:
            source.check_expected()
        return receipt
