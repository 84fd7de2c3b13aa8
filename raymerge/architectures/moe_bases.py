"""Whether the trunk of a dense model is that of a family of mixtures of experts, and every reason why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.architectures.dense_models import DenseModel, whole
from raymerge.architectures.moe_names import trunk_name
from raymerge.architectures.moe_output import rotary
from raymerge.architectures.moe_targets import MoeTarget, TrunkTensors
from raymerge.architectures.rules import Role

_MIXED = frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.ROUTER, Role.ROUTER_BIAS, Role.SHARED_EXPERT_GATE})
_OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight")
_HEAD = "lm_head.weight"


def base_reasons(target: MoeTarget, base: DenseModel) -> Iterator[str]:
    """Why the base's trunk is not the target's, in sentences; nothing where it is."""
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
    """Tensors of a model that belong to experts and their routers."""
    return [name for name, info in model.infos.items() if info.part in _MIXED]


def few_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - 1
    return names[0] if not more else f"{names[0]} and {more} more tensor{'' if more == 1 else 's'}"


def _of_tensors(target: MoeTarget, trunk: TrunkTensors, base: DenseModel) -> Iterator[str]:
    """Tensors that the base lacks, and that it has in vain."""
    has = {
        name
        for name, info in base.infos.items()
        if trunk_name(target, name) is not None and info.part is not Role.BUFFER
    }
    stated = target.bases.get(base.family)
    needed = (*trunk.layer, *(stated.layer if stated is not None else ()))
    heads = [f"model.layers.{layer}." for layer in range(base.num_layers)]
    for group in trunk.groups:
        needed += group if any(f"{head}{name}" in has for head in heads for name in group) else ()
    required = {*_OUTSIDE, *(f"{head}{name}" for head in heads for name in needed)}
    placed = required | {_HEAD} | {f"{head}{name}" for head in heads for name in trunk.zeros}
    missing, extra = sorted(required - has), sorted(has - placed)
    if missing:
        yield f"As a base it lacks {few_of(missing)}, which {target.title} needs."
    if extra:
        yield f"As a base it has {few_of(extra)}, for which {target.title} has no place."


def _of_full_width(target: MoeTarget, base: DenseModel) -> Iterator[str]:
    """Norms that are too narrow to be those of all heads together."""
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
    """Sliding windows that the target's code has no way to say."""
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
    """Rotary positions and widths of heads that the target's code has no way to say."""
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
