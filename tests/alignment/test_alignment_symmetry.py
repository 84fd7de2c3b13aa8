"""What experts compute does not hang on the order of their neurons, and every tensor moves as it must."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.architectures import Projection
from raymerge.dtypes import DType
from raymerge.planner.moe.expert_permutation import Network, Part
from raymerge.stages.alignment import (
    NUM_PROBES,
    activation_of,
    neuron_features,
    outputs,
    probes,
    with_neurons,
)

WIDTH, NEURONS = 6, 5
FORMS = ("gated", "joined", "ungated", "biased")


def _part(kind: Projection, shape: tuple[int, ...], *, is_bias: bool = False) -> Part:
    name = f"e.{kind}_proj.{'bias' if is_bias else 'weight'}"
    return Part(name, name, DType.F32, shape, kind, is_bias)


def _network(form: str) -> Network:
    rows: dict[Projection, int] = {"gate_up": 2 * NEURONS} if form == "joined" else {"up": NEURONS}
    if form in ("gated", "biased"):
        rows["gate"] = NEURONS
    parts = [_part(kind, (size, WIDTH)) for kind, size in rows.items()]
    parts.append(_part("down", (WIDTH, NEURONS)))
    if form == "biased":
        parts += [_part(part.projection, part.shape[:1], is_bias=True) for part in parts]
    return Network(tuple(parts))


def _tensors(network: Network, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {part.logical: torch.randn(part.shape, generator=generator) for part in network.parts}


def _moved(network: Network, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> Any:
    return {part.logical: with_neurons(part, tensors[part.logical], order) for part in network.parts}


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(NEURONS)))
def test_the_order_of_neurons_changes_no_output(form: str, order: list[int]) -> None:
    network = _network(form)
    tensors, inputs = _tensors(network), probes(WIDTH)
    act = torch.nn.functional.silu
    moved = _moved(network, tensors, torch.tensor(order))
    expected = outputs(network, tensors, inputs, act)
    assert expected.shape == (NUM_PROBES, WIDTH)
    torch.testing.assert_close(outputs(network, moved, inputs, act), expected)
    for one, other in zip(neuron_features(network, tensors), neuron_features(network, moved), strict=True):
        assert torch.equal(one[order], other)


def test_outputs_are_those_of_the_definition() -> None:
    network = _network("biased")
    found = _tensors(network)
    weight = {name: found[f"e.{name}_proj.weight"].double() for name in ("gate", "up", "down")}
    bias = {name: found[f"e.{name}_proj.bias"].double() for name in ("gate", "up", "down")}
    inputs = probes(WIDTH)
    gate = torch.relu(inputs @ weight["gate"].T + bias["gate"])
    hidden = gate * (inputs @ weight["up"].T + bias["up"])
    expected = hidden @ weight["down"].T + bias["down"]
    torch.testing.assert_close(outputs(network, found, inputs, torch.relu), expected)


def test_joined_gates_are_the_upper_half() -> None:
    joined, gated = _network("joined"), _network("gated")
    tensors = _tensors(gated)
    rows = torch.cat([tensors["e.gate_proj.weight"], tensors["e.up_proj.weight"]])
    both = {"e.gate_up_proj.weight": rows, "e.down_proj.weight": tensors["e.down_proj.weight"]}
    act = torch.nn.functional.silu
    expected = outputs(gated, tensors, probes(WIDTH), act)
    torch.testing.assert_close(outputs(joined, both, probes(WIDTH), act), expected)


def test_without_a_gate_the_activation_is_on_up() -> None:
    network = _network("ungated")
    tensors, inputs = _tensors(network), probes(WIDTH)
    up = torch.relu(inputs @ tensors["e.up_proj.weight"].double().T).square()
    expected = up @ tensors["e.down_proj.weight"].double().T
    act = activation_of({"mlp_hidden_act": "relu2"})
    torch.testing.assert_close(outputs(network, tensors, inputs, act), expected)


def test_probes_are_fixed_and_of_the_size_that_norms_give() -> None:
    found = probes(4096)
    assert torch.equal(found, probes(4096))
    torch.testing.assert_close(found.square().mean(1), torch.ones(NUM_PROBES, dtype=torch.float64))
    assert float((found @ found.T / 4096 - torch.eye(NUM_PROBES)).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_act": "silu"}, torch.nn.functional.silu),
        ({"hidden_act": "gelu_pytorch_tanh"}, torch.nn.functional.gelu),
        ({"hidden_activation": "relu"}, torch.nn.functional.relu),
        ({"text_config": {"hidden_act": "gelu"}}, torch.nn.functional.gelu),
        ({"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, torch.nn.functional.gelu),
        ({"ffn_config": {"ffn_act_fn": None}}, torch.nn.functional.silu),
        ({"hidden_act": "something new"}, torch.nn.functional.silu),
        ({}, torch.nn.functional.silu),
    ],
)
def test_the_activation_is_the_config_s(config: dict[str, Any], expected: Any) -> None:
    assert activation_of(config) is expected
