"""Tiny models of the families that transformers ships: random weights, and inputs that they can be run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from kits.checkpoint_maker import fields

Inputs = Mapping[str, torch.Tensor]
Info = Mapping[str, Any]

LAYERS = 3
"""Layers of most stacks, so that slices can leave out the first and the last."""
VOCAB = 64
IMAGE = VOCAB - 1
_LENGTH = 8


def text() -> Inputs:
    return {"input_ids": torch.randint(3, VOCAB - 4, (2, _LENGTH), generator=_generator(7))}


def seq2seq() -> Inputs:
    return {**text(), "decoder_input_ids": text()["input_ids"]}


def image(height: int = 16) -> Inputs:
    return {"pixel_values": torch.randn(1, 3, height, 16, generator=_generator(7))}


def text_beside_image() -> Inputs:
    return {"input_ids": text()["input_ids"][:1], **image()}


def image_in_text(num_tokens: int, pixels: Inputs | None = None) -> Inputs:
    row = text()["input_ids"][:1]
    row = torch.cat([row[:, :1], torch.full((1, num_tokens), IMAGE), row[:, 1:]], dim=1)
    return {"input_ids": row, **(image() if pixels is None else pixels)}


def patches_in_text() -> Inputs:
    patches = torch.randn(16, 3 * 2 * 8 * 8, generator=_generator(7))
    inputs = image_in_text(4, {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])})
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}


def sound() -> Inputs:
    return {"input_values": torch.randn(1, 800, generator=_generator(7))}


def spectrogram() -> Inputs:
    frames = torch.randn(1, 8, 20, generator=_generator(7))
    return {"input_features": frames, "decoder_input_ids": text()["input_ids"][:1]}


@dataclass(frozen=True, slots=True)
class ModelType:
    name: str
    architecture: str
    config: Mapping[str, Any]
    groups: frozenset[str]
    inputs: Callable[[], Inputs] = field(default=text)

    def build(self, seed: int, **changes: Any) -> torch.nn.Module:
        config = transformers.AutoConfig.for_model(self.name, **{**self.config, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: torch.nn.Module = getattr(transformers, self.architecture)(config)
        return perturb(model.eval(), seed)

    def load(self, root: Path) -> tuple[torch.nn.Module, Info]:
        model, info = getattr(transformers, self.architecture).from_pretrained(root, output_loading_info=True)
        return model.eval(), info

    def run(self, model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            first: torch.Tensor = next(iter(model(**self.inputs()).values()))
        return first


def perturb(model: torch.nn.Module, seed: int, *, scale: float = 0.05) -> torch.nn.Module:
    generator = _generator(seed)
    changed: set[int] = set()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.data_ptr() not in changed:
            changed.add(tensor.data_ptr())
            tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)
    return model


def model_type(line: str, inputs: Callable[[], Inputs], *, more: str, **config: Any) -> ModelType:
    """``line``: its name, its class and its groups. ``more``: fields of its config, as YAML has them."""
    name, architecture, *groups = line.split()
    return ModelType(name, architecture, {**config, **fields(more)}, frozenset(groups), inputs)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
