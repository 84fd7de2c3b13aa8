"""``raymerge plan``: what a merge would do, and everything that stands in its way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from raymerge.cli.messages import guarded, show_problems
from raymerge.cli.options import ProfileFile, planned_options, read_memory
from raymerge.cli.render.duplicates import group_lines, sized
from raymerge.cli.render.screen import (
    counted,
    heading,
    make_console,
    make_table,
    named,
    own_stdout,
    printable,
)
from raymerge.cli.simulate import (
    check_memory,
    in_hand,
    misplaced,
    read_cluster,
    show_simulation,
    show_total,
    taken_for_recipe,
)
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.storage.addresses import check_alone
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.api import RecipesLike
    from raymerge.errors import Problem
    from raymerge.merge_plan.memory import Projection
    from raymerge.merge_plan.plan import Plan
    from raymerge.options import RunOptions
    from raymerge.planner.chained_merges import PlannedMerge
    from raymerge.planner.explain import ConfigChange, Explanation, TensorLine
    from raymerge.planner.simulation import Cluster, Simulation

_VALUE_SHOWN = 40
_GROUPS = 5
_SIMULATE_HELP = (
    "Predict the run on a cluster, like --simulate workers=64 storage=2GB/s; also read=, write=, "
    "per_worker=, compute=, threads=, cores=, per_core=, lanes=, memory=, overhead=, driver=, startup=."
)
_OUT_HELP = "Where it would be submitted to, to see which merges are made there; RECIPE-merged by default."
_STEPS_HELP = "Where what stages and merges for others make on the way would be; by default beside OUT."


@dataclass(frozen=True, slots=True)
class Account:
    """One merge of a recipe's file, accounted for."""

    merge: PlannedMerge
    explanation: Explanation
    """Its plan in numbers, with all problems."""
    title: str
    is_made: bool | None
    """Whether its result is there and ``submit`` does not make it again; None for a recipe of one merge."""
    simulation: Simulation | None = None
    """Its run on the cluster that was asked for, without start-up where another one is run before; None where
    none was asked for, nothing is to be made, or problems are in the way."""
    steps: str = ""
    """Where the results between lie, if the user says where; on the last account alone."""

    @property
    def is_whole(self) -> bool:
        """Whether the plan says what will be made; one that lacks tensors or chose none says nothing true."""
        return not self.merge.plan.problems

    def to_json(self, *, tensors: bool) -> dict[str, Any]:
        """JSON form; of one of several merges also with its name. Of a plan that is not whole the sources."""
        name = {} if self.is_made is None else {"name": self.merge.recipe.name, "is_made": self.is_made}
        if not self.is_whole:
            said = self.explanation.to_json()
            return {**name, "sources": said["sources"], "problems": said["problems"]}
        lines = [line.to_json() for line in _tensor_lines(self.merge.plan)] if tensors else []
        simulated = {"simulation": self.simulation.to_json()} if self.simulation is not None else {}
        listed = {"tensors": lines} if tensors else {}
        steps = {"steps": self.steps} if self.steps else {}
        return {**name, **self.explanation.to_json(), **steps, **simulated, **listed}


def _checked(simulate: list[str] | None) -> list[str] | None:
    """The option's values, looked at before anything is missed that one of them has taken the place of."""
    from raymerge.errors import OptionError

    def verb() -> int:
        if problem := next(filter(None, map(misplaced, simulate or ())), None):
            raise OptionError(problem)
        return 0

    if code := guarded(verb):
        raise typer.Exit(code)
    return simulate


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe in mergekit's YAML.")],
    # An option takes one value, so what follows it comes as further arguments.
    pairs: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", hidden=True)] = None,
    *,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="OUT", help=_OUT_HELP)] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that one worker may use, like 4GiB.")
    ] = None,
    profile: ProfileFile = None,
    steps: Annotated[str | None, typer.Option("--steps", metavar="DIR", help=_STEPS_HELP)] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, one line each.")] = False,
    simulate: Annotated[
        list[str] | None,
        typer.Option("--simulate", metavar="KEY=VALUE ...", help=_SIMULATE_HELP, callback=_checked),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Give everything as JSON.")] = False,
) -> None:
    """Show what a merge would do, and every problem; writes nothing. Several merges are shown in order."""

    def verb() -> int:
        options, named = planned_options(profile, read_memory(memory), steps)
        cluster = _cluster(recipe, simulate or (), pairs or ())
        with own_stdout() as stdout:
            place = output or named or default_output(recipe)
            check_alone(place)
            accounts = explain_all(recipe, place, options, title=recipe)
            if cluster is not None:
                accounts = _simulated(accounts, cluster)
        return _show(accounts, recipe, stdout, tensors=tensors, as_json=as_json)

    raise typer.Exit(guarded(verb, as_json=as_json))


