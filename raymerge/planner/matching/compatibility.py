"""Whether models may be merged: what their configs say, and whether their layers fit into one stack.

Layers of several kinds are common (dense and sparse, two types of attention), so no kind is listed here. The
rule: some single source has layers of every kind that the stack has, with the same tensors and shapes; and
what stands before and after them has the shapes of the source that gives the config."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, Literal

from raymerge.architectures.roles import TiedPair
from raymerge.architectures.rules import load_rules, text_section, value_at
from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.errors import Findings, Problem
from raymerge.merge_plan.dispositions import Dispositions, Use
from raymerge.merge_plan.expressions import Output
from raymerge.methods import Method
from raymerge.planner.inputs.sources import Source, model_references
from raymerge.planner.matching.align import UNLISTED, End, PlacedTensors, Section, counterpart
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.matching.method_assignment import MethodAssignment
from raymerge.planner.parameter_check import ROUTER_ROLES, ineffective_parameters
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.router_repair import RouterRepair
from raymerge.recipes.schema import Recipe

_TEXT, _VISION, _AUDIO = "text", "vision_config", "audio_config"
_PARTS: Mapping[str | None, tuple[str, ...]] = {
    None: (_TEXT, _VISION, _AUDIO),
    **dict.fromkeys(("default", "text_decoder", "encoder", "decoder"), (_TEXT,)),
    **dict.fromkeys(("vision_tower", "vision_model"), (_VISION,)),
    "audio_tower": (_AUDIO,),
}


@dataclass(frozen=True, slots=True)
class FieldRule:
    field: str
    verdict: Literal["refuse", "note"]
    reason: str

    def value(self, config: Mapping[str, Any]) -> Any:
        return value_at(config, self.field.split("."))


@cache
def field_rules() -> tuple[FieldRule, ...]:
    sizes = load_rules(None).sizes
    table = files("raymerge.planner").joinpath("config_differences.toml").read_text(encoding="utf-8")
    return tuple(
        FieldRule(name, entry["verdict"], entry["reason"])
        for entry in tomllib.loads(table)["fields"]
        for name in (entry["names"] if "names" in entry else sizes[entry["sizes"]])
    )


def other_families(recipe: Recipe, sources: Sequence[Source], *, donor: Source) -> list[Problem]:
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
    # transformers has some classes under other spellings than their publishers (Kimi_K25..., KimiK25...).
    is_other_class = _plain_names(source) != _plain_names(donor)
    return is_other_class or (source.model_type != donor.model_type and not renamed)


def _plain_names(source: Source) -> list[str]:
    return [name.replace("_", "").lower() for name in source.architectures]


class ConfigComparison:
    def __init__(self, sections: Sequence[Section], sources: Sequence[Source], donor: Source) -> None:
        self._donor = donor
        users: dict[str, dict[int, None]] = {}
        for section in sections:
            used = [m.source for span in section.spans for m in (span.lead, *span.members)]
            for part in _PARTS.get(section.module, ()):
                users.setdefault(part, {donor.index: None}).update(dict.fromkeys(used))
        # For each part of a config the sources whose part is used, with it; the donor is the first.
        parts = (
            [(sources[index], _part(sources[index].checkpoint.config, part)) for index in indices]
            for part, indices in users.items()
        )
        self._parts = [part for part in parts if any(config != part[0][1] for _, config in part)]

    def problems(self, recipe: Recipe) -> list[Problem]:
        """For each source whose config gives its weights another meaning than the output's config."""
        places = {reference: path for path, reference in model_references(recipe)}
        reasons_of: dict[ModelReference, tuple[str, dict[str, str]]] = {}
        for source, sentence, reason in self._differences("refuse"):
            reasons_of.setdefault(source.reference, (source.name, {}))[1][sentence] = reason
        return [
            Problem(
                recipe.where(*places[reference]),
                f"{name} has {', '.join(reasons)}: its weights mean something else "
                f"({'; '.join(dict.fromkeys(reasons.values()))}), and the one config of the output cannot "
                "hold for both.",
                "Merge models whose configs agree in this, whatever their architecture is called.",
            )
            for reference, (name, reasons) in reasons_of.items()
        ]

    def notes(self) -> list[str]:
        return [
            f"{source.name} has {sentence}; the output's config is that of {self._donor.name}: {reason}"
            for source, sentence, reason in (*self._differences("note"), *self._unstated())
        ]

    def _differences(self, verdict: str) -> Iterator[tuple[Source, str, str]]:
        """Fields whose value differs from that of the first source that states it, with the reason."""
        rules = (rule for rule in field_rules() if rule.verdict == verdict)
        for rule, configs in product(rules, self._parts):
            values = [(source, rule.value(config)) for source, config in configs]
            stated = [(source, value) for source, value in values if value is not None]
            for source, value in stated[1:]:
                first, own = stated[0]
                if value != own:
                    yield source, f"{rule.field} {value} where {first.name} has {own}", rule.reason

    def _unstated(self) -> Iterator[tuple[Source, str, str]]:
        """Fields that only one of the donor and another source states, unless by what a default means.

        Null says no more than a field that is absent."""
        donor = self._donor.name
        for rule, ((_, given), *others) in product(field_rules(), self._parts):
            unless = "unless the default is the same, " if rule.verdict == "refuse" else ""
            own = rule.value(given)
            for source, config in others:
                value = rule.value(config)
                stated, silent = (own, config) if value is None else (value, given)
                if (own is None) == (value is None) or _is_default(stated, rule, silent):
                    continue
                sentence = f"{rule.field} {value} where {donor} does not state it"
                if value is None:
                    sentence = f"no {rule.field} where {donor} has {own}"
                yield source, sentence, f"{unless}{rule.reason}"


