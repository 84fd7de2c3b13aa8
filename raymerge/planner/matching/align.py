"""Which layers and tensors meet: spans of layers, and each output tensor's name in every member.

``models`` is one span over whole models, ``slices`` one span per output slice, ``modules`` a list of either
per module. An output has the names of the span's lead checkpoint, renumbered when layers are stacked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import yaml

from raymerge.architectures.roles import Stack, module_finder, rename_layer
from raymerge.architectures.rules import Role
from raymerge.documents.fields import FieldPath
from raymerge.errors import Problem
from raymerge.methods import BaseUse, Method
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.schema import ModelEntry, ModuleEntry, OutputSlice, Recipe
from raymerge.recipes.settings import Setting, Subject

Parameters = Mapping[str, Setting]
UNLISTED: FieldPath = ("base_model",)


@dataclass(frozen=True, slots=True)
class Member:
    source: int
    first_layer: int
    parameters: Parameters
    path: FieldPath


@dataclass(frozen=True, slots=True)
class Span:
    members: tuple[Member, ...]
    """Every source that a method of the recipe may use here, in recipe order; an unlisted base comes last."""
    base: Member | None
    base_named: ModelReference | None
    lead: Member
    num_layers: int | None
    """None: whole models."""
    first_output: int
    scopes: tuple[Parameters, ...]
    path: FieldPath


@dataclass(frozen=True, slots=True)
class Section:
    module: str | None
    """None for the whole model."""
    spans: tuple[Span, ...]

    @property
    def is_whole(self) -> bool:
        return self.spans[0].num_layers is None


class SpanBuilder:
    def __init__(self, recipe: Recipe, chosen: Sequence[Method], sources: Sequence[Source]) -> None:
        self.problems: list[Problem] = []
        self._recipe = recipe
        self._chosen = chosen
        self._sources = {source.reference: source for source in sources}

    def sections(self) -> tuple[Section, ...]:
        recipe = self._recipe
        bodies: list[tuple[str | None, Recipe | ModuleEntry]] = [*recipe.modules.items()] or [(None, recipe)]
        sections: list[Section] = []
        for name, body in bodies:
            scopes = ({} if name is None else body.parameters, recipe.parameters)
            path: FieldPath = () if name is None else ("modules", name)
            if body.models:
                spans = [self._whole(body.models, (*path, "models"), ({}, *scopes))]
            else:
                spans = list(self._stacked(body.slices, name, (*path, "slices"), scopes))
            if spans:
                sections.append(Section(name, tuple(spans)))
        return tuple(sections)

    def _whole(self, entries: Sequence[ModelEntry], path: FieldPath, scopes: tuple[Parameters, ...]) -> Span:
        members = [
            Member(self._sources[entry.model].index, 0, entry.parameters, (*path, index))
            for index, entry in enumerate(entries)
        ]
        base = self._recipe.base_model
        named = any(base in rule.sources for rule in self._recipe.methods)
        counts = named or any(m.base is not BaseUse.UNUSED or averaged_in(m, scopes) for m in self._chosen)
        listed = {member.source for member in members}
        if base is not None and counts and self._sources[base].index not in listed:
            members.append(Member(self._sources[base].index, 0, {}, UNLISTED))
        return self._span(members, base, num_layers=None, first_output=0, scopes=scopes, path=path)

    def _stacked(
        self,
        slices: Sequence[OutputSlice],
        module: str | None,
        path: FieldPath,
        scopes: tuple[Parameters, ...],
    ) -> Iterator[Span]:
        first_output = 0
        for position, piece in enumerate(slices):
            place: FieldPath = (*path, position)
            problems = list(self._misfits(piece, slices, place, module))
            self.problems += problems
            if problems:
                continue
            start, stop = piece.sources[0].layer_range
            members = [
                Member(self._sources[e.model].index, e.layer_range[0], e.parameters, (*place, "sources", n))
                for n, e in enumerate(piece.sources)
            ]
            yield self._span(
                members,
                piece.base_model or self._recipe.base_model,
                num_layers=stop - start,
                first_output=first_output,
                scopes=(piece.parameters, *scopes),
                path=place,
            )
            first_output += stop - start

    def _misfits(
        self, piece: OutputSlice, slices: Sequence[OutputSlice], place: FieldPath, module: str | None
    ) -> Iterator[Problem]:
        entries = piece.sources
        for index, entry in enumerate(entries):
            where = self._recipe.where(*place, "sources", index, "layer_range")
            source, (start, stop) = self._sources[entry.model], entry.layer_range
            stack = source.layer_stack(module)
            if stack is None:
                what = (
                    f"{source.name} has no one stack of decoder layers that its config counts, so layers "
                    f"[{start}, {stop}) of it cannot be taken."
                )
                remedy = "Merge whole models with 'models', or name its parts with 'modules'."
                yield Problem(where, what, remedy)
            elif stop > stack.num_layers:
                has = f"{source.name} has {stack.num_layers} layers"
                what = f"{has}; layer_range [{start}, {stop}] does not fit."
                yield Problem(where, what, f"Use a range within [0, {stack.num_layers}].")
        lengths = [stop - start for start, stop in (entry.layer_range for entry in entries)]
        if len(set(lengths)) > 1:
            yield Problem(
                self._recipe.where(*place, "sources"),
                f"the sources of this slice span {', '.join(map(str, lengths))} layers; the sources of one "
                "slice are merged layer by layer, so they must span the same number of layers.",
                f"To merge them, give each a range of {min(lengths)} layers. To stack them one after another "
                "(merge_method: passthrough), put each range in a slice of its own:\n"
                + _stacked_yaml(slices),
            )

    def _span(
        self,
        members: Sequence[Member],
        base: ModelReference | None,
        *,
        num_layers: int | None,
        first_output: int,
        scopes: tuple[Parameters, ...],
        path: FieldPath,
    ) -> Span:
        index = self._sources[base].index if base is not None else None
        base_member = next((member for member in members if member.source == index), None)
        lead = base_member or members[0]
        if num_layers is None and base_member is None and index is not None:
            lead = Member(index, 0, {}, UNLISTED)
        return Span(tuple(members), base_member, base, lead, num_layers, first_output, scopes, path)


def averaged_in(method: Method, scopes: Sequence[Parameters]) -> bool:
    """Whether an unlisted base counts as one more source, as in mergekit: it has what sources need.

    A method whose sources need nothing (karcher) counts it always, unless it leaves it (regmean)."""
    if all(parameter.scope == "global" for parameter in method.parameters):
        return method.base is BaseUse.UNUSED and not method.leaves_base
    required = [p.name for p in method.parameters if p.required and p.scope == "source"]
    return bool(required) and all(any(name in scope for scope in scopes) for name in required)


def _stacked_yaml(slices: Sequence[OutputSlice]) -> str:
    written: list[dict[str, Any]] = []
    for piece in slices:
        plain = piece.model_dump(mode="json", exclude_defaults=True)
        lengths = {entry.layer_range[1] - entry.layer_range[0] for entry in piece.sources}
        apart = [[entry] for entry in plain["sources"]] if len(lengths) > 1 else [plain["sources"]]
        # Copies, because YAML writes what is shared by reference.
        written += [{**copy.deepcopy(plain), "sources": sources} for sources in apart]
    return yaml.safe_dump(
        {"slices": written}, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000
    )


End = Literal["before", "after"]
Where = int | End
_AFTER = frozenset({"score", "cls", "project_out", "qa_outputs", "vocab_transform"})
_AFTER_ENDINGS = ("_head", "classifier", "pooler", "predictions")


class PlacedTensors:
    def __init__(self, source: Source, logical: LogicalTensors, module: str | None) -> None:
        self.source = source
        self.stack: Stack | None = source.layer_stack(module)
        self._logical = logical
        self._module = module
        self._module_of = module_finder(source.checkpoint.config, source.stacks)
        self._towers = _towers(source.stacks, self.stack)

    @property
    def prefix(self) -> str:
        """Path before the layer number; "" without a unique stack."""
        return self.stack.prefix if self.stack is not None else ""

    @property
    def num_layers(self) -> int:
        return self.stack.num_layers if self.stack is not None else 0

    def contains(self, name: str) -> bool:
        return self._module is None or self._module_of(name) == self._module

    def names(self) -> list[str]:
        return [name for name in self.source.checkpoint.tensors if self.contains(name)]

    @cached_property
    def by_place(self) -> Mapping[Where, Sequence[str]]:
        names: dict[Where, list[str]] = {}
        for name in self.names():
            names.setdefault(self.where(name), []).append(name)
        return names

    def where(self, name: str) -> Where:
        """Other stacks (a vision or audio tower, an encoder) count as before the layers."""
        info = self._logical.infos[name]
        stack = self.stack
        if stack is not None and info.layer is not None and info.stack == stack.prefix:
            return info.layer if info.layer < stack.num_layers else "after"
        if info.role is Role.MTP:
            return "after"
        in_tower = (name[: end + 1] in self._towers for end, letter in enumerate(name) if letter == ".")
        if info.role is Role.VISION or any(in_tower):
            return "before"
        return "after" if info.role is Role.HEAD or _is_behind(name, info.role) else "before"

    def canonical_names(self, layer: int) -> frozenset[str]:
        """Of the logical tensors of a layer, within it."""
        names = filter(self.is_compared, self.by_place.get(layer, ()))
        members = (member for name in names for member in self._logical.member_names(name))
        return frozenset(member.partition(f".{layer}.")[2] for member in members)

    def is_compared(self, name: str) -> bool:
        """False for buffers, which loaders recompute, and for what predicts further tokens."""
        info = self._logical.infos[name]
        return info.part is not Role.BUFFER and info.role is not Role.MTP


def counterpart(name: str, own: PlacedTensors, other: PlacedTensors) -> str:
    """Name in another source of a tensor outside the layers; its own name where that is unknown.

    Head and embedding correspond by role, others by name, with or without the prefix of the layers' name in
    either source (``model.`` or nothing)."""
    mine, theirs = own.source.pair, other.source.pair
    if mine is not None and theirs is not None and name in (mine.head, mine.embedding):
        return theirs.head if name == mine.head else theirs.embedding
    tensors = other.source.checkpoint.tensors
    if name in tensors or own.prefix == other.prefix:
        return name
    old, new = _roots(own.prefix, other.prefix)
    moved = f"{new}{name.removeprefix(old)}"
    return moved if name.startswith(old) and moved in tensors else name


def _roots(one: str, other: str) -> tuple[str, str]:
    """How the beginnings of two paths differ: ``model.`` and nothing for ``model.layers`` and ``layers``."""
    mine, theirs = one.split("."), other.split(".")
    while mine and theirs and mine[-1] == theirs[-1]:
        mine, theirs = mine[:-1], theirs[:-1]
    return "".join(f"{word}." for word in mine), "".join(f"{word}." for word in theirs)


def _towers(stacks: Sequence[Stack], stack: Stack | None) -> frozenset[str]:
    """Prefixes of the other stacks: their paths up to where they part from the stack's."""
    own = stack.prefix.split(".") if stack is not None else []
    prefixes = []
    for other in stacks:
        path = other.prefix.split(".")
        parted = next((i for i, word in enumerate(path) if i >= len(own) or word != own[i]), None)
        if other != stack and parted is not None and other.prefix:
            prefixes.append("".join(f"{word}." for word in path[: parted + 1]))
    return frozenset(prefixes)


