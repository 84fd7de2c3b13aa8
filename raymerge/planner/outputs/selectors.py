"""The selectors of a recipe: which tensors they tell apart by name, and which of them match nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raymerge.planner.inputs.sources import Path_
from raymerge.planner.matching.bind import written_settings
from raymerge.recipes import Conditional, Recipe, Selector, Subject
from raymerge.recipes.selector import plain_selector

_EVERYTHING: tuple[dict[str, object], ...] = ({}, {"filter": "*"})


class Selectors:
    """All selectors of one recipe; those of parameters are watched for tensors that they match."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._unmatched: dict[Path_, Selector] = dict(_of_parameters(recipe))
        rules = [rule.selector for rule in recipe.methods]
        selectors = dict.fromkeys([*self._unmatched.values(), *rules])
        self._by_name = tuple(each for each in selectors if each.is_by_name)

    @property
    def are_by_name(self) -> bool:
        """Whether some say what tensors are called, so that the tensors of one stack may be told apart."""
        return bool(self._by_name)

    def matching(self, subject: Subject) -> frozenset[Selector]:
        """Those by name that match a tensor."""
        return frozenset([each for each in self._by_name if each.matches(subject)])

    def see(self, subjects: Iterable[Subject]) -> None:
        """Take note of the selectors of parameters that match some of these tensors."""
        if self._unmatched:
            for subject in subjects:
                for path in [path for path, each in self._unmatched.items() if each.matches(subject)]:
                    del self._unmatched[path]

    def notes(self) -> Iterator[str]:
        """One for each selector of a parameter that matched none of the tensors seen."""
        for path, selector in self._unmatched.items():
            given = ", ".join(f"{key}: {_text(value)}" for key, value in plain_selector(selector).items())
            yield (
                f"{self._recipe.where(*path)}: {given} matches no tensor that is merged, so that its value "
                "has no effect ('raymerge inspect MODEL' lists names and roles)"
            )


def _of_parameters(recipe: Recipe) -> Iterator[tuple[Path_, Selector]]:
    for path, setting in written_settings(recipe):
        if isinstance(setting, Conditional):
            for index, choice in enumerate(setting.choices):
                if plain_selector(choice.selector) not in _EVERYTHING:
                    yield (*path, index), choice.selector


def _text(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
