"""The tensors of a merge one after the other, in bounded memory and without files.

While the caller has one tensor, the next are made: as many as the memory for them holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from raymerge import events
from raymerge.checkpoints.header import StoredTensor
from raymerge.deferred import torch
from raymerge.errors import PlanError, Problem
from raymerge.events import OnEvent
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.elements import torch_dtype
from raymerge.merge_plan.plan import ints, makers, op_bytes
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.planner.merges import PlannedMerge, planned_tensors
from raymerge.runtime.driver.in_memory import check_stages, in_process, op_maker, share_memory, started_pool
from raymerge.runtime.driver.merge_store import alone_of, files_beside, over_results, store_share
from raymerge.runtime.driver.run import planned, report_segment

if TYPE_CHECKING:
    from raymerge.execute.in_memory import OpMaker

_NEAR = 4
"""Tensors between codes and the scales that are made with them, at most, for both to be made at once."""
_SMALLEST = 1 << 20


class TensorFacts(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Part(NamedTuple):
    """Ops that are made by one lane, and the bytes that they are read from and written to."""

    ops: tuple[int, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tensors that are made at once."""

    tensors: tuple[StoredTensor, ...]
    parts: tuple[_Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)


class TensorStream:
    """An iterable of ``(name, tensor)`` of what a recipe makes, codes and scales of quantised tensors as they
    are stored. Each iteration makes all of them afresh, with the bytes that ``submit`` writes, in natural
    order of their names, which is that of the shards. Closing an iterator early ends the work."""

    def __init__(self, merges: Sequence[PlannedMerge], options: RunOptions, *, on_event: OnEvent) -> None:
        """Raises PlanError: the plan has problems, or a tensor of a dtype that torch lacks; OptionError: too
        little memory, or options that ask for other processes."""
        self._merges, self._options, self._on_event = tuple(merges), in_process(options), on_event
        self._plan = merges[-1].plan.require()
        check_stages(merges)
        tensors = tuple(planned_tensors(self._plan).values())
        self._facts = tuple(map(_facts, tensors))
        ops = _OpTable(self._plan)
        units = tuple(ops.units(tensors))
        largest = max(units, key=_nbytes, default=())
        what = largest[0].name if largest else "this model"
        own = alone_of(self._options, len(merges))
        self._share = share_memory(merges[-1], own, whole=_nbytes(largest), what=what)
        self._peak = self._share.peak + sum(store_share(each, own).peak for each in merges[:-1])
        # One that the caller has, one that is next, and one for each lane.
        target = self._share.held // (2 + self._share.projection.lanes)
        self._batches = tuple(ops.batches(units, max(_SMALLEST, target)))

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def projected_peak(self) -> int:
        """Most bytes of memory that an iteration takes, with the tensor that the caller was given last."""
        return self._peak

    def metadata(self) -> tuple[TensorFacts, ...]:
        """Name, dtype and shape of every tensor in their order, from the plan alone."""
        return self._facts

    def files(self) -> dict[str, bytes]:
        """The files beside the weights, by name: config, tokenizer and other companions, as ``submit`` writes
        them. Raises CheckpointError: they cannot be read."""
        return files_beside(self._merges)

    def __len__(self) -> int:
        return len(self._facts)

    def __iter__(self) -> Generator[tuple[str, torch.Tensor]]:
        """Raises CheckpointError: a source cannot be read, or was changed; NonFiniteError: NaN or infinity in
        a source or a result; IncompleteError: storage failed for too long."""
        with self._maker() as maker:
            yield from _Ahead(maker, self._batches, self._share.held, self._report)

    @contextmanager
    def _maker(self) -> Iterator[OpMaker]:
        self._on_event(self._planned())
        with ExitStack() as stack:
            pool = stack.enter_context(started_pool(self._merges, self._options))
            merge = stack.enter_context(over_results(self._merges, self._options, pool))
            maker = stack.enter_context(op_maker(merge, self._share.projection, pool))
            reason = pool.device_reason
            self._on_event(events.Started(pool.workers, pool.device, 0, 0, pool.threads, reason))
            yield maker

    def _planned(self) -> events.Planned:
        parts = [part for batch in self._batches for part in batch.parts]
        event = planned(self._plan, self.projected_peak, self._plan.manifest["notes"])
        return replace(event, segments=len(parts), total_bytes=sum(part.cost for part in parts))

    def _report(self, number: int, receipt: Receipt, cost: int) -> None:
        report_segment(replace(receipt, segment=number), cost, self._on_event)


_Report: TypeAlias = "Callable[[int, Receipt, int], None]"


class _UnderWay(NamedTuple):
    parts: Sequence[tuple[_Part, Future[Receipt]]]
    tensors: deque[tuple[StoredTensor, torch.Tensor]]
    """With the memory, uint8, that each is made in."""


