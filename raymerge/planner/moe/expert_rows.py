"""Experts made of the feed-forward layers of dense models: one op of the plan for each matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from raymerge.architectures import logical_name
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.merge_plan.dispositions import Disposition, Fate, Fates, Rule
from raymerge.merge_plan.expressions import (
    Assembly,
    Expression,
    Part,
    Read,
    Row,
    Term,
    assembled,
    copy_expression,
    make_expression,
)
from raymerge.methods import Settings, find_method, random_key
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.planner.inputs.quantised import PlainNumbers
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput

_ROWS, _COLUMNS = 0, 1
_NEURON_AXIS: Mapping[str, int] = {"gate": _ROWS, "up": _ROWS, "down": _COLUMNS}
# Along which dimension of each projection its neurons lie.
_KEY_LIMIT = 2**53
# A parameter of a method is a float: larger keys would lose bits.
_RUN_BYTES = 8 << 20
_RUN_ELEMENTS = 1 << 20
# Of a run of rows of which columns are taken, at most: stored bytes, and elements taken. It is made at once.


@dataclass(frozen=True, slots=True)
class Upcycled:
    source: int
    tensors: Mapping[tuple[int, str], str]
    number: int
    """The expert that it is a part of, counted without slices; seeds its random numbers."""
    slice: int
    """Which of ``slices`` equal runs of its neurons it is."""
    slices: int
    noise_scale: float
    reinit_fraction: float
    down_scale: float

    @property
    def is_random(self) -> bool:
        return self.noise_scale != 0 or self.reinit_fraction != 0


@dataclass(frozen=True, slots=True)
class Matrix:
    output: str
    logical: str
    layer: int
    projection: str
    dtype: DType


class ExpertRows:
    def __init__(
        self, resolver: InputResolver, plain: PlainNumbers, findings: Findings, fates: Fates, *, seed: int
    ) -> None:
        self._resolver = resolver
        self._plain = plain
        self._findings = findings
        self._fates = fates
        self._seed = seed

    def rows(self, expert: Upcycled, matrix: Matrix) -> tuple[Row, ...] | None:
        """The ops of one matrix of an expert, or None with a finding.

        Columns that are cut out of a matrix are made in runs of its rows, so that none of them takes the
        memory of the whole. A matrix with random numbers is one op: its statistics are those of all.
        """
        resolved = self._find_input(expert, matrix)
        if resolved is None:
            return None
        if expert.slices > 1 and _NEURON_AXIS[matrix.projection] == _COLUMNS and not expert.is_random:
            return self._in_runs((expert,), (resolved,), matrix)
        read, shape = self._read(resolved, expert, matrix.projection)
        expression = self._expression(expert, matrix, resolved, shape)
        self._settle(expert, resolved, matrix, expression)
        return (Row(prod(shape), expression, (Part(matrix.logical, shape, None),), (read,)),)

    def beside(self, experts: Sequence[Upcycled], matrix: Matrix) -> tuple[Row, ...] | None:
        """The down projections of several experts side by side, in runs of rows; None with a finding.

        One expression holds for all of an op: no expert has random numbers, and all have one factor.
        """
        inputs = [self._find_input(expert, matrix) for expert in experts]
        if None in inputs:
            return None
        return self._in_runs(experts, [each for each in inputs if each is not None], matrix)

    def _in_runs(
        self, experts: Sequence[Upcycled], inputs: Sequence[ResolvedInput], matrix: Matrix
    ) -> tuple[Row, ...]:
        """Columns of matrices side by side, so many rows at a time that what is read of them stays small."""
        height = inputs[0].place.shape[0]
        stored = sum(each.place.tensor.dtype.nbytes(each.place.shape[1]) for each in inputs)
        taken = sum(
            each.place.shape[1] // expert.slices for expert, each in zip(experts, inputs, strict=True)
        )
        step = max(1, min(_RUN_BYTES // stored, _RUN_ELEMENTS // taken))
        expression = self._computed(experts[0], matrix, inputs[0].place.shape)
        for expert, resolved in zip(experts, inputs, strict=True):
            self._settle(expert, resolved, matrix, expression)
        return tuple(
            _run(experts, inputs, matrix, expression, span=(first, min(step, height - first)))
            for first in range(0, height, step)
        )

    def _find_input(self, expert: Upcycled, matrix: Matrix) -> ResolvedInput | None:
        source = self._resolver.sources[expert.source]
        name = expert.tensors[matrix.layer, matrix.projection]
        found = self._resolver.find(expert.source, name, logical_name(name, source.rules))
        if found is None or not self._plain.check(expert.source, found.place.tensor):
            return None
        if found.factor is not None and expert.slices > 1:
            self._findings.tensor(
                ("sliced adapter", source.name),
                where=source.name,
                what="an adapter adds to {count} of the matrices that 'granularity' cuts",
                remedy="Merge the adapter into its model first, with a passthrough recipe before this one.",
                example=name,
            )
            return None
        return found

    def _read(
        self, resolved: ResolvedInput, expert: Upcycled, projection: str
    ) -> tuple[Read, tuple[int, ...]]:
        rows, columns = resolved.place.shape
        whole = resolved.read(0)
        if expert.slices == 1:
            return whole, (rows, columns)
        if _NEURON_AXIS[projection] == _ROWS:
            count = rows // expert.slices
            width = whole.dtype.nbytes(columns)
            first = whole.offset + expert.slice * count * width
            run = Read(0, whole.source, whole.key, first, count * width, whole.dtype, None)
            return run, (count, columns)
        return _columns_read(resolved, expert, part=0, span=(0, rows))

    def _expression(
        self, expert: Upcycled, matrix: Matrix, resolved: ResolvedInput, shape: tuple[int, ...]
    ) -> Expression:
        whole_bytes = expert.slices == 1 or _NEURON_AXIS[matrix.projection] == _ROWS
        changed = expert.is_random or _is_scaled(expert, matrix) or resolved.factor is not None
        untouched = whole_bytes and not changed
        if untouched and resolved.place.tensor.dtype is matrix.dtype and resolved.place.view is None:
            return copy_expression(matrix.dtype)
        return self._computed(expert, matrix, shape)

    def _computed(self, expert: Upcycled, matrix: Matrix, shape: tuple[int, ...]) -> Expression:
        scale = expert.down_scale if _is_scaled(expert, matrix) else 1.0
        if not expert.is_random:
            settings = Settings(values={}, sources=({"scale": None if scale == 1 else scale},))
            return make_expression(PASSTHROUGH, settings, has_base=False, cast=matrix.dtype)
        method = find_method("upcycle")
        if method is None:
            raise RuntimeError("the method 'upcycle' is not in the table of methods")
        axis = _NEURON_AXIS[matrix.projection]
        numbers = {
            "scale": scale,
            "noise_scale": expert.noise_scale,
            "reinit_fraction": expert.reinit_fraction,
            "neuron_axis": axis,
            "neuron_key": self._neuron_key(expert, matrix.layer),
            "neuron_first": expert.slice * shape[axis],
            "num_neurons": expert.slices * shape[axis],
        }
        settings = Settings(values={}, sources=(numbers,))
        return make_expression(method, settings, has_base=False, cast=matrix.dtype)

    def _neuron_key(self, expert: Upcycled, layer: int) -> int:
        """The same for all matrices and slices of an expert in a layer, so that a neuron is drawn whole."""
        return random_key(self._seed, f"neurons of expert {expert.number} in layer {layer}", 0) % _KEY_LIMIT

    def _settle(
        self, expert: Upcycled, resolved: ResolvedInput, matrix: Matrix, expression: Expression
    ) -> None:
        if expression.is_copy:
            fate = Fate(Disposition.COPIED, Rule.EXPERT, matrix.output)
        elif resolved.factor is not None or expert.is_random or _is_scaled(expert, matrix):
            fate = Fate(Disposition.MERGED, Rule.EXPERT, matrix.output)
        else:
            fate = Fate(Disposition.CONVERTED, Rule.EXPERT, matrix.output)
        for store, name in resolved.holders():
            self._fates.settle(store, name, fate)
        for store, name in self._resolver.holders(expert.source, resolved):
            self._fates.settle(store, name, Fate(Disposition.DROPPED, Rule.REPLACED, matrix.output))


def repeated_rows(read: Read, num_rows: int, num_columns: int, *, times: int) -> Read:
    runs = tuple((row * times + copy, row, 1, 0) for row in range(num_rows) for copy in range(times))
    total = num_rows * times
    return assembled(0, Assembly(total, num_columns, (Term(read, num_rows),), runs, total))


def _run(
    experts: Sequence[Upcycled],
    inputs: Sequence[ResolvedInput],
    matrix: Matrix,
    expression: Expression,
    *,
    span: tuple[int, int],
) -> Row:
    taken = [
        _columns_read(resolved, expert, part=number, span=span)
        for number, (expert, resolved) in enumerate(zip(experts, inputs, strict=True))
    ]
    width = sum(shape[1] for _, shape in taken)
    parts: list[Part] = []
    column = 0
    for number, (_, shape) in enumerate(taken):
        view = View(column, shape, (width, 1)) if len(taken) > 1 else None
        parts.append(Part(f"{matrix.logical}#{number}.{span[0]}", shape, view))
        column += shape[1]
    return Row(span[1] * width, expression, tuple(parts), tuple(read for read, _ in taken))


def _columns_read(
    resolved: ResolvedInput, expert: Upcycled, *, part: int, span: tuple[int, int]
) -> tuple[Read, tuple[int, int]]:
    first, count = span
    columns = resolved.place.shape[1]
    own = columns // expert.slices
    if resolved.factor is not None or resolved.place.view is not None:
        rows = Assembly(count, columns, (resolved.term(),), ((0, first, count, 0),), count)
        return assembled(part, rows), (count, columns)
    whole = resolved.read(part)
    width = whole.dtype.nbytes(columns)
    view = View(expert.slice * own, (count, own), (columns, 1)) if expert.slices > 1 else None
    read = whole._replace(offset=whole.offset + first * width, nbytes=count * width, view=view)
    return read, (count, own)


def _is_scaled(expert: Upcycled, matrix: Matrix) -> bool:
    return matrix.projection == "down" and expert.down_scale != 1
