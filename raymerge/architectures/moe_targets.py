"""Families of mixtures that dense models can be built into, and every reason why some models cannot."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

from raymerge.architectures.roles import MOE_ROLES, NameReader, TensorInfo, describe, stacks
from raymerge.architectures.rules import Role, load_rules
from raymerge.dtypes import DType

Layout = Literal["hub", "fused"]
"""Tensors as the family publishes them, or as transformers 5 holds them."""

Windows = Literal["none", "all", "layers"]
"""Layers that can have a sliding window: none, all or none, or any by name."""


@dataclass(frozen=True, slots=True)
class BaseFamily:
    layer: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrunkTensors:
    layer: Sequence[str]
    groups: Sequence[Sequence[str]] = ()
    zeros: Sequence[str] = ()
    """Biases that become zeros where the base has none."""


@dataclass(frozen=True, slots=True)
class SharedExperts:
    gate: str
    up: str
    down: str
    least: int
    most: int | None = None
    own_gate: str | None = None
    """Name below the layer of their weight row ``[1, hidden]``; None if they are simply added."""
    any_width: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTarget:
    name: str
    title: str
    aliases: Sequence[str] = ()
    architecture: str
    trunk_is: str
    bases: Mapping[str, BaseFamily]
    """By ``model_type``: bases that it computes identically."""
    trunk: TrunkTensors | None
    """None if only a base of its own family fits."""
    replaced: re.Pattern[str]
    full_width: Sequence[str] = ()
    """Norms below the layer that must be as wide as all heads together."""
    windows: Windows = "none"
    rope_types: Sequence[str] = ()
    divided_heads: bool = False
    """Whether the head width must be the hidden size divided by the number of heads."""
    hub: Mapping[str, str]
    """Names below the layer by projection, and of the ``router``; {} if published with fused experts."""
    fused: Mapping[str, str]
    """Names below the layer of ``gate_up``, ``down`` and ``router``; {} if its code cannot read them."""
    selection_bias: str | None = None
    """Name below the layer of the float32 vector added for choosing experts."""
    shared: SharedExperts | None
    least_experts: int = 1
    config: Mapping[str, Any]
    """A text with ``$`` names a number of the mixture or the base."""
    drop: frozenset[str]
    weights_sum_to_one: bool = True
    """Whether the weights of the chosen experts sum to 1, so that equal experts act as one."""


def targets() -> Mapping[str, MoeTarget]:
    """All targets by name, in order of preference; reads the tables on every call."""
    general = target_table("general")
    return {name: _target(name, target_table(name), general) for name in general["order"]}


def named_targets(prefix: str) -> tuple[MoeTarget, ...]:
    """The targets that ``architecture`` can mean, in order of preference.

    Case, dashes, underscores and blanks are ignored. A whole name wins over a prefix."""
    squeezed = _squeezed(prefix)
    known = tuple(targets().values())
    names = {
        target.name: {_squeezed(each) for each in (target.name, target.title, *target.aliases)}
        for target in known
    }
    exact = tuple(target for target in known if squeezed in names[target.name])
    begun = (each for each in known if any(name.startswith(squeezed) for name in names[each.name]))
    return exact or (tuple(begun) if squeezed else ())


def implied_tokenizer_class(model_type: str) -> str | None:
    """The tokenizer class that loaders use for a family whatever its files say; else None."""
    implied: str | None = target_table("general")["tokenizer_class"].get(model_type)
    return implied


def target_table(name: str) -> dict[str, Any]:
    table = files("raymerge.architectures").joinpath("families", "targets", f"{name}.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))


def _squeezed(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter not in "-_ ")


def _target(name: str, table: Mapping[str, Any], general: Mapping[str, Any]) -> MoeTarget:
    stated = {**{key: general[key] for key in ("replaced", "hub", "fused")}, **table}
    trunk, shared = table.get("trunk", {}), table.get("shared")
    read = {
        "bases": {family: BaseFamily(**fields) for family, fields in table["bases"].items()},
        "trunk": None if trunk is False else TrunkTensors(**{**general["trunk"], **trunk}),
        "replaced": re.compile(stated["replaced"]),
        "hub": stated["hub"] or {},
        "fused": stated["fused"] or {},
        "shared": None if shared is None else SharedExperts(**shared),
        "drop": frozenset([*general["drop"], *table.get("drop", ())]),
    }
    return MoeTarget(name=name, **{**stated, **read})


@dataclass(frozen=True, slots=True)
class DenseFamily:
    """A family whose feed-forward is ``down(act(gate(x)) * up(x))`` in three matrices."""

    activation: Sequence[str] = ("hidden_act",)
    window: str = "none"
    """Layers with a window if the config has one: ``all``, ``upper`` or ``none``."""
    latent: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DenseModel:
    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    infos: Mapping[str, TensorInfo]
    is_gated: bool
    activation: str | None
    windows: tuple[int | None, ...]
    """Tokens of the sliding window of each layer; None for full attention."""
    matrices: Mapping[tuple[int, str], str]

    @property
    def family(self) -> str:
        return _family(self.config)

    @property
    def num_layers(self) -> int:
        return whole(self.config, "num_hidden_layers") or 0


def dense_model(name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DenseModel:
    full, rules = full_config(config), load_rules(_family(config) or None)
    # A config may tell of more layers than memory could list; none of them has a window then.
    is_sane = (whole(full, "num_hidden_layers") or 0) <= len(shapes)
    family = dense_families().get(_family(config))
    activations = (full.get(key) for key in (family.activation if family else ("hidden_act",)))
    return DenseModel(
        name=name,
        config=full,
        shapes=shapes,
        infos={each: describe(each, rules) for each in shapes},
        is_gated=family is not None,
        activation=next((str(each) for each in activations if each is not None), None),
        windows=windows(full) if is_sane else (),
        matrices=dense_mlp(shapes, config),
    )


def dense_families() -> Mapping[str, DenseFamily]:
    """Families whose feed-forward networks can become experts, by ``model_type``; reads the table on every
    call."""
    general = target_table("general")
    return {
        name: DenseFamily(**{**fields, "defaults": {**general["silent"], **fields.get("defaults", {})}})
        for name, fields in general["dense"].items()
    }


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    family = dense_families().get(_family(config))
    full = {**(family.defaults if family else {}), **config}
    hidden, heads = whole(full, "hidden_size"), whole(full, "num_attention_heads")
    if full.get("num_key_value_heads") is None and heads:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None and hidden and heads and not (family and family.latent):
        full["head_dim"] = hidden // heads
    return full


def windows(full: Mapping[str, Any]) -> tuple[int | None, ...]:
    """For each layer of a full config the tokens of its sliding window, or None."""
    count, size = whole(full, "num_hidden_layers") or 0, whole(full, "sliding_window")
    family = dense_families().get(_family(full))
    kind = family.window if family else "none"
    if kind == "none" or size is None or (kind == "upper" and not full.get("use_sliding_window")):
        return (None,) * count
    named = full.get("layer_types") if kind == "upper" else None
    if isinstance(named, list) and len(named) == count:
        return tuple(size if word == "sliding_attention" else None for word in named)
    first = (whole(full, "max_window_layers") or 0) if kind == "upper" else 0
    return tuple(size if layer >= first else None for layer in range(count))


def dense_mlp(names: Iterable[str], config: Mapping[str, Any]) -> dict[tuple[int, str], str]:
    """(layer, projection) to tensor name of the dense feed-forward networks of the main stack.

    A projection is ``gate``, ``up`` or ``down``, or ``gate_up`` if stored as one. Layers with experts, and
    networks of other kinds, are left out."""
    listed = tuple(names)
    rules, all_stacks = load_rules(_family(config) or None), stacks(listed, config)
    main = next((stack for stack in all_stacks if stack.is_main), None)
    if main is None:
        return {}
    reader, matrices = NameReader(rules, stacks=all_stacks), dict[tuple[int, str], str]()
    for name in listed:
        info = reader.describe(name)
        is_mlp = info.role is Role.MLP and info.stack == main.prefix and name.endswith(".weight")
        if is_mlp and info.layer is not None and info.projection is not None:
            matrices[info.layer, info.projection] = name
    return matrices


def whole(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _family(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type") or "")


_MARK = "$"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def moe_config(
    target: MoeTarget,
    base_config: Mapping[str, Any],
    *,
    num_experts: int,
    experts_per_token: int,
    expert_width: int,
    shared_width: int,
    dtype_name: str | None,
) -> dict[str, Any]:
    """The ``config.json`` of a mixture: the base's with its defaults, and the target's fields.

    Widths are rows of a gate matrix: ``expert_width`` of one routed expert, ``shared_width`` of all shared
    ones together, 0 without any. ``dtype_name`` None keeps the base's. ValueError if the target counts shared
    experts and their width is no multiple of an expert's."""
    full = full_config(base_config)
    values = {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "expert_width": expert_width,
        "shared_width": shared_width,
        "num_shared": _num_shared(target, expert_width, shared_width),
        "dtype": dtype_name
        or next((str(base_config[key]) for key in _DTYPE_KEYS if base_config.get(key)), None),
        **_base_values(full),
    }
    base = target.bases[str(full["model_type"])]
    inherited = {key: copy.deepcopy(value) for key, value in full.items() if key not in target.drop}
    own = {key: _value(field_value, values) for key, field_value in {**target.config, **base.config}.items()}
    result = {**inherited, **own, "architectures": [target.architecture], "model_type": target.name}
    rotary_fields = result.get("rope_parameters")
    if isinstance(rotary_fields, dict):
        # In one place, wherever a reader looks for them.
        if "rope_theta" in rotary_fields and "rope_theta" not in own:
            result.pop("rope_theta", None)
        if "partial_rotary_factor" in own:
            rotary_fields["partial_rotary_factor"] = own["partial_rotary_factor"]
    if dtype_name is not None:
        keys = [key for key in _DTYPE_KEYS if key in result] or [_DTYPE_KEYS[0]]
        result.update(dict.fromkeys(keys, dtype_name))
    return result


