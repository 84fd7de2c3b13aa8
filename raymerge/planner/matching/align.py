"""Which tensors meet: every output tensor with its name in each member of its span.

Driven by the tensors on disk: the names of an output are those of the span's lead checkpoint, renumbered when
layers are stacked. Nothing is looked up in a list of known architectures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from raymerge.architectures import module_finder, rename_layer
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.layer_map import Member, Section, Span
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.matching.places import PlacedTensors, Where, counterpart


class Aligned(NamedTuple):
    """One output tensor before its expression is made."""

    output: str
    """Output name."""
    span: Span
    """The span it belongs to."""
    lead: str
    """Its name in the lead checkpoint."""
    names: tuple[str, ...]
    """Its name in each of ``span.members``, whether stored there or not."""
    t: float
    """Layer position in [0, 1]; 0 outside layers."""
    layer: int | None = None
    """Number of its output layer; None outside layers."""
    depth: float = 0.0
    """Position of that layer in the whole stack, in [0, 1]; 0 outside layers."""
    alias: str = ""
    """For a head that is the embedding in every member: the embedding's output name, by which settings and
    chance go."""
    copied: bool = False
    """Copied from the lead whatever the method: its module is not named in the recipe."""


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
        """The tensors of each section's module in each source."""
        self._taken = {(s.module, index): _taken(s, index) for s, index in pairs}

    def outputs(self) -> Iterator[Aligned]:
        """Every output tensor, once."""
        for section in self._sections:
            if section.is_whole:
                yield from self._whole(section, section.spans[0])
            else:
                yield from self._stacked(section)
        yield from self._unnamed_modules()

    def expects(self, source: int, name: str) -> bool:
        """Whether the recipe's spans take this tensor of this source, so that leaving it out is a loss."""
        for section in self._sections:
            key = section.module, source
            placed = self.placed[key]
            where = None if section.is_whole else placed.where(name)
            if where in self._taken[key] and placed.contains(name):
                return True
        return False

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
        """The tensors before the layers, span by span those of each layer, and those after the layers."""
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
        """The lead's tensors at one place."""
        return self.placed[section.module, span.lead.source].by_place().get(where, ())

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
        """A tensor beside the layers; a multi-token-prediction layer keeps its distance from the last one."""
        own = self.placed[section.module, span.lead.source]
        info = self._logical[span.lead.source].infos[name]
        if own.stack is None or info.layer is None or info.stack != own.prefix:
            members = [self.placed[section.module, member.source] for member in span.members]
            output = counterpart(name, own, self.placed[section.module, _first(section)])
            return Aligned(output, span, name, tuple(counterpart(name, own, each) for each in members), 0.0)
        beyond = info.layer - own.num_layers
        names = []
        for member in span.members:
            layer = self.placed[section.module, member.source].num_layers + beyond
            names.append(self._renamed(section, span.lead, member.source, name, layer))
        output = self._renamed(section, span.lead, _first(section), name, total + beyond)
        return Aligned(output, span, name, tuple(names), 0.0)

    def _renamed(self, section: Section, lead: Member, source: int, name: str, layer: int) -> str:
        """The lead's name of a layer's tensor as another source would call it, in another layer."""
        own = self.placed[section.module, lead.source].prefix
        theirs = self.placed[section.module, source].prefix
        renamed = rename_layer(name, own, layer)
        if theirs == own:
            return renamed
        inside = renamed.removeprefix(f"{own}.") if own else renamed
        return f"{theirs}.{inside}" if theirs else inside

    def _unnamed_modules(self) -> Iterator[Aligned]:
        named = {section.module for section in self._sections}
        if None in named:
            return
        lead = Member(self._donor, 0, {}, ("modules",))
        copied = Span((lead,), None, None, lead, None, 0, (), ("modules",))
        for name, module in modules_of(self._sources[self._donor]).items():
            if module not in named:
                yield Aligned(name, copied, name, (name,), 0.0, copied=True)


def modules_of(source: Source) -> Mapping[str, str]:
    """Module of every tensor of a source."""
    find = module_finder(source.checkpoint.config, source.stacks)
    return {name: find(name) for name in source.checkpoint.tensors}


def _taken(section: Section, source: int) -> frozenset[Where | None]:
    """Where in a source the section's spans take tensors; None stands for everywhere."""
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
    """The source whose names the section's outputs take."""
    return section.spans[0].lead.source


def _position(layer: int, num_layers: int) -> float:
    return layer / (num_layers - 1) if num_layers > 1 else 1.0
