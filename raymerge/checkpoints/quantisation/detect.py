"""Finds the tensors of a checkpoint that are codes with scales, from headers and config alone.

Codes, their scales and what else belongs to them are one logical tensor, wherever the parts are stored:
partners are looked up among all tensors of the checkpoint, never among those of one file. What the parts are
called says each quantisation method by itself.

What the config says must agree with what is stored. It is certain, and a fault, when a stored format is not
among those that the config allows, when a module that the config lists as plain is stored as codes, and when
the config says that weights are quantised and none is. That a plain matrix is not listed is no fault: the
routers, embeddings and ``eh_proj`` of DeepSeek-V3 are plain, and its config lists nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.block_codec import Codec
from raymerge.checkpoints.quantisation.config import Declared, Modules
from raymerge.checkpoints.quantisation.encoding import EXPONENTS, Format, QuantisedWeight, QuantSpec
from raymerge.dtypes import DType
from raymerge.errors import Problem

INPUT_SCALES = (".input_scale", ".activation_scale", ".act_scale", ".input_global_scale", "_input_scale")
"""Endings of the scales of a matrix's inputs, measured on data: weights tell nothing of them. The last is of
a stack of experts, whose name does not end with ".weight"."""
CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".qkv_scale", ".prob_scale", ".prob_output_scale"),
    *(".k_global_scale", ".v_global_scale", ".q_global_scale"),
    *(".q_proj.output_scale", ".k_proj.output_scale", ".v_proj.output_scale", ".qkv_proj.output_scale"),
)
"""Endings of the scales of queries, cached keys and values, and attention probabilities."""
# Of outputs, and of stacks of experts, whose names do not end with ".weight". Not "_output_scale" alone:
# Gemma 3n has a weight "altup.correct_output_scale".
_OTHER_SCALES = (".output_scale", ".output_global_scale", "_proj_output_scale")
_ACTIVATION_SCALES = (*INPUT_SCALES, *CACHE_SCALES, *_OTHER_SCALES)

SCALE_ENDINGS = ("_scale_inv", "_scale", "_scales", "_scale_2", ".scale", ".scales")
_BESIDE_CODES = (*SCALE_ENDINGS, ".weight_shape")
CORRUPT = "Download or copy the checkpoint again, or use one that is converted to bfloat16."

HF_QUANT_CONFIG = "hf_quant_config.json"
_CONFIG = "config.json"
_WEIGHT = ".weight"
_CODE_DTYPES = frozenset({DType.F8_E4M3, DType.U8, DType.I8, DType.I32})
_NUMBERS = frozenset(dtype for dtype in DType if dtype.is_mergeable)
_MEND = "Mend {}, or take it and the weights from the same place."
_MEND_CONFIG = _MEND.format(_CONFIG)


def is_activation_scale(name: str) -> bool:
    """Whether a tensor of a quantised model is a scale of what it computes; others may use the words."""
    return name.endswith(_ACTIVATION_SCALES)


def is_divisor(name: str) -> bool:
    """Whether numbers are divided by a scale, so that the smallest is for the largest inputs."""
    return name.endswith("_global_scale")


FreshTable: TypeAlias = Callable[[Mapping[str, QuantSpec], Mapping[str, Any] | None], dict[str, Any] | None]
WithoutModules: TypeAlias = Callable[
    [Mapping[str, Any], Collection[str], Mapping[str, QuantSpec]], dict[str, Any]
]


@dataclass(frozen=True, slots=True)
class QuantMethod:
    """One way of publishing quantised checkpoints."""

    name: str
    formats: Mapping[Format, Codec]
    """The formats that are this method's, with what computes them."""
    are_codes: Callable[[StoredTensor, Mapping[str, StoredTensor]], bool]
    """Whether one of the stored tensors is codes, by its name, its dtype and what lies beside it; the first
    method that says so has it."""
    add: Callable[[Search, StoredTensor], None]
    """Adds what codes belong to, or reports why that cannot be read."""
    codes_of: Callable[[StoredTensor], Sequence[str]]
    """Names of codes that a tensor is the scale of by its name; none where plain tensors are called so."""
    read_table: Callable[[Mapping[str, Any]], Declared] = lambda _: Declared()
    """Parses the method's table; of methods with one name the first has it."""
    fresh_table: FreshTable = lambda _, __: None
    """The table for modules that are stored so and a ``kv_cache_scheme``; None where it cannot say all."""
    without_modules: WithoutModules = lambda table, _, __: dict(table)
    """The table without what it says by name of modules that were quantised and are no longer."""
    plain_keys: tuple[str, ...] = ("modules_to_not_convert",)
    """Fields of the table that list modules left plain, the usual one first."""
    below: Callable[[str], str] | None = None
    """The entry for all that is below a path; None where that of the path is for all of it."""
    expert_dtype: str = ""
    """What the config's field of this name calls experts in the method's own formats; "" for no field."""
    has_variants: bool = False
    """Whether tables may have a word behind the name (``modelopt_fp4``)."""

    def owns(self, name: str) -> bool:
        """Whether tables with this ``quant_method`` are the method's."""
        return name == self.name or (self.has_variants and name.startswith(f"{self.name}_"))


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """What of a checkpoint is stored as codes with scales."""

    tensors: Mapping[str, QuantisedWeight]
    """By logical name, in the order of the checkpoint."""
    members: Mapping[str, str]
    """Logical name by the name of each stored tensor that belongs to one."""
    unknown: Mapping[str, str]
    """Stored tensors of formats that are told apart but not read: what to call the format, by name."""
    faults: tuple[Problem, ...]
    """What is incomplete, or contradicts the config."""
    without_input_scale: tuple[str, ...] = ()
    """Logical names of those that lack the scale of their inputs which the config declares."""


