"""How compressed-tensors publishes: its config's groups, and the codes that it packs.

======================== =============================== ===========================================
codes                    scales                          further
======================== =============================== ===========================================
``X.weight`` F8_E4M3     ``X.weight_scale``              ``X.input_scale``: found in ``fp8``
``X.weight`` I8          ``X.weight_scale``              ``X.weight_zero_point`` I8, ``X.input_scale``
``X.weight_packed`` I32  ``X.weight_scale``              ``X.weight_shape``, ``X.weight_zero_point`` I32
``X.weight_packed`` U8   ``X.weight_scale`` F8_E4M3      ``X.weight_global_scale``, ``X.input_global_scale``
``X.weight_packed`` U8   ``X.weight_scale`` U8
======================== =============================== ==========================================="""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation import fp8, int4, int8, mxfp4, nvfp4
from raymerge.checkpoints.quantisation.config import (
    Declared,
    Group,
    GroupWeights,
    Modules,
    Scheme,
    brief,
    matched_modules,
    names_in,
    unknown_fields,
    unknown_values,
)
from raymerge.checkpoints.quantisation.detect import CORRUPT, PackedForm, QuantMethod, Search, described
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec
from raymerge.dtypes import DType

_NAME = "compressed-tensors"
_SCHEMES = (
    *(fp8.group_scheme, int4.group_scheme, int8.group_scheme),
    *(mxfp4.group_scheme, nvfp4.group_scheme),
)
_PACKED_FORMATS = (int4.INT4, mxfp4.MXFP4_ROWS, nvfp4.NVFP4)

