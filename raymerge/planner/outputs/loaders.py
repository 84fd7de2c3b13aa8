"""Notes on known loaders that would read the result wrongly, or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raymerge.architectures.roles import describe
from raymerge.architectures.rules import Role, Rules
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.merge_plan.expressions import Output


def loader_notes(outputs: Sequence[Output], rules: Rules) -> Iterator[str]:
    """A sentence for each loader and reason: the tensors, what becomes of them, why and what helps."""
    of_blocks = [each for each in outputs if each.packed and each.packed.quant_spec.format == FP8_BLOCK]
    of_names = [_leaves_out(*each) for each in rules.left_out]
    for rule in (*_RULES_OF_BLOCKS, *of_names):
        possible = outputs if rule in of_names else of_blocks
        concerned = [output for output in possible if rule.concerns(_Loaded(output, rules))]
        if concerned:
            first = concerned[0]
            example = f"{len(concerned)} tensors ({first.name} {list(first.shape)})"
            yield f"{rule.loader} {rule.effect.format(tensors=example)}: {rule.reason}. {rule.remedy}"


class _Side(NamedTuple):
    """Rows or columns of a matrix in FP8."""

    size: int
    num_scales: int
    block: int


class _Loaded(NamedTuple):
    output: Output
    rules: Rules

    @property
    def sides(self) -> tuple[_Side, ...]:
        """Rows and columns."""
        assert self.output.packed is not None
        spec = self.output.packed.quant_spec
        return tuple(map(_Side, spec.shape[-2:], spec.grid, spec.block))


def _has_blocks_of_another_size(loaded: _Loaded) -> bool:
    """Whether rows and columns are as many equal blocks as there are scales, but of another size."""
    is_even = all(side.size % side.num_scales == 0 for side in loaded.sides)
    return is_even and any(n > 1 and size // n != block for size, n, block in loaded.sides)


def _has_blocks_cut_off(loaded: _Loaded) -> bool:
    return any(side.size % side.num_scales for side in loaded.sides)


def _is_joined_within_a_block(loaded: _Loaded) -> bool:
    """Whether gate and up, one below the other, have another number of rows of scales than both together.

    A matrix of both has two rows of scales at least there."""
    if not loaded.rules.is_out_in:
        return False
    info, (rows, num_scales, block) = describe(loaded.output.name, loaded.rules), loaded.sides[0]
    apart = {"gate": 2, "up": 2, "gate_up": 1}.get(info.projection or "", 0)
    if info.part is not Role.EXPERT or not apart:
        return False
    return num_scales * apart != max(2, -(-rows * apart // block))


class _LoaderRule(NamedTuple):
    loader: str
    concerns: Callable[[_Loaded], bool]
    effect: str
    """What the loader does with ``{tensors}``."""
    reason: str
    remedy: str


def _leaves_out(names: re.Pattern[str], loader: str) -> _LoaderRule:
    return _LoaderRule(
        loader,
        lambda loaded: names.search(loaded.output.name) is not None,
        "leaves out {tensors} without a word",
        "they have the names of transformers' modules, and it knows those of the published model alone",
        "Name a base_model that has the published names: the result has the names of its base.",
    )


_RULES_OF_BLOCKS = (
    _LoaderRule(
        "transformers",
        _has_blocks_of_another_size,
        "decodes {tensors} wrongly where it loads FP8 as bfloat16 (on CPUs, or with dequantize=True)",
        "it takes the size of the blocks from the number of scales, as if the last block were as large as "
        "the others",
        "Load the result on a GPU with FP8, or store these tensors as bf16 (out_format).",
    ),
    _LoaderRule(
        "transformers",
        _has_blocks_cut_off,
        "refuses {tensors} where it loads FP8 as bfloat16 (on CPUs, or with dequantize=True)",
        "their last block is cut off, and it has scales that divide rows and columns evenly alone",
        "Load the result on a GPU with FP8, or store these tensors as bf16 (out_format).",
    ),
    _LoaderRule(
        "transformers",
        _is_joined_within_a_block,
        "does not load {tensors} as FP8",
        "it stores gate and up of an expert as one matrix, in which a block would have rows of both",
        "Serve the result with vLLM or SGLang, or store these tensors as bf16 (out_format).",
    ),
)
