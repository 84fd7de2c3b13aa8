"""ModelOpt, NVIDIA's quantiser: its tables, and the layouts that are its own.

================ ================================== =====================================================
codes            scales                             further
================ ================================== =====================================================
``X.weight`` U8  ``X.weight_scale`` F8_E4M3         ``X.weight_scale_2``, ``X.input_scale``
                 [rows, columns / 16]
``Y`` U8         ``Y_weight_scale`` F8_E4M3         ``Y_weight_scale_2`` [], ``Y_input_scale`` []:
[E, in / 2, out] [E, in / 16, out]                  experts of Llama 4 and gpt-oss
``X.weight`` F8  ``X.weight_scale`` F32 []          ``X.input_scale``: found in ``fp8``
``X.weight`` F8  ``X.weight_scale`` or              MXFP8, found in ``fp8``
                 ``X.weight_scale_inv`` U8
                 [rows, columns / 32]
================ ================================== =====================================================

``quantization_config`` has the algorithm, and modules that are plain as globs. Before ModelOpt 0.41 it stood
in ``hf_quant_config.json``, which newer checkpoints have beside it. With MIXED_PRECISION each module is
listed with its algorithm; NVIDIA lists modules so in tables of ``quant_method: fp8`` too (DeepSeek-V4)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, NamedTuple

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.config import (
    Declared,
    Group,
    Modules,
    Scheme,
    brief,
    glob_modules,
    names_in,
    unknown_fields,
)
from raymerge.checkpoints.quantisation.detect import INPUT_SCALES, PackedForm, QuantMethod, Search
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec
from raymerge.checkpoints.quantisation.fp8 import FP8, FP8_CHANNEL, FP8_STACK, FP8_TENSOR, MXFP8
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4_MODELOPT, NVFP4_STACK, Nvfp4, Nvfp4Stack
from raymerge.dtypes import DType

_PATH = re.compile(r"[\w-]+(\.[\w-]+)+")
_NAME, _MIXED = "modelopt", "MIXED_PRECISION"
_GLOBS = ("ignore", "exclude_modules", "modules_to_not_convert")
_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
_CACHES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"FP8": ("float", 8), "NVFP4": ("float", 4), "INT8": ("int", 8)}
)
"""Kind and bits in which keys and values are cached, by ``kv_cache_quant_algo``."""


class _Algorithm(NamedTuple):
    format: Format
    scales_inputs: bool
    """Whether modules have a stored scale of their inputs."""
    stack: Format | None = None
    """The format of stacks of experts, where it is another."""


_ALGORITHMS: Mapping[str, _Algorithm] = MappingProxyType(
    {
        "FP8": _Algorithm(FP8_TENSOR, scales_inputs=True, stack=FP8_STACK),
        "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm(FP8_CHANNEL, scales_inputs=False),
        "MXFP8": _Algorithm(MXFP8, scales_inputs=False),
        "NVFP4": _Algorithm(NVFP4_MODELOPT, scales_inputs=True, stack=NVFP4_STACK),
        "W4A16_NVFP4": _Algorithm(NVFP4_MODELOPT, scales_inputs=False, stack=NVFP4_STACK),
    }
)
_FRESH: Mapping[Format, str] = MappingProxyType(
    {MXFP8: "MXFP8", NVFP4_MODELOPT: "W4A16_NVFP4", NVFP4_STACK: "W4A16_NVFP4"}
)
"""Algorithms of what is made of plain numbers, which tell nothing of scales of inputs."""
_OF_ALGORITHM = frozenset({"has_zero_point"})
"""Known fields that tell more of the algorithm, and stay as long as that does."""
_KEYS = frozenset(
    [
        *("quant_method", "quant_algo", "group_size", "config_groups", "quantized_layers", "producer"),
        *(*_CACHE, *_GLOBS, *_OF_ALGORITHM),
    ]
)
_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "w13": ("w1", "w3"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
)
"""What servers call modules that they fuse, by which a table may list them, and what is fused in them."""


# The config's table


def as_table(content: Mapping[str, Any]) -> dict[str, Any]:
    """What an ``hf_quant_config.json`` says, as a ``quantization_config``; {} where it says nothing."""
    quantization = content.get("quantization")
    if not isinstance(quantization, Mapping) or not any(map(quantization.get, ("quant_algo", *_CACHE))):
        return {}
    producer = {"producer": content["producer"]} if content.get("producer") else {}
    return {**quantization, **producer, "quant_method": _NAME}


def as_hf_quant_config(table: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``hf_quant_config.json`` for a table; None where the table is not ModelOpt's."""
    if not is_table(table):
        return None
    given = as_table(before)
    stated = {key: table[key] for key in ("group_size", "quantized_layers") if table.get(key)}
    # What else the file says is of the algorithm that it names.
    is_same = given.get("quant_algo") == table.get("quant_algo")
    others = {key: each for key, each in given.items() if key not in _KEYS - _OF_ALGORITHM}
    quantization = {
        "quant_algo": table.get("quant_algo"),
        "kv_cache_quant_algo": _cache_algorithm(table, given),
        **_group_size(table),
        "exclude_modules": list(names_in(table, *_GLOBS)),
        **stated,
        **(others if is_same else {}),
    }
    return {**before, "quantization": quantization}


