"""Tables and lines for plans, simulations, duplicates, encoding errors and routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from raymerge.cli.render.screen import counted, heading, make_table, named, printable, show_table
from raymerge.errors import shortlist
from raymerge.units import format_duration, format_size

if TYPE_CHECKING:
    from raymerge.events import DuplicatesFound, EncodingErrorsFound, StageReport
    from raymerge.merge_plan.plan import Plan
    from raymerge.merge_plan.report import ConversionProof, DuplicateGroup, ErrorsAbove
    from raymerge.planner.explain import Explanation, ReadAgain, TensorLine
    from raymerge.planner.merges import PlannedMerge
    from raymerge.planner.simulation import Simulation

_PLANNED_GROUPS = 5
_FOUND_GROUPS = 2
_LAYERS_SHOWN = 8
_BUSY_SHOWN = 0.005


_IN_PROCESS = "in the process of 'submit': Ray would take longer to start than so small a merge"


@dataclass(frozen=True, slots=True)
class Account:
    merge: PlannedMerge
    explanation: Explanation
    title: str
    is_made: bool | None
    """Whether ``submit`` would use an existing result; None for a recipe of one merge."""
    simulation: Simulation | None = None
    """Its simulated run, without start-up if another merge runs before it; None where not asked for, nothing
    is to be made, or there are problems."""
    steps: str = ""
    """Directory of intermediate results, if given; on the last account alone."""
    is_in_process: bool = False
    """Whether ``submit`` would leave out Ray, because the merge is small."""

    @property
    def is_whole(self) -> bool:
        """Whether the plan is complete; one that lacks tensors or a method has no meaningful numbers."""
        return not self.merge.plan.problems

    def to_json(self, *, tensors: bool) -> dict[str, Any]:
        """JSON form, with the name of one of several merges; of an incomplete plan only the sources."""
        name = {} if self.is_made is None else {"name": self.merge.recipe.name, "is_made": self.is_made}
        if not self.is_whole:
            explained = self.explanation.to_json()
            return {**name, "sources": explained["sources"], "problems": explained["problems"]}
        report = {**name, **self.explanation.to_json(), "is_in_process": self.is_in_process}
        report |= {"steps": self.steps} if self.steps else {}
        report |= {"simulation": self.simulation.to_json()} if self.simulation is not None else {}
        if tensors:
            report["tensors"] = [line.to_json() for line in _tensor_lines(self.merge.plan)]
        return report


def show_accounts(console: Console, accounts: Sequence[Account], *, tensors: bool = False) -> None:
    for number, account in enumerate(accounts):
        if number:
            console.print()
        _show_account(console, account)
        if tensors and account.is_whole:
            _show_tensors(console, account.merge.plan)
    if accounts[-1].steps:
        console.print(printable(f"\nwhat is made on the way lies in {accounts[-1].steps}"), soft_wrap=True)
    to_make = [account for account in accounts if not account.is_made]
    runs = [account.simulation for account in to_make if account.simulation is not None]
    if len(accounts) > 1 and runs and len(runs) == len(to_make):
        stages = sum(len(account.explanation.stages) for account in to_make)
        show_total(console, runs, num_kept=len(accounts) - len(to_make), stages=stages)


def _show_account(console: Console, account: Account) -> None:
    explanation = account.explanation
    console.print(heading(f"Plan of {account.title}", note=explanation.digest if account.is_whole else ""))
    if account.is_made:
        console.print("made already: 'submit' takes the result that is there")
    if account.is_whole:
        here = [("runs", _IN_PROCESS)] if account.is_in_process else []
        show_table(console, ("", ""), [*_plan_facts(explanation), *here])
    _show_sources(console, explanation)
    if account.is_whole:
        _show_stages(console, explanation)
        _show_dispositions(console, explanation)
        _show_left_out(console, explanation)
        rows = [(each.key, _value(each.before), _value(each.after)) for each in explanation.config_changes]
        if rows:
            show_table(console, ("config.json", "was", "becomes"), rows)
        if account.simulation is not None:
            show_simulation(console, account.simulation, stages=len(explanation.stages))
        if explanation.notes:
            console.print()
            console.print(heading("Notes"))
        for note in explanation.notes:
            console.print(make_table(("", ""), [("-", note)]))
    if explanation.problems:
        problems = counted(len(explanation.problems), "problem")
        console.print(f"\n{problems} in the way; nothing can be merged before.\n", style="bold red")


def _plan_facts(explanation: Explanation) -> Iterator[tuple[str, str]]:
    output, memory = explanation.output, explanation.memory
    shards = counted(len(output.shards), "shard")
    dtypes = f", {', '.join(output.dtypes)}" if output.dtypes else ""
    yield "method", explanation.method
    yield "output", f"{counted(output.tensors, 'tensor')}, {format_size(output.nbytes)} in {shards}{dtypes}"
    if output.parts:
        yield "parts", "\n".join(f"{each.name}  {format_size(each.nbytes)}" for each in output.parts)
    yield "reads", "\n".join([format_size(explanation.read_bytes), *map(_again, explanation.again)])
    yield "writes", format_size(explanation.written_bytes)
    yield "segments", str(explanation.segments)
    yield "duplicates", _duplicates(explanation)
    yield "head", explanation.tie
    peak = f"{format_size(memory.peak)} of {format_size(memory.budget)} for {in_hand(memory.lanes)}"
    least = f"the least that works is {format_size(memory.least_budget)}"
    yield "memory", f"{peak}, set by {memory.tensor}; {least}"


def _again(again: ReadAgain) -> str:
    count = "1 tensor does" if again.tensors == 1 else f"{again.tensors} tensors do"
    often = "" if again.times == 1 else f" {again.times} times"
    return (
        f"and {format_size(again.nbytes)} again{often}: {again.method} looks at whole tensors first, "
        f"and {count} not fit the memory: {named((again.example,), again.tensors)}"
    )


def _duplicates(explanation: Explanation) -> str:
    duplicates = explanation.duplicates
    if not duplicates.tensors:
        return "none"
    size = _sized(duplicates.tensors, duplicates.nbytes)
    shared = "; they may share storage" if duplicates.policy == "share" else ""
    lines = _group_lines(duplicates.groups, shown=_PLANNED_GROUPS)
    return "\n".join([f"{size} equal others, made once and written to each place{shared}:", *lines])


def _show_sources(console: Console, explanation: Explanation) -> None:
    rows = [
        (
            str(index), source.name, str(source.tensors), format_size(source.nbytes),
            ", ".join(source.dtypes), "config" if source.gives_config else "",
        )
        for index, source in enumerate(explanation.sources)
    ]  # fmt: skip
    show_table(console, ("", "source", "tensors", "bytes", "dtypes", "gives"), rows, numbers=(0, 2, 3))


def _show_stages(console: Console, explanation: Explanation) -> None:
    rows = [
        (
            line.title, _known(line.units, str), _known(line.read_bytes), _known(line.least_memory),
            _known(line.disk_bytes),
        )
        for line in explanation.stages
    ]  # fmt: skip
    if rows:
        titles = ("stage before", "units", "reads", "least memory", "disk")
        show_table(console, titles, rows, numbers=(1, 2, 3, 4))


def _known(number: int | None, shown: Callable[[int], str] = format_size) -> str:
    return "?" if number is None else shown(number)


def _show_dispositions(console: Console, explanation: Explanation) -> None:
    rows = [
        (str(line.source), line.disposition, line.rule, str(line.tensors), format_size(line.nbytes))
        for line in explanation.dispositions
    ]
    show_table(console, ("source", "disposition", "rule", "tensors", "bytes"), rows, numbers=(0, 3, 4))
    for line in explanation.dispositions:
        if line.examples:
            names = named(line.examples, line.tensors)
            console.print()
            console.print(Text(printable(f"dropped from {line.source} by {line.rule}: {names}")))


def _show_left_out(console: Console, explanation: Explanation) -> None:
    rows = [
        (
            str(line.source), line.rule or "none: refused", line.reason, str(line.files),
            format_size(line.nbytes), named(line.examples, line.files),
        )
        for line in explanation.left_out
    ]  # fmt: skip
    if rows:
        titles = ("source", "left out by rule", "which is about", "files", "bytes", "such as")
        show_table(console, titles, rows, numbers=(0, 3, 4))


def _value(text: str | None) -> str:
    return "absent" if text is None else text if len(text) <= 40 else f"{text[:37]}..."


def _tensor_lines(plan: Plan) -> tuple[TensorLine, ...]:
    from raymerge.planner.explain import tensor_lines

    return tuple(tensor_lines(plan))


def _show_tensors(console: Console, plan: Plan) -> None:
    console.print()
    for line in _tensor_lines(plan):
        shape = "x".join(map(str, line.shape)) or "scalar"
        origins = f" from {','.join(map(str, line.sources))}" if line.sources else ""
        how = f"{line.disposition}{origins}  {'; '.join(line.expressions)}"
        text = f"{line.name}  {line.dtype}  {shape}  {line.shard}  {how}"
        console.print(printable(text), soft_wrap=True)


def show_simulation(console: Console, simulation: Simulation, *, stages: int = 0, what: str = "") -> None:
    """``what`` is made, where that is not all."""
    console.print()
    where = f"Simulated on {counted(simulation.cluster.workers, 'worker')}"
    console.print(heading(f"{where}: {what}" if what else where))
    console.print(make_table(("", ""), [*_simulated_facts(simulation), *_not_simulated(stages)]))
    rows = [(name, f"{share:.0%}") for name, share in simulation.busy.items() if share >= _BUSY_SHOWN]
    show_table(console, ("busy", "of the run"), rows, numbers=(1,))


def show_total(
    console: Console, simulations: Sequence[Simulation], *, num_kept: int, stages: int, what: str = "merges"
) -> None:
    parts = {
        "start-up": sum(each.startup_seconds for each in simulations),
        "runs": sum(each.run_seconds for each in simulations),
        "finishing": sum(each.finishing_seconds for each in simulations),
    }
    listed = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
    made = f"{len(simulations)} to make{f', {num_kept} made already' if num_kept else ''}"
    rows = [(what, made), ("time", f"{format_duration(sum(parts.values()))}: {listed}")]
    console.print()
    console.print(heading(f"Simulated, all {what} together"))
    console.print(make_table(("", ""), [*rows, *_not_simulated(stages)]))


def _not_simulated(stages: int) -> Iterator[tuple[str, str]]:
    if stages:
        yield "left out", f"{counted(stages, 'stage')} before the merge; stages are not simulated"


def in_hand(lanes: int) -> str:
    """``3 segments side by side``: what shares a worker's memory."""
    return f"{lanes} segments side by side" if lanes > 1 else "1 segment at a time"


