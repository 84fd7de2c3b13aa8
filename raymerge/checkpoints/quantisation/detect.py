"""Finds the tensors of a checkpoint that are codes with scales, from headers and config alone.

Codes, their scales and what else belongs to them are one logical tensor, wherever the parts are stored:
partners are looked up among all tensors of the checkpoint, never among those of one file. Layouts (``X`` is a
module, ``Y`` a fused matrix without ``.weight``; names and dtypes as published):

=======================  =======================================================  =======================
codes                    scales                                                   further
=======================  =======================================================  =======================
``X.weight`` F8_E4M3     ``X.weight_scale_inv`` (DeepSeek-V3), ``X.scale`` (V4),  ``X.input_scale``,
                         ``X.weight_scale`` (compressed-tensors)                  ``X.activation_scale``
``Y`` F8_E4M3            ``Y_scale_inv``, ``Y_scale``
``Y_blocks`` U8          ``Y_scales`` U8 (gpt-oss)
``X.weight_packed`` I32  ``X.weight_scale`` (compressed-tensors)                  ``X.weight_shape``
``X.weight_packed`` U8   ``X.weight_scale`` F8_E4M3 (compressed-tensors)          ``X.weight_global_scale``,
                                                                                  ``X.input_global_scale``
``X.weight_packed`` U8   ``X.weight_scale`` U8 (compressed-tensors)
=======================  =======================================================  =======================

What the config says must agree with what is stored. It is certain, and a fault, when a stored format is not
among those that the config allows, when a module that the config lists as plain is stored as codes, and when
the config says that weights are quantised and none is. That a plain matrix is not listed is no fault: the
routers, embeddings and ``eh_proj`` of DeepSeek-V3 are plain, and its config lists nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.activation_scales import INPUT_SCALES
from raymerge.checkpoints.quantisation.config import Declared, read_declared
from raymerge.checkpoints.quantisation.encoding import Format, Packed, Packing
from raymerge.checkpoints.quantisation.stored_shapes import SHAPE_ENDING
from raymerge.checkpoints.source import CONFIG_FILE, Checkpoint
from raymerge.dtypes import DType
from raymerge.errors import Problem


class Faults:
    """Collects faults in order of first appearance."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._first: dict[str, Problem] = {}
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, what: str, remedy: str) -> None:
        """One fault; of a kind, the first is told in full and the others are counted."""
        if kind not in self._first:
            self._first[kind] = Problem(self._where, what, remedy)
        self._counts[kind] += 1

    def problems(self) -> tuple[Problem, ...]:
        """Everything collected."""
        return tuple(self._problem(kind, problem) for kind, problem in self._first.items())

    def _problem(self, kind: str, problem: Problem) -> Problem:
        more = self._counts[kind] - 1
        if not more:
            return problem
        noun = "tensor" if more == 1 else "tensors"
        return Problem(problem.where, f"{problem.what} So it is with {more} more {noun}.", problem.remedy)


Blocks = tuple[Format, tuple[int, int]]
"""A format, and the rows and columns that share a scale."""


