"""The experts of a mixture as output tensors, one for each matrix or all of a layer in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.architectures.moe_names import expert_names, fused_names, is_fused, shared_names
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import Output, Row
from raymerge.planner.inputs.plain import PlainNumbers
from raymerge.planner.moe.expert_rows import ExpertRows, Matrix
from raymerge.planner.moe.shape import MoeShape
from raymerge.planner.outputs.plan_context import Workshop
from raymerge.recipes import MoeRecipe

_PROJECTIONS = ("gate", "up", "down")


class MoeExperts:
    """Makes the outputs of routed and shared experts."""

    def __init__(self, recipe: MoeRecipe, shape: MoeShape, shop: Workshop) -> None:
        self._recipe = recipe
        self._shape = shape
        self._findings = shop.findings
        plain = PlainNumbers(shop.supplies.sources, shop.findings)
        self._rows = ExpertRows(shop.supplies, plain, shop.findings, shop.builder.fates, seed=recipe.seed)

    def outputs(self) -> Iterator[Output]:
        """Every output that can be made; findings say why others cannot."""
        for layer in range(self._shape.num_layers):
            if is_fused(self._shape.target, self._recipe.layout):
                names = fused_names(self._shape.target, layer)
                yield from self._fused(layer, names.gate_up, names.down)
            else:
                yield from self._single(layer)
            if self._shape.shared:
                yield from self._shared(layer)

    def _single(self, layer: int) -> Iterator[Output]:
        """A tensor for each matrix of each expert."""
        for number, expert in enumerate(self._shape.experts):
            names = expert_names(self._shape.target, layer, number)
            for projection in _PROJECTIONS:
                matrix = self._matrix(names[projection], layer, number, projection)
                yield from self._output(names[projection], [self._rows.rows(expert, matrix)])

    def _fused(self, layer: int, gate_up: str, down: str) -> Iterator[Output]:
        """``[experts, 2 width, hidden]``, gate before up in each, and ``[experts, hidden, width]``."""
        for name, projections in ((gate_up, ("gate", "up")), (down, ("down",))):
            rows = [
                self._rows.rows(expert, self._matrix(name, layer, number, projection))
                for number, expert in enumerate(self._shape.experts)
                for projection in projections
            ]
            yield from self._output(name, rows, stacked=len(self._shape.experts))

    def _shared(self, layer: int) -> Iterator[Output]:
        """All shared experts as one feed-forward, as wide as they are together."""
        shared = self._shape.shared
        names = shared_names(self._shape.target, layer)
        first = len(self._shape.experts)
        for projection in _PROJECTIONS:
            matrix = self._matrix(names[projection], layer, first, projection)
            if projection == "down" and len(shared) > 1:
                if self._lie_beside():
                    yield from self._output(names[projection], [self._rows.beside(shared, matrix)])
                continue
            rows = [
                self._rows.rows(expert, self._matrix(names[projection], layer, first + number, projection))
                for number, expert in enumerate(shared)
            ]
            yield from self._output(names[projection], rows)

    def _lie_beside(self) -> bool:
        """Whether down projections of several shared experts may share rows; else a finding says why not.

        One row is computed in one way, and chance is drawn for one expert.
        """
        shared = self._shape.shared
        if not any(expert.is_random for expert in shared) and len({each.down_scale for each in shared}) == 1:
            return True
        self._findings.add(
            Problem(
                self._recipe.where("shared_experts"),
                f"{len(shared)} shared experts are stored as one network, whose down projection is made in "
                "one way; these differ in residual_scale, or have noise_scale or reinit_fraction.",
                "Give all of them the same residual_scale and leave the others out; or make such an expert "
                "in a recipe of its own before this one (merge_method passthrough with a scale of its "
                "down_proj, or upcycle), and name its result.",
            )
        )
        return False

    def _matrix(self, output: str, layer: int, number: int, projection: str) -> Matrix:
        # By this chance is drawn, the same whether experts are stored one by one or together.
        logical = f"layers.{layer}.experts.{number}.{projection}_proj"
        return Matrix(output, logical, layer, projection, self._shape.dtype)

    def _output(
        self, name: str, made: Sequence[tuple[Row, ...] | None], *, stacked: int = 0
    ) -> Iterator[Output]:
        """The output of rows that stand one below the other; nothing where one of them has a finding."""
        if None in made:
            return
        rows = tuple(row for each in made if each is not None for row in each)
        columns = _columns(rows[0])
        height = sum(row.num_elements for row in rows) // columns
        shape = (stacked, height // stacked, columns) if stacked else (height, columns)
        yield Output(name, self._shape.dtype, shape, rows, True)


def _columns(row: Row) -> int:
    """Columns of the matrix that a row is: of parts side by side, all of theirs."""
    return sum(part.shape[1] for part in row.parts)
