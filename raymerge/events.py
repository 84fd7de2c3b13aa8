"""What happens during a run, as frozen values. The library emits them; the command line renders them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymerge.merge_plan.report import DuplicateGroup, ErrorsAbove, RoleError


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    @classmethod
    def kind(cls) -> str:
        """The event's name in JSON."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_json(self) -> dict[str, Any]:
        """JSON form with the event's name under ``event``."""
        return {"event": self.kind(), **asdict(self)}


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """One of several merges begins, or goes on; the events of its run follow."""

    name: str
    """What the recipe calls it; "" for a result without a name."""
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class StepKept(Event):
    """One of several merges was made before and is used as it is."""

    name: str
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class StageStarted(Event):
    """Work on weights that comes before a merge begins, or goes on."""

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
    """A unit of a stage is done and durable."""

    unit: int
    worker: str
    read_bytes: int
    written_bytes: int
    planned_bytes: int
    """Its share of the stage's bytes."""
    seconds: float


@dataclass(frozen=True, slots=True)
class UnitProgress(Event):
    """The units in hand are further than they were; told now and then."""

    done_bytes: int
    """Bytes of the stage that are read: those of finished units, and the units in hand so far."""
    total_bytes: int


@dataclass(frozen=True, slots=True)
class StageKept(Event):
    """A stage was carried out before, and its result is used as it is."""

    title: str
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class StageReport(Event):
    """The result of a stage is in its place."""

    title: str
    report: Mapping[str, Any]
    """What is worth knowing of the result, as JSON values; may be empty."""


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The plan is made and can be carried out."""

    digest: str
    tensors: int
    output_bytes: int
    """Bytes of the output's shards."""
    total_bytes: int
    """Bytes to read and to write."""
    segments: int
    projected_peak: int
    """Bytes of memory that a worker will use at most, beyond an idle one."""
    notes: tuple[str, ...] = ()
    """What is worth knowing of the plan, and of what the recipe says without effect."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """Work begins, or goes on."""

    workers: tuple[str, ...]
    device: str
    done_segments: int
    """Segments already made by an earlier run of the same command."""
    done_bytes: int
    threads: int = 1
    """Threads of each worker that compute at once."""
    device_reason: str = ""
    """Why that device, where it was chosen between two; otherwise ""."""


@dataclass(frozen=True, slots=True)
class SegmentDone(Event):
    """A segment is made and durable."""

    segment: int
    worker: str
    read_bytes: int
    written_bytes: int
    planned_bytes: int
    """Its share of the plan's bytes; more is read when statistics take several passes."""
    seconds: float
    peak_bytes: int = 0
    """Bytes of memory that its worker was seen to use at most, beyond an idle one; 0 where nobody looked."""


@dataclass(frozen=True, slots=True)
class ShardDone(Event):
    """A shard has its final name."""

    shard: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class RoomAwaited(Event):
    """The cluster has no room for a worker yet; it is to add a machine for it."""

    lack: str
    """What a worker needs, and what there is."""
    seconds: float
    """How long it is waited for at most."""


@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """A worker found nothing more to do and is ended, so that a cluster that shrinks can have its node."""

    worker: str


@dataclass(frozen=True, slots=True)
class NodeOfNoUse(Event):
    """A node joined while parts were made, and workers on it get none of them."""

    node: str
    lack: str
    """Why."""


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker died; its segments go to another."""

    worker: str
    reason: str
    segments: tuple[int, ...]
    """Segments, or units of a stage, that it had in hand."""


@dataclass(frozen=True, slots=True)
class RayEnded(Event):
    """A process ended that the embedded Ray cannot do without. Nothing can be made any more in this process,
    which Ray itself is about to end. Emitted from a thread of its own."""

    process: str


@dataclass(frozen=True, slots=True)
class MemoryShort(Event):
    """A part ran out of memory; it is done again, alone on a worker, with less. Its bytes stay the same."""

    worker: str
    segment: int
    budget: int
    """Bytes of memory that it may use now."""
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceFailed(Event):
    """A worker's GPU failed in a part, which was then made on the worker's processor."""

    worker: str
    segment: int
    reason: str


@dataclass(frozen=True, slots=True)
class StorageFailed(Event):
    """Storage failed for a moment while a segment was made, and was asked again."""

    worker: str
    segment: int
    faults: Mapping[str, int]
    """What failed, and how often it was asked again."""


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """A stop was asked for: the segments or units in hand are finished, no new one is begun."""

    seconds: float | None = None
    """How long they are waited for; None for as long as it takes."""
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class DuplicatesFound(Event):
    """All shards are written, and some output equals other output."""

    tensors: int
    """Tensors that equal an earlier one, in whole or in part, and were written without being made again."""
    nbytes: int
    groups: tuple[DuplicateGroup, ...]
    """The same by names, those with most bytes first."""
    shared_bytes: int | None
    """Bytes of them that share storage; None where that was not asked for, or an earlier run saw to it."""
    unforeseen: tuple[DuplicateGroup, ...]
    """Tensors whose bytes turned out to be those of an earlier one, which the plan did not know."""


@dataclass(frozen=True, slots=True)
class EncodingErrorsFound(Event):
    """All shards are written, and some tensors were encoded as codes with scales."""

    roles: tuple[RoleError, ...]
    """What that changed in their numbers, by role."""
    above: ErrorsAbove | None
    """Tensors that it changed by more than the recipe's ``warn_encoding_error``; None for none."""


@dataclass(frozen=True, slots=True)
class Verified(Event):
    """The checkpoint was proved to be what the plan says."""

    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Published(Event):
    """The checkpoint is in place."""

    path: str
    seconds: float


OnEvent = Callable[[Event], None]
