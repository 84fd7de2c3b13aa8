"""Which programs are run on which files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from benchmarks import peer
from benchmarks.groups import Group, Program
from benchmarks.parents import SIZES, make_parents, make_sparse, weights_of
from benchmarks.recipes import METHODS, VERBATIM, numbers_of, recipe

LIMIT, COPY, PEER = "the limit", "cp + sync", f"mergekit {peer.VERSION}"
DIRECT, BUFFERED = "the limit, direct reads", "the limit, buffered reads"
INLINE, RAY = "raymerge --inline", "raymerge --workers 1"
DEFAULT = "raymerge"
"""As users give it: a small merge runs inline by itself."""
TIGHT = "raymerge --inline --memory 256MiB"
REPORT = "raymerge --inline --report"
ONE, TWO = "raymerge --workers 1 --threads 1", "raymerge --workers 2 --threads 1"
SCALED = "della"
"""The merge of those two: what it computes takes several times as long as what it reads and writes."""
PLAN, SUBMIT, IDLE, SMALL = "plan of a 7B pair", "submit of a tiny model", "idle", "linear, small models"

ON_RAY = ("linear", "ties")
COLD = ("linear", "task_arithmetic", "slerp", "dare_linear")
_PROGRAM = str(Path(sys.executable).with_name("raymerge"))
_LIMIT_SCRIPT = Path(__file__).with_name("limit.py")
TOKENIZER = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "models" / "base"


@dataclass(frozen=True, slots=True)
class Yard:
    root: Path
    size: str
    peer: Path | None
    options: tuple[str, ...] = ()
    is_quick: bool = False

    def parents(self, size: str | None = None) -> list[Path]:
        name = size or self.size
        return make_parents(self.root / "parents" / name, SIZES[name], TOKENIZER)

    def reference(self, method: str) -> Path:
        return self.root / "reference" / method

    def recipe(self, method: str, size: str | None = None) -> Path:
        name = size or self.size
        return self.written(f"{method}-{name}", recipe(method, self.parents(name), SIZES[name].layers))

    def written(self, name: str, content: dict[str, Any]) -> Path:
        path = self.root / "recipes" / f"{name}.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return path


def submit(recipe: Path, *options: str) -> Callable[[Path], Sequence[str]]:
    return lambda output: [_PROGRAM, "submit", str(recipe), "-o", str(output), "--json", *options]


def _on_ray(recipe: Path, yard: Yard) -> Callable[[Path], Sequence[str]]:
    return submit(recipe, "--workers", "1", *yard.options)


def plan(recipe: Path) -> Callable[[Path], Sequence[str]]:
    return lambda output: [_PROGRAM, "plan", str(recipe), "-o", str(output)]


def idle_group(yard: Yard, methods: Sequence[str]) -> Group:
    """Every merge of hardly anything: what a process takes that has loaded all it needs.

    The first of the two rounds also compiles loops, and finds the files of Python in no cache.
    """
    programs = [
        Program(method, submit(yard.recipe(method, "tiny"), "--inline", *yard.options)) for method in methods
    ]
    return Group(IDLE, tuple(programs), rounds=2)


def warm_group(yard: Yard, method: str) -> Group:
    path = yard.recipe(method)
    programs = [_floor(yard, method), Program(INLINE, submit(path, "--inline", *yard.options))]
    if method in ON_RAY:
        programs.append(Program(RAY, _on_ray(path, yard)))
    if method == "linear":
        programs.append(Program(TIGHT, submit(path, "--inline", "--memory", "256MiB")))
        with_report = submit(path, "--inline", "--report", str(yard.root / "report.html"), *yard.options)
        programs.append(Program(REPORT, with_report))
    if method == SCALED:
        # By itself a worker computes with as many threads as there are cores for it: one would have both.
        for name, workers in ((ONE, "1"), (TWO, "2")):
            limits = ("--workers", workers, "--threads", "1")
            programs.append(Program(name, submit(path, *limits, *yard.options)))
    programs += _peer(yard, method, path)
    reference = yard.reference(method).glob("*.safetensors") if method in VERBATIM else ()
    return Group(method, tuple(programs), (*_inputs(yard, method), *sorted(reference)))


def cold_group(yard: Yard, method: str) -> Group:
    inputs = _inputs(yard, method)
    path = yard.recipe(method)
    programs = [
        Program(DIRECT, _limit(inputs, "--direct")),
        Program(BUFFERED, _limit(inputs)),
        Program(INLINE, submit(path, "--inline", *yard.options)),
    ]
    if method == "linear":
        programs += _peer(yard, method, path, rounds=1)
    return Group(cold_name(method), tuple(programs), tuple(inputs), is_cold=True)


def cold_name(method: str) -> str:
    return f"{method}, cold cache"


def small_groups(yard: Yard) -> Iterator[Group]:
    path = yard.recipe("linear", "10MB")
    programs = [
        Program(INLINE, submit(path, "--inline", *yard.options)),
        Program(RAY, _on_ray(path, yard)),
        *_peer(yard, "linear", path),
    ]
    yield Group(SMALL, tuple(programs), tuple(map(weights_of, yard.parents("10MB"))))
    tiny = yard.recipe("linear", "tiny")
    yield Group(SUBMIT, (Program(DEFAULT, submit(tiny, *yard.options)), Program(RAY, _on_ray(tiny, yard))))
    yield Group(PLAN, (Program("raymerge plan", plan(pair(yard))),))


def pair(yard: Yard) -> Path:
    places = [make_sparse(yard.root / "sparse" / name, SIZES["7B"]) for name in ("a", "b")]
    models = [{"model": str(place), "parameters": {"weight": 0.5}} for place in places]
    return yard.written("pair", {"merge_method": "linear", "models": models, "dtype": "bfloat16"})


def _inputs(yard: Yard, method: str) -> list[Path]:
    parents = yard.parents()
    return [weights_of(parents[number]) for number in numbers_of(method)]


def _floor(yard: Yard, method: str) -> Program:
    if method in VERBATIM:
        script = 'mkdir "$1" && cp "$0"/*.safetensors "$1" && sync "$1"/* "$1"'
        source = str(yard.reference(method))
        return Program(COPY, lambda output: ["sh", "-c", script, source, str(output)])
    return Program(LIMIT, _limit(_inputs(yard, method)))


def _limit(inputs: Sequence[Path], *options: str) -> Any:
    files = [str(path) for path in inputs]
    return lambda output: [sys.executable, str(_LIMIT_SCRIPT), *options, str(output), *files]


def _peer(yard: Yard, method: str, path: Path, *, rounds: int | None = None) -> list[Program]:
    is_slow = method in peer.SLOW
    if yard.peer is None or method not in peer.METHODS or (is_slow and yard.is_quick):
        return []
    most = 1 if is_slow else rounds
    return [Program(PEER, peer.command(yard.peer, method, path), rounds=most)]


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"no merge is called {', '.join(unknown)}; there are {', '.join(METHODS)}")
    return tuple(names) or METHODS
