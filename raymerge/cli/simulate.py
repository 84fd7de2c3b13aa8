"""``raymerge plan --simulate``: reading what is to be simulated, and showing what came of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from raymerge.cli.render.screen import counted, heading, make_table
from raymerge.errors import OptionError, Problem
from raymerge.units import format_duration, format_size, parse_size

if TYPE_CHECKING:
    from raymerge.merge_plan.memory import Projection
    from raymerge.planner.simulation import Cluster, Simulation

EXAMPLE = "--simulate workers=64 storage=2GB/s"
_SHOWN = 0.005
"""What is busy for less of the run than this is not worth a word."""
_MOST_WORKERS = 100_000
_MOST_EACH = 1_024
"""Threads, cores and segments of one worker: more is a slip, and what is simulated takes memory here."""
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(us|ms|s|min|h|)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}
_BITS = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([kmgt]?)(i?)b(?:its?|ps)?(?:/s)?", re.IGNORECASE)
_PREFIXES = ("", "K", "M", "G", "T")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of value."""

    read: Callable[[str], float]
    """The value that a text means; raises ValueError with what is wrong with it."""
    remedy: str


def _count(most: int) -> _Kind:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]+", text):
            raise ValueError(f"{_brief(text)} is no whole number")
        if len(text) > len(str(most)) or int(text) > most:
            raise ValueError(f"{text[:20]} are more than can be simulated")
        return int(text)

    return _Kind(read, f"Give a whole number from 1 to {most:,}.")


def _speed(text: str) -> int:
    bits = _BITS.fullmatch(text)
    if bits is not None and "B" not in text:
        raise ValueError(f"{_brief(text)} has a small b: bits? {text} is {_in_bytes(bits)}/s")
    if re.fullmatch(r"[0-9.]+(/s)?", text):
        raise ValueError(f"{_brief(text)} has no unit")
    size = text.removesuffix("/s")
    try:
        if size.endswith("B"):
            return parse_size(size)
    except ValueError:
        pass
    raise ValueError(f"{_brief(text)} is no speed")


def _in_bytes(bits: re.Match[str]) -> str:
    """``25Gb`` as ``3.1GB``."""
    number, prefix, binary = bits.groups()
    step, power = (1024, "i") if binary else (1000, "")
    size, at = float(number) / 8, _PREFIXES.index(prefix.upper())
    while size < 1 and at:
        size, at = size * step, at - 1
    return f"{f'{size:.1f}'.removesuffix('.0')}{_PREFIXES[at]}{power if at else ''}B"


def _memory(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from None


def _time(text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{_brief(text)} is no time")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def _brief(text: str) -> str:
    return repr(text[:40])


_EACH = _count(_MOST_EACH)
_A_SPEED = _Kind(_speed, "Write it in bytes a second, like 2GB/s or 800MB/s.")
_A_TIME = _Kind(_time, "Write it like 8s, 5ms or 2min.")
_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "workers": _count(_MOST_WORKERS),
        "storage": _A_SPEED,
        "read": _A_SPEED,
        "write": _A_SPEED,
        "per_worker": _A_SPEED,
        "compute": _A_SPEED,
        "threads": _EACH,
        "cores": _EACH,
        "per_core": _A_SPEED,
        "lanes": _EACH,
        "memory": _Kind(_memory, "Write it like 4GiB."),
        "overhead": _A_TIME,
        "driver": _A_TIME,
        "startup": _A_TIME,
    }
)
"""The keys, and the kinds of their values."""


def misplaced(word: str) -> Problem | None:
    """What is wrong where another argument stands in the place of the first pair; None if it may be one."""
    if "=" in word or word.strip() in ("", *_KINDS) or " " in word.strip():
        return None
    what = f"{_brief(word)} stands where KEY=VALUE is expected."
    if _is_recipe(word):
        return Problem("--simulate", what, f"Put it first: raymerge plan {shlex.quote(word)} {EXAMPLE}")
    return Problem("--simulate", what, f"Write it like {EXAMPLE}.")


def _is_recipe(word: str) -> bool:
    return "=" not in word and word.lower().endswith((".yml", ".yaml"))


def taken_for_recipe(recipe: str, simulate: Sequence[str], pairs: Sequence[str]) -> Problem | None:
    """What is wrong where a pair stands in the place of the recipe; None if it is none."""
    key, equals, _ = recipe.partition("=")
    if not equals or not (simulate or key in _KINDS):
        return None
    others = [word for word in pairs if _is_recipe(word)]
    words = [*simulate, recipe, *(word for word in pairs if word not in others)]
    name = shlex.quote(others[0]) if len(others) == 1 else "RECIPE"
    what = f"{_brief(recipe)} stands where the recipe is expected."
    return Problem("plan", what, f"Put the recipe first: raymerge plan {name} --simulate {' '.join(words)}")


def read_cluster(words: Sequence[str]) -> Cluster:
    """The cluster meant by ``workers=64 storage=2GB/s``; several pairs may stand in one word.

    Raises:
        OptionError: with everything that is wrong with it.
    """
    from raymerge.planner.simulation import Cluster

    values: dict[str, Any] = {}
    problems: list[Problem] = []
    # Where a value cannot be read another one stands in: that it lacks, or what it is, is not wrong too.
    instead: dict[str, Any] = {}
    for pair in _split(words):
        try:
            key = _key(pair, values.keys() | instead.keys())
        except OptionError as error:
            problems += error.problems
            # It may have been meant for what would be missed.
            instead.setdefault("storage", 1)
            continue
        try:
            values[key] = _KINDS[key].read(pair.partition("=")[2].strip())
        except ValueError as error:
            problems.append(Problem(f"--simulate {key}", f"{error}.", _KINDS[key].remedy))
            instead[key] = 1
    try:
        found = Cluster(**{**instead, **values})
    except OptionError as error:
        problems += error.problems
    if problems:
        raise OptionError(problems)
    return found


