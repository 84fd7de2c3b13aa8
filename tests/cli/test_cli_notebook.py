"""A run shown from Python, and the page about it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.merges import MEAN, make_models, write_recipe

import raymerge
from raymerge.cli.render.notebook import NotebookProgress
from raymerge.cli.render.progress import LiveProgress, PlainProgress
from raymerge.errors import PlanError
from raymerge.events import Ended, Planned, Published, SegmentDone, Started, Verified

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
PLANNED = Planned("d" * 40, 10, 4000, 2000, 2, 5_000_000, notes=("<script>alert(1)</script>",))
STARTED = Started(("inline",), "cpu", 0, 0)
DONE = SegmentDone(0, "inline", 900, 100, 1000, 0.5)


class Cell:
    """The output of a notebook's cell, with IPython's ``display``."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.num_outputs = 0

    def display(self, page: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        self.num_outputs += 1
        self.shown.append(page)
        return self

    def update(self, page: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(page)

    @property
    def html(self) -> str:
        return self.shown[-1]["text/html"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_models(tmp_path)
    write_recipe(tmp_path, MEAN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_notebook_has_one_output_with_a_bar_that_ends_in_the_summary() -> None:
    cell, now = Cell(), [0.0]
    show = NotebookProgress(cell.display, clock=lambda: now[0])
    for event in (PLANNED, STARTED):
        show(event)
    now[0] += 4
    show(DONE)
    assert "1.00 kB of 2.00 kB, 250 B/s, 4.0 s left" in cell.html
    assert "━" in cell.html
    # What files say is no markup of the page.
    assert "<script>" not in cell.html
    assert "&lt;script&gt;" in cell.html
    drawn = len(cell.shown)
    show(DONE)
    for event in (Verified(10, 4000), Published("/somewhere/out", 61.0)):
        show(event)
    assert len(cell.shown) > drawn
    assert cell.num_outputs == 1
    assert "done: /somewhere/out" in cell.html
    assert "read" in cell.shown[-1]["text/plain"]
    assert "━" not in cell.html


def test_a_bar_is_not_drawn_more_often_than_one_can_see() -> None:
    cell, now = Cell(), [0.0]
    show = NotebookProgress(cell.display, clock=lambda: now[0])
    show(Planned("d" * 40, 10, 4000, 10**9, 10**6, 5_000_000))
    show(STARTED)
    before = len(cell.shown)
    for _ in range(1000):
        now[0] += 0.001
        show(DONE)
    assert len(cell.shown) - before <= 5


def test_a_run_that_fails_leaves_no_bar() -> None:
    cell = Cell()
    show = NotebookProgress(cell.display)
    for event in (PLANNED, STARTED, Ended(3, "stopped")):
        show(event)
    assert "━" not in cell.html
    assert "planned: " in cell.html


def test_where_it_is_called_decides_how_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(raymerge.progress(), PlainProgress)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(raymerge.progress(), LiveProgress)
    cell, module = Cell(), ModuleType("IPython.display")
    module.display = cell.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    show = raymerge.progress()
    assert isinstance(show, NotebookProgress)
    show(PLANNED)
    assert cell.num_outputs == 1


def test_a_live_view_ends_with_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would give the terminal back its cursor."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show = raymerge.progress()
    assert isinstance(show, LiveProgress)
    inline = raymerge.RunOptions(inline=True)
    raymerge.submit("recipe.yml", "out", inline, on_event=show)
    assert not show.is_live
    write_recipe(folder, MEAN.replace("model: two", "model: absent"))
    show(STARTED)
    assert show.is_live
    with pytest.raises(PlanError):
        raymerge.submit("recipe.yml", "other", inline, on_event=show)
    assert not show.is_live


def test_the_page_about_python_works_as_it_stands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        # Without Ray, as everywhere in these tests.
        exec(block.replace('"merged", on', '"merged", raymerge.RunOptions(inline=True), on'), names)
    said = capsys.readouterr().out
    assert "done: " in said
    assert said.splitlines()[-1].startswith("30 tensors, ")
    assert names["segments"]
    assert {"merged", "merged-again", "counted"} <= {path.name for path in folder.iterdir()}
