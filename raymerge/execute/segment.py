"""Makes segments: lanes that read, compute and write in turn, all under one byte budget.

Keeps the C allocator from holding on to much more than what lives.

Several lanes get and free memory of all sizes side by side. What they free stays with the allocator, in
pieces that the next tile often does not fit into: without a word it comes to two or three times of what is in
use at once.

Before the first segment everything is made ready that the plan's methods compute with."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import psutil

from raymerge import devices, methods
from raymerge.checkpoints.quantisation.block_codec import StoredScales
from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.deferred import torch
from raymerge.device_numerics import Fallback, return_free_memory
from raymerge.devices import DeviceError, failure_of
from raymerge.dtypes import DType
from raymerge.errors import DiskSpaceError, NonFiniteError, RaymergeError, TransientError
from raymerge.events import PartInHand
from raymerge.execute.compute import Scratch
from raymerge.execute.encoding import is_summed_at_once, warm_up_sums
from raymerge.execute.lane import Equipment, Lane, LaneState, LoadBuffer
from raymerge.execute.non_finite import first_non_finite
from raymerge.execute.non_finite_origin import find_cause
from raymerge.execute.output import ComputePermit, NotFinite, Output
from raymerge.execute.reading import LoadReader, read_plans
from raymerge.execute.receipts import UNFINISHED, JointReceipt, Receipt
from raymerge.execute.transfers import transfers_for
from raymerge.merge_plan.expressions import Expression
from raymerge.merge_plan.jobs import Jobs, Making, OpJob
from raymerge.merge_plan.joint import joint_costs, joint_ops
from raymerge.merge_plan.memory import Lane as Share
from raymerge.merge_plan.memory import Projection
from raymerge.merge_plan.tables import Plan
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.retry import KEPT
from raymerge.storage.store import ReadStore, Sink

_T = TypeVar("_T")
MakeOutputs: TypeAlias = "Callable[[Sequence[int], torch.device, str], dict[int, Receipt]]"
"""Makes a part of the plans with these numbers, on a device and with a note; gives the receipt of each."""
_CODED_COLUMNS = 256
"""Some blocks of every format, or one where they are longer."""
_CODES_OF_ELEMENT = 8
"""Codes of an element of packed integers, which holds more than those of other formats."""
_SHAPE = (
    methods.ROW_GROUP,
    (methods.SAMPLE_RUNS * methods.SAMPLE_LENGTH + methods.BLOCK) // methods.ROW_GROUP,
)
"""Long enough for a sample, and whole groups of rows."""


def warm_up(expressions: Sequence[Expression], device: torch.device) -> None:
    """Compute a little with each method, on zeros.

    Loops are compiled, or loaded, when they are first called: that takes time and memory that no segment
    should be charged with, and of which the idle worker's measure is to know. Decompositions, and methods
    whose settings are made for one shape, warm up as they go.

    Raises DeviceError: the device cannot be used at all; RuntimeError: a GPU failed, or has too little
    memory, as ``failure_of`` tells."""
    if device.type != "cpu":
        _reach(device)
    # Copies are looked at, too.
    first_non_finite(np.zeros(64, np.uint8), DType.BF16)
    done: set[tuple[str, int]] = set()
    for expression in expressions:
        method = methods.find_method(expression.method)
        settings = expression.bind(keys=(), shape=_SHAPE)
        key = (expression.method, len(settings.sources))
        if method is None or key in done or method.bound_to_shape:
            continue
        if method.access_with(settings) is not methods.Access.MATRIX:
            keys = tuple(range(1, len(settings.sources) + 1)) if method.random else ()
            bound = expression.bind(keys=keys, shape=_SHAPE)
            _compute(method, bound, device, has_base=expression.has_base)
            done.add(key)
    for encode in {each.encode for each in expressions if each.encode is not None}:
        _encode(encode, device)


def _reach(device: torch.device) -> None:
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        # Beginning to use a GPU fails with errors of any kind.
        raise DeviceError(str(error)) from error


def _encode(encode: Encoding, device: torch.device) -> None:
    unit = math.lcm(encode.block[1] or 1, _CODES_OF_ELEMENT)
    quant_spec = encode.quant_spec((encode.cut_height, -(-_CODED_COLUMNS // unit) * unit))
    codec, values = codec_of(encode.format), torch.zeros(quant_spec.shape, device=device)
    whole = None if encode.tensor_scale_dtype is None else torch.ones((), device=device)
    encoded = codec.encode(quant_spec, values, StoredScales(tensor_scale=whole))
    codec.encode(quant_spec, values, encoded.stored)
    codec.error_sums(quant_spec, codec.decode(quant_spec, encoded), encoded)
    if device.type == "cpu" and is_summed_at_once(encode):
        warm_up_sums()


def _compute(
    method: methods.Method, settings: methods.Settings, device: torch.device, *, has_base: bool
) -> None:
    count = _SHAPE[0] * _SHAPE[1]
    sources = torch.zeros(len(settings.sources), count, device=device)
    # Two kinds of numbers, for what does not look twice at tensors that are equal.
    sources[:, ::3] = 1.0 if method.takes is methods.Takes.WEIGHTS else 0.0
    tile = methods.Tile(torch.zeros(count, device=device) if has_base else None, sources, 0)
    kernel, inputs = method.kernel_with(settings), len(settings.sources) + has_base
    sample = partial(methods.sample_of, tile)
    state = methods.gather(method, settings, count, device, tiles=lambda: (tile,), sample=sample)
    kernel.apply(tile, settings, state)
    if device.type == "cpu" and isinstance(kernel, methods.StoredKernel):
        stored = methods.Stored(np.zeros(inputs * count, np.uint16), np.arange(inputs) * count, count, 0)
        state = methods.gather(method, settings, count, device, tiles=lambda: (stored,), sample=sample)
        out = np.empty(count, np.uint16)
        kernel.apply_stored(stored, settings, state, out)
        # What several plans have in common.
        if kernel.marks_at_once:
            kernel.apply_stored(kernel.marked(stored, settings, state), settings, state, out)


class Resident(NamedTuple):
    now: int
    most: int
    """So far; 0 where the system does not tell."""
    shared: int
    """Those now that are of files (libraries, say), or shared with others."""

    @property
    def own(self) -> int:
        return self.now - self.shared


_RESIDENT = re.compile(rb"^(Vm\w+|Rss\w+):\s*(\d+) kB$", re.MULTILINE)


def _resident_bytes(mapped_bytes: int = 0) -> Resident:
    """``mapped_bytes``: of files in the place of a lane's memory. They count as if that were there."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            # Every load asks: a few lines, rather than all taken apart.
            lines = dict(_RESIDENT.findall(file.read(1 << 14)))
        names = (b"VmRSS", b"VmHWM", b"RssFile", b"RssShmem")
        now, most, of_files, shared = (int(lines[name]) << 10 for name in names)
    except (OSError, KeyError):  # not Linux
        memory = psutil.Process().memory_info()
        return Resident(int(memory.rss), 0, int(getattr(memory, "shared", 0)))
    return Resident(now, most, of_files + shared - mapped_bytes)


