"""Which tensors meet: every output tensor with its name in each member of its span.

Driven by the tensors on disk: the names of an output are those of the span's lead checkpoint, renumbered when
layers are stacked. Nothing is looked up in a list of known architectures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raymerge.architectures import Role, Stack, TensorInfo, module_of, rename_layer
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.sources import Source
from raymerge.planner.spans import Member, Section, Span

_Where = int | Literal["before", "after"]
# A layer number of a section's stack, or the end of the model that a tensor beside the layers belongs to.


@dataclass(frozen=True, slots=True)
class Aligned:
    """One output tensor before its expression is made."""

    output: str
    """Output name."""
    span: Span
    """The span it belongs to."""
    lead: str
    """Its name in the lead checkpoint."""
    names: tuple[str, ...]
    """Its name in each of ``span.everyone()``, whether stored there or not."""
    t: float
    """Layer position in [0, 1]; 0 outside layers."""
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
        self._stacks = {(s.module, index): sources[index].layer_stack(s.module) for s, index in pairs}
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
        info = self._logical[source].infos[name]
        for section in self._sections:
            key = section.module, source
            where = None if section.is_whole else self._where(info, self._stacks[key])
            if where in self._taken[key] and self._in_module(section, source, name):
                return True
        return False

    def _in_module(self, section: Section, source: int, name: str) -> bool:
        if section.module is None:
            return True
        opened = self._sources[source]
        return module_of(name, opened.checkpoint.config, opened.stacks) == section.module

    def _names(self, section: Section, lead: Member) -> list[str]:
        names = self._sources[lead.source].checkpoint.tensors
        return [name for name in names if self._in_module(section, lead.source, name)]

    def _whole(self, section: Section, span: Span) -> Iterator[Aligned]:
        source = self._sources[span.lead.source]
        lengths = {stack.prefix: stack.num_layers for stack in source.stacks}
        for name in self._names(section, span.lead):
            info = self._logical[span.lead.source].infos[name]
            length = lengths.get(info.stack, 0)
            inside = info.layer is not None and info.layer < length
            t = _position(info.layer, length) if inside and info.layer is not None else 0.0
            yield Aligned(name, span, name, (name,) * len(span.everyone()), t)

    def _stacked(self, section: Section) -> Iterator[Aligned]:
        """The tensors before the layers, span by span those of each layer, and those after the layers."""
        found: dict[int, Mapping[_Where, Sequence[str]]] = {}
        total = sum(span.num_layers or 0 for span in section.spans)
        first, last = section.spans[0], section.spans[-1]
        for span in section.spans:
            if span.lead.source not in found:
                found[span.lead.source] = self._by_place(section, span.lead)
        for name in found[first.lead.source].get("before", ()):
            yield self._outside(section, first, name, total=total)
        for span in section.spans:
            for offset in range(span.num_layers or 0):
                for name in found[span.lead.source].get(span.lead.first_layer + offset, ()):
                    yield self._layer(section, span, name, offset)
        for name in found[last.lead.source].get("after", ()):
            yield self._outside(section, last, name, total=total)

    def _by_place(self, section: Section, lead: Member) -> Mapping[_Where, Sequence[str]]:
        found: dict[_Where, list[str]] = {}
        stack = self._stacks[section.module, lead.source]
        for name in self._names(section, lead):
            found.setdefault(self._where(self._logical[lead.source].infos[name], stack), []).append(name)
        return found

    def _layer(self, section: Section, span: Span, name: str, offset: int) -> Aligned:
        names = tuple(
            self._renamed(section, span.lead, member, name, member.first_layer + offset)
            for member in span.everyone()
        )
        prefix = self._prefix(section, span.lead.source)
        output = rename_layer(name, prefix, span.first_output + offset)
        return Aligned(output, span, name, names, _position(offset, span.num_layers or 0))

    def _outside(self, section: Section, span: Span, name: str, *, total: int) -> Aligned:
        """A tensor beside the layers; a multi-token-prediction layer keeps its distance from the last one."""
        stack = self._stacks[section.module, span.lead.source]
        info = self._logical[span.lead.source].infos[name]
        if stack is None or info.layer is None or info.stack != stack.prefix:
            return Aligned(name, span, name, (name,) * len(span.everyone()), 0.0)
        beyond = info.layer - stack.num_layers
        names = []
        for member in span.everyone():
            theirs = self._stacks[section.module, member.source]
            own = (theirs.num_layers if theirs is not None else 0) + beyond
            names.append(self._renamed(section, span.lead, member, name, own))
        return Aligned(rename_layer(name, stack.prefix, total + beyond), span, name, tuple(names), 0.0)

    def _renamed(self, section: Section, lead: Member, member: Member, name: str, layer: int) -> str:
        own, theirs = self._prefix(section, lead.source), self._prefix(section, member.source)
        renamed = rename_layer(name, own, layer)
        return theirs + renamed.removeprefix(own) if theirs != own else renamed

    def _prefix(self, section: Section, source: int) -> str:
        stack = self._stacks[section.module, source]
        return stack.prefix if stack is not None else ""

    def _where(self, info: TensorInfo, stack: Stack | None) -> _Where:
        if stack is not None and info.layer is not None and info.stack == stack.prefix:
            return info.layer if info.layer < stack.num_layers else "after"
        return "after" if info.role in (Role.HEAD, Role.NORM, Role.MTP) else "before"

    def _unnamed_modules(self) -> Iterator[Aligned]:
        named = {section.module for section in self._sections}
        if None in named:
            return
        lead = Member(self._donor, 0, {}, ("modules",))
        copied = Span((lead,), None, lead, None, 0, (), ("modules",))
        for name, module in modules_of(self._sources[self._donor]).items():
            if module not in named:
                yield Aligned(name, copied, name, (name,), 0.0, copied=True)


def modules_of(source: Source) -> Mapping[str, str]:
    """Module of every tensor of a source."""
    checkpoint = source.checkpoint
    return {name: module_of(name, checkpoint.config, source.stacks) for name in checkpoint.tensors}


def _taken(section: Section, source: int) -> frozenset[_Where | None]:
    """Where in a source the section's spans take tensors; None stands for everywhere."""
    mine = [[member for member in span.everyone() if member.source == source] for span in section.spans]
    if section.is_whole:
        return frozenset([None]) if mine[0] else frozenset()
    taken: set[_Where | None] = {
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


def _position(layer: int, num_layers: int) -> float:
    return layer / (num_layers - 1) if num_layers > 1 else 1.0