class _Ahead:
    """Tensors that are made before they are taken, as far as the memory for them allows."""

    def __init__(self, maker: OpMaker, batches: Sequence[_Batch], limit: int, report: _Report) -> None:
        self._maker, self._limit, self._report = maker, limit, report
        self._todo = deque(batches)
        self._under_way: deque[_UnderWay] = deque()
        self._held = self._num_parts = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._begin()
        while self._under_way:
            parts, tensors = self._under_way.popleft()
            for part, future in parts:
                self._report(self._num_parts, future.result(), part.cost)
                self._num_parts += 1
            while tensors:
                nbytes = tensors[0][0].nbytes
                # Nothing here may hold on to what the caller drops.
                yield _named(*tensors.popleft())
                self._held -= nbytes
                self._begin()

    def _begin(self) -> None:
        """Begin what there is memory for; at least one, where none is held."""
        while self._todo and (not self._held or self._held + self._todo[0].nbytes <= self._limit):
            batch = self._todo.popleft()
            self._held += batch.nbytes
            self._under_way.append(self._begun(batch))

    def _begun(self, batch: _Batch) -> _UnderWay:
        from raymerge.execute.in_memory import Window

        made = [(each, torch.empty(each.nbytes, dtype=torch.uint8)) for each in batch.tensors]
        windows = [Window(each.key, each.offset, memory.numpy()) for each, memory in made]
        parts = [(part, self._maker.submit(part.ops, windows)) for part in batch.parts]
        return _UnderWay(parts, deque(made))


def _named(tensor: StoredTensor, memory: torch.Tensor) -> tuple[str, torch.Tensor]:
    return tensor.name, memory.view(torch_dtype(tensor.dtype)).view(tensor.shape)


def _facts(tensor: StoredTensor) -> TensorFacts:
    try:
        return TensorFacts(tensor.name, torch_dtype(tensor.dtype), tensor.shape)
    except ValueError as error:
        what = f"{error}, and cannot be handed over as a tensor."
        raise PlanError(Problem(tensor.name, what, "Submit the recipe, and read its files.")) from error


def _nbytes(tensors: Sequence[StoredTensor]) -> int:
    return sum(each.nbytes for each in tensors)


class _OpTable:
    """The ops of each tensor, and what they are made by and cost."""

    def __init__(self, plan: Plan) -> None:
        ops = plan["ops"]
        tensors, self._makers = ints(ops, "tensor"), makers(plan)
        self._nbytes, self._read_bytes = ints(ops, "nbytes"), op_bytes(plan)
        # Those of a tensor follow on each other.
        names = plan["tensors"].column("name").to_pylist()
        firsts = np.flatnonzero(np.diff(tensors, prepend=-1)).tolist()
        spans = pairwise([*firsts, len(tensors)])
        self._ops = {names[tensors[first]]: range(first, stop) for first, stop in spans}

    def units(self, tensors: Sequence[StoredTensor]) -> Iterator[tuple[StoredTensor, ...]]:
        """Tensors in order, with those together that are made by the same ops, as codes and scales are."""
        starts, last_by_maker = list(range(len(tensors))), dict[int, int]()
        for place, tensor in enumerate(tensors):
            maker = int(self._makers[self._ops[tensor.name][0]])
            before = last_by_maker.get(maker, place)
            if place - before <= _NEAR:
                starts[before + 1 : place + 1] = [starts[before]] * (place - before)
            last_by_maker[maker] = place
        for _, members in groupby(range(len(tensors)), key=starts.__getitem__):
            yield tuple(tensors[each] for each in members)

    def batches(self, units: Iterable[Sequence[StoredTensor]], target: int) -> Iterator[_Batch]:
        """Units in order, as many at once as have ``target`` bytes together, and at least one."""
        batch: list[StoredTensor] = []
        for unit in units:
            if batch and _nbytes(batch) + _nbytes(unit) > target:
                yield _Batch(tuple(batch), tuple(self._parts(batch, target)))
                batch = []
            batch += unit
        if batch:
            yield _Batch(tuple(batch), tuple(self._parts(batch, target)))

    def _parts(self, tensors: Sequence[StoredTensor], target: int) -> Iterator[_Part]:
        """The ops of these tensors, what one maker makes side by side, cut into parts of ``target`` bytes."""
        ops = np.sort(np.concatenate([np.asarray(self._ops[each.name]) for each in tensors]))
        ordered = ops[np.argsort(self._makers[ops], kind="stable")]
        own: list[int] = []
        nbytes = 0
        for _, members in groupby(ordered.tolist(), key=self._makers.__getitem__):
            made = list(members)
            size = int(self._nbytes[made].sum())
            if own and nbytes + size > target:
                yield self._part(own)
                own, nbytes = [], 0
            own += made
            nbytes += size
        if own:
            yield self._part(own)

    def _part(self, ops: Sequence[int]) -> _Part:
        read = self._read_bytes[np.unique(self._makers[list(ops)])].sum()
        return _Part(tuple(ops), int(read + self._nbytes[list(ops)].sum()))
