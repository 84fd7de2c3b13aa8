"""Alignment of experts: each layer is matched by itself and written in the other model's order.

Matching has two stages (arXiv 2509.11348): experts first, by features that do not depend on the order of
neurons; then the neurons of each pair, by their weights. Both are assignments of least total cost. Costs are
float64, rounded to a grid far above the rounding of their sums, so that no choice depends on threads or
devices. Of several best orders, one that moves least is taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.architectures.rules import Projection, text_section
from raymerge.deferred import torch
from raymerge.errors import NonFiniteError, PlanError, Problem
from raymerge.methods import normal
from raymerge.methods.random import random_key
from raymerge.planner.inputs.sources import RESULT_FILE, AlignSpec, Source, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.moe.expert_permutation import (
    AlignedBlock,
    BlockPair,
    Network,
    Part,
    Piece,
    Scores,
    paired_blocks,
)
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

Costs = npt.NDArray[np.float64]
"""Cost of putting a column's member into a row's place; square."""
Order = npt.NDArray[np.intp]

EXPERT_STEP = 2.0**-30
"""Total costs of experts that differ by less are equal."""

CHUNK = 256

# Steps of the grid in the rows' mean squared length.
_GRID = 2.0**30


def order_of(costs: Costs, *, step: float = 1.0) -> Order:
    """The order of least total cost; among equals one that moves least. ``costs``: ``[n, n]``; overwritten.
    ``step``: total costs that differ by less are equal."""
    size = len(costs)
    if not size:
        return np.zeros(0, dtype=np.intp)
    # All places together get less than one step, so that this decides between equals alone.
    costs[np.diag_indices(size)] -= step / (2 * size)
    nearest: Order = costs.argmin(axis=1)
    if len(np.unique(nearest)) == size:
        # Every place has its cheapest member: no assignment costs less.
        return nearest
    # Half a second to load, for those who align.
    from scipy.optimize import linear_sum_assignment

    order: Order = linear_sum_assignment(costs)[1]
    return order


def group_order(costs: Costs, num_groups: int, *, step: float = 1.0) -> Order:
    """As ``order_of``, with groups of neighbours kept together.

    The cost of a pair of groups is the least cost of matching their members."""
    size = len(costs) // num_groups
    between = np.zeros((num_groups, num_groups))
    inside: dict[tuple[int, int], Order] = {}
    for mine in range(num_groups):
        for theirs in range(num_groups):
            part = costs[mine * size : (mine + 1) * size, theirs * size : (theirs + 1) * size]
            order = order_of(part.copy(), step=step)
            inside[mine, theirs] = order
            between[mine, theirs] = part[np.arange(size), order].sum()
    groups = order_of(between, step=step)
    orders = [inside[mine, theirs] + theirs * size for mine, theirs in enumerate(groups)]
    return np.concatenate(orders)


def total_cost(costs: Costs, order: Order) -> float:
    return float(costs[np.arange(len(order)), order].sum())


def expert_costs(features: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Costs:
    """Costs of putting one expert into another's place, by several features of equal weight.

    Squared distances of each feature are divided by their median, then added up. A feature in which all
    experts are equal does not count.

    ``features``: pairs of ``[experts, n]``, of the reference and of the other model; at least one. Returns
    ``[experts, experts]``; totals that differ by less than ``EXPERT_STEP`` are equal."""
    size = len(features[0][0])
    total = np.zeros((size, size))
    for feature in features:
        costs = squared_distances([feature])
        # Where most experts are twins, more than half of the distances are zero.
        usual = float(np.median(costs)) or float(costs.mean())
        total += costs / (usual or 1.0)
    return total


def squared_distances(matrices: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Costs:
    """Squared distances between the rows of two models, summed over several matrices. ``matrices``: pairs of
    ``[n, m]`` on one device, at least one; n is the same for all, m may differ. Returns ``[n, n]`` on the
    CPU, in steps of 2**-30 of the rows' mean squared length: whole numbers."""
    first, second = matrices[0]
    costs = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
    mine, theirs = costs.new_zeros(len(first)), costs.new_zeros(len(second))
    for pair in matrices:
        for begin in range(0, pair[0].shape[1], CHUNK):
            one, two = (each[:, begin : begin + CHUNK].double() for each in pair)
            costs.addmm_(one, two.T, alpha=-2.0)
            mine += one.square().sum(1)
            theirs += two.square().sum(1)
    costs += mine[:, None]
    costs += theirs
    scale = float((mine.mean() + theirs.mean()) / 2)
    rounded: Costs = costs.mul_(_GRID / (scale or 1.0)).round_().clamp_(min=0).cpu().numpy()
    return rounded


