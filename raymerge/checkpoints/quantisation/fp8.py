"""FP8: float8 e4m3 without infinities (arXiv 2209.05433), one code to a byte, and scales of any block.

A code times its scale is the number; the name ``weight_scale_inv`` of published scales is historical.
Layouts, as published (``X`` is a module, ``Y`` a fused matrix without ``.weight``):

=================== ============================================= ==========================================
codes               scales                                        further
=================== ============================================= ==========================================
``X.weight`` F8     ``X.weight_scale_inv`` (DeepSeek-V3's         ``X.input_scale``, ``X.activation_scale``
                    ``README_WEIGHTS.md``), ``X.scale`` (V4),
                    ``X.weight_scale`` (compressed-tensors)
``Y`` F8            ``Y_scale_inv``, ``Y_scale``
``Y`` F8            ``Y_weight_scale`` [], of all experts         ``Y_input_scale``: ModelOpt's of Llama 4
=================== ============================================= ==========================================

``quant_method: fp8`` is also that of DeepSeek-V4, whose experts are MXFP4 as ``mxfp4`` describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation import mxfp4
from raymerge.checkpoints.quantisation.block_codec import (
    BlockValues,
    Blockwise,
    Codec,
    InLoops,
    InTorch,
    power_of_two_above,
    quotients,
    storable_scales,
)
from raymerge.checkpoints.quantisation.config import (
    Declared,
    GroupWeights,
    Scheme,
    block_in,
    brief,
    names_in,
    plain_modules,
    unknown_fields,
    unknown_values,
)
from raymerge.checkpoints.quantisation.detect import (
    INPUT_SCALES,
    SCALE_ENDINGS,
    PackedForm,
    QuantMethod,
    Search,
)
from raymerge.checkpoints.quantisation.encoding import (
    ANY,
    EXPONENTS,
    FLOATS,
    WHOLE,
    Format,
    QuantSpec,
    Reference,
)
from raymerge.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 448.0
USUAL_BLOCK = (128, 128)
_STACK = "FP8 in stacks of experts, other than ModelOpt's with one scale for all (_weight_scale)"


def _e4m3(code: int) -> float:
    """1 sign, 4 exponent and 3 mantissa bits."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return float("nan") if code & 127 == 127 else size if code < 128 else -size


def _format(name: str, block: tuple[int, int], **differing: Any) -> Format:
    return Format(
        name,
        block,
        code_dtype=DType.F8_E4M3,
        code_bits=8,
        scale_dtypes=FLOATS | EXPONENTS,
        reference=Reference(tuple(map(_e4m3, range(256))), top=448.0),
        **differing,
    )


FP8_BLOCK = _format(
    "fp8_block",
    (ANY, ANY),
    usual_block=USUAL_BLOCK,
    usual_scale=DType.F32,
    parts={"codes": "", "scales": "_scale_inv"},
    holds_stacks=True,
)
FP8_CHANNEL = _format(
    "fp8_channel", (1, WHOLE), usual_scale=DType.BF16, parts={"codes": "", "scales": "_scale"}
)
FP8_TENSOR = _format(
    "fp8_tensor",
    (WHOLE, WHOLE),
    usual_scale=DType.BF16,
    tensor_scale="only",
    parts={"codes": "", "tensor_scale": "_scale"},
)
FP8_STACK = replace(
    FP8_TENSOR,
    name="fp8_stack",
    title="fp8_tensor in stacks of experts",
    layout_of="fp8_tensor",
    usual_scale=DType.F32,
    parts={"codes": "", "tensor_scale": "_weight_scale"},
    scales_stack=True,
)
MXFP8 = replace(FP8_CHANNEL, name="mxfp8", block=(1, 32), scale_dtypes=EXPONENTS, usual_scale=DType.U8)
"""OCP Microscaling v1.0: 32 columns share a power of two."""


# The config's table

_PLAIN_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
_KEYS = frozenset(
    [
        *("quant_method", "fmt", "weight_block_size", "scale_fmt", "activation_scheme", "expert_dtype"),
        *(*_PLAIN_KEYS, "modules_to_convert", "kv_cache_scheme"),
        *("weight_per_tensor", "act_per_tensor", "dequantize", "moe_quant_algo", "quantized_layers"),
    ]
)
_EXPONENT_SCALES = ("torch.uint8", "torch.float8_e8m0fnu")
_EXPERT_FORMATS: Mapping[str, tuple[Scheme, ...]] = {
    "": (Scheme(mxfp4.MXFP4_BYTES, None, is_stated=False),),
    mxfp4.MXFP4_BYTES.expert_dtype: (Scheme(mxfp4.MXFP4_BYTES, None),),
    "fp8": (),
}
"""What ``expert_dtype`` allows beside FP8; loaders take experts for FP4 where it is absent."""
_VALUES: Mapping[str, Sequence[str]] = {
    "fmt": ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": tuple(_EXPERT_FORMATS),
}


