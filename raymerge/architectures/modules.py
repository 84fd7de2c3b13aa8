"""The parts of a model that a recipe's ``modules`` can name, by the beginnings of tensor names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raymerge.architectures.layers import Stack
from raymerge.architectures.sections import text_path

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
