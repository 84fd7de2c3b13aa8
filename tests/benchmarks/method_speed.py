"""Processor time of every method's kernel for one element, as the executor calls it.

    python tests/benchmarks/method_speed.py [method ...]

Each method merges a base and three sources, or as many as it takes; reading, digests and writing are not part
of it. There are two forms. *pieces*: float32 arrays of 65,536 elements that fit the cache, as most dtypes are
merged; taking the elements from their stored form and rounding are not part of it either. *stored*: BF16 into
BF16, in tiles of 8 MiB, decoding and rounding included: so BF16 is merged wherever a kernel can do it. For
each pass and for the result the shortest of some repetitions is printed, in nanoseconds of processor time for
one element of the output.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kits.method_kit import CPU, Case, make_settings

from raymerge.merge_plan.memory import LOAD_MOST
from raymerge.methods import (
    BLOCK,
    Access,
    BaseUse,
    Method,
    Settings,
    Stored,
    StoredKernel,
    Takes,
    Tile,
    Value,
    methods,
)
from raymerge.methods.method import SAMPLE_LENGTH, SAMPLE_RUNS

ROUNDS = 5
_PIECES = 64
"""Pieces of a tensor of four million elements; all of them are the same memory."""
_ONCE = ("start", "conclude")
"""Stages that come once in a tensor, however large it is."""
_GLOBALS: dict[str, dict[str, Value]] = {
    "slerp": {"t": 0.4},
    "slerp_delta": {"t": 0.4},
    "nearswap": {"t": 0.001},
    "sce": {"select_topk": 0.3},
}
_PER_SOURCE: dict[str, Value] = {"weight": 0.5, "density": 0.5}


def settings_of(method: Method) -> Settings:
    count = max(method.min_sources, min(3, method.max_sources or 3))
    known = {name: value for name, value in _PER_SOURCE.items() if method.parameter(name) is not None}
    settings = make_settings(method, Case(_GLOBALS.get(method.name, {}), (known,) * count))
    side = 256 if method.access_with(settings) is Access.MATRIX else 4096
    return replace(settings, shape=(BLOCK // side, side), position=0.5)


def inputs(method: Method, num_sources: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    base = (torch.randn(size, generator=generator) * 0.02).bfloat16()
    changes = torch.randn((num_sources, size), generator=generator) * 0.003
    sources = (base + changes).bfloat16()
    return sources if method.base is BaseUse.UNUSED else torch.cat([base[None], sources])


def piece_of(method: Method, stored: torch.Tensor) -> Tile:
    rows = stored.float()
    if method.base is BaseUse.UNUSED:
        return Tile(None, rows, 0)
    if method.takes is Takes.DELTAS:
        rows[1:].sub_(rows[0])
    return Tile(rows[0], rows[1:], 0)


def as_sample(piece: Tile) -> Tile:
    times = SAMPLE_RUNS * SAMPLE_LENGTH // BLOCK
    return Tile(None if piece.base is None else piece.base.repeat(times), piece.sources.repeat(1, times), 0)


def seconds(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


class Pieces:
    name = "pieces"

    def __init__(self, method: Method, settings: Settings) -> None:
        piece = piece_of(method, inputs(method, len(settings.sources), BLOCK))
        whole = method.access_with(settings) is Access.MATRIX
        self._kernel, self._settings = method.kernel_with(settings), settings
        self._tiles = [replace(piece, start=index * BLOCK) for index in range(1 if whole else _PIECES)]
        self.size = BLOCK * len(self._tiles)

    def observe(self, state: object, index: int) -> None:
        for tile in self._tiles:
            self._kernel.observe(state, tile, self._settings, index)

    def apply(self, state: object) -> None:
        for tile in self._tiles:
            self._kernel.apply(tile, self._settings, state)


class Tiles:
    name = "stored"

    def __init__(self, method: Method, settings: Settings, kernel: StoredKernel) -> None:
        count = len(settings.sources) + (method.base is not BaseUse.UNUSED)
        # As many whole blocks as a load holds; their content repeats, as no method looks further than a row.
        self.size = max(1, LOAD_MOST // (2 * count * BLOCK)) * BLOCK
        words = inputs(method, len(settings.sources), BLOCK).repeat(1, self.size // BLOCK)
        flat = words.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        places = np.arange(count, dtype=np.int64) * self.size
        self._stored = Stored(flat, places, self.size, 0)
        self._out = np.empty(self.size, np.uint16)
        self._kernel, self._settings = kernel, settings

    def observe(self, state: object, index: int) -> None:
        self._kernel.observe_stored(state, self._stored, self._settings, index)

    def apply(self, state: object) -> None:
        self._kernel.apply_stored(self._stored, self._settings, state, self._out)


class Stopwatch:
    def __init__(self, method: Method, settings: Settings, tensor: Pieces | Tiles) -> None:
        self._method = method
        self._settings = settings
        self._tensor = tensor
        self._sample = as_sample(piece_of(method, inputs(method, len(settings.sources), BLOCK)))
        self._state: object = None
        self.shortest: dict[str, float] = {}

    def run(self) -> None:
        kernel, settings = self._method.kernel_with(self._settings), self._settings
        usual, index, wants_more = kernel.passes(settings), 0, False
        if usual:
            self._note("start", seconds(self._begin))
        while index < usual or wants_more:
            self._note(f"pass {index + 1}", seconds(lambda index=index: self._observe(index)))  # type: ignore[misc]
            begin = time.thread_time()
            wants_more = kernel.conclude(self._state, settings, index)
            self._note("conclude", time.thread_time() - begin)
            index += 1
        self._note("apply", seconds(lambda: self._tensor.apply(self._state)))

    def _begin(self) -> None:
        kernel = self._method.kernel_with(self._settings)
        self._state = kernel.begin(self._settings, self._tensor.size, CPU)
        if self._method.sampler is not None:
            self._method.sampler(self._state, self._sample, self._settings)

    def _observe(self, index: int) -> None:
        self._tensor.observe(self._state, index)

    def _note(self, stage: str, taken: float) -> None:
        self.shortest[stage] = min(taken, self.shortest.get(stage, taken))

    def line(self) -> str:
        """Nanoseconds for an element; what is done once in a tensor in microseconds."""
        scale = 1e9 / self._tensor.size
        shown = [
            f"{stage} {taken * 1e6:.0f} us" if stage in _ONCE else f"{stage} {taken * scale:.2f}"
            for stage, taken in self.shortest.items()
        ]
        total = sum(taken * scale for stage, taken in self.shortest.items() if stage not in _ONCE)
        return f"{self._method.name:18} {self._tensor.name:6} {total:8.2f}   {', '.join(shown)}"


def lines_of(method: Method) -> list[str]:
    settings = settings_of(method)
    forms: list[Pieces | Tiles] = [Pieces(method, settings)]
    kernel = method.kernel_with(settings)
    if isinstance(kernel, StoredKernel):
        forms.append(Tiles(method, settings, kernel))
    found = []
    for form in forms:
        watch = Stopwatch(method, settings, form)
        for _ in range(ROUNDS):
            watch.run()
        found.append(watch.line())
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="all unless given")
    names = parser.parse_args(arguments).methods
    if unknown := [name for name in names if name not in methods()]:
        parser.error(f"no method is called {', '.join(unknown)}; there are {', '.join(methods())}")
    torch.set_num_threads(1)
    print(f"{'method':18} {'form':6} {'ns':>8}   for one element, of which")
    for name, method in methods().items():
        if not names or name in names:
            print("\n".join(lines_of(method)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