def is_table(table: Mapping[str, Any]) -> bool:
    return MODELOPT.owns(str(table.get("quant_method") or ""))


def _group_size(table: Mapping[str, Any]) -> dict[str, int]:
    algorithm = _ALGORITHMS.get(str(table.get("quant_algo")))
    block = (0, 0) if algorithm is None else algorithm.format.block
    return {"group_size": block[1]} if block[1] > 0 else {}


def _cache_algorithm(*tables: Mapping[str, Any]) -> str | None:
    """How keys and values are cached by the first table that tells it, in ModelOpt's words; None for plain
    ones, or a scheme without such a word."""
    table = next((each for each in tables if any(key in each for key in _CACHE)), {})
    scheme = table.get("kv_cache_scheme")
    kind = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, Mapping) else None
    return table.get("kv_cache_quant_algo") or next(
        (name for name, own in _CACHES.items() if own == kind), None
    )


def cache_scheme(table: Mapping[str, Any], content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``kv_cache_scheme`` of a table; where it has none, of the algorithm that it names, or an
    ``hf_quant_config.json`` beside it."""
    scheme = table.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme
    kind = _CACHES.get(str(_cache_algorithm(table, as_table(content))))
    return None if kind is None else {"dynamic": False, "num_bits": kind[1], "type": kind[0]}


def contradiction(table: Mapping[str, Any], content: Mapping[str, Any]) -> str | None:
    """How a table and an ``hf_quant_config.json`` differ, as the end of a sentence that begins with the name
    of the file; None where they agree, or where the table is not ModelOpt's."""
    beside = as_table(content)
    if not beside or not is_table(table):
        return None
    ours, theirs = _stated(table), _stated(beside)
    for key in (each for each in ours if each in theirs and ours[each] != theirs[each]):
        return f"says {key} {brief(theirs[key])}, and config.json {brief(ours[key])}"
    layers = (each.get("quantized_layers") or {} for each in (beside, table))
    if len({_listed(each) for each in layers}) > 1:
        return "has other quantized_layers than config.json"
    return None


def _stated(table: Mapping[str, Any]) -> dict[str, str]:
    """The algorithms of weights, and of cached keys and values, and the group size that a table names."""
    stated = {"quant_algo": table.get("quant_algo"), "group_size": _size_of_groups(table)}
    named = {key: _spelled(each) for key, each in stated.items() if each}
    cache = _cache_algorithm(table)
    if cache or (any(key in table for key in _CACHE) and not table.get("kv_cache_scheme")):
        named["kv_cache_quant_algo"] = _spelled(cache)
    return named


def _size_of_groups(table: Mapping[str, Any]) -> Any:
    """The number of elements that share a scale; None where a table has none, or several."""
    weights = [each.get("weights") for _, each in _groups(table)]
    levels = [table] if table.get("group_size") else [each for each in weights if isinstance(each, Mapping)]
    sizes = {str(size) for each in levels if (size := each.get("group_size"))}
    return sizes.pop() if len(sizes) == 1 else None


def _spelled(value: Any) -> str:
    """Words for nothing are one, and names of algorithms are the same in small letters."""
    return "null" if str(value or "null").lower() in ("none", "null") else str(value).upper()


def plain_beside(table: Mapping[str, Any], content: Mapping[str, Any]) -> Modules:
    """What an ``hf_quant_config.json`` lists as plain; nothing beside a table that is not ModelOpt's."""
    return glob_modules(names_in(as_table(content), *_GLOBS) if is_table(table) else ())[0]


def _listed(layers: Any) -> frozenset[tuple[str, str]]:
    listed = layers.items() if isinstance(layers, Mapping) else ()
    return frozenset((str(path), _spelled(_algorithm_in(layer))) for path, layer in listed)


def _read_table(table: Mapping[str, Any]) -> Declared:
    plain, wrong = glob_modules(names_in(table, *_GLOBS))
    algorithm = str(table.get("quant_algo") or "")
    # Keys and values alone may be quantised, which are no weights.
    is_of_cache = not algorithm and any(map(table.get, _CACHE))
    if not algorithm and not is_of_cache:
        wrong = (*wrong, "names no quant_algo")
    unknown = tuple(unknown_fields(table, _KEYS))
    declared = Declared(
        _NAME, plain=plain, is_stored=not is_of_cache, contradictions=wrong, not_understood=unknown
    )
    if algorithm == _MIXED:
        return _with_layers(declared, table)
    if algorithm and algorithm not in _ALGORITHMS:
        return Declared(f"{_NAME} {brief(algorithm)}", is_read=False)
    return _with_algorithms(declared, [algorithm] if algorithm else [])


def _with_layers(declared: Declared, table: Mapping[str, Any]) -> Declared:
    """What a table says that also lists modules with their algorithms, or has one for all experts."""
    layers = table.get("quantized_layers") or {}
    if not isinstance(layers, Mapping):
        fault = f"gives quantized_layers as {brief(layers)}"
        return replace(declared, contradictions=(*declared.contradictions, fault))
    wrong = next(_unlike_groups(table, layers), None)
    if layers and wrong:
        declared = replace(declared, contradictions=(*declared.contradictions, wrong))
    paths: dict[str, list[str]] = {}
    for path, layer in layers.items():
        paths.setdefault(_algorithm_in(layer), []).append(str(path))
    bare = Declared(declared.method, plain=declared.plain)
    groups = [
        Group(_modules(own), False, replace(_with_algorithms(bare, [name]), is_read=name in _ALGORITHMS))
        for name, own in paths.items()
    ]
    rest = [Group(Modules(), True, declared)] if declared.schemes and groups else []
    named = [*paths, *filter(None, [str(table.get("moe_quant_algo") or "")])]
    whole = _with_algorithms(declared, named)
    inputs = declared.scales_inputs or (whole.scales_inputs and not declared.schemes)
    return replace(whole, groups=(*groups, *rest), scales_inputs=inputs)


def _unlike_groups(table: Mapping[str, Any], layers: Mapping[str, Any]) -> Iterator[str]:
    """How a list of modules differs from the groups that have their paths too."""
    for name, group in _groups(table):
        weights = group.get("weights")
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        for path in (each for each in names_in(group, "targets") if _PATH.fullmatch(each)):
            algorithm = _algorithm_in(layers.get(path, "no algorithm"))
            known = _ALGORITHMS.get(algorithm)
            if path not in layers or (known is not None and bits not in (None, known.format.code_bits)):
                where = f"has {brief(path)} in {brief(name)} of config_groups"
                yield f"{where} ({brief(bits)} bits), and with {brief(algorithm)} in quantized_layers"


def _algorithm_in(layer: Any) -> str:
    return str(layer.get("quant_algo") if isinstance(layer, Mapping) else layer)


def _with_algorithms(declared: Declared, algorithms: Sequence[str]) -> Declared:
    """What is declared, and weights by these algorithms beside it."""
    read = [_ALGORITHMS[name] for name in algorithms if name in _ALGORITHMS]
    stacks = (Scheme(each.stack, None, is_stated=False) for each in read if each.stack is not None)
    schemes = (*declared.schemes, *(Scheme(each.format, None) for each in read), *stacks)
    others = (*declared.others, *(brief(name) for name in algorithms if name not in _ALGORITHMS))
    return replace(
        declared,
        schemes=tuple(dict.fromkeys(schemes)),
        others=others,
        scales_inputs=declared.scales_inputs or any(each.scales_inputs for each in read),
    )


def _modules(paths: Sequence[str]) -> Modules:
    """Modules of these paths, what is fused in them, and what is below them."""
    unfused = (
        f"{parent}{dot}{word}"
        for parent, dot, last in (path.rpartition(".") for path in paths)
        for word in _FUSED.get(last, ())
    )
    return Modules(exact=frozenset((*paths, *unfused)), parts=frozenset(paths))


def _fresh_table(
    quant_specs: Mapping[str, QuantSpec], cache: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    algorithms = {module: _FRESH.get(each.format) for module, each in quant_specs.items()}
    if None in algorithms.values():
        return None
    named, sizes = set(algorithms.values()), {module: max(each.block) for module, each in quant_specs.items()}
    table: dict[str, Any] = {"ignore": [], "kv_cache_scheme": None if cache is None else dict(cache)}
    if len(named) == 1:
        size = next(iter(sizes.values()))
        return {"group_size": size, **table, "quant_algo": named.pop(), "quant_method": _NAME}
    layers = {name: {"quant_algo": each, "group_size": sizes[name]} for name, each in algorithms.items()}
    return {**table, "quant_algo": _MIXED, "quant_method": _NAME, "quantized_layers": layers}


def _without_modules(
    table: Mapping[str, Any], before: Collection[str], after: Mapping[str, QuantSpec]
) -> dict[str, Any]:
    result, layers = dict(table), table.get("quantized_layers")
    if isinstance(layers, Mapping):
        gone = _entries_of(before) - _entries_of(after)
        result["quantized_layers"] = {path: each for path, each in layers.items() if path not in gone}
        if not result["quantized_layers"]:
            del result["quantized_layers"]
        result |= _groups_without(table, gone)
    algorithm = _ALGORITHMS.get(str(table.get("moe_quant_algo")))
    experts = {each.format for module, each in after.items() if ".experts." in module}
    if algorithm is not None and experts.isdisjoint((algorithm.format, algorithm.stack)):
        del result["moe_quant_algo"]
    return result


def _groups(table: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The groups that ModelOpt repeats its list of modules in, as compressed-tensors has them."""
    groups = table.get("config_groups")
    named = groups.items() if isinstance(groups, Mapping) else ()
    return [(name, each) for name, each in named if isinstance(each, Mapping)]


def _groups_without(table: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    """The field of groups without some modules, and the groups that only these are in; {} for no groups."""
    groups = _groups(table)
    if not any(not set(names_in(each, "targets")).isdisjoint(gone) for _, each in groups):
        return {}
    left = {name: [path for path in names_in(each, "targets") if path not in gone] for name, each in groups}
    return {"config_groups": {name: {**each, "targets": left[name]} for name, each in groups if left[name]}}


def _entries_of(modules: Collection[str]) -> frozenset[str]:
    """All paths by which a list may have modules: their own, those above, what servers fuse them in."""
    above = (tuple(accumulate(module.split("."), "{}.{}".format)) for module in modules)
    fused = (
        f"{parent}{dot}{word}"
        for parent, dot, last in (module.rpartition(".") for module in modules)
        for word, members in _FUSED.items()
        if last in members
    )
    return frozenset(chain(chain.from_iterable(above), fused))


# Detection


_STACK = (
    "NVFP4 in stacks of experts, other than ModelOpt's with codes packed along the inputs "
    "[experts, in / 2, out] and one scale for all (_weight_scale_2)"
)


def _are_codes(tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> bool:
    is_stack = len(tensor.shape) == 3 and f"{tensor.name}_weight_scale" in stored
    return tensor.dtype is DType.U8 and (is_stack or tensor.name.endswith(".weight"))


def _add(search: Search, codes: StoredTensor) -> None:
    """Add NVFP4; other bytes without its scales are of a format that is not read."""
    if codes.name.endswith(".weight"):
        _add_module(search, codes)
    else:
        _add_stack(search, codes)


def _add_stack(search: Search, codes: StoredTensor) -> None:
    name, (experts, pairs, columns) = codes.name, codes.shape
    scales, whole = search.stored[f"{name}_weight_scale"], search.stored.get(f"{name}_weight_scale_2")
    endings = ("_weight_scale_2", *INPUT_SCALES)
    others = tuple(each for ending in endings if (each := f"{name}{ending}") in search.stored)
    stacked: PackedForm = NVFP4_STACK, NVFP4_STACK.block, (experts, 2 * pairs, columns)
    is_one = whole is not None and whole.num_elements == 1
    is_modelopt = is_one and scales.shape == (experts, -(-pairs // 8), columns)
    if is_modelopt and search.declared_of(name).allows(*stacked):
        search.add(name, codes, scales, others, stacked)
    elif is_modelopt:
        search.refuse((name, scales.name, *others), search.undeclared(name, NVFP4_STACK))
    elif scales.shape in ((experts, -(-pairs // 8), columns), (experts, pairs, -(-columns // 8))):
        search.refuse((name, scales.name, *others), _STACK)
    else:
        search.report_misfit(codes, scales)


def _add_module(search: Search, codes: StoredTensor) -> None:
    name, module = codes.name, codes.name.removesuffix(".weight")
    whole = f"{name}_scale_2"
    is_declared = any(each.format == NVFP4_MODELOPT for each in search.declared_of(module).schemes)
    if whole not in search.stored and not is_declared:
        return
    others = [whole, *(each for each in _beside(module) if each in search.stored)]
    scales = search.partner(codes, [f"{name}_scale"])
    if scales is None:
        return
    if f"{module}.pre_quant_scale" in search.stored:
        search.refuse([name, scales.name, *others], "NVFP4 of inputs that are scaled first (pre_quant_scale)")
        return
    columns = codes.shape[-1] * 2 if codes.shape else 0
    if len(codes.shape) < 2 or scales.shape != (*codes.shape[:-1], -(-columns // 16)):
        search.report_misfit(codes, scales)
        return
    if search.partner(codes, [whole]) is None:
        return
    search.add(name, codes, scales, tuple(others), (NVFP4_MODELOPT, (1, 16), (*codes.shape[:-1], columns)))


def _beside(module: str) -> Iterator[str]:
    yield from (f"{module}{ending}" for ending in (*INPUT_SCALES, ".pre_quant_scale"))


_OF_CODES = {
    ".weight_scale_2": "_scale_2",
    "_weight_scale_2": "_weight_scale_2",
    "_weight_scale": "_weight_scale",
}
"""What names of scales end with beyond those of their codes."""


def _codes_of(scale: StoredTensor) -> tuple[str, ...]:
    ending = next((each for each in _OF_CODES if scale.name.endswith(each)), None)
    return () if ending is None else (scale.name.removesuffix(_OF_CODES[ending]),)


MODELOPT = QuantMethod(
    _NAME,
    {NVFP4_MODELOPT: Nvfp4(), NVFP4_STACK: Nvfp4Stack()},
    read_table=_read_table,
    are_codes=_are_codes,
    add=_add,
    codes_of=_codes_of,
    fresh_table=_fresh_table,
    without_modules=_without_modules,
    plain_keys=_GLOBS,
    below="{}.*".format,
    has_variants=True,
)
NVIDIA_FP8 = replace(
    FP8, read_table=lambda table: _with_layers(FP8.read_table(table), table), without_modules=_without_modules
)
"""FP8, of which NVIDIA keeps DeepSeek's table, and adds the layers that it quantised once more."""
