"""The output's ``config.json``, decided with the plan: dtype, tie flag, layer counts, quantisation tables.

A new ``quantization_config`` has the fields that the format's publishers write."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raymerge.architectures.depth import Parent, count_mtp_layers, restack_config
from raymerge.architectures.roles import TIE_KEY
from raymerge.architectures.rules import (
    EXPERT_DTYPE,
    QUANTISATION_TABLES,
    Role,
    quantisation_tables,
    sections,
    text_section,
)
from raymerge.checkpoints.json_files import json_bytes
from raymerge.checkpoints.quantisation import modelopt
from raymerge.checkpoints.quantisation.config import Declared
from raymerge.checkpoints.quantisation.detect import CACHE_SCALES, HF_QUANT_CONFIG, INPUT_SCALES, QuantMethod
from raymerge.checkpoints.quantisation.encoding import QuantisedWeight, QuantSpec
from raymerge.checkpoints.quantisation.formats import fresh_table, method_of, read_declared
from raymerge.checkpoints.source import Checkpoint, main_dtype
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
    config, problems = _Stacked(donor, sources, logical, dict).config(recipe, sections)
    objections: list[Problem] = []
    if problems:
        # Tables of quantisation that differ are no matter where the output's is a new one, or none.
        bare, rest = _Stacked(donor, sources, logical, without_tables).config(recipe, sections)
        objections = [each for each in problems if each not in rest]
        config, problems = (bare, rest) if objections else (config, problems)
    config = _with_mtp_count(config, donor, sources, sections, outputs)
    where, is_common = recipe.where("out_format"), not objections
    config, mixed = _Quantisation(donor, sources, outputs).config(config, where=where, is_common=is_common)
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


@dataclass(frozen=True, slots=True)
class _Stacked:
    """The donor's config for layers in another order, or of other sources; configs are seen by ``read``."""

    donor: Source
    sources: Sequence[Source]
    logical: Sequence[LogicalTensors]
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def config(self, recipe: Recipe, sections: Sequence[Section]) -> tuple[Mapping[str, Any], list[Problem]]:
        config = self.read(self.donor.checkpoint.config)
        problems: list[Problem] = []
        for section in sections:
            if section.is_whole and not self._is_foreign(section):
                continue
            config, sentences = self._restacked(config, section)
            path = ("slices",) if section.module is None else ("modules", section.module)
            remedy = "Choose slices that keep the pattern, or models whose configs agree."
            problems += [Problem(recipe.where(*path), sentence, remedy) for sentence in sentences]
        return config, problems

    def _is_foreign(self, section: Section) -> bool:
        lead = self.sources[section.spans[0].lead.source]
        stacks = (each.layer_stack(section.module) for each in (lead, self.donor))
        return lead.index != self.donor.index and None not in stacks

    def _restacked(
        self, config: Mapping[str, Any], section: Section
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        stack = self.donor.layer_stack(section.module)
        spans = [(self.sources[span.lead.source], span) for span in section.spans]
        origins = [(lead, layer) for lead, span in spans for layer in _taken(lead, span, section)]
        layers = [layer for _, layer in origins]
        if stack is None or not stack.is_main:
            same = stack is not None and layers == list(range(stack.num_layers))
            what = f"config.json cannot be told of other layers in '{section.module}' yet."
            return config, () if same else (what,)
        leads = {lead.index: lead for lead, _ in origins}
        parents = {i: Parent(lead.name, self.read(lead.checkpoint.config)) for i, lead in leads.items()}
        sparse = {i: _expert_layers(self.logical[i], lead, section) for i, lead in leads.items()}
        dense = [layer not in sparse[lead.index] for lead, layer in origins]
        by_layer = [parents[lead.index] for lead, _ in origins]
        return restack_config(config, layers, parents=by_layer, dense=None if all(dense) else dense)


def _taken(lead: Source, span: Span, section: Section) -> range:
    stack = lead.layer_stack(section.module)
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


_WEIGHT = ".weight"
_EXPERTS = re.compile(r"(.*\.experts)\.")
_TOGETHER = ".experts"
_NUMBER = re.compile(r"\.\d+(?=\.)")


class _Quantisation:
    def __init__(self, donor: Source, sources: Sequence[Source], outputs: Sequence[Output]) -> None:
        self._donor = donor
        self._outputs = outputs
        self._known = donor.checkpoint.packed
        self._packed = {_module(each): each.packed for each in outputs if each.packed is not None}
        self._unread = _unread_formats(sources, outputs)
        self._had_experts = _expert_dtype(self._known)
        self._has_experts = _expert_dtype(self._packed)

    def config(
        self, config: Mapping[str, Any], *, where: str, is_common: bool
    ) -> tuple[Mapping[str, Any], Problem | None]:
        """The config with tables that fit the output, and a problem where no table can.

        The donor's tables stay where they are true of the output, but for their lists of plain modules.
        ``is_common``: those of all sources agree, so that the donor's may stay."""
        checkpoint, packed = self._donor.checkpoint, self._packed
        changed = self._with_expert_dtype(config)
        tables = quantisation_tables(changed if is_common else checkpoint.config)
        declared = read_declared(tables)
        # Without any table codes of unread formats may be none at all: tables of numbers, lists of tokens.
        is_unread = bool(self._unread) and (bool(declared.method) or not is_common)
        if checkpoint.packs is None or not (self._known or packed or is_unread or not is_common):
            return config, None
        if not (packed or is_unread):
            return without_tables(config), None
        mixed = self._mixed_experts()
        if mixed is not None:
            return config, Problem(where, *mixed)
        if is_common and self._is_true(declared):
            return self._with_plain(changed, declared), None
        objection = self._objection(is_unread=is_unread)
        if objection is not None:
            return config, Problem(where, *objection)
        plain = self._plain_matrices()
        plain += self._plain_experts(self._outputs, plain)
        cache = self._cache_scheme(next(iter(tables), {}))
        fresh = fresh_table(self._quant_specs(), cache)
        method = method_of(fresh)
        if fresh is None or method is None:
            without_cache = fresh_table(self._quant_specs(), None)
            objection = self._several_formats() if without_cache is None else self._cached()
            return config, Problem(where, *objection)
        _list_plain(fresh, method, plain, replaced=True)
        experts = self._fresh_expert_dtype(method)
        return {**without_tables(config), **experts, QUANTISATION_TABLES[0]: fresh}, None

    def _cache_scheme(self, table: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """How the donor caches keys and values, unless it has scales for it that are left out."""
        donor = self._donor.checkpoint
        is_left_out = any(name.endswith(CACHE_SCALES) for name in donor.tensors) and not any(
            each.name.endswith(CACHE_SCALES) for each in self._outputs
        )
        return None if is_left_out else modelopt.cache_scheme(table, donor.hf_quant_config)

    def _quant_specs(self) -> dict[str, QuantSpec]:
        return {module: each.quant_spec for module, each in self._packed.items()}

    def _with_expert_dtype(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config, which says what experts became that were stored as the rest, or are now."""
        method = method_of(next(iter(quantisation_tables(config)), None))
        if method is None or self._had_experts == self._has_experts:
            return config
        result = copy.deepcopy(dict(config))
        levels = [level for _, level in sections(result)]
        tables = [section[table] for table, section in _tables(result)]
        # Loaders take experts for FP4 where it is absent.
        for place in [each for each in (*levels, *tables) if EXPERT_DTYPE in each] or [result]:
            if stated := self._has_experts or method.expert_dtype:
                place[EXPERT_DTYPE] = stated
            else:
                place.pop(EXPERT_DTYPE, None)
        return result

    def _fresh_expert_dtype(self, method: QuantMethod) -> dict[str, str]:
        stated = any(EXPERT_DTYPE in each for each in quantisation_tables(self._donor.checkpoint.config))
        has_field = method.expert_dtype and (stated or self._had_experts or self._has_experts)
        return {EXPERT_DTYPE: self._has_experts or method.expert_dtype} if has_field else {}

    def _is_true(self, declared: Declared) -> bool:
        formats = {each.quant_spec.format for each in self._known.values()}
        scaled = [_has_input_scale(each) for each in self._known.values()]
        kinds = {name.removesuffix(_WEIGHT): each.quant_spec.kind for name, each in self._known.items()}
        for module, packed in self._packed.items():
            quant_spec, own = packed.quant_spec, declared.of(module)
            if own is None:
                # Of modules that a loader calls otherwise the table says what it said.
                if kinds.get(module) != quant_spec.kind:
                    return False
                continue
            form = quant_spec.format
            # A table that leaves formats open is for those of the donor; a field tells what experts became.
            is_meant = form in formats or bool(form.expert_dtype)
            if not is_meant or not own.allows(form, quant_spec.block, quant_spec.shape):
                return False
            # A checkpoint without any such scales does not follow its own table; copies are as they were.
            is_made = bool(packed.scales) or packed.tensor_scale is not None
            is_needed = own.scales_inputs and any(scaled) and (all(scaled) or is_made)
            if is_needed and not _has_input_scale(packed):
                return False
        return declared.is_stored

    def _with_plain(self, config: Mapping[str, Any], declared: Declared) -> dict[str, Any]:
        result = copy.deepcopy(dict(config))
        known = {name.removesuffix(_WEIGHT) for name in self._known}
        # What the donor has as codes it does not list: that was refused when they were looked for.
        is_replaced = any(declared.plain.lists(module) for module in self._packed.keys() - known)
        modules = self._plain_matrices() if is_replaced else self._freed(declared)
        modules += self._plain_experts(self._outputs if is_replaced else (), modules)
        for table, section in _tables(result) if modules or is_replaced else ():
            if method := method_of(section[table]):
                _list_plain(section[table], method, modules, replaced=is_replaced)
                section[table] = method.without_modules(section[table], known, self._quant_specs())
        return result

    def _freed(self, declared: Declared) -> list[str]:
        before = self._donor.checkpoint.tensors.keys() - self._known.keys()
        named = [each for each in self._outputs if each.packed is None and each.name not in before]
        plain = [_module(each) for each in named if each.dtype.is_mergeable]
        alike = {_NUMBER.sub(".*", name.removesuffix(_WEIGHT)) for name in self._known} if plain else ()
        return [each for each in plain if _NUMBER.sub(".*", each) in alike and not declared.plain.lists(each)]

    def _plain_matrices(self) -> list[str]:
        plain = (each for each in self._outputs if each.packed is None and each.name not in self._unread)
        return [_module(each) for each in plain if len(each.shape) == 2 and each.name.endswith(_WEIGHT)]

    def _plain_experts(self, outputs: Sequence[Output], listed: Sequence[str]) -> list[str]:
        """Experts of a layer that are all plain, as one module: loaders that fuse them require that."""
        coded = {_experts_of(each) for each in (*self._packed, *self._unread)}
        stacks = (each.name for each in outputs if each.packed is None and len(each.shape) == 3)
        experts = dict.fromkeys(filter(None, map(_experts_of, (*listed, *stacks))))
        return [each for each in experts if each not in coded and each not in listed]

    def _objection(self, *, is_unread: bool) -> tuple[str, str] | None:
        if is_unread:
            return self._unread_objection()
        scaled = next((name for name, each in self._packed.items() if _has_input_scale(each)), None)
        return None if scaled is None else self._input_scales(scaled)

    def _mixed_experts(self) -> tuple[str, str] | None:
        """Where a field beside the table tells the format of experts, and others of them are in another.

        A donor that has them so itself has a config for it: NVIDIA lists those that it stored anew."""
        experts = [(name, each.quant_spec.format) for name, each in self._packed.items() if _experts_of(name)]
        examples = {form: name for name, form in reversed(experts)}
        before = {each.quant_spec.format for name, each in self._known.items() if _experts_of(name)}
        has_field = any(form.expert_dtype for form in examples)
        if len(examples) < 2 or not has_field or examples.keys() == before:
            return None
        listed = " and ".join(f"as {form.word} (such as {name})" for form, name in examples.items())
        return (
            f"experts would be stored {listed}, and '{EXPERT_DTYPE}' in config.json, by which loaders go, "
            "says one format for all.",
            "Choose one for all experts, those of layers that predict further tokens too: 'out_format: "
            "fp8_block', or 'out_format: [{role: expert, value: mxfp4}, same]'.",
        )

    def _several_formats(self) -> tuple[str, str]:
        are_alike = len({each.quant_spec.format.word for each in self._packed.values()}) == 1
        examples: dict[str, str] = {}
        for module, packed in self._packed.items():
            rows, columns = packed.quant_spec.block
            blocks = f" in blocks of {rows}x{columns}" if are_alike else ""
            examples.setdefault(f"{packed.quant_spec.format.word}{blocks}", module)
        listed = " and ".join(f"as {form} (such as {name})" for form, name in examples.items())
        return (
            f"tensors would be stored {listed}, which no quantization_config that raymerge writes says "
            "together.",
            "Choose one format for all that is quantised, such as 'out_format: fp8_block', or have lines of "
            "out_format with 'value: bf16' for all but one.",
        )

    def _cached(self) -> tuple[str, str]:
        form = next(iter(self._packed.values())).quant_spec.format.word
        return (
            f"{self._donor.name} caches keys and values as codes (kv_cache_scheme), which the "
            f"quantization_config of tensors stored as {form} cannot say.",
            "Choose another format, or take kv_cache_scheme and kv_cache_quant_algo out of its config.json "
            "and hf_quant_config.json.",
        )

    def _unread_objection(self) -> tuple[str, str]:
        name, form = next(iter(self._unread.items()))
        what = f"{len(self._unread)} tensors would be copied as {form} (such as {name})"
        if self._packed:
            module, packed = next(iter(self._packed.items()))
            what = f"{what}, and others stored as {packed.quant_spec.format.word} (such as {module})"
        return (
            f"{what}: the config's quantization_config does not hold for all that is quantised, and raymerge "
            f"can write no other one, as it does not read {form}.",
            "Keep what is quantised as it is ('value: same'), have plain numbers of the rest "
            "('value: bf16'), or use a checkpoint converted to bfloat16.",
        )

    def _input_scales(self, scaled: str) -> tuple[str, str]:
        bare = next((name for name, each in self._packed.items() if not _has_input_scale(each)), "")
        beside = f", and {bare} has none" if bare else ""
        return (
            f"{scaled} has a stored scale of its inputs (a static activation scheme){beside}: the config's "
            "quantization_config does not hold for all tensors, and scales of inputs cannot be made of "
            "weights.",
            "Choose another format for all that is quantised, such as 'out_format: fp8_block', which makes "
            "all anew without them, or have 'value: bf16' for what has no such scale.",
        )


def _unread_formats(sources: Sequence[Source], outputs: Sequence[Output]) -> dict[str, str]:
    unknown = {
        (source.index, tensor.key, tensor.offset): form
        for source in sources
        if source.checkpoint.packs is not None
        for name, form in source.checkpoint.packs.unknown.items()
        for tensor in (source.checkpoint.stored[name],)
    }
    unread: dict[str, str] = {}
    for output in outputs if unknown else ():
        places = [(read.source, read.key, read.offset) for op in output.ops for read in op.reads]
        if output.packed is None and len(places) == 1 and places[0] in unknown:
            unread[output.name] = unknown[places[0]]
    return unread


def config_of_copies(config: Mapping[str, Any], outputs: Sequence[Output]) -> Mapping[str, Any]:
    """The config without quantisation tables where no tensor of the output can be codes."""
    return without_tables(config) if all(output.dtype.is_mergeable for output in outputs) else config


def without_tables(config: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for table, section in _tables(result):
        del section[table]
        section.pop(EXPERT_DTYPE, None)
    result.pop(EXPERT_DTYPE, None)
    return result


def _tables(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for _, section in sections(config):
        yield from ((table, section) for table in QUANTISATION_TABLES if section.get(table))


class BesideConfig(NamedTuple):
    files: Mapping[str, bytes]
    left_out: tuple[str, ...]
    """Companions of the donor that are not copied."""


def beside_config(donor: Checkpoint, config: Mapping[str, Any]) -> BesideConfig:
    """ModelOpt's file beside the config, changed where the table in the config is, so that both agree."""
    name, before, after = HF_QUANT_CONFIG, *map(quantisation_tables, (donor.config, config))
    if name not in donor.companions or before == after:
        return BesideConfig({}, ())
    content = modelopt.as_hf_quant_config(after[0], donor.hf_quant_config) if after else None
    return BesideConfig({}, (name,)) if content is None else BesideConfig({name: json_bytes(content)}, ())


def _experts_of(name: str) -> str:
    match = _EXPERTS.match(name)
    return match.group(1) if match else ""


def _list_plain(
    table: dict[str, Any], method: QuantMethod, modules: Sequence[str], *, replaced: bool
) -> None:
    """Add modules to those that a table leaves plain, or replace its list.

    Experts that are plain together are one entry: a list of all would have to change with their number."""
    key = next(filter(table.get, method.plain_keys), method.plain_keys[0])
    listed = [] if replaced else list(table.get(key) or ())
    known = frozenset(listed)
    table[key] = [*listed, *(each for each in _in_short(modules, method.below) if each not in known)]


def _in_short(modules: Sequence[str], below: Callable[[str], str] | None) -> list[str]:
    """Modules without the experts that are listed together as well.

    ``below``: the entry for all that is below a path, where that means one module alone."""
    together = {each for each in modules if each.endswith(_TOGETHER)}
    short = [each for each in modules if _experts_of(each) not in together]
    return short if below is None else [*short, *(below(each) for each in short if each in together)]


def _has_input_scale(packed: QuantisedWeight | QuantisedOutput) -> bool:
    others = (each if isinstance(each, str) else each.name for each in packed.others)
    return any(name.endswith(INPUT_SCALES) for name in others)


def _expert_dtype(packed: Mapping[str, QuantisedWeight | QuantisedOutput]) -> str:
    """What the config calls the format of experts that are stored otherwise than the rest; "" for none."""
    return next(filter(None, (each.quant_spec.format.expert_dtype for each in packed.values())), "")


def _module(output: Output) -> str:
    return output.name.removesuffix(_WEIGHT)