def _read_table(table: Mapping[str, Any]) -> Declared:
    plain, wrong = plain_modules(names_in(table, *_PLAIN_KEYS))
    block = block_in(table.get("weight_block_size"))
    schemes: tuple[Scheme, ...] = (Scheme(FP8_BLOCK, block),)
    if table.get("weight_block_size") is None:
        # Scales of whole tensors and rows are told from their shapes alone.
        schemes = Scheme(FP8_TENSOR, None), Scheme(FP8_CHANNEL, None), Scheme(FP8_BLOCK, USUAL_BLOCK)
    elif block is None:
        size = brief(table["weight_block_size"])
        wrong = (*wrong, f"gives weight_block_size as {size}, not as two whole numbers above 0")
    elif table.get("scale_fmt") == "ue8m0":
        # The tables of DeepSeek-V4.1's memory have scales for each row, as rows are looked up one by one.
        schemes = (*schemes, Scheme(FP8_BLOCK, (1, block[1])))
    return Declared(
        "fp8",
        (*schemes, *_EXPERT_FORMATS.get(str(table.get("expert_dtype") or ""), ())),
        power_of_two=table.get("scale_fmt") == "ue8m0",
        plain=plain,
        scales_inputs=table.get("activation_scheme") == "static",
        contradictions=wrong,
        not_understood=(*unknown_values(table, _VALUES), *unknown_fields(table, _KEYS)),
    )


def _fresh_table(
    quant_specs: Mapping[str, QuantSpec], cache: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """DeepSeek-V3's table, which is also for experts in MXFP4 (V4)."""
    blocks = [each for each in quant_specs.values() if each.format == FP8_BLOCK]
    others = {each.format for each in quant_specs.values()} - {FP8_BLOCK, mxfp4.MXFP4_BYTES}
    if others or len({each.block for each in blocks}) > 1:
        return None
    # Scales that may be any numbers may also be powers of two.
    has_powers = all(each.power_of_two for each in blocks)
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **({} if cache is None else {"kv_cache_scheme": dict(cache)}),
        "modules_to_not_convert": [],
        "quant_method": "fp8",
        **({"scale_fmt": "ue8m0"} if has_powers else {}),
        "weight_block_size": list(blocks[0].block if blocks else USUAL_BLOCK),
    }


def group_scheme(weights: GroupWeights) -> Scheme | None:
    if weights.kind != ("float", 8):
        return None
    if weights.strategy == "tensor":
        return Scheme(FP8_TENSOR, None)
    if weights.strategy == "channel":
        return Scheme(FP8_CHANNEL, None)
    if weights.group == MXFP8.block[1] and weights.scale_dtype in _EXPONENT_SCALES:
        return Scheme(MXFP8, None)
    if weights.strategy == "group" and weights.group:
        return Scheme(FP8_BLOCK, (1, weights.group))
    # Older files write "128x128".
    structure = weights.block_structure
    block = block_in(structure.split("x") if isinstance(structure, str) else structure)
    return Scheme(FP8_BLOCK, block) if weights.strategy == "block" and block else None


# Detection

Blocks: TypeAlias = tuple[Format, tuple[int, int]]


def _are_codes(tensor: StoredTensor, _: Mapping[str, StoredTensor]) -> bool:
    return tensor.dtype is DType.F8_E4M3 and not tensor.name.endswith(SCALE_ENDINGS)


def _add(search: Search, codes: StoredTensor) -> None:
    name = codes.name
    module = name.removesuffix(".weight")
    if f"{module}.qscale_weight" in search.stored:
        return
    possible = [f"{name}_scale_inv", f"{name}_scale"]
    possible.append(f"{module}.scale" if name.endswith(".weight") else f"{name}_weight_scale")
    scales = search.partner(codes, possible)
    if scales is None:
        return
    declared = search.declared_of(module)
    has_exponents = scales.dtype in EXPONENTS
    key = codes.shape, scales.shape, has_exponents, declared.schemes
    if key not in search.memo:
        search.memo[key] = _blocks_meant(codes.shape, scales.shape, declared, has_exponents=has_exponents)
    blocks: Blocks | str | None = search.memo[key]
    others = tuple(each for ending in INPUT_SCALES if (each := f"{module}{ending}") in search.stored)
    is_stack = len(codes.shape) > 2 and scales.num_elements == 1 and not scales.name.endswith("_inv")
    rows, columns = codes.shape[-2:] if len(codes.shape) > 1 else (1, 1)
    stacked: PackedForm = FP8_STACK, (rows, columns), codes.shape
    is_modelopt = is_stack and scales.name == f"{name}_weight_scale"
    if is_modelopt and declared.allows(*stacked):
        search.add(name, codes, scales, others, stacked)
    elif is_modelopt:
        search.refuse((name, scales.name, *others), search.undeclared(name, FP8_STACK))
    elif scales.name == f"{name}_weight_scale" or (is_stack and not scales.shape):
        search.refuse((name, scales.name, *others), _STACK)
    elif blocks is None:
        search.report_misfit(codes, scales)
    elif isinstance(blocks, str):
        search.refuse((name, scales.name, *others), blocks)
    else:
        search.add(name, codes, scales, others, (*blocks, codes.shape))


