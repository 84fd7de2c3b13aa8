"""Estimates how long a run of a plan takes on a cluster, from what the plan moves and computes.

Storage, links, threads and cores are each busy for so many bytes or seconds over their speed; no run is
shorter than the busiest of them (a roofline). A segment alone takes the sum D of reading, computing, writing.
With K segments in flight, N of them take ``N (D + (K - 1) B) / K`` at most, B the busiest one's time for a
segment (Zahorjan et al.: Balanced job bound analysis of queueing networks, CACM 1982)."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.dtypes import DType
from raymerge.errors import OptionError, Problem
from raymerge.merge_plan.joint import joint_read_bytes
from raymerge.merge_plan.memory import Lane, lanes_of, op_kinds, project
from raymerge.merge_plan.plan import (
    Ints,
    Plan,
    codes,
    input_bytes,
    ints,
    joined_sums,
    lists,
    op_bytes,
    starts,
)
from raymerge.methods import methods

Floats: TypeAlias = npt.NDArray[np.float64]
_FINISHING_SECONDS, _FINISHING_PER_TENSOR = 0.2, 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    workers: int = 1
    storage: float | None = None
    read: float | None = None
    write: float | None = None
    per_worker: float | None = None
    """None: limited by storage alone."""
    compute: float | None = None
    """Bytes of sources per thread, the base counted; None for measured speeds."""
    threads: int = 4
    cores: int | None = None
    """Of a worker, which computes, reads and writes on them; None: unlimited."""
    per_core: float | None = None
    """What a core reads or writes, where bytes take its time (cached files, object storage); else None."""
    lanes: int | None = None
    """Segments that a worker has in flight, if its memory allows; None for two more than threads."""
    memory: int | None = None
    """Bytes per worker; None for the budget of the plan."""
    overhead: float = 0.005
    """Seconds that a worker loses with each segment in flight, before it begins."""
    driver: float = 0.001
    """Seconds in which the driver takes one receipt and hands out the next segment."""
    startup: float = 8.0

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise OptionError(problems)

    def _problems(self) -> Iterator[Problem]:
        for name in ("workers", "threads", "cores", "lanes"):
            if (given := getattr(self, name)) is not None and given < 1:
                yield Problem(f"--simulate {name}", f"{given} {name} cannot do anything.", "Give 1 or more.")
        for name in ("storage", "read", "write", "per_worker", "compute", "per_core", "memory"):
            if (given := getattr(self, name)) is not None and not 0 < given < math.inf:
                yield Problem(f"--simulate {name}", f"{given} moves nothing.", "Give more than 0.")
        for name in ("overhead", "driver", "startup"):
            if not 0 <= getattr(self, name) < math.inf:
                yield Problem(f"--simulate {name}", f"{getattr(self, name)} is no time.", "Give 0 or more.")
        if self.storage is None and None in (self.read, self.write):
            remedy = "Give storage=2GB/s for reading and writing together, or both read= and write=."
            yield Problem("--simulate", "the speed of the storage is not given.", remedy)


@dataclass(frozen=True, slots=True)
class MethodSpeeds:
    """Seconds that one thread needs, while all cores are busy."""

    by_method: Mapping[str, float]
    other: float
    """The same for methods that are not listed: a cautious guess."""
    copied_byte: float
    by_tensor: Mapping[str, float]
    """For each tensor, or piece of one, beyond those for its elements."""
    decoded: float = 0.0
    """For each element of a source that is stored quantised, beyond those."""
    encoded: float = 0.0


def measured_speeds() -> MethodSpeeds:
    table = tomllib.loads((files("raymerge.planner") / "simulate_speeds.toml").read_text(encoding="utf-8"))
    by_method = {name: value * 1e-9 for name, value in table["methods"].items()}
    by_tensor = {name: value * 1e-6 for name, value in table["tensors"].items()}
    other, copied, *coding = (table[name] * 1e-9 for name in ("other", "copied_byte", "decoded", "encoded"))
    return MethodSpeeds(by_method, other, copied, by_tensor, *coding)


@dataclass(frozen=True, slots=True)
class SegmentLoads:
    read_bytes: Floats
    """Repeated reads for statistics counted again."""
    write_bytes: Floats
    thread_seconds: Floats

    def __len__(self) -> int:
        return len(self.read_bytes)


def segment_loads(
    plan: Plan, lane: Lane, speeds: MethodSpeeds, *, compute: float | None = None
) -> SegmentLoads:
    """The loads of a plan's segments.

    What ``lane``, a lane's share of the worker's budget, cannot keep is read again for every pass.
    ``compute`` is bytes of sources per second and thread, in place of the methods' speeds."""
    rows, expressions = plan["ops"], plan.expressions
    made = (ints(rows, "copy_of") < 0) & (ints(rows, "made_with") < 0)
    copies = np.array([each.is_copy for each in expressions], dtype=np.bool_)[ints(rows, "expression")]
    once = op_bytes(plan) * made
    computing = once / compute if compute is not None else _method_seconds(plan, speeds)
    # Ops that share a scale are made once more by each of the others, to find the largest magnitude of all.
    computing = (computing + joined_sums(plan, computing)) * made
    seconds = np.where(copies, once * speeds.copied_byte, computing)
    read = once * (1 + op_kinds(plan).read_again(lane)) + joined_sums(plan, once)
    written = ints(rows, "nbytes") * (1 + lists(rows, "also")[0]) * made
    # A segment's ops lie side by side, so sums over runs are sums over segments.
    lengths = ints(plan["segments"], "num_ops")
    return SegmentLoads(*(_run_sums(lengths, each) for each in (read, written, seconds)))