def _is_behind(name: str, role: Role) -> bool:
    path = name.split(".")
    if any(word in _AFTER or word.endswith(_AFTER_ENDINGS) for word in path):
        return True
    # LFM2 calls its last norm ``embedding_norm``.
    return role is Role.NORM and not any("embed" in word and word != "embedding_norm" for word in path)


class Aligned(NamedTuple):
    output: str
    span: Span
    lead: str
    names: tuple[str, ...]
    t: float
    """Layer position in the span, in [0, 1]; 0 outside layers."""
    layer: int | None = None
    """Output layer; None outside layers."""
    depth: float = 0.0
    """Position of the layer in the whole stack, in [0, 1]; 0 outside layers."""
    alias: str = ""
    """For a head that is the embedding in every member: the embedding's output name, which selects settings
    and random seeds."""
    copied: bool = False


class Aligner:
    """Aligns the sections of one recipe with the sources' tensors; ``donor`` gives the modules not named."""

    def __init__(
        self,
        sections: Sequence[Section],
        sources: Sequence[Source],
        logical: Sequence[LogicalTensors],
        *,
        donor: int,
    ) -> None:
        self._sections = sections
        self._sources = sources
        self._logical = logical
        self._donor = donor
        pairs = [(section, source.index) for section in sections for source in sources]
        self.placed = {
            (s.module, index): PlacedTensors(sources[index], logical[index], s.module) for s, index in pairs
        }
        self._taken = {(s.module, index): _taken(s, index) for s, index in pairs}

    def outputs(self) -> Iterator[Aligned]:
        for section in self._sections:
            if section.is_whole:
                yield from self._whole(section, section.spans[0])
            else:
                yield from self._stacked(section)
        yield from self._unnamed_modules()

    def expects(self, source: int, name: str) -> bool:
        """Whether the recipe's spans use this tensor of this source, so that leaving it out is a loss."""
        keys = [(section.is_whole, (section.module, source)) for section in self._sections]
        return any(
            (None if is_whole else self.placed[key].where(name)) in self._taken[key]
            and self.placed[key].contains(name)
            for is_whole, key in keys
        )

    def _whole(self, section: Section, span: Span) -> Iterator[Aligned]:
        source = self._sources[span.lead.source]
        lengths = {stack.prefix: stack.num_layers for stack in source.stacks}
        for name in self.placed[section.module, span.lead.source].names():
            info = self._logical[span.lead.source].infos[name]
            length = lengths.get(info.stack, 0)
            inside = info.layer is not None and info.layer < length
            t = _position(info.layer, length) if inside and info.layer is not None else 0.0
            layer = info.layer if inside else None
            yield Aligned(name, span, name, (name,) * len(span.members), t, layer, t)

    def _stacked(self, section: Section) -> Iterator[Aligned]:
        total = sum(span.num_layers or 0 for span in section.spans)
        first, last = section.spans[0], section.spans[-1]
        for name in self._at(section, first, "before"):
            yield self._outside(section, first, name, total=total)
        for span in section.spans:
            for offset in range(span.num_layers or 0):
                for name in self._at(section, span, span.lead.first_layer + offset):
                    yield self._layer(section, span, name, offset, total=total)
        for name in self._at(section, last, "after"):
            yield self._outside(section, last, name, total=total)

    def _at(self, section: Section, span: Span, where: Where) -> Sequence[str]:
        return self.placed[section.module, span.lead.source].by_place.get(where, ())

    def _layer(self, section: Section, span: Span, name: str, offset: int, *, total: int) -> Aligned:
        names = tuple(
            self._renamed(section, span.lead, member.source, name, member.first_layer + offset)
            for member in span.members
        )
        output = self._renamed(section, span.lead, _first(section), name, span.first_output + offset)
        number = span.first_output + offset
        t, depth = _position(offset, span.num_layers or 0), _position(number, total)
        return Aligned(output, span, name, names, t, number, depth)

    def _outside(self, section: Section, span: Span, name: str, *, total: int) -> Aligned:
        """A tensor outside the layers; an MTP layer keeps its distance from the last layer."""
        own = self.placed[section.module, span.lead.source]
        info = self._logical[span.lead.source].infos[name]
        if own.stack is None or info.layer is None or info.stack != own.prefix:
            members = [self.placed[section.module, member.source] for member in span.members]
            output = counterpart(name, own, self.placed[section.module, _first(section)])
            return Aligned(output, span, name, tuple(counterpart(name, own, each) for each in members), 0.0)
        beyond = info.layer - own.num_layers
        lengths = [(m.source, self.placed[section.module, m.source].num_layers) for m in span.members]
        names = tuple(
            self._renamed(section, span.lead, source, name, length + beyond) for source, length in lengths
        )
        output = self._renamed(section, span.lead, _first(section), name, total + beyond)
        return Aligned(output, span, name, names, 0.0)

    def _renamed(self, section: Section, lead: Member, source: int, name: str, layer: int) -> str:
        own = self.placed[section.module, lead.source].prefix
        theirs = self.placed[section.module, source].prefix
        renamed = rename_layer(name, own, layer)
        if theirs == own:
            return renamed
        inside = renamed.removeprefix(f"{own}.") if own else renamed
        return f"{theirs}.{inside}" if theirs else inside

    def _unnamed_modules(self) -> Iterator[Aligned]:
        named = {section.module for section in self._sections}
        lead = Member(self._donor, 0, {}, ("modules",))
        copied = Span((lead,), None, None, lead, None, 0, (), ("modules",))
        for name, module in modules_of(self._sources[self._donor]).items() if None not in named else ():
            if module not in named:
                yield Aligned(name, copied, name, (name,), 0.0, copied=True)


