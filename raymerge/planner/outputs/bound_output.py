"""An output tensor with its method and parameters, and how selectors see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from raymerge.methods import Method
from raymerge.planner.inputs.sources import Path_
from raymerge.planner.matching.align import Aligned
from raymerge.planner.matching.bind import written_settings
from raymerge.planner.matching.layer_map import Member
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.matching.method_assignment import AssignedMethod
from raymerge.recipes import Conditional, Recipe, Selector, Subject
from raymerge.recipes.settings import plain_selector


class Chosen(NamedTuple):
    """An aligned tensor with the assignment that was chosen for it."""

    aligned: Aligned
    """The output tensor."""
    assignment: AssignedMethod
    """By which method it is made, and from whom."""
    names: tuple[str, ...]
    """Its name in each of ``assignment.everyone()``."""

    @property
    def method(self) -> Method:
        """What is computed."""
        return self.assignment.method

    def members(self) -> Iterator[tuple[Member, str]]:
        """Who takes part, the base first, with the tensor's name there."""
        return zip(self.assignment.everyone(), self.names, strict=True)


def choose(aligned: Aligned, assignment: AssignedMethod) -> Chosen:
    """The assignment's members with their names, of those that the span has."""
    everyone = assignment.everyone()
    if everyone == aligned.span.members:
        return Chosen(aligned, assignment, aligned.names)
    names = {member.path: name for member, name in zip(aligned.span.members, aligned.names, strict=True)}
    return Chosen(aligned, assignment, tuple(names[member.path] for member in everyone))


def output_subject(aligned: Aligned, logical: Sequence[LogicalTensors]) -> Subject:
    """The output tensor as selectors see it that name none; a head that is the embedding goes by that."""
    info = logical[aligned.span.lead.source].infos[aligned.lead]
    return Subject(aligned.alias or aligned.output, frozenset((info.role, info.part)), aligned.layer)


def output_subjects(aligned: Aligned, logical: Sequence[LogicalTensors]) -> tuple[Subject, ...]:
    """The logical tensors of an output as selectors see them, with their names in other layouts.

    They are in the order of the lead's blocks; a tensor that is not fused is one.
    """
    stored = output_subject(aligned, logical)
    if aligned.alias:
        return (stored,)
    return tuple(
        stored._replace(aliases=tuple(moved(aligned, name, aligned.output) for name in names))
        for names in logical[aligned.span.lead.source].other_names(aligned.lead)
    )


def member_subject(
    member: Member, name: str, logical: Sequence[LogicalTensors], aliases: Sequence[str] = ()
) -> Subject:
    """The tensor of one member as selectors see it; ``aliases`` are the output's."""
    info = logical[member.source].info(name)
    number = _layer_text(name)
    renumbered = (each.replace(_layer_text(each), number, 1) if number else each for each in aliases)
    return Subject(name, frozenset((info.role, info.part)), info.layer, tuple(renumbered))


def moved(aligned: Aligned, logical: str, name: str) -> str:
    """A logical name of the lead, moved to the layer that ``name`` is in."""
    if name == aligned.lead:
        return logical
    return logical.replace(_layer_text(aligned.lead), _layer_text(name), 1)


def output_logical(aligned: Aligned, logical: str) -> str:
    """Name by which chance is drawn: the output's, so that a layer used twice draws twice."""
    if aligned.alias:
        return aligned.alias
    return moved(aligned, logical, aligned.output)


def _layer_text(name: str) -> str:
    """The ``.12.`` of a layered name, by which a canonical name is moved to another layer."""
    number = next((piece for piece in name.split(".") if piece.isdigit()), None)
    return f".{number}." if number is not None else ""


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
