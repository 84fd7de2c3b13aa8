"""Which tensors meet: every output tensor with its name in each member of its span.

Driven by the tensors on disk: the names of an output are those of the span's lead checkpoint, renumbered when
layers are stacked. Nothing is looked up in a list of known architectures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymerge.architectures import Role, Stack, TensorInfo, module_of, rename_layer
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.sources import Source
from raymerge.planner.spans import Member, Section, Span


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
    """Aligns the sections of one recipe with the sources' tensors."""

    def __init__(
        self, sections: Sequence[Section], sources: Sequence[Source], logical: Sequence[LogicalTensors]
    ) -> None:
        self._sections = sections
        self._sources = sources
        self._logical = logical

    def outputs(self) -> Iterator[Aligned]:
        """Every output tensor, once."""
        for section in self._sections:
            for position, span in enumerate(section.spans):
                if section.is_whole:
                    yield from self._whole(section, span)
                else:
                    yield from self._stacked(section, position)
        yield from self._unnamed_modules()

    def modules(self, source: int) -> Mapping[str, str]:
        """Module of every tensor of a source."""
        opened = self._sources[source]
        return {
            name: module_of(name, opened.checkpoint.config, opened.stacks) for name in opened.checkpoint.tensors
        }

    def expects(self, source: int, name: str) -> bool:
        """Whether the recipe's spans take this tensor of this source (so that leaving it out would be a loss)."""
        return any(
            self._expected_in(section, position, source, name)
            for section in self._sections
            for position in range(len(section.spans))
        )

    def _expected_in(self, section: Section, position: int, source: int, name: str) -> bool:
        span = section.spans[position]
        members = [member for member in span.everyone() if member.source == source]
        if not members or not self._in_module(section, source, name):
            return False
        if section.is_whole:
            return True
        stack = self._sources[source].layer_stack(section.module)
        where = self._where(self._logical[source].infos[name], stack)
        if isinstance(where, int):
            return any(m.first_layer <= where < m.first_layer + (span.num_layers or 0) for m in members)
        return position == (0 if where == "before" else len(section.spans) - 1)

    def _in_module(self, section: Section, source: int, name: str) -> bool:
        if section.module is None:
            return True
        opened = self._sources[source]
        return module_of(name, opened.checkpoint.config, opened.stacks) == section.module

    def _names(self, section: Section, lead: Member) -> list[str]:
        return [n for n in self._sources[lead.source].checkpoint.tensors if self._in_module(section, lead.source, n)]

    def _whole(self, section: Section, span: Span) -> Iterator[Aligned]:
        source = self._sources[span.lead.source]
        lengths = {stack.prefix: stack.num_layers for stack in source.stacks}
        for name in self._names(section, span.lead):
            info = self._logical[span.lead.source].infos[name]
            length = lengths.get(info.stack, 0) if info.layer is not None else 0
            inside = info.layer is not None and info.layer < length
            t = _position(info.layer, length) if inside and info.layer is not None else 0.0
            yield Aligned(name, span, name, (name,) * len(span.everyone()), t)

    def _stacked(self, section: Section, position: int) -> Iterator[Aligned]:
        span = section.spans[position]
        total = sum(each.num_layers or 0 for each in section.spans)
        lead = self._sources[span.lead.source]
        stack = lead.layer_stack(section.module)
        if stack is None:
            return
        for name in self._names(section, span.lead):
            info = self._logical[span.lead.source].infos[name]
            where = self._where(info, stack)
            if isinstance(where, int):
                offset = where - span.lead.first_layer
                if 0 <= offset < (span.num_layers or 0):
                    yield self._layer(section, span, name, offset)
            elif position == (0 if where == "before" else len(section.spans) - 1):
                beyond = info.layer - stack.num_layers if _in_stack(info, stack) and info.layer is not None else None
                yield self._outside(section, span, name, beyond=beyond, total=total)

    def _layer(self, section: Section, span: Span, name: str, offset: int) -> Aligned:
        names = tuple(
            self._renamed(section, span.lead, member, name, member.first_layer + offset)
            for member in span.everyone()
        )
        prefix = self._prefix(section, span.lead.source)
        output = rename_layer(name, prefix, span.first_output + offset)
        return Aligned(output, span, name, names, _position(offset, span.num_layers or 0))

    def _outside(
        self, section: Section, span: Span, name: str, *, beyond: int | None, total: int
    ) -> Aligned:
        if beyond is None:
            return Aligned(name, span, name, (name,) * len(span.everyone()), 0.0)
        names = []
        for member in span.everyone():
            stack = self._sources[member.source].layer_stack(section.module)
            own = (stack.num_layers if stack is not None else 0) + beyond
            names.append(self._renamed(section, span.lead, member, name, own))
        prefix = self._prefix(section, span.lead.source)
        return Aligned(rename_layer(name, prefix, total + beyond), span, name, tuple(names), 0.0)

    def _renamed(self, section: Section, lead: Member, member: Member, name: str, layer: int) -> str:
        own, theirs = self._prefix(section, lead.source), self._prefix(section, member.source)
        renamed = rename_layer(name, own, layer)
        return theirs + renamed.removeprefix(own) if theirs != own else renamed

    def _prefix(self, section: Section, source: int) -> str:
        stack = self._sources[source].layer_stack(section.module)
        return stack.prefix if stack is not None else ""

    def _where(self, info: TensorInfo, stack: Stack | None) -> int | str:
        """A layer number of the stack, or "before" or "after" the layers."""
        if stack is not None and _in_stack(info, stack) and info.layer is not None:
            return info.layer if info.layer < stack.num_layers else "after"
        return "after" if info.role in (Role.HEAD, Role.NORM, Role.MTP) else "before"

    def _unnamed_modules(self) -> Iterator[Aligned]:
        named = {section.module for section in self._sections}
        if None in named or not self._sections:
            return
        span = self._sections[0].spans[0]
        lead = Member(span.lead.source, 0, {}, ("modules",))
        copied = Span((lead,), None, lead, None, 0, (), ("modules",))
        for name, module in self.modules(lead.source).items():
            if module not in named:
                yield Aligned(name, copied, name, (name,), 0.0, copied=True)


def _in_stack(info: TensorInfo, stack: Stack) -> bool:
    return info.layer is not None and info.stack == stack.prefix


def _position(layer: int, num_layers: int) -> float:
    return layer / (num_layers - 1) if num_layers > 1 else 1.0
