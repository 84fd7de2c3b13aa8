"""``raymerge plan --simulate``: reading what is to be simulated, and showing what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from raymerge.cli.screen import counted, heading, make_table
from raymerge.errors import OptionError, Problem
from raymerge.units import format_duration, format_size, parse_size

if TYPE_CHECKING:
    from raymerge.planner.simulate import Cluster, Simulation, Spread

_SHOWN = 0.005
"""Shares of the time below this are not worth a word."""
_ALONE = 0.02
"""Share of the run from which on it is told that the last segment runs alone."""
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|h|)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"{text!r} is no whole number; write it like 64")
    return int(text)


def _speed(text: str) -> int:
    try:
        return parse_size(text.removesuffix("/s"))
    except ValueError:
        raise ValueError(f"{text!r} is no speed; write it like 2GB/s or 800MB/s") from None


def _time(text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time; write it like 8s, 5ms or 2min")
    return float(match.group(1)) * _SECONDS[match.group(2)]


_READERS: Mapping[str, Callable[[str], float]] = MappingProxyType(
    {
        "workers": _number,
        "storage": _speed,
        "read": _speed,
        "write": _speed,
        "per_worker": _speed,
        "compute": _speed,
        "threads": _number,
        "cores": _number,
        "per_core": _speed,
        "lanes": _number,
        "memory": parse_size,
        "overhead": _time,
        "driver": _time,
        "startup": _time,
    }
)
"""How the value of each key is read."""


def read_cluster(words: Sequence[str]) -> Cluster:
    """The cluster meant by ``workers=64 storage=2GB/s``; several pairs may stand in one word.

    Raises:
        OptionError: with everything that is wrong with it.
    """
    from raymerge.planner.simulate import Cluster

    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for pair in " ".join(words).replace(",", " ").split():
        try:
            key, value = _read_pair(pair, values)
            values[key] = value
        except OptionError as error:
            problems += error.problems
    try:
        found = Cluster(**values)
    except OptionError as error:
        problems += error.problems
    if problems:
        raise OptionError(problems)
    return found


def _read_pair(pair: str, before: Mapping[str, Any]) -> tuple[str, float]:
    """Key and value; raises OptionError."""
    from raymerge.recipes import did_you_mean

    key, equals, text = pair.partition("=")
    known = f"The keys are {', '.join(_READERS)}."
    if not equals:
        raise _wrong(f"'{pair}' is no pair of a key and a value.", "Write it like workers=64.")
    if key not in _READERS:
        raise _wrong(f"there is no key '{key}'.", f"{did_you_mean(key, _READERS)} {known}".strip())
    if key in before:
        raise _wrong(f"'{key}' is given twice.", "Give it once.")
    try:
        return key, _READERS[key](text)
    except ValueError as error:
        raise OptionError(Problem(f"--simulate {key}", f"{error}.", "")) from error


def _wrong(what: str, remedy: str) -> OptionError:
    return OptionError(Problem("--simulate", what, remedy))


def show_simulation(console: Console, simulation: Simulation) -> None:
    """Print what a run would take, and what it would spend its time on."""
    cluster = simulation.cluster
    console.print()
    console.print(heading(f"Simulated on {counted(cluster.workers, 'worker')}"))
    console.print(make_table(("", ""), list(_facts(simulation))))
    rows = [(name, f"{share:.0%}") for name, share in simulation.shares.items() if share >= _SHOWN]
    console.print()
    console.print(make_table(("time goes to", "share"), rows, numbers=(1,)))


def _facts(simulation: Simulation) -> Iterator[tuple[str, str]]:
    cluster, run = simulation.cluster, format_duration(simulation.run_seconds)
    before, after = map(format_duration, (simulation.startup_seconds, simulation.finishing_seconds))
    yield "time", f"{format_duration(simulation.seconds)}: start-up {before}, run {run}, finishing {after}"
    yield "limiter", _limiter(simulation)
    memory = format_size(cluster.memory or 0)
    yield "a worker", f"{_in_flight(cluster)}, {counted(cluster.threads, 'thread')}, {memory}"
    yield "reads", format_size(simulation.read_bytes)
    yield "writes", format_size(simulation.written_bytes)
    yield "busy", _spread(simulation.busy_seconds, format_duration)
    yield "moved", _spread(simulation.moved_bytes, lambda nbytes: format_size(round(nbytes)))
    for other in simulation.others:
        faster = simulation.seconds / other.seconds
        took = format_duration(other.seconds)
        yield counted(other.workers, "worker"), f"{took}, {faster:.2f} times as fast"
    if simulation.guessed:
        names = ", ".join(simulation.guessed)
        yield "a guess", f"the speed of {names}, which was not measured; compute= says it better"


def _in_flight(cluster: Cluster) -> str:
    return f"{counted(cluster.wanted_lanes, 'segment')} in flight"


def _limiter(simulation: Simulation) -> str:
    alone = simulation.alone_seconds
    if alone < _ALONE * simulation.run_seconds:
        return simulation.limiter
    return f"{simulation.limiter}; the last segment runs alone for {format_duration(alone)}"


def _spread(spread: Spread, shown: Callable[[float], str]) -> str:
    if spread.least == spread.most:
        return f"{shown(spread.most)} each"
    least, median, most = map(shown, (spread.least, spread.median, spread.most))
    return f"{least} to {most}, in the middle {median}"
