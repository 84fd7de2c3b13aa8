"""Outputs as they are stored: what is written as codes with scales becomes a tensor of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.checkpoints.numbers import part_name
from raymerge.merge_plan.dispositions import Fate, Fates
from raymerge.merge_plan.expressions import Output


def stored_outputs(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Every tensor that the files will hold.

    Args:
        outputs: every tensor of the output, codes with scales as one of their numbers.
    """
    return tuple(each for output in outputs for each in _stored(output))


def stored_fates(fates: Fates, outputs: Sequence[Output]) -> Iterator[tuple[int, str, Fate]]:
    """The fate of every source tensor, with an output that the files will hold.

    Of an output of codes with scales that is what the tensor is a part like, and else the codes.
    """
    packed = {output.name: output for output in outputs if output.packed is not None}
    names = {name: [each.name for each in _stored(output)] for name, output in packed.items()}
    for source, name, fate in fates.rows():
        stored = names.get(fate.output)
        if stored is None:
            yield source, name, fate
            continue
        alike = part_name(fates.whole(source, name), name, fate.output)
        yield source, name, fate._replace(output=alike if alike in stored else stored[0])


def _stored(output: Output) -> Iterator[Output]:
    packed = output.packed
    if packed is None:
        yield output
        return
    # That numbers are finite is seen before they are encoded: codes of four bits could not tell.
    packing = packed.packing
    yield Output(
        packed.codes, packing.code_dtype, packing.codes_shape, output.rows, False, joined=packed.joined
    )
    if packed.scales:
        shape = packing.scales_shape
        yield Output(packed.scales, packing.scale_dtype, shape, (), False, scales_of=packed.codes)
    if packed.tensor_scale is not None:
        yield Output(*packed.tensor_scale, (), False, scales_of=packed.codes, is_tensor_scale=True)
    yield from packed.others
