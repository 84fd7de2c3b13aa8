"""What a plan tells of its vocabulary: tokens kept, moved, added and dropped, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymerge.planner.tokenizer.rows import RowSources
from raymerge.planner.tokenizer.tokens import Numbering, TokenSet, examples


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One source's tokens against the output's."""

    index: int
    """The source's index."""
    name: str
    """The source, as the recipe calls it."""
    num_rows: int
    """Rows of its embedding."""
    num_equal: int
    """Its tokens that keep their ids."""
    moved: tuple[str, ...]
    """Its tokens that the output has under other ids, in the order of its ids."""
    dropped: tuple[str, ...]
    """Its tokens that the output lacks."""
    added: tuple[str, ...]
    """Tokens of the output that it lacks: their rows are filled from elsewhere."""
    beyond: tuple[str, ...]
    """Tokens that its tokenizer has and its embedding has no row for; they count as absent."""

    def __str__(self) -> str:
        parts = [f"{self.num_equal} tokens with equal ids"]
        for verb, tokens in (("moved", self.moved), ("added", self.added), ("dropped", self.dropped)):
            parts += [f"{len(tokens)} {verb} ({examples(tokens)})"] if tokens else []
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class VocabularyReport:
    """All sources' tokens, and the rows that are no source's own."""

    models: tuple[ModelReport, ...]
    """One for each source."""
    means: tuple[str, ...]
    """Tokens whose missing rows are the mean of several sources' rows."""
    zeros: tuple[str, ...]
    """Tokens whose missing rows are zeros."""
    forced: tuple[str, ...]
    """Tokens whose row is the same for every source by the recipe's ``force``."""
    num_holes: int
    """Ids that no token has; their rows are zeros."""

    def notes(self) -> Iterator[str]:
        """Sentences for the plan."""
        yield from map(str, self.models)
        for model in self.models:
            if model.beyond:
                yield (
                    f"{model.name}: tokens beyond the {model.num_rows} rows of its embedding: "
                    f"{len(model.beyond)} ({examples(model.beyond)}); they count as absent there"
                )
        for what, tokens in (
            ("missing rows filled with the mean of several models' rows", self.means),
            ("missing rows filled with zeros", self.zeros),
            ("rows forced to be the same for all models", self.forced),
        ):
            if tokens:
                yield f"{what}: {len(tokens)} ({examples(tokens)})"
        if self.num_holes:
            yield f"ids that belong to no token, with rows of zeros: {self.num_holes}"


def report_vocabulary(
    known: Mapping[int, Numbering], tokens: TokenSet, texts: Sequence[str | None], sources: RowSources
) -> VocabularyReport:
    """The report on a vocabulary.

    Args:
        known: each source's tokens.
        tokens: the output's tokens.
        texts: the same in the order of their ids.
        sources: what their rows are made of.
    """
    lacking = {text for each in known.values() for text in tokens.ids if text not in each.rows}
    counts = sources.defaults().tolist()
    chosen = {texts[number] for number in sources.fixed}
    zeros = {texts[number] for number, row in sources.fixed.items() if row.term is None}
    by_default = [
        (text, counts[number])
        for number, text in enumerate(texts)
        if text is not None and text in lacking and text not in chosen
    ]
    zeros |= {text for text, count in by_default if count == 0}
    return VocabularyReport(
        models=tuple(_report_model(each, tokens.ids) for each in known.values()),
        means=tuple(text for text, count in by_default if count > 1),
        zeros=tuple(text for text in texts if text is not None and text in zeros),
        forced=tuple(text for n in sorted(sources.forced) if (text := texts[n]) is not None),
        num_holes=sum(text is None for text in texts),
    )


def _report_model(known: Numbering, ids: Mapping[str, int]) -> ModelReport:
    in_both = [(text, row, ids[text]) for text, row in known.rows.items() if text in ids]
    moved = [text for text, row, number in in_both if row != number]
    return ModelReport(
        index=known.model.index,
        name=known.model.name,
        num_rows=known.model.num_rows,
        num_equal=len(in_both) - len(moved),
        moved=tuple(moved),
        dropped=tuple(text for text in known.rows if text not in ids),
        added=tuple(text for text in ids if text not in known.rows),
        beyond=tuple(known.beyond),
    )
