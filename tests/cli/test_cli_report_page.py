"""The page of a report: what its first screen says, what names cannot do to it, its size, how it opens."""

from __future__ import annotations

import re
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from kits.browser import find_browser, open_page, picture
from kits.measured_arrays import measure, router_rows
from kits.measured_reports import (
    BASE,
    EXPERTS,
    FIRST,
    SECOND,
    Shape,
    changed,
    make_report,
    permuted,
    swapped,
    synthetic_report,
    usual,
)
from kits.tiny_parents import Model, dense, mean, tuned

from raymerge.cli.render.report_page import report_page, show_report
from raymerge.cli.render.screen import make_console
from raymerge.verifier.measurements import Report
from raymerge.verifier.observations import observations

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}&lt;\u202e\x1b[31m"
SCRIPT_LIKE = re.compile(
    r"(?i)<\s*(script|iframe|object|embed|link(?! rel=\"icon\" href=\"data:)|base)\b|\son\w+=|https?:"
)


class Outline(HTMLParser):
    """The text, the elements that are open at the end, and the labels of the figures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.open, self.labels, self.tags = "", list[str](), list[str](), set[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        if values.get("role") == "img":
            self.labels.append(values.get("aria-label") or "")
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open and self.open[-1] == "style" else data


def make_page(report: Report) -> str:
    return report_page(report, observations(report), numbers="report.parquet")


def first_screen(page: str) -> str:
    return Outline(page[page.index("<header>") : page.index("</header>") + len("</header>")]).text


def _noise(value: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(value.shape) * 0.02


@pytest.fixture(scope="module")
def mixture_report() -> Report:
    """With routers, whose rows say that experts of the second model are in another order."""
    first, second = tuned(EXPERTS, 1), permuted(tuned(EXPERTS, 2))
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(4)]
    models = {0: first, 1: second, -1: EXPERTS}
    rows = tuple(each for layer, name in enumerate(names) for each in router_rows(name, layer, models))
    return make_report(first, second, base=EXPERTS, merged=mean(first, second), routers=rows)


FAULTS = {
    "Layers 3 and 9 of parent 2 (two) are swapped": lambda: make_report(FIRST, swapped(SECOND, {3: 9})),
    "Parent 2 (two) does not come from the base": lambda: make_report(FIRST, dense(7)),
    "Layer 7 of parent 1 (one) is far off": lambda: make_report(changed(FIRST, "layers.7.", _noise), SECOND),
    "3 tensors of parent 2 (two) are all zeros": lambda: make_report(
        FIRST, changed(SECOND, "layers.7.mlp", np.zeros_like)
    ),
    "Parent 2 (two) is the base": lambda: make_report(FIRST, BASE),
    "Parent 1 (one) and parent 2 (two) are equal": lambda: make_report(FIRST, FIRST),
    "Nothing unusual": usual,
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("sentence", FAULTS)
def test_the_first_screen_names_a_planted_fault(sentence: str) -> None:
    assert sentence in first_screen(make_page(FAULTS[sentence]()))


def test_the_first_screen_names_experts_in_another_order(mixture_report: Report) -> None:
    text = first_screen(make_page(mixture_report))
    assert "The experts of parent 2 (two) are in another order than those of the base" in text
    assert "align: experts" in text


def test_the_first_screen_says_what_was_merged_and_how_much_was_read() -> None:
    text = first_screen(make_page(synthetic_report(Shape(4, parents=3))))
    named = ("org/coder-instruct", "people/roleplay", "org/foundation-7b")
    for part in ("merged", "Method ties", "A sample of 1.56% of the numbers of what was measured", *named):
        assert part in text
    assert "All numbers of all tensors were read" in first_screen(make_page(usual()))


def test_what_was_not_measured_is_said_on_the_first_screen_and_in_a_terminal() -> None:
    report = replace(usual(), skipped={"it cannot be read": 7})
    text, stream = first_screen(make_page(report)), StringIO()
    show_report(make_console(stream), report, observations(report), Path("report.html"))
    for shown in (text, " ".join(stream.getvalue().split())):
        assert "7 parts of tensors were not measured" in shown
        assert "All numbers of what was measured were read" in shown
    assert "Sound" not in text


def test_a_page_is_whole_html_that_needs_nothing_else(mixture_report: Report) -> None:
    page = make_page(mixture_report)
    outline = Outline(page)
    assert outline.open == []
    assert SCRIPT_LIKE.search(page) is None
    assert "@import" not in page
    assert "url(" not in page


def test_every_figure_says_its_main_fact_in_words(mixture_report: Report) -> None:
    labels = Outline(make_page(mixture_report)).labels
    assert len(labels) > 8
    assert [each for each in labels if not re.search(r"From .+ to |Colours: ", each)] == []
    assert any(
        re.search(r"One scale|Relative change of the matrices.*From 0.0\d+ \(layer \d, 1 one\)", each)
        for each in labels
    )


def test_a_page_shows_the_numbers_that_were_measured() -> None:
    report = make_report(FIRST, SECOND, merged=mean(FIRST, SECOND))
    page = make_page(report)
    weights = (
        measure([FIRST, SECOND], BASE, mean(FIRST, SECOND))
        .matching(lambda each: each.role != "norm")
        .grouped()
    )
    assert f"{weights.pair_conflict[0, 0, 1]:.3f}" in page
    assert f"{weights.cosines[0, 0, 1]:.3f}" in page
    by_layer = report.measurements.grouped("layer", "role")
    change = next(
        float(row[0])
        for label, row in zip(by_layer.labels, by_layer.relative_change, strict=True)
        if (label.layer, label.role) == (5, "mlp")
    )
    assert f"<title>layer 5, mlp: {change:.3g}</title>" in page


def test_an_expert_that_differs_is_seen_though_columns_stand_for_several() -> None:
    report = synthetic_report(Shape(2, experts=1600, parents=1))
    labels = report.measurements.labels
    for row in (i for i, each in enumerate(labels) if (each.layer, each.expert) == (1, 1234)):
        report.measurements.gram[row] *= 1000**2
    assert re.search(r"<title>layer 1: largest [5-9]\.\d+ near expert 123\d, median 0\.00", make_page(report))


def test_hostile_names_become_text_and_nothing_else() -> None:
    part = f"model.layers.0.{HOSTILE}.weight"
    models = [{part: value, **each} for each in (FIRST, SECOND) for value in [np.full((4, 4), 0.1)]]
    base = BASE | {part: np.full((4, 4), 0.2)}
    report = Report(
        name=HOSTILE, kind="merge", method=HOSTILE, parents=(HOSTILE, f"b/{HOSTILE}"), base=HOSTILE,
        measurements=measure(models, base), nbytes_by_use={HOSTILE: 3}, skipped={HOSTILE: 1},
    )  # fmt: skip
    page = make_page(report)
    outline = Outline(page)
    assert outline.open == []
    assert outline.tags.isdisjoint({"script", "img"})
    assert SCRIPT_LIKE.search(re.sub(r"(?s)<code.*?</code>|&lt;.*?&gt;", "", page)) is None
    assert "{{ 7 * 7 }}" in outline.text
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("parents", "base"), [((FIRST, SECOND), BASE), ((FIRST,), BASE), ((FIRST, SECOND), None)]
)
def test_a_summary_fits_a_terminal(parents: Sequence[Model], base: Model | None) -> None:
    report = make_report(*parents, base=base)
    stream = StringIO()
    console = make_console(stream)
    console.width = 80
    show_report(console, report, observations(report), Path("merged/report.html"))
    text = stream.getvalue()
    assert "Nothing unusual" in text
    assert text.endswith("the page: merged/report.html\n")
    assert re.search(r"attention +12\.3 k +0\.0\d+", text)
    assert max(len(line) for line in text.splitlines() if "Nothing" not in line) <= 80


def test_a_report_without_anything_measured_has_a_page() -> None:
    nothing = usual().measurements.where(np.zeros(len(usual().measurements), dtype=bool))
    report = Report("merged", "recipe", "", ("a", "b"), None, nothing, skipped={"all equal": 9})
    assert "Nothing was measured" in first_screen(make_page(report))


@pytest.mark.slow
def test_a_page_on_a_trillion_parameters_is_small_and_soon_made() -> None:
    report = synthetic_report(Shape(61, experts=384, parents=4))
    assert len(report.measurements) > 70_000
    began = time.process_time()
    page = make_page(report)
    assert time.process_time() - began < 60
    assert len(page.encode()) < 2_000_000


@pytest.mark.service
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_opens_in_a_browser_without_errors_and_network(
    mixture_report: Report, tmp_path: Path, dark: bool
) -> None:
    find_browser()
    path = tmp_path / "report.html"
    path.write_text(make_page(mixture_report), encoding="utf-8")
    opened = open_page(path, tmp_path, dark=dark)
    assert opened.console == ()
    assert opened.requests == ()
    assert opened.dom.count("<svg") > 8
    shot = picture(path, tmp_path, tmp_path / "page.png", dark=dark, size=(700, 900))
    assert (_corner(shot) < 60) == dark


@pytest.mark.service
def test_a_page_that_asks_for_something_is_noticed(tmp_path: Path) -> None:
    find_browser()
    path = tmp_path / "asking.html"
    path.write_text(
        "<img src='http://example.invalid/a.png'><script>console.error(1)</script>", encoding="utf-8"
    )
    opened = open_page(path, tmp_path, dark=False)
    assert opened.requests == ("http://example.invalid/a.png",)
    assert len(opened.console) >= 1


def _corner(path: Path) -> int:
    """Brightness of the first pixel of a PNG of 8 bits."""
    data = path.read_bytes()
    (first,) = (zlib.decompress(b"".join(_chunks(data, b"IDAT"))),)
    return first[1]


def _chunks(data: bytes, kind: bytes) -> list[bytes]:
    found, at = list[bytes](), 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == kind:
            found.append(data[at + 8 : at + 8 + length])
        at += length + 12
    return found
