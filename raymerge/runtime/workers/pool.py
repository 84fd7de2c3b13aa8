"""A pool of workers, whatever they run on and do; how they fail; and the pool of this process alone."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from raymerge import device_numerics, devices
from raymerge.deferred import torch
from raymerge.errors import IncompleteError, first_line, is_memory_error
from raymerge.events import MemoryShort, OnEvent, PartInHand, WorkerProgress
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.files_read import SourceFile
from raymerge.options import Device, RunOptions
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.runtime.workers.sizing import cores_here, layout_of
from raymerge.units import format_size

TICK_SECONDS = 1.0
"""How long a pool waits before it lets the driver look around."""

Receipts: TypeAlias = tuple[Receipt, ...]
"""Those that came while the driver saw to the ones before."""

UNIT = "unit"
"""A part of a stage's work; of a merge's it is a segment."""


class Runner(Protocol):
    """One worker's end of a piece of work; several threads may run its parts at once."""

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Do one part; what it made is durable on return. ``budget`` is bytes of memory from
        ``Work.lessened``, for a part that is in hand alone; None for what the work says."""

    def in_hand(self) -> tuple[PartInHand, ...]:
        """What it does at the moment; called from a thread of its own, often."""

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Work(Protocol):
    """Everything that workers need of a run, but the numbers of its parts. It travels pickled."""

    @property
    def slots(self) -> int:
        """Parts that a worker is given at once; its runner starts them as it has room."""

    @property
    def part(self) -> str:
        """Its name in messages: ``segment`` or ``unit``."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Files that the parts read, which a worker must see."""

    @property
    def place(self) -> Path | None:
        """The directory that parts are written to, and workers must see; None for an object store."""

    def reads(self) -> tuple[frozenset[int], ...]:
        """Of every part, the positions in ``files`` of what it reads."""

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Bytes of memory to retry a part with that ran out of it, with the same result: half of what it had,
        or its least need if that is more; None if it had no more than that."""

    def open(self, device: torch.device, name: str) -> Runner:
        """What does the parts, on the device of the worker of this name."""


class Stop:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._until: float | None = None

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    @property
    def overdue(self) -> bool:
        """Whether the parts in hand are no longer waited for."""
        return self._until is not None and time.monotonic() >= self._until

    def request(self, seconds: float | None = None) -> None:
        """Parts in hand have so many seconds; None for no limit."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self._event.set()


class Pool(Protocol):
    """Workers that do the parts of one piece of work after the other."""

    @property
    def workers(self) -> tuple[str, ...]: ...

    @property
    def device(self) -> str: ...

    @property
    def device_reason(self) -> str:
        """Why they compute on it, where there was a choice; otherwise ""."""

    @property
    def threads(self) -> int: ...

    @property
    def numerics(self) -> dict[str, str]:
        """What bytes may depend on: device kind and torch version."""

    @property
    def stage_numerics(self) -> dict[str, str]:
        """What a stage's bytes may depend on: ``numerics``, and what computes layers and products."""

    def start(self) -> None:
        """Start the workers, or prepare for ``settle``; raises OptionError if they cannot be had."""

    def settle(self, choose: Callable[[], device_numerics.DeviceChoice]) -> None:
        """Start the workers where that was left open, because GPUs need not be used. All compute on the
        chosen kind of device; on processors where GPUs are chosen and do not work.

        ``choose`` is called only if there is a choice, since it may read what an earlier run left. Raises
        OptionError if the workers asked for cannot be had."""

    def survey(self, work: Work) -> None:
        """Before the first write: raises OptionError if workers lack the work's files or its place."""

    def conclude(self) -> None:
        """The next piece of work is the last: workers without a part in it may go."""

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        """Do these parts in about the given order and yield receipts as they come.

        All available ones are yielded together, to be made durable together; meanwhile workers go on. Yields
        none after ``TICK_SECONDS`` without any, so that the driver can look at progress. Ends early, without
        error, once ``stop`` is requested and the parts in hand are done. Closing the generator gives up the
        parts in hand."""

    def close(self) -> None: ...


ATTEMPTS = 3
"""Workers that a part may take down, or that may fail to start in a row, before the run gives up."""
_NODE_ATTEMPTS = 3
"""Workers that a node may lose without one receipt between, before no more are started there."""
_LEAST_SPARE, _SPARE = 12, 3
"""Workers that may be lost without one receipt between: so many, or so many for each that there is."""
_KEPT_HERE = "What is done is kept: the same command goes on there"