def rotary(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kind and fields of rotary scaling, from either spelling; "default" and {} without."""
    tables = (config[key] for key in _ROPE_KEYS if isinstance(config.get(key), Mapping))
    stated: Mapping[str, Any] = next(tables, {})
    kind = stated.get("rope_type", stated.get("type", "default"))
    fields = {key: value for key, value in stated.items() if key not in ("rope_type", "type", "rope_theta")}
    return str(kind), fields if kind != "default" else {}


def _num_shared(target: MoeTarget, expert_width: int, shared_width: int) -> int | None:
    if target.shared is None or target.shared.any_width or not shared_width:
        return None
    if shared_width % expert_width:
        raise ValueError(f"shared experts {shared_width} wide are no whole number of {expert_width}")
    return shared_width // expert_width


def _base_values(full: Mapping[str, Any]) -> dict[str, Any]:
    sliding = windows(full)
    kind, scaling = rotary(full)
    stated = full.get("rope_parameters") or {}
    return {
        "window": next((size for size in sliding if size is not None), None),
        "has_window": any(size is not None for size in sliding),
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in sliding],
        "attention_scale": full["head_dim"] ** -0.5 if "head_dim" in full else None,
        "rope_theta": stated.get("rope_theta", full.get("rope_theta")),
        "rope_scaling": {"type": kind, **scaling} if kind != "default" else None,
    }


def _value(field_value: Any, values: Mapping[str, Any]) -> Any:
    is_name = isinstance(field_value, str) and field_value.startswith(_MARK)
    return values[field_value.removeprefix(_MARK)] if is_name else copy.deepcopy(field_value)


_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class AddedTensor:
    """A tensor of one value that the output needs and no source has, such as zero biases."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    value: float


def trunk_name(target: MoeTarget, name: str) -> str | None:
    """The name of a base tensor in the target; None for the replaced feed-forward."""
    return None if target.replaced.search(name) else name


def is_fused(target: MoeTarget, layout: Layout) -> bool:
    return layout == "fused" or not target.hub


def expert_names(target: MoeTarget, layer: int, expert: int) -> Mapping[str, str]:
    return {each: _below(layer, target.hub[each].format(expert=expert)) for each in _MATRICES}


def fused_names(target: MoeTarget, layer: int) -> tuple[str, str]:
    """Names of the fused experts of a layer: ``[experts, 2 * width, hidden]``, gate rows before up rows; and
    ``[experts, hidden, width]``."""
    return _below(layer, target.fused["gate_up"]), _below(layer, target.fused["down"])


def router_name(target: MoeTarget, layer: int, layout: Layout) -> str:
    """Router rows, ``[experts, hidden]``."""
    return _below(layer, (target.fused if is_fused(target, layout) else target.hub)["router"])


def shared_names(target: MoeTarget, layer: int) -> Mapping[str, str]:
    """``gate``, ``up`` and ``down`` of the shared experts, in either layout; {} without any.

    Several are one network: rows of gate and up, and columns of down, side by side."""
    if target.shared is None:
        return {}
    return {each: _below(layer, getattr(target.shared, each)) for each in _MATRICES}


def shared_gate_name(target: MoeTarget, layer: int) -> str | None:
    """The row ``[1, hidden]`` that weighs the shared expert; None if nothing does."""
    own = target.shared.own_gate if target.shared is not None else None
    return _below(layer, own) if own is not None else None


def added_tensors(
    target: MoeTarget, base: DenseModel, num_experts: int, dtype: DType
) -> tuple[AddedTensor, ...]:
    """Tensors that the target needs and the base lacks, in order of layers; those of the trunk in ``dtype``.

    A bias has one element for each row of its matrix. The base has to fit the target."""
    biases = target.trunk.zeros if target.trunk is not None else ()
    added: list[AddedTensor] = []
    for layer in range(base.num_layers):
        for name in (_below(layer, bias) for bias in biases):
            rows = base.shapes[f"{name.removesuffix('.bias')}.weight"][:1]
            if name not in base.shapes:
                added.append(AddedTensor(name, dtype, rows, 0.0))
        if target.selection_bias is not None:
            name = _below(layer, target.selection_bias)
            added.append(AddedTensor(name, DType.F32, (num_experts,), 0.0))
    return tuple(added)


def _below(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


_OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight")
_HEAD = "lm_head.weight"


def base_reasons(target: MoeTarget, base: DenseModel) -> Iterator[str]:
    last = f"model.layers.{base.num_layers - 1}."
    if not any(name.startswith(last) for name in base.shapes):
        yield f"As a base its config tells of {base.num_layers} layers; it has no tensor {last}* of the last."
        return
    if base.family not in target.bases:
        *others, final = target.bases
        bases = " or ".join(filter(None, (", ".join(others), final)))
        yield (
            f"As a base it is of the family {base.family or '(none named)'}; the trunk of {target.title} is "
            f"that of {bases} ({target.trunk_is})."
        )
    mixed = mixed_tensors(base)
    if mixed:
        yield f"As a base it has experts already ({few_of(mixed)}); it has to be dense."
        return
    if target.trunk is not None:
        yield from _of_tensors(target, target.trunk, base)
    yield from _of_full_width(target, base)
    yield from _of_windows(target, base)
    yield from _of_heads(target, base)
    beyond = sorted(name for name, info in base.infos.items() if (info.layer or 0) >= base.num_layers)
    if beyond:
        # Their feed-forward would have to become experts too.
        yield (
            f"As a base it has {few_of(beyond)} behind its {base.num_layers} layers "
            "(multi-token prediction); no expert goes there."
        )


def mixed_tensors(model: DenseModel) -> list[str]:
    return [name for name, info in model.infos.items() if info.part in MOE_ROLES]


def few_of(names: Sequence[str]) -> str:
    more = len(names) - 1
    return names[0] if not more else f"{names[0]} and {more} more tensor{'' if more == 1 else 's'}"


def _of_tensors(target: MoeTarget, trunk: TrunkTensors, base: DenseModel) -> Iterator[str]:
    has = {
        name
        for name, info in base.infos.items()
        if trunk_name(target, name) is not None and info.part is not Role.BUFFER
    }
    stated = target.bases.get(base.family)
    needed = (*trunk.layer, *(stated.layer if stated is not None else ()))
    heads = [f"model.layers.{layer}." for layer in range(base.num_layers)]
    for group in trunk.groups:
        needed += tuple(group) if any(f"{head}{name}" in has for head in heads for name in group) else ()
    required = {*_OUTSIDE, *(f"{head}{name}" for head in heads for name in needed)}
    placed = required | {_HEAD} | {f"{head}{name}" for head in heads for name in trunk.zeros}
    missing, extra = sorted(required - has), sorted(has - placed)
    if missing:
        yield f"As a base it lacks {few_of(missing)}, which {target.title} needs."
    if extra:
        yield f"As a base it has {few_of(extra)}, for which {target.title} has no place."


def _of_full_width(target: MoeTarget, base: DenseModel) -> Iterator[str]:
    for name in target.full_width:
        norm = f"model.layers.0.{name}"
        matrix = norm.replace("_norm.", "_proj.")
        if norm not in base.shapes or matrix not in base.shapes:
            continue
        full, width = base.shapes[matrix][:1], base.shapes[norm]
        if full != width:
            yield (
                f"As a base it has {norm} of shape {list(width)}; {target.title} takes {list(full)}, "
                "the full width of all heads."
            )


def _of_windows(target: MoeTarget, base: DenseModel) -> Iterator[str]:
    used = {size for size in base.windows if size is not None}
    if used and target.windows == "none":
        yield (
            f"As a base it attends to a window of {min(used)} tokens (sliding_window); {target.title} "
            "attends to all."
        )
    if target.windows == "all" and len(set(base.windows)) > 1:
        yield (
            f"As a base it slides a window of {min(used)} tokens in some layers and not in others; "
            f"{target.title} does so in all or in none."
        )


def _of_heads(target: MoeTarget, base: DenseModel) -> Iterator[str]:
    kind, _ = rotary(base.config)
    if target.rope_types and kind not in target.rope_types:
        yield (
            f"As a base it scales rotary positions by {kind}; the code of {target.title} knows "
            f"{', '.join(target.rope_types)}."
        )
    hidden, heads = whole(base.config, "hidden_size"), whole(base.config, "num_attention_heads")
    width = base.config.get("head_dim")
    if target.divided_heads and hidden and heads and width != hidden / heads:
        yield (
            f"As a base it has {heads} heads {width} wide; {target.title} divides the hidden size of "
            f"{hidden} by their number."
        )


RECIPE = "the recipe"


@dataclass(frozen=True, slots=True)
class Mixture:
    experts: tuple[DenseModel, ...]
    shared: tuple[DenseModel, ...]
    shared_have_gates: bool | None
    """Whether the shared experts have prompts for their gate; None if no gate needs them."""
    num_experts: int
    granularity: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Refusal:
    target: str
    parent: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Network:
    matrices: Mapping[tuple[int, str], str]
    width: int | None
    """None where the gate matrices differ in rows."""


def refusals(target: MoeTarget, base: DenseModel, mixture: Mixture) -> tuple[Refusal, ...]:
    """Every reason why a mixture cannot be built as the target, parent by parent.

    The base is checked for the trunk, the other parents for their feed-forward networks alone."""
    reasons = [(RECIPE, reason) for reason in _of_recipe(target, mixture)]
    reasons.extend((base.name, reason) for reason in base_reasons(target, base))
    parents = {parent.name: parent for parent in (*mixture.experts, *mixture.shared)}
    networks = {name: _network(parent) for name, parent in parents.items()}
    for name, parent in parents.items():
        reasons.extend((name, reason) for reason in _of_parent(target, base, parent, networks[name]))
    reasons.extend(_of_widths(target, mixture, networks))
    return tuple(Refusal(target.title, parent, reason) for parent, reason in dict.fromkeys(reasons))


def _of_recipe(target: MoeTarget, mixture: Mixture) -> Iterator[str]:
    count, shared = len(mixture.shared), target.shared
    least, most = (shared.least, shared.most) if shared is not None else (0, 0)
    if count < least or (most is not None and count > most):
        named = f"{count} shared expert{'' if count == 1 else 's'}"
        yield f"It names {named}; {target.title} takes {_number(least, most)}."
    if count and shared is not None and mixture.shared_have_gates is (shared.own_gate is None):
        yield (
            f"Its shared experts have prompts; those of {target.title} have no gate to make of them."
            if shared.own_gate is None
            else f"Its shared experts lack prompts; a gate weighs that of {target.title}, made of prompts."
        )
    if mixture.num_experts < target.least_experts:
        yield (
            f"It makes no more than {mixture.num_experts} routed expert; the router of {target.title} works "
            f"with {target.least_experts} or more."
        )
    if mixture.layout == "fused" and not target.fused:
        yield f"It asks for layout: fused; the code of {target.title} reads experts one by one."


def _number(least: int, most: int | None) -> str:
    if most == 0:
        return "none"
    if most == least:
        return f"exactly {least}"
    return f"{least} or more" if most is None else f"{least} to {most}"


def _network(parent: DenseModel) -> _Network:
    matrices = {place: name for place, name in parent.matrices.items() if len(parent.shapes[name]) == 2}
    widths = {parent.shapes[name][0] for (_, word), name in matrices.items() if word in ("gate", "up")}
    widths |= {parent.shapes[name][-1] for (_, word), name in matrices.items() if word == "down"}
    return _Network(matrices, next(iter(widths)) if len(widths) == 1 else None)


def _of_parent(target: MoeTarget, base: DenseModel, parent: DenseModel, network: _Network) -> Iterator[str]:
    layers = {layer for layer, _ in network.matrices}
    mixed = mixed_tensors(parent)
    if mixed:
        yield f"It has experts already ({few_of(mixed)}); what becomes an expert has to be dense."
        return
    if not parent.is_gated:
        pair = next((name for (_, word), name in network.matrices.items() if word == "gate_up"), None)
        stored = f", stored with gate and up in one ({pair})," if pair else ""
        yield (
            f"It is of the family {parent.family or '(none named)'}, whose feed-forward{stored} is not known "
            "to be gate, up and down in three matrices."
        )
        return
    if len(layers) != base.num_layers or max(layers, default=-1) >= base.num_layers:
        yield (
            f"It has dense feed-forward networks in {len(layers)} layers; the base {base.name} has "
            f"{base.num_layers} layers."
        )
    yield from _of_matrices(target, base, parent, network)
    if parent.activation != base.activation:
        yield (
            f"Its activation is {parent.activation}; that of the base {base.name} is {base.activation}, and "
            "experts share one."
        )


def _of_matrices(target: MoeTarget, base: DenseModel, parent: DenseModel, network: _Network) -> Iterator[str]:
    layers = {layer for layer, _ in network.matrices}
    missing = [
        f"layer {layer}: {word}"
        for layer in sorted(layers)
        for word in _MATRICES
        if (layer, word) not in network.matrices
    ]
    if missing:
        yield f"It lacks matrices of gated feed-forward networks ({missing[0]}; {len(missing)} in all)."
    extra = _beside(parent.shapes, frozenset(network.matrices.values()))
    if extra:
        yield f"Its feed-forward has {few_of(extra)}, for which an expert of {target.title} has no place."
    hidden = whole(base.config, "hidden_size")
    shapes = [(parent.shapes[name], word) for (_, word), name in network.matrices.items()]
    sizes = {shape[0] if word == "down" else shape[-1] for shape, word in shapes}
    if sizes - {hidden}:
        other = min(sizes - {hidden})
        yield f"Its hidden size is {other}; that of the base {base.name} is {hidden}."
    if network.matrices and network.width is None:
        yield f"Its feed-forward is not as wide in every layer; {target.title} has one width for all layers."


def _beside(names: Iterable[str], matrices: Set[str]) -> list[str]:
    blocks = {name.rsplit(".", 2)[0] for name in matrices}
    heads = tuple(f"{block}." for block in blocks)
    return sorted(name for name in names if name.startswith(heads) and name not in matrices)


def _of_widths(
    target: MoeTarget, mixture: Mixture, networks: Mapping[str, _Network]
) -> Iterator[tuple[str, str]]:
    first = next((each for each in mixture.experts if networks[each.name].width is not None), None)
    width = networks[first.name].width if first is not None else None
    if first is None or width is None:
        return
    for parent in mixture.experts:
        own = networks[parent.name].width
        if own is not None and own != width:
            yield parent.name, f"Its feed-forward is {own} wide; that of the expert {first.name} is {width}."
    if width % mixture.granularity:
        yield (
            RECIPE,
            f"It cuts feed-forward networks {width} wide into {mixture.granularity} (granularity); that "
            "leaves a rest.",
        )
        return
    piece, shared = width // mixture.granularity, target.shared
    together = sum(networks[parent.name].width or piece for parent in mixture.shared)
    if shared is not None and not shared.any_width and together % piece:
        yield (
            RECIPE,
            f"Its shared experts are {together} wide together; {target.title} counts them by {piece}, the "
            "width of an expert.",
        )
