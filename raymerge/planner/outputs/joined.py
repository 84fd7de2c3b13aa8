"""Matrices that servers join, and whose codes therefore share the one scale of a matrix.

Servers join q, k and v, and gate and up, of which each has such a scale in NVFP4, and take one of these for
all: what is under another would be read wrongly. FP8 with one scale for a matrix needs nothing of the kind:
servers encode it anew under the largest of the scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from raymerge.architectures import Rules, joined_matrix
from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.merge_plan.expressions import Output
from raymerge.planner.outputs.outputs import OutputBuilder

_SHARED = frozenset({Format.NVFP4})
"""Formats of whose tensors' scales servers take one for all that they join."""


def with_joined(outputs: Mapping[str, Output], builder: OutputBuilder, rules: Rules) -> tuple[Output, ...]:
    """The outputs, with those that are to share a scale marked.

    What one source gives unchanged, as all that it is joined to, stays a copy. Else copies are made too: what
    their source gives them as the scale need not be that of the others.
    """
    groups: dict[str, list[str]] = {}
    for output in outputs.values():
        joined = joined_matrix(output.name, rules) if _is_alone(output) else None
        if joined is not None:
            groups.setdefault(joined, []).append(output.name)
    found = dict(outputs)
    for joined, names in groups.items():
        if len(names) > 1 and not _are_copies(outputs[name] for name in names):
            for name in names:
                found[name] = _marked(outputs[name], joined, builder)
    return tuple(found.values())


def _is_alone(output: Output) -> bool:
    """Whether an output is one matrix under a scale that servers take for others, too."""
    packed = output.packed
    return packed is not None and packed.packing.format in _SHARED and packed.packing.num_matrices == 1


def _are_copies(outputs: Iterable[Output]) -> bool:
    """Whether one source gives all, unchanged."""
    rows = [row for output in outputs for row in output.rows]
    return all(row.expression.is_copy for row in rows) and len({row.reads[0].source for row in rows}) == 1


def _marked(output: Output, joined: str, builder: OutputBuilder) -> Output:
    """The output as one that shares its scale; made anew where it was a copy."""
    if all(row.expression.is_copy for row in output.rows):
        output = builder.made_anew(output.name) or output
    packed = output.packed
    return output if packed is None else output._replace(packed=replace(packed, joined=joined))