def modules_of(source: Source) -> Mapping[str, str]:
    find = module_finder(source.checkpoint.config, source.stacks)
    return {name: find(name) for name in source.checkpoint.tensors}


def _taken(section: Section, source: int) -> frozenset[Where | None]:
    mine = [[member for member in span.members if member.source == source] for span in section.spans]
    if section.is_whole:
        return frozenset([None]) if mine[0] else frozenset()
    taken: set[Where | None] = {
        member.first_layer + offset
        for span, members in zip(section.spans, mine, strict=True)
        for member in members
        for offset in range(span.num_layers or 0)
    }
    if mine[0]:
        taken.add("before")
    if mine[-1]:
        taken.add("after")
    return frozenset(taken)


def _first(section: Section) -> int:
    return section.spans[0].lead.source


def _position(layer: int, num_layers: int) -> float:
    return layer / (num_layers - 1) if num_layers > 1 else 1.0


def output_subject(aligned: Aligned, logical: Sequence[LogicalTensors]) -> Subject:
    info = logical[aligned.span.lead.source].infos[aligned.lead]
    return Subject(aligned.alias or aligned.output, frozenset((info.role, info.part)), aligned.layer)


def output_subjects(aligned: Aligned, logical: Sequence[LogicalTensors]) -> tuple[Subject, ...]:
    """The logical tensors of an output as selectors see them, with their names in other layouts.

    In the order of the lead's blocks; a tensor that is not fused is one."""
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
    info = logical[member.source].info(name)
    number = _layer_text(name)
    renumbered = (each.replace(_layer_text(each), number, 1) if number else each for each in aliases)
    return Subject(name, frozenset((info.role, info.part)), info.layer, tuple(renumbered))


def moved(aligned: Aligned, logical: str, name: str) -> str:
    if name == aligned.lead:
        return logical
    return logical.replace(_layer_text(aligned.lead), _layer_text(name), 1)


def output_logical(aligned: Aligned, logical: str) -> str:
    """Name that seeds randomness: the output's, so that a layer used twice draws twice."""
    if aligned.alias:
        return aligned.alias
    return moved(aligned, logical, aligned.output)


def _layer_text(name: str) -> str:
    number = next((piece for piece in name.split(".") if piece.isdigit()), None)
    return f".{number}." if number is not None else ""
