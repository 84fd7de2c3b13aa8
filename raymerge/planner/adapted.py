"""An adapter laid over a model: which of its factors changes which of the model's tensors.

An adapter names modules as the program called them that trained it, and checkpoints of one model are saved
with different beginnings (``model.``, ``language_model.model.``, nothing). A module is found by its whole
name, or else by what stands from the layer's word on, where that leaves one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raymerge.architectures import logical_name
from raymerge.checkpoints.adapters import Adapter, Factor
from raymerge.checkpoints.header import StoredTensor
from raymerge.errors import Problem
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.sources import Source


class LaidOver:
    """The adapter of one source, matched with the source's tensors."""

    def __init__(self, source: Source, adapter: Adapter, store: int, logical: LogicalTensors) -> None:
        """
        Args:
            source: the model.
            adapter: what is laid over it.
            store: index of the adapter among what plans read from.
            logical: the model's logical tensors.
        """
        self.adapter = adapter
        self.store = store
        self._source = source
        self._logical = logical
        self._names = _Names(logical)
        self._factors: dict[str, Factor] = {}
        self._replaced: dict[str, StoredTensor] = {}
        self._changes: dict[str, str] = {}
        self._strays: list[str] = []
        self._misfits: list[Problem] = []
        self._match()

    def factor(self, logical: str) -> Factor | None:
        """What is added to a logical tensor."""
        return self._factors.get(logical)

    def replacement(self, name: str) -> StoredTensor | None:
        """What takes the place of a stored tensor."""
        return self._replaced.get(name)

    def touches(self, name: str) -> bool:
        """Whether a stored tensor, or a logical tensor in it, is changed by a factor."""
        blocks = self._logical.blocks(name) or ()
        return any(logical in self._factors for block in blocks for logical, _ in block.members)

    def changed_by(self, tensor: str) -> str | None:
        """The stored tensor that one of the adapter's tensors changes; None for one with a problem."""
        return self._changes.get(tensor)

    def changes(self) -> tuple[tuple[str, ...], ...]:
        """The adapter's tensors, those that change one tensor of the model together."""
        factors = [tuple(t.name for t in tensors_of(factor)) for factor in self.adapter.factors.values()]
        return (*factors, *((tensor.name,) for tensor in self.adapter.replaced.values()))

    def problems(self) -> Iterator[Problem]:
        """What the model has no tensor for, and what cannot be carried out."""
        where = self.adapter.name
        if self._strays:
            listed = ", ".join(self._strays[:3]) + (", ..." if len(self._strays) > 3 else "")
            applied = len(self._factors) + len(self._replaced)
            yield Problem(
                where,
                f"{applied} of its {applied + len(self._strays)} changes have a tensor to go to in "
                f"{self._source.checkpoint.name}; these have none: {listed}.",
                "Name the model that the adapter was trained on.",
            )
        yield from self._misfits

    def _unfit(self, logical: str, factor: Factor) -> Iterator[Problem]:
        place = self._logical.find(logical)
        shape = self._shape(logical)
        if shape not in (factor.weight_shape, factor.weight_shape[::-1]):
            yield Problem(
                f"{self.adapter.name}: {factor.module}",
                f"its product is {list(factor.weight_shape)}, but {logical} of the model is {list(shape)}.",
                "Name the model that the adapter was trained on.",
            )
        elif factor.magnitude is not None and is_transposed(factor, shape):
            yield Problem(
                f"{self.adapter.name}: {factor.module}",
                "it is a DoRA adapter on a weight that is stored transposed, which raymerge does not apply.",
                "Merge the adapter into its model with peft and name the result.",
            )
        if factor.up_bias is not None:
            yield Problem(
                f"{self.adapter.name}: {factor.module}",
                "it adds to the module's bias (lora_bias), which raymerge does not apply.",
                "Merge the adapter into its model with peft and name the result.",
            )
        if place is not None and not place.tensor.dtype.is_mergeable:
            yield Problem(
                f"{self.adapter.name}: {factor.module}",
                f"{place.tensor.name} is stored as {place.tensor.dtype.value} codes, to which nothing can be "
                "added.",
                "Name a copy of the model in bfloat16.",
            )

    def _shape(self, logical: str) -> tuple[int, ...]:
        place = self._logical.find(logical)
        replaced = self._replaced.get(place.tensor.name) if place is not None else None
        if replaced is not None:
            return replaced.shape
        return place.shape if place is not None else ()

    def _match(self) -> None:
        rules = self._source.rules
        for name, tensor in self.adapter.replaced.items():
            found = self._names.find(logical_name(name, rules))
            if found is None:
                self._strays.append(name)
            else:
                stored = self._stored(found)
                self._replaced[stored] = tensor
                self._changes[tensor.name] = stored
        for module, factor in self.adapter.factors.items():
            found = self._names.find(logical_name(f"{module}.weight", rules))
            if found is None or found in self._factors:
                self._strays.append(module)
            elif problems := list(self._unfit(found, factor)):
                self._misfits += problems
            else:
                self._factors[found] = factor
                self._changes.update((tensor.name, self._stored(found)) for tensor in tensors_of(factor))

    def _stored(self, logical: str) -> str:
        place = self._logical.find(logical)
        return place.tensor.name if place is not None else logical


def tensors_of(factor: Factor) -> tuple[StoredTensor, ...]:
    """Every stored tensor that a factor is made of."""
    parts = (factor.down, factor.up, factor.magnitude, factor.up_bias)
    return tuple(tensor for tensor in parts if tensor is not None)


def is_transposed(factor: Factor, shape: tuple[int, ...]) -> bool:
    """Whether ``up @ down`` is the transpose of what is added to a weight of this shape.

    The adapter's word counts only for square weights: elsewhere the shape tells.
    """
    declared = factor.transposed or factor.kind == "embedding"
    return declared if factor.weight_shape == shape else not declared


class _Names:
    """Logical names, to be found by their end."""

    def __init__(self, logical: LogicalTensors) -> None:
        self._whole = logical.names()
        self._by_tail: Mapping[str, list[str]] | None = None

    def find(self, name: str) -> str | None:
        """The one logical tensor of that name, or the one whose name ends alike."""
        if name in self._whole:
            return name
        if self._by_tail is None:
            tails: dict[str, list[str]] = {}
            for each in self._whole:
                tails.setdefault(_tail(each), []).append(each)
            self._by_tail = tails
        found = self._by_tail.get(_tail(name), [])
        if len(found) > 1:
            # Several stacks (text, vision) have layers of one build: the words before them must agree best.
            words = set(name.split("."))
            shared = [len(words & set(each.split("."))) for each in found]
            found = [each for each, count in zip(found, shared, strict=True) if count == max(shared)]
        return found[0] if len(found) == 1 else None


def _tail(name: str) -> str:
    """The name from the word before its first number on; without a number its last two words."""
    path = name.split(".")
    number = next((place for place, word in enumerate(path) if word.isdigit()), None)
    return ".".join(path[max(0, number - 1) :] if number is not None else path[-2:])
