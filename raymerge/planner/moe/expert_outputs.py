"""Makes the output tensors that change with the experts, in the layout of the base checkpoint.

Where an expert is unchanged and is stored as it will be, its bytes are copied, codes and scales of quantised
experts included. Only where experts are merged, are stored otherwise in their model, or get an adapter's
delta are their matrices looked up. What is absent or has another shape becomes a finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from raymerge.architectures.expert_fields import expert_fields
from raymerge.architectures.roles import logical_name
from raymerge.architectures.rules import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.merge_plan.dispositions import Disposition, Dispositions, Rule, Use
from raymerge.merge_plan.expressions import (
    Expression,
    Gather,
    Op,
    Output,
    Part,
    Read,
    conversion_expression,
    copy_expression,
    gathered,
    make_expression,
)
from raymerge.methods import Settings
from raymerge.methods.linear import LINEAR
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.inputs.quantised import PlainNumbers
from raymerge.planner.inputs.sources import holdings
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput
from raymerge.planner.matching.logical import Block
from raymerge.planner.moe.expert_blocks import ExpertBlock, Kind, Numbered, Stacked
from raymerge.planner.moe.expert_moves import BASE, NewExpert, Origin
from raymerge.planner.outputs.ops import OpMaker, all_ops, complete, matrix_op, output_dtype, side_by_side
from raymerge.recipes.expert_set import ExpertChange


@dataclass(frozen=True, slots=True)
class Share:
    source: int
    tensor: StoredTensor
    start: int
    num_elements: int

    def read(self) -> Read:
        dtype = self.tensor.dtype
        first = self.tensor.offset + dtype.nbytes(self.start)
        return Read(0, self.source, self.tensor.key, first, dtype.nbytes(self.num_elements), dtype, None)

    def joined(self, other: Share) -> Share | None:
        same = (self.source, self.tensor.name) == (other.source, other.tensor.name)
        if not same or self.start + self.num_elements != other.start:
            return None
        return replace(self, num_elements=self.num_elements + other.num_elements)


def share_op(share: Share, shape: tuple[int, ...], output: str, dtype: DType) -> tuple[Op, Disposition]:
    is_copy = share.tensor.dtype is dtype
    expression = copy_expression(dtype) if is_copy else conversion_expression(dtype)
    return matrix_op([share.read()], shape, output, expression), disposition_of(1, output, is_copy=is_copy)


def mean_expression(weights: Sequence[float], dtype: DType) -> Expression:
    """The weighted mean in float32, rounded once; of one alone its own values."""
    if len(weights) == 1:
        return conversion_expression(dtype)
    settings = Settings(values={"normalize": True}, sources=tuple({"weight": each} for each in weights))
    return make_expression(LINEAR, settings, has_base=False, cast=dtype)


def disposition_of(num_origins: int, output: str, *, is_copy: bool = False) -> Disposition:
    if num_origins > 1:
        return Disposition(Use.MERGED, Rule.METHOD, output)
    if is_copy:
        return Disposition(Use.COPIED, Rule.ONE_SOURCE, output)
    return Disposition(Use.CONVERTED, Rule.DTYPE, output)


class ExpertInputs:
    def __init__(self, resolver: InputResolver, dtype: DType | None, findings: Findings) -> None:
        self.findings = findings
        self.dispositions = Dispositions(holdings(resolver.sources))
        self.base = resolver.sources[BASE]
        self.logical = resolver.logical[BASE]
        self.plain = PlainNumbers(resolver.sources, findings)
        self.resolver = resolver
        ops = OpMaker(resolver, self.plain, findings, self.dispositions)
        self.settle, self._refuse_unread = ops.settle, ops.refuse_unread
        self._wanted = dtype
        self._main = main_dtype(self.base.checkpoint)
        fields = [expert_fields(each.checkpoint.config, each.rules) for each in resolver.sources]
        self.counts = [each.count.value if each is not None else 0 for each in fields]
        self._dense = [_dense_matrices(resolver, source.index) for source in resolver.sources]

    def dtype_of(self, tensor: StoredTensor, role: Role) -> DType:
        return output_dtype(self._wanted, tensor, role, self._main)

    def kept(self, name: str) -> Output | None:
        tensor = self.base.checkpoint.tensors[name]
        role = self.logical.part(name)
        is_plain = role is not Role.BUFFER and not self.plain.is_integer(BASE, tensor)
        dtype = self.dtype_of(tensor, role) if is_plain else tensor.dtype
        if self.resolver.is_changed(BASE, name):
            return self._adapted(tensor, dtype)
        whole = Share(BASE, tensor, 0, tensor.num_elements)
        if not self.may_write(whole, dtype):
            return None
        op, disposition = share_op(whole, tensor.shape, name, dtype)
        self.dispositions.settle(BASE, name, disposition)
        return Output(name, dtype, tensor.shape, (op,), dtype.is_mergeable and role is not Role.BUFFER)

    def share(self, kind: Kind, origin: Origin) -> Share | None:
        """An expert's share of a tensor that is stored as the base's; None for another layout."""
        source = self.resolver.sources[origin.source]
        if origin.expert is None or source.model_type != self.base.model_type:
            return None
        name = kind.name(origin.expert)
        tensor = source.checkpoint.tensors.get(name)
        if tensor is None or self.resolver.is_changed(origin.source, name):
            return None
        count = self.counts[origin.source]
        if tensor.shape != kind.shape(count):
            return None
        # A bias that lies as [1, experts] has one element for each.
        length = tensor.num_elements // (count if kind.start(1) else 1)
        return Share(origin.source, tensor, kind.start(origin.expert), length)

    def may_write(self, share: Share, dtype: DType) -> bool:
        """Whether bytes may be copied, or numbers converted; a finding where codes would be converted."""
        is_code = self.plain.is_quantised(share.source, share.tensor)
        if share.tensor.dtype is dtype and not (is_code and self._wanted is not None):
            return True
        return self.plain.check(share.source, share.tensor)

    def matrix(self, block: ExpertBlock, origin: Origin, logical: str) -> ResolvedInput | None:
        if origin.expert is None:
            name = self._dense_name(block, origin.source, logical)
        else:
            name = renumbered(logical, origin.expert)
        resolved = self.resolver.find(origin.source, name, name)
        if resolved is None:
            self.missing(origin.source, name)
        return resolved

    def _dense_name(self, block: ExpertBlock, source: int, logical: str) -> str:
        projection, _, leaf = logical.rpartition(marked(0))[2].partition("_proj.")
        if block.is_mtp or leaf not in ("weight", "bias"):
            return logical
        return self._dense[source].get((block.name_layer, projection, leaf == "bias"), logical)

    def fits(self, source: int, resolved: ResolvedInput, shape: tuple[int, ...], logical: str) -> bool:
        if resolved.place.shape == shape:
            return self.plain.check(source, resolved.place.tensor)
        name = self.resolver.sources[source].name
        self.findings.tensor(
            name,
            f"{{count}} matrices have other shapes than the experts of {self.base.name}",
            "Take experts of the same width and hidden size.",
            example=f"{logical} is {list(resolved.place.shape)} here and {list(shape)} there",
            key="shape",
        )
        return False

    def unknown_layout(self, name: str) -> None:
        self.findings.tensor(
            self.base.name,
            f"{{count}} tensors hold several experts in an order that model_type "
            f"'{self.base.model_type}' does not tell, and single matrices are needed here",
            "'keep' and 'drop' work on them, as does adding experts that are stored alike.",
            example=name,
        )

    def _adapted(self, tensor: StoredTensor, dtype: DType) -> Output | None:
        blocks = self.logical.blocks(tensor.name)
        if blocks is None:
            self.unknown_layout(tensor.name)
            return None
        ops = complete(self._adapted_op(tensor, block, dtype) for block in blocks)
        return None if ops is None else Output(tensor.name, dtype, tensor.shape, ops, True)

    def _adapted_op(self, tensor: StoredTensor, block: Block, dtype: DType) -> Op | None:
        parts: list[Part] = []
        reads: list[Read] = []
        for logical, place in block.members:
            resolved = self.resolver.find(BASE, tensor.name, logical)
            if resolved is None or not self.fits(BASE, resolved, place.shape, logical):
                return None
            self.settle(resolved, BASE, disposition_of(1, tensor.name))
            reads.append(resolved.read(len(parts)))
            parts.append(Part(logical, place.shape, place.view))
        return Op(block.num_elements, conversion_expression(dtype), tuple(parts), tuple(reads))

    def missing(self, source: int, name: str) -> None:
        if self._refuse_unread(source, name, name):
            return
        self.findings.tensor(
            self.resolver.sources[source].name,
            f"it lacks {{count}} matrices that the experts of {self.base.name} have",
            "It must have them for every layer of experts in base_model, also for "
            "multi-token-prediction layers.",
            example=name,
            key="missing",
        )


def marked(expert: int) -> str:
    return f".experts.{expert}."


def renumbered(logical: str, expert: int, *, of: int = 0) -> str:
    return marked(expert).join(logical.rsplit(marked(of), 1))


def _dense_matrices(resolver: InputResolver, source: int) -> dict[tuple[int, str, bool], str]:
    main = resolver.sources[source].layer_stack(None)
    matrices: dict[tuple[int, str, bool], str] = {}
    for name, info in resolver.logical[source].infos.items():
        if main is None or info.stack != main.prefix or info.layer is None or info.projection is None:
            continue
        if info.part is Role.MLP and name.endswith((".weight", ".bias")):
            matrices[info.layer, info.projection, info.is_bias] = name
    return matrices


def expert_outputs(
    inputs: ExpertInputs, block: ExpertBlock, experts: Sequence[NewExpert]
) -> Iterator[Output]:
    for stacked in block.stacked:
        work = _Work(inputs, block, stacked, stacked.tensor)
        ops = _stacked_ops(work, experts)
        shape, name = stacked.shape(len(experts)), stacked.tensor.name
        if ops is not None:
            yield Output(name, work.dtype, shape, ops, work.dtype.is_mergeable)
    for numbered in block.numbered:
        is_complete = len(numbered.tensors) == block.num_experts
        for number, expert in enumerate(experts):
            if not is_complete and not any(_has(inputs, numbered, origin) for origin in expert.origins):
                continue
            work = _Work(inputs, block, numbered, _like(inputs, numbered, expert.origins[0]))
            single = work.alone(expert)
            ops = work.combined(expert, number) if single is None else work.unchanged([single], number)
            if ops is not None:
                dtype = work.dtype
                yield Output(numbered.name(number), dtype, numbered.share, ops, dtype.is_mergeable)


def _has(inputs: ExpertInputs, kind: Numbered, origin: Origin) -> bool:
    if origin.source == BASE:
        return origin.expert in kind.tensors
    return inputs.share(kind, origin) is not None


def _like(inputs: ExpertInputs, kind: Numbered, origin: Origin) -> StoredTensor:
    """The tensor of the base whose dtype an expert is written in: its own, or the first of that dtype."""
    own = kind.tensors.get(origin.expert) if origin.expert is not None else None
    if origin.source == BASE and own is not None:
        return own
    share = inputs.share(kind, origin)
    same = (each for each in kind.tensors.values() if share and each.dtype is share.tensor.dtype)
    return next(same, kind.tensors[kind.first])


def _stacked_ops(work: _Work, experts: Sequence[NewExpert]) -> tuple[Op, ...] | None:
    made: list[tuple[Op, ...] | None] = []
    waiting: list[Share] = []
    for number, expert in enumerate(experts):
        single = work.alone(expert)
        if waiting and (single is None or waiting[-1].joined(single) is None):
            made.append(work.unchanged(waiting, number))
            waiting = []
        if single is None:
            made.append(work.combined(expert, number))
        else:
            waiting.append(single)
    if waiting:
        made.append(work.unchanged(waiting, len(experts)))
    return all_ops(made)


class _Work:
    def __init__(self, inputs: ExpertInputs, block: ExpertBlock, kind: Kind, like: StoredTensor) -> None:
        self._inputs = inputs
        self._block = block
        self._kind = kind
        self._like = like
        self.dtype = inputs.dtype_of(like, kind.part)

    def alone(self, expert: NewExpert) -> Share | None:
        origins = self._origins(expert)
        return self._inputs.share(self._kind, origins[0]) if len(origins) == 1 else None

    def unchanged(self, shares: Sequence[Share], number: int) -> tuple[Op, ...] | None:
        first = shares[0]
        if first.tensor.dtype is not self.dtype and not self._is_plain():
            return None
        if not self._inputs.may_write(first, self.dtype):
            return None
        whole = replace(first, num_elements=sum(share.num_elements for share in shares))
        shape = (len(shares), *self._kind.share) if isinstance(self._kind, Stacked) else self._kind.share
        op, disposition = share_op(whole, shape, self._kind.name(number), self.dtype)
        self._inputs.dispositions.settle(first.source, first.tensor.name, disposition)
        return (op,)

    def combined(self, expert: NewExpert, number: int) -> tuple[Op, ...] | None:
        if not self._is_plain():
            return None
        shares = complete(self._inputs.share(self._kind, origin) for origin in self._origins(expert))
        if shares is not None:
            return self._mean_of_shares(expert, number, shares)
        if isinstance(self._kind, Stacked) and self._kind.part is not Role.EXPERT:
            return self._router_ops(expert, self._kind)
        own = self._kind.name(self._kind.first)
        blocks = self._inputs.logical.blocks(own)
        if blocks is None:
            self._inputs.unknown_layout(own)
            return None
        mark = marked(self._kind.first)
        return complete(self._matrices(expert, number, b) for b in blocks if mark in b.members[0][0])

    def _is_plain(self) -> bool:
        return self._inputs.plain.check(BASE, self._like)

    def _origins(self, expert: NewExpert) -> Sequence[Origin]:
        return expert.origins if self._kind.part is Role.EXPERT else expert.rows

    def _weights(self, expert: NewExpert) -> Sequence[float]:
        return (1.0,) if len(self._origins(expert)) == 1 else expert.weights

    def _mean_of_shares(
        self, expert: NewExpert, number: int, shares: Sequence[Share]
    ) -> tuple[Op, ...] | None:
        name = self._kind.name(number)
        plain = [self._inputs.plain.check(share.source, share.tensor) for share in shares]
        if not all(plain):
            return None
        for share in shares:
            self._inputs.dispositions.settle(
                share.source, share.tensor.name, disposition_of(len(shares), name)
            )
        expression = mean_expression(self._weights(expert), self.dtype)
        shape = self._kind.share or (1,)
        return (matrix_op([share.read() for share in shares], shape, f"{name}#{number}", expression),)

    def _matrices(self, expert: NewExpert, number: int, place: Block) -> Op | None:
        parts: list[Part] = []
        reads: list[Read] = []
        is_complete = True
        disposition = disposition_of(len(expert.origins), self._kind.name(number))
        for called, inside in place.members:
            logical = renumbered(called, 0, of=self._kind.first)
            for origin in expert.origins:
                resolved = self._inputs.matrix(self._block, origin, logical)
                if resolved is None or not self._inputs.fits(origin.source, resolved, inside.shape, logical):
                    is_complete = False
                    continue
                self._inputs.settle(resolved, origin.source, disposition)
                reads.append(resolved.read(len(parts)))
            parts.append(Part(renumbered(logical, number), inside.shape, inside.view))
        if not is_complete:
            return None
        expression = mean_expression(expert.weights, self.dtype)
        return Op(place.num_elements, expression, tuple(parts), tuple(reads))

    def _router_ops(self, expert: NewExpert, stacked: Stacked) -> tuple[Op, ...] | None:
        logical = logical_name(stacked.tensor.name, self._inputs.base.rules)
        origins = expert.rows
        reads = complete(self._row_of(stacked, origin, logical, len(origins)) for origin in origins)
        if reads is None:
            return None
        expression = mean_expression(self._weights(expert), self.dtype)
        return (matrix_op(reads, (1, *stacked.share), f"{logical}#{expert.row_of}", expression),)

    def _row_of(self, stacked: Stacked, origin: Origin, logical: str, count: int) -> Read | None:
        resolved = self._inputs.resolver.find(origin.source, logical, logical)
        if resolved is None or origin.expert is None:
            self._no_row(origin.source, logical)
            return None
        held = self._inputs.counts[origin.source]
        if not self._inputs.fits(origin.source, resolved, stacked.shape(held), logical):
            return None
        self._inputs.settle(resolved, origin.source, disposition_of(count, stacked.tensor.name))
        # A bias that lies as [1, experts] is taken element by element as well.
        gather_input = replace(resolved.gather_input(), num_rows=held)
        return gathered(0, Gather(1, prod(stacked.share), (gather_input,), ((0, origin.expert, 1, 0),), 1))

    def _no_row(self, source: int, logical: str) -> None:
        self._inputs.findings.tensor(
            self._inputs.resolver.sources[source].name,
            "it lacks {count} tensors that the router has a row of for each expert",
            "Add 'row_of: N' to copy router rows and biases of an expert of base_model.",
            example=logical,
        )


SHARED_FACTOR = 0.5
"""What a shared expert's gate is taken to be: the sigmoid of 0. A dense layer cannot look at each token."""