def _simulated_facts(simulation: Simulation) -> Iterator[tuple[str, str]]:
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


def _sized(tensors: int, nbytes: int) -> str:
    return f"{counted(tensors, 'tensor')} ({format_size(nbytes)})"


def _group_lines(groups: Sequence[DuplicateGroup], *, shown: int) -> Iterator[str]:
    for group in groups[:shown]:
        yield f"{group.pattern}: {counted(group.tensors, 'tensor')}, {format_size(group.nbytes)}"
    hidden = len(groups) - shown
    if hidden > 0:
        yield f"and {counted(hidden, 'group')} more"


def duplicate_lines(event: DuplicatesFound) -> Iterator[str]:
    if event.tensors:
        size = _sized(event.tensors, event.nbytes)
        yield f"duplicates: {size} equal others, made once and written to each place{_shared(event)}"
        for line in _group_lines(event.groups, shown=_FOUND_GROUPS):
            yield f"  {line}"
    if event.unforeseen:
        tensors = sum(group.tensors for group in event.unforeseen)
        size = _sized(tensors, sum(group.nbytes for group in event.unforeseen))
        yield f"duplicates: {size} turned out equal to others, which the plan could not know"
        for line in _group_lines(event.unforeseen, shown=_FOUND_GROUPS):
            yield f"  {line}"


