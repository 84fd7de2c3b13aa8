"""All reasons why dense models cannot be built into a family of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from raymerge.architectures.moe_targets import (
    DenseModel,
    Layout,
    MoeTarget,
    TrunkTensors,
    rotary,
    trunk_name,
    whole,
)
from raymerge.architectures.rules import Role

_MIXED = frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.ROUTER, Role.ROUTER_BIAS, Role.SHARED_EXPERT_GATE})
_OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight")
_HEAD = "lm_head.weight"


def base_reasons(target: MoeTarget, base: DenseModel) -> Iterator[str]:
    last = f"model.layers.{base.num_layers - 1}."
    if not any(name.startswith(last) for name in base.shapes):
        yield f"As a base its config tells of {base.num_layers} layers; it has no tensor {last}* of the last."
        return
    if base.family not in target.bases:
        yield (
            f"As a base it is of the family {base.family or '(none named)'}; the trunk of {target.title} is "
            f"that of {_any_of(tuple(target.bases))} ({target.trunk_is})."
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
    yield from _behind(base)


def mixed_tensors(model: DenseModel) -> list[str]:
    return [name for name, info in model.infos.items() if info.part in _MIXED]


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
        full, found = base.shapes[matrix][:1], base.shapes[norm]
        if full != found:
            yield (
                f"As a base it has {norm} of shape {list(found)}; {target.title} takes {list(full)}, "
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


def _behind(base: DenseModel) -> Iterator[str]:
    """Layers that predict further tokens: their feed-forward would have to become experts too."""
    count = base.num_layers
    beyond = sorted(name for name, info in base.infos.items() if (info.layer or 0) >= count)
    if beyond:
        yield (
            f"As a base it has {few_of(beyond)} behind its {count} layers (multi-token prediction); no "
            "expert goes there."
        )


def _any_of(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


RECIPE = "the recipe"

_MATRICES = ("gate", "up", "down")


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


def refusals(target: MoeTarget, base: DenseModel, mixture: Mixture) -> tuple[Refusal, ...]:
    """Every reason why a mixture cannot be built as the target, parent by parent.

    The base is checked for the trunk, the other parents for their feed-forward networks alone.
    """
    found = [(RECIPE, reason) for reason in _of_recipe(target, mixture)]
    found.extend((base.name, reason) for reason in base_reasons(target, base))
    parents = {parent.name: parent for parent in (*mixture.experts, *mixture.shared)}
    networks = {name: _network(parent) for name, parent in parents.items()}
    for name, parent in parents.items():
        found.extend((name, reason) for reason in _of_parent(target, base, parent, networks[name]))
    found.extend(_of_widths(target, mixture, networks))
    return tuple(Refusal(target.title, parent, reason) for parent, reason in dict.fromkeys(found))


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
    sizes = {_hidden(parent.shapes[name], word) for (_, word), name in network.matrices.items()}
    if sizes - {hidden}:
        other = min(sizes - {hidden})
        yield f"Its hidden size is {other}; that of the base {base.name} is {hidden}."
    if network.matrices and network.width is None:
        yield f"Its feed-forward is not as wide in every layer; {target.title} has one width for all layers."


def _beside(names: Iterable[str], matrices: Set[str]) -> list[str]:
    blocks = {name.rsplit(".", 2)[0] for name in matrices}
    heads = tuple(f"{block}." for block in blocks)
    return sorted(name for name in names if name.startswith(heads) and name not in matrices)


def _hidden(shape: tuple[int, ...], word: str) -> int:
    return shape[0] if word == "down" else shape[-1]


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