_SHARED_WORDS = ("shared_expert", "shared_experts")
_PROJECTIONS = ("gate", "up", "down")
_RUN_ELEMENTS = 1 << 24
# Elements of a run of rows in which matrices lie side by side. Such a run is made at once.


@dataclass(frozen=True, slots=True)
class _Piece:
    experts: tuple[int, ...]
    factor: float


def dense_width(block: ExpertBlock, change: ExpertChange, inputs: ExpertInputs) -> int:
    pieces = complete(_found(inputs, block, piece, "gate") for piece in _pieces(block, change))
    return sum(each[0].place.shape[0] for each in pieces or ())


def dense_outputs(block: ExpertBlock, change: ExpertChange, inputs: ExpertInputs) -> Iterator[Output]:
    pieces = _pieces(block, change)
    place = f"{block.path.rpartition('.')[0]}.mlp"
    for projection in _PROJECTIONS:
        name = f"{place}.{projection}_proj.weight"
        held = complete(_found(inputs, block, piece, projection) for piece in pieces)
        if held is None or not _all_fit(inputs, held, projection):
            continue
        dtype = inputs.dtype_of(held[0][0].place.tensor, Role.EXPERT)
        factors = [piece.factor if projection == "up" else 1.0 for piece in pieces]
        if projection == "down" and len(pieces) > 1:
            ops, shape = _beside(name, held, dtype)
        else:
            ops, shape = _under(name, held, factors, dtype)
        for own, factor in zip(held, factors, strict=True):
            for resolved in own:
                inputs.settle(resolved, BASE, disposition_of(len(own) if factor == 1 else 2, name))
        yield Output(name, dtype, shape, ops, True)