def _blocks_meant(
    codes: tuple[int, ...], scales: tuple[int, ...], declared: Declared, *, has_exponents: bool
) -> Blocks | str | None:
    """Format and blocks of FP8 with these shapes, or a phrase where unsupported; the config's go first."""
    schemes = (each.block for each in declared.schemes if each.format == FP8_BLOCK)
    named = tuple(dict.fromkeys(block for block in schemes if block)) or (USUAL_BLOCK,)
    grids = list(fp8_blocks(codes, scales, named)) if len(codes) > 1 else []
    if has_exponents and (FP8_BLOCK, MXFP8.block) in grids:
        grids.append((MXFP8, MXFP8.block))
    allowed = next((each for each in grids if declared.allows(*each, codes)), None)
    return allowed or _turned_fp8(codes, scales, named, declared) or next(iter(grids), None)


def fp8_blocks(
    shape: tuple[int, ...], scales: tuple[int, ...], named: Sequence[tuple[int, int]]
) -> Iterator[Blocks]:
    """Every reading of FP8 codes [..., rows, columns] with scales of a shape, likeliest first.

    A grid does not determine its blocks ([200, 64] is [2, 1] in blocks of 128 and of 100), so those of the
    config go before those that the grid implies."""
    stack, (rows, columns) = shape[:-2], shape[-2:]
    for block in named:
        if scales == (*stack, -(-rows // block[0]), -(-columns // block[1])):
            yield FP8_BLOCK, block
    if scales in ((*stack, 1), (*stack, 1, 1), stack):
        yield FP8_TENSOR, (rows, columns)
    if scales in ((*stack, rows), (*stack, rows, 1)):
        yield FP8_CHANNEL, (1, columns)
    if len(scales) == len(shape) and scales[:-2] == stack:
        block = implied_block(rows, scales[-2]), implied_block(columns, scales[-1])
        if all(block):
            yield FP8_BLOCK, block


def _turned_fp8(
    shape: tuple[int, ...], scales: tuple[int, ...], named: Sequence[tuple[int, int]], declared: Declared
) -> str | None:
    """Description of a stack of matrices [rows, columns] with scales for [columns, rows], or None.

    Experts stored [in, out] may have been quantised as [out, in]."""
    if len(shape) < 3:
        return None
    turned = (*shape[:-2], shape[-1], shape[-2])
    grids = [scales, *([(*scales[:-2], scales[-1], scales[-2])] if len(scales) == len(shape) else [])]
    for form, block in (each for grid in grids for each in fp8_blocks(turned, grid, named)):
        if declared.allows(form, block, turned):
            return f"{form.name} with scales of the transposed matrices"
    return None


def implied_block(size: int, count: int) -> int:
    """Block size by which ``count`` blocks cover ``size``; 0 where none does.

    A power of two if possible, as in all published models; else the smallest."""
    if not 0 < count <= size:
        return 0
    smallest = -(-size // count)
    largest = size if count == 1 else -(-size // (count - 1)) - 1
    if smallest > largest:
        return 0
    power = 1 << (smallest - 1).bit_length()
    return power if power <= largest else smallest


def _codes_of(scale: StoredTensor) -> tuple[str, ...]:
    if scale.name.endswith("_scale_inv"):
        return (scale.name.removesuffix("_scale_inv"),)
    is_weights = scale.name.endswith(".scale") and scale.dtype is DType.F8_E8M0
    return (f"{scale.name.removesuffix('.scale')}.weight",) if is_weights else ()


# Arithmetic


def _elements(codes: Tensor) -> Tensor:
    import torch

    return codes.view(torch.float8_e4m3fn).float()


def _nearest(quotients: Tensor) -> Tensor:
    import torch

    # Beyond the largest, torch would make NaN; what is not finite must not pass for the largest.
    lost = ~quotients.isfinite()
    codes = quotients.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(lost, 0x7F, codes)


class Fp8(Codec):
    """FP8 in blocks, by channel or with one scale for the tensor.

    The scale maps a block's largest magnitude to the largest element, rounded up to a power of two where
    scales are such. 0 keeps its sign."""

    in_torch: ClassVar[Blockwise] = InTorch(_elements, _nearest)
    in_loops: ClassVar[Blockwise | None] = InLoops("E4M3")

    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> Tensor:
        scales = quotients(blocks.largest, _LARGEST)
        rounded = power_of_two_above(scales) if quant_spec.power_of_two else scales
        return storable_scales(quant_spec.scale_dtype, rounded)


FP8 = QuantMethod(
    "fp8",
    dict.fromkeys((FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, FP8_STACK, MXFP8), Fp8()),
    read_table=_read_table,
    are_codes=_are_codes,
    add=_add,
    codes_of=_codes_of,
    fresh_table=_fresh_table,
    plain_keys=_PLAIN_KEYS,
    expert_dtype="fp8",
)
