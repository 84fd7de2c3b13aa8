"""Whether config and headers agree on sizes, experts and layers.

Only what holds for every architecture is checked. Where a config distinguishes kinds of layers, layers are
compared within a kind; what a config does not state is not checked."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raymerge.architectures.depth import count_mtp_layers
from raymerge.architectures.roles import (
    Stack,
    TensorInfo,
    TiedPair,
    describe,
    fused_layout,
    logical_name,
    stacks,
    tied_pair,
)
from raymerge.architectures.rules import (
    Role,
    Rules,
    class_names,
    config_int,
    quantisation_tables,
    rules_of,
    text_section,
)
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.formats import packed_tensors
from raymerge.checkpoints.source import Checkpoint, main_dtype
from raymerge.dtypes import DType, config_name
from raymerge.errors import Problem, shortlist
from raymerge.planner.inputs.sources import value_problems

_REMEDY = "Correct the config, or merge again from complete models."
_NUMBER = re.compile(r"\.\d+(?=\.)")
Layers = Sequence[Mapping[str, StoredTensor]]
"""For each layer of the main stack its tensors, by the rest of the name after the layer number."""


@dataclass(frozen=True, slots=True)
class _Model:
    checkpoint: Checkpoint
    rules: Rules
    stack: Stack
    layers: Layers
    where: str

    def describe(self, suffix: str) -> TensorInfo:
        return describe(f"{self.stack.prefix}.0.{suffix}", self.rules, stacks=(self.stack,))

    def is_quantised(self) -> bool:
        """Whether some tensors hold codes, whose shapes and companions may differ from layer to layer."""
        return bool(quantisation_tables(self.checkpoint.config))


def config_problems(checkpoint: Checkpoint, weights: QuantisedWeights | None = None) -> Iterator[Problem]:
    """What a config and tensors contradict each other in. ``weights``: what is known of codes; None where
    they are to be looked for."""
    if checkpoint.is_raw:
        return
    checkpoint = replace(checkpoint, tensors=checkpoint.model_tensors)
    where = f"{checkpoint.name}/config.json"
    rules = rules_of(checkpoint.config)
    yield from value_problems(checkpoint.config, rules, where)
    all_stacks = stacks(checkpoint.tensors, checkpoint.config)
    main = next((stack for stack in all_stacks if stack.is_main), None)
    if main is None:
        yield from _count_problems(checkpoint, all_stacks, rules, where)
    yield from _dtype_problems(checkpoint, where)
    yield from _head_problems(checkpoint, rules, where)
    if main is not None:
        yield from _layer_problems(checkpoint, main, rules, where)
    if weights is None:
        weights = packed_tensors(checkpoint, quantisation_tables(checkpoint.config))
    yield from weights.faults
    yield from _input_scale_problems(weights, where)


def _input_scale_problems(weights: QuantisedWeights, where: str) -> Iterator[Problem]:
    """Servers begin with no number where a static scheme's scale is absent, and give zeros or NaN."""
    lacking = weights.without_input_scale
    if lacking:
        what = (
            "quantization_config says that activations have stored scales (a static scheme), but "
            f"{len(lacking)} quantised matrices have none: {shortlist(lacking)}."
        )
        remedy = "Take them from a checkpoint that is complete, or make the scheme dynamic in its config."
        yield Problem(where, what, remedy)


def _count_problems(
    checkpoint: Checkpoint, all_stacks: Sequence[Stack], rules: Rules, where: str
) -> Iterator[Problem]:
    section = text_section(checkpoint.config)
    counts = {key: section[key] for key in rules.depth.counts if isinstance(section.get(key), int)}
    if counts and all_stacks and all(stack.num_layers not in counts.values() for stack in all_stacks):
        have = ", ".join(f"{stack.prefix} has {stack.num_layers}" for stack in all_stacks)
        counted = ", ".join(f"{key} is {value}" for key, value in counts.items())
        yield Problem(where, f"{counted}, but {have} layers.", "Correct the config, or merge again.")


