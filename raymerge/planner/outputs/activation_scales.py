"""Scales of inputs, outputs, cached keys and values in a merge: the largest among the sources.

No weight tells what a merged model will compute. A scale that is too small clips, and one that is too large
costs little, as FP8 has an exponent of its own. Servers join the matrices of q, k and v, and those of gate
and up, under one input scale: these get the largest of all. For all experts of a layer they take the largest
themselves, which is the same number whether it is taken before or after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from raymerge.architectures.roles import JoinedMatrix, joined_matrix
from raymerge.architectures.rules import Rules, quantisation_tables
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.config import Declared
from raymerge.checkpoints.quantisation.detect import INPUT_SCALES, is_activation_scale, is_divisor
from raymerge.checkpoints.quantisation.encoding import QuantisedWeight, part_name
from raymerge.checkpoints.quantisation.formats import read_declared
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Dispositions, Rule, Use
from raymerge.merge_plan.expressions import Op, Output, Read, make_expression
from raymerge.methods import Settings
from raymerge.methods.internal import LARGEST
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.input_resolver import whole_read
from raymerge.planner.matching.method_assignment import BoundOutput
from raymerge.planner.outputs.ops import copied_output, matrix_op

_WEIGHT = ".weight"

Held = tuple[int, StoredTensor]


class ActivationScales:
    def __init__(self, sources: Sequence[Source], dispositions: Dispositions) -> None:
        self._sources = sources
        self._dispositions = dispositions
        self.quantised = frozenset(
            source.index for source in sources if quantisation_tables(source.checkpoint.config)
        )
        """Sources that have such scales; models without quantisation may use the names otherwise."""
        self._names: dict[int, Mapping[tuple[str, int], str]] = {}
        self._by_source: dict[int, Declared] = {}

    def alone(self, chosen: BoundOutput, lead: StoredTensor) -> Output:
        named = ((member.source, name) for member, name in chosen.members)
        held = [(source, self._sources[source].checkpoint.tensors.get(name)) for source, name in named]
        return self._output(chosen.aligned.output, (chosen.aligned.span.lead.source, lead), held)

    def of_inputs(
        self, name: str, output: str, own: Held, chosen: BoundOutput | None, codes: DType
    ) -> Output:
        """The output of a scale ``name`` of the inputs of ``output``, a matrix of ``codes``.

        ``own`` is the lead's; ``chosen`` None where the matrix is made of the lead's alone. Beside codes of
        another kind the scale of the same inputs is another: NVFP4 divides their largest by 2688, FP8 by
        448."""
        ending = name[len(output.removesuffix(_WEIGHT)) :]
        members = () if chosen is None else chosen.members
        held = [
            (member.source, self._stored(member.source, matrix, ending, codes)) for member, matrix in members
        ]
        return self._output(name, own, held)

    def of_another(
        self, packed: QuantisedWeight, output: str, source: int, chosen: BoundOutput | None
    ) -> Iterator[Output]:
        """The scale of the inputs of ``output`` where the lead ``source`` declares one and lacks it, from the
        members that have it; else nothing."""
        module = packed.name.removesuffix(_WEIGHT)
        declared = None if chosen is None else self._declared(source).of(module)
        if chosen is None or declared is None or not declared.scales_inputs:
            return
        if any(name.endswith(INPUT_SCALES) for name in packed.others):
            return
        for member, matrix in chosen.members:
            own = self._sources[member.source].checkpoint.packed.get(matrix)
            if own is None or own.quant_spec.format != packed.quant_spec.format:
                continue
            for name in (each for each in own.others if each.endswith(INPUT_SCALES)):
                stored = self._sources[member.source].checkpoint.stored[name]
                scale, codes = part_name(matrix, name, output), own.quant_spec.format.code_dtype
                yield self.of_inputs(scale, output, (member.source, stored), chosen, codes)
                return

    def _declared(self, source: int) -> Declared:
        if source not in self._by_source:
            tables = quantisation_tables(self._sources[source].checkpoint.config)
            self._by_source[source] = read_declared(tables)
        return self._by_source[source]

    def join(self, outputs: Sequence[Output], rules: Rules) -> tuple[Output, ...]:
        """The outputs, with equal input scales where servers join them.

        What all comes from one source unchanged stays as stored there."""
        groups: dict[tuple[JoinedMatrix | None, str, DType | None], list[Output]] = {}
        for output in outputs:
            scales = input_scales(output)
            matrix = joined_matrix(output.name, rules) if scales else None
            for scale in scales if matrix is not None else ():
                key = (matrix, scale.name.rpartition(".")[2], _codes(output))
                groups.setdefault(key, []).append(scale)
        joined = {each.name: each for group in groups.values() for each in self._joined(group)}
        return tuple(_with_scales(output, joined) for output in outputs) if joined else tuple(outputs)

    def without_table(self, outputs: Sequence[Output], donor: int) -> tuple[Output, ...]:
        """The outputs for a config without a table, where such scales would be tensors that nothing declares.

        A donor that has no table either may use the names otherwise."""
        gone = [each for each in outputs if donor in self.quantised and is_activation_scale(each.name)]
        for scale in gone:
            for read in _reads(scale):
                disposition = Disposition(Use.DROPPED, Rule.NOT_QUANTISED)
                self._dispositions.settle_part(read.source, self._name(read), disposition)
        names = {each.name for each in gone}
        return tuple(each for each in outputs if each.name not in names)

    def notes(self, outputs: Sequence[Output]) -> Iterator[str]:
        scales = (*outputs, *(each for output in outputs for each in input_scales(output)))
        made = sum(_is_largest(each) for each in scales)
        if made:
            yield (
                f"{made} scales of inputs and of cached keys and values are not merged as weights: each is "
                "the largest of those that the models have, the same for what servers join (q, k and v; "
                "gate and up)"
            )

    def _joined(self, group: Sequence[Output]) -> Iterator[Output]:
        reads = tuple(dict.fromkeys(read for each in group for read in _reads(each)))
        is_unchanged = len({read.source for read in reads}) == 1
        if is_unchanged and not any(_is_largest(each) for each in group):
            return
        for each in group:
            own = _reads(each)
            if len(own) == len(reads):
                continue
            for read in own:
                self._settle(read.source, self._name(read), each.name)
            yield each._replace(ops=(_largest(each.name, each, reads),), check_finite=True)

    def _name(self, read: Read) -> str:
        if read.source not in self._names:
            stored = self._sources[read.source].checkpoint.stored.values()
            self._names[read.source] = {(each.key, each.offset): each.name for each in stored}
        return self._names[read.source][read.key, read.offset]

    def _stored(self, source: int, matrix: str, ending: str, codes: DType) -> StoredTensor | None:
        checkpoint = self._sources[source].checkpoint
        packed = checkpoint.packed.get(matrix)
        if packed is None or packed.quant_spec.format.code_dtype is not codes:
            return None
        return checkpoint.stored.get(f"{matrix.removesuffix(_WEIGHT)}{ending}")

    def _output(self, name: str, own: Held, candidates: Sequence[tuple[int, StoredTensor | None]]) -> Output:
        """The largest of the candidates with as many elements as the lead's ``own``, or else that."""
        like = own[1]
        alike = [
            (source, stored)
            for source, stored in candidates
            if stored is not None and stored.num_elements == like.num_elements
        ]
        held: Sequence[Held] = alike or [own]
        reads = {whole_read(source, stored): (source, stored.name) for source, stored in held}
        first = next(iter(reads))
        if len(reads) == 1 and first.dtype is like.dtype:
            self._dispositions.settle_part(*reads[first], Disposition(Use.COPIED, Rule.ONE_SOURCE, name))
            return copied_output(name, held[0][1]._replace(shape=like.shape), held[0][0])
        for source, stored in reads.values():
            self._settle(source, stored, name)
        return Output(name, like.dtype, like.shape, (_largest(name, like, tuple(reads)),), True)

    def _settle(self, source: int, stored: str, output: str) -> None:
        disposition = Disposition(Use.MERGED, Rule.ACTIVATION_SCALE, output)
        self._dispositions.settle_part(source, stored, disposition)


def input_scales(output: Output) -> tuple[Output, ...]:
    others = () if output.packed is None else output.packed.others
    return tuple(each for each in others if each.name.endswith(INPUT_SCALES))


def _codes(output: Output) -> DType | None:
    return None if output.packed is None else output.packed.quant_spec.format.code_dtype


def _with_scales(output: Output, scales: Mapping[str, Output]) -> Output:
    packed = output.packed
    if packed is None or not any(each.name in scales for each in packed.others):
        return output
    others = tuple(scales.get(each.name, each) for each in packed.others)
    return output._replace(packed=replace(packed, others=others))


def _reads(scale: Output) -> tuple[Read, ...]:
    return scale.ops[0].reads


def _is_largest(output: Output) -> bool:
    return any(op.expression.method == LARGEST.name for op in output.ops)


def _largest(name: str, like: StoredTensor | Output, reads: Sequence[Read]) -> Op:
    """The op of the largest scale; of divisors the smallest."""
    settings = Settings(values={"smallest": is_divisor(name)}, sources=tuple({} for _ in reads))
    expression = make_expression(LARGEST, settings, has_base=False, cast=like.dtype)
    return matrix_op(reads, like.shape, name, expression)