@dataclass(slots=True)
class HeapWatch:
    """Has the allocator give back free memory whenever the process has grown by more than ``limit`` bytes."""

    limit: int
    release: Callable[[], None] = return_free_memory
    resident: Callable[[], Resident] = _resident_bytes
    at_first: Resident = field(init=False)
    base: int = field(init=False)
    most: int = 0

    def __post_init__(self) -> None:
        self.at_first = self.resident()
        self.base = self.at_first.own

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the process has grown by.

        Between two looks at it the system itself keeps its peak: of use when it is higher than any that there
        was before this watch. What has come into memory of files, libraries above all, is no growth."""
        first, latest = self.at_first, self.resident()
        if latest.most <= first.most:
            return self.most
        return max(self.most, latest.most - first.now - max(0, latest.shared - first.shared))

    def check(self) -> None:
        """Look, and give free memory back if it is time; cheap enough for every load."""
        own = self.resident().own
        self.most = max(self.most, own - self.at_first.own)
        if own - self.base <= self.limit:
            return
        self.release()
        # What stays is in use, and more than loads are: something else grew. Without this every load would
        # ask again, in vain.
        self.base = max(self.base, self.resident().own - self.limit // 2)


@dataclass(frozen=True, slots=True)
class _LaneInHand:
    segment: int
    total_bytes: int
    turn: ComputePermit
    reader: LoadReader
    outputs: Mapping[int, Output]

    def snapshot(self) -> PartInHand:
        written = sum(each.written_bytes for each in self.outputs.values())
        done = min(self.total_bytes, self.reader.final_bytes + written)
        return PartInHand(self.segment, self.turn.activity, self.reader.tensor, done, self.total_bytes)


_PROCESSOR = torch.device("cpu")


class OutputError(Exception):
    """What is wrong with some of several plans that are carried out together."""

    def __init__(self, outputs: Sequence[int], error: RaymergeError) -> None:
        super().__init__(str(error))
        self.outputs = tuple(outputs)
        # It is kept, and its frames would keep a lane's memory.
        each: BaseException | None = error
        while each is not None:
            each.__traceback__ = None
            each = each.__cause__ or each.__context__
        self.error = error


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """A plan that is carried out, and where its shards grow under their names with ``UNFINISHED``."""

    plan: Plan
    staging: Sink
    sources: Sequence[int]
    """The numbers of its sources among all that are read."""


def _source_names(outputs: Sequence[PlanOutput]) -> dict[int, str]:
    return {
        number: source["name"]
        for each in outputs
        for number, source in zip(each.sources, each.plan.manifest["sources"], strict=False)
    }


class SegmentRunner:
    """Makes segments of one plan, or of several whose outputs lie alike, in one process, each in a thread of
    its caller's; as many at a time as the projection has lanes. Who waits until bytes are durable has no lane
    any more, and another may take it.

    At most ``threads`` segments are computed at the same time."""

    def __init__(
        self,
        outputs: Sequence[PlanOutput],
        sources: Sequence[ReadStore],
        *,
        device: torch.device,
        projection: Projection,
        threads: int,
        name: str,
    ) -> None:
        self._jobs = [Jobs(o.plan, output=number, sources=o.sources) for number, o in enumerate(outputs)]
        self._names = _source_names(outputs)
        self._sources = sources
        self._stagings = [each.staging for each in outputs]
        self._projection = projection
        self._name = name
        self._device = device
        expressions = dict.fromkeys(each for output in outputs for each in output.plan.expressions)
        self._fallback = Fallback(device, self._warmed(tuple(expressions)))
        self._idle: list[Equipment] = []
        self._costs = joint_costs([each.plan for each in outputs])
        self._in_hand: dict[int, _LaneInHand] = {}
        self._lanes = threading.Semaphore(projection.lanes)
        self._maps = PageMaps()
        self._heap = HeapWatch(projection.peak, resident=lambda: _resident_bytes(self._maps.mapped_bytes))
        self._turns = threading.Semaphore(threads)
        self._lane_state = LaneState(
            seeds=[int(each.plan.manifest["seed"]) for each in outputs],
            aborted=threading.Event(),
            watch=self._heap.check,
        )

    def _warmed(self, expressions: Sequence[Expression]) -> str:
        """Have ready what computes; what notes say of a GPU that turns out to be of no use."""
        if self._device.type == "cpu":
            warm_up(expressions, _PROCESSOR)
            return ""
        try:
            warm_up(expressions, self._device)
        except RuntimeError as error:
            failure = failure_of(error)
            if failure is None:
                raise
        else:
            return ""
        warm_up(expressions, _PROCESSOR)
        # Others may have its memory for a moment; segments will see.
        return failure.note if failure.is_lasting else ""

    def run(self, segment: int) -> Receipt:
        """Make one segment of the only plan and return when its bytes are durable.

        Where a GPU fails, or has too little memory, the segment is made on the processor, and the receipt has
        a note of it.

        Raises NonFiniteError: a source or a result holds NaN or infinity; CheckpointError: a source cannot be
        read as it was when the plan was made; DiskSpaceError: the staging directory's file system is full;
        IncompleteError: ``abort`` was called."""
        return self.on_device(partial(self.staged, segment, (0,)))[0]

    def staged(
        self, segment: int, outputs: Sequence[int], device: torch.device, note: str
    ) -> dict[int, Receipt]:
        """Make a segment of these plans in their staging directories, as ``made`` does."""
        return self.made(segment, device, note, sinks={each: self._stagings[each] for each in outputs})

    def run_jointly(self, part: int, outputs: Sequence[int], make: MakeOutputs) -> JointReceipt:
        """Have one part of these plans made with one read. What some of them fail with is in the receipt, and
        the others lose nothing by it; raises as ``run`` does what is wrong with all of them."""
        failures: dict[int, RaymergeError] = {}
        made: dict[int, Receipt] = {}
        while not made and len(failures) < len(outputs):
            left = [number for number in outputs if number not in failures]
            try:
                made = self.on_device(partial(make, left))
            except OutputError as error:
                failures |= dict.fromkeys(error.outputs, error.error)
        own = tuple(made.values())
        return JointReceipt(
            segment=part,
            read_bytes=sum(each.read_bytes for each in own),
            written_bytes=sum(each.written_bytes for each in own),
            seconds=max((each.seconds for each in own), default=0.0),
            worker=self._name,
            digests={},
            peak_rss=max((each.peak_rss for each in own), default=0),
            peak_device=max((each.peak_device for each in own), default=0),
            note=own[0].note if own else "",
            by_output=made,
            failures=failures,
        )

    def on_device(self, make: Callable[[torch.device, str], _T]) -> _T:
        """What is made on the device, or anew on the processor where a GPU fails."""
        return self._fallback.run(make)

    def in_hand(self) -> tuple[PartInHand, ...]:
        return tuple(each.snapshot() for each in tuple(self._in_hand.values()))

    def rest(self) -> None:
        """Give back the memory of lanes that have nothing to do; they get it anew."""
        self._idle.clear()

    def abort(self) -> None:
        """Have every segment in hand fail at its next load."""
        self._lane_state.aborted.set()

    def made(
        self,
        segment: int,
        device: torch.device,
        note: str,
        *,
        sinks: Mapping[int, Sink],
        makings: Sequence[Making] | None = None,
    ) -> dict[int, Receipt]:
        """Make a segment of the plans with these numbers, or what else is given in its place; raises as
        ``run`` does, and a GPU's errors; OutputError of several plans: what is wrong with some of them.

        The note is for the receipts. ``makings`` are made in this order, and written in the order of their
        places as far as can be; None for the segment's ops, in any order."""
        with self._lanes:
            started, lost_pages = time.monotonic(), self._maps.lost_pages
            ops = self._ops(segment, sinks, makings)
            try:
                reader, outputs = self._written(segment, ops, device, sinks, in_order=makings is not None)
            finally:
                self._in_hand.pop(segment, None)
        for number, output in outputs.items():
            with self._failing(number):
                for shard in sorted(output.shards):
                    sinks[number].sync(shard + UNFINISHED)
        if self._maps.lost_pages > lost_pages:
            self._refuse_lost_pages()
        # What was read for all stands in the receipt of the first.
        first, seconds = min(outputs), round(time.monotonic() - started, 6)
        return {
            number: Receipt(
                segment=segment,
                read_bytes=reader.read_bytes if number == first else 0,
                written_bytes=output.written_bytes,
                seconds=seconds,
                worker=self._name,
                digests=output.digests,
                encoding_errors=output.encoding_errors,
                exactness=output.exactness,
                peak_rss=self._heap.peak_bytes,
                peak_device=devices.peak_bytes(device),
                note=note,
            )
            for number, output in outputs.items()
        }

    def _ops(self, segment: int, numbers: Iterable[int], makings: Sequence[Making] | None) -> Sequence[OpJob]:
        jobs = [self._jobs[number] for number in numbers]
        own = [each.ops(segment) if makings is None else each.these(makings) for each in jobs]
        order = None if makings is None else [number for number, _ in makings]
        return own[0] if len(own) == 1 else joint_ops(own, order)

    @contextmanager
    def _failing(self, *numbers: int) -> Iterator[None]:
        """Say which of several plans an error is of."""
        try:
            yield
        except (NonFiniteError, DiskSpaceError) as error:
            if len(self._jobs) == 1 or not numbers:
                raise
            raise OutputError(numbers, error) from error

    def _refuse_lost_pages(self) -> None:
        """Raises CheckpointError: a source was cut short; TransientError: a page of one could not be read."""
        for source in self._sources:
            source.check_expected()
        raise TransientError(f"a cached page of a source could not be read any more. {KEPT}")

    def _written(
        self,
        segment: int,
        ops: Sequence[OpJob],
        device: torch.device,
        sinks: Mapping[int, Sink],
        *,
        in_order: bool,
    ) -> tuple[LoadReader, dict[int, Output]]:
        maps = self._maps if device.type == "cpu" else None
        reader, turn = LoadReader(self._sources, maps), ComputePermit(self._turns)
        equipment = self._equipment(device)
        outputs = {
            number: Output(sink, equipment.blocks[number], turn, in_order=in_order)
            for number, sink in sinks.items()
        }
        cut = read_plans(ops, self._share(device), device)
        self._in_hand[segment] = _LaneInHand(segment, self._costs[segment], turn, reader, outputs)
        try:
            Lane(self._lane_state, turn, reader, outputs, equipment).run(tuple(cut))
        except NotFinite as error:
            with self._failing(error.op.output):
                raise self._non_finite_origin(error.op, reader, equipment.buffer) from None
        except DiskSpaceError:
            with self._failing(*(number for number, output in outputs.items() if output.has_failed)):
                raise
        # Only now, when nothing can be on its way into it or out of it.
        self._idle.append(equipment)
        return reader, outputs

    def _equipment(self, device: torch.device) -> Equipment:
        idle = self._idle_one(device)
        if idle is not None:
            return idle
        # What there is, is for another device; it makes way, so that there is never more than for all lanes.
        with suppress(IndexError):
            self._idle.pop()
        share, transfers = self._share(device), transfers_for(device)
        mine = (self._projection.peak - self._projection.shared) // self._projection.lanes
        limit = min(mine, share.budget) - share.all_write_bytes
        return Equipment(
            transfers=transfers,
            buffer=LoadBuffer(
                transfers,
                usual_bytes=share.load_bytes,
                limit=limit,
                maps=self._maps if device.type == "cpu" else None,
            ),
            blocks=[transfers.buffer(share.write_bytes) for _ in self._jobs],
            scratch=Scratch(transfers.device),
        )

    def _idle_one(self, device: torch.device) -> Equipment | None:
        """In a function of its own, whose names do not hold what is to make way."""
        for equipment in tuple(self._idle):
            if equipment.transfers.device == device:
                with suppress(ValueError):
                    self._idle.remove(equipment)
                    return equipment
        return None

    def _share(self, device: torch.device) -> Share:
        lane = self._projection.lane
        return lane if device.type == "cpu" else lane.on_gpu

    def _non_finite_origin(self, op: OpJob, reader: LoadReader, buffer: LoadBuffer) -> NonFiniteError:
        """What made an op NaN or infinite; it is read once more, into memory of the host."""
        cut = read_plans([op], self._projection.lane, _PROCESSOR)
        loads = [load for read_plan in cut for load in read_plan.loads]
        read = ((load, reader.read(load, buffer.buffer(load))) for load in loads)
        return NonFiniteError(find_cause(op, read, self._names))
