"""Which outputs get one scale of the whole matrix together, since servers join them and take one for all.

Of a format that has scales of blocks too (NVFP4), what has another scale would be read so many times too
large. So a joined matrix is made under one scale, what would be a copy included, unless one source gives all
of it unchanged. FP8 with one scale a matrix servers decode, and encode again under the largest: one scale for
what is made keeps it from being rounded twice, and copies stay what they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymerge.architectures.roles import JoinedMatrix, joined_matrix
from raymerge.architectures.rules import Rules
from raymerge.checkpoints.quantisation.encoding import Encoding, QuantisedWeight
from raymerge.merge_plan.expressions import Output, QuantisedOutput
from raymerge.planner.inputs.served_scales import joined_scales, misread, misread_text, misspelt, scale_values
from raymerge.planner.inputs.sources import Source
from raymerge.planner.outputs.outputs import OutputBuilder

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_MOST_LOOKED_AT = 128
"""Joined matrices of a source whose scales a plan reads: there may be a hundred thousand."""


class Joined(NamedTuple):
    """Joined matrices in formats that have scales of the whole matrix."""

    num_made: int
    """Those that are made under one scale."""
    copied: Mapping[int, int]
    """How many that have scales of blocks too are copied unchanged, by source."""


def join_scales(
    outputs: Mapping[str, Output], builder: OutputBuilder, rules: Rules
) -> tuple[tuple[Output, ...], Joined]:
    """The outputs, with those that are to share a scale marked."""
    changed, num_made, copied = dict(outputs), 0, Counter[int]()
    for encoding, names in _groups(outputs, rules):
        made = [name for name in names if not _is_copy(outputs[name])]
        if encoding.format.has_two_scales:
            sources = {op.reads[0].source for name in names for op in outputs[name].ops}
            if not made and len(sources) == 1:
                copied.update(sources)
                continue
            made = names
        if len(made) > 1:
            num_made += 1
            changed.update((name, _marked(outputs[name], "+".join(made), builder)) for name in made)
    return tuple(changed.values()), Joined(num_made, copied)


def _groups(outputs: Mapping[str, Output], rules: Rules) -> Iterator[tuple[Encoding, list[str]]]:
    """Names of outputs that are stored alike and that servers join."""
    groups: dict[tuple[JoinedMatrix, Encoding], list[str]] = {}
    for output in outputs.values():
        quant_spec = None if output.packed is None else output.packed.quant_spec
        if quant_spec is None or quant_spec.tensor_scale_dtype is None or quant_spec.num_matrices > 1:
            continue
        if (joined := joined_matrix(output.name, rules)) is not None:
            groups.setdefault((joined, quant_spec.encoding), []).append(output.name)
    return ((encoding, names) for (_, encoding), names in groups.items() if len(names) > 1)


def _is_copy(output: Output) -> bool:
    return all(op.expression.is_copy for op in output.ops)


def _marked(output: Output, joined: str, builder: OutputBuilder) -> Output:
    if _is_copy(output):
        output = builder.made_anew(output.name) or output
    packed = output.packed
    return output if packed is None else output._replace(packed=replace(packed, joined=joined))


def joined_notes(joined: Joined, sources: Sequence[Source]) -> Iterator[str]:
    """``joined`` as ``join_scales`` gives it."""
    if joined.num_made:
        yield (
            f"{joined.num_made} times matrices that servers join (q, k and v; gate and up) get one scale of "
            "the whole matrix, that of the largest number among them, since servers take one for all"
        )
    if not (joined.num_made or joined.copied):
        return
    for source in sources:
        yield from _unequal(source, joined.copied.get(source.index, 0))


def several_formats(outputs: Sequence[Output], donor: Source) -> Iterator[str]:
    """A note where matrices that vLLM joins are stored in several formats, and are not so in the donor."""
    known = donor.checkpoint.packed
    changed = (each for each in outputs if _stored_as(each.packed) != _stored_as(known.get(each.name)))
    matrices = filter(None, {joined_matrix(each.name, donor.rules) for each in changed})
    joined = {f"{part}.weight": matrix for matrix in matrices for part in matrix.parts}
    forms: dict[JoinedMatrix, dict[str, str]] = {}
    for output in outputs if joined else ():
        if (matrix := joined.get(output.name)) is not None:
            forms.setdefault(matrix, {})[output.name] = _stored_as(output.packed)
    mixed = {matrix: own for matrix, own in forms.items() if len(set(own.values())) > 1}
    if not mixed:
        return
    matrix, own = next(iter(mixed.items()))
    alike = _NUMBER.sub(".*", matrix.module)
    listed = ", ".join(f"{name.removesuffix('.weight')} as {form}" for name, form in own.items())
    yield (
        f"{len(mixed)} times matrices that vLLM joins into one are stored in several formats ({listed}), and "
        "it refuses such a model when it loads it. Give all of them one format in out_format, as by "
        f"{{glob: '{alike}.*', value: bf16}}"
    )


def _stored_as(packed: QuantisedOutput | QuantisedWeight | None) -> str:
    return "plain numbers" if packed is None else packed.quant_spec.format.word


def _unequal(source: Source, num_copied: int) -> Iterator[str]:
    """Notes where a source's own scales are not equal within what servers join, or are copied in the other
    spelling, by some of them."""
    matrices = joined_scales(source.checkpoint.stored, source.rules)
    if not matrices or source.checkpoint.unwritten is not None:
        return
    some = matrices[:: -(-len(matrices) // _MOST_LOOKED_AT)]
    with source.checkpoint.open() as store:
        values = scale_values(store, some)
    if num_copied:
        yield from (f"{source.name}: {each} They are copied as they are" for each in misspelt(some, values))
    factors = misread(some, values)
    if not factors:
        return
    stays = f", and {num_copied} times they are copied unchanged and stay so" if num_copied else ""
    yield (
        f"{source.name}: {misread_text(factors)} ({len(some)} of {len(matrices)} were looked at). What is "
        f"merged gets one scale{stays}"
    )
