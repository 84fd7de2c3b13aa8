"""Whether a GPU makes a run faster: its time predicted from what was measured, on processors and on GPUs.

A merge is mostly a copy. Where storage is slower than arithmetic a GPU only adds a way through its memory, so
it is taken where it pays, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.errors import RaymergeError
from raymerge.merge_plan.columns import Ints, gather, ints, lists, products, starts
from raymerge.merge_plan.expressions import Expression
from raymerge.merge_plan.gathers import input_bytes
from raymerge.merge_plan.plan import Plan
from raymerge.methods import Access, find_method
from raymerge.planner.simulation import MethodSpeeds, measured_speeds
from raymerge.runtime.workers.sizing import WorkerGroupSize
from raymerge.units import format_duration

Floats: TypeAlias = npt.NDArray[np.float64]

_GAIN = 0.9
"""Share of the time on processors that a run on GPUs may take at most, for the GPUs to be taken."""


_GPU_COSTS: Mapping[Access, float] = MappingProxyType(
    {
        Access.ELEMENT: 1,
        Access.ROW: 2,
        # A pass for the statistics and selections by magnitude; the passes over memory alone count.
        Access.TENSOR: 3,
        Access.MATRIX: 3,
    }
)
"""What a byte of the sources costs a GPU, as a multiple of what it costs a linear combination: not measured,
and rough on purpose. Between storage and a GPU's memory lie two orders of magnitude, so that only what is off
by a multiple could change a choice, and then both would take nearly as long."""
_GPU_MATRIX_COST = 1.5
"""The same for a decomposition, for each row or column of the matrix, whichever are fewer."""
_MEASURED_SIDE = 1024
"""The smaller side of the matrices of which decompositions on processors were measured."""


class GpuError(RaymergeError):
    """A GPU cannot be measured, so that nothing speaks for it. Says why, as a phrase."""

    def choice(self) -> Choice:
        """The device that is left."""
        return Choice("cpu", f"the GPU cannot be measured: {self}")


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured in one worker, in bytes a second."""

    read: float | None
    """Reading a source, with all threads that read; None where that could not be measured."""
    write: float | None
    """Writing beside the output, durably; None likewise."""
    to_device: float
    """Copying to the GPU."""
    from_device: float
    """Copying from the GPU."""
    cpu: float
    """Bytes of three sources in bfloat16 that the threads of a worker combine linearly."""
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


def choose(probe: Probe, amounts: Amounts, *, cpu: WorkerGroupSize, gpu: WorkerGroupSize) -> Choice:
    """The device on which a run is predicted to be faster; processors unless a GPU gains a tenth.

    What a run does overlaps, so that its slowest part is its time. Of storage that many machines share, only
    a run could tell how far it keeps up with them: it counts as often as there are machines. Were it slower,
    it would be the limit of either device, and little would be lost with a GPU.

    Args:
        probe: what was measured in one worker.
        amounts: what is to be done.
        cpu: the workers that there would be on processors.
        gpu: those on GPUs.
    """
    if not amounts.computed:
        return Choice("cpu", "there is nothing to compute", probe)
    copies = amounts.computed / probe.to_device + amounts.made / probe.from_device
    on_cpu = {
        **_storage(probe, amounts, cpu.machines),
        "arithmetic": amounts.cpu_work / (probe.cpu * cpu.workers),
    }
    on_gpu = {
        **_storage(probe, amounts, gpu.machines),
        "copying": copies / gpu.workers,
        "arithmetic": amounts.gpu_work / (probe.gpu * gpu.workers),
    }
    device, reason = _compared(on_cpu, on_gpu)
    return Choice(device, reason + _reservation(probe, cpu, gpu), probe)


def _storage(probe: Probe, amounts: Amounts, machines: int) -> dict[str, float]:
    """Seconds that storage takes, as far as it was measured."""
    parts = {"reading": (amounts.read, probe.read), "writing": (amounts.written, probe.write)}
    return {part: nbytes / (speed * machines) for part, (nbytes, speed) in parts.items() if speed is not None}


