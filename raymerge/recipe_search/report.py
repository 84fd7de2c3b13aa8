"""The trials as a table: for people, and as comments of the best candidate's recipe, which its card shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raymerge.documents.positions import yaml_text
from raymerge.recipe_search.job import Search
from raymerge.recipe_search.trials import Trial, best_first
from raymerge.recipes.load import MARK

MOST_ROWS = 20


def trial_rows(search: Search, trials: Sequence[Trial]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and the best trials, best first."""
    parameters, metrics = search.marked.parameters, search.settings.metrics
    if list(metrics.values()) == [1.0]:
        # It is the score.
        metrics = {}
    rows = [
        (
            str(each.number),
            f"{each.score:.6g}",
            *(f"{each.metrics[name]:.6g}" for name in metrics),
            *(parameter.written(each.values[parameter.name]).shown for parameter in parameters),
        )
        for each in best_first(trials)[:MOST_ROWS]
    ]
    return ("trial", "score", *metrics, *(each.name for each in parameters)), rows


def with_trials(text: str, search: Search, trials: Sequence[Trial]) -> str:
    """The recipe of the best candidate with what it was searched by. Nothing in it depends on time."""
    lines = "\n".join(f"# {line}".rstrip() for line in _lines(search, trials))
    return f"{text.rstrip()}\n\n{lines}\n"


def _lines(search: Search, trials: Sequence[Trial]) -> Iterator[str]:
    titles, rows = trial_rows(search, trials)
    yield f"The best of {counts(trials)}:"
    yield ""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield ""
    yield "searched by"
    yield from yaml_text({MARK: _public(search.block)}).splitlines()
    yield "among"
    yield from (f"{each.name}: {each.space.shown}" for each in search.marked.parameters)


def _public(block: object) -> object:
    """The ``search`` block without what the recipe's author gives to processes alone."""
    if not isinstance(block, Mapping):
        return block
    return {key: _public(each) for key, each in block.items() if key != "environment"}


def counts(trials: Sequence[Trial]) -> str:
    states = [each.state for each in trials]
    parts = [f"{states.count(state)} {state}" for state in ("stopped", "failed") if state in states]
    more = f" ({', '.join(parts)})" if parts else ""
    return f"{len(trials)} trials{more}"
