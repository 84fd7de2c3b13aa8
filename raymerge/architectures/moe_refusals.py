"""Whether dense models can be built into a family of mixtures of experts, and every reason why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from raymerge.architectures.dense_models import DenseModel, whole
from raymerge.architectures.moe_bases import base_reasons, few_of, mixed_tensors
from raymerge.architectures.moe_targets import Layout, MoeTarget

RECIPE = "the recipe"
"""Who is to blame where no parent is."""

_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a recipe asks to be built."""

    experts: tuple[DenseModel, ...]
    """Parents of the routed experts, each at least once."""
    shared: tuple[DenseModel, ...]
    """Parents of the shared experts, one each."""
    shared_have_gates: bool | None
    """Whether the shared experts have prompts for a gate of their own; None where a gate needs none."""
    num_experts: int
    """Routed experts of each layer of the output."""
    granularity: int
    """Pieces into which each parent's feed-forward network is cut along its width."""
    layout: Layout
    """How the output is written."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a target cannot be built."""

    target: str
    """What people call the target."""
    parent: str
    """The parent at fault, or ``the recipe``."""
    reason: str
    """A sentence: what is, and what was expected."""


@dataclass(frozen=True, slots=True)
class _Network:
    """The feed-forward networks of one parent."""

    matrices: Mapping[tuple[int, str], str]
    width: int | None
    """Rows of the gate matrices; None where they differ."""


def refusals(target: MoeTarget, base: DenseModel, mixture: Mixture) -> tuple[Refusal, ...]:
    """Every reason why a mixture cannot be built as the target, parent by parent; () where it can.

    Of the base the trunk matters, of the other parents the feed-forward networks alone.
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
    if mixture.layout == "fused" and target.fused is None:
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
    """Reasons in the feed-forward networks of one expert."""
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
    """Tensors of feed-forward networks that are none of the three matrices."""
    blocks = {name.rsplit(".", 2)[0] for name in matrices}
    heads = tuple(f"{block}." for block in blocks)
    return sorted(name for name in names if name.startswith(heads) and name not in matrices)


def _hidden(shape: tuple[int, ...], word: str) -> int:
    return shape[0] if word == "down" else shape[-1]


def _of_widths(
    target: MoeTarget, mixture: Mixture, networks: Mapping[str, _Network]
) -> Iterator[tuple[str, str]]:
    """Routed experts of unequal width, and what cannot be cut or counted in whole experts."""
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
