"""From what the recipe says to spans: runs of output layers with their members.

``models`` is one span over whole models. ``slices`` is one span per output slice. ``modules`` is a list of
either for each module of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from raymerge.errors import Problem
from raymerge.methods import BaseUse, Method
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.sources import Path_
from raymerge.recipes import ModelEntry, ModelReference, ModuleEntry, OutputSlice, Recipe, Setting

Parameters = Mapping[str, Setting]

UNLISTED: Path_ = ("base_model",)
"""Place of a base that is not among the models listed."""


@dataclass(frozen=True, slots=True)
class Member:
    """One source's part in a span."""

    source: int
    """Index of the source."""
    first_layer: int
    """Source layer that becomes the span's first output layer; 0 for whole models."""
    parameters: Parameters
    """Parameters written at this entry."""
    path: Path_
    """The entry's place in the recipe."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of output layers to which the same sources give theirs."""

    members: tuple[Member, ...]
    """Everyone that a method of the recipe may take here, in recipe order; an unlisted base comes last."""
    base: Member | None
    """The base among the members."""
    base_named: ModelReference | None
    """The base that the recipe names for this span, be it among the members or not."""
    lead: Member
    """The member whose names, dtypes and layout the output takes."""
    num_layers: int | None
    """Output layers of the span; None: whole models."""
    first_output: int
    """Output number of its first layer."""
    scopes: tuple[Parameters, ...]
    """Parameters of the slice, the module and the recipe, nearest first."""
    path: Path_
    """The span's place in the recipe."""


@dataclass(frozen=True, slots=True)
class Section:
    """The spans of one module, or of the whole model."""

    module: str | None
    """Module name, or None for everything."""
    spans: tuple[Span, ...]
    """In output order."""

    @property
    def is_whole(self) -> bool:
        """Whether layers keep their numbers (``models``), rather than being stacked (``slices``)."""
        return self.spans[0].num_layers is None


class SpanBuilder:
    """Builds the sections of one recipe and collects what is wrong with them."""

    def __init__(self, recipe: Recipe, chosen: Sequence[Method], sources: Sequence[Source]) -> None:
        """
        Args:
            recipe: what is asked.
            chosen: every method that the recipe names, its ``merge_method`` first.
            sources: the recipe's models.
        """
        self.problems: list[Problem] = []
        self._recipe = recipe
        self._chosen = chosen
        self._sources = {source.reference: source for source in sources}

    def sections(self) -> tuple[Section, ...]:
        """The sections; ``problems`` holds what was wrong."""
        recipe = self._recipe
        if recipe.models:
            return self._found(None, [self._whole(recipe.models, ("models",), ({}, {}, recipe.parameters))])
        if recipe.slices:
            return self._found(None, self._stacked(recipe.slices, None, ({}, recipe.parameters)))
        return tuple(
            section for name, module in recipe.modules.items() for section in self._module(name, module)
        )

    def _module(self, name: str, module: ModuleEntry) -> tuple[Section, ...]:
        path: Path_ = ("modules", name)
        scopes = (module.parameters, self._recipe.parameters)
        if module.models:
            return self._found(name, [self._whole(module.models, (*path, "models"), ({}, *scopes))])
        return self._found(name, self._stacked(module.slices, name, scopes))

    def _found(self, module: str | None, spans: Iterable[Span]) -> tuple[Section, ...]:
        kept = tuple(spans)
        return (Section(module, kept),) if kept else ()

    def _whole(self, entries: Sequence[ModelEntry], path: Path_, scopes: tuple[Parameters, ...]) -> Span:
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
        self, slices: Sequence[OutputSlice], module: str | None, scopes: tuple[Parameters, ...]
    ) -> Iterator[Span]:
        first_output = 0
        prefix: Path_ = () if module is None else ("modules", module)
        for position, piece in enumerate(slices):
            place: Path_ = (*prefix, "slices", position)
            if not self._ranges_fit(piece, place, module):
                continue
            start, stop = piece.sources[0].layer_range
            members = [
                Member(
                    self._sources[entry.model].index,
                    entry.layer_range[0],
                    entry.parameters,
                    (*place, "sources", index),
                )
                for index, entry in enumerate(piece.sources)
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

    def _ranges_fit(self, piece: OutputSlice, place: Path_, module: str | None) -> bool:
        before = len(self.problems)
        for index, entry in enumerate(piece.sources):
            where = self._recipe.where(*place, "sources", index, "layer_range")
            source = self._sources[entry.model]
            stack = source.layer_stack(module)
            start, stop = entry.layer_range
            if stack is None:
                self._problem(
                    where,
                    f"{source.name} has no one stack of decoder layers that its config counts, "
                    f"so layers [{start}, {stop}) of it cannot be taken.",
                    "Merge whole models with 'models', or name its parts with 'modules'.",
                )
            elif stop > stack.num_layers:
                self._problem(
                    where,
                    f"{source.name} has {stack.num_layers} layers; layer_range [{start}, {stop}] "
                    "does not fit.",
                    f"Use a range within [0, {stack.num_layers}].",
                )
        lengths = [entry.layer_range[1] - entry.layer_range[0] for entry in piece.sources]
        if len(set(lengths)) > 1:
            self._unequal(place, lengths)
        return len(self.problems) == before

    def _unequal(self, place: Path_, lengths: Sequence[int]) -> None:
        self._problem(
            self._recipe.where(*place, "sources"),
            f"the sources of this slice span {', '.join(map(str, lengths))} layers; the sources of one slice "
            "are merged layer by layer, so they must span the same number of layers.",
            f"To merge them, give each a range of {min(lengths)} layers. To stack them one after another "
            "(merge_method: passthrough), put each range in a slice of its own:\n"
            + _stacked_yaml(self._slices_at(place)),
        )

    def _slices_at(self, place: Path_) -> tuple[OutputSlice, ...]:
        return self._recipe.modules[str(place[1])].slices if place[0] == "modules" else self._recipe.slices

    def _span(
        self,
        members: Sequence[Member],
        base: ModelReference | None,
        *,
        num_layers: int | None,
        first_output: int,
        scopes: tuple[Parameters, ...],
        path: Path_,
    ) -> Span:
        base_index = self._sources[base].index if base is not None else None
        base_member = next((member for member in members if member.source == base_index), None)
        lead = base_member or members[0]
        if num_layers is None and base_member is None and base_index is not None:
            lead = Member(base_index, 0, {}, UNLISTED)
        return Span(
            members=tuple(members),
            base=base_member,
            base_named=base,
            lead=lead,
            num_layers=num_layers,
            first_output=first_output,
            scopes=scopes,
            path=path,
        )

    def _problem(self, where: str, what: str, remedy: str) -> None:
        self.problems.append(Problem(where, what, remedy))


def averaged_in(method: Method, scopes: Sequence[Parameters]) -> bool:
    """Whether an unlisted base counts as one more source, as in mergekit: it has what sources need.

    A method whose sources need nothing (karcher) counts it always.
    """
    if all(parameter.scope == "global" for parameter in method.parameters):
        return method.base is BaseUse.UNUSED
    required = [p.name for p in method.parameters if p.required and p.scope == "source"]
    return bool(required) and all(any(name in scope for scope in scopes) for name in required)


def _stacked_yaml(slices: Sequence[OutputSlice]) -> str:
    """The slices with every source whose neighbours have other lengths in a slice of its own, as YAML."""
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
