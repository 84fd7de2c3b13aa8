"""Whether models may be merged by what their configs say, and notes on what is worth telling."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from raymerge.architectures import load_rules
from raymerge.architectures.sections import text_section
from raymerge.errors import Problem
from raymerge.merge_plan.dispositions import Disposition, Fates
from raymerge.methods import Method
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.sources import model_references
from raymerge.planner.matching.bind import ineffective_parameters
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.matching.layer_map import UNLISTED, Section
from raymerge.planner.matching.method_assignment import MethodAssignment
from raymerge.recipes import Recipe

_TEXT, _VISION, _AUDIO = "text", "vision_config", "audio_config"
_PARTS: Mapping[str | None, tuple[str, ...]] = {
    None: (_TEXT, _VISION, _AUDIO),
    **dict.fromkeys(("default", "text_decoder", "encoder", "decoder"), (_TEXT,)),
    **dict.fromkeys(("vision_tower", "vision_model"), (_VISION,)),
    "audio_tower": (_AUDIO,),
}


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What it means when configs differ in a field."""

    field: str
    """Dotted path in the section of the part that is merged."""
    verdict: Literal["refuse", "note"]
    """Whether such models can be merged."""
    reason: str
    """Why, as a part of a sentence."""


def field_rules() -> tuple[FieldRule, ...]:
    """The table ``config_differences.toml``."""
    sizes = load_rules(None).sizes
    table = files("raymerge.planner").joinpath("config_differences.toml").read_text(encoding="utf-8")
    return tuple(
        FieldRule(name, entry["verdict"], entry["reason"])
        for entry in tomllib.loads(table)["fields"]
        for name in (entry["names"] if "names" in entry else sizes[entry["sizes"]])
    )


def other_families(recipe: Recipe, sources: Sequence[Source], *, donor: Source) -> list[Problem]:
    """A problem for each source of another architecture than the donor's, unless the recipe waives it."""
    places = {reference: path for path, reference in model_references(recipe)}
    return [
        Problem(
            recipe.where(*places[source.reference]),
            f"{source.name} is of another family ({source.model_type}: {', '.join(source.architectures)}) "
            f"than {donor.name} ({donor.model_type}: {', '.join(donor.architectures)}).",
            "Merge models of one architecture. If the tensors really are the same, say so with "
            f"'model: {{model: {source.reference.path}, override_architecture: "
            f"{next(iter(donor.architectures), '')}}}'.",
        )
        for source in sources
        if source.reference in places and _is_foreign(source, donor)
    ]


def _is_foreign(source: Source, donor: Source) -> bool:
    renamed = bool(source.reference.override_architecture)
    return source.architectures != donor.architectures or (
        source.model_type != donor.model_type and not renamed
    )


def other_meanings(
    recipe: Recipe, sections: Sequence[Section], sources: Sequence[Source], *, donor: Source
) -> list[Problem]:
    """A problem for each source whose weights mean something else than the output's config will say."""
    places = {reference: path for path, reference in model_references(recipe)}
    found: dict[int, dict[str, str]] = {}
    for source, sentence, reason in _differences(sections, sources, donor, "refuse"):
        found.setdefault(source.index, {})[sentence] = reason
    return [
        Problem(
            recipe.where(*places[sources[index].reference]),
            f"{sources[index].name} has {', '.join(reasons)}: its weights mean something else "
            f"({'; '.join(dict.fromkeys(reasons.values()))}), and the one config of the output cannot hold "
            "for both.",
            "Merge models whose configs agree in this, whatever their architecture is called.",
        )
        for index, reasons in found.items()
    ]


def config_notes(sections: Sequence[Section], sources: Sequence[Source], *, donor: Source) -> list[str]:
    """A note for each source whose config differs in what a merge can bear, or in what one does not state."""
    found = [*_differences(sections, sources, donor, "note"), *_unstated(sections, sources, donor)]
    return [
        f"{source.name} has {sentence}; the output's config is that of {donor.name}: {reason}"
        for source, sentence, reason in found
    ]


