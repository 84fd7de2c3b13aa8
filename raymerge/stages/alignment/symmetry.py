"""What an expert computes, whatever the order of its neurons; and its tensors in another order of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from raymerge.architectures import Projection
from raymerge.architectures.sections import text_section
from raymerge.methods import normal
from raymerge.methods.random import random_key
from raymerge.planner.moe.aligned_blocks import Network, Part
from raymerge.stages.alignment.matching import CHUNK

Activation = Callable[[torch.Tensor], torch.Tensor]
"""What is applied to the gate, element by element."""

NUM_PROBES = 16
"""Inputs on which experts are compared. Each gives as many numbers as the model is wide."""

_ACT_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")


def probes(width: int) -> torch.Tensor:
    """The inputs on which experts of a model of this width are compared.

    Returns:
        float64 ``[NUM_PROBES, width]`` on the CPU, normal numbers with a mean square of 1 in each row, as the
        norm before the experts gives; the same in every process.
    """
    count = NUM_PROBES * width
    numbers = normal(random_key(0, "probes of experts", 0), 0, count, torch.device("cpu")).double()
    rows = numbers.view(NUM_PROBES, width)
    return rows / rows.square().mean(1, keepdim=True).sqrt()


def activation_of(config: Mapping[str, Any]) -> Activation:
    """The activation function that a config names; SiLU where it names none that is known.

    It serves to compare: any fixed function is as indifferent to the order of neurons. What families add to
    it (the limits of gpt-oss) is left out for both models alike.
    """
    section = text_section(config)
    ffn = section.get("ffn_config")
    inner = ffn.get("ffn_act_fn") if isinstance(ffn, Mapping) else None
    named = [section.get(key) for key in _ACT_KEYS]
    named.append(inner.get("name") if isinstance(inner, Mapping) else None)
    name = next((str(each) for each in named if each), "silu")
    if name.startswith(("gelu", "quick_gelu")):
        return functional.gelu
    if name in ("relu2", "relu_squared"):
        return lambda values: functional.relu(values).square()
    return functional.relu if name.startswith("relu") else functional.silu


def outputs(
    network: Network, tensors: Mapping[str, torch.Tensor], inputs: torch.Tensor, act: Activation
) -> torch.Tensor:
    """What a network makes of some inputs.

    Args:
        network: the network.
        tensors: its tensors by their logical names, of any float dtype.
        inputs: float64 ``[n, width]`` on the device of the tensors.
        act: its activation function.

    Returns:
        float64 ``[n, width]``; the same for every order of neurons, to rounding.
    """

    def linear(kind: Projection, values: torch.Tensor) -> torch.Tensor:
        weight, bias = network.part(kind), network.part(kind, is_bias=True)
        rows = torch.split(tensors[weight.logical], CHUNK) if weight is not None else ()
        made = torch.cat([values @ each.double().T for each in rows], dim=1)
        return made if bias is None else made + tensors[bias.logical].double()

    if network.part("gate_up") is not None:
        gate, up = linear("gate_up", inputs).chunk(2, dim=1)
        return linear("down", act(gate) * up)
    up = linear("up", inputs)
    is_gated = network.part("gate") is not None
    return linear("down", act(linear("gate", inputs)) * up if is_gated else act(up))


def with_neurons(part: Part, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A network's tensor with its neurons in another order.

    Args:
        part: which tensor it is.
        tensor: its elements in logical shape, in any dtype.
        order: int64 ``[neurons]``, for each place the neuron that comes there.
    """
    if part.projection == "down":
        return tensor if part.is_bias else tensor.index_select(1, order)
    if part.projection == "gate_up":
        order = torch.cat([order, order + part.num_neurons])
    return tensor.index_select(0, order)


def neuron_features(network: Network, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """All that belongs to each neuron: matrices ``[neurons, n]``, alike for networks of one form."""
    found: list[torch.Tensor] = []
    for part in network.parts:
        tensor = tensors[part.logical]
        if part.projection == "down":
            found += [] if part.is_bias else [tensor.T]
        elif part.projection == "gate_up":
            found += [half.view(part.num_neurons, -1) for half in tensor.chunk(2)]
        else:
            found.append(tensor.view(part.num_neurons, -1))
    return found
