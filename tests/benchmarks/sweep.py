"""Several outputs of one read, against the storage and against separate merges.

    python tests/benchmarks/sweep.py [--root DIRECTORY] [--size 1GB] [--rounds 3] [NAME ...]

``linear``: eight weights of four models. ``ties``: four weights by two densities of three models on their
base. ``windows``: the means of the last two, three and four of four checkpoints; the separate merge is the
largest alone. ``torch_dist``: of the last two, three and five of five as Megatron saves them from four ranks
of tensor parallelism. Each is made as one sweep, and as separate merges one after the other, as users give
the commands; then comes the fastest program that reads what the sweep reads and writes as many copies of a
model as it does. Of windows the last column compares with the largest alone and what that program takes for
the other copies. Rounds take turns. It prints the shortest of each and their ratios. 30 GB of disk for models
of 1 GB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Sample, machine, measure
from benchmarks.parents import SIZES, make_parents, weights_of
from benchmarks.programme import TOKENIZER
from kits.training_checkpoint import Box, grid, save_chunks, whole

_PROGRAM = str(Path(sys.executable).with_name("raymerge"))
_LIMIT = Path(__file__).with_name("limit.py")
_TITLES = (
    *("sweep", "outputs", "read", "written", "one sweep", "of its cores", "the limit", "separate merges"),
    *("sweep : limit", "separate : sweep", "windows : largest and other writes"),
)
_RANKS = 4
_CUT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True, slots=True)
class Case:
    sweep: Mapping[str, Any]
    separate: Sequence[Mapping[str, Any]]
    inputs: Sequence[Path]


def _weighted(models: Sequence[Path], *parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"model": str(m), "parameters": dict(p)} for m, p in zip(models, parameters, strict=True)]


def _linear(parents: Sequence[Path], root: Path) -> Case:
    del root

    def recipe(weight: object) -> dict[str, Any]:
        weights = [{"weight": 1.0}, {"weight": 0.7}, {"weight": 0.4}, {"weight": weight}]
        return {"merge_method": "linear", "models": _weighted(parents, *weights)}

    weights = [number / 8 for number in range(1, 9)]
    return Case({"sweep": {"w": weights}, **recipe("$w")}, [recipe(each) for each in weights], parents)


def _ties(parents: Sequence[Path], root: Path) -> Case:
    del root
    base, *tunes = parents

    def recipe(weight: object, density: object) -> dict[str, Any]:
        own = {"weight": weight, "density": density}
        return {"merge_method": "ties", "base_model": str(base), "models": _weighted(tunes, own, own, own)}

    weights, densities = [0.25, 0.5, 0.75, 1.0], [0.3, 0.6]
    swept = {"sweep": {"w": weights, "d": densities}, **recipe("$w", "$d")}
    return Case(swept, [recipe(w, d) for w in weights for d in densities], parents)


def _windows(parents: Sequence[Path], root: Path) -> Case:
    run = root / "checkpoints"
    run.mkdir(exist_ok=True)
    for number, parent in enumerate(parents, start=1):
        place = run / f"step-{number}"
        place.unlink(missing_ok=True)
        place.symlink_to(parent, target_is_directory=True)
    return _averages(run, [2, 3, 4], parents)


def _torch_dist(parents: Sequence[Path], root: Path) -> Case:
    run = root / "iterations"
    inputs = [*parents, parents[0]]
    for number, parent in enumerate(inputs, start=1):
        _save_torch_dist(run / f"iter_{number:07d}", load_file(weights_of(parent)))
    return _averages(run, [2, 3, 5], inputs)


def _save_torch_dist(place: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    def boxes(name: str, tensor: torch.Tensor) -> list[Box]:
        if tensor.dim() == 1:
            return whole(tensor)
        dim = 1 if name.endswith(_CUT_BY_COLUMNS) else 0
        width = tensor.shape[dim] // _RANKS
        cuts = tuple(rank * width for rank in range(1, _RANKS))
        return grid(tensor.shape, *([()] * dim), cuts)

    save_chunks(place, tensors, {name: boxes(name, each) for name, each in tensors.items()}, files=_RANKS)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def _averages(run: Path, windows: Sequence[int], inputs: Sequence[Path]) -> Case:
    checkpoints = {"root": str(run), "schedule": "linear"}
    largest = {"checkpoints": {**checkpoints, "windows": [windows[-1]]}}
    return Case({"checkpoints": {**checkpoints, "windows": [*windows]}}, [largest], inputs)


CASES: Mapping[str, Callable[[Sequence[Path], Path], Case]] = {
    "linear": _linear,
    "ties": _ties,
    "windows": _windows,
    "torch_dist": _torch_dist,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--root", type=Path, help="a directory for models and outputs")
    parser.add_argument("--size", default="1GB", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.root) as place:
        root = Path(place)
        parents = make_parents(root / "models", SIZES[asked.size], TOKENIZER)
        _say(f"{machine()}; models of {asked.size}\n\n| {' | '.join(_TITLES)} |\n|{'---|' * len(_TITLES)}")
        for name in asked.names:
            _say(f"| {' | '.join(_measured(name, CASES[name](parents, root), root, asked.rounds))} |")
    return 0


def _measured(name: str, case: Case, root: Path, rounds: int) -> tuple[str, ...]:
    files = [str(weights_of(each)) for each in case.inputs]
    recipes = [_written(root, f"{name}{number}", each) for number, each in enumerate(case.separate)]
    swept = _written(root, name, case.sweep)
    # The first of each kind compiles loops.
    _run([_PROGRAM, "submit", "--json", str(recipes[0]), "-o"], root)
    one, limits, alone, apart, written = [], [], [], [], len(_outputs(case))
    for _ in range(rounds):
        one.append(_run([_PROGRAM, "submit", "--json", str(swept), "-o"], root))
        limits.append(_run(_limit(written), root, *files).run)
        if "checkpoints" in case.sweep:
            alone.append(_run(_limit(1), root, *files).run)
        apart.append([_run([_PROGRAM, "submit", "--json", str(each), "-o"], root) for each in recipes])
    best, least = min(one, key=lambda each: each.wall), min(limits)
    separate = min(sum(each.wall for each in own) for own in apart)
    nbytes = os.path.getsize(files[0])
    return (
        name,
        str(written),
        f"{len(files) * nbytes / 1e9:.1f} GB",
        f"{written * nbytes / 1e9:.1f} GB",
        f"{best.wall:.1f} s ({best.run:.1f} s from the first byte)",
        f"{best.cpu:.1f} s",
        f"{least:.1f} s",
        f"{separate:.1f} s ({len(recipes)})",
        f"{best.run / least:.2f}",
        f"{separate / best.wall:.2f}",
        _over_largest(best, min((own[0] for own in apart), key=lambda each: each.wall), least, alone),
    )


def _limit(copies: int) -> list[str]:
    return [sys.executable, str(_LIMIT), "--copies", str(copies)]


def _over_largest(sweep: Sample, largest: Sample, limit: float, alone: Sequence[float]) -> str:
    if not alone:
        return ""
    others = limit - min(alone)
    run = sweep.run / (largest.run + others)
    return f"{sweep.wall / (largest.wall + others):.2f} ({run:.2f} from the first byte)"


def _outputs(case: Case) -> Sequence[object]:
    windows = case.sweep.get("checkpoints", {}).get("windows")
    return case.separate if windows is None else windows


def _run(command: Sequence[str], root: Path, *more: str) -> Sample:
    """Run a command whose output has the next place; what it made is removed again."""
    place = root / "made"
    place.mkdir()
    try:
        return measure([*command, str(place / "out"), *more], environment=dict(os.environ))
    finally:
        shutil.rmtree(place)


def _written(root: Path, name: str, recipe: Mapping[str, Any]) -> Path:
    path = root / f"{name}.yml"
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False), encoding="utf-8")
    return path


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