def _compared(on_cpu: Mapping[str, float], on_gpu: Mapping[str, float]) -> tuple[Literal["cpu", "cuda"], str]:
    """The device to take and why, from the seconds of each part on either."""
    cpu, gpu = max(on_cpu.values()), max(on_gpu.values())
    times = [f"{format_duration(cpu)} on the CPU", f"{format_duration(gpu)} on the GPU"]
    if gpu < _GAIN * cpu:
        return "cuda", f"predicted {times[1]}, {times[0]}, where {_limit(on_cpu)} would be the limit"
    if _limit(on_cpu) in ("reading", "writing"):
        return "cpu", f"{_limit(on_cpu)} takes {format_duration(cpu)}, and the GPU would not help"
    return "cpu", f"predicted {times[0]}, {times[1]}, where {_limit(on_gpu)} would be the limit"


def _reservation(probe: Probe, cpu: WorkerGroupSize, gpu: WorkerGroupSize) -> str:
    """What a comparison takes for granted of storage, to be said with it."""
    speeds = {"reading": probe.read, "writing": probe.write}
    unknown = [part for part, speed in speeds.items() if speed is None]
    said = f"; {' and '.join(unknown)} could not be measured" if unknown else ""
    if len(unknown) < len(speeds) and max(cpu.machines, gpu.machines) > 1:
        counted = f"{cpu.machines} with CPU workers, {gpu.machines} with GPUs"
        said += f"; storage was measured on one machine and counted for each ({counted})"
    return said


def _limit(times: Mapping[str, float]) -> str:
    """What takes longest."""
    return max(times, key=lambda part: times[part])


def _amounts(plan: Plan) -> Amounts:
    rows = plan["rows"]
    made, first, count = (ints(rows, column) for column in ("nbytes", "first_input", "num_inputs"))
    sizes = np.concatenate([[0], np.cumsum(np.asarray(input_bytes(plan))[gather(first, count)])])
    ends = np.cumsum(count)
    cpu, gpu = _costs(plan)
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


def _costs(plan: Plan) -> tuple[Floats, Floats]:
    """What a byte of each row's sources costs on processors and on GPUs ``[rows]``."""
    speeds = measured_speeds()
    costs = np.array([_cost(each, speeds) for each in plan.expressions]).reshape(-1, 4)
    cpu, gpu, cpu_by_side, gpu_by_side = costs[ints(plan["rows"], "expression")].T
    sides = _smaller_sides(plan)
    return np.maximum(cpu, cpu_by_side * sides), np.maximum(gpu, gpu_by_side * sides)


def _cost(expression: Expression, speeds: MethodSpeeds) -> tuple[float, float, float, float]:
    """What a byte costs on processors and on GPUs at least, and for each element of a matrix's smaller side.

    Multiples of what it costs a linear combination; nothing where it is copied. For each element of a matrix
    a decomposition takes the longer the larger it is: in proportion to the smaller side, on processors from
    512 to 3072 at least. Of vectors the methods that decompose take the mean.
    """
    method = find_method(expression.method)
    if method is None:
        return 0, 0, 0, 0
    cpu = speeds.per_element(method.name) / speeds.per_element("linear")
    if method.decomposes:
        return 1, 1, cpu / _MEASURED_SIDE, _GPU_MATRIX_COST
    return cpu, _GPU_COSTS[method.access_with(expression.bind(keys=(), shape=()))], 0, 0


def _smaller_sides(plan: Plan) -> Ints:
    """The smaller side of each row's matrix: its first dimension by all others; 0 for a vector."""
    lengths, sizes = lists(plan["parts"], "shape")
    heights = np.ones(len(lengths), dtype=np.int64)
    heights[lengths > 0] = sizes[starts(lengths)[lengths > 0]]
    widths = products(lengths, sizes) // np.maximum(1, heights)
    sides = np.where(lengths > 1, np.minimum(heights, widths), 0)
    return np.asarray(sides[ints(plan["rows"], "first_part")])
