"""``raymerge plan``: what a merge would do, and everything that stands in its way."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from raymerge.cli.messages import guarded, show_problems
from raymerge.cli.screen import counted, heading, make_console, make_table, own_stdout, printable, put_json
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.errors import Problem
    from raymerge.planner.explain import ConfigChange, Explanation, TensorLine
    from raymerge.planner.memory import Projection
    from raymerge.planner.plan import Plan
    from raymerge.planner.sources import Source
    from raymerge.runtime.options import RunOptions

_VALUE_SHOWN = 40


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe in mergekit's YAML.")],
    *,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that one worker may use, like 4GiB.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, one line each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Give everything as JSON.")] = False,
) -> None:
    """Show what a merge would do, and every problem; writes nothing."""
    raise typer.Exit(
        guarded(lambda: _plan(recipe, memory, tensors=tensors, as_json=as_json), as_json=as_json)
    )


def _plan(recipe: str, memory: str | None, *, tensors: bool, as_json: bool) -> int:
    from raymerge.runtime.options import RunOptions

    with own_stdout() as stdout:
        options = RunOptions(memory=read_memory(memory))
        made, sources = make_plan(recipe)
        explanation = explain_run(made, sources, options)
    lines = _tensor_lines(made) if tensors else ()
    if as_json:
        listed = {"tensors": [line.to_json() for line in lines]} if tensors else {}
        put_json(stdout, {"recipe": recipe, **explanation.to_json(), **listed})
    else:
        show_explanation(stdout, recipe, explanation)
        _show_tensors(make_console(stdout), lines)
        show_problems(make_console(sys.stderr), explanation.problems)
    return 2 if explanation.problems else 0


def read_memory(memory: str | None) -> int | None:
    """The bytes meant by ``--memory``.

    Raises:
        OptionError: it is no size.
    """
    from raymerge.errors import OptionError, Problem
    from raymerge.units import parse_size

    if memory is None:
        return None
    try:
        return parse_size(memory)
    except ValueError as error:
        raise OptionError(
            Problem("--memory", f"{error}.", "The memory of one worker is a number with a unit.")
        ) from error


def make_plan(recipe: str) -> tuple[Plan, Sequence[Source]]:
    """The plan of a recipe's file, with its problems, and the sources that it was made of."""
    from importlib.metadata import version

    from raymerge.api import read_recipe
    from raymerge.planner.build import build_plan
    from raymerge.planner.sources import open_sources

    read = read_recipe(recipe)
    sources = open_sources(read)
    return build_plan(read, sources, version=version("raymerge")), sources


def explain_run(plan: Plan, sources: Sequence[Source], options: RunOptions) -> Explanation:
    """The account of a plan under run options; a budget that is too small is one more problem of it."""
    from raymerge.planner.explain import explain

    memory, problems = _projection(plan, options)
    return explain(plan, sources, memory, problems=problems)


def _projection(plan: Plan, options: RunOptions) -> tuple[Projection, tuple[Problem, ...]]:
    """Peak memory under the budget, or under the least one that works together with the problem."""
    from raymerge.errors import OptionError
    from raymerge.planner.memory import SMALLEST_BUDGET, project
    from raymerge.runtime.budget import fit_budget

    try:
        return fit_budget(plan, options), ()
    except OptionError as error:
        least = project(plan, SMALLEST_BUDGET).least_budget
        return project(plan, least), error.problems


def show_explanation(stream: IO[str], recipe: str, explanation: Explanation) -> None:
    """Print the account of a plan."""
    console = make_console(stream)
    console.print(heading(f"Plan of {recipe}", note=explanation.digest))
    console.print()
    console.print(make_table(("", ""), list(_facts(explanation))))
    _show_sources(console, explanation)
    _show_dispositions(console, explanation)
    _show_changes(console, explanation.config_changes)
    if explanation.notes:
        console.print()
        console.print(heading("Notes"))
    for note in explanation.notes:
        console.print(make_table(("", ""), [("-", note)]))
    if explanation.problems:
        found = f"{counted(len(explanation.problems), 'problem')} in the way; nothing can be merged before."
        console.print()
        console.print(Text(found, style="bold red"))
        console.print()


