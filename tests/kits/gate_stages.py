"""Stages of router rows over tiny models that can read, and what the whole model says of the same texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import tiny_llama
from kits.layer_streams import open_base
from kits.tokenizer_maker import CHATML_CONFIG, word_level, write_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from raymerge.architectures.moe_targets import AddedTensor
from raymerge.checkpoints.header import TensorSpec
from raymerge.device_numerics import torch_threads
from raymerge.dtypes import DType
from raymerge.planner.inputs.sources import RESULT_FILE, ExpertPrompts, GateSpec, Source, Stage, make_stage
from raymerge.stages.router.work import gate_work

CPU = torch.device("cpu")
VOCABULARY = 64
WIDTH = 32
LAYERS = 3
SPECIAL = 3

States = tuple[list[torch.Tensor], list[torch.Tensor]]
"""By layer: what the layer is given, and what its feed-forward network is given; float64 ``[T, WIDTH]``."""


def reading_base(root: Path, *, seed: int = 1, layers: int = LAYERS, width: int = WIDTH) -> Source:
    tiny_llama(root, seed, layers=layers, hidden=width, vocab=VOCABULARY, dtype=torch.float32, scale=0.3)
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(SPECIAL, VOCABULARY))]
    write_tokenizer(root, word_level(words, added=["<s>", "</s>"]), CHATML_CONFIG)
    return open_base(root)


def text(*words: int) -> str:
    return " ".join(f"w{number}" for number in words)


def random_texts(seed: int, *lengths: int, low: int = SPECIAL, high: int = VOCABULARY) -> tuple[str, ...]:
    chance = torch.Generator().manual_seed(seed)
    return tuple(text(*torch.randint(low, high, (n,), generator=chance).tolist()) for n in lengths)


def tokens_of(prompt: str) -> tuple[int, ...]:
    return (1, *(int(word[1:]) for word in prompt.split()))


def expert(name: str, *positive: str, **more: Any) -> ExpertPrompts:
    return ExpertPrompts(name, positive, **more)


def three_experts(*, negative: bool = False) -> tuple[ExpertPrompts, ...]:
    ranges = ((3, 23), (23, 43), (43, 64))
    texts = [random_texts(at, 5, 9, 7, low=low, high=high) for at, (low, high) in enumerate(ranges)]
    others = [texts[at - 1] if negative else () for at in range(3)]
    return tuple(ExpertPrompts(f"expert {at}", texts[at], others[at]) for at in range(3))


def stage_of(
    base: Source,
    mode: str,
    experts: Sequence[ExpertPrompts],
    *,
    shared: Sequence[ExpertPrompts] = (),
    constants: Sequence[AddedTensor] = (),
    layers: Iterable[int] = range(LAYERS),
    width: int = WIDTH,
    **changes: Any,
) -> Stage:
    settings = {"seed": 0, "scale": 1.0, "penalty": 0.1} | changes
    numbers = tuple(layers)
    spec = GateSpec(
        base, mode, tuple(experts), tuple(shared), numbers, width, constants=tuple(constants), **settings
    )
    tensors = [TensorSpec(f"router.{layer}", DType.F32, (len(experts), width)) for layer in numbers]
    if shared:
        tensors += [TensorSpec(f"shared_gate.{layer}", DType.F32, (len(shared), width)) for layer in numbers]
    tensors += [TensorSpec(each.name, each.dtype, each.shape) for each in constants]
    return make_stage(
        name="rows", title="router rows", place="recipe.yml:3:1", spec=spec, tensors=tensors, version="0"
    )


@dataclass(frozen=True, slots=True)
class Made:
    tensors: dict[str, torch.Tensor]
    report: dict[str, Any]
    data: bytes
    num_units: int


def make(stage: Stage, staging: Path, *, backwards: bool = False, device: torch.device = CPU) -> Made:
    staging.mkdir(parents=True, exist_ok=True)
    work = gate_work(stage)
    work.check()
    numbers, budget = range(work.num_units), max(work.least_budget(), 1 << 20)
    with torch_threads(1):
        for number in reversed(numbers) if backwards else numbers:
            work.unit(number, staging=staging, device=device, budget=budget, tell=lambda _: None)
        told = work.conclude(staging)
    report = json.loads(json.dumps(told))
    path = staging / RESULT_FILE
    return Made(load_file(path), report, path.read_bytes(), len(numbers))


class WholeModel:
    def __init__(self, base: Source) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(base.checkpoint.root, dtype=torch.float32)
        self._model = model.eval()
        self._seen: dict[str, States] = {}

    @property
    def embedding(self) -> torch.Tensor:
        found: torch.Tensor = self._model.get_input_embeddings().weight.detach().double()
        return found

    def read(self, prompt: str) -> States:
        if prompt not in self._seen:
            self._seen[prompt] = self._read(prompt)
        return self._seen[prompt]

    def _read(self, prompt: str) -> States:
        given: list[torch.Tensor] = []
        hooks = [
            layer.mlp.register_forward_pre_hook(lambda _, args: given.append(args[0][0].double()))
            for layer in self._model.model.layers
        ]
        with torch.no_grad():
            found = self._model(torch.tensor([tokens_of(prompt)]), output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        return [states[0].double() for states in found.hidden_states[:LAYERS]], given