def _shared(event: DuplicatesFound) -> str:
    if event.shared_bytes is None:
        return ""
    if not event.shared_bytes:
        return "; the file system cannot have them share storage"
    return f"; {format_size(event.shared_bytes)} share storage"


def encoding_lines(event: EncodingErrorsFound) -> Iterator[str]:
    tensors = sum(line.tensors for line in event.roles)
    yield f"encoded: {counted(tensors, 'tensor')} as codes with scales; relative error that this added:"
    for line in event.roles:
        most = f"at most {line.worst.relative_error:g} in {line.worst.name}"
        yield f"  {line.role}: {line.relative_error:g} in {counted(line.tensors, 'tensor')}, {most}"
    if event.proof is not None:
        yield f"  {_proof_line(event.proof)}"


def _proof_line(proof: ConversionProof) -> str:
    blocks, tensors = counted(proof.blocks, "block"), counted(proof.tensors, "tensor")
    if proof.worst is None:
        return f"exact: {blocks} of {tensors} hold just the numbers that they were made of"
    worst, lost = proof.worst, counted(proof.worst.inexact_blocks, "block")
    return (
        f"not exact: {proof.inexact_blocks} of {blocks}, in {proof.inexact_tensors} of {tensors}; the "
        f"largest error is {worst.largest_error:g}, in {worst.name} ({lost})"
    )