def settle_routers(block: ExpertBlock, inputs: ExpertInputs) -> None:
    gates = [name for name in block.shared if inputs.logical.part(name) is Role.SHARED_EXPERT_GATE]
    for name in (*block.routers, *gates):
        inputs.dispositions.settle(BASE, name, Disposition(Use.DROPPED, Rule.ROUTER_OF_DENSE))


def _pieces(block: ExpertBlock, change: ExpertChange) -> tuple[_Piece, ...]:
    chosen = tuple(range(block.num_experts)) if change.of is None else change.of
    routed: tuple[_Piece, ...]
    if change.dense == "concatenated":
        routed = tuple(_Piece((expert,), 1 / len(chosen)) for expert in chosen)
    elif change.dense == "mean":
        routed = (_Piece(chosen, 1.0),)
    else:
        routed = (_Piece((int(change.dense or 0),), 1.0),)
    return (*routed, _Piece((), SHARED_FACTOR)) if block.shared else routed


def _found(
    inputs: ExpertInputs, block: ExpertBlock, piece: _Piece, projection: str
) -> Sequence[ResolvedInput] | None:
    if not piece.experts:
        shared = (f"{block.canonical}.{word}.{projection}_proj.weight" for word in _SHARED_WORDS)
        resolved = (inputs.resolver.find(BASE, name, name) for name in shared)
        present = [each for each in resolved if each is not None]
        if not present:
            inputs.missing(BASE, f"{block.canonical}.{_SHARED_WORDS[0]}.{projection}_proj.weight")
        return present[:1] or None
    logical = f"{block.canonical}.experts.0.{projection}_proj.weight"
    return complete(inputs.matrix(block, Origin(BASE, expert), logical) for expert in piece.experts)


