"""The pieces that streaming is made of: calls, buffers, parameters, kept states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.layer_streams import KINDS, make_base, open_base
from kits.model_parents import save
from torch import nn

from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.streamed import keep_states, kept_nbytes
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


class Chain(nn.Module):
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
                case "named":
                    hidden = layer(hidden_states=hidden, masks={"full": mask})
                case "more":
                    hidden = layer(hidden) + 1
                case "shares":
                    hidden = layer(hidden, shared={})
        return hidden


def calls_of(kind: str, hidden: torch.Tensor, *, as_tuple: bool = False) -> tuple[Call, ...]:
    model = Chain(kind)
    found = recorded(lambda: model(hidden), list(model.layers), as_tuple=as_tuple)
    # The layers are themselves again.
    assert model.layers[0](torch.zeros(1, 4)).shape == (1, 4)
    return found


@pytest.mark.parametrize(("kind", "as_tuple"), [("states", False), ("tuple", True), ("named", False)])
def test_calls_of_a_chain(kind: str, as_tuple: bool) -> None:
    hidden = torch.randn(1, 3, 4)
    calls = calls_of(kind, hidden, as_tuple=as_tuple)
    assert is_chain(calls, 2)
    assert not is_chain(calls, 3)
    assert all(call.is_plain and call.hidden is hidden for call in calls)
    assert [call.is_named for call in calls] == [kind == "named"] * 2
    assert len(tensors_of(calls)) == 1


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


def test_a_call_is_made_with_other_states() -> None:
    seen: list[Any] = []

    class Layer(nn.Module):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((args, kwargs))
            return (hidden_states + 1, "weights")

    for is_named in (False, True):
        call = Call(torch.zeros(1, 2, 4), () if is_named else (7,), {"flag": True}, is_named)
        assert torch.equal(call.make(Layer(), torch.ones(1, 2, 4)), torch.full((1, 2, 4), 2.0))
    assert seen == [((7,), {"flag": True}), ((), {"flag": True})]


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


def test_what_has_another_shape_or_name_is_not_found(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "model")
    with Weights(base) as weights:
        finder = ParameterFinder(base, weights, "model.")
        name = "model.layers.0.mlp.up_proj.weight"
        assert finder.find("", name, torch.empty(48, 32)) is not None
        assert finder.find("", name, torch.empty(32, 48)) is None
        assert finder.find("", "model.layers.9.mlp.up_proj.weight", torch.empty(48, 32)) is None
        assert finder.embedding("model.embed_tokens.weight") == "model.embed_tokens.weight"
        assert finder.embedding("model.wte.weight") is None


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


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), width=st.integers(1, 5), spills=st.booleans()
)
def test_states_come_back_as_they_were_put_last(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], width: int, spills: bool
) -> None:
    spill = tmp_path_factory.mktemp("kept")
    with keep_states(lengths, width, spill=spill if spills else None) as states:
        for round_ in range(2):
            for run, length in enumerate(lengths):
                states.put(run, torch.full((length, width), 10.0 * round_ + run))
        assert [path.stat().st_size for path in spill.iterdir()] == [kept_nbytes(lengths, width)] * spills
        for run, length in enumerate(lengths):
            assert torch.equal(states.get(run), torch.full((length, width), 10.0 + run))
    assert not list(spill.iterdir())


def test_states_that_lie_otherwise_in_memory_are_kept_right(tmp_path: Path) -> None:
    turned = torch.arange(6.0).view(2, 3).T
    for spill in (None, tmp_path):
        with keep_states([3], 2, spill=spill) as states:
            states.put(0, turned)
            assert torch.equal(states.get(0), turned)