class Cause(StrEnum):
    ENDED = "ended"
    MEMORY = "memory"
    STILL = "still"
    UNREACHABLE = "unreachable"
    """A call to it failed; it may be alive, and its parts are not to blame."""
    NODE = "node"
    """Its node is gone; its parts are not to blame."""


class WorkerFailures:
    def __init__(self, part: str, workers: int) -> None:
        self._part = part
        self._most = max(_LEAST_SPARE, _SPARE * workers)
        self._took_down: Counter[int] = Counter()
        self._budgets: dict[int, int] = {}
        self._short: set[int] = set()
        self._on_nodes: Counter[str] = Counter()
        self._since_receipt = 0

    def is_alone(self, number: int) -> bool:
        """Whether a part is to be in hand alone: to find the culprit, or to have enough memory."""
        return self._took_down[number] > 0 or number in self._short

    def budget(self, number: int) -> int | None:
        """Bytes of memory for a part; None for what the work says."""
        return self._budgets.get(number)

    @property
    def shunned(self) -> frozenset[str]:
        """Nodes on which workers die, one after the other."""
        return frozenset(node for node, count in self._on_nodes.items() if count >= _NODE_ATTEMPTS)

    def progress(self, node: str) -> None:
        self._since_receipt = 0
        del self._on_nodes[node]

    def add(self, cause: Cause, reason: str, numbers: Sequence[int], node: str) -> None:
        """Count a lost worker with the parts that it had in hand; ``node`` is "" if unknown. Raises
        IncompleteError if a part has taken down too many workers, or too many were lost without a receipt."""
        self._since_receipt += 1
        if node and cause is not Cause.NODE:
            self._on_nodes[node] += 1
        for number in numbers if cause in (Cause.ENDED, Cause.STILL) else ():
            self._took_down[number] += 1
        worn = next((number for number in numbers if self._took_down[number] >= ATTEMPTS), None)
        if worn is not None:
            raise IncompleteError(
                f"{self._part} {worn} took down {ATTEMPTS} workers, the last with: {reason}. "
                f"{_KEPT_HERE}, perhaps with a smaller --memory or fewer --workers."
            )
        if self._since_receipt >= self._most:
            raise IncompleteError(
                f"{self._since_receipt} workers were lost, and nothing was made between, the last with: "
                f"{reason}. {_KEPT_HERE}."
            )

    def lessen(self, number: int, budget: int | None, reason: str) -> None:
        """Do a part that ran out of memory alone, with a smaller budget if there is one. Raises
        IncompleteError if there is none, and it was alone already."""
        if budget is not None:
            self._budgets[number] = budget
        elif number in self._short:
            least = self._budgets.get(number)
            had = "" if least is None else f" of {format_size(least)}"
            raise IncompleteError(
                f"{self._part} {number} ran out of memory, alone on a worker and with the least budget{had} "
                f"that it can be made with ({reason}). {_KEPT_HERE}, with fewer --workers, or where more "
                "memory is free."
            )
        self._short.add(number)


_NAME = "inline"


class InlinePool:
    """One worker in this process, with as many parts in flight as any worker."""

    workers = (_NAME,)

    def __init__(
        self, device: Device, threads: int | None = None, *, on_event: OnEvent = lambda _: None
    ) -> None:
        """``on_event`` receives parts that ran out of memory."""
        self._on_event = on_event
        self._options = RunOptions(device=device, threads=threads, inline=True)
        # None for processors: a torch.device would load torch here, where Ctrl-C may cut that short.
        self._gpu: torch.device | None = None
        self.device_reason = ""
        self._settings = ExitStack()

    @property
    def device(self) -> str:
        return "cpu" if self._gpu is None else self._gpu.type

    @property
    def threads(self) -> int:
        return layout_of(self._options, (cores_here(),), int(self._gpu is not None)).threads

    @property
    def numerics(self) -> dict[str, str]:
        return device_numerics.numerics_of(self._device)

    @property
    def stage_numerics(self) -> dict[str, str]:
        return {**self.numerics, **device_numerics.kernels_of(self._device)}

    @property
    def _device(self) -> torch.device:
        return self._gpu or torch.device("cpu")

    def start(self) -> None:
        with heavy_imports():
            import torch  # noqa: F401

            import raymerge.execute.segment  # noqa: F401
        self._settings.enter_context(device_numerics.full_float32())
        if self._options.device == "cuda":
            self._gpu = device_numerics.choose_device("cuda")

    def settle(self, choose: Callable[[], device_numerics.DeviceChoice]) -> None:
        if self._options.device == "auto" and devices.find_gpu() is not None:
            choice = choose()
            if choice.device == "cuda":
                device = device_numerics.choose_device("auto")
                self._gpu, choice = (
                    (None, device_numerics.NO_GPU_WORKS) if device.type == "cpu" else (device, choice)
                )
            self.device_reason = choice.reason

    def survey(self, work: Work) -> None: ...

    def conclude(self) -> None: ...

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        with ExitStack() as stack:
            runner = stack.enter_context(closing(work.open(self._device, _NAME)))
            threads = stack.enter_context(ThreadPoolExecutor(work.slots))
            group = _PartThreads(work, runner, numbers, stop, self._on_event)
            stack.callback(group.give_up)
            yield from group.receipts(threads)

    def close(self) -> None:
        self._settings.close()


