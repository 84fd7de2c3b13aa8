"""Things worth telling of a plan that stand in nobody's way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.merge_plan.dispositions import Disposition, Fates
from raymerge.methods import Method
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.bind import ineffective_parameters
from raymerge.planner.matching.families import config_notes
from raymerge.planner.matching.input_resolver import Supplies
from raymerge.planner.matching.layer_map import UNLISTED, Section
from raymerge.planner.matching.method_assignment import Treatments
from raymerge.recipes import Recipe


def recipe_notes(
    recipe: Recipe,
    chosen: Sequence[Method],
    sources: Sequence[Source],
    sections: Sequence[Section],
    *,
    donor: int,
) -> list[str]:
    """What the sources' files and configs give rise to, and what the recipe says without effect."""
    notes = [f"{source.name}: {note}" for source in sources for note in source.checkpoint.notes]
    giver = sources[donor]
    if not giver.checkpoint.is_raw:
        notes.append(f"config, tokenizer and companion files come from {giver.name}")
    notes += config_notes(sections, sources, donor=giver)
    notes += ineffective_parameters(recipe, chosen[0], chosen[1:])
    if sections[0].module is not None:
        named = ", ".join(str(section.module) for section in sections)
        notes.append(f"modules named in the recipe: {named}; all others are copied from {giver.name}")
    return notes


def base_notes(
    treatments: Treatments, sections: Sequence[Section], sources: Sequence[Source]
) -> Iterator[str]:
    """Which base is the whole result, or counts as one more source though it is not listed."""
    for section in sections:
        for span in section.spans:
            own = treatments.made(span)
            if own is None:
                continue
            for member in own.members:
                name = sources[member.source].name
                if own.unchanged_by:
                    yield f"{own.unchanged_by} has no source beside the base: the result is {name}"
                elif member.path == UNLISTED:
                    yield f"{name} is not listed, and counts as one more source of {own.method.name}"


def adapter_notes(supplies: Supplies, fates: Fates) -> Iterator[str]:
    """How many of each adapter's changes go into the output."""
    if not supplies.adapters:
        return
    dropped = {(store, name) for store, name, fate in fates.rows() if fate.disposition is Disposition.DROPPED}
    for index, laid in supplies.adapters.items():
        yield from (f"{laid.adapter.name}: {note}" for note in laid.adapter.notes)
        changes = laid.changes()
        used = [change for change in changes if not all((laid.store, name) in dropped for name in change)]
        outside = len(changes) - len(used)
        rest = f"; the recipe leaves out the tensors of {outside}" if outside else ""
        model = supplies.sources[index].checkpoint.name
        yield f"{laid.adapter.name} on {model}: deltas applied {len(used)} of {len(changes)}{rest}"
