"""What each tensor of a checkpoint is, from its name alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from raymerge.architectures.layers import Stack, layer_of
from raymerge.architectures.rules import Projection, Role, Rules
from raymerge.architectures.sections import text_path

_MOE = frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.ROUTER, Role.ROUTER_BIAS, Role.SHARED_EXPERT_GATE})
_GATED = frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.MLP})
# Expert numbers are path components of their own, or, in the Switch family, part of one.
EXPERT_NUMBER = re.compile(r"(?:^|\.)experts\.(?:expert_)?([0-9]{1,9})(?=\.)")
# What quantisers and bias parameters append to the word that names a fused matrix.
_APPENDED = re.compile(r"_(bias|blocks|scales|scale|scale_inv|packed|qweight)$")


class TensorInfo(NamedTuple):
    """What a tensor's name says."""

    role: Role
    """What it does; every tensor of an MTP layer is MTP, every one of the vision side is VISION."""
    part: Role
    """What it does within its layer, also in MTP layers and the vision side; else equal to ``role``."""
    stack: str
    """Prefix of its layer stack, such as ``model.layers``; "" outside layers."""
    layer: int | None
    """Layer number, from 0; None outside layers."""
    expert: int | None
    """Expert number, from 0; None unless it belongs to one single expert."""
    projection: Projection | None
    """Which matrix of a gated feed-forward network it is, or None."""
    is_bias: bool
    """Whether it is added rather than multiplied."""
    block: str | None
    """Path of the mixture-of-experts block it is stored in; None for other tensors."""


class NameReader:
    """Reads the names of one checkpoint's tensors. What all of them share is looked up once."""

    def __init__(self, rules: Rules, num_layers: int | None = None, *, stacks: Sequence[Stack] = ()) -> None:
        """
        Args:
            rules: those of the checkpoint's family.
            num_layers: layers of the main stack: those at or beyond are multi-token-prediction layers.
            stacks: the checkpoint's stacks. With them a layer number is one exactly where a stack says so,
                and the main stack gives ``num_layers``; without, where the word before the number says so.
        """
        main = next((each for each in stacks if each.is_main), None)
        self._rules = rules
        self._prefixes = frozenset(each.prefix for each in stacks)
        self._main = None if main is None else main.prefix
        self._limit = num_layers if main is None else main.num_layers
        self._experts: dict[tuple[str, str], TensorInfo] = {}

    def describe(self, name: str) -> TensorInfo:
        """What a tensor's name says; of experts that differ in their number alone it is found out once."""
        numbered = EXPERT_NUMBER.search(name)
        if numbered is None:
            return self._describe(name, None)
        key = name[: numbered.start(1)], name[numbered.end(1) :]
        first = self._experts.get(key)
        if first is None:
            first = self._experts[key] = self._describe(name, numbered)
        return first._replace(expert=int(numbered[1]))

    def _describe(self, name: str, numbered: re.Match[str] | None) -> TensorInfo:
        rules, path = self._rules, name.split(".")
        stack, layer = self._layer(name)
        part = Role.EXPERT if numbered else _part(name, rules)
        is_beyond = layer is not None and self._limit is not None and layer >= self._limit
        return TensorInfo(
            role=_role(path, part, rules, beyond=is_beyond and self._main in (None, stack)),
            part=part,
            stack=stack,
            layer=layer,
            expert=int(numbered[1]) if numbered else None,
            projection=_projection(path, rules) if part in _GATED else None,
            is_bias=path[-1] == "bias" or path[-1].endswith("_bias") or part is Role.ROUTER_BIAS,
            block=_block(path, rules) if part in _MOE else None,
        )

    def _layer(self, name: str) -> tuple[str, int | None]:
        """The stack and the number of the layer that a tensor is in."""
        place = layer_of(name)
        if place is None:
            return "", None
        prefix = place[0]
        if self._prefixes:
            is_layer = prefix in self._prefixes
        else:
            is_layer = prefix.rpartition(".")[2] in self._rules.layer_words
        return place if is_layer else ("", None)


def describe(
    name: str, rules: Rules, num_layers: int | None = None, *, stacks: Sequence[Stack] = ()
) -> TensorInfo:
    """What one name says; arguments as of ``NameReader``, which many names of a checkpoint need."""
    return NameReader(rules, num_layers, stacks=stacks).describe(name)


