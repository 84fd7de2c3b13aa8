"""Base models to be streamed, what is seen of them, and the same seen in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from kits.checkpoint_maker import write_checkpoint
from kits.model_parents import save
from kits.model_types_decoders import DECODERS
from kits.plan_maker import make_recipe
from safetensors.torch import load_file

from raymerge.planner.inputs.sources import Source, open_models
from raymerge.stages.router.prompts import TokenRun
from raymerge.stages.router.work import PROMPTS
from raymerge.stages.streamed_model import LayerStream

Seen = dict[tuple[int, int], torch.Tensor]

KINDS = {kind.name: kind for kind in DECODERS}
BIG = 1 << 40


@dataclass(frozen=True, slots=True)
class Collector:
    hidden: Seen = field(default_factory=dict)
    router_input: Seen = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)

    def layer(self, layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        self.order.append((layer, run))
        self.hidden[layer, run] = hidden[0].clone()
        self.router_input[layer, run] = router_input[0].clone()


def open_base(path: Path | str) -> Source:
    return open_models(
        make_recipe({"merge_method": "passthrough", "models": [{"model": str(path)}]})
    ).require()[0]


def make_base(name: str, root: Path, **config: Any) -> Source:
    save(KINDS[name].build(1, **config), root)
    return open_base(root)


def altered(
    llama: Source, root: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any
) -> Source:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    merged = {**llama.checkpoint.config, **config}
    return open_base(write_checkpoint(root, tensors if tensors is not None else state, merged))


def token_runs(*lengths: int) -> list[TokenRun]:
    chance = torch.Generator().manual_seed(5)
    return [TokenRun(0, 1, tuple(torch.randint(3, 60, (n,), generator=chance).tolist())) for n in lengths]


def batches_of(runs: Sequence[TokenRun]) -> list[torch.Tensor]:
    return [torch.tensor([run.tokens]) for run in runs]


def streamed(base: Source, runs: Sequence[TokenRun], spill: Path, *, budget: int = BIG) -> Collector:
    seen = Collector()
    device = torch.device("cpu")
    LayerStream(base, PROMPTS).read(batches_of(runs), seen.layer, device=device, budget=budget, spill=spill)
    return seen


def whole(name: str, root: Path, runs: Sequence[TokenRun], path: str) -> tuple[Seen, Seen]:
    model = getattr(transformers, KINDS[name].architecture).from_pretrained(
        root, attn_implementation="eager", dtype=torch.float32
    )
    layers = next(
        module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) > 2
    )
    hidden: Seen = {}
    given: Seen = {}
    for run, each in enumerate(runs):
        found: list[torch.Tensor] = []
        hooks = [
            layer.get_submodule(path).register_forward_pre_hook(
                lambda _, args, into=found: into.append(args[0])
            )
            for layer in layers
        ]
        with torch.no_grad():
            states = model.eval()(torch.tensor([each.tokens]), output_hidden_states=True, use_cache=False)
        for hook in hooks:
            hook.remove()
        for layer in range(len(layers)):
            hidden[layer, run] = states.hidden_states[layer][0]
            given[layer, run] = found[layer].reshape(len(each.tokens), -1)
    return hidden, given
