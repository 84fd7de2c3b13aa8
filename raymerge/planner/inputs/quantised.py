"""Recognises quantised tensors, so that nothing is ever computed on raw codes.

A quantised weight and its scale are one logical tensor. Formats with a codec are read as numbers
(``raymerge.checkpoints.quantisation.detect``); tensors of another format may be copied from one source,
scales included, but not combined.

Codes are found by dtype, not by a list of formats: integers and narrow floats that share a module with other
tensors. Names only decide what the format is called."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain
from typing import Any

from raymerge.architectures.roles import logical_name
from raymerge.architectures.rules import Role, Rules, quantisation_tables, rules_of
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.config import Declared
from raymerge.checkpoints.quantisation.detect import INPUT_SCALES, QuantisedWeights, without_codes
from raymerge.checkpoints.quantisation.encoding import Format, QuantisedWeight
from raymerge.checkpoints.quantisation.formats import formats, packed_tensors, read_declared
from raymerge.checkpoints.source import Checkpoint, as_numbers
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.planner.inputs.sources import Source

CONVERT_FIRST = "Convert the model first ('raymerge convert MODEL --to bf16 -o OUT') and name OUT."
"""Remedy where plain numbers are needed and the codes are of a format that is read."""
USE_PLAIN = "Use a checkpoint converted to bfloat16."
"""Remedy where the codes are of a format that is not read."""

# What quantisers store beside codes; such tensors count wherever the config declares a quantisation.
_FUSED_ENDING = re.compile(
    r"_(blocks|(weight_)?scales?(_inv|_2)?|(input|output|weight_global|input_global)_scale|(weight_)?packed"
    r"|qweight|bias)$"
)
_CODEBOOK_MODULES = frozenset({"centroids", "res_centroids", "outlier_centroids"})
_ADVICE = "Use a checkpoint converted to bfloat16 by the tool that made this one."
_WEIGHT = ".weight"
_CODES = frozenset(f"{before}{form.parts['codes']}" for form in formats() for before in ("", _WEIGHT))
"""What names of codes end with behind that of their module."""
_LONGEST_NAME = 40
_PARTNERS = ("_blocks", "_scales", "_scale_inv", *INPUT_SCALES)
"""Endings of parts of stacks of experts, whose names do not end with ".weight", and of scales of inputs."""


def quantised_tensors(checkpoint: Checkpoint) -> QuantisedWeights:
    tables = quantisation_tables(checkpoint.config)
    weights = packed_tensors(checkpoint, tables)
    rest = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in weights.members}
    unknown = {**quantised_formats(replace(checkpoint, tensors=rest)), **weights.unknown}
    faults, method = weights.faults, read_declared(tables).method.lower()
    if tables and not (weights.tensors or unknown) and _has_codes(method):
        faults = (*faults, without_codes(checkpoint.name, method, checkpoint.tensors.values()))
    return replace(weights, unknown=unknown, faults=faults)


def in_numbers(source: Source) -> Source:
    """The source with every tensor of codes as one of numbers, unless they contradict each other."""
    if source.checkpoint.packs is not None:
        return source
    weights = quantised_tensors(source.checkpoint)
    if weights.faults or not weights.members:
        return source
    return replace(source, checkpoint=as_numbers(source.checkpoint, weights))


def _has_codes(method: str) -> bool:
    return any(each.codes and method in each.names for each in other_methods())


def stored_formats(weights: QuantisedWeights) -> Mapping[str, str]:
    return {part: weights.tensors[name].quant_spec.format.word for part, name in weights.members.items()}


def quantised_formats(checkpoint: Checkpoint) -> Mapping[str, str]:
    """The format of each quantised tensor, code or scale.

    Plain tensors are left out: one that is merely called ``scales``, integers that stand alone, masks, and
    buffers that loaders recompute."""
    tables = [each for each in quantisation_tables(checkpoint.config) if isinstance(each, Mapping)]
    integers = _integers(checkpoint)
    codes = {
        name
        for name, tensor in integers.items()
        if _is_code(tensor, declared=bool(tables)) and not _is_table(tensor, checkpoint.tensors)
    }
    modules = {_module(name, checkpoint) for name in codes}
    if not modules and not tables:
        return {}
    method = next((str(t["quant_method"])[:_LONGEST_NAME] for t in tables if t.get("quant_method")), "")
    naming = _Naming(method, read_declared(tables), other_methods())
    groups: dict[str, list[StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        module = _module(name, checkpoint)
        belongs = module in modules or (tables and name.endswith(naming.partner_endings))
        if belongs and (tensor.dtype.is_mergeable or name in integers):
            groups.setdefault(module, []).append(tensor)
    formats = {
        tensor.name: form
        for group in groups.values()
        if tables or len(group) > 1 or group[0].dtype.is_narrow_float
        for form in (naming.form(group),)
        for tensor in group
    }
    return {**naming.transformed(checkpoint.tensors.values()), **formats}


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


def _matrix(name: str, rules: Rules) -> str:
    """The canonical name of a module's weight, by either's name."""
    return logical_name(f"{name.removesuffix(_WEIGHT)}{_WEIGHT}", rules)


@dataclass(frozen=True, slots=True)
class OtherMethod:
    """A way of publishing weights that is copied and not read; see ``other_methods.toml``."""

    title: str
    advice: str
    names: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    plain: bool = False
    codes: bool = False

    def is_of(self, group: Sequence[StoredTensor]) -> bool:
        """Whether a module's tensors have the names that only this method uses."""
        return bool(self.endings) and all(
            any(each.name.endswith(ending) for each in group) for ending in self.endings
        )

    def has_dtype(self, group: Sequence[StoredTensor]) -> bool:
        return any(each.dtype.value in self.dtypes for each in group)