def projection_word(path: Sequence[str], rules: Rules) -> str | None:
    """The word of a name's path that says which projection it is, without what quantisers append."""
    for word in reversed(path):
        plain = word if word in rules.projections or "_" not in word else _APPENDED.sub("", word)
        if plain in rules.projections:
            return plain
    return None


def _part(name: str, rules: Rules) -> Role:
    return next((role for role, pattern in rules.roles if pattern.search(name)), Role.OTHER)


def _role(path: Sequence[str], part: Role, rules: Rules, *, beyond: bool) -> Role:
    if part is Role.BUFFER:
        return part
    if not rules.vision.isdisjoint(path):
        return Role.VISION
    return part if not beyond and rules.mtp.isdisjoint(path) else Role.MTP


def _projection(path: Sequence[str], rules: Rules) -> Projection | None:
    word = projection_word(path, rules)
    return rules.projections[word] if word else None


def _block(path: Sequence[str], rules: Rules) -> str | None:
    places = (index for index, word in enumerate(path) if word in rules.moe_children)
    place = next(places, None)
    return ".".join(path[:place]) if place is not None else None


def joined_matrix(name: str, rules: Rules) -> str | None:
    """The matrix that servers join the weight of a module to, or None: q, k and v, or gate and up, have the
    same one."""
    parent, _, word = name.removesuffix(".weight").rpartition(".")
    joined = rules.joined.get(word)
    return f"{parent}.{joined}" if joined is not None and name.endswith(".weight") else None


DEFAULT = "default"
"""The one module of a model that has no parts."""

# First match wins. The mergers inside Qwen's vision tower project into the text model.
_BESIDE_TEXT = (
    (
        "multi_modal_projector",
        re.compile(r"^(\w+\.)?(multi_modal_projector|mm_projector|vision_projector|connector)\."),
    ),
    ("multi_modal_projector", re.compile(r"^(\w+\.)?visual\.(merger|deepstack_merger_list)\.")),
    ("vision_model", re.compile(r"^(model\.)?vision_model\.")),
    ("vision_tower", re.compile(r"^(\w+\.)?(visual|vision_tower|vision|vision_encoder|image_encoder|vpm)\.")),
    ("audio_tower", re.compile(r"^(\w+\.)?(audio_tower|audio_model|speech_encoder)\.")),
)
_TEXT = "text_decoder"
_ENCODER = re.compile(r"^(\w+\.)?encoder\.")
_SHARED = re.compile(r"^(\w+\.)?shared\.")
_OTHER_SECTIONS = ("vision_config", "audio_config", "visual", "vision_tower_config")


def module_of(name: str, config: Mapping[str, Any], stacks: Sequence[Stack]) -> str:
    """The module a tensor belongs to.

    Models of text and images have ``text_decoder`` (with embeddings and head), ``vision_tower`` or
    ``vision_model``, ``multi_modal_projector`` and ``audio_tower``; encoder-decoders have ``encoder``,
    ``decoder`` (with the head) and ``shared``; all others are one module, ``default``.
    """
    return module_finder(config, stacks)(name)


def module_finder(config: Mapping[str, Any], stacks: Sequence[Stack]) -> Callable[[str], str]:
    """``module_of`` for many names of one model."""
    if _is_multimodal(config, stacks):
        return _beside_text
    return _of_encoder_decoder if _is_encoder_decoder(stacks) else lambda _: DEFAULT


def _beside_text(name: str) -> str:
    return next((module for module, pattern in _BESIDE_TEXT if pattern.match(name)), _TEXT)


def _of_encoder_decoder(name: str) -> str:
    if _SHARED.match(name):
        return "shared"
    return "encoder" if _ENCODER.match(name) else "decoder"


def _is_multimodal(config: Mapping[str, Any], stacks: Sequence[Stack]) -> bool:
    if text_path(config) or any(key in config for key in _OTHER_SECTIONS):
        return True
    prefixes = [f"{stack.prefix}." for stack in stacks]
    return any(pattern.match(prefix) for prefix in prefixes for _, pattern in _BESIDE_TEXT)


def _is_encoder_decoder(stacks: Sequence[Stack]) -> bool:
    words = [stack.prefix.split(".") for stack in stacks]
    return any("encoder" in each for each in words) and any("decoder" in each for each in words)
