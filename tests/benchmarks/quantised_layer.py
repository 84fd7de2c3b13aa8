"""A layer of experts of the true size, of a model that is published quantised: decoded, merged, encoded.

    python tests/benchmarks/quantised_layer.py [--family v3|kimi] [--place DIRECTORY]

Two parents with the true headers of DeepSeek-V3 (block FP8) or Kimi-K2-Thinking (INT4) are planned whole. Of
one layer the experts' codes and scales are really there, random ones; the rest of the files is a hole. The
segments that are nothing but these experts are made as a worker makes them, from files that the system's
cache has not. It prints the time of the plan, the rate at which stored bytes of the parents go through
decoding, merging and encoding, what processors alone would allow, the rates at which the disk gives those
files to a program that only reads them and to one that also writes as much as the merge, and the merge again
with the files of the first segments in the cache. 50 GB of disk, a few minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cache import evict
from benchmarks.measure import machine
from kits.checkpoint_maker import sparse_checkpoint
from kits.deepseek_headers import KIMI_CONFIG, V3_CONFIG, deepseek_v3_specs, kimi_k2_thinking_specs

from raymerge.api import plan, read_recipe
from raymerge.checkpoints.header import StoredTensor, TensorSpec
from raymerge.dtypes import DType
from raymerge.execute.output import UNFINISHED
from raymerge.execute.segment import PlanOutput, SegmentRunner
from raymerge.merge_plan.memory import lanes_of, project
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.sources import open_models
from raymerge.runtime.workers.sizing import cores_here
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, buffer_nbytes
from raymerge.storage.local.store import LocalStore

_BUDGET = 2 << 30
_WARM_NBYTES = 4 << 30
"""Stored bytes of the segments that are made a second time, from the cache."""
_NOISE_NBYTES = 16 << 20
_BLOCK_NBYTES = 4 << 20
_MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Family:
    specs: Callable[[], list[list[TensorSpec]]]
    config: Mapping[str, Any]
    experts: str


FAMILIES = {
    "v3": Family(deepseek_v3_specs, V3_CONFIG, "model.layers.30.mlp.experts."),
    "kimi": Family(kimi_k2_thinking_specs, KIMI_CONFIG, "model.layers.30.mlp.experts."),
}


@dataclass(frozen=True, slots=True)
class Run:
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Made:
    read_bytes: int
    written_bytes: int
    seconds: float
    processor_seconds: float

    def told(self) -> str:
        return f"{self.read_bytes / 1e9:.1f} GB in {self.seconds:.1f} s, {self.rate / 1e9:.2f} GB/s"

    @property
    def processor_rate(self) -> float:
        return self.read_bytes * cores_here() / self.processor_seconds

    @property
    def rate(self) -> float:
        return self.read_bytes / self.seconds


def main() -> None:
    asked = _asked()
    family = FAMILIES[asked.family]
    with tempfile.TemporaryDirectory(dir=asked.place) as place:
        _measure(family, Path(place))


def _measure(family: Family, place: Path) -> None:
    specs = family.specs()
    roots = [sparse_checkpoint(place / name, specs, family.config) for name in "ab"]
    recipe = {
        "merge_method": "linear",
        "models": [{"model": str(root), "parameters": {"weight": 0.5}} for root in roots],
    }
    began = time.perf_counter()
    made = plan(recipe).require()
    _say(f"planned {len(made['tensors']):,} tensors of each parent in {time.perf_counter() - began:.1f} s")
    runs: list[Run] = []
    for number, source in enumerate(open_models(read_recipe(recipe)).require()):
        mine = [each for name, each in source.checkpoint.tensors.items() if name.startswith(family.experts)]
        fill(roots[number], mine, seed=number)
        runs += _runs(roots[number], mine)
    files = sorted({run.file for run in runs})
    segments = list(_segments(made, family.experts))
    _say(f"{len(segments)} segments hold nothing but {family.experts}*; {machine()}")
    projection = project(made, _BUDGET, lanes=lanes_of(cores_here()))
    _say(f"a worker takes {projection.peak / 2**20:.0f} MiB of the {_BUDGET >> 20} MiB that it may")
    evict(files)
    cold = _make(made, roots, place / "cold", segments)
    _say(f"decoded, merged, encoded and written durably, from the disk: {cold.told()}")
    evict(files)
    disk = _moved(runs)
    _say(f"the disk alone, with as many threads: {disk.told()}; ratio {cold.rate / disk.rate:.2f}")
    _say(
        f"processors took {cold.processor_seconds:.1f} s, so that alone they give "
        f"{cold.processor_rate / 1e9:.2f} GB/s; ratio {cold.processor_rate / disk.rate:.2f}"
    )
    evict(files)
    both = _moved(runs, into=place / "moved", nbytes=cold.written_bytes)
    _say(
        "the disk alone, reading them and writing as much as the merge does: "
        f"{both.told()}; ratio {cold.rate / both.rate:.2f}"
    )
    few = segments[: max(1, int(len(segments) * _WARM_NBYTES / cold.read_bytes))]
    _make(made, roots, place / "first", few)
    again = _make(made, roots, place / "again", few)
    ratio = f"{again.rate / disk.rate:.2f}"
    _say(f"{len(few)} of the segments again, from the cache: {again.told()}; ratio {ratio}")


def fill(root: Path, tensors: Sequence[StoredTensor], *, seed: int) -> None:
    """Random codes and scales in place of a hole."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 256, _NOISE_NBYTES, dtype=np.uint8)
    # Every pattern but those of NaN.
    fp8 = np.where(noise & 0x7F == 0x7F, 0, noise).tobytes()
    scales = torch.rand(1 << 20, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-4
    fills = {
        DType.F8_E4M3: fp8,
        **dict.fromkeys((DType.I32, DType.I8), noise.tobytes()),
        **dict.fromkeys((DType.F8_E8M0, DType.U8), (noise % 12 + 110).tobytes()),
        DType.F32: scales.numpy().tobytes(),
        DType.BF16: scales.bfloat16().view(torch.int16).numpy().tobytes(),
    }
    named = {tensor.name: tensor for tensor in tensors}
    for tensor in tensors:
        data = noise.tobytes() if tensor.name.endswith("_blocks") else fills[tensor.dtype]
        packed = named.get(f"{tensor.name.removesuffix('_shape')}_packed")
        if packed is not None and tensor.name.endswith("weight_shape"):
            shape = packed.shape[0], packed.shape[1] * 8
            data = np.array(shape, np.int32 if tensor.dtype is DType.I32 else np.int64).tobytes()
        with open(root / tensor.key, "r+b", buffering=0) as stream:
            stream.seek(tensor.offset)
            for begin in range(0, tensor.nbytes, len(data)):
                stream.write(data[: min(len(data), tensor.nbytes - begin)])


def _runs(root: Path, tensors: Sequence[StoredTensor]) -> Iterator[Run]:
    for key in sorted({each.key for each in tensors}):
        mine = [each for each in tensors if each.key == key]
        begin = min(each.offset for each in mine)
        yield Run(root / key, begin, max(each.offset + each.nbytes for each in mine) - begin)


def _segments(made: Plan, experts: str) -> Iterator[int]:
    names = made["tensors"].column("name").to_pylist()
    tensors = made["ops"].column("tensor").to_numpy()
    mine = np.array([name.startswith(experts) for name in names])[tensors]
    for number, row in enumerate(made["segments"].to_pylist()):
        first = row["first_op"]
        if mine[first : first + row["num_ops"]].all():
            yield number


def _make(made: Plan, roots: Sequence[Path], place: Path, segments: Sequence[int]) -> Made:
    place.mkdir()
    staging = LocalStore(place)
    for number in sorted(set(made["segments"].column("shard").take(segments).to_pylist())):
        shard = made["shards"].slice(number, 1).to_pylist()[0]
        staging.create(shard["name"] + UNFINISHED, shard["nbytes"])
    cores = cores_here()
    projection = project(made, _BUDGET, lanes=lanes_of(cores))
    runner = SegmentRunner(
        [PlanOutput(made, staging, range(len(roots)))],
        [LocalStore(root) for root in roots],
        device=torch.device("cpu"),
        projection=projection,
        threads=cores,
        name="bench",
    )
    # Lanes compute side by side, and what they call is to use one thread each, as in a worker.
    torch.set_num_threads(1)
    began, busy = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(projection.lanes + 1) as threads:
        receipts = list(threads.map(runner.run, segments))
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    for path in place.iterdir():
        path.unlink()
    return Made(sum(r.read_bytes for r in receipts), sum(r.written_bytes for r in receipts), seconds, busy)


def _moved(runs: Sequence[Run], *, into: Path | None = None, nbytes: int = 0) -> Made:
    blocks = [
        (run.file, begin, min(_BLOCK_NBYTES, run.offset + run.nbytes - begin))
        for run in runs
        for begin in range(run.offset, run.offset + run.nbytes, _BLOCK_NBYTES)
    ]
    stores = {run.file: LocalStore(run.file.parent) for run in runs}
    share = nbytes // len(blocks) // ALIGNMENT * ALIGNMENT
    written = LocalStore(into) if into is not None else None
    if written is not None:
        written.create(_MOVED, share * len(blocks))
    own = threading.local()

    def move(number: int) -> None:
        file, offset, nbytes = blocks[number]
        if not hasattr(own, "buffer"):
            own.buffer = aligned_buffer(buffer_nbytes(_BLOCK_NBYTES))
        view = memoryview(own.buffer)
        stores[file].read_extent(file.name, offset, nbytes, view[: buffer_nbytes(nbytes)])
        if written is not None:
            written.write_extent(_MOVED, number * share, view[:share])

    began, busy = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(lanes_of(cores_here())) as threads:
        for _ in threads.map(move, range(len(blocks))):
            pass
    if written is not None:
        written.sync(_MOVED)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    return Made(sum(nbytes for _, _, nbytes in blocks), share * len(blocks), seconds, busy)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=sorted(FAMILIES), default="v3", help="whose headers (v3)")
    parser.add_argument("--place", type=Path, help="where files are made, with 50 GB of room")
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
