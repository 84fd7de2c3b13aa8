"""A search: what it would do, how far it is, and its best trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raymerge.cli.render.screen import counted, heading, make_table, printable, show_table
from raymerge.cli.render.tally import SearchTally

if TYPE_CHECKING:
    from raymerge.api import PlannedSearch, SearchResult

_MOST_ROWS = 10


def show_search(console: Console, title: str, planned: PlannedSearch) -> None:
    search = planned.search
    settings, early = search.settings, search.settings.stop_early
    how = f"{settings.strategy}, at most {counted(settings.evaluations, 'evaluation')} by {settings.kind}"
    console.print(heading(f"Search of {title}", note=f"{how}, {settings.round} at once"))
    rows = [(each.name, each.space.shown) for each in search.marked.parameters]
    show_table(console, ("parameter", "values"), rows)
    weights = ((name, f"{weight:g}") for name, weight in settings.metrics.items())
    show_table(console, ("metric", "weight"), weights, numbers=(1,))
    if early is not None:
        what = f"{early.share:.0%} of the evaluation for all, the whole for the better {early.keep:.0%}"
        console.print(f"\nearly stop: {what} of each round")
    console.print("\nOne candidate:")


def search_json(planned: PlannedSearch) -> dict[str, Any]:
    settings = planned.search.settings
    return {
        "search": {
            "strategy": settings.strategy,
            "evaluations": settings.evaluations,
            "round": settings.round,
            "seed": settings.seed,
            "evaluator": settings.kind,
            "metrics": dict(settings.metrics),
            "parameters": {each.name: each.space.shown for each in planned.search.marked.parameters},
        },
        "values": dict(planned.values),
        "recipe_text": planned.text,
    }


def show_trials(console: Console, result: SearchResult) -> None:
    from raymerge.recipe_search.report import counts, trial_rows

    titles, rows = trial_rows(result.search, result.trials)
    console.print(f"\nThe best of {counts(result.trials)}:")
    show_table(console, titles, rows, numbers=range(len(titles)))


def search_view(tally: SearchTally) -> RenderableType:
    """How far it is, and the best so far."""
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    done, total = len(tally.trials), tally.started.evaluations
    bar.add_row(ProgressBar(total=total, completed=done), f"{done} of {counted(total, 'evaluation')}")
    return Group(bar, *_best_table(tally))


def _best_table(tally: SearchTally) -> Sequence[RenderableType]:
    best = tally.best_first()[:_MOST_ROWS]
    if not best:
        return [Text("Evaluating the first candidates")]
    names = tuple(best[0].values)
    rows = [
        (str(each.number), f"{each.score:.6g}", *(printable(str(each.values[name])) for name in names))
        for each in best
    ]
    return [make_table(("trial", "score", *names), rows, numbers=range(len(names) + 2))]