def other_methods() -> tuple[OtherMethod, ...]:
    text = files("raymerge.checkpoints.quantisation").joinpath("other_methods.toml").read_text("utf-8")
    tables = tomllib.loads(text)["method"]
    return tuple(map(_other_method, tables))


def _other_method(table: Mapping[str, Any]) -> OtherMethod:
    names, endings, dtypes, words = (
        tuple(table.get(key, ())) for key in ("names", "endings", "dtypes", "words")
    )
    flags = (bool(table.get(key)) for key in ("plain", "codes"))
    return OtherMethod(table["title"], table["advice"], names, endings, dtypes, words, *flags)


class _Naming:
    """Calls codes that are not read by the name of their format."""

    def __init__(self, method: str, declared: Declared, others: Sequence[OtherMethod]) -> None:
        self._others, self._formats = others, tuple(formats())
        # What is left of a method that is read is in another format: DeepSeek-V4's table is silent on some.
        self._method = "" if declared.is_read else method
        self._named = [each for each in others if method.lower() in each.names]
        words = next(iter(declared.not_understood), "")
        self._unclear = words and f"{method}, of which quantization_config {words}"
        self._meant = next((each for each in others if any(word in words for word in each.words)), None)
        parts = {ending for form in self._formats for ending in form.parts.values()}
        own = {ending for each in self._named for ending in each.endings} - {_WEIGHT}
        beside = (f"{_WEIGHT}{each}" for each in parts if each.startswith("_"))
        self.partner_endings = (*beside, *own, *_PARTNERS)
        """Of tensors of a quantised model that are parts of codes by their names, wherever these are."""

    def form(self, group: Sequence[StoredTensor]) -> str:
        if self._unclear:
            return self._meant.title if self._meant else self._unclear
        by_dtype = (each.title for each in self._others if each.has_dtype(group))
        named = sorted(self._named, key=lambda each: not each.is_of(group))
        by_endings = (each.title for each in self._others if each.is_of(group))
        by_name = (each.title for each in named)
        # A method that nobody knows may share endings with those that are known.
        method = filter(None, [self._method])
        titles = chain(by_dtype, by_name, self._read(group), method, by_endings)
        return next(titles, None) or _by_codes(group)

    def _read(self, group: Sequence[StoredTensor]) -> Iterator[str]:
        """The formats that are read whose parts a module has, if any: those with the most parts."""
        stored = {each.name: each for each in group}
        possible = [form for form in self._formats if any(_are_of(form, each, stored) for each in group)]
        most = max((len(form.parts) for form in possible), default=0)
        if most:
            yield " or ".join(dict.fromkeys(form.word for form in possible if len(form.parts) == most))

    def transformed(self, tensors: Iterable[StoredTensor]) -> dict[str, str]:
        """Matrices that are stored as plain numbers, and mean something else all the same."""
        title = self._meant.title if self._meant is not None and self._meant.plain else ""
        return {each.name: title for each in tensors if title and len(each.shape) > 1}


