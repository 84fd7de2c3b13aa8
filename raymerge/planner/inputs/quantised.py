"""Recognises quantised tensors, so that nothing is ever computed on raw codes.

A quantised weight and its scale are one logical tensor. Formats with a codec are read as numbers
(``raymerge.checkpoints.quantisation.detect``); tensors of another format may be copied from one source,
scales included, but not combined.

Codes are found by dtype, not by a list of formats: integers and narrow floats that share a module with other
tensors. Names only decide what the format is called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from raymerge.architectures.rules import Role, quantisation_tables, rules_of
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.encoding import QuantisedWeight
from raymerge.checkpoints.quantisation.formats import packed_tensors
from raymerge.checkpoints.source import Checkpoint
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.planner.inputs.sources import Source

CONVERT_FIRST = "Convert the model first ('raymerge convert MODEL --to bf16 -o OUT') and name OUT."
"""Remedy where plain numbers are needed and the codes are of a format that is read."""
USE_PLAIN = "Use a checkpoint converted to bfloat16."
"""Remedy where the codes are of a format that is not read."""

_PARTNER_ENDINGS = (
    *("_scale_inv", ".weight_scale", ".input_scale", ".qscale_weight", "_blocks", "_scales"),
    *(".weight_packed", ".weight_shape", ".weight_global_scale", ".qweight", ".qzeros", ".g_idx", ".scales"),
    *(".absmax", ".quant_map", ".SCB"),
)
# What quantisers store beside codes; such tensors count wherever the config declares a quantisation.
_FUSED_ENDING = re.compile(r"_(blocks|scales|scale|scale_inv|packed|qweight|bias)$")
_CODEBOOK_MODULES = frozenset({"centroids", "res_centroids", "outlier_centroids"})
_FORMS = {
    ("_scale_inv",): "block FP8",
    ("_blocks", "_scales"): "MXFP4",
    (".weight_global_scale",): "NVFP4",
    (".weight_packed",): "packed INT4",
    (".qscale_weight",): "FP8 with qscale_weight",
}
"""Endings of names that a module in a format has, the most telling first."""
_LONGEST_NAME = 40
_FP8 = "fp8"


def quantised_tensors(checkpoint: Checkpoint) -> QuantisedWeights:
    weights = packed_tensors(checkpoint, quantisation_tables(checkpoint.config))
    rest = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in weights.members}
    formats = quantised_formats(replace(checkpoint, tensors=rest))
    return replace(weights, unknown={**formats, **weights.unknown})


def stored_formats(weights: QuantisedWeights) -> Mapping[str, str]:
    return {part: weights.tensors[name].quant_spec.format.word for part, name in weights.members.items()}


def quantised_formats(checkpoint: Checkpoint) -> Mapping[str, str]:
    """The format of each quantised tensor, code or scale.

    Plain tensors are left out: one that is merely called ``scales``, integers that stand alone, masks, and
    buffers that loaders recompute."""
    tables = [each for each in quantisation_tables(checkpoint.config) if isinstance(each, Mapping)]
    method = next((str(t["quant_method"])[:_LONGEST_NAME] for t in tables if t.get("quant_method")), "")
    integers = _integers(checkpoint)
    codes = {
        name
        for name, tensor in integers.items()
        if _is_code(tensor, declared=bool(tables)) and not _is_table(tensor, checkpoint.tensors)
    }
    modules = {_module(name, checkpoint) for name in codes}
    if not modules and not tables:
        return {}
    groups: dict[str, list[StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        module = _module(name, checkpoint)
        belongs = module in modules or (tables and name.endswith(_PARTNER_ENDINGS))
        if belongs and (tensor.dtype.is_mergeable or name in integers):
            groups.setdefault(module, []).append(tensor)
    return {
        tensor.name: form
        for group in groups.values()
        if tables or len(group) > 1 or group[0].dtype.is_narrow_float
        for form in (_format(group, method),)
        for tensor in group
    }


def _integers(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    rules = rules_of(checkpoint.config)
    buffers = [pattern for role, pattern in rules.roles if role is Role.BUFFER]
    return {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not tensor.dtype.is_mergeable
        and tensor.dtype is not DType.BOOL
        and (tensor.dtype.is_narrow_float or not any(pattern.search(name) for pattern in buffers))
    }


def _is_code(tensor: StoredTensor, *, declared: bool) -> bool:
    """Whether elements are codes. A counter is a long integer with at most one dimension."""
    may_count = not declared or tensor.dtype in (DType.I64, DType.U64)
    return tensor.dtype.is_narrow_float or not may_count or len(tensor.shape) > 1


def _is_table(tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether integers lie beside the plain matrix of their module, as the experts of each token in
    DeepSeek-V4's routers."""
    matrix = tensors.get(f"{tensor.name.rpartition('.')[0]}.weight")
    is_plain = matrix is not None and matrix.dtype.is_mergeable and len(matrix.shape) > 1
    return is_plain and not tensor.dtype.is_narrow_float