def _cluster(recipe: str, simulate: Sequence[str], pairs: Sequence[str]) -> Cluster | None:
    from raymerge.errors import OptionError, Problem

    found = None if Path(recipe).exists() else taken_for_recipe(recipe, simulate, pairs)
    if found is not None:
        raise OptionError(found)
    if simulate:
        return read_cluster([*simulate, *pairs])
    if pairs:
        what = f"'{pairs[0]}' is one argument too many: one recipe is planned."
        raise OptionError(Problem("plan", what, "Leave it out; KEY=VALUE stands behind --simulate."))
    return None


def _simulated(accounts: Sequence[Account], cluster: Cluster) -> tuple[Account, ...]:
    """The accounts with the runs of what is to be made, one after the other on workers that start once.

    Raises:
        OptionError: the workers have too little memory.
    """
    from raymerge.planner.simulation import simulate_plan

    wanted = [not account.is_made and not account.explanation.problems for account in accounts]
    check_memory(cluster, [each.explanation.memory for each in compress(accounts, wanted)])
    found: list[Account] = []
    for account, is_wanted in zip(accounts, wanted, strict=True):
        if not is_wanted:
            found.append(account)
            continue
        run = simulate_plan(account.merge.plan, cluster, account.explanation.memory.budget)
        found.append(replace(account, simulation=run))
        cluster = replace(cluster, startup=0.0)
    return tuple(found)


def default_output(recipe: str) -> str:
    """Where a recipe is submitted to if no place is named."""
    return f"{Path(recipe).stem}-merged"


def _show(accounts: Sequence[Account], recipe: str, stdout: IO[str], *, tensors: bool, as_json: bool) -> int:
    if as_json:
        found = [{"recipe": recipe, **account.to_json(tensors=tensors)} for account in accounts]
        stdout.write(json.dumps(found if len(found) > 1 else found[0]) + "\n")
        stdout.flush()
    else:
        show_accounts(stdout, accounts, tensors=tensors)
    problems = list(dict.fromkeys(problem for each in accounts for problem in each.explanation.problems))
    if not as_json:
        show_problems(make_console(sys.stderr), problems)
    return 2 if problems else 0


def explain_all(recipe: RecipesLike, output: str, options: RunOptions, *, title: str) -> tuple[Account, ...]:
    """The merges of recipes that are called ``title``, in the order in which they are carried out."""
    with heavy_imports():
        from raymerge.api import plan_for
        from raymerge.publish.output_place import place_of
        from raymerge.runtime.driver.result_cache import kept_steps
        from raymerge.runtime.driver.steps import chosen_steps, steps_problems

    merges, place = plan_for(recipe, output, options), place_of(output, options)
    lacks = tuple(steps_problems(place, options, merges))
    made = frozenset() if lacks else kept_steps(merges, place, options.steps)
    several, steps = len(merges) > 1, chosen_steps(place, options, merges)
    return tuple(
        Account(
            merge,
            _explained(merge, options, lacks if merge is merges[-1] else ()),
            f"{title}{_which(merge.recipe.name, number, len(merges)) if several else ''}",
            merge.recipe.name in made if several else None,
            steps=steps if merge is merges[-1] else "",
        )
        for number, merge in enumerate(merges, start=1)
    )


def _which(name: str | None, number: int, total: int) -> str:
    return f", merge {number} of {total}{f': {name}' if name else ''}"


def _explained(merge: PlannedMerge, options: RunOptions, beside: Sequence[Problem]) -> Explanation:
    """The account of a plan; a budget that is too small, what its stages lack, and what is said beside it
    are problems of it too."""
    from raymerge.planner.explain import explain
    from raymerge.planner.inputs.source import reads_far
    from raymerge.runtime.driver.chained_merges import stage_lines

    memory, problems = _projection(merge.plan, options, is_far=reads_far(merge.sources))
    stages, lacks = stage_lines(merge, options)
    found = dict.fromkeys((*problems, *lacks, *beside))
    return explain(merge.plan, merge.sources, memory, stages=stages, problems=tuple(found))


def _projection(plan: Plan, options: RunOptions, *, is_far: bool) -> tuple[Projection, tuple[Problem, ...]]:
    """Peak memory under the budget, or under the least one that works together with the problem."""
    from raymerge.errors import OptionError
    from raymerge.merge_plan.memory import SMALLEST_BUDGET, project
    from raymerge.runtime.workers.sizing import fit_budget

    try:
        return fit_budget(plan, options, is_far=is_far), ()
    except OptionError as error:
        least = project(plan, SMALLEST_BUDGET, lanes=1).least_budget
        return project(plan, least, lanes=1), error.problems


