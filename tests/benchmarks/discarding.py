"""Runs of the true size without its bytes: sources that are made up as they are read, and an output that
stores nothing but headers, index, config and record.

The sources are checkpoints with true headers whose data is one hole (``kits.checkpoint_maker``). What a
worker reads of them is copied out of a few MiB of realistic values for each dtype, from a place that hangs on
the tensor's name and the source, so that every run and every retry reads the same. The output is a
``Staging`` that only a program can hand to a run: no address leads to it. Its files have their length, but
what workers write is dropped, after it was digested like everything that is written. Nothing can be read
back, so a run goes on by its receipts alone: one counts if it has a digest of every op that its segment
makes. When such a run is published its shards end behind their headers, so that nobody takes them for
weights.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from raymerge.checkpoints.header import StoredTensor, read_header
from raymerge.dtypes import DType
from raymerge.execute.output import UNFINISHED
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import Jobs
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.tables import Plan, load_plan
from raymerge.publish.record import RECORD, Ledger, check_begun
from raymerge.publish.shards import SegmentWork, Shards
from raymerge.publish.staging import LocalStaging
from raymerge.storage.local.buffers import ALIGNMENT
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.local.store import LocalStore, as_bytes
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo, ReadStore

Bytes = npt.NDArray[np.uint8]
PATTERN_NBYTES = 16 << 20
"""Of one kind of values. The least common multiple with a tensor's length is the same sequence again, at the
earliest."""


def write_patterns(place: Path) -> None:
    """The values that all made-up tensors consist of, as files that all workers map."""
    place.mkdir(parents=True, exist_ok=True)
    for name, values in _patterns().items():
        (place / name).write_bytes(values.contiguous().view(torch.uint8).numpy().tobytes())


def _patterns() -> Mapping[str, torch.Tensor]:
    """Weights of trained models are normally distributed, more or less; scales lie close together."""
    chance = torch.Generator().manual_seed(0)

    def normal(num: int) -> torch.Tensor:
        return torch.randn(num, generator=chance)

    def between(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (PATTERN_NBYTES,), generator=chance, dtype=torch.uint8)

    return {
        "bfloat16": (normal(PATTERN_NBYTES // 2) * 0.02).to(torch.bfloat16),
        "float32": normal(PATTERN_NBYTES // 4).abs_().mul_(1e-5).add_(1e-4),
        # Blocks of FP8 are stretched so that their largest value is the largest that there is.
        "codes": (normal(PATTERN_NBYTES) * 112).clamp_(-448, 448).to(torch.float8_e4m3fn),
        "fours": between(0, 256),
        "exponents": between(117, 122),
    }


def _pattern_of(tensor: StoredTensor) -> str:
    kinds = {DType.BF16: "bfloat16", DType.F32: "float32", DType.F8_E4M3: "codes"}
    if tensor.dtype is DType.U8:
        return "exponents" if tensor.name.endswith("_scales") else "fours"
    return kinds[tensor.dtype]


class MadeUpStore(LocalStore):
    """A checkpoint of headers, whose data is made up as it is read; thread-safe."""

    def __init__(
        self,
        root: Path,
        *,
        patterns: Path,
        seed: int,
        retry_policy: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] | None = None,
    ) -> None:
        super().__init__(root, retry_policy=retry_policy, expected=expected or {})
        self._seed = seed
        names = {each.name: each for each in patterns.iterdir()}
        self._patterns: dict[str, Bytes] = {
            name: np.memmap(path, np.uint8, mode="r") for name, path in names.items()
        }
        self._tensors = cache(self._tensors_of)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._fill(key, offset, np.frombuffer(as_bytes(buffer), np.uint8))

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
        begin = (offset if like is None else like) % ALIGNMENT
        self._fill(key, offset, np.frombuffer(as_bytes(buffer), np.uint8)[begin : begin + nbytes])
        return begin

    def map_extent(self, key: str, offset: int, nbytes: int, buffer: memoryview, maps: PageMaps) -> None:
        """Nothing: the pages of the file itself are holes."""

    def _tensors_of(self, key: str) -> tuple[npt.NDArray[np.int64], tuple[StoredTensor, ...]]:
        with LocalStore(self.root) as store:
            info = store.info(key)
            assert info is not None
            tensors = read_header(store, key, info.nbytes, info.version).tensors
        ordered = tuple(sorted(tensors, key=lambda each: each.offset))
        return np.array([each.offset for each in ordered], np.int64), ordered

    def _fill(self, key: str, offset: int, target: Bytes) -> None:
        begins, tensors = self._tensors(key)
        number = int(np.searchsorted(begins, offset, side="right")) - 1
        done = 0
        while done < len(target):
            tensor = tensors[number]
            start = offset + done - tensor.offset
            count = min(len(target) - done, tensor.nbytes - start)
            self._repeat(tensor, start, target[done : done + count])
            done, number = done + count, number + 1

    def _repeat(self, tensor: StoredTensor, start: int, target: Bytes) -> None:
        pattern = self._patterns[_pattern_of(tensor)]
        # Whole elements of any dtype.
        place = zlib.crc32(f"{self._seed} {tensor.name}".encode()) // 64 * 64 + start
        done = 0
        while done < len(target):
            begin = (place + done) % len(pattern)
            count = min(len(target) - done, len(pattern) - begin)
            np.copyto(target[done : done + count], pattern[begin : begin + count])
            done += count


class DiscardingStore(LocalStore):
    """A directory that stores small files as any other, and of large ones nothing but their lengths."""

    def create(self, key: str, nbytes: int) -> None:
        path = Path(self.location(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, nbytes)

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        # Opened, so that a worker of another beginning is refused as it would be elsewhere.
        with self._open_files.borrow(self.location(key), writable=True):
            pass

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """0: what is copied is read and digested here, as where file systems share no blocks."""
        return 0


@dataclass(frozen=True, slots=True)
class DiscardedWork(SegmentWork):
    patterns: Path = Path()

    def open_source(self, number: int, retry_policy: RetryPolicy) -> ReadStore:
        return MadeUpStore(
            Path(self.roots[number]),
            patterns=self.patterns,
            seed=number,
            retry_policy=retry_policy,
            expected=self.expected_files(number),
        )

    def open_staging(self, retry_policy: RetryPolicy) -> DiscardingStore:
        guard = partial(check_begun, self.staging / RECORD, self.attempt_id) if self.attempt_id else None
        return DiscardingStore(self.staging, retry_policy=retry_policy, guard=guard)


class DiscardedShards(Shards):
    def __init__(self, plan: Plan, store: DiscardingStore) -> None:
        super().__init__(plan, store)
        self._jobs = Jobs(plan)

    def _lost(self, receipts: Mapping[int, Receipt], present: list[str | None]) -> set[int]:
        """Receipts that do not prove what they should; those of files that are gone."""
        shards = self._plan["segments"].column("shard").to_pylist()
        return {
            number
            for number, receipt in receipts.items()
            if present[shards[number]] is None or not is_complete(self._jobs, receipt)
        }


def is_complete(jobs: Jobs, receipt: Receipt) -> bool:
    """Whether a receipt has the digest of every op that its segment makes, and counts all of their bytes."""
    ops = jobs.ops(receipt.segment)
    made = [each for op in ops for each in (op, op.scales, op.tensor_scale) if each is not None]
    nbytes = sum(each.nbytes * len(each.places) for each in made)
    return receipt.digests.keys() == {str(each.index) for each in made} and receipt.written_bytes == nbytes


class DiscardingStaging(LocalStaging):
    """Of a run whose weights nobody wants."""

    def __init__(self, output: Path, plan: Plan, *, patterns: Path) -> None:
        super().__init__(output, plan)
        self._patterns = patterns

    def missing_bytes(self) -> int:
        return 0

    def shards(self, store: LocalStore, layout: ReadStore | None) -> DiscardedShards:
        assert layout is None
        return DiscardedShards(self._plan, DiscardingStore(store.root))

    def work(self, segments: SegmentWork) -> DiscardedWork:
        own = {each.name: getattr(segments, each.name) for each in fields(SegmentWork)}
        return DiscardedWork(**own, patterns=self._patterns)

    def publish(self, *, replace: bool) -> None:
        for shard in self._plan["shards"].to_pylist():
            os.truncate(self.root / shard["name"], len(shard["header"]))
        super().publish(replace=replace)


# What is proved without the bytes


def complete_receipts(record: Path) -> tuple[Plan, dict[int, Receipt]]:
    """The plan and the receipts of a record; raises ValueError for one that proves less than it should."""
    plan = load_plan(record / "plan")
    receipts, jobs = Ledger.read(record / "ledger.jsonl"), Jobs(plan)
    if lacking := [number for number, each in receipts.items() if not is_complete(jobs, each)]:
        raise ValueError(f"receipts of segments {lacking[:8]} lack digests or bytes")
    return plan, receipts


def same_again(
    plan: Plan, receipts: Mapping[int, Receipt], roots: Sequence[Path], place: Path, patterns: Path
) -> int:
    """How many of these segments have the same digests when they are made here once more, alone and with the
    least memory, so with other tiles."""
    budget = max(64 << 20, project(plan, 1 << 30).least_budget)
    places = tuple(map(str, roots))
    work = DiscardedWork(plan, places, place, project(plan, budget, lanes=1), threads=1, patterns=patterns)
    with DiscardingStore(place) as store:
        for shard in plan["shards"].to_pylist():
            store.create(shard["name"] + UNFINISHED, shard["nbytes"])
    with closing(work.open(torch.device("cpu"), "again")) as runner:
        return sum(runner.run(number).digests == each.digests for number, each in receipts.items())


def stored_bytes(plan: Plan, segments: Iterable[int]) -> int:
    """Bytes of the parents that these segments are made of, each counted once."""
    jobs, spans = Jobs(plan), dict[tuple[int, str], set[tuple[int, int]]]()
    for op in (op for segment in segments for op in jobs.ops(segment)):
        for read in op.inputs:
            assert isinstance(read, Read)
            spans.setdefault((read.source, read.key), set()).add((read.offset, read.nbytes))
            if read.scales is not None:
                own = spans.setdefault((read.source, read.scales.key), set())
                own.add((read.scales.offset, read.scales.nbytes))
    total = 0
    for own in spans.values():
        done = 0
        for offset, nbytes in sorted(own):
            total += max(0, offset + nbytes - max(done, offset))
            done = max(done, offset + nbytes)
    return total