Activation: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"

NUM_PROBES = 16
"""Inputs on which experts are compared. Each gives as many numbers as the model is wide."""

_ACT_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")


def probes(width: int) -> torch.Tensor:
    """The inputs on which experts of a model of this width are compared. Returns float64 ``[NUM_PROBES,
    width]`` on the CPU: normal numbers, each row with a mean square of 1 as after the norm before the
    experts; the same in every process."""
    count = NUM_PROBES * width
    numbers = normal(random_key(0, "probes of experts", 0), 0, count, torch.device("cpu")).double()
    rows = numbers.view(NUM_PROBES, width)
    return rows / rows.square().mean(1, keepdim=True).sqrt()


def activation_of(config: Mapping[str, Any]) -> Activation:
    """The activation function of a config; SiLU if it names none that is known.

    It only serves to compare, and any fixed function is independent of the order of neurons. Additions of
    some families (the limits of gpt-oss) are left out for both models alike."""
    section = text_section(config)
    ffn = section.get("ffn_config")
    inner = ffn.get("ffn_act_fn") if isinstance(ffn, Mapping) else None
    named = [section.get(key) for key in _ACT_KEYS]
    named.append(inner.get("name") if isinstance(inner, Mapping) else None)
    name = next((str(each) for each in named if each), "silu")
    if name.startswith(("gelu", "quick_gelu")):
        return torch.nn.functional.gelu
    if name in ("relu2", "relu_squared"):
        return lambda values: torch.nn.functional.relu(values).square()
    return torch.nn.functional.relu if name.startswith("relu") else torch.nn.functional.silu


def outputs(
    network: Network, tensors: Mapping[str, torch.Tensor], inputs: torch.Tensor, act: Activation
) -> torch.Tensor:
    """A network's outputs for some inputs. ``inputs``: float64 ``[n, width]`` on the device of the tensors.
    Returns float64 ``[n, width]``; independent of the order of neurons up to rounding."""

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
    if part.projection == "down":
        return tensor if part.is_bias else tensor.index_select(1, order)
    if part.projection == "gate_up":
        order = torch.cat([order, order + part.num_neurons])
    return tensor.index_select(0, order)


