"""Where a logical tensor is read from: a source, an adapter laid over it, or a stage's result.

Adapters name modules as the training program did, and checkpoints of one model are saved with different
prefixes (``model.``, ``language_model.model.``, nothing). A module is found by its whole name, or else by the
part from the layer's word on, in the one stack whose prefix differs only in words that tell no stacks apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

from raymerge.architectures.roles import logical_name
from raymerge.architectures.rules import Role
from raymerge.checkpoints.adapters import Adapter, Factor
from raymerge.checkpoints.header import StoredTensor
from raymerge.errors import Findings, Problem, shortlist
from raymerge.merge_plan.expressions import Gather, GatherInput, Product, Read, gathered
from raymerge.planner.inputs.sources import (
    EMBEDDING_ROWS,
    HEAD_ROWS,
    AlignSpec,
    CalibrationSpec,
    Prepared,
    RepairSpec,
    Source,
    TransplantSpec,
)
from raymerge.planner.matching.logical import LogicalTensors, Place, open_logical, whole_place

_CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
# Families of transformers that store linear weights [in, out], in its Conv1D ...
_CONV1D_MODULES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
# ... and the modules that are of that class there. The others, such as the head, lie as everywhere.
_WRAPPERS = frozenset({"model", "language_model", "transformer", "base_model", "backbone", "text_model"})
# Words that a wrapper puts before a stack, or leaves out.
_KINDS = {"vision": "vision", "visual": "vision", "audio": "audio"}
# Words that begin so name one stack, be they ``vision_tower``, ``vision_model`` or both.
_TRAINED_ON = "Name the model that the adapter was trained on."
_MERGE_FIRST = "Merge the adapter into its model with peft and name the result."


class Overlay:
    """Tensors in place of a source's own: a stage's result, which has the same ones in another order."""

    def __init__(self, store: int, logical: LogicalTensors, replaced: Mapping[str, StoredTensor]) -> None:
        self.store = store
        self._logical = logical
        self.replaced = replaced
        self.factors: dict[str, Factor] = {}

    def replacement(self, name: str) -> StoredTensor | None:
        members = self._members(name)
        if len(members) != 1 or members[0][1].shape != members[0][1].tensor.shape:
            return None
        return self.replaced.get(members[0][0])

    def touches(self, name: str) -> bool:
        """Whether something is added to a stored tensor or to a part of it, or parts of it are replaced."""
        members = self._members(name)
        if any(logical in self.factors for logical, _ in members):
            return True
        return self.replacement(name) is None and any(logical in self.replaced for logical, _ in members)

    def _members(self, name: str) -> list[tuple[str, Place]]:
        return [member for block in self._logical.blocks(name) or () for member in block.members]


class AdapterOverlay(Overlay):
    def __init__(self, source: Source, adapter: Adapter, store: int, logical: LogicalTensors) -> None:
        replaced: dict[str, StoredTensor] = {}
        super().__init__(store, logical, replaced)
        self.adapter = adapter
        self._source = source
        self._names = _Names(logical, source.model_type)
        self._changes: dict[str, str] = {}
        self._strays: list[str] = []
        self._misfits: list[Problem] = []
        self._match_replaced(replaced)
        names = set(self._changes.values())
        self._gone = {n for n in names if all(logical in replaced for logical, _ in self._members(n))}
        self._match_factors()

    def replaced_whole(self, tensor: str) -> str | None:
        """The model's tensor of which nothing is left, where the adapter's ``tensor`` takes its place."""
        name = self._changes.get(tensor)
        return name if name in self._gone else None

    def changed_by(self, tensor: str) -> str | None:
        return self._changes.get(tensor)

    def changes(self) -> tuple[tuple[str, ...], ...]:
        factors = [tuple(t.name for t in tensors_of(factor)) for factor in self.adapter.factors.values()]
        return (*factors, *((tensor.name,) for tensor in self.adapter.replaced.values()))

    def problems(self) -> Iterator[Problem]:
        if self._strays:
            total = len(self.adapter.factors) + len(self.adapter.replaced)
            what = (
                f"{total - len(self._strays)} of its {total} changes have a tensor to go to in "
                f"{self._source.checkpoint.name}; these have none: {shortlist(self._strays)}."
            )
            yield Problem(self.adapter.name, what, _TRAINED_ON)
        yield from self._misfits

    def _misfit(self, name: str, what: str, remedy: str) -> None:
        self._misfits.append(Problem(f"{self.adapter.name}: {name}", what, remedy))

    def _match_replaced(self, replaced: dict[str, StoredTensor]) -> None:
        for name, tensor in self.adapter.replaced.items():
            target = self._target(name, name)
            if target is None:
                continue
            if target in replaced:
                self._twice(name, replaced[target].name, target)
            elif not self._fits(target, tensor):
                what = (
                    f"what it holds in place of {target} is {list(tensor.shape)}, but that of "
                    f"{self._source.checkpoint.name} is {list(self._shape(target))}."
                )
                self._misfit(name, what, _TRAINED_ON)
            else:
                replaced[target] = tensor
                self._changes[tensor.name] = self._stored(target)

    def _match_factors(self) -> None:
        targets: dict[str, Factor] = {}
        for module, factor in self.adapter.factors.items():
            target = self._target(f"{module}.weight", module)
            if target is not None and target in targets:
                self._twice(module, targets[target].module, target)
            elif target is not None:
                targets[target] = factor
        orientations = _Orientations(
            [(factor, self._shape(target)) for target, factor in targets.items()],
            self._source.checkpoint.config,
        )
        for target, factor in targets.items():
            settled = replace(factor, transposed=orientations.is_transposed(factor, self._shape(target)))
            before = len(self._misfits)
            self._check_factor(target, settled)
            if len(self._misfits) == before:
                self.factors[target] = settled
                self._changes.update((tensor.name, self._stored(target)) for tensor in tensors_of(factor))

    def _target(self, name: str, called: str) -> str | None:
        target = self._names.find(logical_name(name, self._source.rules))
        if self._is_tied_head(name, target):
            what = (
                f"it changes the head, which {self._source.checkpoint.name} has only as its embedding: by "
                "itself it would not stay so."
            )
            remedy = "Save the model with a head of its own (tie_word_embeddings false), and name that one."
            self._misfit(called, what, remedy)
            return None
        if target is None:
            self._strays.append(called)
        elif bool(self._logical.heads_fields(name)) != bool(self._logical.heads_fields(self._stored(target))):
            stored = f"{self._source.checkpoint.name} stores {self._stored(target)}"
            self._misfit(called, f"its rows are not in the order in which {stored}.", _MERGE_FIRST)
            return None
        return target

    def _check_factor(self, logical: str, factor: Factor) -> None:
        place, shape = self._logical.find(logical), self._shape(logical)
        if shape not in (factor.weight_shape, factor.weight_shape[::-1]):
            is_product = f"its product is {list(factor.weight_shape)}"
            what = f"{is_product}, but {logical} of the model is {list(shape)}."
            self._misfit(factor.module, what, _TRAINED_ON)
        elif factor.magnitude is not None and is_transposed(factor, shape):
            weight = "an embedding" if factor.kind == "embedding" else "a weight that is stored [in, out]"
            what = f"it is a DoRA adapter on {weight}, which raymerge does not apply."
            self._misfit(factor.module, what, _MERGE_FIRST)
        if factor.up_bias is not None:
            what = "it adds to the module's bias (lora_bias), which raymerge does not apply."
            self._misfit(factor.module, what, _MERGE_FIRST)
        if place is None or place.tensor.dtype.is_mergeable:
            return
        name, packed = place.tensor.name, self._source.checkpoint.packed.get(place.tensor.name)
        what = f"{name} is stored as {place.tensor.dtype.value} codes, to which nothing can be added."
        remedy = "Name a copy of the model in bfloat16."
        if packed is not None:
            form = packed.quant_spec.format.word
            what = f"{name} is quantised as {form}, and adapters are only added to plain numbers."
            remedy = (
                "Convert the model first ('raymerge convert MODEL --to bf16 -o OUT') and name OUT+ADAPTER."
            )
        self._misfit(factor.module, what, remedy)

    def _fits(self, logical: str, tensor: StoredTensor) -> bool:
        shape = self._shape(logical)
        if tensor.shape == shape:
            return True
        return tensor.shape[1:] == shape[1:] and bool(tensor.shape and shape) and self._counts_tokens(logical)

    def _counts_tokens(self, logical: str) -> bool:
        pair, name = self._source.pair, self._stored(logical)
        if pair is None or name in (pair.embedding, pair.head):
            return pair is not None
        rows = self._source.checkpoint.tensors[pair.embedding].shape[0]
        is_named_so = self._logical.infos[name].part in (Role.EMBEDDING, Role.HEAD)
        return is_named_so and self._shape(logical)[0] == rows

    def _shape(self, logical: str) -> tuple[int, ...]:
        replaced = self.replaced.get(logical)
        if replaced is not None:
            return replaced.shape
        place = self._logical.find(logical)
        return place.shape if place is not None else ()

    def _twice(self, name: str, first: str, logical: str) -> None:
        changed = f"it changes {logical} of {self._source.checkpoint.name}"
        what = f"{changed}, and {first} does the same; one of them is expected."
        remedy = "Remove one of the two from the adapter, or save it again with peft's save_pretrained."
        self._misfit(name, what, remedy)

    def _is_tied_head(self, name: str, target: str | None) -> bool:
        pair = self._source.pair
        if pair is None or pair.declared is False:
            return False
        if target is not None:
            return self._source.stored_head_is_embedding and self._stored(target) == pair.head
        return _parted(name)[1] == _parted(pair.head)[1] and pair.head not in self._source.checkpoint.tensors

    def _stored(self, logical: str) -> str:
        place = self._logical.find(logical)
        return place.tensor.name if place is not None else logical


def tensors_of(factor: Factor) -> tuple[StoredTensor, ...]:
    parts = (factor.down, factor.up, factor.magnitude, factor.up_bias)
    return tuple(tensor for tensor in parts if tensor is not None)


def is_transposed(factor: Factor, shape: tuple[int, ...]) -> bool:
    """Whether ``up @ down`` is the transpose of what is added to a weight of this shape.

    The factor's flag counts only for square weights: elsewhere the shape decides."""
    declared = factor.transposed or factor.kind == "embedding"
    return declared if factor.weight_shape == shape else not declared