def _dtype_problems(checkpoint: Checkpoint, where: str) -> Iterator[Problem]:
    stated = declared_dtype(checkpoint.config)
    mergeable = any(tensor.dtype.is_mergeable for tensor in checkpoint.tensors.values())
    if stated is None or not mergeable or checkpoint.config.get("quantization_config"):
        return
    main = config_name(main_dtype(checkpoint))
    known = {config_name(dtype) for dtype in DType if dtype.is_mergeable}
    if stated in known and stated != main:
        yield Problem(where, f"it says {stated}, but most tensors are {main}.", "Correct the config's dtype.")


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    for section in (config, text_section(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(section.get(key), str):
                return str(section[key]).removeprefix("torch.")
    return None


def _head_problems(checkpoint: Checkpoint, rules: Rules, where: str) -> Iterator[Problem]:
    pair = tied_pair(checkpoint.tensors, checkpoint.config)
    if pair is None:
        return
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in class_names(checkpoint.config))
    stored = {pair.head, f"{pair.head}_packed", f"{pair.head.removesuffix('.weight')}.qweight"}
    if pair.declared is False and generates and stored.isdisjoint(checkpoint.tensors):
        what = f"tie_word_embeddings is false, but {pair.head} is not stored."
        yield Problem(where, what, "A loader would start it at random: store the head, or tie it.")
    yield from _size_problems(checkpoint, pair, rules, where)


def _size_problems(checkpoint: Checkpoint, pair: TiedPair, rules: Rules, where: str) -> Iterator[Problem]:
    config = checkpoint.config
    embedding, head = _matrix(checkpoint, pair.embedding), _matrix(checkpoint, pair.head)
    widths = {size for key in rules.sizes["hidden"] if (size := config_int(config, [key])) is not None}
    # Some families embed in another width than the layers have, and say so.
    allowed = widths | _sizes(config, "emb")
    if embedding is not None and widths and embedding.shape[1] not in allowed:
        sizes = ", ".join(map(str, sorted(widths)))
        what = f"the hidden size is {sizes}, but {embedding.name} is {embedding.shape[1]} wide."
        yield Problem(where, what, _REMEDY)
    size = text_section(config).get("vocab_size")
    own = [tensor for tensor in (embedding, head) if tensor is not None]
    for tensor in (*own, *_more_rows(checkpoint, rules, pair)) if isinstance(size, int) else ():
        # More rows than tokens are padding. A smaller vocabulary of its own has a field of its own.
        if tensor.shape[0] < size and tensor.shape[0] not in _sizes(config, "vocab"):
            what = f"vocab_size is {size}, but {tensor.name} has {tensor.shape[0]} rows."
            yield Problem(where, what, "Correct vocab_size.")


def _more_rows(checkpoint: Checkpoint, rules: Rules, pair: TiedPair) -> Iterator[StoredTensor]:
    others = set(_nested_sizes(checkpoint.config, "vocab"))
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for name, tensor in checkpoint.tensors.items():
        is_known = name in (pair.embedding, pair.head) or not name.endswith((".weight", ".bias"))
        if is_known or not tensor.shape or tensor.shape[0] in others:
            continue
        # Tensors of many layers and experts whose names differ in numbers alone are looked at once.
        key = _NUMBER.sub(".", name), tensor.shape
        if key in seen:
            continue
        seen.add(key)
        info = describe(name, rules)
        is_plain = tensor.dtype.is_mergeable and len(tensor.shape) == (1 if info.is_bias else 2)
        if is_plain and info.role is not Role.VISION and counts_tokens(name, info):
            yield tensor


def _layer_problems(checkpoint: Checkpoint, stack: Stack, rules: Rules, where: str) -> Iterator[Problem]:
    if stack.num_layers > len(checkpoint.tensors):
        stored = len(checkpoint.tensors)
        what = f"the config counts {stack.num_layers} layers, but only {stored} tensors are stored."
        yield Problem(where, what, _REMEDY)
        return
    model = _model(checkpoint, stack, rules, where)
    count = len(model.layers)
    kinds = [_kind(checkpoint.config, model.rules, layer, count) for layer in range(count)]
    yield from _absent_layers(model)
    yield from _holes(model, kinds)
    yield from _unequal(model, kinds)
    yield from _expert_problems(model)
    yield from _mtp_problems(model)


def _model(checkpoint: Checkpoint, stack: Stack, rules: Rules, where: str) -> _Model:
    layers: list[dict[str, StoredTensor]] = [{} for _ in range(stack.num_layers)]
    head = f"{stack.prefix}." if stack.prefix else ""
    for name, tensor in checkpoint.tensors.items():
        number, _, suffix = name.removeprefix(head).partition(".")
        if name.startswith(head) and number.isdecimal() and int(number) < len(layers):
            layers[int(number)][suffix] = tensor
    return _Model(checkpoint, rules, stack, layers, where)


def _absent_layers(model: _Model) -> Iterator[Problem]:
    """Layers without any tensor, unless the config has a table of layers that may allow it."""
    absent = [layer for layer, tensors in enumerate(model.layers) if not tensors]
    fields = text_section(model.checkpoint.config).values()
    lists = (each for each in fields if isinstance(each, list) and len(each) == len(model.layers))
    if absent and not any(all(isinstance(row, dict) for row in rows) for rows in lists):
        what = f"the config counts {len(model.layers)} layers, but no tensors of {model.stack.prefix} are in "
        yield Problem(model.where, f"{what}layers {shortlist(absent)}.", _REMEDY)


def _holes(model: _Model, kinds: Sequence[str]) -> Iterator[Problem]:
    section = text_section(model.checkpoint.config)
    if any(section.get(key) for key in model.rules.depth.fixed):
        return
    sets = [frozenset(tensors) for tensors in model.layers]
    times = Counter(zip(kinds, sets, strict=True))
    usual = [(kind, names) for (kind, names), count in times.items() if count > 1]
    for layer, (kind, names) in enumerate(zip(kinds, sets, strict=True)):
        fuller = [more for other, more in usual if other == kind and names < more]
        if not names or times[kind, names] > 1 or not fuller:
            continue
        whole = min(fuller, key=len)
        missing = [name for name in sorted(whole - names) if _is_needed(model, name)]
        alike = [number for number, each in enumerate(sets) if names <= each]
        if layer in (alike[0], alike[-1]):
            missing = _unusual(missing, names, model.layers[sets.index(whole)])
        if missing:
            lacks = f"{model.stack.prefix}.{layer} lacks {shortlist(missing)}, which the other layers have."
            yield Problem(model.checkpoint.name, lacks, "Take a complete checkpoint, or merge again.")


def _unusual(missing: Sequence[str], names: Collection[str], whole: Mapping[str, StoredTensor]) -> list[str]:
    """What the first or last layer of its kind lacks although no usual design leaves it out there.

    Designs leave out what depends on a neighbouring layer: ZAYA the scale of earlier router states, a vector,
    RWKV-7 the matrices that mix in the first layer's values, which are one whole part of a module."""
    present = {part for name in names for part in _parts(name)}
    matrices = [name for name in missing if len(whole[name].shape) > 1]
    counts = Counter(part for name in matrices for part in _parts(name) if part not in present)
    return [name for name in matrices if all(counts[part] < 2 for part in _parts(name))]


def _parts(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:depth]) for depth in range(2, len(words)) if not words[depth - 1].isdecimal()]