def encoding_warning(errors: ErrorsAbove) -> str:
    worst, counts = errors.worst, counted(errors.tensors, "tensor")
    return (
        f"warning: encoding changed {counts} by more than {errors.limit:g} (warn_encoding_error), "
        f"{worst.name} most of all, by {worst.relative_error:g}; "
        f"'{{role: {worst.role}, value: bf16}}' as the first line of out_format keeps that role in bfloat16"
    )


def has_router(report: StageReport) -> bool:
    from raymerge.stages.router.results import KIND

    return report.report.get("kind") == KIND


def show_routing(console: Console, reports: Iterable[StageReport]) -> None:
    """Print a short table for each stage that made or repaired routers, rows of tokens or what matrices are
    fitted with; other stages have none."""
    from raymerge.planner.router_repair import KIND as REPAIR
    from raymerge.stages.transplant import KIND as ROWS

    for each in reports:
        if has_router(each):
            _show_router(console, each.title, each.report)
        elif each.report.get("kind") == REPAIR:
            _show_repair(console, each.title, each.report)
        elif each.report.get("kind") == ROWS:
            console.print()
            console.print(heading(each.title))
            console.print(make_table(("", ""), _row_facts(each.report)))
        elif each.report.get("kind") == "regmean":
            console.print()
            console.print(heading(each.title))
            console.print(make_table(("", ""), _fit_facts(each.report)))
        elif each.report.get("statistics") == "experts":
            console.print()
            console.print(heading(each.title))
            show_dropping(console, each.report)


_SHARES = (1 / 8, 1 / 4, 1 / 2)
# Of the experts of a layer, for which it is told what dropping them would mean.


def show_dropping(console: Console, report: Mapping[str, Any]) -> None:
    """Print for each layer what dropping the lowest experts would take from the texts."""
    layers, groups = report["layers"], report["num_groups"]
    count = len(layers[0]["shares"]) - 1
    possible = dict.fromkeys(max(groups, round(count * share / groups) * groups) for share in _SHARES)
    numbers = [number for number in possible if number < count]
    titles = ("layer", "never chosen", f"under {report['few_below']} tokens", *(f"drop {n}" for n in numbers))
    rows = [
        (
            str(each["layer"]),
            str(each["never"]),
            str(each["few"]),
            *(f"{each['shares'][n]:.1%}, {each['lost'][n]}" for n in numbers),
        )
        for each in layers
    ]
    show_table(console, titles, rows, numbers=range(1, len(titles)))
    tokens = sum(text["tokens"] for text in report["texts"])
    console.print(
        f"drop N: the share of the router's weight that the N lowest of {counted(count, 'expert')} carry, "
        f"and how many of {counted(tokens, 'token')} lose all of their experts",
        soft_wrap=True,
    )