class _Orientations:
    """Whether weights of linear modules are [out, in] or [in, out], where their shapes do not tell.

    peft decides that per module class and ignores the flag in the adapter's file, which records its last
    decision."""

    def __init__(self, targets: list[tuple[Factor, tuple[int, ...]]], config: Mapping[str, Any]) -> None:
        # A model may hold another: a describer of pictures holds a GPT-2.
        parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
        self._is_conv1d = any(part.get("model_type") in _CONV1D_TYPES for part in parts)
        self._seen: dict[str, set[bool]] = defaultdict(set)
        for factor, shape in targets:
            product = factor.up.shape[0], factor.down.shape[1]
            # Squares tell nothing, nor does what fits neither way.
            if factor.kind == "linear" and shape in (product, product[::-1]) and product != product[::-1]:
                self._seen[_leaf(factor)].add(shape != product)

    def is_transposed(self, factor: Factor, shape: tuple[int, ...]) -> bool:
        product = factor.up.shape[0], factor.down.shape[1]
        if factor.kind == "embedding":
            return factor.transposed
        if product != product[::-1] and shape in (product, product[::-1]):
            return shape != product
        alike = self._seen.get(_leaf(factor), set())
        if len(alike) == 1:
            return next(iter(alike))
        if self._is_conv1d:
            return _leaf(factor) in _CONV1D_MODULES
        everywhere = set().union(*self._seen.values())
        return next(iter(everywhere)) if len(everywhere) == 1 else factor.transposed