def _all_fit(inputs: ExpertInputs, held: Sequence[Sequence[ResolvedInput]], projection: str) -> bool:
    side = 0 if projection == "down" else 1
    hidden = held[0][0].place.shape[side]
    fits = True
    for resolved in (each for own in held for each in own):
        shape = resolved.place.shape
        expected = (hidden, shape[1]) if side == 0 else (shape[0], hidden)
        fits = inputs.fits(BASE, resolved, expected, resolved.place.tensor.name) and fits
    return fits


def _under(
    name: str, held: Sequence[Sequence[ResolvedInput]], factors: Sequence[float], dtype: DType
) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    ops: list[Op] = []
    height = 0
    for number, (own, factor) in enumerate(zip(held, factors, strict=True)):
        shape = own[0].place.shape
        reads = [resolved.read(0) for resolved in own]
        ops.append(matrix_op(reads, shape, f"{name}#{number}", _expression(reads, factor, dtype)))
        height += shape[0]
    return tuple(ops), (height, held[0][0].place.shape[1])


def _expression(reads: Sequence[Read], factor: float, dtype: DType) -> Expression:
    if len(reads) > 1:
        return mean_expression((1.0,) * len(reads), dtype)
    if factor != 1:
        settings = Settings(values={}, sources=({"scale": factor},))
        return make_expression(PASSTHROUGH, settings, has_base=False, cast=dtype)
    is_plain = reads[0].view is None and reads[0].gather is None and reads[0].dtype is dtype
    return copy_expression(dtype) if is_plain else conversion_expression(dtype)


def _beside(
    name: str, held: Sequence[Sequence[ResolvedInput]], dtype: DType
) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """Matrices side by side, in runs of rows that fit into memory, without factors."""
    height = held[0][0].place.shape[0]
    width = sum(own[0].place.shape[1] for own in held)
    step = max(1, _RUN_ELEMENTS // width)
    ops = tuple(
        _run(f"{name}#{first}", held, (first, min(step, height - first)), dtype)
        for first in range(0, height, step)
    )
    return ops, (height, width)


def _run(name: str, held: Sequence[Sequence[ResolvedInput]], span: tuple[int, int], dtype: DType) -> Op:
    first, count = span
    taken: list[tuple[Read, tuple[int, int]]] = []
    for number, own in enumerate(held):
        columns = own[0].place.shape[1]
        runs = tuple((0, first, count, term) for term in range(len(own)))
        rows = Gather(count, columns, tuple(resolved.gather_input() for resolved in own), runs, count)
        taken.append((gathered(number, rows), (count, columns)))
    return side_by_side(
        [f"{name}#{number}" for number in range(len(held))], taken, conversion_expression(dtype)
    )