def _is_default(value: Any, rule: FieldRule, config: Mapping[str, Any]) -> bool:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if rule.field == "num_key_value_heads":
        return bool(value == heads)
    if rule.field == "head_dim":
        return type(heads) is int and type(width) is int and heads > 0 and value == width // heads
    return rule.verdict == "note" and not value


def _part(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    if part == _TEXT:
        return {**config, **text_section(config)}
    inside = config.get(part)
    return inside if isinstance(inside, Mapping) else {}


def recipe_notes(
    recipe: Recipe,
    chosen: Sequence[Method],
    sources: Sequence[Source],
    sections: Sequence[Section],
    giver: Source,
) -> list[str]:
    notes = [f"{source.name}: {note}" for source in sources for note in source.checkpoint.notes]
    if not giver.checkpoint.is_raw:
        notes.append(f"config, tokenizer and companion files come from {giver.name}")
    notes += ConfigComparison(sections, sources, giver).notes()
    notes += ineffective_parameters(recipe, chosen[0], chosen[1:])
    if sections[0].module is not None:
        named = ", ".join(str(section.module) for section in sections)
        notes.append(f"modules named in the recipe: {named}; all others are copied from {giver.name}")
    return notes


def base_notes(
    assignments: MethodAssignment, sections: Sequence[Section], sources: Sequence[Source]
) -> Iterator[str]:
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


def adapter_notes(resolver: InputResolver, dispositions: Dispositions) -> Iterator[str]:
    if not resolver.adapters:
        return
    dropped = {
        (store, name) for store, name, disposition in dispositions.entries() if disposition.use is Use.DROPPED
    }
    for index, laid in resolver.adapters.items():
        yield from (f"{laid.adapter.name}: {note}" for note in laid.adapter.notes)
        changes = laid.changes()
        used = [change for change in changes if not all((laid.store, name) in dropped for name in change)]
        outside = len(changes) - len(used)
        rest = f"; the recipe leaves out the tensors of {outside}" if outside else ""
        model = resolver.sources[index].checkpoint.name
        yield f"{laid.adapter.name} on {model}: deltas applied {len(used)} of {len(changes)}{rest}"


_Kind = frozenset[tuple[str, tuple[int, ...], DType | None]]
# Name within the layer, shape, and the dtype of codes that are not read: equal kinds are layers of one build.
_ONE_CONFIG = "one config has to describe all layers"
_REMEDY = "Stack models of one size and layout, and make one of them the base_model."


def check_stacks(
    sections: Sequence[Section],
    placed: Mapping[tuple[str | None, int], PlacedTensors],
    *,
    donor: int,
    findings: Findings,
    by_token: bool = False,
) -> None:
    """Report every source whose slices do not fit those of the others, or the config of the donor.

    ``placed`` has the tensors of each module and source. With ``by_token``, rows of embedding and head are
    matched by token, so that their number may differ."""
    for section in sections:
        if section.is_whole:
            continue
        leads = dict.fromkeys(span.lead.source for span in section.spans)
        parts = {index: placed[section.module, index] for index in (donor, *leads)}
        if parts[donor].stack is None:
            # That the config cannot be told of these layers is said elsewhere.
            del parts[donor]
        if len(parts) > 1:
            _StackCheck(section, parts, parts.get(donor), findings, by_token=by_token).report()


@dataclass(frozen=True, slots=True)
class _Stacked:
    placed: PlacedTensors
    own: Mapping[_Kind, int]
    """The first layer of each kind."""
    used: Mapping[_Kind, int]


@dataclass(frozen=True, slots=True)
class _StackCheck:
    section: Section
    parts: Mapping[int, PlacedTensors]
    giver: PlacedTensors | None
    findings: Findings
    by_token: bool

    def report(self) -> None:
        stacked = [self._stacked(index, part) for index, part in self.parts.items()]
        if not self._spellings(stacked):
            self._layers(stacked)
            self._ends()

    def _spellings(self, stacked: Sequence[_Stacked]) -> bool:
        """Report every source that has layers of the first one by other names; whether there is one."""
        first, name = stacked[0], stacked[0].placed.source.name
        pairs = [(each, pair) for each in stacked if (pair := _other_spelling(each, first)) is not None]
        for each, (here, there) in pairs:
            source = each.placed.source.name
            what = (
                f"it spells its layers as in {here}, where {name} has {there}, and the layers of a stack "
                "come out as each source spells them."
            )
            remedy = (
                f"Bring it to the names of {name} first, and stack the result: {{merge_method: passthrough, "
                f"base_model: {name}, models: [{{model: {source}}}]}}."
            )
            self.findings.add(source, what, remedy)
        return bool(pairs)

    def _layers(self, stacked: Sequence[_Stacked]) -> None:
        reference = stacked[0]
        needed = {kind for each in stacked for kind in each.used}
        needed |= reference.own.keys() if self.giver is not None else set()
        fits = any(needed <= each.own.keys() for each in stacked)
        for each in stacked:
            others = [other for other in stacked if other is not each]
            for kind, layer in each.used.items():
                whole = _whole_of(kind, each, others)
                block = f"{each.placed.prefix}.{layer}"
                if whole is not None:
                    what = "it lacks {count} tensors in single layers, which all others of its layers have"
                    remedy = "Use a complete checkpoint, or slices without those layers."
                    for suffix in sorted(whole - _suffixes(kind)):
                        example = f"{block}.{suffix}"
                        self.findings.tensor(each.placed.source.name, what, remedy, example=example)
                elif not fits and kind not in reference.own:
                    self._report_kind(each.placed, layer, kind, reference)

    def _ends(self) -> None:
        spans = self.section.spans
        first, last = self.parts[spans[0].lead.source], self.parts[spans[-1].lead.source]
        if self.giver is not None:
            mine, theirs = last.source.pair, self.giver.source.pair
            if mine is not None and theirs is not None:
                self._compare(_head(last, mine), _head(self.giver, theirs), last, self.giver, has_tokens=True)
            self._check_end(first, self.giver, "before")
            self._check_end(last, self.giver, "after")
        for name in last.by_place.get("after", ()) if last.prefix != first.prefix else ():
            if not name.startswith(f"{last.prefix}.") and not _has_name(name, last, first):
                what = (
                    f"its layers are called '{last.prefix}' and those of {first.source.name} "
                    f"'{first.prefix}', and nothing there tells what {{count}} of its tensors would be called"
                )
                remedy = "Use checkpoints that were saved in the same way."
                self.findings.tensor(last.source.name, what, remedy, example=name)

    def _stacked(self, index: int, part: PlacedTensors) -> _Stacked:
        leads = [(span.lead, span.num_layers or 0) for span in self.section.spans]
        ranges = [(m.first_layer, m.first_layer + count) for m, count in leads if m.source == index]
        own: dict[_Kind, int] = {}
        used: dict[_Kind, int] = {}
        for layer, kind in enumerate(_kinds(part)):
            own.setdefault(kind, layer)
            if any(start <= layer < stop for start, stop in ranges):
                used.setdefault(kind, layer)
        return _Stacked(part, own, used)

    def _report_kind(self, part: PlacedTensors, layer: int, kind: _Kind, reference: _Stacked) -> None:
        mine = {suffix: (shape, codes) for suffix, shape, codes in kind}
        nearest = min(
            reference.own, key=lambda other: (len(mine.keys() ^ _suffixes(other)), len(kind ^ other))
        )
        theirs = {suffix: (shape, codes) for suffix, shape, codes in nearest}
        block, name = f"{part.prefix}.{layer}", reference.placed.source.name
        for suffix in sorted(mine.keys() & theirs.keys()):
            if mine[suffix] != theirs[suffix]:
                here, there = _text(*mine[suffix]), _text(*theirs[suffix])
                self._report_shape(part, name, f"{block}.{suffix} is {here} here and {there} there")
        what = (
            f"its layers are made of other tensors than those of {name}, and {_ONE_CONFIG}; {{count}} are "
            "only in one of the two"
        )
        for suffix in sorted(mine.keys() ^ theirs.keys()):
            example = f"{block}.{suffix} only {'here' if suffix in mine else 'there'}"
            self.findings.tensor(part.source.name, what, _REMEDY, example=example)

    def _report_shape(self, part: PlacedTensors, reference: str, example: str) -> None:
        what = f"{{count}} of its tensors have other shapes than in {reference}, and {_ONE_CONFIG}"
        self.findings.tensor(part.source.name, what, _REMEDY, example=example, key="stacked shape")

    def _check_end(self, lead: PlacedTensors, giver: PlacedTensors, end: End) -> None:
        theirs, pair = _end(giver, end), lead.source.pair
        called = {counterpart(name, lead, giver): tensor for name, tensor in _end(lead, end).items()}
        what = (
            f"beside its layers it has other tensors than {giver.source.name}, which gives the config; "
            "{count} are only in one of the two"
        )
        for name in dict.fromkeys([*called, *theirs]):
            here, there = called.get(name), theirs.get(name)
            if here is not None and there is not None:
                is_embedding = pair is not None and here.name == pair.embedding
                self._compare(here, there, lead, giver, has_tokens=is_embedding)
                continue
            remedy = "Use models of one architecture, saved in the same way."
            example = f"{name} only {'here' if there is None else 'there'}"
            self.findings.tensor(lead.source.name, what, remedy, example=example)

    def _compare(
        self,
        here: StoredTensor,
        there: StoredTensor,
        lead: PlacedTensors,
        giver: PlacedTensors,
        *,
        has_tokens: bool,
    ) -> None:
        is_by_token = self.by_token and has_tokens and here.shape[1:] == there.shape[1:]
        if here.shape != there.shape and not is_by_token:
            example = f"{here.name} is {list(here.shape)} here and {list(there.shape)} there"
            self._report_shape(lead, giver.source.name, example)


def _kinds(part: PlacedTensors) -> Iterator[_Kind]:
    checkpoint, by_place = part.source.checkpoint, part.by_place
    for layer in range(part.num_layers):
        start = len(f"{part.prefix}.{layer}.")
        own = {name: checkpoint.tensors[name] for name in by_place.get(layer, ()) if part.is_compared(name)}
        # What is read as numbers is numbers, however each source stores them.
        numbers = {name for name, each in own.items() if each.dtype.is_mergeable or name in checkpoint.packed}
        yield frozenset(
            (name[start:], each.shape, None if name in numbers else each.dtype) for name, each in own.items()
        )


def _other_spelling(own: _Stacked, other: _Stacked) -> tuple[str, str] | None:
    """A name of each source, where a layer that is used of one is a layer of the other by canonical names
    alone."""
    known = {_suffixes(kind) for kind in other.own}
    unlike = {layer: names for kind, layer in own.used.items() if (names := _suffixes(kind)) not in known}
    canonical = {other.placed.canonical_names(layer): kind for kind, layer in other.own.items() if unlike}
    for layer, here in unlike.items():
        kind = canonical.get(own.placed.canonical_names(layer))
        if kind is not None:
            there, prefix = _suffixes(kind), f"{other.placed.prefix}.{other.own[kind]}"
            return f"{own.placed.prefix}.{layer}.{min(here - there)}", f"{prefix}.{min(there - here)}"
    return None


def _suffixes(kind: _Kind) -> frozenset[str]:
    return frozenset(suffix for suffix, _, _ in kind)


def _whole_of(kind: _Kind, own: _Stacked, others: Sequence[_Stacked]) -> frozenset[str] | None:
    """The tensors that a layer would have, had it not lost some; None where nothing is lost.

    Fewer tensors than in another layer of the same source are a kind of their own when a second source has
    such layers too, and a loss when none has."""
    mine = _suffixes(kind)
    if any(mine == _suffixes(each) for other in others for each in other.own):
        return None
    return min((each for each in map(_suffixes, own.own) if mine < each), key=len, default=None)


def _text(shape: tuple[int, ...], codes: DType | None) -> str:
    return f"{codes.value if codes is not None else ''}{list(shape)}"


def _has_name(name: str, own: PlacedTensors, other: PlacedTensors) -> bool:
    pair = own.source.pair
    is_head = pair is not None and other.source.pair is not None and name == pair.head
    return is_head or counterpart(name, own, other) in other.source.checkpoint.tensors


def _end(part: PlacedTensors, end: End) -> dict[str, StoredTensor]:
    pair, tensors = part.source.pair, part.source.checkpoint.tensors
    names = [name for name in part.by_place.get(end, ()) if part.is_compared(name)]
    return {name: tensors[name] for name in names if pair is None or name != pair.head}


def _head(part: PlacedTensors, pair: TiedPair) -> StoredTensor:
    tensors = part.source.checkpoint.tensors
    return tensors.get(pair.head) or tensors[pair.embedding]


def router_notes(
    recipe: Recipe, outputs: Sequence[Output], logical: LogicalTensors, donor: Source
) -> Iterator[str]:
    infos = logical.infos
    if not any(o.name in infos and infos[o.name].part in ROUTER_ROLES for o in outputs):
        return
    if isinstance(recipe.router, RouterRepair):
        models = ", ".join(str(each.model) for each in recipe.router.repair)
        yield f"routers are solved for those of {models}, on texts of each (router: repair)"
        if donor.checkpoint.unwritten is not None:
            yield (
                f"{donor.name} lies beside the output until that is in place: room for two is needed, unless "
                "files share blocks there"
            )
    elif recipe.router == "merge":
        by = "as 'methods' and merge_method say" if recipe.methods else f"by {recipe.merge_method}"
        yield f"routers are merged {by} (router: merge)"
    else:
        chosen = recipe.base_model if recipe.router == "base" else recipe.router
        yield f"routers and their biases are those of {chosen} (router: {recipe.router})"
