"""What was found about router rows, for people: whether they tell experts apart, and where they send text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from raymerge.cli.render.screen import heading, make_table

if TYPE_CHECKING:
    from raymerge.events import StageReport
    from raymerge.stages.router.report import GateReport

_LAYERS_SHOWN = 8


def show_routing(console: Console, reports: Iterable[StageReport]) -> None:
    """Print a short table for each stage that made router rows; other stages have none."""
    from raymerge.stages.router.report import KIND, GateReport

    for each in reports:
        if each.report.get("kind") == KIND:
            _show(console, each.title, GateReport.from_json(each.report))


def _show(console: Console, title: str, report: GateReport) -> None:
    console.print()
    console.print(heading(title))
    console.print(make_table(("", ""), list(_facts(report))))
    if report.routing is not None:
        rows = list(_experts(report, report.routing))
        console.print(make_table(("expert", "tokens", "chosen first for"), rows, numbers=(1, 2)))
    if report.on_own:
        console.print("* judged on the texts that its row was made from, for want of held-out ones")


def _facts(report: GateReport) -> Iterator[tuple[str, str]]:
    yield "gate mode", report.mode
    yield "layers", str(len(report.layers))
    yield "condition", _condition(report)
    if report.entropy is not None and report.lowest_entropy is not None:
        lowest = f"; in the lowest layer {report.lowest_entropy:.2f}"
        yield "load entropy", f"{report.entropy:.2f} of {report.most_entropy:.2f} bits{lowest}"
    if report.margin is not None:
        yield "margin", f"{report.margin:.3g} between the first and the second logit"
    if report.unproven:
        layers = ", ".join(map(str, report.unproven[:_LAYERS_SHOWN]))
        yield "unproven", f"half of the texts does not hold for the other half in layers {layers}: give more"


def _condition(report: GateReport) -> str:
    """The worst condition number, and the layers whose rows are hardly told apart."""
    worst = f"{report.condition:.1f}" if math.isfinite(report.condition) else "infinite"
    found = report.ill_conditioned
    if not found:
        return f"{worst} at worst, good below {report.limit:g}"
    shown = ", ".join(map(str, found[:_LAYERS_SHOWN]))
    more = f" and {len(found) - _LAYERS_SHOWN} more" if len(found) > _LAYERS_SHOWN else ""
    layers = f"layer{'s' if len(found) > 1 else ''} {shown}{more}"
    return f"{worst} at worst; above {report.limit:g}, experts are hardly told apart, in {layers}"


def _experts(report: GateReport, routing: tuple[float, ...]) -> Iterator[tuple[str, str, str]]:
    for number, (name, share) in enumerate(zip(report.experts, routing, strict=True)):
        judged = str(report.num_judged[number]) if report.num_judged else ""
        yield f"{name}{'*' if number in report.on_own else ''}", judged, f"{share:.0%}"