def fp8_blocks(
    shape: tuple[int, ...], scales: tuple[int, ...], named: Sequence[tuple[int, int]]
) -> Iterator[Blocks]:
    """Every reading of FP8 codes [..., rows, columns] with scales of a shape, the likeliest first.

    A grid does not always tell what its blocks are ([200, 64] is [2, 1] in blocks of 128 and of 100), so
    those that a config names go before those that the grid implies.

    Args:
        shape: of the codes, at least two dimensions; what is before the last two is a stack.
        scales: shape of the stored scales.
        named: blocks to try first.
    """
    stack, (rows, columns) = shape[:-2], shape[-2:]
    for block in named:
        if scales == (*stack, -(-rows // block[0]), -(-columns // block[1])):
            yield Format.FP8_BLOCK, block
    if scales in ((*stack, 1), (*stack, 1, 1), stack):
        yield Format.FP8_TENSOR, (rows, columns)
    if scales in ((*stack, rows), (*stack, rows, 1)):
        yield Format.FP8_CHANNEL, (1, columns)
    if len(scales) == len(shape) and scales[:-2] == stack:
        block = implied_block(rows, scales[-2]), implied_block(columns, scales[-1])
        if all(block):
            yield Format.FP8_BLOCK, block


def turned_fp8(
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    named: Sequence[tuple[int, int]],
    allows: Callable[[Format, tuple[int, int], tuple[int, ...]], bool],
) -> str | None:
    """What to call a stack of matrices [rows, columns] whose scales are those of [columns, rows], or None.

    Experts that are stored [in, out] may have been quantised as [out, in].

    Args:
        shape: of the codes.
        scales: shape of the stored scales.
        named: blocks to try first.
        allows: whether the config means a format with blocks and a shape.
    """
    if len(shape) < 3:
        return None
    turned = _turned(shape)
    grids = (scales, _turned(scales)) if len(scales) == len(shape) else (scales,)
    found = (each for grid in grids for each in fp8_blocks(turned, grid, named) if allows(*each, turned))
    form = next((form for form, _ in found), None)
    return None if form is None else f"{form.value} with scales of the transposed matrices"


def implied_block(size: int, count: int) -> int:
    """Rows (or columns) of a block when ``count`` blocks cover ``size`` rows; 0 where no block does.

    Of several that would, a power of two, as all that are published; else the smallest.
    """
    if not 0 < count <= size:
        return 0
    smallest = -(-size // count)
    largest = size if count == 1 else -(-size // (count - 1)) - 1
    if smallest > largest:
        return 0
    power = 1 << (smallest - 1).bit_length()
    return power if power <= largest else smallest


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


_WEIGHT, _PACKED = ".weight", ".weight_packed"
_SCALE_ENDINGS = ("_scale_inv", "_scale", "_scales", ".scale", ".scales")
_EXPONENTS = frozenset({DType.U8, DType.F8_E8M0})
_PACKED_DTYPES = (DType.I32, DType.U8)
_CODE_DTYPES = frozenset({DType.F8_E4M3, DType.U8, DType.I8, DType.I32})
_OF_PACKED = (
    *(_PACKED, ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    *(".weight_global_scale", ".input_global_scale", ".input_scale"),
)
_GET_WHOLE = "Download or copy the checkpoint again, or use one that is converted to bfloat16."
_NOT_READ = ("which is not read", "may mean something else")
_CONVERT_ELSEWHERE = "Use a checkpoint converted to bfloat16 by the tool that made this one."
_ONE_IS_WRONG = f"Mend {CONFIG_FILE}, or take it and the weights from the same place."


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """What of a checkpoint is stored as codes with scales."""

    tensors: Mapping[str, Packed]
    """By logical name, in the order of the checkpoint."""
    members: Mapping[str, str]
    """Logical name by the name of each stored tensor that belongs to one."""
    unknown: Mapping[str, str]
    """Stored tensors of formats that are told apart but not read: what to call the format, by name."""
    faults: tuple[Problem, ...]
    """What is incomplete, or contradicts the config."""


def packed_tensors(checkpoint: Checkpoint, tables: Sequence[Any]) -> PackedTensors:
    """Find what is stored as codes with scales. Looks at no data, and a few times at each tensor.

    Args:
        checkpoint: files and headers.
        tables: what its config says of quantisation, at the top and in sections; the first counts. Where
            that is a method that is not read (GPTQ, AWQ, bitsandbytes ...), nothing is found and nothing is a
            fault.
    """
    declared = read_declared(tables)
    search = _Search(checkpoint, declared)
    if declared.is_read:
        search.find()
        search.lone_scales()
        search.compare()
    search.wrong()
    return search.result()


class _Parts(NamedTuple):
    """What belongs to one logical tensor."""

    name: str
    codes: StoredTensor
    scales: StoredTensor
    others: tuple[str, ...]


class _Search:
    """One look through a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, declared: Declared) -> None:
        self._checkpoint = checkpoint
        self._stored = checkpoint.tensors
        self._declared = declared
        self._found: dict[str, Packed] = {}
        self._members: dict[str, str] = {}
        self._unknown: dict[str, str] = {}
        self._blamed: set[str] = set()
        self._fp8_blocks: dict[tuple[Any, ...], Blocks | str | None] = {}
        self._packings: dict[tuple[Any, ...], Packing] = {}
        self._faults = Faults(checkpoint.name)

    def result(self) -> PackedTensors:
        """What was found."""
        return PackedTensors(self._found, self._members, self._unknown, self._faults.problems())

    def find(self) -> None:
        """Pair all codes with their scales."""
        for name, tensor in self._stored.items():
            if name.endswith(_PACKED):
                self._packed(tensor, name.removesuffix(_PACKED))
            elif tensor.dtype is DType.F8_E4M3 and not name.endswith(_SCALE_ENDINGS):
                self._fp8(tensor)
            elif tensor.dtype is DType.U8 and name.endswith("_blocks") and tensor.shape[-1:] == (16,):
                self._mxfp4(tensor, name.removesuffix("_blocks"))

    def lone_scales(self) -> None:
        """Report scales to which nothing belongs."""
        for name, tensor in self._stored.items():
            if not name.endswith((*_SCALE_ENDINGS, ".weight_shape")) or name in self._members:
                continue
            codes = tuple(_codes_of(tensor))
            if not codes or name in self._unknown or not self._blamed.isdisjoint((name, *codes)):
                continue
            held = [self._stored[each] for each in codes if each in self._stored]
            if any(not each.dtype.is_mergeable for each in held):
                continue
            if not self._declared.method and not name.endswith("_scale_inv"):
                continue  # only FP8 has that ending; the others are words that any module may use
            self._blamed.add(name)
            beside = f"{_told(held[0])} is no codes" if held else f"there is no {' and no '.join(codes)}"
            self._faults.add("lone scale", f"{_told(tensor)} is a scale without codes: {beside}.", _GET_WHOLE)

    def compare(self) -> None:
        """Compare everything found with what the config says."""
        for packed in self._found.values():
            self._compare_one(packed)
        says_codes = self._declared.is_stored and (self._declared.schemes or self._declared.others)
        if says_codes and not self._found and not self._blamed and not self._unknown and self._is_plain():
            what = f"{CONFIG_FILE} says that weights are quantised by {self._declared}, but no tensor is: "
            dtypes = sorted({tensor.dtype.value for tensor in self._stored.values()})
            self._faults.add("plain", f"{what}all are {', '.join(dtypes) or 'missing'}.", _ONE_IS_WRONG)

    def wrong(self) -> None:
        """Report what the config says and cannot mean, or means in a way that is not known."""
        for sentence in self._declared.wrong:
            remedy = _CONVERT_ELSEWHERE if sentence.endswith(_NOT_READ) else _ONE_IS_WRONG
            self._faults.add(sentence, f"{CONFIG_FILE}: quantization_config {sentence}.", remedy)

    def _compare_one(self, packed: Packed) -> None:
        module = packed.name.removesuffix(_WEIGHT)
        packing, declared = packed.packing, self._said(module)
        if not declared.method:
            if not self._checkpoint.is_raw:
                self._contradiction(packed, "undeclared", "has no quantization_config")
        elif not declared.allows(packing.format, packing.block, packing.shape):
            kind = f"not allowed {packing.format} {packing.block}"
            self._contradiction(packed, kind, f"says {declared}")
        if declared.plain.lists(module):
            self._contradiction(packed, "listed", f"lists {module} as not quantised")

    def _said(self, module: str) -> Declared:
        """What the config says of a module; of one that loaders may call otherwise, what it says at all."""
        return self._declared.of(module) or self._declared

    def _contradiction(self, packed: Packed, kind: str, said: str) -> None:
        packing = packed.packing
        told = f"{_told(self._stored[packed.codes])} with scales {list(packing.scales_shape)}"
        what = f"{told} is {_in_words(packing)}, but {CONFIG_FILE} {said}."
        self._faults.add(kind, what, _ONE_IS_WRONG)

    def _fp8(self, codes: StoredTensor) -> None:
        name = codes.name
        module = name.removesuffix(_WEIGHT)
        if f"{module}.qscale_weight" in self._stored:
            return
        possible = [f"{name}_scale_inv", f"{name}_scale"]
        if name.endswith(_WEIGHT):
            possible.append(f"{module}.scale")
        scales = self._partner(codes, possible)
        if scales is None:
            return
        said = self._said(module)
        key = codes.shape, scales.shape, said.schemes
        if key not in self._fp8_blocks:
            self._fp8_blocks[key] = _blocks_meant(codes.shape, scales.shape, said)
        blocks = self._fp8_blocks[key]
        if blocks is None:
            self._misfit(codes, scales)
            return
        held = tuple(each for ending in INPUT_SCALES if (each := f"{module}{ending}") in self._stored)
        if isinstance(blocks, str):
            self._unknown.update((each, blocks) for each in (name, scales.name, *held))
            return
        self._add(_Parts(name, codes, scales, held), *blocks, codes.shape)

    def _mxfp4(self, codes: StoredTensor, name: str) -> None:
        scales = self._partner(codes, [f"{name}_scales"])
        if scales is None:
            return
        if scales.shape != codes.shape[:-1]:
            self._misfit(codes, scales)
            return
        shape = (*codes.shape[:-2], codes.shape[-2] * 32)
        self._add(_Parts(name, codes, scales, ()), Format.MXFP4, (1, 32), shape)

    def _packed(self, codes: StoredTensor, module: str) -> None:
        """Pair what compressed-tensors packs, or name the variant that is not read."""
        if form := self._refused(codes, module):
            self._refuse(module, form)
            return
        scales = self._partner(codes, [f"{module}.weight_scale"])
        if scales is None:
            return
        columns = codes.shape[-1] * (codes.dtype.bits // 4) if codes.shape else 0
        groups = scales.shape[-1] if scales.shape else 0
        told = self._checkpoint.shapes.get(f"{module}{SHAPE_ENDING}")
        if told is not None and len(codes.shape) == 2 and told != (codes.shape[0], columns):
            self._other_shape(codes, module, told)
            return
        if len(codes.shape) < 2 or scales.shape[:-1] != codes.shape[:-1] or not groups or columns % groups:
            self._misfit(codes, scales)
            return
        shape = (*codes.shape[:-1], columns)
        form, block = _packed_format(codes, scales), (1, columns // groups)
        if form is Format.INT4 and (wider := self._wider(module, block, shape)):
            self._refuse(module, f"packed integers, declared as {' or '.join(wider)}")
            return
        if form is Format.NVFP4 and not self._partner(codes, [f"{module}.weight_global_scale"]):
            return
        parts = (f"{module}{ending}" for ending in _OF_PACKED[2:])
        others = tuple(each for each in parts if each in self._stored)
        self._add(_Parts(f"{module}{_WEIGHT}", codes, scales, others), form, block, shape)

    def _other_shape(self, codes: StoredTensor, module: str, told: tuple[int, int]) -> None:
        """Name the variant of packed codes whose stored shape is not that of rows full of four-bit codes."""
        said = self._declared.of(module) or self._declared
        if said.others and not any(scheme.format is Format.INT4 for scheme in said.schemes):
            self._refuse(module, f"packed integers, declared as {' or '.join(said.others)}")
            return
        per_element = codes.dtype.bits // 4
        padding = codes.shape[1] * per_element - told[1]
        if told[0] == codes.shape[0] and 0 < padding < per_element:
            self._refuse(module, f"packed codes with {padding} unused ones at the end of each row")
            return
        self._blamed.update((codes.name, f"{module}.weight_scale"))
        name = f"{module}{SHAPE_ENDING}"
        what = f"{name} says {list(told)}, which is not the shape that {_told(codes)} holds."
        self._faults.add("other shape", what, _GET_WHOLE)

    def _wider(self, module: str, block: tuple[int, int], shape: tuple[int, ...]) -> tuple[str, ...]:
        """What packed integers are declared as that may be wider: only the config tells, not their dtype."""
        said = self._declared.of(module)
        if said is None:
            return self._declared.others
        return () if said.allows(Format.INT4, block, shape) else said.others

    def _refused(self, codes: StoredTensor, module: str) -> str | None:
        """What a packed variant that is not read is called, or None."""
        if f"{module}.weight_zero_point" in self._stored:
            return "packed integers with zero points"
        if f"{module}.weight_g_idx" in self._stored:
            return "packed integers in another order of columns (g_idx)"
        if codes.dtype not in _PACKED_DTYPES:
            return f"{codes.dtype.value} in weight_packed"
        return None

    def _refuse(self, module: str, form: str) -> None:
        parts = (f"{module}{ending}" for ending in _OF_PACKED)
        self._unknown.update((name, form) for name in parts if name in self._stored)

    def _partner(self, codes: StoredTensor, possible: Sequence[str]) -> StoredTensor | None:
        """The scales of some codes; None, with a fault, where there are none or several."""
        held = [self._stored[name] for name in possible if name in self._stored]
        if len(held) == 1:
            return held[0]
        self._blamed.update((codes.name, *possible))
        if held:
            what = f"{_told(codes)} has several scales: {' and '.join(each.name for each in held)}."
        else:
            what = f"{_told(codes)} is codes without scales: there is no {' and no '.join(possible)}."
        self._faults.add("several scales" if held else "no scales", what, _GET_WHOLE)
        return None

    def _misfit(self, codes: StoredTensor, scales: StoredTensor) -> None:
        self._blamed.update((codes.name, scales.name))
        said = f"; {CONFIG_FILE} says {self._declared}" if self._declared.method else ""
        what = f"{_told(codes)} and its scales {_told(scales)} do not fit together: no blocks have this grid"
        self._faults.add("misfit", f"{what}{said}.", _GET_WHOLE)

    def _add(self, parts: _Parts, form: Format, block: tuple[int, int], shape: tuple[int, ...]) -> None:
        name, codes, scales, others = parts
        if name != codes.name and name in self._stored:
            self._blamed.update((codes.name, scales.name))
            what = f"{_told(codes)} holds the numbers of {name}, and so does {_told(self._stored[name])}."
            self._faults.add("twice", what, "Delete one of the two; nothing says which of them counts.")
            return
        is_power = scales.dtype in _EXPONENTS or (form.is_fp8 and self._declared.power_of_two)
        key = (form, shape, block, scales.dtype, is_power, scales.shape)
        try:
            # Ten thousands of experts are packed alike.
            packing = self._packings.get(key) or self._packings.setdefault(key, Packing(*key))
        except ValueError as error:
            self._blamed.update((codes.name, scales.name))
            what = f"{_told(codes)} with its scales {_told(scales)} cannot be read: {error}"
            self._faults.add(f"unreadable {form}", what, _GET_WHOLE)
            return
        packed = Packed(name, packing, codes.name, scales.name, others)
        self._found[name] = packed
        for each in packed.stored:
            self._members[each] = name
        if others:
            self._check_others(packed)

    def _check_others(self, packed: Packed) -> None:
        """Whether what else belongs to a tensor is of the dtype and shape that readers take."""
        if packed.shape_tensor:
            shape = self._stored[packed.shape_tensor]
            if shape.dtype not in (DType.I32, DType.I64) or shape.shape != (2,):
                self._faults.add("shape", f"{_told(shape)} is no I32 or I64 [2].", _GET_WHOLE)
        if packed.packing.format is Format.NVFP4 and packed.tensor_scale:
            scale = self._stored[packed.tensor_scale]
            count = packed.packing.num_matrices
            if scale.dtype is not DType.F32 or scale.num_elements != count:
                self._faults.add("global scale", f"{_told(scale)} is no F32 of {count} elements.", _GET_WHOLE)

    def _is_plain(self) -> bool:
        held = self._stored.values()
        return not any(each.dtype in _CODE_DTYPES and len(each.shape) > 1 for each in held)


def _blocks_meant(codes: tuple[int, ...], scales: tuple[int, ...], said: Declared) -> Blocks | str | None:
    """The format and blocks of FP8 with these shapes, or what it is called where it is not read.

    What the config allows goes before the rest.
    """
    named, allows = said.fp8_blocks, said.allows
    grids = list(fp8_blocks(codes, scales, named)) if len(codes) > 1 else []
    found = next((each for each in grids if allows(*each, codes)), None)
    return found or turned_fp8(codes, scales, named, allows) or next(iter(grids), None)


def _packed_format(codes: StoredTensor, scales: StoredTensor) -> Format:
    """The format of what compressed-tensors packs, by how codes and scales are stored."""
    if codes.dtype is DType.I32:
        return Format.INT4
    return Format.MXFP4_ROWS if scales.dtype in _EXPONENTS else Format.NVFP4


def _codes_of(scale: StoredTensor) -> Iterator[str]:
    """Names of codes that a tensor is the scale of by its name; none where plain tensors are called so."""
    name = scale.name
    if name.endswith("_scale_inv"):
        yield name.removesuffix("_scale_inv")
    elif name.endswith((".weight_scale", ".weight_global_scale", ".weight_shape")):
        module = name.rpartition(".")[0]
        yield f"{module}{_WEIGHT}"
        yield f"{module}{_PACKED}"
    elif name.endswith("_scales") and scale.dtype is DType.U8:
        yield f"{name.removesuffix('_scales')}_blocks"
    elif name.endswith(".scale") and scale.dtype is DType.F8_E8M0:
        yield f"{name.removesuffix('.scale')}{_WEIGHT}"


def _told(tensor: StoredTensor) -> str:
    return f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)} in {tensor.key}"


def _in_words(packing: Packing) -> str:
    rows, columns = packing.block
    return f"{packing.format.word} in blocks of {rows}x{columns}"