def _differences(
    sections: Sequence[Section], sources: Sequence[Source], donor: Source, verdict: str
) -> Iterator[tuple[Source, str, str]]:
    """Every field of a verdict that a source states otherwise than the first that states it, with the reason.

    The donor is before all others.
    """
    configs = list(_configs(sections, sources, donor))
    for rule in field_rules():
        for said in configs if rule.verdict == verdict else ():
            values = [(source, _at(config, rule.field)) for source, config in said]
            stated = [(source, value) for source, value in values if value is not None]
            for source, value in stated[1:]:
                first, own = stated[0]
                if value != own:
                    yield source, f"{rule.field} {value} where {first.name} has {own}", rule.reason


def _unstated(
    sections: Sequence[Section], sources: Sequence[Source], donor: Source
) -> Iterator[tuple[Source, str, str]]:
    """Every field that either the donor or another source states, with what it means if the default differs.

    Null says no more than a field that is absent.
    """
    configs = list(_configs(sections, sources, donor))
    for rule in field_rules():
        reason = f"unless the default is the same, {rule.reason}" if rule.verdict == "refuse" else rule.reason
        for (_, given), *others in configs:
            own = _at(given, rule.field)
            for source, config in others:
                value = _at(config, rule.field)
                if own is None and value is not None and not _is_default(value, rule, given):
                    yield source, f"{rule.field} {value} where {donor.name} does not state it", reason
                if own is not None and value is None and not _is_default(own, rule, config):
                    yield source, f"no {rule.field} where {donor.name} has {own}", reason


def _is_default(value: Any, rule: FieldRule, config: Mapping[str, Any]) -> bool:
    """Whether a config that does not state a field is known to mean that value."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if rule.field == "num_key_value_heads":
        return bool(value == heads)
    if rule.field == "head_dim":
        return type(heads) is int and type(width) is int and heads > 0 and value == width // heads
    return rule.verdict == "note" and not value


def _configs(
    sections: Sequence[Section], sources: Sequence[Source], donor: Source
) -> Iterator[list[tuple[Source, Mapping[str, Any]]]]:
    """For each part of a config the sources whose part is merged, with it; the donor is the first."""
    for part, indices in _users(sections).items():
        order = [donor, *(sources[index] for index in indices if index != donor.index)]
        yield [(source, _said(source, part)) for source in order]


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _users(sections: Sequence[Section]) -> Mapping[str, Sequence[int]]:
    """For each part of a config the sources of which the recipe uses that part of the model, in order."""
    found: dict[str, dict[int, None]] = {}
    for section in sections:
        used = [m.source for span in section.spans for m in (span.lead, *span.members)]
        for part in _PARTS.get(section.module, ()):
            found.setdefault(part, {}).update(dict.fromkeys(used))
    return {part: list(indices) for part, indices in found.items()}


def _said(source: Source, part: str) -> Mapping[str, Any]:
    config = source.checkpoint.config
    if part == _TEXT:
        return {**config, **text_section(config)}
    inside = config.get(part)
    return inside if isinstance(inside, Mapping) else {}


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
    assignments: MethodAssignment, sections: Sequence[Section], sources: Sequence[Source]
) -> Iterator[str]:
    """Which base is the whole result, or counts as one more source though it is not listed."""
    for section in sections:
        for span in section.spans:
            own = assignments.made(span)
            if own is None:
                continue
            for member in own.members:
                name = sources[member.source].name
                if own.unchanged_by:
                    yield f"{own.unchanged_by} has no source beside the base: the result is {name}"
                elif member.path == UNLISTED:
                    yield f"{name} is not listed, and counts as one more source of {own.method.name}"


def adapter_notes(resolver: InputResolver, fates: Fates) -> Iterator[str]:
    """How many of each adapter's changes go into the output."""
    if not resolver.adapters:
        return
    dropped = {(store, name) for store, name, fate in fates.rows() if fate.disposition is Disposition.DROPPED}
    for index, laid in resolver.adapters.items():
        yield from (f"{laid.adapter.name}: {note}" for note in laid.adapter.notes)
        changes = laid.changes()
        used = [change for change in changes if not all((laid.store, name) in dropped for name in change)]
        outside = len(changes) - len(used)
        rest = f"; the recipe leaves out the tensors of {outside}" if outside else ""
        model = resolver.sources[index].checkpoint.name
        yield f"{laid.adapter.name} on {model}: deltas applied {len(used)} of {len(changes)}{rest}"