_TABLE_KEYS = frozenset(
    [
        *("quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status"),
        *("global_compression_ratio", "version", "run_compressed", "dequantize", "use_optimized_inference"),
        "sparsity_config",
    ]
)
_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_WEIGHT_KEYS = frozenset(
    [
        *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"),
        *("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    ]
)
"""Fields that are understood, or do not change what stored codes mean. Other fields must be empty: one of
them may say that the weights are rotated or permuted."""
_WORDS: Mapping[Format, tuple[str, str, str]] = MappingProxyType(
    {
        fp8.FP8_CHANNEL: ("float-quantized", "float", "channel"),
        fp8.FP8_TENSOR: ("float-quantized", "float", "tensor"),
        int4.INT4: ("pack-quantized", "int", "group"),
        int4.INT4_ASYMMETRIC: ("pack-quantized", "int", "group"),
        int4.INT4_CHANNEL: ("pack-quantized", "int", "channel"),
        int4.INT4_CHANNEL_ASYMMETRIC: ("pack-quantized", "int", "channel"),
        int8.INT8_CHANNEL: ("int-quantized", "int", "channel"),
        int8.INT8_ASYMMETRIC: ("int-quantized", "int", "channel"),
        mxfp4.MXFP4_ROWS: ("mxfp4-pack-quantized", "float", "group"),
        nvfp4.NVFP4: ("nvfp4-pack-quantized", "float", "tensor_group"),
    }
)
"""Values of ``format``, ``type`` and ``strategy`` of formats that new tables are written for."""
_STORED_AS = ("dense", "naive-quantized", "mxfp8-quantized", "mixed-precision")
_VALUES = {"format": (*_STORED_AS, *(form for form, _, _ in _WORDS.values()))}
"""Values with one way of storing codes."""
_BY_TOKEN = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
_CLASS = re.compile(r"[A-Z]\w*")

_WEIGHT, _PACKED = ".weight", ".weight_packed"
_SCALE, _GLOBAL_SCALE = ".weight_scale", ".weight_global_scale"
_ZERO_POINT, _INPUT_ZERO_POINT = ".weight_zero_point", ".input_zero_point"
_ZEROS_OF_INPUTS = "INT8 with stored zero points of inputs"
_ONE_SCALE = "INT8 with one scale for each matrix"
_PARTS = (
    *(_PACKED, _SCALE, int4.SHAPE_ENDING, _ZERO_POINT, ".weight_g_idx"),
    *(_GLOBAL_SCALE, ".input_global_scale", ".input_scale"),
)


def _read_table(table: Mapping[str, Any]) -> Declared:
    groups = table.get("config_groups")
    values = groups.values() if isinstance(groups, Mapping) else ()
    tables = [each for each in values if isinstance(each, Mapping)]
    tables = [each for each in tables if isinstance(each.get("weights"), Mapping)]
    plain, wrong = matched_modules(names_in(table, "ignore"))
    unknown = (*unknown_fields(table, _TABLE_KEYS), *_unread_sparsity(table), *unknown_values(table, _VALUES))
    read = tuple(_group(each, plain) for each in tables)
    parts = [group.says for group in read]
    return Declared(
        _NAME,
        tuple(dict.fromkeys(scheme for each in parts for scheme in each.schemes)),
        others=tuple(dict.fromkeys(words for each in parts for words in each.others)),
        plain=plain,
        is_stored=table.get("format") != "dense",
        scales_inputs=any(each.scales_inputs for each in parts),
        groups=read,
        contradictions=(*wrong, *(fault for each in parts for fault in each.contradictions)),
        not_understood=(*unknown, *(field for each in parts for field in each.not_understood)),
    )


def _group(group: Mapping[str, Any], plain: Modules) -> Group:
    targets, weights = names_in(group, "targets"), group["weights"]
    classes = [each for each in targets if _CLASS.fullmatch(each)]
    modules, wrong = matched_modules(each for each in targets if each not in classes)
    scheme = _scheme(weights)
    unknown = (*unknown_fields(group, _GROUP_KEYS), *unknown_fields(weights, _WEIGHT_KEYS))
    says = Declared(
        _NAME,
        (scheme,) if scheme else (),
        others=() if scheme else (_in_words(weights),),
        plain=plain,
        scales_inputs=_scales_inputs(group.get("input_activations")),
        contradictions=wrong,
        not_understood=(*unknown, *unknown_values(group, _VALUES)),
    )
    return Group(modules, bool(classes) or not targets, says)


def _unread_sparsity(table: Mapping[str, Any]) -> Iterator[str]:
    """Sparse storage, where only nonzero weights are stored."""
    sparsity = table.get("sparsity_config")
    form = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if form not in (None, "dense"):
        yield f"says in sparsity_config that weights are stored as {brief(form)}"


def _scales_inputs(activations: Any) -> bool:
    """Whether inputs have a stored scale; a dynamic one is "local" where each block has its own beside it."""
    return isinstance(activations, Mapping) and activations.get("dynamic", False) is not True


def _scheme(weights: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a group's weights, or None where unsupported."""
    is_symmetric = weights.get("symmetric", True) is True
    if _is_reordered(weights):
        return None
    size = weights.get("group_size")
    group = size if isinstance(size, int) and size > 0 else None
    strategy = weights.get("strategy") or ("group" if group else "channel" if size == -1 else "tensor")
    kind = weights.get("type", "int"), weights.get("num_bits", 8)
    if not is_symmetric and kind[0] != "int":
        return None
    structure, scale_dtype = weights.get("block_structure"), weights.get("scale_dtype")
    meant = GroupWeights(kind, strategy, group, structure, scale_dtype, is_symmetric)
    return next((scheme for read in _SCHEMES if (scheme := read(meant)) is not None), None)


def _is_reordered(weights: Mapping[str, Any]) -> bool:
    """Whether groups are not runs of neighbours. The other orders of quantising leave columns in place."""
    return weights.get("actorder") not in (None, "weight", "static")


def _in_words(weights: Mapping[str, Any]) -> str:
    symmetry = "" if weights.get("symmetric", True) is True else "asymmetric "
    order = ", in another order of columns" if _is_reordered(weights) else ""
    kind = f"{brief(weights.get('num_bits', 8))}-bit {brief(weights.get('type', 'int'))}"
    return f"{symmetry}{kind} by {brief(weights.get('strategy'))}{order}"


def _fresh_table(
    quant_specs: Mapping[str, QuantSpec], cache: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """A table of one group, as in Kimi-K2-Thinking."""
    kinds = {each.kind for each in quant_specs.values()}
    if len(kinds) != 1:
        return None
    ((form, block),) = kinds
    if form not in _WORDS:
        return None
    stored_as, kind, strategy = _WORDS[form]
    has_bytes = form.code_bits == 8
    weights = {
        "dynamic": False,
        "group_size": None if has_bytes else block[1] or None,
        "num_bits": form.code_bits,
        **({"scale_dtype": "torch.uint8"} if form == mxfp4.MXFP4_ROWS else {}),
        "strategy": strategy,
        "symmetric": form.zero_points is None,
        "type": kind,
    }
    group = {
        # Codes of 8 bits are for activations in 8 bits too; those of 4 bits are for plain ones.
        "input_activations": {**_BY_TOKEN, "type": kind} if has_bytes else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": stored_as,
        "ignore": [],
        "kv_cache_scheme": None if cache is None else dict(cache),
        "quant_method": _NAME,
        "quantization_status": "compressed",
    }


def _all_below(module: str) -> str:
    return rf"re:{re.escape(module)}\..*"


# Detection


def _are_codes(tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> bool:
    if tensor.dtype is not DType.I8 or not tensor.name.endswith(_WEIGHT):
        return tensor.name.endswith(_PACKED)
    # Scales by this name are those of DeepSeek-V4's experts.
    return f"{tensor.name.removesuffix(_WEIGHT)}.scale" not in stored


def _add(search: Search, codes: StoredTensor) -> None:
    if codes.name.endswith(_PACKED):
        _add_packed(search, codes)
    else:
        _add_bytes(search, codes)


def _add_bytes(search: Search, codes: StoredTensor) -> None:
    """Add INT8; bytes beside other scales are of a format that is not read."""
    module = codes.name.removesuffix(_WEIGHT)
    is_declared = any(each.format.code_dtype is DType.I8 for each in search.declared_of(module).schemes)
    if not is_declared and f"{module}{_SCALE}" not in search.stored:
        return
    scales = search.partner(codes, [f"{module}{_SCALE}"])
    if scales is None:
        return
    if f"{module}{_INPUT_ZERO_POINT}" in search.stored:
        parts = (codes.name, f"{module}{_INPUT_ZERO_POINT}")
        search.refuse(parts, _ZEROS_OF_INPUTS)
        _refuse(search, module, _ZEROS_OF_INPUTS)
        return
    if len(codes.shape) != 2 or scales.shape not in ((codes.shape[0], 1), codes.shape[:1]):
        if scales.num_elements == 1:
            search.refuse((codes.name,), _ONE_SCALE)
            _refuse(search, module, _ONE_SCALE)
            return
        search.report_misfit(codes, scales)
        return
    others = tuple(each for ending in _PARTS[2:] if (each := f"{module}{ending}") in search.stored)
    block, shape = (1, codes.shape[1]), codes.shape
    form = _with_zero_points(search, codes, (int8.INT8_CHANNEL, block, shape), int8.INT8_ASYMMETRIC)
    if form is not None:
        search.add(codes.name, codes, scales, others, (form, block, shape))


def _with_zero_points(
    search: Search, codes: StoredTensor, form: PackedForm, asymmetric: Format
) -> Format | None:
    """The format of integers, which have zero points or not; None, with a fault, where the config says that
    they have, and they have not."""
    symmetric, block, shape = form
    module = codes.name.removesuffix(_PACKED).removesuffix(_WEIGHT)
    name, declared = f"{module}{_ZERO_POINT}", search.declared_of(module)
    if name in search.stored:
        return asymmetric
    if declared.allows(asymmetric, block, shape) and not declared.allows(symmetric, block, shape):
        what = f"{described(codes)} is codes without zero points: there is no {name}."
        search.report("no zero points", what, CORRUPT, (codes.name, f"{module}{_SCALE}"))
        return None
    return symmetric


def _add_packed(search: Search, codes: StoredTensor) -> None:
    module, stored = codes.name.removesuffix(_PACKED), search.stored
    endings = tuple([ending for ending in _PARTS[2:] if f"{module}{ending}" in stored])
    scales = stored.get(f"{module}{_SCALE}")
    own = None if scales is None else (scales.dtype, scales.shape)
    stated = search.shapes.get(f"{module}{int4.SHAPE_ENDING}"), id(search.declared.of(module))
    # All that the answer hangs on.
    kind = (codes.dtype, codes.shape, own, endings, stated)
    if kind not in search.memo:
        packed = _packed_form(search, codes, module)
        if packed is None:
            return
        search.memo[kind] = packed
    form, padding = search.memo[kind]
    others = tuple([f"{module}{ending}" for ending in endings])
    search.add(f"{module}{_WEIGHT}", codes, stored[f"{module}{_SCALE}"], others, form, padding=padding)


def _packed_form(search: Search, codes: StoredTensor, module: str) -> tuple[PackedForm, int] | None:
    """The form of packed codes, and their padding; None for those that are refused or reported."""
    if variant := _refused_variant(search, codes, module):
        _refuse(search, module, variant)
        return None
    scales = search.partner(codes, [f"{module}{_SCALE}"])
    if scales is None:
        return None
    columns = codes.shape[-1] * (codes.dtype.bits // 4) if codes.shape else 0
    groups = scales.shape[-1] if scales.shape else 0
    padding = _padding(search, codes, module, groups)
    if padding is None:
        return None
    if len(codes.shape) < 2 or scales.shape[:-1] != codes.shape[:-1] or not groups or columns % groups:
        search.report_misfit(codes, scales)
        return None
    shape, block = (*codes.shape[:-1], columns), (1, columns // groups)
    alike = [form for form in _PACKED_FORMATS if form.code_dtype is codes.dtype]
    form = next((each for each in alike if scales.dtype in each.scale_dtypes), alike[-1])
    if form == int4.INT4:
        by_row = (int4.INT4_CHANNEL, int4.INT4_CHANNEL_ASYMMETRIC)
        is_by_row = groups == 1 and any(each.format in by_row for each in search.declared_of(module).schemes)
        symmetric, asymmetric = by_row if is_by_row else (form, int4.INT4_ASYMMETRIC)
        integers = _with_zero_points(search, codes, (symmetric, block, shape), asymmetric)
        if integers is None:
            return None
        form = integers
    if form.code_dtype is DType.I32 and (wider := _wider(search, module, (form, block, shape))):
        _refuse(search, module, f"packed integers, declared as {' or '.join(wider)}")
        return None
    if form.tensor_scale == "divisor" and not search.partner(codes, [f"{module}{_GLOBAL_SCALE}"]):
        return None
    return (form, block, shape), padding


def _padding(search: Search, codes: StoredTensor, module: str, groups: int) -> int | None:
    """Codes at the end of each row that are no numbers, by the stored shape; None, with what is wrong, where
    that is not the shape of rows of 4-bit codes."""
    per_element = codes.dtype.bits // 4
    columns = codes.shape[-1] * per_element if codes.shape else 0
    stored = search.shapes.get(f"{module}{int4.SHAPE_ENDING}")
    if stored is None or len(codes.shape) != 2 or stored == (codes.shape[0], columns):
        return 0
    padding = columns - stored[1]
    # Groups end with an integer; a row that has one scale need not.
    if stored[0] == codes.shape[0] and 0 < padding < per_element < stored[1] and groups == 1:
        return padding
    declared = search.declared_of(module)
    if declared.others and not any(each.format.code_dtype is DType.I32 for each in declared.schemes):
        _refuse(search, module, f"packed integers, declared as {' or '.join(declared.others)}")
        return None
    name = f"{module}{int4.SHAPE_ENDING}"
    what = f"{name} says {list(stored)}, which is not the shape that {described(codes)} holds."
    search.report("other shape", what, CORRUPT, (codes.name, f"{module}{_SCALE}"))
    return None


def _wider(search: Search, module: str, form: PackedForm) -> tuple[str, ...]:
    """Declarations of packed integers that may be wider: only the config says, not the dtype."""
    declared = search.declared.of(module)
    if declared is None:
        return search.declared.others
    return () if declared.allows(*form) else declared.others


def _refused_variant(search: Search, codes: StoredTensor, module: str) -> str | None:
    if f"{module}.weight_g_idx" in search.stored:
        return "packed integers in another order of columns (g_idx)"
    if not any(form.code_dtype is codes.dtype for form in _PACKED_FORMATS):
        return f"{codes.dtype.value} in weight_packed"
    return None


def _refuse(search: Search, module: str, variant: str) -> None:
    search.refuse((f"{module}{ending}" for ending in _PARTS), variant)


def _codes_of(scale: StoredTensor) -> tuple[str, ...]:
    if not scale.name.endswith((_SCALE, _GLOBAL_SCALE, int4.SHAPE_ENDING)):
        return ()
    module = scale.name.rpartition(".")[0]
    return f"{module}{_WEIGHT}", f"{module}{_PACKED}"


COMPRESSED_TENSORS = QuantMethod(
    _NAME,
    {
        int4.INT4: int4.Int4(),
        int4.INT4_ASYMMETRIC: int4.Int4Asymmetric(),
        int4.INT4_CHANNEL: int4.Int4(),
        int4.INT4_CHANNEL_ASYMMETRIC: int4.Int4Asymmetric(),
        int8.INT8_CHANNEL: int8.Int8(),
        int8.INT8_ASYMMETRIC: int8.Int8Asymmetric(),
        nvfp4.NVFP4: nvfp4.Nvfp4(),
        mxfp4.MXFP4_ROWS: mxfp4.Mxfp4(),
    },
    read_table=_read_table,
    are_codes=_are_codes,
    add=_add,
    codes_of=_codes_of,
    fresh_table=_fresh_table,
    plain_keys=("ignore",),
    below=_all_below,
)