def _is_needed(model: _Model, suffix: str) -> bool:
    if model.is_quantised() and not suffix.endswith(("weight", "bias")):
        return False
    return model.describe(suffix).part not in (Role.NORM, Role.BUFFER)


def _unequal(model: _Model, kinds: Sequence[str]) -> Iterator[Problem]:
    first: dict[tuple[str, frozenset[str]], int] = {}
    quantised = model.is_quantised()
    for layer, tensors in enumerate(model.layers):
        like = first.setdefault((kinds[layer], frozenset(tensors)), layer)
        differing = [
            suffix
            for suffix, tensor in tensors.items()
            if tensor.shape != model.layers[like][suffix].shape and not (quantised and _is_code(tensor))
        ]
        if differing:
            one, other = model.layers[like][differing[0]], tensors[differing[0]]
            more = f" and {len(differing) - 1} more tensors alike" if len(differing) > 1 else ""
            what = f"{other.name} is {list(other.shape)}, but {one.name} is {list(one.shape)}{more}."
            yield Problem(model.checkpoint.name, what, "Merge models of one size.")


def _is_code(tensor: StoredTensor) -> bool:
    return not tensor.name.endswith(("weight", "bias")) or not tensor.dtype.value.startswith(("F", "BF"))


def _expert_problems(model: _Model) -> Iterator[Problem]:
    stated = config_int(model.checkpoint.config, model.rules.sizes["num_experts"])
    if stated is None or stated < 2:
        return
    # Experts that compute nothing have router rows and no tensors.
    rows = {stated} | {stated + size for size in _sizes(model.checkpoint.config, "zero_expert")}
    infos = {suffix: model.describe(suffix) for suffix in {name for each in model.layers for name in each}}
    wrong: dict[str, list[int]] = {}
    for layer, tensors in enumerate(model.layers):
        for suffix, tensor in tensors.items():
            if _is_router(model, infos[suffix], tensor) and rows.isdisjoint(tensor.shape):
                wrong.setdefault(f"{suffix} has {tensor.shape[0]} rows", []).append(layer)
        num_stored = _stored_experts(model, tensors, infos)
        if num_stored != 0 and num_stored not in rows:
            wrong.setdefault(f"{num_stored} are stored", []).append(layer)
    for what, layers in wrong.items():
        place = f"in layers {shortlist(layers)} of {model.stack.prefix}"
        yield Problem(model.where, f"the config counts {stated} experts, but {place} {what}.", _REMEDY)