def show_accounts(stream: IO[str], accounts: Sequence[Account], *, tensors: bool = False) -> None:
    """Print the account of each merge."""
    for number, account in enumerate(accounts):
        if number:
            make_console(stream).print()
        _show_account(stream, account)
        if tensors and account.is_whole:
            _show_tensors(make_console(stream), _tensor_lines(account.merge.plan))
    if accounts[-1].steps:
        made = f"\nwhat is made on the way lies in {accounts[-1].steps}"
        make_console(stream).print(printable(made), soft_wrap=True)
    if len(accounts) > 1:
        _show_total(make_console(stream), accounts)


def _show_total(console: Console, accounts: Sequence[Account]) -> None:
    """What all merges take together, if all that are to be made were simulated."""
    made = [account for account in accounts if not account.is_made]
    runs = [account.simulation for account in made if account.simulation is not None]
    if runs and len(runs) == len(made):
        stages = sum(len(account.explanation.stages) for account in made)
        show_total(console, runs, kept=len(accounts) - len(made), stages=stages)


def _show_account(stream: IO[str], account: Account) -> None:
    console, explanation = make_console(stream), account.explanation
    note = explanation.digest if account.is_whole else ""
    console.print(heading(f"Plan of {account.title}", note=note))
    if account.is_made:
        console.print("made already: 'submit' takes the result that is there")
    if account.is_whole:
        console.print()
        console.print(make_table(("", ""), list(_facts(explanation))))
    _show_sources(console, explanation)
    if account.is_whole:
        _show_what_is_made(console, account)
    if explanation.problems:
        found = f"{counted(len(explanation.problems), 'problem')} in the way; nothing can be merged before."
        console.print()
        console.print(Text(found, style="bold red"))
        console.print()


def _show_what_is_made(console: Console, account: Account) -> None:
    explanation = account.explanation
    _show_stages(console, explanation)
    _show_dispositions(console, explanation)
    _show_left_out(console, explanation)
    _show_changes(console, explanation.config_changes)
    if account.simulation is not None:
        show_simulation(console, account.simulation, stages=len(explanation.stages))
    if explanation.notes:
        console.print()
        console.print(heading("Notes"))
    for note in explanation.notes:
        console.print(make_table(("", ""), [("-", note)]))


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
    peak = f"{format_size(memory.peak)} of {format_size(memory.budget)} for {in_hand(memory.lanes)}"
    yield (
        "memory",
        f"{peak}, set by {memory.tensor}; the least that works is {format_size(memory.least_budget)}",
    )


def _again(passes: int) -> str:
    if not passes:
        return ""
    times = "once" if passes == 1 else f"{passes} times"
    return f", and what does not fit the memory {times} more for statistics"


def _duplicates(explanation: Explanation) -> str:
    found = explanation.duplicates
    if not found.tensors:
        return "none"
    size = sized(found.tensors, found.nbytes)
    shared = "; they may share storage" if found.policy == "share" else ""
    lines = group_lines(found.groups, shown=_GROUPS)
    return "\n".join([f"{size} equal others, made once and written to each place{shared}:", *lines])


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


def _show_stages(console: Console, explanation: Explanation) -> None:
    if not explanation.stages:
        return
    rows = [
        (
            line.title, _known(line.units, str), _known(line.read_bytes), _known(line.least_memory),
            _known(line.disk_bytes),
        )
        for line in explanation.stages
    ]  # fmt: skip
    titles = ("stage before", "units", "reads", "least memory", "disk")
    console.print()
    console.print(make_table(titles, rows, numbers=(1, 2, 3, 4)))


def _known(number: int | None, shown: Callable[[int], str] = format_size) -> str:
    return "?" if number is None else shown(number)


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


def _show_left_out(console: Console, explanation: Explanation) -> None:
    """Files that are neither read nor copied, and the rules that say so."""
    if not explanation.left_out:
        return
    rows = [
        (
            str(line.source), line.rule or "none: refused", line.reason, str(line.files),
            format_size(line.nbytes), named(line.examples, line.files),
        )
        for line in explanation.left_out
    ]  # fmt: skip
    titles = ("source", "left out by rule", "which is about", "files", "bytes", "such as")
    console.print()
    console.print(make_table(titles, rows, numbers=(0, 3, 4)))


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
        how = f"{line.disposition} from {origins}" if origins else line.disposition
        text = f"{line.name}  {line.dtype}  {shape}  {line.shard}  {how}  {made}"
        console.print(printable(text), soft_wrap=True)
