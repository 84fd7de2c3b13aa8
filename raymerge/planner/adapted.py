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
            if self._is_tied_head(name, found):
                self._misfits.append(self._tied_head(name))
            elif found is None:
                self._strays.append(name)
            else:
                stored = self._stored(found)
                self._replaced[stored] = tensor
                self._changes[tensor.name] = stored
        for module, factor in self.adapter.factors.items():
            found = self._names.find(logical_name(f"{module}.weight", rules))
            if self._is_tied_head(f"{module}.weight", found):
                self._misfits.append(self._tied_head(module))
            elif found is None or found in self._factors:
                self._strays.append(module)
            elif problems := list(self._unfit(found, factor)):
                self._misfits += problems
            else:
                self._factors[found] = factor
                self._changes.update((tensor.name, self._stored(found)) for tensor in tensors_of(factor))

    def _is_tied_head(self, name: str, found: str | None) -> bool:
        """Whether an adapter's name is that of a head which the model has only as its embedding."""
        pair = self._source.pair
        if pair is None or pair.declared is False:
            return False
        if found is not None:
            return self._source.stored_head_is_embedding and self._stored(found) == pair.head
        return _parted(name)[1] == _parted(pair.head)[1] and pair.head not in self._source.checkpoint.tensors

    def _tied_head(self, name: str) -> Problem:
        return Problem(
            f"{self.adapter.name}: {name}",
            f"it changes the head, which {self._source.checkpoint.name} has only as its embedding: by itself "
            "it would not stay so.",
            "Save the model with a head of its own (tie_word_embeddings false), and name that one.",
        )

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
        self._starts: dict[str, dict[str, None]] | None = None
        self._nearest: dict[tuple[str, str], tuple[str, ...]] = {}

    def find(self, name: str) -> str | None:
        """The one logical tensor of that name, or the one whose name ends alike and begins most alike."""
        if name in self._whole:
            return name
        start, end, stack = _parted(name)
        # Several stacks (text, vision) have layers of one build. The words before them choose one of them for
        # all layers: else a layer too many for the text would be found in the pictures' tower.
        found = [near + end for near in self._near(start, stack) if near + end in self._whole]
        return found[0] if len(found) == 1 else None

    def _near(self, start: str, stack: str) -> tuple[str, ...]:
        """The beginnings of names of a stack that share most words with ``start``."""
        if (start, stack) not in self._nearest:
            starts, words = self._by_stack().get(stack, {}), set(start.split("."))
            shared = {each: len(words & set(each.split("."))) for each in starts}
            most = max(shared.values(), default=0)
            self._nearest[start, stack] = tuple(each for each in starts if shared[each] == most)
        return self._nearest[start, stack]

    def _by_stack(self) -> Mapping[str, Mapping[str, None]]:
        if self._starts is None:
            self._starts = {}
            for name in self._whole:
                start, _, stack = _parted(name)
                self._starts.setdefault(stack, {})[start] = None
        return self._starts


def _parted(name: str) -> tuple[str, str, str]:
    """A name before and from the word before its first number, and that word.

    Without a number: before and from its last two words, and these.
    """
    path = name.split(".")
    number = next((place for place, word in enumerate(path) if word.isdigit()), None)
    at = max(0, len(path) - 2 if number is None else number - 1)
    end = ".".join(path[at:])
    return "".join(f"{word}." for word in path[:at]), end, end if number is None else path[at]
