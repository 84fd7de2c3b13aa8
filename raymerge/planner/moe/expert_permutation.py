"""Puts experts of independently trained models into one order before they are merged.

A stage matches experts by their weights. Its result is known from headers: the experts and routers of a model
by canonical name, in its own dtypes; the merge reads these in place of the model's own.

A mixture computes the same in any order of its experts if the router's rows and biases move with them, and an
expert in any order of its neurons: the rows of gate and up, their biases, and the columns of down (arXiv
2509.11348)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import xxhash

from raymerge.architectures.expert_fields import expert_fields
from raymerge.architectures.roles import canonical_block, describe
from raymerge.architectures.rules import Projection, Role
from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import Findings, PlanError, Problem
from raymerge.planner.inputs.quantised import CONVERT_FIRST, USE_PLAIN, quantised_tensors, stored_formats
from raymerge.planner.inputs.sources import AlignSpec, Source, Stage, make_stage, model_references
from raymerge.planner.matching.input_resolver import AdapterOverlay
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.recipes.schema import Recipe


@dataclass(frozen=True, slots=True)
class Piece:
    logical: str
    stored: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.num_elements)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.logical, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Part(Piece):
    projection: Projection
    """Which matrix, ``[out, in]``; ``gate_up`` has the rows of gate above those of up."""
    is_bias: bool

    @property
    def num_neurons(self) -> int:
        """The intermediate neurons that it has a row or a column for; 0 for a bias of down."""
        if self.projection == "down":
            return 0 if self.is_bias else self.shape[-1]
        return self.shape[0] // (2 if self.projection == "gate_up" else 1)


@dataclass(frozen=True, slots=True)
class Network:
    parts: tuple[Part, ...]

    @property
    def num_neurons(self) -> int:
        return max((part.num_neurons for part in self.parts), default=0)

    @property
    def form(self) -> tuple[tuple[Projection, bool, tuple[int, ...]], ...]:
        return tuple(sorted((part.projection, part.is_bias, part.shape) for part in self.parts))

    @property
    def is_whole(self) -> bool:
        matrices = {part.projection: part.shape for part in self.parts if not part.is_bias}
        if len({(part.projection, part.is_bias) for part in self.parts}) < len(self.parts):
            return False
        if set(matrices) not in ({"gate", "up", "down"}, {"up", "down"}, {"gate_up", "down"}):
            return False
        widths = {part.num_neurons for part in self.parts} - {0}
        sides = {shape[0 if name == "down" else 1] for name, shape in matrices.items() if len(shape) == 2}
        return all(len(shape) == 2 for shape in matrices.values()) and len(widths) == len(sides) == 1

    def part(self, kind: Projection, *, is_bias: bool = False) -> Part | None:
        return next((p for p in self.parts if p.projection == kind and p.is_bias is is_bias), None)


@dataclass(frozen=True, slots=True)
class Scores(Piece):
    axis: int

    @property
    def are_rows(self) -> bool:
        return len(self.shape) == 2 and self.axis == 0


@dataclass(frozen=True, slots=True)
class AlignedBlock:
    path: str
    layer: int | None
    experts: tuple[Network, ...]
    shared: tuple[Network, ...]
    router: tuple[Scores, ...]
    stored: tuple[str, ...]
    strays: tuple[str, ...]

    def pieces(self, *, neurons: bool) -> Iterator[Piece]:
        for network in (*self.experts, *(self.shared if neurons else ())):
            yield from network.parts
        yield from self.router


def aligned_blocks(source: Source, logical: LogicalTensors) -> Mapping[str, AlignedBlock]:
    stored: dict[str, list[str]] = {}
    for name, info in logical.infos.items():
        if info.block is not None and info.part is not Role.SHARED_EXPERT_GATE:
            stored.setdefault(canonical_block(info.block, source.rules), []).append(name)
    blocks = (_block(path, names, source, logical) for path, names in stored.items())
    return {block.path: block for block in blocks if block is not None}


def _block(path: str, stored: Sequence[str], source: Source, logical: LogicalTensors) -> AlignedBlock | None:
    experts: dict[int, list[Part]] = {}
    shared: dict[str, list[Part]] = {}
    router: list[Piece] = []
    strays: list[str] = []
    for name in stored:
        places = [member for block in logical.blocks(name) or () for member in block.members]
        if not places:
            strays.append(name)
        for called, place in places:
            info = logical.infos[name]
            if info.part is Role.EXPERT and info.expert is None:
                info = describe(called, source.rules)
            piece = (called, place.tensor.name, place.tensor.dtype, place.shape)
            projection = info.projection
            if info.part in (Role.ROUTER, Role.ROUTER_BIAS):
                router.append(Piece(*piece))
            elif projection is None or not called.endswith(("weight", "bias")):
                strays.append(name)
            elif info.part is Role.SHARED_EXPERT:
                network = called.rpartition(".")[0].rpartition(".")[0]
                shared.setdefault(network, []).append(Part(*piece, projection, info.is_bias))
            elif info.expert is None:
                strays.append(name)
            else:
                experts.setdefault(info.expert, []).append(Part(*piece, projection, info.is_bias))
    if not experts:
        return None
    numbers = range(max(experts) + 1)
    scores = [(piece, _scores(piece, len(numbers))) for piece in router]
    # A vector of another length, such as a scale of the router's input, is the same for all experts.
    lost = [piece.stored for piece, own in scores if own is None and len(piece.shape) > 1]
    return AlignedBlock(
        path=path,
        layer=logical.infos[stored[-1]].layer,
        experts=_networks(experts.get(number, []) for number in numbers),
        shared=_networks(shared[name] for name in sorted(shared)),
        router=tuple(own for _, own in scores if own is not None),
        stored=tuple(stored),
        strays=(*strays, *lost),
    )


def _networks(groups: Iterable[list[Part]]) -> tuple[Network, ...]:
    return tuple(Network(tuple(sorted(parts, key=lambda part: part.logical))) for parts in groups)


def _scores(piece: Piece, num_experts: int) -> Scores | None:
    axis = next((axis for axis, size in enumerate(piece.shape) if size == num_experts), None)
    return None if axis is None else Scores(piece.logical, piece.stored, piece.dtype, piece.shape, axis)


_SAME_MAKE = "Align models of one architecture and size."
_OR_NOT = "Or remove 'align'."


@dataclass(frozen=True, slots=True)
class BlockPair:
    reference: AlignedBlock
    other: AlignedBlock
    num_groups: int
    """Groups of neighbouring experts from which the router chooses; whole groups change places."""


def align_stages(recipe: Recipe, sources: Sequence[Source], *, version: str) -> list[Stage]:
    """For a recipe with ``align``."""
    assert recipe.align is not None
    problems = dict.fromkeys(_of_slices(recipe))
    references = list(dict.fromkeys([reference for _, reference in model_references(recipe)]))
    by_reference = {source.reference: _Opened(source) for source in sources if source.reference in references}
    first = by_reference.pop(recipe.base_model or references[0])
    if not by_reference:
        what = f"there is one model alone, {first.name}, and nothing to align with it."
        problems[Problem(recipe.where("align"), what, "Remove 'align', or list more models.")] = None
    stages: list[Stage] = []
    for other in by_reference.values():
        asked = AlignSpec(first.source, other.source, (), recipe.align.neurons)
        pairs, own = _paired(asked, first, other)
        problems |= dict.fromkeys(own)
        if not problems:
            stages.append(_stage(asked, pairs, recipe.where("align"), version))
    if problems:
        raise PlanError(problems)
    return stages


def paired_blocks(spec: AlignSpec) -> tuple[tuple[BlockPair, ...], tuple[Problem, ...]]:
    return _paired(spec, _Opened(spec.reference), _Opened(spec.other))


class _Opened:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.logical = LogicalTensors(source)
        self.blocks = aligned_blocks(source, self.logical)
        weights = quantised_tensors(source.checkpoint)
        self.read = stored_formats(weights)
        self.forms = {**self.read, **weights.unknown}
        fields = expert_fields(source.checkpoint.config, source.rules)
        self.num_groups = fields.num_groups if fields is not None else 1

    @property
    def name(self) -> str:
        return self.source.name


def _paired(
    spec: AlignSpec, mine: _Opened, theirs: _Opened
) -> tuple[tuple[BlockPair, ...], tuple[Problem, ...]]:
    paths = [
        path
        for path, block in theirs.blocks.items()
        if path in mine.blocks and (not spec.layers or block.layer in spec.layers)
    ]
    pairs = tuple(BlockPair(mine.blocks[path], theirs.blocks[path], mine.num_groups) for path in paths)
    return pairs, _problems(pairs, mine, theirs, neurons=spec.neurons)


def _stage(asked: AlignSpec, pairs: Sequence[BlockPair], place: str, version: str) -> Stage:
    layers = sorted({pair.other.layer for pair in pairs if pair.other.layer is not None})
    spec = AlignSpec(asked.reference, asked.other, tuple(layers), asked.neurons)
    text = f"{spec.reference.reference}\n{spec.other.reference}\n{spec.neurons}"
    return make_stage(
        name=f"@align-{xxhash.xxh3_64_hexdigest(text.encode())}",
        title=f"aligning the experts of {spec.other.name}",
        place=place,
        spec=spec,
        tensors=[piece.spec for pair in pairs for piece in pair.other.pieces(neurons=spec.neurons)],
        version=version,
    )


def _of_slices(recipe: Recipe) -> Iterator[Problem]:
    paths: list[tuple[str | int, ...]] = [("slices",)] if recipe.slices else []
    paths += [("modules", name, "slices") for name, module in recipe.modules.items() if module.slices]
    for path in paths:
        yield Problem(
            recipe.where(*path),
            "'align' matches each layer's experts with those of the same layer, and slices set layers of "
            "different places side by side.",
            "List whole models below 'models', or remove 'align'.",
        )


_Objection = tuple[str, str, str]
"""What is wrong with tensors or layers, with ``{count}``; the remedy; one of them."""


def _problems(
    pairs: Sequence[BlockPair], mine: _Opened, theirs: _Opened, *, neurons: bool
) -> tuple[Problem, ...]:
    findings = Findings()
    findings.extend(_of_models(pairs, mine, theirs))
    others = [pair.other for pair in pairs]
    for model, blocks in ((mine, [pair.reference for pair in pairs]), (theirs, others)):
        of_blocks = (each for block in blocks for each in _of_block(model, block))
        for what, remedy, example in (*_of_numbers(model, blocks), *of_blocks):
            findings.tensor(model.name, what, remedy, example=example)
    of_pairs = (each for pair in pairs for each in _of_pair(pair, mine.name, neurons=neurons))
    for what, remedy, example in (*of_pairs, *_of_adapter(theirs, others)):
        findings.tensor(theirs.name, what, remedy, example=example)
    return findings.problems()


def _of_models(pairs: Sequence[BlockPair], mine: _Opened, theirs: _Opened) -> Iterator[Problem]:
    lacking = [model for model in (mine, theirs) if not model.blocks]
    for model in lacking:
        what, remedy = "it has no experts that could be aligned.", "Name mixtures of experts only."
        if model.forms:
            # Their names are not those of matrices then.
            formats = ", ".join(sorted(set(model.forms.values())))
            what = f"it is quantised ({formats}), and only plain numbers are aligned."
            remedy = CONVERT_FIRST if model.read else USE_PLAIN
        yield Problem(model.name, what, f"{remedy} {_OR_NOT}")
    if not pairs and not lacking:
        yield Problem(theirs.name, f"it has experts in other layers than {mine.name}.", _SAME_MAKE)
    if mine.num_groups != theirs.num_groups:
        what = f"its router chooses from {theirs.num_groups} group(s) of experts, that of "
        yield Problem(theirs.name, f"{what}{mine.name} from {mine.num_groups}.", _SAME_MAKE)


def _of_numbers(model: _Opened, blocks: Sequence[AlignedBlock]) -> Iterator[_Objection]:
    for name in (name for block in blocks for name in block.stored):
        dtype = model.source.checkpoint.tensors[name].dtype
        if name in model.forms or not dtype.is_mergeable:
            form = model.forms.get(name) or f"{dtype.value} integers"
            what = f"{{count}} tensors of experts and routers are {form}, and only plain numbers are aligned"
            yield what, f"{CONVERT_FIRST if name in model.read else USE_PLAIN} {_OR_NOT}", name


def _of_block(model: _Opened, block: AlignedBlock) -> Iterator[_Objection]:
    unknown = "Report the model type, or remove 'align'."
    # Codes and scales of quantised formats are spoken of elsewhere.
    strays = [name for name in block.strays if name not in model.forms]
    if not block.strays and not all(network.is_whole for network in (*block.experts, *block.shared)):
        strays.append(f"{block.path}.experts")
    for stray in strays:
        what = "it is not known how {count} tensors would move with the experts or their neurons"
        yield what, unknown, stray
    if not any(scores.are_rows for scores in block.router) and not block.strays:
        what = "{count} layers have experts, and no router with a row for each"
        yield what, "Use a complete checkpoint, or remove 'align'.", block.path
    dtypes = [[(part.projection, part.is_bias, part.dtype) for part in e.parts] for e in block.experts]
    if any(each != dtypes[0] for each in dtypes):
        what = "the experts of {count} layers are stored in different dtypes"
        yield what, "Store all of a layer's experts in one dtype.", block.path
    if len(block.experts) % model.num_groups:
        what = f"{{count}} layers have experts that do not make {model.num_groups} equal groups"
        yield what, "Correct n_group in its config.json.", f"{block.path} has {len(block.experts)}"
    if block.layer is None:
        yield "{count} blocks of experts are in no layer", unknown, block.path


def _of_pair(pair: BlockPair, there: str, *, neurons: bool) -> Iterator[_Objection]:
    mine, theirs = pair.reference, pair.other
    if len(mine.experts) != len(theirs.experts):
        what = f"{{count}} layers have another number of experts than in {there}"
        example = f"{theirs.path} has {len(theirs.experts)} here and {len(mine.experts)} there"
        yield what, _SAME_MAKE, example
    forms = {network.form for network in (*mine.experts, *theirs.experts)}
    is_other = [one.form for one in mine.shared] != [two.form for two in theirs.shared]
    if len(forms) > 1 or (neurons and is_other):
        what = "{count} layers have experts of other shapes, or with other biases, than one another or than "
        yield f"{what}in {there}", _SAME_MAKE, theirs.path


def _of_adapter(model: _Opened, blocks: Sequence[AlignedBlock]) -> Iterator[_Objection]:
    source = model.source
    if source.adapter is None:
        return
    taken = {name for block in blocks for name in block.stored}
    laid = AdapterOverlay(source, source.adapter, 1, model.logical)
    what = "its adapter changes experts or routers, and what is aligned are stored weights ({count} tensors)"
    for tensor in (tensor for change in laid.changes() for tensor in change):
        if laid.changed_by(tensor) in taken:
            yield what, "Merge the adapter into its model first, and name the result.", tensor