def is_conv1d(name: str, model_type: str) -> bool:
    """Whether a weight is that of transformers' Conv1D, which stores it ``[in, out]``."""
    return model_type in _CONV1D_TYPES and name.rpartition(".")[0].rpartition(".")[2] in _CONV1D_MODULES


def _leaf(factor: Factor) -> str:
    return factor.module.rpartition(".")[2]


class _Names:
    def __init__(self, logical: LogicalTensors, model_type: str) -> None:
        self._whole = logical.names()
        self._nearest: dict[tuple[str, str], tuple[str, ...]] = {}
        # transformers calls the bare model within one with a head by its type: ``bert``, ``gpt_neox``.
        self._wrappers = _WRAPPERS | {model_type}

    def find(self, name: str) -> str | None:
        if name in self._whole:
            return name
        start, end, stack = _parted(name)
        # Several stacks (text, vision) have layers of one build. The words before them choose one of them for
        # all layers: else a layer too many for the text would be found in the pictures' tower.
        matches = [near + end for near in self._near(start, stack) if near + end in self._whole]
        return matches[0] if len(matches) == 1 else None

    def _near(self, start: str, stack: str) -> tuple[str, ...]:
        if (start, stack) not in self._nearest:
            starts, words = self._starts.get(stack, {}), set(start.split("."))
            kinds = _kinds(start, self._wrappers)
            shared = {
                each: len(words & set(each.split(".")))
                for each in starts
                if _kinds(each, self._wrappers) == kinds
            }
            most = max(shared.values(), default=0)
            self._nearest[start, stack] = tuple(each for each in shared if shared[each] == most)
        return self._nearest[start, stack]

    @cached_property
    def _starts(self) -> Mapping[str, Mapping[str, None]]:
        by_stack: dict[str, dict[str, None]] = {}
        for name in self._whole:
            start, _, stack = _parted(name)
            by_stack.setdefault(stack, {})[start] = None
        if not any("encoder" in start.split(".") for starts in by_stack.values() for start in starts):
            self._wrappers |= {"decoder"}
        return by_stack


