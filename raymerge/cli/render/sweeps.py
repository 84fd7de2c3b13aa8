"""The plan of a sweep: its outputs, how many reads make them, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from raymerge.cli.render.reports import Account, show_accounts, show_simulation, show_total
from raymerge.cli.render.screen import counted, heading, show_table
from raymerge.errors import shortlist
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.errors import Problem
    from raymerge.merge_plan.plan import Plan
    from raymerge.planner.simulation import Simulation
    from raymerge.recipes.sweep import SweepOutput
    from raymerge.runtime.driver.sweep_run import OutputMerges, ReadGroup

_OUTPUTS_SHOWN = 5


class SimulatedRun(NamedTuple):
    made: tuple[str, ...]
    """A result between, or the outputs of one read."""
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class SweepAccount:
    title: str
    outputs: Sequence[SweepOutput]
    places: Sequence[OutputMerges]
    accounts: Sequence[Account]
    """Of each output's last merge."""
    groups: Sequence[ReadGroup]
    """Empty with problems."""
    problems: Sequence[Problem]
    equal: tuple[int, int]
    """Tensors that are known to be the same in all outputs, and their bytes."""
    is_in_process: bool
    runs: Sequence[SimulatedRun] = ()
    """Simulated runs of what is to be made, in order; none where not asked for."""

    def names(self, group: ReadGroup) -> tuple[str, ...]:
        return tuple(self.outputs[number].name for number in group.numbers)

    def read_bytes(self, group: ReadGroup) -> int:
        return _read_bytes(self._plans(group))

    def own_bytes(self, group: ReadGroup) -> int:
        """Bytes beside what the output reads that reads most: other models, and codes that share a scale."""
        return self.read_bytes(group) - max(_read_bytes([plan]) for plan in self._plans(group))

    def _plans(self, group: ReadGroup) -> list[Plan]:
        return [self.places[number].merges[-1].plan for number in group.numbers]

    @property
    def before(self) -> Mapping[tuple[str, str], Sequence[str]]:
        """The outputs that each result between is made for, by its title and its digest."""
        made: dict[tuple[str, str], list[str]] = {}
        for each in self.places:
            results = [(str(merge.recipe.name), merge.plan.digest) for merge in each.merges[:-1]]
            results += [(stage.title, stage.digest) for merge in each.merges for stage in merge.stages]
            for result in results:
                made.setdefault(result, []).append(each.name)
        return made

    @property
    def written_bytes(self) -> int:
        return sum(account.explanation.written_bytes for account in self.accounts)

    def to_json(self, *, tensors: bool) -> dict[str, Any]:
        outputs = [
            {**account.to_json(tensors=tensors), **_named(output)}
            for output, account in zip(self.outputs, self.accounts, strict=True)
        ]
        reads = [
            {
                "outputs": list(self.names(group)),
                "read_bytes": self.read_bytes(group),
                "why_apart": group.why_apart,
            }
            for group in self.groups
        ]
        whole: dict[str, Any] = {
            "read_bytes": sum(map(self.read_bytes, self.groups)),
            "written_bytes": self.written_bytes,
        }
        before = [
            {"title": title, "digest": digest, "outputs": names}
            for (title, digest), names in self.before.items()
        ]
        equal = dict(zip(("tensors", "nbytes"), self.equal, strict=True))
        if self.runs:
            whole["simulations"] = [{"made": list(made), **run.to_json()} for made, run in self.runs]
        return {"outputs": outputs, "before": before, "reads": reads, "equal": equal, **whole}


def _read_bytes(plans: Sequence[Plan]) -> int:
    # Plans are there, and what reads them is loaded.
    from raymerge.merge_plan.joint import joint_read_bytes

    return int(joint_read_bytes(plans).sum())


def _named(output: SweepOutput) -> dict[str, Any]:
    return {
        "name": output.name,
        "values": dict(output.values),
        "coefficients": dict(output.coefficients),
        "recipe_text": output.text,
        "unfinished": {each.place: each.reason for each in output.checkpoints.unfinished},
        "missing": [_iterations(each) for each in output.checkpoints.missing],
    }


def _iterations(missing: range) -> dict[str, int]:
    return {"from": missing[0], "to": missing[-1], "every": missing.step}


