"""Whether a GPU makes a run faster: its time predicted from what was measured, on processors and on GPUs.

A merge is mostly a copy. Where storage is slower than arithmetic a GPU only adds a way through its memory, so
it is taken where it pays, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from raymerge.methods import Access, find_method
from raymerge.planner.assemblies import input_bytes
from raymerge.planner.columns import gather, ints, lists
from raymerge.planner.plan import Plan
from raymerge.units import format_duration

_GAIN = 0.9
"""Share of the time on processors that a run on GPUs may take at most, for the GPUs to be taken."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a byte of the sources costs, as a multiple of what it costs a linear combination."""

    cpu: float
    """On processors."""
    gpu: float
    """On GPUs."""


_COSTS: Mapping[Access, Cost] = MappingProxyType(
    {
        Access.ELEMENT: Cost(1, 1),
        Access.ROW: Cost(2, 2),
        # A pass for the statistics and selections by magnitude; on GPUs the passes over memory alone count.
        Access.TENSOR: Cost(4, 3),
        # Decompositions: seconds for matrices whose sum takes milliseconds, ten times as many on processors.
        Access.MATRIX: Cost(2000, 10_000),
    }
)
"""Rough on purpose: between storage and a GPU's memory lie two orders of magnitude, so that only what is off
by a multiple could change a choice, and then both would take nearly as long."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured in one worker, in bytes a second."""

    read: float
    """Reading a source, with all threads that read."""
    write: float
    """Writing beside the output, durably."""
    to_device: float
    """Copying to the GPU."""
    from_device: float
    """Copying from the GPU."""
    cpu: float
    """Bytes of three sources in bfloat16 that the threads of a worker combine."""
    gpu: float
    """Bytes of the same that the GPU combines."""
    name: str
    """The GPU."""

    def to_json(self) -> dict[str, Any]:
        """JSON form, as workers send it and the run record keeps it."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Probe:
        """Inverse of ``to_json``."""
        return Probe(**data)


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a run moves and computes, in bytes."""

    read: int
    """Read from sources."""
    written: int
    """Written to shards."""
    computed: int
    """Of what is read, what arithmetic is done on."""
    made: int
    """Of what is written, what arithmetic makes."""
    cpu_work: float
    """What is computed, each byte counted by what it costs on processors."""
    gpu_work: float
    """The same, by what it costs on GPUs."""

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.read + other.read,
            self.written + other.written,
            self.computed + other.computed,
            self.made + other.made,
            self.cpu_work + other.cpu_work,
            self.gpu_work + other.gpu_work,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The device of a run."""

    device: Literal["cpu", "cuda"]
    """Its kind."""
    reason: str
    """Why, as a phrase."""
    probe: Probe | None = None
    """What was measured, if anything was."""

    def to_json(self) -> dict[str, Any]:
        """JSON form, as the run record keeps it."""
        return asdict(self)


def amounts_of(plans: Iterable[Plan]) -> Amounts:
    """What plans move and compute together."""
    total = Amounts(0, 0, 0, 0, 0, 0)
    for plan in plans:
        total += _amounts(plan)
    return total


def choose(probe: Probe, amounts: Amounts, *, cpu_workers: int, gpus: int) -> Choice:
    """The device on which a run is predicted to be faster; processors unless a GPU gains a tenth.

    What a run does overlaps, so that its slowest part is its time.

    Args:
        probe: what was measured.
        amounts: what is to be done.
        cpu_workers: workers that there would be on processors.
        gpus: GPUs that there are.
    """
    storage = {"reading": amounts.read / probe.read, "writing": amounts.written / probe.write}
    on_cpu = {**storage, "arithmetic": amounts.cpu_work / (probe.cpu * cpu_workers)}
    copies = amounts.computed / probe.to_device + amounts.made / probe.from_device
    on_gpu = {**storage, "copying": copies / gpus, "arithmetic": amounts.gpu_work / (probe.gpu * gpus)}
    cpu, gpu = max(on_cpu.values()), max(on_gpu.values())
    if gpu < _GAIN * cpu:
        return Choice("cuda", _compared(("GPU", gpu), ("CPU", cpu), _limit(on_cpu)), probe)
    if _limit(on_cpu) in storage:
        reason = f"{_limit(on_cpu)} takes {format_duration(cpu)}, and the GPU would not help"
    else:
        reason = _compared(("CPU", cpu), ("GPU", gpu), _limit(on_gpu))
    return Choice("cpu", reason, probe)


def _compared(taken: tuple[str, float], left: tuple[str, float], limit: str) -> str:
    """Two devices with the seconds predicted on each, and what is slow on the one that is left."""
    (kind, seconds), (other, others) = taken, left
    times = f"{format_duration(seconds)} on the {kind}, {format_duration(others)} on the {other}"
    return f"predicted {times}, where {limit} would be the limit"


def _limit(times: Mapping[str, float]) -> str:
    """What takes longest."""
    return max(times, key=lambda part: times[part])


def _amounts(plan: Plan) -> Amounts:
    rows = plan["rows"]
    made, expression = ints(rows, "nbytes"), ints(rows, "expression")
    first, count = ints(rows, "first_input"), ints(rows, "num_inputs")
    sizes = np.concatenate([[0], np.cumsum(np.asarray(input_bytes(plan))[gather(first, count)])])
    ends = np.cumsum(count)
    costs = [_cost(each.method) for each in plan.expressions]
    cpu, gpu = (np.array([getattr(each, kind) for each in costs])[expression] for kind in ("cpu", "gpu"))
    # Equal rows are made once, and written to each of their places.
    is_made = ints(rows, "copy_of") < 0
    taken = np.where(is_made, sizes[ends] - sizes[ends - count], 0)
    return Amounts(
        read=int(taken.sum()),
        written=int((made * (1 + lists(rows, "also")[0]))[is_made].sum()),
        computed=int(taken[cpu > 0].sum()),
        made=int(made[is_made & (cpu > 0)].sum()),
        cpu_work=float((taken * cpu).sum()),
        gpu_work=float((taken * gpu).sum()),
    )


def _cost(method: str) -> Cost:
    """Nothing for bytes that are copied."""
    found = find_method(method)
    return Cost(0, 0) if found is None else _COSTS[found.access]
