"""The output's ``config.json``, decided with the plan: dtype, tie flag, layer counts, quantisation tables.

A new ``quantization_config`` has the fields that publishers write: DeepSeek-V3 for block FP8, gpt-oss for
MXFP4, and for the others compressed-tensors, as in Kimi-K2-Thinking (INT4).
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from raymerge.architectures.depth import Parent, count_mtp_layers, restack_config
from raymerge.architectures.roles import TIE_KEY
from raymerge.architectures.rules import QUANTISATION_TABLES, Role, sections, text_section
from raymerge.checkpoints.quantisation.config import Declared
from raymerge.checkpoints.quantisation.detect import CACHE_SCALES, INPUT_SCALES
from raymerge.checkpoints.quantisation.encoding import Format, QuantisedWeight, QuantSpec, encoding_of
from raymerge.checkpoints.quantisation.formats import read_declared
from raymerge.checkpoints.quantisation.fp8 import FP8_CHANNEL, FP8_TENSOR
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4, MXFP4_ROWS
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType, config_name
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import Output, QuantisedOutput
from raymerge.planner.inputs.consistency import declared_dtype
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.align import Section, Span
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.recipes.schema import Recipe

VOCABULARY_KEY = "vocab_size"

_LAYERS_KEY = "vocab_size_per_layer_input"
# The rows of embeddings that each layer has of its own, as many as the embedding's or fewer.

_DTYPE_KEYS = ("dtype", "torch_dtype")


def output_config(
    donor: Mapping[str, Any], *, dtype: DType | None = None, tie: bool | None = None
) -> dict[str, Any]:
    """A copy of the donor's config with the output's dtype and tie; None leaves a field unchanged.

    A field is written wherever the donor has it, at the top and in the text section; one that the donor lacks
    is added at the top. Equal to ``donor`` when nothing changes, so that its file can be copied."""
    result = copy.deepcopy(dict(donor))
    if dtype is not None:
        _set(result, _DTYPE_KEYS, config_name(dtype))
    if tie is not None:
        _set(result, (TIE_KEY,), tie)
    return result


def with_fields(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = result
        for name in sections:
            section = section[name]
        section[key] = value
    return result


def vocabulary_size(config: Mapping[str, Any], num_rows: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path, section in sections(config):
        sizes |= {".".join((*path, key)): n for key, n in row_counts(section, num_rows).items()}
    return sizes


def row_counts(section: Mapping[str, Any], num_rows: int) -> dict[str, int]:
    if section.get(VOCABULARY_KEY, num_rows) == num_rows:
        return {}
    own = section[VOCABULARY_KEY]
    return {key: num_rows for key in (VOCABULARY_KEY, _LAYERS_KEY) if section.get(key, num_rows) == own}


def _set(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    places = [(section, key) for _, section in sections(config) for key in keys if key in section]
    for section, key in places or [(config, keys[0])]:
        section[key] = value


def plan_config(
    recipe: Recipe,
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    sections: Sequence[Section],
    outputs: Sequence[Output],
    tied: bool | None,
) -> tuple[dict[str, Any], list[Problem]]:
    """The output's config, and what no config can express of this merge; raw tensor files have none."""
    if donor.checkpoint.is_raw:
        return {}, []
    config, problems = _of_sections(recipe, donor, sources, logical, sections, read=dict)
    objections: list[Problem] = []
    if problems:
        # Tables of quantisation that differ are no matter where the output's is a new one, or none.
        bare, rest = _of_sections(recipe, donor, sources, logical, sections, read=without_tables)
        objections = [each for each in problems if each not in rest]
        config, problems = (bare, rest) if objections else (config, problems)
    config = _with_mtp_count(config, donor, sources, sections, outputs)
    where, is_common = recipe.where("out_format"), not objections
    config, mixed = quantisation_config(config, donor, sources, outputs, where=where, is_common=is_common)
    problems += [*objections, mixed] if mixed is not None else []
    dtype = _main_output(outputs)
    asked = recipe.out_dtype or recipe.dtype
    changed = asked is not None or dtype is not main_dtype(donor.checkpoint)
    return output_config(config, dtype=stated_dtype(config, dtype, changed=changed), tie=tied), problems


def stated_dtype(config: Mapping[str, Any], dtype: DType, *, changed: bool) -> DType | None:
    """The dtype that the config must state; None where it states it already, or is silent and nothing
    changed.

    A donor whose config names another dtype than its tensors have is corrected."""
    stated = None if config.get("quantization_config") else declared_dtype(config)
    return dtype if changed or stated not in (None, config_name(dtype)) else None