def _module(name: str, checkpoint: Checkpoint) -> str:
    parent, _, leaf = name.rpartition(".")
    if not parent or parent.endswith("experts"):
        # Several matrices lie side by side here, each with its own scales.
        return f"{parent}.{_FUSED_ENDING.sub('', leaf)}"
    above, _, word = parent.rpartition(".")
    return above if word in _CODEBOOK_MODULES or parent in checkpoint.tensors else parent


def _format(group: Sequence[StoredTensor], method: str) -> str:
    if method == _FP8 and not any(tensor.dtype is DType.F8_E4M3 for tensor in group):
        # The table of DeepSeek-V4 says nothing of its experts, which are in another format.
        method = ""
    return next(_by_names(group), None) or method or _by_codes(group)


def _by_names(group: Sequence[StoredTensor]) -> Iterator[str]:
    names = [tensor.name for tensor in group]
    weights = [tensor for tensor in group if tensor.name.endswith(".weight")]
    narrow = [tensor.name for tensor in weights if tensor.dtype.is_narrow_float]
    has_bytes = any(tensor.dtype is DType.U8 for tensor in group)
    has_exponents = has_bytes or any(tensor.dtype is DType.F8_E8M0 for tensor in group)

    def has(*endings: str) -> bool:
        return all(any(name.endswith(ending) for name in names) for ending in endings)

    if any(tensor.dtype is DType.I8 for tensor in weights) and has(".scale") and has_exponents:
        yield "FP4 by 32 columns in bytes, as DeepSeek-V4 has it"
    if has(".weight_scale_2"):
        yield "NVFP4 in ModelOpt's names"
    if narrow and has(".weight_scale") and has_bytes:
        yield "MXFP8"
    for endings, form in _FORMS.items():
        if has(*endings):
            yield form
    if has(".absmax") or has(".quant_map") or has(".SCB"):
        yield "bitsandbytes"
    if any(f"{name}_scale" in names for name in narrow):
        yield "FP8 with weight_scale"


def _by_codes(group: Sequence[StoredTensor]) -> str:
    if any(tensor.name.endswith(".qweight") for tensor in group):
        return "GPTQ or AWQ"
    narrow = next((tensor for tensor in group if tensor.dtype.is_narrow_float), None)
    if narrow is not None:
        return f"{narrow.dtype.value} without a scale beside it"
    code = next((tensor for tensor in group if not tensor.dtype.is_mergeable), None)
    return f"{code.dtype.value} codes" if code is not None else "a format that has no name"


class PlainNumbers:
    def __init__(self, sources: Sequence[Source], findings: Findings) -> None:
        self._sources = sources
        self._findings = findings
        checkpoints = [source.checkpoint for source in sources]
        self._weights = [each.packs or quantised_tensors(each) for each in checkpoints]
        self._are_numbers = [each.packs is not None for each in checkpoints]
        self.are_plain = [not (own.tensors or own.unknown) for own in self._weights]

    def is_quantised(self, source: int, tensor: StoredTensor) -> bool:
        return tensor.name in self._weights[source].unknown or self._weight(source, tensor) is not None

    def is_integer(self, source: int, tensor: StoredTensor) -> bool:
        return not tensor.dtype.is_mergeable and not self.is_quantised(source, tensor)

    def check(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a source's tensor can be computed with; if not, a finding says why."""
        if self.are_plain[source] and tensor.dtype.is_mergeable:
            return True
        if (weight := self._weight(source, tensor)) is not None:
            what = "and recipes that build mixtures or change experts only copy such tensors"
            form = weight.quant_spec.format.word
            return self._are_numbers[source] or self._refuse(source, tensor, form, what, CONVERT_FIRST)
        form = self._weights[source].unknown.get(tensor.name, "")
        if not form and tensor.dtype.is_mergeable:
            return True
        what = "which raymerge can neither combine nor convert: their raw codes mean nothing by themselves"
        remedy = (
            "Use a checkpoint converted to bfloat16, or a recipe that takes these tensors from one "
            "source unchanged (merge_method: passthrough, without dtype)."
        )
        return self._refuse(source, tensor, form or f"{tensor.dtype.value} integers", what, remedy)

    def is_stored_plain(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor is stored as plain numbers, as rows by token must be; else a finding says why."""
        weight = self._weight(source, tensor) if self._are_numbers[source] else None
        if weight is None:
            return self.check(source, tensor)
        what = "and rows by token are only put together of plain numbers"
        return self._refuse(source, tensor, weight.quant_spec.format.word, what, CONVERT_FIRST)

    def _weight(self, source: int, tensor: StoredTensor) -> QuantisedWeight | None:
        """What a tensor is the codes or scales of; all of it where codes are seen as numbers."""
        own, name = self._weights[source], tensor.name
        return own.tensors.get(name if self._are_numbers[source] else own.members.get(name, ""))

    def _refuse(self, source: int, tensor: StoredTensor, form: str, what: str, remedy: str) -> bool:
        name = self._sources[source].name
        self._findings.tensor(
            name,
            f"{{count}} tensors are quantised as {form}, {what}",
            remedy,
            example=f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)}",
            key=form,
        )
        return False