def _facts(explanation: Explanation) -> Iterable[tuple[str, str]]:
    output, memory = explanation.output, explanation.memory
    shards = counted(len(output.shards), "shard")
    dtypes = f", {', '.join(output.dtypes)}" if output.dtypes else ""
    yield "method", explanation.method
    yield "output", f"{counted(output.tensors, 'tensor')}, {format_size(output.nbytes)} in {shards}{dtypes}"
    yield "reads", format_size(explanation.read_bytes) + _again(explanation.passes)
    yield "writes", format_size(explanation.written_bytes)
    yield "segments", str(explanation.segments)
    yield "duplicates", _duplicates(explanation)
    yield "head", explanation.tie
    peak = f"{format_size(memory.peak)} of {format_size(memory.budget)}, set by {memory.tensor}"
    yield "memory", f"{peak}; the least that works is {format_size(memory.least_budget)}"


def _again(passes: int) -> str:
    if not passes:
        return ""
    times = "once" if passes == 1 else f"{passes} times"
    return f", and what does not fit the memory {times} more for statistics"


def _duplicates(explanation: Explanation) -> str:
    found = explanation.duplicates
    if not found.tensors:
        return "none"
    equal = "; ".join(f"{one} = {other}" for one, other in found.examples[:1])
    more = f" and {found.tensors - 1} more" if found.tensors > 1 else ""
    size = f"{counted(found.tensors, 'tensor')} ({format_size(found.nbytes)})"
    return f"{size} written as copies of others, made once: {equal}{more}"


def _show_sources(console: Console, explanation: Explanation) -> None:
    rows = [
        (
            str(index), source.name, str(source.tensors), format_size(source.nbytes),
            ", ".join(source.dtypes), "config" if source.gives_config else "",
        )
        for index, source in enumerate(explanation.sources)
    ]  # fmt: skip
    console.print()
    console.print(make_table(("", "source", "tensors", "bytes", "dtypes", "gives"), rows, numbers=(0, 2, 3)))


def _show_dispositions(console: Console, explanation: Explanation) -> None:
    rows = [
        (str(line.source), line.disposition, line.rule, str(line.tensors), format_size(line.nbytes))
        for line in explanation.dispositions
    ]
    titles = ("source", "disposition", "rule", "tensors", "bytes")
    console.print()
    console.print(make_table(titles, rows, numbers=(0, 3, 4)))
    for line in explanation.dispositions:
        if line.examples:
            more = line.tensors - len(line.examples)
            listed = ", ".join(line.examples) + (f" and {more} more" if more else "")
            console.print()
            console.print(Text(printable(f"dropped from {line.source} by {line.rule}: {listed}")))


def _show_changes(console: Console, changes: Sequence[ConfigChange]) -> None:
    if not changes:
        return
    rows = [(each.key, _value(each.before), _value(each.after)) for each in changes]
    console.print()
    console.print(make_table(("config.json", "was", "becomes"), rows))


def _value(text: str | None) -> str:
    if text is None:
        return "absent"
    return text if len(text) <= _VALUE_SHOWN else f"{text[: _VALUE_SHOWN - 3]}..."


def _tensor_lines(plan: Plan) -> tuple[TensorLine, ...]:
    from raymerge.planner.explain import tensor_lines

    return tuple(tensor_lines(plan))


def _show_tensors(console: Console, lines: Sequence[TensorLine]) -> None:
    if lines:
        console.print()
    for line in lines:
        shape = "x".join(map(str, line.shape)) or "scalar"
        origins = ",".join(map(str, line.sources))
        made = "; ".join(line.expressions)
        text = f"{line.name}  {line.dtype}  {shape}  {line.shard}  {line.disposition} from {origins}  {made}"
        console.print(printable(text), soft_wrap=True)