def _method_seconds(plan: Plan, speeds: MethodSpeeds) -> Floats:
    rows, inputs, expressions = plan["ops"], plan["inputs"], plan.expressions
    which, num_inputs = ints(rows, "expression"), ints(rows, "num_inputs")
    dtypes, names = codes(inputs, "dtype")
    bits = np.array([DType(name).bits for name in names], dtype=np.float64)[dtypes]
    elements = _run_sums(num_inputs, input_bytes(plan) * 8 / bits)
    decoded = _run_sums(num_inputs, ints(inputs, "nbytes") * 8 / bits * (ints(inputs, "scales") >= 0))
    encoded = np.array([each.encode is not None for each in expressions], dtype=np.bool_)[which]
    named = [each.method for each in expressions]
    per_element = np.array([speeds.by_method.get(method, speeds.other) for method in named])[which]
    per_tensor = np.array([speeds.by_tensor.get(method, 0.0) for method in named])[which]
    seconds = elements * per_element + ints(rows, "num_parts") * per_tensor + decoded * speeds.decoded
    return np.asarray(seconds + ints(rows, "num_elements") * encoded * speeds.encoded)


def _run_sums(lengths: Ints, values: npt.NDArray[np.generic]) -> Floats:
    """Sums of consecutive runs, from their lengths; exact below 2**53."""
    ends = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    return np.asarray(ends[starts(lengths) + lengths] - ends[starts(lengths)], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Simulation:
    cluster: Cluster
    segments: int
    startup_seconds: float
    run_seconds: float
    finishing_seconds: float
    read_bytes: int
    written_bytes: int
    busy: Mapping[str, float]
    """Share of the run in which each resource is busy, largest first."""
    others: Mapping[int, float]
    guessed: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.startup_seconds + self.run_seconds + self.finishing_seconds

    @property
    def limiter(self) -> str:
        return "start-up" if self.startup_seconds > self.seconds / 2 else next(iter(self.busy))

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "limiter": self.limiter, **asdict(self)}


def _joint_loads(
    plans: Sequence[Plan], lane: Lane, speeds: MethodSpeeds, *, compute: float | None
) -> SegmentLoads:
    """Those of plans that are made of one read. What is computed once for several counts for each."""
    each = [segment_loads(plan, lane, speeds, compute=compute) for plan in plans]
    if len(each) == 1:
        return each[0]
    # Passes over what a lane cannot keep are the same ones for all.
    again = [own.read_bytes - joint_read_bytes([plan]) for own, plan in zip(each, plans, strict=True)]
    return SegmentLoads(
        joint_read_bytes(plans) + np.max(again, axis=0),
        np.sum([own.write_bytes for own in each], axis=0),
        np.sum([own.thread_seconds for own in each], axis=0),
    )