def _fit_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for model in report["models"]:
        tokens = sum(text["tokens"] for text in model["texts"])
        yield (
            model["model"],
            model["made_at"] or f"{counted(tokens, 'token')} of {counted(len(model['texts']), 'text')}",
        )
    yield "matrices", f"{report['matrices']}, of {report['inputs']} inputs"
    if report["few"]:
        layers = report["few_layers"]
        where = f"layer{'s' if len(layers) > 1 else ''} {shortlist(layers, _LAYERS_SHOWN)}"
        reached = f"{report['few_matrices']} of the matrices, in {where}, such as {report['few'][0]}"
        yield "few tokens", f"fewer than {report['few_below']} of some model reach {reached}"


def _row_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "shared tokens", str(report["shared"])
    for name, left in report["left"].items():
        if left is not None:
            yield name, f"what is combined misses the donor's rows by {left:.0%} of their length"


def _show_repair(console: Console, title: str, report: Mapping[str, Any]) -> None:
    """How many of the experts that a source's router chooses, on its own texts, the merge's chooses too."""
    layers, names = report["layers"], [domain["model"] for domain in report["domains"]]
    console.print()
    console.print(heading(title))
    head = ("experts in common with", "as merged", "repaired")
    means = [
        [sum(each[when][n] for each in layers) / len(layers) for when in _TIMES] for n in range(len(names))
    ]
    rows = [(name, *map("{:.1%}".format, own)) for name, own in zip(names, means, strict=True)]
    console.print(make_table(head, rows, numbers=(1, 2)))
    console.print(make_table(("layer", *head[1:], "iterations"), _repaired(layers), numbers=(0, 1, 2, 3)))
    if left := [each for each in layers if not each["is_converged"]]:
        worst = max(each["residual"] for each in left)
        places = shortlist([each["layer"] for each in left], _LAYERS_SHOWN)
        console.print(f"warning: not solved to the end in layers {places}; residual {worst:.1e} at most")


_TIMES = ("before", "after")


def _repaired(layers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for each in layers:
        shares = [f"{sum(each[when]) / len(each[when]):.1%}" for when in _TIMES]
        yield str(each["layer"]), *shares, str(each["iterations"])


def _show_router(console: Console, title: str, report: Mapping[str, Any]) -> None:
    console.print()
    console.print(heading(title))
    console.print(make_table(("", ""), _router_facts(report)))
    if report["summary"]["routing"] is not None:
        console.print(make_table(("expert", "tokens", "chosen first for"), _experts(report), numbers=(1, 2)))
    if report["on_own"]:
        console.print("* judged on the texts that its row was made from, for want of held-out ones")


def _router_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    summary = report["summary"]
    yield "gate mode", report["mode"]
    yield "layers", str(len(report["layers"]))
    yield "condition", _condition(summary)
    if summary["entropy"] is not None:
        lowest = f"; in the lowest layer {summary['lowest_entropy']:.2f}"
        yield "load entropy", f"{summary['entropy']:.2f} of {summary['most_entropy']:.2f} bits{lowest}"
    if summary["margin"] is not None:
        yield "margin", f"{summary['margin']:.3g} between the first and the second logit"
    if summary["unproven"]:
        layers = ", ".join(map(str, summary["unproven"][:_LAYERS_SHOWN]))
        yield "unproven", f"half of the texts does not hold for the other half in layers {layers}: give more"


def _condition(summary: Mapping[str, Any]) -> str:
    worst = "infinite" if summary["condition"] is None else f"{summary['condition']:.1f}"
    layers, limit = summary["ill_conditioned"], summary["limit"]
    if not layers:
        return f"{worst} at worst, good below {limit:g}"
    where = f"layer{'s' if len(layers) > 1 else ''} {shortlist(layers, _LAYERS_SHOWN)}"
    return f"{worst} at worst; above {limit:g}, experts are hardly told apart, in {where}"


def _experts(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for number, (name, share) in enumerate(zip(report["experts"], report["summary"]["routing"], strict=True)):
        judged = str(report["num_judged"][number]) if report["num_judged"] else ""
        yield f"{name}{'*' if number in report['on_own'] else ''}", judged, f"{share:.0%}"