def _kinds(start: str, wrappers: frozenset[str]) -> frozenset[str]:
    words = [word for word in start.split(".") if word and word not in wrappers]
    return frozenset(
        next((kind for begin, kind in _KINDS.items() if word.startswith(begin)), word) for word in words
    )


def _parted(name: str) -> tuple[str, str, str]:
    """A name split before the word before its first number, and that word.

    Without a number: before its last two words, and these."""
    path = name.split(".")
    number = next((place for place, word in enumerate(path) if word.isdigit()), None)
    at = max(0, len(path) - 2 if number is None else number - 1)
    end = ".".join(path[at:])
    return "".join(f"{word}." for word in path[:at]), end, end if number is None else path[at]


def whole_read(store: int, tensor: StoredTensor) -> Read:
    return Read(0, store, tensor.key, tensor.offset, tensor.nbytes, tensor.dtype, None)


Run: TypeAlias = tuple[int, int, int, int]
"""As in a gather."""


class ResolvedInput(NamedTuple):
    """What one source gives for one logical tensor. A tuple: there are as many as of ``Place``."""

    store: int
    place: Place
    factor: Factor | None = None
    adapter: int = -1
    origin: tuple[int, str] | None = None
    """Stored tensor that a stage permuted into this place: index of the source, and name."""

    def holders(self) -> list[tuple[int, str]]:
        owners = [(self.store, self.place.tensor.name)]
        if self.origin is not None:
            owners.append(self.origin)
        if self.factor is not None:
            owners += [(self.adapter, tensor.name) for tensor in tensors_of(self.factor)]
        return owners

    def gather_input(self) -> GatherInput:
        """All of it as a gather input; a vector has rows of one element."""
        shape = self.place.shape
        return GatherInput(self._plain(0), shape[0] if shape else 1, self._product())

    def read(self, part: int, *, half_split_heads: int | None = None) -> Read:
        """``half_split_heads``: as in the place of what is made; None for the order in which it is stored."""
        is_ordered = half_split_heads in (None, self.place.half_split_heads)
        if self.factor is None and is_ordered:
            return self._plain(part)
        shape = self.place.shape
        rows = shape[0]
        runs: tuple[Run, ...] = ((0, 0, rows, 0),)
        if not is_ordered:
            runs = tuple(_reordered_rows(rows, self.place.half_split_heads, half_split_heads or 0))
        return gathered(part, Gather(rows, prod(shape[1:]), (self.gather_input(),), runs, rows))

    def _plain(self, part: int) -> Read:
        place, (_, dtype, shape, key, offset, nbytes) = self.place, self.place.tensor
        if place.shape is shape and place.scales is None:
            return Read(part, self.store, key, offset, nbytes, dtype, place.view)
        # Of equal numbers one is kept, as there are hundreds of thousands.
        first = offset + dtype.nbytes(place.start) if place.start else offset
        own = dtype.nbytes(place.num_elements)
        nbytes = nbytes if own == nbytes else own
        return Read(part, self.store, key, first, nbytes, dtype, place.view, scales=place.scales)

    def _product(self) -> Product | None:
        factor = self.factor
        if factor is None:
            return None
        magnitude = None if factor.magnitude is None else whole_read(self.adapter, factor.magnitude)
        return Product(
            up=whole_read(self.adapter, factor.up),
            down=whole_read(self.adapter, factor.down),
            rank=factor.rank,
            scale=factor.scale,
            transposed=is_transposed(factor, self.place.shape),
            magnitude=magnitude,
        )


