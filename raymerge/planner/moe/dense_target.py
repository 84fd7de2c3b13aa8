"""Makes dense feed-forward layers of experts: of one, of the mean of several, or of several side by side.

A gated feed-forward layer of experts side by side gives the sum of theirs: gate and up projections stand one
under the other, down projections one beside the other. A factor on an expert's output goes into its up
projection, where it is equivalent and covers ops of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from raymerge.architectures import Role
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Fate, Rule
from raymerge.merge_plan.expressions import (
    Assembly,
    Expression,
    Output,
    Part,
    Read,
    Row,
    assembled,
    conversion_expression,
    copy_expression,
    make_expression,
)
from raymerge.methods import Settings
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.matching.input_resolver import ResolvedInput
from raymerge.planner.moe.expert_blocks import ExpertBlock
from raymerge.planner.moe.expert_moves import BASE, Origin
from raymerge.planner.moe.expert_outputs import ExpertInputs, fate_of, matrix_row, mean_expression
from raymerge.recipes import ExpertChange

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
    """Neurons of a block's dense layer; 0 with a finding where that is unknown."""
    found = [_found(inputs, block, piece, "gate") for piece in _pieces(block, change)]
    return 0 if None in found else sum(each[0].place.shape[0] for each in found if each is not None)


def dense_outputs(block: ExpertBlock, change: ExpertChange, inputs: ExpertInputs) -> Iterator[Output]:
    """The three matrices of the dense layer that replaces a block of experts.

    One that cannot be made is left out, with a finding.
    """
    pieces = _pieces(block, change)
    place = f"{block.path.rpartition('.')[0]}.mlp"
    for projection in _PROJECTIONS:
        name = f"{place}.{projection}_proj.weight"
        found = [_found(inputs, block, piece, projection) for piece in pieces]
        held = [each for each in found if each is not None]
        if len(held) < len(found) or not _all_fit(inputs, held, projection):
            continue
        dtype = inputs.dtype_of(held[0][0].place.tensor, Role.EXPERT)
        make = _beside if projection == "down" and len(pieces) > 1 else _under
        rows, shape = make(name, held, [_factor(piece, projection) for piece in pieces], dtype)
        _settle(inputs, name, held, [_factor(piece, projection) for piece in pieces])
        yield Output(name, dtype, shape, rows, True)


def settle_routers(block: ExpertBlock, inputs: ExpertInputs) -> None:
    for name in (*block.routers, *(name for name in block.shared if _is_gate(inputs, name))):
        inputs.fates.settle(BASE, name, Fate(Disposition.DROPPED, Rule.ROUTER_OF_DENSE))


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


def _factor(piece: _Piece, projection: str) -> float:
    return piece.factor if projection == "up" else 1.0


def _found(
    inputs: ExpertInputs, block: ExpertBlock, piece: _Piece, projection: str
) -> list[ResolvedInput] | None:
    if not piece.experts:
        shared = (f"{block.canonical}.{word}.{projection}_proj.weight" for word in _SHARED_WORDS)
        resolved = (inputs.resolver.find(BASE, name, name) for name in shared)
        found = [each for each in resolved if each is not None]
        if not found:
            inputs.missing(BASE, f"{block.canonical}.{_SHARED_WORDS[0]}.{projection}_proj.weight")
        return found[:1] or None
    logical = f"{block.canonical}.experts.0.{projection}_proj.weight"
    matrices = [inputs.matrix(block, Origin(BASE, expert), logical) for expert in piece.experts]
    return None if None in matrices else [each for each in matrices if each is not None]


def _all_fit(inputs: ExpertInputs, held: Sequence[Sequence[ResolvedInput]], projection: str) -> bool:
    side = 0 if projection == "down" else 1
    hidden = held[0][0].place.shape[side]
    fits = True
    for resolved in (each for own in held for each in own):
        shape = resolved.place.shape
        wanted = (hidden, shape[1]) if side == 0 else (shape[0], hidden)
        fits = inputs.fits(BASE, resolved, wanted, resolved.place.tensor.name) and fits
    return fits


def _under(
    name: str, held: Sequence[Sequence[ResolvedInput]], factors: Sequence[float], dtype: DType
) -> tuple[tuple[Row, ...], tuple[int, ...]]:
    rows: list[Row] = []
    height = 0
    for number, (own, factor) in enumerate(zip(held, factors, strict=True)):
        shape = own[0].place.shape
        reads = [resolved.read(0) for resolved in own]
        rows.append(matrix_row(reads, shape, f"{name}#{number}", _expression(reads, factor, dtype)))
        height += shape[0]
    return tuple(rows), (height, held[0][0].place.shape[1])


def _expression(reads: Sequence[Read], factor: float, dtype: DType) -> Expression:
    if len(reads) > 1:
        return mean_expression((1.0,) * len(reads), dtype)
    if factor != 1:
        settings = Settings(values={}, sources=({"scale": factor},))
        return make_expression(PASSTHROUGH, settings, has_base=False, cast=dtype)
    is_plain = reads[0].view is None and reads[0].assembly is None and reads[0].dtype is dtype
    return copy_expression(dtype) if is_plain else conversion_expression(dtype)


def _beside(
    name: str, held: Sequence[Sequence[ResolvedInput]], factors: Sequence[float], dtype: DType
) -> tuple[tuple[Row, ...], tuple[int, ...]]:
    """Matrices side by side, in runs of rows that fit into memory, without factors."""
    del factors
    height = held[0][0].place.shape[0]
    width = sum(own[0].place.shape[1] for own in held)
    step = max(1, _RUN_ELEMENTS // width)
    rows = tuple(
        _run(f"{name}#{first}", held, (first, min(step, height - first)), dtype)
        for first in range(0, height, step)
    )
    return rows, (height, width)


def _run(name: str, held: Sequence[Sequence[ResolvedInput]], span: tuple[int, int], dtype: DType) -> Row:
    first, count = span
    width = sum(own[0].place.shape[1] for own in held)
    parts: list[Part] = []
    reads: list[Read] = []
    column = 0
    for number, own in enumerate(held):
        columns = own[0].place.shape[1]
        runs = tuple((0, first, count, term) for term in range(len(own)))
        rows = Assembly(count, columns, tuple(resolved.term() for resolved in own), runs, count)
        reads.append(assembled(number, rows))
        parts.append(Part(f"{name}#{number}", (count, columns), View(column, (count, columns), (width, 1))))
        column += columns
    elements = sum(prod(part.shape) for part in parts)
    return Row(elements, conversion_expression(dtype), tuple(parts), tuple(reads))


def _settle(
    inputs: ExpertInputs, name: str, held: Sequence[Sequence[ResolvedInput]], factors: Sequence[float]
) -> None:
    for own, factor in zip(held, factors, strict=True):
        fate = fate_of(len(own) if factor == 1 else 2, name)
        for resolved in own:
            inputs.settle(resolved, BASE, fate)


def _is_gate(inputs: ExpertInputs, name: str) -> bool:
    return inputs.logical.part(name) is Role.SHARED_EXPERT_GATE