class _PartThreads:
    """Threads that take parts themselves: between two parts nobody waits for the driver, which makes receipts
    durable. At most as many parts as slots are in hand or without a durable receipt: that bounds the loss in
    a crash. Parts that ran out of memory are done again last, one after the other."""

    def __init__(
        self, work: Work, runner: Runner, numbers: Sequence[int], stop: Stop, on_event: OnEvent
    ) -> None:
        self._work = work
        self._runner = runner
        self._todo = deque(numbers)
        self._stop = stop
        self._on_event = on_event
        self._free_slots = threading.Semaphore(work.slots)
        self._made: SimpleQueue[_Made] = SimpleQueue()
        self._short: list[_Short] = []
        self._told_at = time.monotonic()

    def receipts(self, threads: ThreadPoolExecutor) -> Generator[Receipts, None, None]:
        """Receipts until all threads have ended; raises what one of them failed with."""
        yield from self._until_ended([threads.submit(self._take_parts) for _ in range(self._work.slots)])
        losses = WorkerFailures(self._work.part, 1)
        while self._short and not self._stop.requested:
            short, *self._short = self._short
            budget = self._work.lessened(short.number, losses.budget(short.number))
            losses.lessen(short.number, budget, short.reason)
            if budget is not None:
                self._on_event(MemoryShort(_NAME, short.number, budget, short.reason))
            yield from self._until_ended([threads.submit(self._do, short.number, budget)])

    def give_up(self) -> None:
        """Begin no more parts, and let those in hand fail where they can."""
        self._todo.clear()
        self._free_slots.release(self._work.slots)
        self._runner.abort()

    def _until_ended(self, busy: Sequence[Future[None]]) -> Generator[Receipts, None, None]:
        for thread in busy:
            thread.add_done_callback(self._made.put)
        left = len(busy)
        while left:
            results = self._found()
            receipts = tuple(each for each in results if isinstance(each, Receipt))
            yield receipts
            short = [each for each in results if isinstance(each, _Short)]
            self._short += short
            if receipts or short:
                self._free_slots.release(len(receipts) + len(short))
            ended = [each for each in results if isinstance(each, Future)]
            for thread in ended:
                thread.result()
            left -= len(ended)
            if left and time.monotonic() - self._told_at >= TICK_SECONDS:
                self._told_at = time.monotonic()
                self._on_event(WorkerProgress(_NAME, self._runner.in_hand()))

    def _take_parts(self) -> None:
        while True:
            self._free_slots.acquire()
            try:
                number = self._todo.popleft()
            except IndexError:
                return
            if self._stop.requested:
                return
            self._do(number, None)

    def _do(self, number: int, budget: int | None) -> None:
        try:
            self._made.put(self._runner.run(number, budget))
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_memory_error(error):
                raise
            self._made.put(_Short(number, first_line(error)))

    def _found(self) -> list[_Made]:
        results: list[_Made] = []
        with suppress(Empty):
            results.append(self._made.get(timeout=TICK_SECONDS))
            while True:
                results.append(self._made.get_nowait())
        return results


@dataclass(frozen=True, slots=True)
class _Short:
    number: int
    reason: str


_Made: TypeAlias = Receipt | _Short | Future[None]