def _of_sections(
    recipe: Recipe,
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    sections: Sequence[Section],
    *,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> tuple[Mapping[str, Any], list[Problem]]:
    config = read(donor.checkpoint.config)
    problems: list[Problem] = []
    for section in sections:
        if section.is_whole and not _is_foreign(section, donor, sources):
            continue
        config, sentences = _restacked(config, donor, sources, logical, section, read)
        path = ("slices",) if section.module is None else ("modules", section.module)
        remedy = "Choose slices that keep the pattern, or models whose configs agree."
        problems += [Problem(recipe.where(*path), sentence, remedy) for sentence in sentences]
    return config, problems


def _is_foreign(section: Section, donor: Source, sources: Sequence[Source]) -> bool:
    lead = sources[section.spans[0].lead.source]
    return lead.index != donor.index and None not in (
        lead.layer_stack(section.module),
        donor.layer_stack(section.module),
    )


def _restacked(
    config: Mapping[str, Any],
    donor: Source,
    sources: Sequence[Source],
    logical: Sequence[LogicalTensors],
    section: Section,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    stack = donor.layer_stack(section.module)
    origins = [
        (sources[span.lead.source], n) for span in section.spans for n in _taken(span, sources, section)
    ]
    layers = [layer for _, layer in origins]
    if stack is None or not stack.is_main:
        same = stack is not None and layers == list(range(stack.num_layers))
        what = f"config.json cannot be told of other layers in '{section.module}' yet."
        return config, () if same else (what,)
    leads = {lead.index: lead for lead, _ in origins}
    parents = {index: Parent(lead.name, read(lead.checkpoint.config)) for index, lead in leads.items()}
    sparse = {index: _expert_layers(logical[index], lead, section) for index, lead in leads.items()}
    dense = [layer not in sparse[lead.index] for lead, layer in origins]
    return restack_config(
        config,
        layers,
        parents=[parents[lead.index] for lead, _ in origins],
        dense=None if all(dense) else dense,
    )


def _taken(span: Span, sources: Sequence[Source], section: Section) -> range:
    stack = sources[span.lead.source].layer_stack(section.module)
    whole = stack.num_layers if stack is not None else 0
    first = span.lead.first_layer
    return range(first, first + (whole if span.num_layers is None else span.num_layers))


def _expert_layers(logical: LogicalTensors, source: Source, section: Section) -> frozenset[int]:
    stack = source.layer_stack(section.module)
    prefix = stack.prefix if stack is not None else ""
    return frozenset(
        info.layer
        for info in logical.infos.values()
        if info.layer is not None and info.stack == prefix and info.part in (Role.EXPERT, Role.ROUTER)
    )


def _with_mtp_count(
    config: Mapping[str, Any],
    donor: Source,
    sources: Sequence[Source],
    sections: Sequence[Section],
    outputs: Sequence[Output],
) -> Mapping[str, Any]:
    """The config with the number of multi-token-prediction layers that the merge writes.

    A number that the donor's own tensors contradict stays where the merge writes as many layers as they are.
    """
    section = next((each for each in sections if each.module in (None, "default", "text_decoder")), None)
    own = donor.layer_stack(None)
    if section is None or own is None:
        return config
    leads = [sources[span.lead.source] for span in section.spans]
    stacks = [stack for lead in leads if (stack := lead.layer_stack(None)) is not None]
    total = sum(span.num_layers or 0 for span in section.spans)
    num_layers = stacks[0].num_layers if section.is_whole and stacks else total
    names = [output.name for output in outputs]
    written = count_mtp_layers(names, {own.prefix, *(s.prefix for s in stacks)}, num_layers, donor.rules)
    stored = count_mtp_layers(donor.checkpoint.tensors, {own.prefix}, own.num_layers, donor.rules)
    if written is None or written == stored:
        return config
    return _counted(config, written, keys=donor.rules.depth.mtp_counts, lead=leads[-1])


def _counted(config: Mapping[str, Any], number: int, *, keys: Sequence[str], lead: Source) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    text = text_section(result)
    places = [(section, key) for section in (result, text) for key in keys if key in section]
    theirs = [(text, key) for key in keys if key in text_section(lead.checkpoint.config)]
    for section, key in places or theirs:
        section[key] = number
    return result


def _main_output(outputs: Sequence[Output]) -> DType:
    totals: Counter[DType] = Counter()
    for output in outputs:
        totals[output.dtype] += sum([op.num_elements for op in output.ops])
    plain = [dtype for dtype in totals if dtype.is_mergeable]
    return max(plain, key=lambda dtype: dtype.nbytes(totals[dtype]), default=DType.F32)


_COMPRESSED: Mapping[Format, tuple[str, str]] = MappingProxyType(
    {
        FP8_CHANNEL: ("float-quantized", "channel"),
        FP8_TENSOR: ("float-quantized", "tensor"),
        INT4: ("pack-quantized", "group"),
        MXFP4_ROWS: ("mxfp4-pack-quantized", "group"),
        NVFP4: ("nvfp4-pack-quantized", "tensor_group"),
    }
)
"""What compressed-tensors calls a format, and what shares a scale there."""
_BY_TOKEN = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}


def fresh_table(
    quant_spec: QuantSpec, plain: Sequence[str], *, cache: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    if quant_spec.format in _COMPRESSED:
        return _compressed(quant_spec, plain, cache)
    listed = {"modules_to_not_convert": list(plain)}
    if quant_spec.format == MXFP4:
        return {**listed, "quant_method": "mxfp4"}
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **listed,
        "quant_method": "fp8",
        **({"scale_fmt": "ue8m0"} if quant_spec.power_of_two else {}),
        "weight_block_size": list(quant_spec.block),
    }


def _compressed(
    quant_spec: QuantSpec, plain: Sequence[str], cache: Mapping[str, Any] | None
) -> dict[str, Any]:
    # Codes of 8 bits are for activations in 8 bits too; those of 4 bits are for plain ones.
    activations = dict(_BY_TOKEN) if quant_spec.format.is_fp8 else None
    group = {
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": _weights(quant_spec),
    }
    return {
        "config_groups": {"group_0": group},
        "format": _COMPRESSED[quant_spec.format][0],
        "ignore": list(plain),
        "kv_cache_scheme": None if cache is None else dict(cache),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _weights(quant_spec: QuantSpec) -> dict[str, Any]:
    return {
        "dynamic": False,
        "group_size": None if quant_spec.format.is_fp8 else quant_spec.block[1],
        "num_bits": quant_spec.format.code_bits,
        **({"scale_dtype": "torch.uint8"} if quant_spec.format == MXFP4_ROWS else {}),
        "strategy": _COMPRESSED[quant_spec.format][1],
        "symmetric": True,
        "type": "int" if quant_spec.format == INT4 else "float",
    }


_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")
_WEIGHT = ".weight"
_EXPERTS = re.compile(r"(.*\.experts)\.")
_TOGETHER, _BELOW = ".experts", r"\..*"
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Stored:
    packed: Mapping[str, QuantisedOutput]
    unread: Mapping[str, str]


def quantisation_config(
    config: Mapping[str, Any],
    donor: Source,
    sources: Sequence[Source],
    outputs: Sequence[Output],
    *,
    where: str,
    is_common: bool,
) -> tuple[Mapping[str, Any], Problem | None]:
    """The config with quantisation tables that fit the output, and a problem where no table can.

    The donor's tables stay where they are true of the output, but for their lists of plain modules.
    ``is_common``: those of all sources agree, so that the donor's may stay."""
    stored, known = _stored(outputs, sources), donor.checkpoint.packed
    tables = _found(config if is_common else donor.checkpoint.config)
    declared = read_declared(tables)
    # Without any table codes of unread formats may be no codes at all: tables of numbers, lists of tokens.
    is_unread = bool(stored.unread) and (bool(declared.method) or not is_common)
    if donor.checkpoint.packs is None or not (known or stored.packed or is_unread or not is_common):
        return config, None
    if not (stored.packed or is_unread):
        return without_tables(config), None
    if is_common and _is_true_of(declared, stored, known):
        return _with_plain(config, declared, stored, donor, outputs), None
    if is_unread:
        return config, _unread(stored, where)
    if len({_kind(each.quant_spec) for each in stored.packed.values()}) > 1:
        return config, _several_formats(stored, where)
    scaled = next((module for module, each in stored.packed.items() if _has_input_scale(each)), None)
    if scaled is not None:
        return config, _input_scales(scaled, stored, where)
    # Scales that may be any numbers may also be powers of two.
    quant_spec = min((each.quant_spec for each in stored.packed.values()), key=lambda each: each.power_of_two)
    has_cache = any(each.name.endswith(CACHE_SCALES) for each in outputs)
    cache = next((each.get("kv_cache_scheme") for each in tables), None) if has_cache else None
    plain = _plain_matrices(stored, outputs)
    plain += _plain_experts(stored, outputs, plain)
    fresh = fresh_table(quant_spec, plain, cache=cache)
    _list_plain(fresh, plain, replaced=True)
    return {**without_tables(config), QUANTISATION_TABLES[0]: fresh}, None


def config_of_copies(config: Mapping[str, Any], outputs: Sequence[Output]) -> Mapping[str, Any]:
    """The config without quantisation tables where no tensor of the output can be codes."""
    return without_tables(config) if all(output.dtype.is_mergeable for output in outputs) else config


def without_tables(config: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for table, section in _tables(result):
        del section[table]
    return result


def _tables(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for _, section in sections(config):
        yield from ((table, section) for table in QUANTISATION_TABLES if section.get(table))


def _found(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [section[table] for table, section in _tables(dict(config))]


def _stored(outputs: Sequence[Output], sources: Sequence[Source]) -> _Stored:
    packed = {_module(each): each.packed for each in outputs if each.packed is not None}
    unknown = {
        (source.index, tensor.key, tensor.offset): form
        for source in sources
        if source.checkpoint.packs is not None
        for name, form in source.checkpoint.packs.unknown.items()
        for tensor in (source.checkpoint.stored[name],)
    }
    unread: dict[str, str] = {}
    for output in outputs if unknown else ():
        reads = [read for op in output.ops for read in op.reads]
        places = [(read.source, read.key, read.offset) for read in reads]
        if output.packed is None and len(places) == 1 and places[0] in unknown:
            unread[output.name] = unknown[places[0]]
    return _Stored(packed, unread)


def _is_true_of(declared: Declared, stored: _Stored, known: Mapping[str, QuantisedWeight]) -> bool:
    formats = {each.quant_spec.format for each in known.values()}
    scaled = [_has_input_scale(each) for each in known.values()]
    kinds = {name.removesuffix(_WEIGHT): _kind(each.quant_spec) for name, each in known.items()}
    for module, packed in stored.packed.items():
        quant_spec, own = packed.quant_spec, declared.of(module)
        if own is None:
            # Of modules that a loader calls otherwise the table says what it said.
            if kinds.get(module) != _kind(quant_spec):
                return False
            continue
        if quant_spec.format not in formats or not own.allows(
            quant_spec.format, quant_spec.block, quant_spec.shape
        ):
            return False
        # A checkpoint without any such scales does not follow its own table; copies are as they were.
        is_needed = own.scales_inputs and any(scaled) and (all(scaled) or _is_made(packed))
        if is_needed and not _has_input_scale(packed):
            return False
    return declared.is_stored


def _with_plain(
    config: Mapping[str, Any], declared: Declared, stored: _Stored, donor: Source, outputs: Sequence[Output]
) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    is_replaced = any(declared.plain.lists(module) for module in stored.packed)
    modules = _plain_matrices(stored, outputs) if is_replaced else _freed(declared, donor, outputs)
    modules += _plain_experts(stored, outputs if is_replaced else (), modules)
    for table, section in _tables(result) if modules or is_replaced else ():
        _list_plain(section[table], modules, replaced=is_replaced)
    return result


def _freed(declared: Declared, donor: Source, outputs: Sequence[Output]) -> list[str]:
    known = donor.checkpoint.packed
    before = donor.checkpoint.tensors.keys() - known.keys()
    named = [each for each in outputs if each.packed is None and each.name not in before]
    plain = [_module(each) for each in named if each.dtype.is_mergeable]
    alike = {_NUMBER.sub(".*", name.removesuffix(_WEIGHT)) for name in known}
    return [each for each in plain if _NUMBER.sub(".*", each) in alike and not declared.plain.lists(each)]


def _plain_experts(stored: _Stored, outputs: Sequence[Output], listed: Sequence[str]) -> list[str]:
    """Experts of a layer that are all plain, as one module: loaders that fuse them require that."""
    coded = {_experts_of(each) for each in (*stored.packed, *stored.unread)}
    stacks = (each.name for each in outputs if each.packed is None and len(each.shape) == 3)
    experts = dict.fromkeys(filter(None, map(_experts_of, (*listed, *stacks))))
    return [each for each in experts if each not in coded and each not in listed]


def _experts_of(name: str) -> str:
    match = _EXPERTS.match(name)
    return match.group(1) if match else ""


def _several_formats(stored: _Stored, where: str) -> Problem:
    are_alike = len({each.quant_spec.format.word for each in stored.packed.values()}) == 1
    examples: dict[str, str] = {}
    for module, packed in stored.packed.items():
        blocks = (
            f" in blocks of {packed.quant_spec.block[0]}x{packed.quant_spec.block[1]}" if are_alike else ""
        )
        examples.setdefault(f"{packed.quant_spec.format.word}{blocks}", module)
    listed = " and ".join(f"as {form} (such as {name})" for form, name in examples.items())
    return Problem(
        where,
        f"tensors would be stored {listed}, which no quantization_config that raymerge writes says together.",
        "Choose one format for all that is quantised, such as 'out_format: fp8_block', or have lines of "
        "out_format with 'value: bf16' for all but one.",
    )


def _unread(stored: _Stored, where: str) -> Problem:
    name, form = next(iter(stored.unread.items()))
    what = f"{len(stored.unread)} tensors would be copied as {form} (such as {name})"
    if stored.packed:
        module, packed = next(iter(stored.packed.items()))
        what = f"{what}, and others stored as {packed.quant_spec.format.word} (such as {module})"
    return Problem(
        where,
        f"{what}: the config's quantization_config does not hold for all that is quantised, and raymerge can "
        f"write no other one, as it does not read {form}.",
        "Keep what is quantised as it is ('value: same'), have plain numbers of the rest ('value: bf16'), or "
        "use a checkpoint converted to bfloat16.",
    )


def _input_scales(scaled: str, stored: _Stored, where: str) -> Problem:
    bare = next((module for module, each in stored.packed.items() if not _has_input_scale(each)), "")
    beside = f", and {bare} has none" if bare else ""
    return Problem(
        where,
        f"{scaled} has a stored scale of its inputs (a static activation scheme){beside}: the config's "
        "quantization_config does not hold for all tensors, and scales of inputs cannot be made of weights.",
        "Choose another format for all that is quantised, such as 'out_format: fp8_block', which makes all "
        "anew without them, or have 'value: bf16' for what has no such scale.",
    )


def _plain_matrices(stored: _Stored, outputs: Sequence[Output]) -> list[str]:
    plain = (each for each in outputs if each.packed is None and each.name not in stored.unread)
    return [_module(each) for each in plain if len(each.shape) == 2 and each.name.endswith(_WEIGHT)]


def _list_plain(table: dict[str, Any], modules: Sequence[str], *, replaced: bool) -> None:
    """Add modules to those that a table leaves plain, or replace its list.

    Experts that are plain together are one entry: a list of all would have to change with their number."""
    is_exact = "config_groups" in table
    usual = "ignore" if is_exact else "modules_to_not_convert"
    key = next((each for each in _LISTS if each in table), usual)
    listed = [] if replaced else list(table.get(key) or ())
    known = frozenset(listed)
    table[key] = [*listed, *(each for each in _in_short(modules, is_exact=is_exact) if each not in known)]


def _in_short(modules: Sequence[str], *, is_exact: bool) -> list[str]:
    """Modules without the experts that are listed together as well.

    ``is_exact``: a path means one module alone, as in compressed-tensors, where a pattern stands for what is
    below it."""
    together = {each for each in modules if each.endswith(_TOGETHER)}
    short = [each for each in modules if _experts_of(each) not in together]
    below = [f"re:{re.escape(each)}{_BELOW}" for each in short if each in together]
    return [*short, *below] if is_exact else short


def _is_made(packed: QuantisedOutput) -> bool:
    return bool(packed.scales) or packed.tensor_scale is not None


def _has_input_scale(packed: QuantisedWeight | QuantisedOutput) -> bool:
    others = (each if isinstance(each, str) else each.name for each in packed.others)
    return any(name.endswith(INPUT_SCALES) for name in others)


def _kind(quant_spec: QuantSpec) -> tuple[Format, tuple[int, int]]:
    encoding = encoding_of(quant_spec)
    return encoding.format, encoding.block


def _module(output: Output) -> str:
    return output.name.removesuffix(_WEIGHT)