def _reordered_rows(rows: int, own: int, other: int) -> Iterator[Run]:
    """Rows of heads that are stored in two halves, for a matrix where they take turns; or the other way."""
    head, half = rows // (own or other), rows // (own or other) // 2
    for row in range(rows):
        start, within = row // head * head, row % head
        which, index = (within % 2, within // 2) if own else divmod(within, half)
        yield row, start + (which * half + index if own else 2 * index + which), 1, 0


def open_inputs(sources: Sequence[Source], findings: Findings) -> InputResolver:
    """The inputs of sources with their adapters; findings say what cannot be told or applied."""
    resolver = InputResolver(sources, open_logical(sources, findings))
    for laid in resolver.adapters.values():
        findings.extend(laid.problems())
    return resolver


class InputResolver:
    def __init__(self, sources: Sequence[Source], logical: Sequence[LogicalTensors]) -> None:
        self.sources = sources
        self.logical = logical
        adapters = [(each.index, each.adapter) for each in sources if each.adapter is not None]
        self.adapters: Mapping[int, AdapterOverlay] = {
            index: AdapterOverlay(sources[index], adapter, store, logical[index])
            for store, (index, adapter) in enumerate(adapters, start=len(sources))
        }
        results = [(source.index, each) for source in sources for each in source.prepared]
        self.aligned: Mapping[int, Overlay] = {
            index: Overlay(store, logical[index], each.tensors)
            for store, (index, each) in enumerate(results, start=len(sources) + len(adapters))
            if isinstance(each.stage.spec, AlignSpec | RepairSpec)
        }
        self._transplants: Mapping[int, tuple[int, Prepared]] = {
            index: (store, each)
            for store, (index, each) in enumerate(results, start=len(sources) + len(adapters))
            if isinstance(each.stage.spec, TransplantSpec)
        }
        self._statistics: Mapping[tuple[int, str], tuple[int, Mapping[str, StoredTensor]]] = {
            (index, each.stage.spec.kind): (store, each.tensors)
            for store, (index, each) in enumerate(results, start=len(sources) + len(adapters))
            if isinstance(each.stage.spec, CalibrationSpec)
        }
        self.changed = frozenset([*self.adapters, *self.aligned])

    @property
    def transplant_store(self) -> int | None:
        """Index of the result that has rows for a donor's tokens."""
        return next((store for store, _ in self._transplants.values()), None)

    def is_donor_matrix(self, source: int, name: str) -> bool:
        """Whether a stage makes rows of this stored tensor."""
        specs = (prepared.stage.spec for _, prepared in self._transplants.values())
        matrices = [
            self.logical[source].find(matrix.donor)
            for spec in specs
            if isinstance(spec, TransplantSpec) and spec.donor.index == source
            for matrix in spec.matrices
        ]
        return any(place is not None and place.tensor.name == name for place in matrices)

    def transplanted(self, source: int, name: str) -> Mapping[int, ResolvedInput]:
        """The rows that a stage made for a stored tensor of a source, by the index of its result."""
        pair = self.sources[source].pair
        if source not in self._transplants or pair is None:
            return {}
        store, prepared = self._transplants[source]
        matrix = EMBEDDING_ROWS if name == pair.embedding else HEAD_ROWS if name == pair.head else ""
        tensor = prepared.tensors.get(matrix)
        return {} if tensor is None else {store: ResolvedInput(store, whole_place(tensor))}

    def stored(self, source: int, name: str) -> tuple[int, StoredTensor] | None:
        own = self.logical[source].stored(name)
        if own is None:
            return None
        for overlay in (self.aligned.get(source), self.adapters.get(source)):
            if overlay is not None and (replacement := overlay.replacement(name)) is not None:
                return overlay.store, replacement
        return source, own

    def is_changed(self, source: int, name: str) -> bool:
        overlays = (self.aligned.get(source), self.adapters.get(source))
        return any(each is not None and each.touches(name) for each in overlays)

    def holders(self, source: int, resolved: ResolvedInput) -> list[tuple[int, str]]:
        """Every stored tensor that an input is made of, and what an adapter replaces whole."""
        replaced = self.replaced(source, resolved)
        return resolved.holders() if replaced is None else [*resolved.holders(), (source, replaced)]

    def replaced(self, source: int, resolved: ResolvedInput) -> str | None:
        laid = self.adapters.get(source)
        if laid is None or resolved.store != laid.store:
            return None
        return laid.replaced_whole(resolved.place.tensor.name)

    def find(self, source: int, name: str, logical: str) -> ResolvedInput | None:
        """Where a source has a logical tensor; ``name`` is the stored tensor that is expected to hold it."""
        tensors = self.logical[source]
        if source not in self.changed and name not in tensors.stacked:
            # The usual case, told quickly: nobody asks by what name the place is known.
            own = self.sources[source].checkpoint.tensors.get(name)
            if own is not None:
                return ResolvedInput(source, tensors.whole(own))
        placed = self._place(source, name, logical)
        if placed is None:
            return None
        called, place = placed
        moved = self.aligned[source].replaced.get(called) if source in self.aligned else None
        if moved is not None:
            origin = source, place.tensor.name
            return ResolvedInput(self.aligned[source].store, whole_place(moved), origin=origin)
        laid = self.adapters.get(source)
        if laid is None:
            return ResolvedInput(source, place)
        factor = laid.factors.get(called)
        adapter = laid.store if factor is not None else -1
        replaced = laid.replaced.get(called)
        if replaced is None:
            return ResolvedInput(source, place, factor, adapter)
        instead = whole_place(replaced)._replace(half_split_heads=place.half_split_heads)
        return ResolvedInput(laid.store, instead, factor, adapter)

    def has_statistics(self, kind: str, source: int) -> bool:
        """Whether a calibration of a source is there."""
        return (source, kind) in self._statistics

    def statistics(self, kind: str, source: int, name: str, logical: str) -> ResolvedInput | None:
        """What a calibration of a source has of a logical tensor, as ``find`` is asked for it."""
        store, tensors = self._statistics.get((source, kind), (-1, {}))
        placed = self._place(source, name, logical) if tensors else None
        tensor = None if placed is None else tensors.get(placed[0])
        if placed is None or tensor is None:
            return None
        # Rows are in the order of the weights that they are about.
        return ResolvedInput(store, whole_place(tensor)._replace(half_split_heads=placed[1].half_split_heads))

    def plain_read(self, source: int, tensor: StoredTensor) -> Read:
        """The read of all of a tensor that is stored alone, and neither changed nor replaced."""
        return ResolvedInput(source, self.logical[source].whole(tensor)).read(0)

    def whole(self, source: int, name: str) -> ResolvedInput | None:
        """All of a stored tensor; None where it is not stored, changed or replaced."""
        stored = self.stored(source, name)
        if stored is None or stored[0] != source or self.is_changed(source, name):
            return None
        return ResolvedInput(source, self.logical[source].whole(stored[1]))

    def _place(self, source: int, name: str, logical: str) -> tuple[str, Place] | None:
        tensors = self.logical[source]
        stored = tensors.stored(name)
        if stored is not None:
            places = tensors.members(name)
            if places is None:
                return name, tensors.whole(stored)
            if len(places) == 1:
                return next(iter(places.items()))
            if logical in places:
                return logical, places[logical]
        place = tensors.find(logical)
        return (logical, place) if place is not None else None
