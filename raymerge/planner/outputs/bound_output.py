"""An output tensor with the treatment that was chosen for it, and how selectors see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raymerge.methods import Method
from raymerge.planner.matching.align import Aligned
from raymerge.planner.matching.layer_map import Member
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.matching.method_assignment import Treatment
from raymerge.recipes import Subject


class Chosen(NamedTuple):
    """An aligned tensor with the treatment that was chosen for it."""

    aligned: Aligned
    """The output tensor."""
    treatment: Treatment
    """By which method it is made, and from whom."""
    names: tuple[str, ...]
    """Its name in each of ``treatment.everyone()``."""

    @property
    def method(self) -> Method:
        """What is computed."""
        return self.treatment.method

    def members(self) -> Iterator[tuple[Member, str]]:
        """Who takes part, the base first, with the tensor's name there."""
        return zip(self.treatment.everyone(), self.names, strict=True)


def choose(aligned: Aligned, treatment: Treatment) -> Chosen:
    """The treatment's members with their names, of those that the span has."""
    everyone = treatment.everyone()
    if everyone == aligned.span.members:
        return Chosen(aligned, treatment, aligned.names)
    names = {member.path: name for member, name in zip(aligned.span.members, aligned.names, strict=True)}
    return Chosen(aligned, treatment, tuple(names[member.path] for member in everyone))


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
