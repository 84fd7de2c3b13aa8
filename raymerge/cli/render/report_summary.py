"""A report of a merge on a terminal: what the numbers say, and a small table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from raymerge.cli.render.figures import number
from raymerge.cli.render.report_page import KINDS, subtitle
from raymerge.cli.render.report_sections import make_subject, short_count
from raymerge.cli.render.screen import heading, make_table, printable, show_table
from raymerge.verifier.measurements import Report
from raymerge.verifier.observations import Observation

_STYLES = {"problem": "bold red", "note": "bold"}
_PARENTS = 4
"""Columns that a narrow terminal has room for."""


def show_report(console: Console, report: Report, observations: Sequence[Observation], place: str) -> None:
    """``place`` is where the page is; "" where none was written."""
    subject = make_subject(report)
    console.print(heading(KINDS[report.kind], note=report.name))
    console.print(subtitle(report))
    models = [*zip(subject.labels, report.parents, strict=True), ("base", report.base or "none is named")]
    show_table(console, ("", ""), models)
    for each in observations:
        console.print()
        word = Text(f"{each.severity}: ", style=_STYLES[each.severity])
        console.print(Text.assemble(word, printable(each.sentence)), soft_wrap=not console.is_terminal)
        if each.remedy:
            console.print(make_table(("", ""), [("", each.remedy)]))
    roles = subject.roles
    rows = [
        [label.role, short_count(size), *map(number, changes[:_PARENTS])]
        for label, size, changes in zip(roles.labels, roles.elements, subject.changes(roles), strict=True)
    ]
    parents = [f"parent {k + 1}" for k in range(len(subject.names))]
    titles = (subject.measure, "numbers", *parents[:_PARENTS])
    show_table(console, titles, rows, numbers=range(1, len(titles)))
    if place:
        console.print(printable(f"\nthe page: {place}"), soft_wrap=True)