def simulate_plan(
    plan: Plan,
    cluster: Cluster,
    budget: int,
    *,
    speeds: MethodSpeeds | None = None,
    beside: Sequence[Plan] = (),
) -> Simulation:
    """Estimate the run of a plan, and that with half and with twice as many workers; ``beside`` are plans
    that are made with it of one read.

    ``budget`` and ``speeds`` count where the cluster does not say; ``speeds`` None is what was measured.

    Raises OptionError: a worker's memory is too little for the plan."""
    memory = project(plan, cluster.memory or budget, lanes=cluster.lanes or lanes_of(cluster.threads))
    if shortage := memory.shortage("--simulate memory"):
        raise OptionError(shortage)
    cluster, speeds = replace(cluster, lanes=memory.lanes, memory=memory.budget), speeds or measured_speeds()
    plans = (plan, *beside)
    lane = memory.together(len(plans)).lane
    loads = _joint_loads(plans, lane, speeds, compute=cluster.compute)
    run, busy = run_seconds(loads, cluster)
    finishing = sum(_FINISHING_SECONDS + _FINISHING_PER_TENSOR * len(each["tensors"]) for each in plans)
    numbers = {max(1, cluster.workers // 2), 2 * cluster.workers} - {cluster.workers}
    others = {each: run_seconds(loads, replace(cluster, workers=each))[0] for each in sorted(numbers)}
    used = {
        each.method for own in plans for each in own.expressions
    } & methods().keys() - speeds.by_method.keys()
    return Simulation(
        cluster=cluster,
        segments=len(loads),
        startup_seconds=cluster.startup,
        run_seconds=run,
        finishing_seconds=finishing,
        read_bytes=int(loads.read_bytes.sum()),
        written_bytes=int(loads.write_bytes.sum()),
        busy={name: busy[name] / run if run else 0.0 for name in sorted(busy, key=lambda each: -busy[each])},
        others={each: cluster.startup + seconds + finishing for each, seconds in others.items()},
        guessed=() if cluster.compute is not None else tuple(sorted(used)),
    )


def run_seconds(loads: SegmentLoads, cluster: Cluster) -> tuple[float, dict[str, float]]:
    """How long the segments take, and for how long each resource, by name, is busy meanwhile."""
    read, write, computing = loads.read_bytes, loads.write_bytes, loads.thread_seconds
    moved, workers = read + write, min(cluster.workers, max(1, len(loads)))
    threads = min(cluster.threads, cluster.cores or cluster.threads)
    on_cores = computing + moved / (cluster.per_core or math.inf)
    busy = {
        "reading": float(read.sum()) / (cluster.read or math.inf),
        "writing": float(write.sum()) / (cluster.write or math.inf),
        "the storage": float(moved.sum()) / (cluster.storage or math.inf),
        "the workers' links": float(moved.sum()) / ((cluster.per_worker or math.inf) * workers),
        "computing": float(computing.sum()) / (threads * workers),
        "the workers' cores": float(on_cores.sum()) / ((cluster.cores or math.inf) * workers),
        "handing out": cluster.driver * len(loads),
    }
    speeds = (cluster.storage, cluster.per_worker, cluster.per_core)
    slowest_read, slowest_write = (
        min(each for each in (*speeds, own, math.inf) if each is not None)
        for own in (cluster.read, cluster.write)
    )
    alone = read / slowest_read + computing + write / slowest_write + cluster.overhead + cluster.driver
    in_flight = min(workers * (cluster.lanes or lanes_of(cluster.threads)), max(1, len(loads)))
    roofline = max(busy.values())
    seconds = (float(alone.sum()) + (in_flight - 1) * roofline) / in_flight
    return max(seconds, roofline, float(alone.max(initial=0.0))), busy
