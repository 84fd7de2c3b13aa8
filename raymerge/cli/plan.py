"""``raymerge plan``: what a merge would do, how long it would take, and every problem."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from raymerge.cli.messages import looking, show_problems
from raymerge.cli.options import AllAsJson, Memory, ProfileFile, RecipeFile, planned_options, read_memory
from raymerge.cli.render.reports import Account, show_accounts
from raymerge.cli.render.screen import Output, make_console, own_stdout
from raymerge.cli.render.search import search_json, show_search
from raymerge.cli.render.sweeps import SimulatedRun, SweepAccount, show_sweep
from raymerge.errors import OptionError, Problem
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.storage.addresses import check_alone, join
from raymerge.units import parse_size

if TYPE_CHECKING:
    from raymerge.api import PlannedSearch, RecipesLike
    from raymerge.merge_plan.memory import Projection
    from raymerge.merge_plan.plan import Plan
    from raymerge.options import RunOptions
    from raymerge.planner.explain import Explanation
    from raymerge.planner.merges import PlannedMerge
    from raymerge.planner.simulation import Cluster

_SIMULATE_HELP = (
    "Predict the run on a cluster, like --simulate workers=64 storage=2GB/s; also read=, write=, "
    "per_worker=, compute=, threads=, cores=, per_core=, lanes=, memory=, overhead=, driver=, startup=."
)
_OUT_HELP = "Where it would be submitted to, to see which merges are made there; RECIPE-merged by default."
_STEPS_HELP = "Where what stages and merges for others make on the way would be; by default beside OUT."


def _checked(simulate: list[str] | None) -> list[str] | None:
    if problem := next(filter(None, map(_misplaced, simulate or ())), None):
        show_problems(make_console(sys.stderr), [problem])
        raise typer.Exit(2)
    return simulate


@looking
def plan(
    recipe: RecipeFile,
    # An option takes one value, so what follows it comes as further arguments.
    pairs: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", hidden=True)] = None,
    *,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="OUT", help=_OUT_HELP)] = None,
    memory: Memory = None,
    profile: ProfileFile = None,
    steps: Annotated[str | None, typer.Option("--steps", metavar="DIR", help=_STEPS_HELP)] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, one line each.")] = False,
    simulate: Annotated[
        list[str] | None,
        typer.Option("--simulate", metavar="KEY=VALUE ...", help=_SIMULATE_HELP, callback=_checked),
    ] = None,
    as_json: AllAsJson = False,
) -> int:
    """Show what a merge would do, and every problem; writes nothing. Several merges are shown in order."""
    options, named = planned_options(profile, read_memory(memory), steps)
    cluster = _cluster(recipe, simulate or (), pairs or ())
    with own_stdout(as_json=as_json) as out:
        place = output or named or default_output(recipe)
        check_alone(place)
        if is_search(recipe):
            return _plan_search(recipe, place, options, out, cluster=cluster, tensors=tensors)
        if is_sweep(recipe):
            return _plan_sweep(recipe, place, options, out, cluster=cluster, tensors=tensors)
        accounts = explain_all(recipe, place, options, title=recipe)
        if cluster is not None:
            accounts = _simulated(accounts, cluster)
    problems = list(dict.fromkeys(problem for each in accounts for problem in each.explanation.problems))
    if as_json:
        reports = [{"recipe": recipe, **account.to_json(tensors=tensors)} for account in accounts]
        out.json(reports if len(reports) > 1 else reports[0])
    else:
        show_accounts(out.console, accounts, tensors=tensors)
        show_problems(make_console(sys.stderr), problems)
    return 2 if problems else 0


def _plan_sweep(
    recipe: str, place: str, options: RunOptions, out: Output, *, cluster: Cluster | None, tensors: bool
) -> int:
    account = explain_sweep(recipe, place, options, title=recipe)
    if cluster is not None and not account.problems:
        account = replace(account, runs=_simulated_sweep(account, cluster))
    if out.as_json:
        out.json({"recipe": recipe, **account.to_json(tensors=tensors)})
    else:
        show_sweep(out.console, account, tensors=tensors)
        show_problems(make_console(sys.stderr), account.problems)
    return 2 if account.problems else 0


def _plan_search(
    recipe: str, place: str, options: RunOptions, out: Output, *, cluster: Cluster | None, tensors: bool
) -> int:
    """What is searched for, and one candidate."""
    planned, accounts = explain_search(recipe, place, options)
    if cluster is not None:
        accounts = _simulated(accounts, cluster)
    problems = list(dict.fromkeys(problem for each in accounts for problem in each.explanation.problems))
    if out.as_json:
        out.json({"recipe": recipe, **search_json(planned), **accounts[-1].to_json(tensors=tensors)})
    else:
        show_search(out.console, recipe, planned)
        show_accounts(out.console, accounts, tensors=tensors)
        show_problems(make_console(sys.stderr), problems)
    return 2 if problems else 0


def _cluster(recipe: str, simulate: Sequence[str], pairs: Sequence[str]) -> Cluster | None:
    if not Path(recipe).exists() and (problem := _taken_for_recipe(recipe, simulate, pairs)):
        raise OptionError(problem)
    if pairs and not simulate:
        what = f"'{pairs[0]}' is one argument too many: one recipe is planned."
        raise OptionError(Problem("plan", what, "Leave it out; KEY=VALUE stands behind --simulate."))
    return read_cluster([*simulate, *pairs]) if simulate else None


def _simulated(accounts: Sequence[Account], cluster: Cluster) -> tuple[Account, ...]:
    """The accounts with simulated runs of the merges to make, in order on workers that start once."""
    from raymerge.planner.simulation import simulate_plan

    selected = [not account.is_made and not account.explanation.problems for account in accounts]
    check_memory(cluster, [each.explanation.memory for each in compress(accounts, selected)])
    results = list(accounts)
    for index, account in compress(enumerate(accounts), selected):
        run = simulate_plan(account.merge.plan, cluster, account.explanation.memory.budget)
        results[index] = replace(account, simulation=run)
        cluster = replace(cluster, startup=0.0)
    return tuple(results)


def _simulated_sweep(account: SweepAccount, cluster: Cluster) -> tuple[SimulatedRun, ...]:
    """Runs of the merges before the last, and of the outputs that are not there yet, as they are read."""
    from raymerge.merge_plan.memory import lanes_of, project
    from raymerge.planner.simulation import simulate_plan
    from raymerge.runtime.driver.sweep_run import read_groups

    missing = [number for number, each in enumerate(account.accounts) if not each.is_made]
    outputs = [account.places[number] for number in missing]
    budget = max((each.explanation.memory.budget for each in account.accounts), default=0)
    lanes = cluster.lanes or lanes_of(cluster.threads)
    last = [
        replace(
            project(each.merges[-1].plan, cluster.memory or budget, lanes=lanes),
            upload=account.accounts[number].explanation.memory.upload,
        )
        for number, each in zip(missing, outputs, strict=True)
    ]
    check_memory(cluster, last)
    before = {merge.plan.digest: merge for each in outputs for merge in each.merges[:-1]}
    made: list[tuple[tuple[str, ...], list[Plan]]]
    made = [((str(merge.recipe.name),), [merge.plan]) for merge in before.values()]
    for group in read_groups(outputs, last):
        own = [outputs[number] for number in group.numbers]
        made.append((tuple(each.name for each in own), [each.merges[-1].plan for each in own]))
    runs: list[SimulatedRun] = []
    for names, (plan, *beside) in made:
        runs.append(SimulatedRun(names, simulate_plan(plan, cluster, budget, beside=beside)))
        cluster = replace(cluster, startup=0.0)
    return tuple(runs)


def default_output(recipe: str) -> str:
    return f"{Path(recipe).stem}-merged"


def explain_all(recipe: RecipesLike, output: str, options: RunOptions, *, title: str) -> tuple[Account, ...]:
    """The merges of the recipes ``title``, in the order in which they are carried out."""
    with heavy_imports():
        from raymerge.api import plan_for
        from raymerge.publish.output_place import place_of
        from raymerge.runtime.driver.chained_merges import chosen_steps, kept_steps, place_problems
        from raymerge.runtime.driver.in_process import run_options

    merges, place = plan_for(recipe, output, options), place_of(output, options)
    lacks = tuple(place_problems(place, options, merges))
    made = frozenset() if lacks else kept_steps(merges, place, options.steps)
    steps, chosen, accounts = chosen_steps(place, options, merges), run_options([merges], place, options), []
    is_here = bool(chosen.inline and not options.inline)
    for number, merge in enumerate(merges, start=1):
        is_last, which, is_made, name = merge is merges[-1], "", None, merge.recipe.name
        if len(merges) > 1:
            which = f", merge {number} of {len(merges)}{f': {name}' if name else ''}"
            is_made = name in made
        explanation = _explained(merge, chosen, place if is_last else "", lacks if is_last else ())
        own_steps = steps if is_last else ""
        accounts.append(
            Account(merge, explanation, f"{title}{which}", is_made, steps=own_steps, is_in_process=is_here)
        )
    return tuple(accounts)


def is_search(recipe: RecipesLike) -> bool:
    with heavy_imports():
        from raymerge.api import is_search

    return is_search(recipe)


def explain_search(
    recipe: str, output: str, options: RunOptions, *, evaluations: int | None = None
) -> tuple[PlannedSearch, tuple[Account, ...]]:
    """A search, and the merges of one of its candidates."""
    with heavy_imports():
        from raymerge.api import plan_search
        from raymerge.recipes.load import parse_recipes

    planned = plan_search(recipe, output, options, evaluations=evaluations)
    return planned, explain_all(parse_recipes(planned.text), output, options, title=recipe)


def is_sweep(recipe: RecipesLike) -> bool:
    with heavy_imports():
        from raymerge.api import is_sweep

    return is_sweep(recipe)


def explain_sweep(recipe: RecipesLike, output: str, options: RunOptions, *, title: str) -> SweepAccount:
    """The outputs of the sweep ``title``, how they are read, and the account of each."""
    from raymerge.api import plan_sweep
    from raymerge.merge_plan.joint import equal_tensors
    from raymerge.publish.output_place import place_of, sweep_steps
    from raymerge.recipes.sweep import joined_problems
    from raymerge.runtime.driver.chained_merges import digest_at, place_problems
    from raymerge.runtime.driver.in_process import run_options
    from raymerge.runtime.driver.sweep_run import OutputMerges, read_groups

    planned = plan_sweep(recipe, output, options)
    outputs = [
        OutputMerges(each.output.name, place_of(join(output, each.output.name), options), each.merges)
        for each in planned
    ]
    around = place_of(output, options)
    root = sweep_steps(around, options.steps)
    chosen = run_options([each.merges for each in outputs], around, options)
    accounts: list[Account] = []
    for number, each in enumerate(outputs, start=1):
        last, lacks = each.merges[-1], tuple(place_problems(each.place, options, each.merges, root))
        which = f"{title}, output {number} of {len(outputs)}: {each.name}"
        is_made = isinstance(each.place, Path) and digest_at(each.place) == last.plan.digest
        accounts.append(Account(last, _explained(last, chosen, each.place, lacks), which, is_made))
    values, every = [each.output.values for each in planned], [each.explanation for each in accounts]
    problems = joined_problems(values, [each.problems for each in every])
    return SweepAccount(
        title,
        [each.output for each in planned],
        outputs,
        accounts,
        () if problems else read_groups(outputs, [each.memory for each in every]),
        problems,
        equal_tensors([each.merges[-1].plan for each in outputs]) if not problems else (0, 0),
        is_in_process=bool(chosen.inline and not options.inline),
    )


def _explained(
    merge: PlannedMerge, options: RunOptions, place: Path | str, beside: Sequence[Problem]
) -> Explanation:
    from raymerge.planner.explain import explain
    from raymerge.planner.inputs.sources import reads_far
    from raymerge.runtime.driver.chained_merges import stage_lines

    memory, problems = _projection(merge.plan, options, place, is_far=reads_far(merge.sources))
    stages, lacks = stage_lines(merge, options)
    unique = dict.fromkeys((*problems, *lacks, *beside))
    return explain(merge.plan, merge.sources, memory, stages=stages, problems=tuple(unique))


def _projection(
    plan: Plan, options: RunOptions, place: Path | str, *, is_far: bool
) -> tuple[Projection, tuple[Problem, ...]]:
    """Peak memory under the budget, or under the least one that works together with the problem."""
    from raymerge.merge_plan.memory import SMALLEST_BUDGET, project
    from raymerge.publish.object_shards import shard_orders, upload_bytes
    from raymerge.runtime.workers.sizing import fit_budget
    from raymerge.storage.addresses import is_remote

    is_uploaded = is_remote(str(place)) and not plan.problems
    beside = upload_bytes(shard_orders(plan), options.scratch) if is_uploaded else 0
    try:
        return fit_budget(plan, options, beside=beside, is_far=is_far), ()
    except OptionError as error:
        least = project(plan, SMALLEST_BUDGET, lanes=1).least_budget
        return project(plan, least, lanes=1), error.problems


_EXAMPLE = "--simulate workers=64 storage=2GB/s"
_MOST_WORKERS = 100_000
_MOST_EACH = 1_024
"""Limits for one worker: the simulation itself takes memory for each."""
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(us|ms|s|min|h|)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}
_BITS = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([kmgt]?)(i?)b(?:its?|ps)?(?:/s)?", re.IGNORECASE)
_PREFIXES = ("", "K", "M", "G", "T")


class _Kind(NamedTuple):
    read: Callable[[str], float]
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
    with suppress(ValueError):
        if (size := text.removesuffix("/s")).endswith("B"):
            return parse_size(size)
    raise ValueError(f"{_brief(text)} is no speed")


def _in_bytes(bits: re.Match[str]) -> str:
    number, prefix, binary = bits.groups()
    step, power = (1024, "i") if binary else (1000, "")
    size, at = float(number) / 8, _PREFIXES.index(prefix.upper())
    while size < 1 and at:
        size, at = size * step, at - 1
    return f"{f'{size:.1f}'.removesuffix('.0')}{_PREFIXES[at]}{power if at else ''}B"


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


def _memory(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        # Without its remedy, which is said apart.
        raise ValueError(str(error).rpartition(";")[0]) from None


_KINDS: Mapping[str, _Kind] = {
    "workers": _count(_MOST_WORKERS),
    **dict.fromkeys(("storage", "read", "write", "per_worker", "compute"), _A_SPEED),
    **dict.fromkeys(("threads", "cores"), _EACH),
    "per_core": _A_SPEED,
    "lanes": _EACH,
    "memory": _Kind(_memory, "Write it like 4GiB."),
    **dict.fromkeys(("overhead", "driver", "startup"), _A_TIME),
}


def _misplaced(word: str) -> Problem | None:
    if "=" in word or word.strip() in ("", *_KINDS) or " " in word.strip():
        return None
    what = f"{_brief(word)} stands where KEY=VALUE is expected."
    if _is_recipe(word):
        return Problem("--simulate", what, f"Put it first: raymerge plan {shlex.quote(word)} {_EXAMPLE}")
    return Problem("--simulate", what, f"Write it like {_EXAMPLE}.")


def _is_recipe(word: str) -> bool:
    return "=" not in word and word.lower().endswith((".yml", ".yaml"))


def _taken_for_recipe(recipe: str, simulate: Sequence[str], pairs: Sequence[str]) -> Problem | None:
    key, equals, _ = recipe.partition("=")
    if not equals or not (simulate or key in _KINDS):
        return None
    others = [word for word in pairs if _is_recipe(word)]
    words = [*simulate, recipe, *(word for word in pairs if word not in others)]
    name = shlex.quote(others[0]) if len(others) == 1 else "RECIPE"
    what = f"{_brief(recipe)} stands where the recipe is expected."
    return Problem("plan", what, f"Put the recipe first: raymerge plan {name} --simulate {' '.join(words)}")


def read_cluster(words: Sequence[str]) -> Cluster:
    from raymerge.planner.simulation import Cluster

    values: dict[str, Any] = {}
    problems: list[Problem] = []
    # Where a value cannot be read another one stands in: that it lacks, or what it is, is not wrong too.
    instead: dict[str, Any] = {}
    for pair in _split(words):
        key = _key(pair, values.keys() | instead.keys())
        if isinstance(key, Problem):
            problems.append(key)
            # It may have been meant for what would be missed.
            instead.setdefault("storage", 1)
            continue
        try:
            values[key] = _KINDS[key].read(pair.partition("=")[2].strip())
        except ValueError as error:
            problems.append(Problem(f"--simulate {key}", f"{error}.", _KINDS[key].remedy))
            instead[key] = 1
    try:
        cluster = Cluster(**{**instead, **values})
    except OptionError as error:
        problems += error.problems
    if problems:
        raise OptionError(problems)
    return cluster


def check_memory(cluster: Cluster, projections: Iterable[Projection]) -> None:
    adjusted = (replace(each, budget=cluster.memory or each.budget) for each in projections)
    problems = dict.fromkeys(filter(None, (each.shortage("--simulate memory") for each in adjusted)))
    if problems:
        raise OptionError(tuple(problems))


def _split(words: Sequence[str]) -> Iterator[str]:
    """The pairs and other words; spaces around ``=`` and before a unit belong to a pair."""
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


def _key(pair: str, before: Collection[str]) -> str | Problem:
    from raymerge.documents.fields import did_you_mean

    key, equals, _ = pair.partition("=")
    if not equals:
        example = "=".join(pair.split()) if " " in pair else "workers=64"
        what = f"{_brief(pair)} is no pair of a key and a value."
        return Problem("--simulate", what, f"Write it like {example}.")
    if key not in _KINDS:
        remedy = f"{did_you_mean(key, _KINDS)} The keys are {', '.join(_KINDS)}.".strip()
        return Problem("--simulate", f"there is no key '{key}'.", remedy)
    return Problem("--simulate", f"'{key}' is given twice.", "Give it once.") if key in before else key
