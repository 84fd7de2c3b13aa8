"""One name for one logical tensor, however a checkpoint spells or stores it.

The canonical spelling of experts is ``{block}.experts.{e}.{gate,up,down}_proj.weight`` with a block ending in
``mlp``; that of a router ``{block}.gate.weight``, and of its selection bias
``{block}.gate.e_score_correction_bias``. Other tensors keep their names but for the family's renames.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.roles import EXPERT_NUMBER, TensorInfo, describe, projection_word
from raymerge.architectures.rules import LayoutKind, Role, Rules
from raymerge.architectures.sections import config_int

_BLOCK_WORDS = frozenset({"block_sparse_moe", "feed_forward", "ffn", "moe"})
_BLOCKS_NOT_RENAMED = frozenset({"feed_forward"})
# What transformers 5 leaves as it is, for dense layers and mixtures alike.
_MAY_BE_STACKED = frozenset({Role.EXPERT, Role.MLP, Role.OTHER})
_OF_CODES = re.compile(r"(scales?(_inv)?|blocks|packed|q?zeros|qweight|g_idx)$")
_ROUTER_WRAPPERS = frozenset({"gate", "router", "wg", "layer", "classifier"})


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """How one stored tensor holds matrices of many experts."""

    kind: LayoutKind
    """Where they lie; ``unknown`` where neither family nor config tells."""
    block: str
    """Canonical path of the mixture-of-experts block."""
    projections: tuple[str, ...]
    """Matrices of each expert that are stored together: ("gate", "up"), ("gate",), ("up",) or ("down",)."""
    num_experts: int
    """Experts in it."""
    is_bias: bool
    """Whether it holds biases, one vector a projection."""


def logical_name(name: str, rules: Rules, *, info: TensorInfo | None = None) -> str:
    """The canonical name of a tensor that is not fused; a fused one keeps its own, in a canonical block.

    ``info`` is what ``describe`` said of the name, where that is at hand; it saves the time of asking again.
    """
    return CanonicalNames(rules).of(name, info or describe(name, rules))


class CanonicalNames:
    """Canonical names of one checkpoint's tensors; what those of one block share is found out once."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._blocks: dict[str, str] = {}

    def of(self, name: str, info: TensorInfo) -> str:
        """The canonical name of a tensor that is not fused, of which ``info`` is said."""
        own = info.block
        if own is None:
            return _renamed(name, self._rules)
        if own not in self._blocks:
            self._blocks[own] = canonical_block(own, self._rules)
        block = self._blocks[own]
        rest = name[len(own) + 1 :] if own else name
        inner = _inside_block(info, rest.split("."), self._rules)
        return f"{block}.{inner}" if block else inner


def canonical_block(block: str, rules: Rules) -> str:
    """The canonical path of a mixture-of-experts block."""
    # The dot lets those renames match that look for one behind the block.
    parent, dot, word = _renamed(f"{block}.", rules)[:-1].rpartition(".")
    return f"{parent}{dot}{'mlp' if word in _BLOCK_WORDS else word}"


def other_names(name: str, logical: str, info: TensorInfo, rules: Rules) -> tuple[str, ...]:
    """What a logical tensor is called where its checkpoint is stored in another layout.

    These are its names in the layout of transformers 5, by itself and stacked, and in that of the Hub: a
    recipe speaks of the same tensors in each of them.

    Args:
        name: the stored tensor that holds it.
        logical: its canonical name.
        info: what ``name`` says.
        rules: those of the checkpoint's family.
    """
    if info.block is None:
        return (logical,) if logical != name else ()
    block, inner = canonical_block(info.block, rules), logical
    if block:
        inner = logical[len(block) + 1 :]
    word = info.block.rpartition(".")[2]
    if word in _BLOCKS_NOT_RENAMED:
        block = block.removesuffix("mlp") + word
    elif info.part in (Role.ROUTER, Role.ROUTER_BIAS) and word not in _BLOCK_WORDS:
        inner = name[len(info.block) + 1 :] if info.block else name
    alone = f"{block}.{inner}" if block else inner
    stacked = _stacked_name(block, inner.split(".")) if info.part is Role.EXPERT else alone
    published = ".".join(rules.published.get(part, part) for part in alone.split("."))
    return tuple(each for each in dict.fromkeys((alone, stacked, published)) if each != name)


def _stacked_name(block: str, inner: Sequence[str]) -> str:
    """What transformers 5 calls the stack that holds a matrix or a bias of an expert."""
    words = [word for word in inner if not word.isdecimal()]
    if words[-1] in ("weight", "bias"):
        pair = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        matrix = pair.get(words[-2], words[-2])
        words = [*words[:-2], matrix if words[-1] == "weight" else f"{matrix}_bias"]
    return ".".join([block, *words] if block else words)