def check_memory(cluster: Cluster, projections: Iterable[Projection]) -> None:
    """See that the workers have the memory that merges need.

    Raises:
        OptionError: they have not.
    """
    found = (replace(each, budget=cluster.memory or each.budget) for each in projections)
    problems = dict.fromkeys(filter(None, (each.shortage("--simulate memory") for each in found)))
    if problems:
        raise OptionError(tuple(problems))


def _split(words: Sequence[str]) -> Iterator[str]:
    """The pairs, and what is none; spaces around ``=`` and before a unit are part of a pair."""
    # A comma between digits is no comma between pairs.
    text = re.sub(r",(?![0-9])", " ", " ".join(words))
    text = re.sub(r"\s*/\s*s(?!\w)", "/s", re.sub(r"\s+=", "=", text))
    tokens = re.sub(r"=\s++(?!\w+=)", "=", text).split()
    while tokens:
        pair = tokens.pop(0)
        follows = tokens[0] if tokens and "=" not in tokens[0] and tokens[0] not in _KINDS else ""
        is_unit = re.search(r"=[0-9.]+$", pair) and re.fullmatch(r"[A-Za-z]+(/s)?", follows)
        if follows and (is_unit or pair in _KINDS):
            pair = f"{pair} {tokens.pop(0)}"
        yield pair


def _key(pair: str, before: Collection[str]) -> str:
    """The key of a pair; raises OptionError."""
    from raymerge.recipes import did_you_mean

    key, equals, _ = pair.partition("=")
    if not equals:
        example = "=".join(pair.split()) if " " in pair else "workers=64"
        raise _wrong(f"{_brief(pair)} is no pair of a key and a value.", f"Write it like {example}.")
    if key not in _KINDS:
        known = f"The keys are {', '.join(_KINDS)}."
        raise _wrong(f"there is no key '{key}'.", f"{did_you_mean(key, _KINDS)} {known}".strip())
    if key in before:
        raise _wrong(f"'{key}' is given twice.", "Give it once.")
    return key


def _wrong(what: str, remedy: str) -> OptionError:
    return OptionError(Problem("--simulate", what, remedy))


def show_simulation(console: Console, simulation: Simulation, *, stages: int = 0) -> None:
    """Print what a run would take, and what it would spend its time on.

    Args:
        stages: how many stages come before it, which are not simulated.
    """
    cluster = simulation.cluster
    console.print()
    console.print(heading(f"Simulated on {counted(cluster.workers, 'worker')}"))
    console.print(make_table(("", ""), [*_facts(simulation), *_left_out(stages)]))
    rows = [(name, f"{share:.0%}") for name, share in simulation.busy.items() if share >= _SHOWN]
    console.print()
    console.print(make_table(("busy", "of the run"), rows, numbers=(1,)))


def show_total(console: Console, simulations: Sequence[Simulation], *, kept: int, stages: int) -> None:
    """Print what several merges would take, one after the other on the same workers.

    Args:
        kept: how many are made already.
        stages: how many stages come before them.
    """
    parts = {
        "start-up": sum(each.startup_seconds for each in simulations),
        "runs": sum(each.run_seconds for each in simulations),
        "finishing": sum(each.finishing_seconds for each in simulations),
    }
    listed = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
    made = f"{len(simulations)} to make{f', {kept} made already' if kept else ''}"
    rows = [("merges", made), ("time", f"{format_duration(sum(parts.values()))}: {listed}")]
    console.print()
    console.print(heading("Simulated, all merges together"))
    console.print(make_table(("", ""), [*rows, *_left_out(stages)]))


def _left_out(stages: int) -> Iterator[tuple[str, str]]:
    if stages:
        yield "left out", f"{counted(stages, 'stage')} before the merge; stages are not simulated"


def in_hand(lanes: int) -> str:
    """``3 segments side by side``: what shares a worker's memory."""
    return f"{lanes} segments side by side" if lanes > 1 else "1 segment at a time"


def _facts(simulation: Simulation) -> Iterator[tuple[str, str]]:
    cluster, run = simulation.cluster, format_duration(simulation.run_seconds)
    before, after = map(format_duration, (simulation.startup_seconds, simulation.finishing_seconds))
    yield "time", f"{format_duration(simulation.seconds)}: start-up {before}, run {run}, finishing {after}"
    yield "limiter", simulation.limiter
    memory = format_size(cluster.memory or 0)
    yield "a worker", f"{in_hand(cluster.lanes or 1)}, {counted(cluster.threads, 'thread')}, {memory}"
    yield "reads", format_size(simulation.read_bytes)
    yield "writes", format_size(simulation.written_bytes)
    for workers, seconds in simulation.others.items():
        faster = simulation.seconds / seconds
        yield counted(workers, "worker"), f"{format_duration(seconds)}, {faster:.2f} times as fast"
    if simulation.guessed:
        names = ", ".join(simulation.guessed)
        yield "a guess", f"the speed of {names}, which was not measured; compute= says it better"
