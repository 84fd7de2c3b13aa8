"""Where in a model a tensor stands: in a layer of the stack that slices count, before it or after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from raymerge.architectures import Role, Stack, module_finder
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.logical import LogicalTensors

End = Literal["before", "after"]
"""An end of the model, beside the layers."""
Where = int | End
"""A layer number of the stack, or the end that a tensor beside the layers belongs to."""

_AFTER = frozenset({"score", "cls", "project_out", "qa_outputs", "vocab_transform"})
_AFTER_ENDINGS = ("_head", "classifier", "pooler", "predictions")


class PlacedTensors:
    """The tensors of one source that belong to one module, by their place."""

    def __init__(self, source: Source, logical: LogicalTensors, module: str | None) -> None:
        self.source = source
        self.stack: Stack | None = source.layer_stack(module)
        self._logical = logical
        self._module = module
        self._module_of = module_finder(source.checkpoint.config, source.stacks)
        self._towers = _towers(source.stacks, self.stack)
        self._found: Mapping[Where, Sequence[str]] | None = None

    @property
    def prefix(self) -> str:
        """Path before the layer number; "" where no one stack is counted."""
        return self.stack.prefix if self.stack is not None else ""

    @property
    def num_layers(self) -> int:
        """Layers of the stack."""
        return self.stack.num_layers if self.stack is not None else 0

    def contains(self, name: str) -> bool:
        """Whether a tensor of the source belongs to the module."""
        return self._module is None or self._module_of(name) == self._module

    def names(self) -> list[str]:
        """The module's tensors in the checkpoint's order."""
        return [name for name in self.source.checkpoint.tensors if self.contains(name)]

    def by_place(self) -> Mapping[Where, Sequence[str]]:
        """The module's tensors at each place."""
        if self._found is None:
            found: dict[Where, list[str]] = {}
            for name in self.names():
                found.setdefault(self.where(name), []).append(name)
            self._found = found
        return self._found

    def where(self, name: str) -> Where:
        """The place of a tensor.

        Another stack (a vision or audio tower, an encoder) stands before the layers as a whole.
        """
        info = self._logical.infos[name]
        stack = self.stack
        if stack is not None and info.layer is not None and info.stack == stack.prefix:
            return info.layer if info.layer < stack.num_layers else "after"
        if info.role is Role.MTP:
            return "after"
        if info.role is Role.VISION or self._is_in_tower(name):
            return "before"
        return "after" if info.role is Role.HEAD or _is_behind(name, info.role) else "before"

    def _is_in_tower(self, name: str) -> bool:
        return any(name[: end + 1] in self._towers for end, letter in enumerate(name) if letter == ".")

    def is_compared(self, name: str) -> bool:
        """Whether a tensor must be in every checkpoint of the architecture.

        Not so for buffers, which loaders recompute, and for what predicts further tokens.
        """
        info = self._logical.infos[name]
        return info.part is not Role.BUFFER and info.role is not Role.MTP


def counterpart(name: str, own: PlacedTensors, other: PlacedTensors) -> str:
    """What a tensor beside the layers is called in another source; its own name where that is not to be told.

    Head and embedding correspond by what they are, others by their names, with or without what stands before
    the layers' name in either source (``model.`` or nothing).
    """
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
    """How names begin that belong to the other stacks: their paths up to where they part from the stack's."""
    own = stack.prefix.split(".") if stack is not None else []
    found = []
    for other in stacks:
        path = other.prefix.split(".")
        parted = next((i for i, word in enumerate(path) if i >= len(own) or word != own[i]), None)
        if other != stack and parted is not None and other.prefix:
            found.append("".join(f"{word}." for word in path[: parted + 1]))
    return frozenset(found)


def _is_behind(name: str, role: Role) -> bool:
    path = name.split(".")
    if any(word in _AFTER or word.endswith(_AFTER_ENDINGS) for word in path):
        return True
    # LFM2 calls its last norm ``embedding_norm``.
    return role is Role.NORM and not any("embed" in word and word != "embedding_norm" for word in path)