def show_sweep(console: Console, account: SweepAccount, *, tensors: bool = False) -> None:
    """Print the outputs and the reads, and the account of the first output, which those of the others are
    like."""
    console.print(heading(f"Plan of {account.title}: {counted(len(account.outputs), 'output')}"))
    rows = [
        (output.name, *output.values.values(), own.explanation.digest if own.is_whole else "", _made(own))
        for output, own in zip(account.outputs, account.accounts, strict=True)
    ]
    show_table(console, ("output", *account.outputs[0].values, "digest", ""), rows)
    _show_coefficients(console, account.outputs)
    _show_gaps(console, account.outputs)
    if account.groups:
        show_table(console, ("", ""), _facts(account))
    _show_simulated(console, account)
    console.print()
    wrong = (own for own in account.accounts if own.explanation.problems)
    show_accounts(console, [next(wrong, account.accounts[0])], tensors=tensors)


def _show_simulated(console: Console, account: SweepAccount) -> None:
    for made, run in account.runs:
        show_simulation(console, run, what=shortlist(made, _OUTPUTS_SHOWN))
    if account.runs:
        runs = [run for _, run in account.runs]
        names = {name for made, _ in account.runs for name in made}
        kept = sum(output.name not in names for output in account.outputs)
        stages = {stage.digest for each in account.places for own in each.merges for stage in own.stages}
        show_total(console, runs, num_kept=kept, stages=len(stages), what="runs")


def _show_coefficients(console: Console, outputs: Sequence[SweepOutput]) -> None:
    longest = sorted(outputs, key=lambda output: -len(output.coefficients))
    places = dict.fromkeys(place for output in longest for place in output.coefficients)
    shown = outputs[:_OUTPUTS_SHOWN]
    rows = [(place, *(_coefficient(output, place) for output in shown)) for place in places]
    if rows:
        titles = ("checkpoint", *(output.name for output in shown))
        show_table(console, titles, rows, numbers=range(1, len(titles)))


def _coefficient(output: SweepOutput, place: str) -> str:
    return f"{output.coefficients[place]:.4g}" if place in output.coefficients else ""


def _show_gaps(console: Console, outputs: Sequence[SweepOutput]) -> None:
    widest = max((output.checkpoints for output in outputs), key=lambda each: len(each.places))
    passed = [f"{each.place}: {each.reason}" for each in widest.unfinished]
    rows = [("passed over, as unfinished", "\n".join(passed))] if passed else []
    if widest.missing:
        missing = "\n".join(map(_shown_iterations, widest.missing))
        rows.append(("missing, as 'every' expects", missing))
    if rows:
        show_table(console, ("", ""), rows)


def _shown_iterations(missing: range) -> str:
    first, last = f"{missing[0]:,}", f"{missing[-1]:,}"
    return f"iteration {first}" if len(missing) == 1 else f"{len(missing):,} iterations, {first} to {last}"


def _made(account: Account) -> str:
    return "there already" if account.is_made else ""


def _facts(account: SweepAccount) -> Iterator[tuple[str, str]]:
    groups = account.groups
    total = sum(map(account.read_bytes, groups))
    together = [len(group.numbers) for group in groups if not group.why_apart]
    how = [f"{' + '.join(map(str, together))} outputs at a time"] if sum(together) > 1 else []
    apart: dict[str, list[str]] = {}
    for group in groups:
        if group.why_apart:
            apart.setdefault(group.why_apart, []).append(account.names(group)[0])
    how += [f"{shortlist(names, _OUTPUTS_SHOWN)} apart: {why}" for why, names in apart.items()]
    if own := sum(map(account.own_bytes, groups)):
        how.append(f"{format_size(own)} of it for some of the outputs alone")
    users: dict[str, list[int]] = {}
    for (title, _), names in account.before.items():
        users.setdefault(title, []).append(len(names))
    if users:
        made = (f"{title}: {len(each)} for {counted(sum(each), 'output')}" for title, each in users.items())
        yield "before", "\n".join(made)
    yield "reads", "\n".join([f"{counted(len(groups), 'read')} of the models, {format_size(total)}", *how])
    yield "writes", format_size(account.written_bytes)
    tensors, nbytes = account.equal
    if tensors and len(account.outputs) > 1:
        yield "the same", f"{counted(tensors, 'tensor')}, {format_size(nbytes)}, in all outputs"
    if account.is_in_process:
        yield "runs", "in the process of 'submit': Ray would take longer to start than so small a sweep"
