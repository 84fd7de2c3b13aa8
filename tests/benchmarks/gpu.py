"""Print what merges give and take on a GPU beside the processor: ``python tests/benchmarks/gpu.py``.

The first table merges the recipes and small models of ``tests/golden`` on both devices and compares every
tensor of the results. The second merges parents of some size (``--size``) with each method, inline, from
cached files: each merge once unmeasured, then the best of ``--rounds``. Ends with 1 where a tensor differs
by more than ``MAX_DIFFERENCE``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from golden.digests import ROOT, own_cases
from parents import SIZES, make_parents
from recipes import METHODS, recipe
from safetensors.torch import load_file

import raymerge
from raymerge.errors import RaymergeError
from raymerge.options import RunOptions

MAX_DIFFERENCE = 1 / 64
"""Of an element, relative to the largest of its tensor: two steps of bfloat16."""
DECOMPOSING = ("iso_c", "tsv_m")
"""Methods that decompose whole matrices; they are timed on parents of a quarter of the size."""


@dataclass(frozen=True, slots=True)
class Agreement:
    tensors: int
    equal: int
    elements: float
    """Share of elements that differ, of all."""
    difference: float
    """The largest of float tensors, relative to the largest element of its tensor."""

    @property
    def row(self) -> str:
        return f"{self.equal} / {self.tensors} | {self.elements:.2e} | {self.difference:.2e}"


def compare(one: Path, other: Path) -> Agreement:
    first, second = _tensors(one), _tensors(other)
    if first.keys() != second.keys():
        raise ValueError(f"{one} and {other} do not have the same tensors")
    equal, apart, elements, worst = 0, 0, 0, 0.0
    for name, left in first.items():
        right = second[name]
        num_apart = int((_bits(left) != _bits(right)).sum())
        equal += num_apart == 0
        apart += num_apart
        elements += left.numel()
        if num_apart and left.dtype in (torch.bfloat16, torch.float16, torch.float32):
            largest = left.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
            worst = max(worst, float((left.double() - right.double()).abs().max() / largest))
    return Agreement(len(first), equal, apart / max(1, elements), worst)


def _bits(values: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(words[values.element_size()])


def _tensors(place: Path) -> dict[str, torch.Tensor]:
    return {
        name: each for file in sorted(place.glob("*.safetensors")) for name, each in load_file(file).items()
    }


def _merge(what: str | Mapping[str, Any], output: Path, device: str, cwd: Path = ROOT) -> float:
    begin = time.perf_counter()
    with contextlib.chdir(cwd):
        raymerge.submit(what, output, RunOptions(inline=True, device=device, replace=True))
    return time.perf_counter() - begin


def agreements(place: Path, device: str) -> Iterator[tuple[str, Agreement | str]]:
    for number, (name, what, cwd) in enumerate(own_cases(place / "in")):
        outputs = place / f"{number}-cpu", place / f"{number}-gpu"
        try:
            for output, where in zip(outputs, ("cpu", device), strict=True):
                _merge(what, output, where, cwd)
            yield name, compare(*outputs)
        except (RaymergeError, RuntimeError, ValueError) as error:
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def speeds(place: Path, size: str, methods: Sequence[str], device: str, rounds: int) -> Iterator[str]:
    parents = make_parents(place / size, SIZES[size], ROOT / "configs" / "quickstart" / "models" / "base")
    for method in methods:
        what = _recipe(method, parents, SIZES[size].layers)
        times = {}
        for where in ("cpu", device):
            output = place / f"out-{where}"
            _merge(what, output, where)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            times[where, "s"] = min(_merge(what, output, where) for _ in range(rounds))
        peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
        found = compare(place / "out-cpu", place / f"out-{device}")
        on_cpu, on_gpu = times["cpu", "s"], times[device, "s"]
        row = f"{on_cpu:.2f} | {on_gpu:.2f} | {on_cpu / on_gpu:.2f} | {peak:.0f} | {found.row}"
        yield f"| {method} | {size} | {row} |"


def _recipe(method: str, parents: Sequence[Path], layers: int) -> dict[str, Any]:
    if method not in DECOMPOSING:
        return recipe(method, parents, layers)
    models = [{"model": str(each)} for each in parents[1:]]
    return {"merge_method": method, "base_model": str(parents[0]), "models": models, "dtype": "bfloat16"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", help="what is put beside the processor")
    parser.add_argument("--size", default="1GB", choices=SIZES, help="of a parent of the second table")
    parser.add_argument("--small", default="0.25GB", choices=SIZES, help="of one that is decomposed")
    parser.add_argument("--methods", nargs="*", default=[*METHODS, *DECOMPOSING])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("agreement", "speed"), help="one of the tables")
    asked = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if asked.only != "speed":
            print("| merge | same tensors | elements apart | largest difference |\n|---|--:|--:|--:|")
            for case, found in agreements(place / "small", asked.device):
                failed |= isinstance(found, str) or found.difference > MAX_DIFFERENCE
                print(f"| {case} | {found if isinstance(found, str) else found.row} |", flush=True)
        if asked.only != "agreement":
            print(
                "| method | parents | cpu s | gpu s | cpu / gpu | MiB | same tensors | apart | difference |"
            )
            print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
            for size, chosen in ((asked.size, METHODS), (asked.small, DECOMPOSING)):
                methods = [each for each in asked.methods if each in chosen]
                for row in speeds(place, size, methods, asked.device, asked.rounds):
                    print(row, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
