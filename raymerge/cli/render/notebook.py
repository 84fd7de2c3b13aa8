"""A run shown from Python: a bar in a notebook or on a terminal, lines elsewhere."""

from __future__ import annotations

import atexit
import io
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from raymerge import events
from raymerge.cli.render.progress import LiveProgress, PlainProgress, Progress, view, waiting
from raymerge.cli.render.screen import make_console
from raymerge.events import Event, OnEvent

_COLUMNS, _LINES = 100, 40
_PAUSE_SECONDS = 0.25
_PAGE = '<pre style="line-height: 1.25; white-space: pre; overflow-x: auto">{code}</pre>'


def progress() -> OnEvent:
    """What to give to ``submit`` or ``merge_adapters`` as ``on_event``, so that one can watch the run.

    In a notebook it is a bar below the cell, without widgets; on a terminal a live view; elsewhere a line now
    and then on standard output. It ends with the run, however that ends."""
    console = Console()
    if console.is_jupyter:
        return NotebookProgress(import_module("IPython.display").display)
    console = make_console(sys.stdout)
    if console.is_terminal and not console.is_dumb_terminal:
        live = LiveProgress(console, "")
        # A terminal whose program ends otherwise gets its cursor back, too.
        atexit.register(live.close)
        return live
    return PlainProgress(console, "")


class NotebookProgress(Progress):
    """One HTML output that is drawn again and again; what stays is above the bar."""

    def __init__(self, display: Callable[..., Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        """``display`` as IPython's: with ``display_id`` it returns a handle with ``update``."""
        console = Console(file=io.StringIO(), width=_COLUMNS, height=_LINES, highlight=False, markup=False)
        super().__init__(console, "", clock=clock)
        self._display = display
        self._handle: Any = None
        self._kept: list[RenderableType] = []
        self._drawn_at = -_PAUSE_SECONDS

    def __call__(self, event: Event) -> None:
        self._tally.take(event)
        before = len(self._kept)
        self._tell(event)
        is_over = isinstance(event, events.Ended) or self._tally.is_end(event)
        is_time = isinstance(event, events.Published) or self._clock() - self._drawn_at >= _PAUSE_SECONDS
        if is_over or is_time or len(self._kept) > before:
            self._draw(is_over=is_over)

    def _keep(self, renderable: RenderableType) -> None:
        self._kept.append(renderable)

    def _draw(self, *, is_over: bool) -> None:
        self._drawn_at = self._clock()
        now = waiting(self._tally)
        below = [] if is_over else [Text(now) if now else view(self._tally, self._console)]
        whole = Group(*self._kept, *below)
        page = {"text/html": _html(whole), "text/plain": _plain(whole)}
        if self._handle is None:
            self._handle = self._display(page, raw=True, display_id=True)
        else:
            self._handle.update(page, raw=True)


def _recorded(renderable: RenderableType) -> Console:
    console = Console(record=True, width=_COLUMNS, height=_LINES, file=io.StringIO(), force_jupyter=False,
                      force_terminal=True, color_system="truecolor", highlight=False)  # fmt: skip
    console.print(renderable)
    return console


def _html(renderable: RenderableType) -> str:
    return _recorded(renderable).export_html(inline_styles=True, code_format=_PAGE)


def _plain(renderable: RenderableType) -> str:
    return _recorded(renderable).export_text()
