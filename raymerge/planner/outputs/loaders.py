"""Notes on known loaders that would read the result wrongly, or not at all."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import NamedTuple

from raymerge.architectures.roles import TensorInfo, describe
from raymerge.architectures.rules import Role, Rules
from raymerge.checkpoints.quantisation.encoding import QuantSpec
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.merge_plan.expressions import Output


@dataclass(frozen=True, slots=True)
class LoaderRule:
    loader: str
    effect: str
    """What the loader does with ``{tensors}``."""
    reason: str
    remedy: str
    tensors: str = ""
    """A key of ``CONDITIONS``; "" where ``names`` tells."""
    names: str = ""
    model_types: Sequence[str] = ()
    """Families for which ``names`` holds."""


def loader_rules() -> tuple[LoaderRule, ...]:
    table = files("raymerge.planner").joinpath("loaders.toml").read_text(encoding="utf-8")
    return tuple(LoaderRule(**entry) for entry in tomllib.loads(table)["loaders"])


def loader_notes(outputs: Sequence[Output], rules: Rules) -> Iterator[str]:
    """A sentence for each loader and reason: the tensors, what becomes of them, why and what helps."""
    for rule in loader_rules():
        held = [output for output in outputs if _holds(rule, output, rules)]
        if held:
            first = held[0]
            example = f"{len(held)} tensors ({first.name} {list(first.shape)})"
            yield f"{rule.loader} {rule.effect.format(tensors=example)}: {rule.reason}. {rule.remedy}"


class _Matrix(NamedTuple):
    quant_spec: QuantSpec
    info: TensorInfo
    rules: Rules

    @property
    def sides(self) -> list[tuple[int, int, int]]:
        """Of rows and columns how many there are, their scales, and how many share one."""
        spec = self.quant_spec
        return list(zip(spec.shape[-2:], spec.grid, spec.block, strict=True))


def _holds(rule: LoaderRule, output: Output, rules: Rules) -> bool:
    if rule.names:
        return rules.model_type in rule.model_types and re.search(rule.names, output.name) is not None
    quant_spec = None if output.packed is None else output.packed.quant_spec
    if quant_spec is None or quant_spec.format != FP8_BLOCK:
        return False
    return CONDITIONS[rule.tensors](_Matrix(quant_spec, describe(output.name, rules), rules))


def _blocks_of_another_size(matrix: _Matrix) -> bool:
    """Whether rows and columns are as many equal blocks as there are scales, but of another size."""
    is_even = all(size % count == 0 for size, count, _ in matrix.sides)
    return is_even and any(count > 1 and size // count != block for size, count, block in matrix.sides)


def _blocks_cut_off(matrix: _Matrix) -> bool:
    return any(size % count for size, count, _ in matrix.sides)


def _experts_joined_within_a_block(matrix: _Matrix) -> bool:
    """Whether gate and up, one below the other, have another number of rows of scales than both together.

    A matrix of both has two rows of scales at least there."""
    info, (rows, count, block) = matrix.info, matrix.sides[0]
    if info.part is not Role.EXPERT or not matrix.rules.is_out_in:
        return False
    apart = {"gate": 2, "up": 2, "gate_up": 1}.get(info.projection or "", 0)
    return apart > 0 and count * apart != max(2, -(-rows * apart // block))


CONDITIONS: Mapping[str, Callable[[_Matrix], bool]] = MappingProxyType(
    {
        "blocks_of_another_size": _blocks_of_another_size,
        "blocks_cut_off": _blocks_cut_off,
        "experts_joined_within_a_block": _experts_joined_within_a_block,
    }
)