def _are_of(form: Format, codes: StoredTensor, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is codes of a format, by its name and dtype and those of what is beside it."""
    ending = form.parts["codes"]
    if codes.dtype is not form.code_dtype or not codes.name.endswith(ending):
        return False
    names = form.part_names(codes.name.removesuffix(ending))
    scales = stored.get(names.scales or names.tensor_scale)
    others = {names.tensor_scale, names.zero_points} - {""}
    return scales is not None and scales.dtype in form.scale_dtypes and others <= stored.keys()


def _by_codes(group: Sequence[StoredTensor]) -> str:
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
        others = () if all(self.are_plain) else other_methods()
        self._advice = {each.title: each.advice for each in others}
        self._unread: dict[int, Mapping[str, Sequence[StoredTensor]]] = {}

    def is_quantised(self, source: int, tensor: StoredTensor) -> bool:
        return tensor.name in self._weights[source].unknown or self._weight(source, tensor) is not None

    def is_of_unread(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a scale of inputs belongs to codes that are only copied, and so comes with them."""
        unknown = self._weights[source].unknown
        ending = next(filter(tensor.name.endswith, INPUT_SCALES), "")
        module = tensor.name.removesuffix(ending)
        return bool(ending) and any(f"{module}{each}" in unknown for each in _CODES)

    def unread_parts(self, source: int, name: str) -> Sequence[StoredTensor]:
        """What a source has in place of a tensor that it lacks, in a format that is not read; () for nothing.

        Such codes have names of their own, by which nobody asks for them."""
        if source not in self._unread:
            checkpoint, rules = self._sources[source].checkpoint, self._sources[source].rules
            parts: dict[str, list[StoredTensor]] = {}
            for part in self._weights[source].unknown:
                matrix = _matrix(_module(part, checkpoint), rules)
                parts.setdefault(matrix, []).append(checkpoint.tensors[part])
            self._unread[source] = parts
        held = self._unread[source]
        return held.get(_matrix(name, self._sources[source].rules), ()) if held else ()

    def matrix_of(self, source: int, part: str) -> str:
        """The canonical name of the weight that codes or scales of a format that is not read belong to; ""
        for other tensors."""
        if part not in self._weights[source].unknown:
            return ""
        return _matrix(_module(part, self._sources[source].checkpoint), self._sources[source].rules)

    def is_integer(self, source: int, tensor: StoredTensor) -> bool:
        return not tensor.dtype.is_mergeable and not self.is_quantised(source, tensor)

    def check(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a source's tensor can be computed with; if not, a finding says why."""
        own = self._weights[source]
        if self.are_plain[source] and tensor.dtype.is_mergeable:
            return True
        if self._are_numbers[source] and tensor.name in own.tensors:
            return True
        if (weight := self._weight(source, tensor)) is not None:
            what = "and recipes that build mixtures or change experts only copy such tensors"
            form = weight.quant_spec.format.word
            return self._refuse(source, tensor, form, what, CONVERT_FIRST)
        form = own.unknown.get(tensor.name, "")
        if not form and tensor.dtype.is_mergeable:
            return True
        what = "which raymerge can neither combine nor convert: their raw codes mean nothing by themselves"
        advice = self._advice.get(form, _ADVICE)
        remedy = (
            f"{advice} Or have a recipe take these tensors from one source unchanged "
            "(merge_method: passthrough, without dtype), alone or beside others that are merged."
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
