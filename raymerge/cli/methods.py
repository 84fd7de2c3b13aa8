"""``raymerge methods``: the merge methods, or one of them in full."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from raymerge.cli import completion
from raymerge.cli.messages import command
from raymerge.cli.render.screen import heading, make_console, make_table
from raymerge.errors import OptionError, Problem
from raymerge.runtime.workers.importing import heavy_imports

if TYPE_CHECKING:
    from raymerge.methods import Method, Parameter


@command
def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Explain this one.", autocompletion=completion.methods),
    ] = None,
) -> int:
    """List the merge methods, or explain one."""
    with heavy_imports():
        from raymerge.documents.fields import did_you_mean
        from raymerge.methods import methods

    table, console = methods(), make_console(sys.stdout)
    if name is None:
        rows = [(m.name, f"{m.base}", f"{m.access}", m.paper, m.summary) for m in table.values()]
        console.print(make_table(("method", "base_model", "access", "arXiv", "what it does"), rows))
        console.print("\n'raymerge methods NAME' shows a method's parameters.")
        return 0
    if name not in table:
        hint = f"{did_you_mean(name, list(table))} raymerge has: {', '.join(table)}.".strip()
        raise OptionError(Problem("methods", f"there is no method '{name}'.", hint))
    _show_one(console, table[name])
    return 0


def _show_one(console: Console, method: Method) -> None:
    most = "any number" if method.max_sources is None else str(method.max_sources)
    deltas = "the sources themselves" if method.takes.value == "weights" else "deltas: source minus base"
    console.print(heading(method.name))
    console.print(method.summary)
    console.print()
    facts = [
        ("base_model", method.base.value),
        ("sources", f"{method.min_sources} to {most}" if most != str(method.min_sources) else most),
        ("takes", deltas),
        ("access", method.access.value),
        ("chance", "draws at random, decided by the recipe's seed" if method.random else "none"),
        ("paper", method.paper if method.paper == "-" else f"arXiv {method.paper}"),
    ]
    console.print(make_table(("", ""), facts))
    if not method.parameters:
        console.print("\nIt has no parameters.")
        return
    console.print()
    rows = [
        (p.name, p.kind, "each source" if p.scope == "source" else "recipe", _default(p), _described(p))
        for p in method.parameters
    ]
    console.print(make_table(("parameter", "kind", "for", "default", "what it does"), rows))


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else f"{value:g}"


def _described(parameter: Parameter) -> str:
    bounds = {"at least": parameter.minimum, "at most": parameter.maximum}
    limits = ", ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    idle = "" if parameter.effective else "; accepted for compatibility, changes nothing"
    return f"{parameter.doc}{f' ({limits})' if limits else ''}{idle}"
