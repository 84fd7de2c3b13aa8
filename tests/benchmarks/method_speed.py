"""Processor time of every method's kernel for one element, in pieces as the executor hands them out.

    python tests/benchmarks/method_speed.py [method ...]

Each method merges a base and three sources, or as many as it takes, in float32 arrays that fit the cache:
reading, decoding and writing are not part of it. For each pass and for the result the shortest of some
repetitions is printed, in nanoseconds of processor time for one element of the output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kits.method_kit import CPU, Case, make_settings

from raymerge.methods import BLOCK, Access, BaseUse, Method, Settings, Takes, Tile, Value, methods
from raymerge.methods.method import SAMPLE_LENGTH, SAMPLE_RUNS

PIECES = 64
"""Pieces of a tensor of four million elements; all of them are the same memory."""
ROUNDS = 5
"""Repetitions, of which the shortest counts."""
GLOBALS: dict[str, dict[str, Value]] = {
    "slerp": {"t": 0.4},
    "slerp_delta": {"t": 0.4},
    "nearswap": {"t": 0.001},
    "sce": {"select_topk": 0.3},
}
"""Global parameters of single methods."""
PER_SOURCE: dict[str, Value] = {"weight": 0.5, "density": 0.5}
"""Per-source parameters, for the methods that have them."""


def settings_of(method: Method) -> Settings:
    """Three sources, or as many as the method takes."""
    count = max(method.min_sources, min(3, method.max_sources or 3))
    known = {name: value for name, value in PER_SOURCE.items() if method.parameter(name) is not None}
    settings = make_settings(method, Case(GLOBALS.get(method.name, {}), (known,) * count))
    side = 256 if method.access_with(settings) is Access.MATRIX else 4096
    return replace(settings, shape=(BLOCK // side, side), position=0.5)


def inputs(method: Method, num_sources: int, size: int) -> Tile:
    """Weights like those of a 16-bit checkpoint, or their deltas."""
    generator = torch.Generator().manual_seed(1)
    base = (torch.randn(size, generator=generator) * 0.02).bfloat16()
    changes = torch.randn((num_sources, size), generator=generator) * 0.003
    sources = (base + changes).bfloat16().float()
    if method.takes is Takes.DELTAS:
        sources.sub_(base.float())
    return Tile(None if method.base is BaseUse.UNUSED else base.float(), sources, 0)


def as_sample(piece: Tile) -> Tile:
    """A sample of the tensor that consists of such pieces alone."""
    times = SAMPLE_RUNS * SAMPLE_LENGTH // BLOCK
    return Tile(None if piece.base is None else piece.base.repeat(times), piece.sources.repeat(1, times), 0)


def seconds(work: Callable[[], object]) -> float:
    """Processor time of this thread."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


class Stopwatch:
    """The stages of one method."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._settings = settings_of(method)
        count = len(self._settings.sources)
        piece = inputs(method, count, BLOCK)
        whole = method.access_with(self._settings) is Access.MATRIX
        starts = [0] if whole else [index * BLOCK for index in range(PIECES)]
        self._tiles = [replace(piece, start=start) for start in starts]
        self._sample = as_sample(piece)
        self._state: object = None
        self.shortest: dict[str, float] = {}

    def run(self) -> None:
        """Merge once."""
        kernel, settings = self._method.kernel, self._settings
        usual, index, wants_more = kernel.passes(settings), 0, False
        if usual:
            self._note("start", seconds(self._begin))
        while index < usual or wants_more:
            self._note(f"pass {index + 1}", seconds(lambda index=index: self._observe(index)))  # type: ignore[misc]
            begin = time.thread_time()
            wants_more = kernel.conclude(self._state, settings, index)
            self._note("conclude", time.thread_time() - begin)
            index += 1
        self._note("apply", seconds(self._apply))

    def _begin(self) -> None:
        size = BLOCK * len(self._tiles)
        self._state = self._method.kernel.begin(self._settings, size, CPU)
        if self._method.sampler is not None:
            self._method.sampler(self._state, self._sample, self._settings)

    def _observe(self, index: int) -> None:
        for tile in self._tiles:
            self._method.kernel.observe(self._state, tile, self._settings, index)

    def _apply(self) -> None:
        for tile in self._tiles:
            self._method.kernel.apply(tile, self._settings, self._state)

    def _note(self, stage: str, taken: float) -> None:
        self.shortest[stage] = min(taken, self.shortest.get(stage, taken))

    def line(self) -> str:
        """Nanoseconds for an element; what is done once in a tensor in microseconds."""
        scale = 1e9 / (BLOCK * len(self._tiles))
        once = ("start", "conclude")
        shown = [
            f"{stage} {taken * 1e6:.0f} us" if stage in once else f"{stage} {taken * scale:.2f}"
            for stage, taken in self.shortest.items()
        ]
        total = sum(taken * scale for stage, taken in self.shortest.items() if stage not in once)
        return f"{self._method.name:18} {total:8.2f}   {', '.join(shown)}"


def main(names: list[str]) -> None:
    """Time the named methods, or all."""
    torch.set_num_threads(1)
    print(f"{'method':18} {'ns':>8}   for one element, of which")
    for name, method in methods().items():
        if not names or name in names:
            watch = Stopwatch(method)
            for _ in range(ROUNDS):
                watch.run()
            print(watch.line(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
