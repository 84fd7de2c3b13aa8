"""A report of a merge as one HTML page that needs neither network nor script, and as a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.text import Text

from raymerge.cli.render.figures import number as figure
from raymerge.cli.render.report_sections import SECTIONS, Subject, colour_of, make_subject, short_count
from raymerge.cli.render.screen import counted, heading, make_table, printable, show_table
from raymerge.verifier.measurements import Floats, Report
from raymerge.verifier.observations import Observation, range_text, short_names

KINDS = {
    "merge": "Report on a merge",
    "recipe": "Report on the models of a recipe",
    "diff": "Comparison of two models",
}
_AT_ONCE = 8


def report_page(report: Report, observations: Sequence[Observation], *, numbers: str) -> str:
    """The whole page; ``numbers`` is the Parquet file beside it. Every name in it is escaped."""
    template = files("raymerge.cli.render").joinpath("report_page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(_view(make_subject(report), observations, numbers))


def _view(subject: Subject, observations: Sequence[Observation], numbers: str) -> Mapping[str, Any]:
    report = subject.report
    sentences = [_sentence(each) for each in observations]
    return {
        "name": _name(report), "kind": KINDS[report.kind], "subtitle": subtitle(report),
        "models": _models(subject), "sentences": sentences[:_AT_ONCE], "more_sentences": sentences[_AT_ONCE:],
        "facts": list(_facts(subject)), "sections": [each for make in SECTIONS for each in make(subject)],
        "definitions": _DEFINITIONS, "numbers": numbers, "version": report.raymerge,
    }  # fmt: skip


def _name(report: Report) -> str:
    is_pair = report.kind == "diff" and report.base is not None
    return printable(
        " and ".join(short_names((str(report.base), *report.parents))) if is_pair else report.name
    )


def subtitle(report: Report) -> str:
    """The method, and how much was read."""
    method = f"Method {printable(report.method)}. " if report.method and report.kind != "diff" else ""
    measured = report.measurements.finite()
    if not len(report.measurements):
        return method.rstrip()
    of_what = "of what was measured" if any((report.skipped or {}).values()) else "of all tensors"
    part = measured.sampled.sum() / max(1.0, measured.elements.sum())
    if report.is_exact or part == 1:
        return f"{method}All numbers {of_what} were read."
    error = measured.grouped().standard_error
    of_norms = (
        f": norms of whole models have a standard error of {100 * error[0]:.2g}%"
        if np.isfinite(error).any()
        else ""
    )
    what = f"{method}A sample of {part:.2%} of the numbers {of_what} was read"
    return f"{what}{of_norms}, those of single tensors more."


def _models(subject: Subject) -> list[Mapping[str, str]]:
    report = subject.report
    parents = [
        {"number": number, "name": printable(name), "place": printable(place), "colour": colour_of(k)}
        for k, (number, name, place) in enumerate(
            zip(subject.numbers, subject.names, report.parents, strict=True)
        )
    ]
    place = "none is named" if report.base is None else printable(report.base)
    base = {
        "number": "A",
        "name": printable(short_names((report.base or "",))[0]),
        "place": place,
        "colour": "",
    }
    return [base, *parents] if report.kind == "diff" else [*parents, base | {"number": "B", "name": "base"}]


def _sentence(each: Observation) -> Mapping[str, str]:
    style = "usual" if each.kind == "usual" else each.severity
    word = {"usual": "Sound", "problem": "Problem", "note": "Note"}[style]
    sentence, remedy = printable(each.sentence), printable(each.remedy)
    return {"style": style, "word": word, "sentence": sentence, "remedy": remedy}


def _facts(subject: Subject) -> Iterator[tuple[str, str]]:
    """Figures and what they are."""
    measured, whole = subject.report.measurements, subject.whole
    yield short_count(float(measured.elements.sum())), f"numbers in {counted(len(measured), 'tensor')}"
    if not len(whole):
        return
    yield range_text(subject.changes(whole)[0]), f"{subject.measure}{' of parents' if subject.pairs else ''}"
    if subject.pairs:
        what = "changes" if subject.has_base else "weights"
        yield _of_pairs(subject, whole.cosines[0]), f"cosine of {what}"
    if subject.pairs and subject.has_base:
        yield _of_pairs(subject, whole.pair_conflict[0]), "weighted sign conflict of pairs"
    largest = np.sqrt(np.diagonal(whole.gram[0]).max(initial=0))
    if subject.is_merged and subject.has_base and largest > 0:
        yield (
            f"{np.sqrt(whole.merged[0]) / largest:.0%}",
            "norm of the merged change, by the largest parent's",
        )
    if np.isfinite(whole.encoding_error[0]):
        yield f"{whole.encoding_error[0]:.2%}", "error of the encoding"


def _of_pairs(subject: Subject, values: Floats) -> str:
    return range_text(values[pair] for pair in subject.pairs)


_STYLES = {"problem": "bold red", "note": "bold"}
_PARENTS = 4
"""Columns that a narrow terminal has room for."""


def show_report(console: Console, report: Report, observations: Sequence[Observation], page: Path) -> None:
    """What the numbers say and a small table, for a terminal, and where the page is."""
    subject = make_subject(report)
    console.print(heading(KINDS[report.kind], note=_name(report)))
    console.print(subtitle(report))
    models = [(f"{each['number']} {each['name']}", each["place"]) for each in _models(subject)]
    show_table(console, ("", ""), models)
    for each in observations:
        console.print()
        word = Text(f"{each.severity}: ", style=_STYLES[each.severity])
        console.print(Text.assemble(word, printable(each.sentence)), soft_wrap=not console.is_terminal)
        if each.remedy:
            console.print(make_table(("", ""), [("", each.remedy)]))
    roles = subject.roles
    rows = [
        [label.role, short_count(size), *map(figure, changes[:_PARENTS])]
        for label, size, changes in zip(roles.labels, roles.elements, subject.changes(roles), strict=True)
    ]
    titles = (subject.measure, "numbers", *(f"of {number}" for number in subject.numbers[:_PARENTS]))
    if rows:
        show_table(console, titles, rows, numbers=range(1, len(titles)))
    console.print(printable(f"\nthe page: {page}"), soft_wrap=True)


_DEFINITIONS = (
    ("Change", "d = T \u2212 B: what a parent T adds to the base B; without a base, d is T."),
    ("Relative change", "\u2016d\u2016 / \u2016B\u2016, over all numbers of what it is said of."),
    (
        "Relative distance",
        "\u2016T \u2212 U\u2016 / max(\u2016T\u2016, \u2016U\u2016) from the nearest other parent U, "
        "where there is no base.",
    ),
    ("Cosine", "\u27e8d\u2081, d\u2082\u27e9 / (\u2016d\u2081\u2016 \u2016d\u2082\u2016)."),
    (
        "Weighted sign conflict",
        "1 \u2212 \u03a3|d\u2081 + d\u2082 + \u2026| / \u03a3(|d\u2081| + |d\u2082| + \u2026), "
        "summed over the numbers. 0: all agree; 1: all cancel.",
    ),
    ("Overlap", "Jaccard index of the two fifths of the numbers that two parents changed most."),
    (
        "Share",
        "\u27e8M \u2212 B, d\u27e9 / \u2016d\u2016\u00b2 with the merged tensor M; "
        "1: all of the change is in it.",
    ),
    ("Error of the encoding", "Norm of what rounding to codes with scales changed, by the norm before it."),
)