def _is_router(model: _Model, info: TensorInfo, tensor: StoredTensor) -> bool:
    if info.part is not Role.ROUTER or len(tensor.shape) != 2 or not tensor.dtype.is_mergeable:
        return False
    return logical_name(tensor.name, model.rules, info=info).endswith(".gate.weight")


def _stored_experts(
    model: _Model, tensors: Mapping[str, StoredTensor], infos: Mapping[str, TensorInfo]
) -> int:
    """Experts of a layer, stored one by one or fused; 0 where there are none or the layout is unknown."""
    numbers = {info.expert for suffix in tensors if (info := infos[suffix]).expert is not None}
    if numbers:
        return len(numbers)
    fused = [tensor for suffix, tensor in tensors.items() if infos[suffix].part is Role.EXPERT]
    layouts = (fused_layout(t.name, t.shape, model.checkpoint.config, model.rules) for t in fused)
    known = (each.num_experts for each in layouts if each is not None and each.kind != "unknown")
    return next(known, 0)


def _mtp_problems(model: _Model) -> Iterator[Problem]:
    """Stored multi-token-prediction layers against the config; many models are published without any."""
    config, keys, stack = model.checkpoint.config, model.rules.depth.mtp_counts, model.stack
    declared = config_int(config, keys)
    stored = count_mtp_layers(model.checkpoint.tensors, {stack.prefix}, stack.num_layers, model.rules)
    if stored and declared is not None and stored != declared:
        key = next(key for key in keys if config_int(config, [key]) is not None)
        what = f"{key} is {declared}, but {stored} multi-token-prediction layers are stored."
        yield Problem(model.where, what, f"Set {key} to {stored}.")


def _kind(config: Mapping[str, Any], rules: Rules, layer: int, count: int) -> str:
    section = text_section(config)
    facts: list[Any] = []
    for text in map(section.get, rules.depth.per_layer_strings):
        facts.append(text[layer] if isinstance(text, str) and len(text) == count else "")
    for key, value in _fields(section):
        if rules.depth.not_per_layer.search(key):
            continue
        if isinstance(value, list) and len(value) == count:
            facts.append(value[layer])
        elif isinstance(value, list) and all(isinstance(number, int) for number in value):
            # Lists of layer numbers, whether they count from 0 or from 1.
            facts.append([layer in value, layer + 1 in value])
    for rule in rules.depth.periodic:
        period = section.get(rule.key)
        facts.append(layer % period if isinstance(period, int) and period > 1 else 0)
    return json.dumps(facts, sort_keys=True, default=str)


def _fields(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        yield key, value
        if isinstance(value, Mapping):
            yield from value.items()


def _matrix(checkpoint: Checkpoint, name: str) -> StoredTensor | None:
    tensor = checkpoint.tensors.get(name)
    return tensor if tensor is not None and len(tensor.shape) == 2 and tensor.dtype.is_mergeable else None


def _sizes(config: Mapping[str, Any], word: str) -> set[int]:
    fields = [item for section in (config, text_section(config)) for item in section.items()]
    sizes = [(key, value) for key, value in fields if word in key and key != "vocab_size"]
    return {value for _, value in sizes if type(value) is int}


def _nested_sizes(config: Mapping[str, Any], word: str) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _nested_sizes(value, word)
        elif word in key and type(value) is int:
            yield value


_BY_POSITION = frozenset(
    {"position_embeddings", "embed_positions", "wpe", "position_embedding", "token_type_embeddings"}
)
# Embeddings of something else than tokens, which may happen to have as many rows.


def counts_tokens(name: str, info: TensorInfo) -> bool:
    return info.part in (Role.EMBEDDING, Role.HEAD) and _BY_POSITION.isdisjoint(name.split("."))
