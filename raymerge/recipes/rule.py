"""The rules of ``methods``: another method, other sources or other settings for some tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import PlainSerializer

from raymerge.documents.entry import by
from raymerge.documents.faults import Fault
from raymerge.recipes.entry import Entry, Parameters, Reference, Text
from raymerge.recipes.selector import SELECTOR_KEYS, Selector, plain_layers, read_layers, read_roles

_CHANGES = ("merge_method", "sources", "parameters")


class MethodRule(Entry):
    """How the tensors that its selector speaks of are made, where that differs from the recipe's own way."""

    shape: ClassVar[str] = "a map like {role: attention, merge_method: slerp}"

    filter: Text | None = None
    """A plain part of the output tensor's name."""
    glob: Text | None = None
    """A pattern of its whole name."""
    role: Annotated[tuple[str, ...], by(read_roles), PlainSerializer(list)] = ()
    """Roles, one of which it has."""
    layers: Annotated[tuple[tuple[int, int], ...], by(read_layers), PlainSerializer(plain_layers)] = ()
    """Ranges of layers, both ends included, in one of which it lies."""
    merge_method: Text | None = None
    """Name of the method; None for the recipe's own."""
    sources: tuple[Reference, ...] = ()
    """Which of the models take part; empty for all of them."""
    parameters: Parameters = {}
    """Settings that hold for these tensors, before all others."""

    @property
    def selector(self) -> Selector:
        """Which tensors the rule speaks of."""
        return Selector(self.filter, self.glob, self.role, self.layers)

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """It speaks of some tensors, and says something of them."""
        if all(data.get(key) is None for key in SELECTOR_KEYS):
            remedy = f"Add one of: {', '.join(SELECTOR_KEYS)}."
            yield Fault((), "the rule does not say which tensors it is for.", remedy)
        if not any(data.get(key) for key in _CHANGES):
            yield Fault((), "the rule changes nothing.", f"Add one of: {', '.join(_CHANGES)}.")
        elif data.get("sources") in ([], ()):
            yield Fault(("sources",), "the list is empty.", "Name models, or remove it: all take part then.")