PackedForm: TypeAlias = tuple[Format, tuple[int, int], tuple[int, ...]]
"""A format, the rows and columns that share a scale, and the shape [..., rows, columns] of the numbers."""


@dataclass(slots=True)
class Search:
    """One look through a checkpoint; at no data, and a few times at each tensor."""

    where: str
    stored: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, int]]
    """What tensors say that repeat the shape of packed integers."""
    declared: Declared
    is_raw: bool
    plain_beside: Modules = field(default_factory=Modules)
    """What a file beside the config lists as unquantised."""
    memo: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """What was worked out for tensors of one kind: tens of thousands of experts are alike."""
    _packed: dict[str, QuantisedWeight] = field(default_factory=dict)
    _members: dict[str, str] = field(default_factory=dict)
    _unknown: dict[str, str] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _faults: dict[str, Problem] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _without_input_scale: list[str] = field(default_factory=list)

    def run(self, methods: Sequence[QuantMethod]) -> QuantisedWeights:
        """Find what is codes with scales; where the config's method is not read, nothing is a fault."""
        # Names and dtypes that two methods have mean what the declared one means by them.
        methods = sorted(methods, key=lambda each: each.name != self.declared.method)
        if self.declared.is_read and not self.declared.not_understood:
            for tensor in self.stored.values():
                if tensor.dtype in _NUMBERS and not tensor.name.endswith("_packed"):
                    continue
                if tensor.name in self._members:
                    continue
                method = next((each for each in methods if each.are_codes(tensor, self.stored)), None)
                if method is not None:
                    method.add(self, tensor)
            self._report_lone_scales(methods)
            self._compare()
        for sentence in self.declared.contradictions:
            self.report(sentence, f"{_CONFIG}: quantization_config {sentence}.", _MEND_CONFIG)
        faults = tuple(self._counted(kind, problem) for kind, problem in self._faults.items())
        lacking = tuple(self._without_input_scale)
        return QuantisedWeights(self._packed, self._members, self._unknown, faults, lacking)

    def declared_of(self, module: str) -> Declared:
        """What the config says of a module; of one that loaders may call otherwise, what it says at all."""
        return self.declared.of(module) or self.declared

    def report(self, kind: str, what: str, remedy: str, tensors: Iterable[str] = ()) -> None:
        """A fault about some tensors; of a kind, the first is told in full and the others are counted."""
        self._faults.setdefault(kind, Problem(self.where, what, remedy))
        self._counts[kind] += 1
        self._reported.update(tensors)

    def _counted(self, kind: str, problem: Problem) -> Problem:
        more = self._counts[kind] - 1
        if not more:
            return problem
        noun = "tensor" if more == 1 else "tensors"
        return Problem(problem.where, f"{problem.what} So it is with {more} more {noun}.", problem.remedy)

    def refuse(self, names: Iterable[str], variant: str) -> None:
        """Note tensors, as far as they are there, as of a variant that is not read."""
        self._unknown.update((name, variant) for name in names if name in self.stored)

    def undeclared(self, module: str, form: Format) -> str:
        """The variant of what is laid out as in a format that the config does not allow there."""
        declared = self.declared_of(module)
        says = f"says {declared}" if declared.method else "has no quantization_config"
        return f"{form.word} by their layout, where {_CONFIG} {says}"

    def partner(self, codes: StoredTensor, possible: Sequence[str]) -> StoredTensor | None:
        """The scales of some codes; None, with a fault, where there are none or several."""
        present = [self.stored[name] for name in possible if name in self.stored]
        if len(present) == 1:
            return present[0]
        if present:
            what = f"{described(codes)} has several scales: {' and '.join(each.name for each in present)}."
        else:
            missing = " and no ".join(possible)
            what = f"{described(codes)} is codes without scales: there is no {missing}."
        self.report("several scales" if present else "no scales", what, CORRUPT, (codes.name, *possible))
        return None

    def report_misfit(self, codes: StoredTensor, scales: StoredTensor) -> None:
        says = f"; {_CONFIG} says {self.declared}" if self.declared.method else ""
        parts = f"{described(codes)} and its scales {described(scales)}"
        what = f"{parts} do not fit together: no blocks have this grid{says}."
        self.report("misfit", what, CORRUPT, (codes.name, scales.name))

    def add(
        self,
        name: str,
        codes: StoredTensor,
        scales: StoredTensor,
        others: tuple[str, ...],
        form: PackedForm,
        *,
        padding: int = 0,
    ) -> None:
        """Add the tensor ``name``, which is stored as codes with scales, and ``others`` that belong to it."""
        if name != codes.name and name in self.stored:
            second = described(self.stored[name])
            what = f"{described(codes)} holds the numbers of {name}, and so does {second}."
            remedy = "Delete one of the two; nothing says which of them counts."
            self.report("twice", what, remedy, (codes.name, scales.name))
            return
        declared = self.declared_of(name.removesuffix(_WEIGHT))
        if not declared.is_read:
            self.refuse((codes.name, scales.name, *others), str(declared))
            return
        kind, block, shape = form
        is_power = scales.dtype in EXPONENTS or (kind.is_fp8 and self.declared.power_of_two)
        rest = (shape, block, scales.dtype, is_power, scales.shape, padding)
        # Formats are told apart by their names, which are quicker to look up.
        key = (kind.name, *rest)
        try:
            quant_spec = self.memo.get(key) or self.memo.setdefault(key, QuantSpec(kind, *rest))
        except ValueError as error:
            what = f"{described(codes)} with its scales {described(scales)} cannot be read: {error}"
            self.report(f"unreadable {kind.name}", what, CORRUPT, (codes.name, scales.name))
            return
        # Names are shared by sources of one family, as those of what is stored are.
        name = sys.intern(name)
        packed = QuantisedWeight(name, quant_spec, codes.name, scales.name, others)
        self._packed[name] = packed
        for part in packed.stored:
            self._members[part] = name
        if others:
            self._check_others(packed)

    def _check_others(self, packed: QuantisedWeight) -> None:
        self._check_zero_points(packed)
        if packed.shape_tensor:
            shape = self.stored[packed.shape_tensor]
            if shape.dtype not in (DType.I32, DType.I64) or shape.shape != (2,):
                self.report("shape", f"{described(shape)} is no I32 or I64 [2].", CORRUPT)
        if packed.quant_spec.format.has_two_scales and packed.tensor_scale:
            scale, count = self.stored[packed.tensor_scale], packed.quant_spec.num_tensor_scales
            if scale.dtype is not DType.F32 or scale.num_elements != count:
                self.report("global scale", f"{described(scale)} is no F32 of {count} elements.", CORRUPT)

    def _check_zero_points(self, packed: QuantisedWeight) -> None:
        quant_spec = packed.quant_spec
        dtype, shape = quant_spec.format.zero_points, quant_spec.zero_points_shape
        if packed.zero_points and dtype is not None:
            zeros = self.stored[packed.zero_points]
            if len(shape) > 2 and quant_spec.rows % quant_spec.format.rows_of_zeros:
                what = f"{described(zeros)} has integers that would be of two matrices of {list(shape)}."
                self.report("zero points of a stack", what, CORRUPT)
            if zeros.dtype is not dtype or zeros.shape != shape:
                what = f"{described(zeros)} is no {dtype.value}{list(shape)}, as zero points are packed that"
                self.report("zero points", f"{what} {described(self.stored[packed.codes])} needs.", CORRUPT)

    def _report_lone_scales(self, methods: Sequence[QuantMethod]) -> None:
        for name, tensor in self.stored.items():
            if name in self._members or not name.endswith(_BESIDE_CODES):
                continue
            codes = next((codes for each in methods if (codes := each.codes_of(tensor))), ())
            if not codes or name in self._unknown or not self._reported.isdisjoint((name, *codes)):
                continue
            present = [self.stored[each] for each in codes if each in self.stored]
            if any(not each.dtype.is_mergeable for each in present):
                continue
            if not self.declared.method and not name.endswith("_scale_inv"):
                continue  # only FP8 has that ending; the others are words that any module may use
            missing = " and no ".join(codes)
            beside = f"{described(present[0])} is no codes" if present else f"there is no {missing}"
            what = f"{described(tensor)} is a scale without codes: {beside}."
            self.report("lone scale", what, CORRUPT, [name])

    def _compare(self) -> None:
        for packed in self._packed.values():
            self._compare_one(packed)
        says_codes = self.declared.is_stored and (self.declared.schemes or self.declared.others)
        if says_codes and not self._packed and not self._reported and not self._unknown and self._is_plain():
            problem = without_codes(self.where, str(self.declared), self.stored.values())
            self.report("plain", problem.what, problem.remedy)

    def _compare_one(self, packed: QuantisedWeight) -> None:
        module = packed.name.removesuffix(_WEIGHT)
        quant_spec, declared = packed.quant_spec, self.declared_of(module)
        if not declared.method:
            if not self.is_raw:
                self._contradiction(packed, "undeclared", "has no quantization_config")
        elif not self._allows(declared, quant_spec):
            kind = f"not allowed {quant_spec.format.name} {quant_spec.block}"
            self._contradiction(packed, kind, f"says {declared}")
        if declared.plain.lists(module):
            self._contradiction(packed, "listed", f"lists {module} as not quantised")
        elif self.plain_beside.lists(module):
            self._contradiction(packed, "listed beside", f"lists {module} as not quantised", HF_QUANT_CONFIG)
        own = (f"{module}{ending}" for ending in INPUT_SCALES)
        if declared.scales_inputs and self.stored.keys().isdisjoint(own):
            self._without_input_scale.append(packed.name)

    def _allows(self, declared: Declared, quant_spec: QuantSpec) -> bool:
        # Both are few and outlive the look.
        key = id(declared), id(quant_spec)
        if key not in self.memo:
            self.memo[key] = declared.allows(quant_spec.format, quant_spec.block, quant_spec.shape)
        return bool(self.memo[key])

    def _contradiction(self, packed: QuantisedWeight, kind: str, says: str, where: str = _CONFIG) -> None:
        quant_spec = packed.quant_spec
        stored = f"{described(self.stored[packed.codes])} with scales {list(quant_spec.scales_shape)}"
        blocks = f"{quant_spec.format.word} in blocks of {quant_spec.block[0]}x{quant_spec.block[1]}"
        self.report(kind, f"{stored} is {blocks}, but {where} {says}.", _MEND.format(where))

    def _is_plain(self) -> bool:
        return not any(each.dtype in _CODE_DTYPES and len(each.shape) > 1 for each in self.stored.values())


def without_codes(where: str, method: str, stored: Iterable[StoredTensor]) -> Problem:
    what = f"{_CONFIG} says that weights are quantised by {method}, but no tensor is: "
    dtypes = sorted({tensor.dtype.value for tensor in stored})
    return Problem(where, f"{what}all are {', '.join(dtypes) or 'missing'}.", _MEND_CONFIG)


def described(tensor: StoredTensor) -> str:
    return f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)} in {tensor.key}"