def neuron_features(network: Network, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Features of each neuron: matrices ``[neurons, n]``, comparable between networks of one form."""
    features: list[torch.Tensor] = []
    for part in network.parts:
        tensor = tensors[part.logical]
        if part.projection == "down":
            features += [] if part.is_bias else [tensor.T]
        elif part.projection == "gate_up":
            features += [half.view(part.num_neurons, -1) for half in tensor.chunk(2)]
        else:
            features.append(tensor.view(part.num_neurons, -1))
    return features


# For libraries, and for freed memory that the process keeps.
_SLACK_NBYTES = 128 * 2**20


def align_work(stage: Stage) -> AlignWork:
    assert isinstance(stage.spec, AlignSpec)
    return AlignWork(stage, stage.spec)


class AlignWork:
    """One alignment stage; a unit is a layer. Pickles without open files."""

    def __init__(self, stage: Stage, spec: AlignSpec) -> None:
        self._stage = stage
        self._spec = spec
        pairs, self._problems = paired_blocks(spec)
        self._pairs: Sequence[Sequence[BlockPair]] = [
            [pair for pair in pairs if pair.other.layer == layer] for layer in spec.layers
        ]
        self._placed = {tensor.name: tensor for tensor in stage.layout.tensors}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_weights"}

    @property
    def num_units(self) -> int:
        return len(self._spec.layers)

    def costs(self) -> tuple[int, ...]:
        """Bytes that each layer reads: both models' experts, and again to match neurons and to write."""
        return tuple(sum(self._cost(pair) for pair in pairs) for pairs in self._pairs)

    def least_budget(self) -> int:
        """Bytes for the largest layer: outputs of all experts for the probes, or two experts."""
        return _SLACK_NBYTES + max((_least(pair) for pairs in self._pairs for pair in pairs), default=0)

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        del budget, busy
        return self._stage.layout.nbytes

    def check(self) -> None:
        if self._problems:
            raise PlanError(self._problems)

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Match one layer and write it.

        Takes the memory of ``least_budget``, however large ``budget`` is. ``tell`` is called after each
        expert with the bytes read so far.

        Returns bytes read and written. Raises NonFiniteError: an expert or a router has NaN or infinity."""
        del budget
        layer, written = self._spec.layers[number], 0
        spec, count = self._spec, _Count(tell)
        reports: list[dict[str, Any]] = []
        mine, theirs = self._weights
        with LocalStore(staging) as store, mine, theirs:
            store.create(RESULT_FILE, self._stage.layout.nbytes)
            reference = _Model(spec.reference, mine, device, count)
            other = _Model(spec.other, theirs, device, count)
            for pair in self._pairs[number]:
                matched = _Matched(pair, reference, other, neurons=spec.neurons)
                for name, tensor in matched.tensors():
                    placed, raw = self._placed[name], tensor.contiguous().view(-1).view(torch.uint8)
                    store.write_at(RESULT_FILE, placed.offset, raw.numpy().data)
                    written += placed.nbytes
                reports.append(matched.report(layer))
            store.sync(RESULT_FILE)
            store.write_atomic(_report_key(layer), json.dumps(reports).encode())
        return count.nbytes, written

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        """A layer's files: its tensors' ranges of the result, and its report."""
        names = [
            piece.logical
            for pair in self._pairs[number]
            for piece in pair.other.pieces(neurons=self._spec.neurons)
        ]
        placed = [self._placed[name] for name in names]
        ranges = tuple(Range(tensor.offset, tensor.nbytes) for tensor in placed)
        report = {_report_key(self._spec.layers[number]): ()}
        return {RESULT_FILE: ranges, **report} if ranges else report

    def conclude(self, staging: Path) -> Mapping[str, Any]:
        """Write the header, which completes the file. Returns ``{"reference": NAME, "other": NAME, "layers":
        [...]}``, with the report of ``_Matched`` for each block of experts."""
        layers: list[dict[str, Any]] = []
        with LocalStore(staging) as store:
            store.create(RESULT_FILE, self._stage.layout.nbytes)
            store.write_at(RESULT_FILE, 0, self._stage.layout.header)
            store.sync(RESULT_FILE)
            for layer in self._spec.layers:
                layers += json.loads((staging / _report_key(layer)).read_bytes())
            store.sync_directory()
        return {"reference": self._spec.reference.name, "other": self._spec.other.name, "layers": layers}

    @cached_property
    def _weights(self) -> tuple[Weights, Weights]:
        """Readers of both models, shared by all units: sorting a hundred thousand names takes seconds."""
        return Weights(self._spec.reference), Weights(self._spec.other)

    def _cost(self, pair: BlockPair) -> int:
        neurons, blocks = self._spec.neurons, (pair.reference, pair.other)
        pieces = [*pair.other.pieces(neurons=neurons)]
        for block in blocks:
            pieces += [part for expert in block.experts for part in expert.parts]
            pieces += [scores for scores in (_rows_of(block),) if scores is not None]
            if neurons:
                pieces += [part for each in (*block.experts, *block.shared) for part in each.parts]
        return sum(piece.nbytes for piece in pieces)


@dataclass(slots=True)
class _Count:
    tell: Callable[[int], None]
    nbytes: int = 0

    def add(self, pieces: Sequence[Piece]) -> None:
        self.nbytes += sum(piece.nbytes for piece in pieces)
        self.tell(self.nbytes)


@dataclass(frozen=True, slots=True)
class _Model:
    """One of the two models, whose tensors are loaded as float32 on the device."""

    source: Source
    weights: Weights
    device: torch.device
    count: _Count

    def load(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        """Tensors by logical name; raises NonFiniteError."""
        tensors = {}
        for piece in pieces:
            tensor = self.weights.load(piece.logical, device=self.device)
            if not bool(torch.isfinite(tensor).all()):
                what = f"{piece.stored} has elements that are NaN or infinite"
                remedy = "Take a checkpoint without such elements."
                reason = f"{what}, and nothing can be matched with them."
                raise NonFiniteError(Problem(self.source.name, reason, remedy))
            tensors[piece.logical] = tensor
        self.count.add(pieces)
        return tensors

    def outputs(self, block: AlignedBlock, act: Activation) -> torch.Tensor:
        """What the block's experts make of the probes: float32 ``[experts, probes * width]``."""
        width = _width(block)
        inputs = probes(width).to(self.device)
        made = torch.empty(len(block.experts), NUM_PROBES * width, device=self.device)
        for number, expert in enumerate(block.experts):
            made[number] = outputs(expert, self.load(expert.parts), inputs, act).flatten()
        return made

    def router_rows(self, block: AlignedBlock) -> torch.Tensor | None:
        """Of length 1 each."""
        scores = _rows_of(block)
        return (
            None
            if scores is None
            else torch.nn.functional.normalize(self.load([scores])[scores.logical], dim=1)
        )


class _Matched:
    def __init__(self, pair: BlockPair, reference: _Model, other: _Model, *, neurons: bool) -> None:
        self._pair = pair
        self._reference = reference
        self._other = other
        self._neurons = neurons
        self._shares: list[float] = []
        costs = expert_costs(list(self._features()))
        self._before = float(np.trace(costs))
        self._order = group_order(costs, pair.num_groups, step=EXPERT_STEP)
        self._after = total_cost(costs, self._order)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the result by name, in the stored dtype, read and matched in turn."""
        pair = self._pair
        for place, number in enumerate(self._order):
            # An expert's tensors are written under the names of the place that it takes.
            names = [part.logical for part in pair.other.experts[place].parts]
            yield from self._network(pair.reference.experts[place], pair.other.experts[number], names)
        if self._neurons:
            for mine, theirs in zip(pair.reference.shared, pair.other.shared, strict=True):
                yield from self._network(mine, theirs, [part.logical for part in theirs.parts])
        order = torch.from_numpy(self._order)
        self._other.count.add(pair.other.router)
        for scores in pair.other.router:
            yield scores.logical, self._other.weights.raw(scores.logical).index_select(scores.axis, order)

    def report(self, layer: int) -> dict[str, Any]:
        """Call it after ``tensors`` is exhausted.

        ``block`` is the canonical path of its experts and router, ``neurons_moved`` the share of the neurons
        that changed places (mean over its networks; 0 if they are not matched), ``cost_before`` the distance
        of experts in the same place before (mean over experts, in medians of all distances)."""
        count = len(self._order)
        return {
            "layer": layer,
            "block": self._pair.other.path,
            "experts": count,
            "experts_moved": int((self._order != np.arange(count)).sum()),
            "neurons_moved": sum(self._shares) / len(self._shares) if self._shares else 0.0,
            "cost_before": self._before / count,
            "cost_after": self._after / count,
        }

    def _features(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        pair, reference, other = self._pair, self._reference, self._other
        act = activation_of(reference.source.checkpoint.config)
        yield reference.outputs(pair.reference, act), other.outputs(pair.other, act)
        mine, theirs = reference.router_rows(pair.reference), other.router_rows(pair.other)
        if mine is not None and theirs is not None and mine.shape == theirs.shape:
            yield mine, theirs

    def _network(
        self, mine: Network, theirs: Network, names: Sequence[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        order = self._neuron_order(mine, theirs) if self._neurons else None
        for part, name in zip(theirs.parts, names, strict=True):
            stored = self._other.weights.raw(part.logical)
            yield name, stored if order is None else with_neurons(part, stored, order)
        self._other.count.add(theirs.parts)

    def _neuron_order(self, mine: Network, theirs: Network) -> torch.Tensor:
        features = zip(
            neuron_features(mine, self._reference.load(mine.parts)),
            neuron_features(theirs, self._other.load(theirs.parts)),
            strict=True,
        )
        order: Order = order_of(squared_distances(list(features)))
        self._shares.append(float((order != np.arange(len(order))).mean()))
        return torch.from_numpy(order)


def _width(block: AlignedBlock) -> int:
    down = block.experts[0].part("down")
    return down.shape[0] if down is not None else 0


def _rows_of(block: AlignedBlock) -> Scores | None:
    return next((scores for scores in block.router if scores.are_rows), None)


def _report_key(layer: int) -> str:
    return f"layer-{layer}.json"


def _least(pair: BlockPair) -> int:
    expert = max(sum(part.num_elements for part in each.parts) for each in _networks(pair))
    neurons = max(each.num_neurons for each in _networks(pair))
    router = sum(scores.num_elements for scores in (*pair.reference.router, *pair.other.router))
    width = _width(pair.other)
    made = 2 * len(pair.other.experts) * NUM_PROBES * width * 4
    # Numbers are loaded as float32 from bytes that are about as many; costs are float64.
    first = made + max(2 * expert, 2 * router) * 4 + 8 * CHUNK * width
    return max(first, 3 * expert * 4 + 8 * neurons**2 + 3 * 8 * CHUNK * neurons)


def _networks(pair: BlockPair) -> tuple[Network, ...]:
    return (*pair.other.experts, *pair.other.shared, *pair.reference.shared)
