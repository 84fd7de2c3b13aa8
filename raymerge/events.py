"""Events of a run, as frozen values, emitted by the library and rendered by the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from raymerge.merge_plan.report import ConversionProof, DuplicateGroup, ErrorsAbove, RoleError


@dataclass(frozen=True, slots=True)
class Event:
    @classmethod
    def kind(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_json(self) -> dict[str, Any]:
        return {"event": self.kind(), **asdict(self)}


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """One of several merges starts or resumes; the events of its run follow."""

    name: str
    """"" for a result without a name."""
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class StepKept(Event):
    name: str
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class CheckpointsPassedOver(Event):
    """Checkpoints of the windows' range are not finished, and are in no average."""

    unfinished: Mapping[str, str]
    """What each lacks, by its place."""


@dataclass(frozen=True, slots=True)
class OutputsStarted(Event):
    """Outputs of a sweep that are made of one read start or resume; the events of their run follow."""

    names: tuple[str, ...]
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class OutputKept(Event):
    """An output of a sweep is there already, and is left as it is."""

    name: str


@dataclass(frozen=True, slots=True)
class OutputFailed(Event):
    """An output of a sweep is given up; the others go on."""

    name: str
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class OutputsPublished(Event):
    """All outputs of a sweep are in their places, each of which has been published by itself."""

    path: str
    names: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchStarted(Event):
    strategy: str
    evaluations: int
    """Of candidates, at most."""
    done: int
    """Of them, evaluated by an earlier call."""


@dataclass(frozen=True, slots=True)
class TrialEvaluated(Event):
    """A candidate of a search was evaluated."""

    number: int
    values: Mapping[str, str | int | float | bool]
    share: float
    """Of what candidates are evaluated on; less than 1 where it may be stopped after that."""
    metrics: Mapping[str, float]
    score: float | None
    """Higher is better; None where it failed."""
    error: str
    seconds: float
    is_recorded: bool = False
    """Whether an earlier call did that."""


@dataclass(frozen=True, slots=True)
class SearchEnded(Event):
    """The best candidate is known, and is merged and published now."""

    number: int
    values: Mapping[str, str | int | float | bool]
    score: float
    trials: int


@dataclass(frozen=True, slots=True)
class StageStarted(Event):
    title: str
    number: int
    total: int
    units: int
    total_bytes: int
    workers: tuple[str, ...]
    device: str
    done_units: int
    done_bytes: int


@dataclass(frozen=True, slots=True)
class UnitDone(Event):
    unit: int
    worker: str
    read_bytes: int
    written_bytes: int
    planned_bytes: int
    """Its share of the stage's bytes."""
    seconds: float


@dataclass(frozen=True, slots=True)
class UnitProgress(Event):
    done_bytes: int
    """Bytes of the stage read by finished units and units in hand."""
    total_bytes: int


Activity: TypeAlias = Literal["waiting", "reading", "computing", "writing"]


@dataclass(frozen=True, slots=True)
class PartInHand:
    part: int
    """Number of a segment, of a unit of a stage, or of a shard on its way to an object store."""
    activity: Activity
    tensor: str
    """The one that is made at the moment; "" if unknown."""
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerProgress(Event):
    """What a worker does at the moment, every second or so: too often for a journal, which has none of it."""

    worker: str
    parts: tuple[PartInHand, ...]


@dataclass(frozen=True, slots=True)
class StageKept(Event):
    title: str
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class StageReport(Event):
    title: str
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Planned(Event):
    digest: str
    tensors: int
    output_bytes: int
    total_bytes: int
    segments: int
    projected_peak: int
    """Most bytes of memory of a worker, beyond an idle one."""
    notes: tuple[str, ...] = ()
    made: Mapping[str, int] = field(default_factory=dict)
    """Tensors by what becomes of them: merged, copied or converted."""
    lead: str = ""
    """The model whose layout the result keeps, as the recipe names it; "" for one that this run makes."""
    is_loadable: bool = True
    """Whether the result is what transformers loads: a config, and tensors in safetensors."""


@dataclass(frozen=True, slots=True)
class RayLeftOut(Event):
    """The merge runs in this process, though nobody asked for that: it is small."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    workers: tuple[str, ...]
    device: str
    done_segments: int
    done_bytes: int
    threads: int = 1
    device_reason: str = ""
    """Why that device, if chosen between two."""


@dataclass(frozen=True, slots=True)
class SegmentDone(Event):
    segment: int
    worker: str
    read_bytes: int
    written_bytes: int
    planned_bytes: int
    """Its share of the plan's bytes; more is read if statistics take several passes."""
    seconds: float
    peak_bytes: int = 0
    """Measured peak of its worker's memory, beyond an idle one; 0 if not measured."""


@dataclass(frozen=True, slots=True)
class ShardDone(Event):
    shard: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class RoomAwaited(Event):
    """The cluster has no room for a worker; it may add a machine."""

    lack: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """An idle worker ends, so that a shrinking cluster can have its node."""

    worker: str


@dataclass(frozen=True, slots=True)
class NodeOfNoUse(Event):
    """A node joined during the run, but its workers get no parts."""

    node: str
    lack: str


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    worker: str
    reason: str
    segments: tuple[int, ...]
    """Segments, or units of a stage, in hand."""


@dataclass(frozen=True, slots=True)
class RayEnded(Event):
    """A process that the embedded Ray needs has ended, and Ray is about to end this process. Emitted from a
    thread of its own."""

    process: str


@dataclass(frozen=True, slots=True)
class MemoryShort(Event):
    """A part ran out of memory; it is made again alone on a worker, with less. Its bytes stay the same."""

    worker: str
    segment: int
    budget: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceFailed(Event):
    """A worker's GPU failed in a part, which was then made on its CPU."""

    worker: str
    segment: int
    reason: str


@dataclass(frozen=True, slots=True)
class StorageFailed(Event):
    worker: str
    segment: int
    faults: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """A stop was requested: parts in hand are finished, no new one starts."""

    seconds: float | None = None
    """Longest wait for them; None for no limit."""
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class DuplicatesFound(Event):
    tensors: int
    """Tensors equal to an earlier one, in whole or part, written without being made again."""
    nbytes: int
    groups: tuple[DuplicateGroup, ...]
    shared_bytes: int | None
    """Of them, bytes in shared storage; None if not requested, or done by an earlier run."""
    unforeseen: tuple[DuplicateGroup, ...]
    """Tensors that turned out equal to earlier ones, unknown to the plan."""


@dataclass(frozen=True, slots=True)
class EncodingErrorsFound(Event):
    roles: tuple[RoleError, ...]
    above: ErrorsAbove | None
    """Tensors above the recipe's ``warn_encoding_error``."""
    proof: ConversionProof | None = None
    """None where nothing was converted."""


@dataclass(frozen=True, slots=True)
class Verified(Event):
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Published(Event):
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """The run ended without a result; the error is raised, too."""

    exit_code: int
    message: str


OnEvent = Callable[[Event], None]
