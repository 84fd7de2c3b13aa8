"""The pieces that streaming is made of: calls, buffers, parameters, kept states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kits.layer_streams import KINDS, make_base, open_base
from kits.model_parents import save
from torch import nn

from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.streamed import keep_states
from raymerge.stages.router.streamed_model import (
    Call,
    ParameterFinder,
    StreamedModel,
    are_alike,
    compute_buffers,
    is_chain,
    recorded,
    state_of,
    tensors_of,
)

CPU = torch.device("cpu")


# Calls


class MergeJob(nn.Module):
    """Two layers and what a model may do around them."""

    def __init__(self, kind: str = "states") -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.kind = kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 3)
        for layer in self.layers:
            match self.kind:
                case "states":
                    hidden = layer(hidden, mask, scale=2.0)
                case "tuple":
                    hidden = layer(hidden, mask, scale=2.0)[0]
                case "more":
                    hidden = layer(hidden) + 1
                case "shares":
                    hidden = layer(hidden, shared={})
        return hidden


def calls_of(kind: str, hidden: torch.Tensor, *, as_tuple: bool = False) -> tuple[Call, ...]:
    model = MergeJob(kind)
    found = recorded(lambda: model(hidden), list(model.layers), as_tuple=as_tuple)
    # The layers are themselves again.
    assert model.layers[0](torch.zeros(1, 4)).shape == (1, 4)
    return found


@pytest.mark.parametrize(("kind", "as_tuple"), [("states", True), ("tuple", False), ("more", False)])
def test_what_is_no_chain(kind: str, as_tuple: bool) -> None:
    try:
        calls = calls_of(kind, torch.randn(1, 3, 4), as_tuple=as_tuple)
    except TypeError:
        return
    assert not is_chain(calls, 2)


def test_a_mapping_that_layers_could_fill_is_not_plain() -> None:
    assert not calls_of("shares", torch.randn(1, 3, 4))[0].is_plain
    assert not Call(torch.ones(1), (object(),), {}, False).is_plain


def test_calls_are_compared_but_for_the_states() -> None:
    one, other = (calls_of("states", torch.randn(1, 3, 4)) for _ in range(2))
    assert are_alike(one, other)
    for args in ((torch.zeros(3, 3),), (None,), (torch.ones(2, 2),), (torch.ones(3, 3), 1)):
        changed = [Call(call.hidden, args, call.kwargs, False) for call in other]
        assert not are_alike(one, changed)


# Buffers


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("known", torch.zeros(3), persistent=False)
        self.register_buffer("unknown", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("saved", torch.zeros(1))


def _init(module: nn.Module) -> None:
    if isinstance(module, Positions):
        module.get_buffer("known").copy_(torch.arange(3.0))


def test_unsaved_buffers_are_computed_and_others_are_left() -> None:
    with torch.device("meta"):
        part = nn.ModuleDict({"one": Positions(), "layers": Positions()})
    left = compute_buffers(SimpleNamespace(_init_weights=_init), part, but="layers", device=CPU)
    assert left == ["one.unknown"]
    assert part["one"].get_buffer("known").tolist() == [0.0, 1.0, 2.0]
    assert part["one"].get_buffer("saved").is_meta
    assert part["one"].get_parameter("weight").is_meta
    assert part["layers"].get_buffer("known").is_meta


# Parameters


def test_stacked_experts_from_tensors_of_their_own(tmp_path: Path) -> None:
    """transformers stacks what Mixtral's files hold matrix by matrix."""
    model = KINDS["mixtral"].build(1)
    save(model, tmp_path / "model")
    base = open_base(tmp_path / "model")
    state = model.state_dict()
    with Weights(base) as weights:
        finder = ParameterFinder(base, weights, "model.")
        found = [finder.find("", name, tensor) for name, tensor in state.items()]
        parameters = [each for each in found if each is not None]
        assert [each.name for each in parameters] == list(state)
        stacked = {each.name: len(each.parts) for each in parameters if len(each.parts) > 1}
        assert stacked["model.layers.1.mlp.experts.gate_up_proj"] == 8
        assert stacked["model.layers.1.mlp.experts.down_proj"] == 4
        loaded = state_of(parameters, weights, CPU)
        read = sum(each.read_bytes(weights) for each in parameters)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert read == sum(tensor.nbytes for tensor in base.checkpoint.tensors.values())
    assert all(each.nbytes == state[each.name].nbytes for each in parameters)
    assert all(each.loading_nbytes <= 2 * each.nbytes for each in parameters)


# The model


def test_only_the_resident_layer_is_in_memory(tmp_path: Path) -> None:
    base = make_base("gemma3_text", tmp_path / "model")
    with Weights(base) as weights:
        model = StreamedModel(base, weights)
        layers, outside = model._anatomy.layers, model._anatomy.decoder.norm.weight
        with model.opened(CPU):
            assert not model._anatomy.decoder.norm.weight.is_meta
            with model.resident(1, CPU):
                here = [all(not tensor.is_meta for tensor in layer.state_dict().values()) for layer in layers]
                away = [all(tensor.is_meta for tensor in layer.state_dict().values()) for layer in layers]
                assert here == [False, True, False]
                assert away == [True, False, True]
            assert all(tensor.is_meta for layer in layers for tensor in layer.state_dict().values())
        assert outside.is_meta
        assert all(tensor.is_meta for tensor in model._anatomy.decoder.state_dict().values())


def test_bytes_of_masks_grow_with_the_square_of_the_run(tmp_path: Path) -> None:
    base = make_base("gemma3_text", tmp_path / "model")
    with Weights(base) as weights:
        model = StreamedModel(base, weights)
        with model.opened(CPU):
            for length in (1, 5, 20):
                found = tensors_of(model.calls(length, CPU))
                assert model.call_bytes(length) == sum(each.nbytes for each in found)
            assert model.call_bytes(40) > 3 * model.call_bytes(20)


# Kept states


def test_states_that_lie_otherwise_in_memory_are_kept_right(tmp_path: Path) -> None:
    turned = torch.arange(6.0).view(2, 3).T
    for spill in (None, tmp_path):
        with keep_states([3], 2, spill=spill) as states:
            states.put(0, turned)
            assert torch.equal(states.get(0), turned)
