"""What commands say of an adapter that they made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from raymerge.cli.render.screen import counted, heading, make_table, printable

if TYPE_CHECKING:
    from raymerge.api import Combination, Extraction, ModuleReport
    from raymerge.lora import OnModule

_NAMES_SHOWN = 3

Fact = tuple[str, str]


def adapter_json(made: Extraction | Combination) -> dict[str, Any]:
    """JSON form of the report; modules with the share of their change that is in the adapter."""
    listed = [{**asdict(module), "energy": module.energy} for module in made.modules]
    return {**asdict(made), "modules": listed}


@contextmanager
def told_modules(console: Console, beginning: str) -> Iterator[OnModule]:
    """A line that says which module is done, ``3 of 42 modules``; it stands on a terminal only, and goes.

    Args:
        beginning: what it says until the first module is done.
    """
    done = 0
    with console.status(printable(beginning)) as status:

        def tell(report: ModuleReport, num_modules: int) -> None:
            nonlocal done
            done += 1
            text = f"{done} of {counted(num_modules, 'module')}: {report.name}, rank {report.rank}"
            status.update(Text(printable(text)))

        yield tell


def show_adapter(
    console: Console, made: Extraction | Combination, facts: Iterable[Fact], *, modules: bool = False
) -> None:
    """Print the report."""
    console.print(heading(f"Adapter in {made.output}"))
    console.print()
    console.print(make_table(("", ""), list(facts)))
    if modules:
        rows = [(each.name, str(each.rank), f"{each.energy:.4f}") for each in made.modules]
        console.print()
        console.print(make_table(("module", "rank", "energy"), rows, numbers=(1, 2)))
    for note in made.notes:
        console.print()
        console.print(Text(printable(note)))


def factors_fact(modules: Sequence[ModuleReport]) -> Fact:
    """How many modules have factors, and their ranks."""
    ranks = [module.rank for module in modules]
    least, most = min(ranks), max(ranks)
    return (
        "factors",
        f"{counted(len(ranks), 'module')}, rank {most if least == most else f'{least} to {most}'}",
    )


def energy_fact(modules: Sequence[ModuleReport]) -> Fact:
    """The module of whose change the least share is in the adapter."""
    least = min(modules, key=lambda module: module.energy)
    return "energy", f"at least {least.energy:.4f} of a module's change, in {least.name}"


def listed(names: Iterable[str]) -> str:
    """How many there are, and the first few."""
    every = list(names)
    more = f" and {len(every) - _NAMES_SHOWN} more" if len(every) > _NAMES_SHOWN else ""
    return f"{len(every)}: {', '.join(every[:_NAMES_SHOWN])}{more}" if every else "none"