def fused_layout(
    name: str, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> FusedLayout | None:
    """How a tensor holds the matrices of many experts; None when it is no such tensor.

    A stack of as many matrices as the config counts experts is one, of unknown layout, by whatever name.
    The orientation comes from the family, else from the sizes in the config, never from which side is longer.
    """
    path = name.split(".")
    word = projection_word(path, rules)
    if EXPERT_NUMBER.search(name) or (word is not None and not _is_plain(path, word)):
        return None
    info = describe(name, rules)
    if word is None or info.part is not Role.EXPERT:
        return _unrecognised(path[-1], info, shape, config, rules)
    kind, num_experts = _placed(word, info, shape, config, rules)
    projection = info.projection or ""
    return FusedLayout(
        kind=kind,
        block=canonical_block(info.block or "", rules),
        projections=("gate", "up") if projection == "gate_up" else (projection,),
        num_experts=num_experts,
        is_bias=info.is_bias,
    )


def logical_names(layout: FusedLayout) -> tuple[str, ...]:
    """Canonical names of what a fused tensor holds: expert by expert, in each projection by projection."""
    leaf = "bias" if layout.is_bias else "weight"
    head = f"{layout.block}.experts" if layout.block else "experts"
    return tuple(
        f"{head}.{expert}.{projection}_proj.{leaf}"
        for expert in range(layout.num_experts)
        for projection in layout.projections
    )


def _renamed(name: str, rules: Rules) -> str:
    for pattern, replacement in rules.renames:
        name = pattern.sub(replacement, name)
    return name


def _inside_block(info: TensorInfo, path: list[str], rules: Rules) -> str:
    """The canonical spelling of what stands behind the block's path."""
    if info.part is Role.ROUTER:
        return ".".join(["gate", *(word for word in path if word not in _ROUTER_WRAPPERS)])
    if info.part is Role.ROUTER_BIAS:
        return "gate.e_score_correction_bias"
    word = projection_word(path, rules)
    if info.expert is None or info.part is not Role.EXPERT or word not in path:
        return ".".join(path)
    tail = path[path.index(word) + 1 :]
    return ".".join(["experts", str(info.expert), f"{info.projection}_proj", *tail])


def _unrecognised(
    word: str, info: TensorInfo, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> FusedLayout | None:
    """A stack of unknown layout: it has a matrix for each expert, and a name that does not say which ones."""
    if len(shape) != 3 or min(shape) < 2 or info.layer is None or info.role is Role.VISION:
        return None
    is_stack = shape[0] == config_int(config, rules.sizes["num_experts"]) or info.part is Role.EXPERT
    if info.part not in _MAY_BE_STACKED or not is_stack or _OF_CODES.search(word):
        return None
    return FusedLayout("unknown", canonical_block(info.block or "", rules), (), shape[0], info.is_bias)


def _is_plain(path: list[str], word: str) -> bool:
    """Whether a name means the numbers themselves, not a quantiser's codes or scales."""
    return path[-1] in (word, f"{word}_bias") or (path[-1] in ("weight", "bias") and path[-2] == word)


def _placed(
    word: str, info: TensorInfo, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> tuple[LayoutKind, int]:
    """Layout and number of experts."""
    declared = rules.fused.get(word) or ("out_in" if rules.is_out_in else None)
    if declared in ("rows", "rows_transposed"):
        experts = config_int(config, rules.sizes["num_experts"]) or 0
        fits = len(shape) == 2 and experts > 0 and shape[0] % experts == 0
        return (declared, experts) if fits else ("unknown", max(experts, 1))
    experts = shape[0] if shape else 1
    if len(shape) != (2 if info.is_bias else 3) or not experts:
        return "unknown", max(experts, 1)
    if info.projection == "gate_up" and shape[1 if info.is_bias or declared == "out_in" else 2] % 2:
        return "unknown", experts
    return (
        _bias_kind(declared, info) if info.is_bias else _matrix_kind(declared, info, shape, config, rules)
    ), experts


def _bias_kind(declared: LayoutKind | None, info: TensorInfo) -> LayoutKind:
    if info.projection != "gate_up":
        return "out_in"
    if declared is None:
        return "unknown"
    return declared if declared == "in_out_interleaved" else "out_in"


def _matrix_kind(
    declared: LayoutKind | None,
    info: TensorInfo,
    shape: tuple[int, ...],
    config: Mapping[str, Any],
    rules: Rules,
) -> LayoutKind:
    fitting = _fitting(info, shape, config, rules)
    if fitting is None:
        return declared or "unknown"
    if declared is not None and any(declared.startswith(kind) for kind in fitting):
        return declared
    # Contradicted by the config's sizes, or of a family not known: sizes decide where they leave no choice.
    # A pair stored (in, out) leaves one: side by side, or taking turns.
    if fitting == {"out_in"} or (fitting == {"in_out"} and info.projection != "gate_up"):
        return "out_in" if fitting == {"out_in"} else "in_out"
    return "unknown"


def _fitting(
    info: TensorInfo, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> set[LayoutKind] | None:
    """The orientations that agree with the config's sizes; None where the config does not give them."""
    hidden = config_int(config, rules.sizes["hidden"])
    rows = config_int(config, rules.sizes["expert_rows"])
    if hidden is None or rows is None:
        return None
    outputs, inputs = (hidden, rows) if info.projection == "down" else (rows, hidden)
    joined = outputs * (2 if info.projection == "gate_up" else 1)
    sides: dict[LayoutKind, tuple[int, int]] = {"out_in": (joined, inputs), "in_out": (inputs, joined)}
    return {kind for kind, side in sides.items() if shape[1:] == side}
