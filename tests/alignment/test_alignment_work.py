"""Experts and neurons matched, whole models aligned, and the stage that does it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors
from kits.marks import one_in
from kits.model_parents import load_as_strictly, save
from kits.model_types import ModelType
from kits.model_types_decoders import SPARSE
from kits.permuted_experts import (
    DEEPSEEK,
    FAMILIES,
    FUSED,
    LLAMA4,
    MIXTRAL,
    QWEN,
    Family,
    make_model,
    moved,
    noisy,
    same_bytes,
    store,
    stored,
)
from kits.plan_maker import make_recipe
from safetensors.torch import load_file

import raymerge
from raymerge.architectures.rules import Projection
from raymerge.dtypes import DType
from raymerge.errors import IncompleteError, NonFiniteError, PlanError
from raymerge.planner.inputs.sources import AlignSpec, Stage, open_models
from raymerge.planner.moe.expert_permutation import Network, Part, align_stages
from raymerge.stages.alignment import (
    EXPERT_STEP,
    NUM_PROBES,
    AlignWork,
    activation_of,
    align_work,
    expert_costs,
    group_order,
    neuron_features,
    order_of,
    outputs,
    probes,
    squared_distances,
    total_cost,
    with_neurons,
)

CPU = torch.device("cpu")


def _untold(nbytes: int) -> None:
    del nbytes


def _stage(*roots: Path, align: object = "experts") -> Stage:
    models = [{"model": {"model": str(root), "override_architecture": "Mixture"}} for root in roots]
    parameters = {"weight": 1}
    recipe = make_recipe(
        {"merge_method": "linear", "models": models, "parameters": parameters, "align": align}
    )
    return align_stages(recipe, open_models(recipe).require(), version="0")[0]


def _pair(tmp_path: Path, family: Family, model: Any, other: Any, **options: Any) -> Stage:
    one, two = (store(tmp_path / name, each, family) for name, each in (("one", model), ("two", other)))
    return _stage(one, two, **options)


def _carried_out(work: AlignWork, staging: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    staging.mkdir()
    for number in reversed(range(work.num_units)):
        read, written = work.unit(number, staging=staging, device=CPU, budget=0, tell=_untold)
        assert read == work.costs()[number]
        assert written > 0
    report = work.conclude(staging)
    return load_file(staging / "model.safetensors"), json.loads(json.dumps(report))["layers"]


@pytest.mark.parametrize("family", [DEEPSEEK, LLAMA4], ids=lambda family: family.name)
def test_the_result_is_the_other_model_in_the_reference_s_order(tmp_path: Path, family: Family) -> None:
    model = make_model(family, 1)
    tuned = noisy(model, 2, 0.1)
    stage = _pair(tmp_path, family, model, moved(tuned, family, 3))
    found, report = _carried_out(align_work(stage), tmp_path / "staging")
    assert same_bytes(found, {name: tuned[name] for name in found})
    missing = tuned.keys() - found.keys()
    assert not any(".experts." in name or ".gate." in name or ".shared" in name for name in missing)
    assert (tmp_path / "staging" / "model.safetensors").stat().st_size == stage.layout.nbytes
    assert [entry["layer"] for entry in report] == list(range(family.dense, family.layers))
    for entry in report:
        assert entry["experts"] == family.experts
        assert entry["experts_moved"] > 0
        assert entry["neurons_moved"] > 0.5
        assert entry["cost_after"] < 0.1 < entry["cost_before"]


def test_a_model_in_order_stays_so(tmp_path: Path) -> None:
    model = make_model(DEEPSEEK, 4)
    stage = _pair(tmp_path, DEEPSEEK, model, noisy(model, 5, 0.05))
    _, report = _carried_out(align_work(stage), tmp_path / "staging")
    assert all(entry["experts_moved"] == entry["neurons_moved"] == 0 for entry in report)
    assert all(entry["cost_after"] == entry["cost_before"] for entry in report)


def test_experts_that_are_all_alike_stay_in_their_places(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 6)
    for name in model:
        if ".experts." in name:
            path, _, rest = name.partition(".experts.")
            model[name] = model[f"{path}.experts.0.{rest.partition('.')[2]}"]
    for layer in range(MIXTRAL.layers):
        gate = f"model.layers.{layer}.mlp.gate.weight"
        model[gate] = model[gate][:1].repeat(MIXTRAL.experts, 1)
    _, report = _carried_out(align_work(_pair(tmp_path, MIXTRAL, model, model)), tmp_path / "staging")
    assert all(entry["experts_moved"] == entry["neurons_moved"] == 0 for entry in report)


def test_groups_are_moved_as_wholes(tmp_path: Path) -> None:
    strangers = make_model(DEEPSEEK, 7), make_model(DEEPSEEK, 8)
    stage = _pair(tmp_path, DEEPSEEK, *strangers)
    found, _ = _carried_out(align_work(stage), tmp_path / "staging")
    rows = strangers[1]["model.layers.1.mlp.gate.weight"]
    order = [
        next(e for e in range(8) if torch.equal(rows[e], row))
        for row in found["model.layers.1.mlp.gate.weight"]
    ]
    assert sorted(order) == list(range(8))
    assert order != sorted(order)
    assert all(order[place] // 2 == order[place + 1] // 2 for place in range(0, 8, 2))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(found[bias], strangers[1][bias][order])
    assert found[bias].dtype is torch.float32


def test_bytes_hang_neither_on_threads_nor_on_the_worker(tmp_path: Path) -> None:
    stage = _pair(tmp_path, MIXTRAL, make_model(MIXTRAL, 11), make_model(MIXTRAL, 12))
    work = align_work(stage)
    _carried_out(work, tmp_path / "first")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        _carried_out(pickle.loads(pickle.dumps(work)), tmp_path / "second")
    finally:
        torch.set_num_threads(threads)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert one == two


def test_a_unit_may_be_done_again(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 13)
    work = align_work(_pair(tmp_path, MIXTRAL, model, moved(model, MIXTRAL, 14)))
    found, report = _carried_out(work, tmp_path / "staging")
    work.unit(0, staging=tmp_path / "staging", device=CPU, budget=0, tell=_untold)
    assert work.conclude(tmp_path / "staging")["layers"] == report
    assert same_bytes(load_file(tmp_path / "staging" / "model.safetensors"), found)


@pytest.mark.parametrize("neurons", [False, True])
def test_it_tells_after_each_expert_what_it_has_read(tmp_path: Path, *, neurons: bool) -> None:
    model = make_model(DEEPSEEK, 19)
    stage = _pair(tmp_path, DEEPSEEK, model, moved(model, DEEPSEEK, 20), align={"neurons": neurons})
    work, told = align_work(stage), list[int]()
    (tmp_path / "staging").mkdir()
    read, _ = work.unit(1, staging=tmp_path / "staging", device=CPU, budget=0, tell=told.append)
    assert told == sorted(set(told))
    assert told[-1] == read == work.costs()[1]
    assert len(told) > 3 * DEEPSEEK.experts
    assert max(late - early for early, late in pairwise([0, *told])) <= read / (2 * DEEPSEEK.experts)


def test_it_ends_when_it_is_told_to(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 21)
    work = align_work(_pair(tmp_path, MIXTRAL, model, model))
    (tmp_path / "staging").mkdir()
    half = work.costs()[0] // 2

    def stop(nbytes: int) -> None:
        if nbytes > half:
            raise IncompleteError("stopped at once.")

    with pytest.raises(IncompleteError):
        work.unit(0, staging=tmp_path / "staging", device=CPU, budget=0, tell=stop)
    assert not (tmp_path / "staging" / "layer-0.json").exists()


@pytest.mark.parametrize("neurons", [False, True])
def test_layers_leave_all_bytes_of_the_result_and_none_twice(tmp_path: Path, *, neurons: bool) -> None:
    model = make_model(DEEPSEEK, 22)
    stage = _pair(tmp_path, DEEPSEEK, model, model, align={"neurons": neurons})
    work = align_work(stage)
    files = [work.files(number) for number in range(work.num_units)]
    ranges = sorted((each.offset, each.end) for left in files for each in left["model.safetensors"])
    assert ranges == sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in stage.layout.tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    reports = [name for left in files for name in left if name != "model.safetensors"]
    assert len(set(reports)) == work.num_units
    _carried_out(work, tmp_path / "staging")
    assert all((tmp_path / "staging" / name).exists() for name in reports)


@pytest.mark.parametrize(("layer", "leaf"), [(0, "gate"), (1, "experts.2.up_proj")])
def test_what_is_not_finite_is_refused_by_name(tmp_path: Path, layer: int, leaf: str) -> None:
    name = f"model.layers.{layer}.mlp.{leaf}.weight"
    model = make_model(MIXTRAL, 15)
    broken = {**model, name: model[name].clone()}
    broken[name][1, 1] = float("nan")
    work = align_work(_pair(tmp_path, MIXTRAL, model, broken))
    (tmp_path / "staging").mkdir()
    with pytest.raises(NonFiniteError, match=r"two.*layers\..*NaN or infinite"):
        work.unit(layer, staging=tmp_path / "staging", device=CPU, budget=0, tell=_untold)


def test_check_refuses_what_planning_would_have_refused(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 17)
    stage = _pair(tmp_path, MIXTRAL, model, model)
    align_work(stage).check()
    fewer = replace(MIXTRAL, experts=5)
    other = store(tmp_path / "fewer", make_model(fewer, 18), fewer)
    recipe = make_recipe({"merge_method": "passthrough", "models": [{"model": str(other)}]})
    assert isinstance(stage.spec, AlignSpec)
    spec = replace(stage.spec, other=open_models(recipe).require()[0])
    with pytest.raises(PlanError, match="another number of experts"):
        align_work(replace(stage, spec=spec)).check()


Matrix = Any


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _square(size: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return st.lists(row, min_size=size, max_size=size)


def _cost(costs: Matrix, order: tuple[int, ...]) -> float:
    return float(sum(costs[place, member] for place, member in enumerate(order)))


def _in_place(order: Any) -> int:
    return sum(place == member for place, member in enumerate(order))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5).flatmap(_square))
def test_the_order_costs_least_and_of_equals_it_leaves_most_in_place(rows: list[list[int]]) -> None:
    costs = np.array(rows, dtype=np.float64)
    order = order_of(costs.copy())
    every = list(permutations(range(len(rows))))
    least = min(_cost(costs, each) for each in every)
    assert total_cost(costs, order) == least
    assert _in_place(order) == max(_in_place(each) for each in every if _cost(costs, each) == least)


@settings(deadline=None, max_examples=30)
@given(_square(4), st.sampled_from([1, 2, 4]))
def test_groups_stay_together_at_least_cost(rows: list[list[int]], groups: int) -> None:
    costs = np.array(rows, dtype=np.float64)
    order = group_order(costs.copy(), groups)
    size = 4 // groups

    def is_whole(each: tuple[int, ...]) -> bool:
        return all(each[i] // size == each[i - i % size] // size for i in range(4))

    assert is_whole(tuple(order))
    assert sorted(order) == [0, 1, 2, 3]
    assert total_cost(costs, order) == min(_cost(costs, e) for e in permutations(range(4)) if is_whole(e))


def test_equals_stay_where_they_are() -> None:
    assert order_of(np.zeros((5, 5))).tolist() == list(range(5))
    assert group_order(np.zeros((6, 6)), 3).tolist() == list(range(6))
    twins = np.array([[0, 0, 4.0], [0, 0, 4.0], [4.0, 4.0, 0]])
    assert order_of(twins).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_distances_are_those_of_the_definition_on_a_grid(dtype: torch.dtype) -> None:
    mine = [torch.randn(6, 300 + i, generator=_generator(i)).to(dtype) for i in range(3)]
    theirs = [torch.randn(6, 300 + i, generator=_generator(9 + i)).to(dtype) for i in range(3)]
    found = squared_distances(list(zip(mine, theirs, strict=True)))
    one, two = torch.cat(mine, 1).double(), torch.cat(theirs, 1).double()
    expected = torch.cdist(one, two).square()
    unit = float((one.square().sum(1).mean() + two.square().sum(1).mean()) / 2) / 2**30
    assert np.array_equal(found, np.rint(found))
    torch.testing.assert_close(torch.from_numpy(found) * unit, expected, rtol=1e-8, atol=1e-6)


def test_equal_rows_are_at_no_distance_and_threads_change_nothing() -> None:
    rows = torch.randn(40, 700, generator=_generator(1))
    mixed = rows[torch.randperm(40, generator=_generator(2))]
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(squared_distances([(rows, mixed)]))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(found[0], found[1])
    assert (found[0].min(axis=1) == 0).all()
    assert squared_distances([(rows * 0, mixed * 0)]).max() == 0


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 24), st.integers(0, 2**20), st.floats(0.0, 0.3))
def test_rows_with_noise_find_their_places(size: int, seed: int, noise: float) -> None:
    generator = _generator(seed)
    rows = torch.randn(size, 200, generator=generator)
    order = torch.randperm(size, generator=generator)
    other = rows + noise * torch.randn(size, 200, generator=generator)
    found = order_of(squared_distances([(rows, other[order])]))
    assert torch.equal(order[torch.from_numpy(found)], torch.arange(size))


class TestExpertCosts:
    """Several features are judged alike, whatever their size."""

    def test_each_feature_counts_by_its_median(self) -> None:
        rows = [torch.randn(5, 50, generator=_generator(seed)) for seed in range(4)]
        plain = expert_costs([(rows[0], rows[1]), (rows[2], rows[3])])
        scaled = expert_costs([(rows[0] * 100, rows[1] * 100), (rows[2], rows[3])])
        assert np.allclose(plain, scaled, rtol=1e-6)
        assert np.median(expert_costs([(rows[0], rows[1])])) == 1.0

    def test_a_feature_in_which_all_are_equal_does_not_count(self) -> None:
        rows = torch.randn(5, 50, generator=_generator(1))
        same = torch.randn(1, 50, generator=_generator(2)).expand(5, 50)
        alone = expert_costs([(rows, rows)])
        assert np.array_equal(expert_costs([(rows, rows), (same, same)]), alone)

    def test_routers_tell_twins_apart(self) -> None:
        experts = torch.randn(2, 50, generator=_generator(1)).repeat_interleave(2, 0)
        router = torch.nn.functional.normalize(torch.randn(4, 8, generator=_generator(2)), dim=1)
        turned = torch.tensor([1, 0, 3, 2])
        costs = expert_costs([(experts, experts), (router, router[turned])])
        assert order_of(costs, step=EXPERT_STEP).tolist() == turned.tolist()

    def test_most_of_them_being_twins_does_not_hide_the_one_that_is_not(self) -> None:
        experts = torch.cat([torch.ones(3, 4), torch.randn(1, 4, generator=_generator(1))])
        costs = expert_costs([(experts, experts[[3, 0, 1, 2]])])
        assert order_of(costs, step=EXPERT_STEP).tolist() == [3, 1, 2, 0]


def _entry(root: Path, **parameters: float) -> dict[str, Any]:
    model = {"model": str(root), "override_architecture": "Mixture"}
    return {"model": model, "parameters": parameters}


def _merge(recipe: Mapping[str, Any], out: Path) -> dict[str, torch.Tensor]:
    plain = json.loads(json.dumps(recipe, default=str))
    return read_tensors(raymerge.submit(plain, out, raymerge.RunOptions(inline=True)).output)


def _linear(*roots: Path, weight: float = 0.5, align: object = "experts") -> dict[str, Any]:
    return {"merge_method": "linear", "align": align, "models": [_entry(r, weight=weight) for r in roots]}


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", one_in(2, FAMILIES), ids=lambda family: f"{family.name}-{family.layout}")
def test_a_model_and_itself_moved_give_the_model(tmp_path: Path, family: Family) -> None:
    model = make_model(family, 1)
    one = store(tmp_path / "one", model, family)
    two = store(tmp_path / "two", moved(model, family, 2), family)
    assert not same_bytes(read_tensors(one), read_tensors(two))
    assert same_bytes(_merge(_linear(one, two), tmp_path / "out"), read_tensors(one))


@pytest.mark.sample(2)
@pytest.mark.parametrize("other", [QWEN, FUSED, LLAMA4], ids=lambda family: family.layout)
def test_layouts_meet(tmp_path: Path, other: Family) -> None:
    other = replace(other, shared="")
    model = make_model(MIXTRAL, 5)
    one = store(tmp_path / "one", model, MIXTRAL)
    two = store(tmp_path / "two", moved(model, MIXTRAL, 6), other)
    assert same_bytes(_merge(_linear(one, two), tmp_path / "out"), stored(model, MIXTRAL))
    back = _merge(_linear(two, one), tmp_path / "back")
    assert same_bytes(back, read_tensors(two))


def test_three_models_with_noise_meet_in_the_first_s_order(tmp_path: Path) -> None:
    family = DEEPSEEK
    model = make_model(family, 7, dtype=torch.float32)
    variants = [noisy(model, seed, 0.1) for seed in range(3)]
    places = [variants[0], *(moved(variant, family, 9 + i) for i, variant in enumerate(variants[1:]))]
    roots = [store(tmp_path / str(i), place, family) for i, place in enumerate(places)]
    merged = _merge(_linear(*roots, weight=1), tmp_path / "out")
    for name, value in stored(model, family).items():
        mean = sum(stored(variant, family)[name].double() for variant in variants) / 3
        torch.testing.assert_close(merged[name].double(), mean, rtol=1e-5, atol=1e-6)
        assert merged[name].dtype == value.dtype


def test_only_experts_are_moved_where_neurons_are_not_wanted(tmp_path: Path) -> None:
    family = DEEPSEEK
    model = make_model(family, 11)
    one = store(tmp_path / "one", model, family)
    two = store(tmp_path / "two", moved(model, family, 12, neurons=False), family)
    recipe = _linear(one, two, align={"neurons": False})
    assert same_bytes(_merge(recipe, tmp_path / "out"), read_tensors(one))
    three = store(tmp_path / "three", moved(model, family, 13, experts=False), family)
    apart = _merge(_linear(one, three, align={"neurons": False}), tmp_path / "apart")
    changed = {name for name, value in apart.items() if not torch.equal(value, read_tensors(one)[name])}
    assert changed
    assert all(".experts." in name or ".shared_experts." in name for name in changed)


def test_dtypes_may_differ_and_the_output_has_the_first_s(tmp_path: Path) -> None:
    model = make_model(DEEPSEEK, 14)
    wide = {name: value.float() for name, value in moved(model, DEEPSEEK, 15).items()}
    one, two = store(tmp_path / "one", model, DEEPSEEK), store(tmp_path / "two", wide, DEEPSEEK)
    assert same_bytes(_merge(_linear(one, two), tmp_path / "out"), read_tensors(one))
    back = _merge(_linear(two, one), tmp_path / "back")
    assert same_bytes(back, read_tensors(two))


def test_taking_the_experts_of_the_second_model_alone_takes_them_in_the_first_s_order(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 18)
    one = store(tmp_path / "one", model, MIXTRAL)
    tuned = noisy(model, 19, 0.05)
    two = store(tmp_path / "two", moved(tuned, MIXTRAL, 20), MIXTRAL)
    source = {"model": str(two), "override_architecture": "Mixture"}
    rule = {"role": "expert", "merge_method": "passthrough", "sources": [source]}
    merged = _merge({**_linear(one, two, weight=1), "methods": [rule]}, tmp_path / "out")
    for name, value in stored(tuned, MIXTRAL).items():
        if ".experts." in name:
            assert torch.equal(merged[name], value), name


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
@settings(deadline=None, max_examples=10)
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


CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "granitemoehybrid": {},
    "dbrx": {},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
}
KINDS = [kind for kind in SPARSE if kind.name in CHANGES]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_are_those_of_the_model_in_its_own_order(tmp_path: Path, kind: ModelType) -> None:
    one, two = (kind.build(seed, **CHANGES[kind.name]) for seed in (1, 2))
    save(one, tmp_path / "one")
    state = save(two, tmp_path / "two")
    _, info = kind.load(tmp_path / "two")
    models = [
        {"model": str(tmp_path / "one"), "parameters": {"weight": 0.0}},
        {"model": str(tmp_path / "two"), "parameters": {"weight": 1.0}},
    ]
    recipe = {"merge_method": "linear", "align": "experts", "models": models}
    raymerge.submit(recipe, tmp_path / "out", raymerge.RunOptions(inline=True))
    moved = load_as_strictly(kind, tmp_path / "out", info)
    experts = [name for name in state if "expert" in name and state[name].dim() > 1]
    found = moved.state_dict()
    assert any(not torch.equal(found[name], state[name]) for name in experts)
    assert all(torch.equal(found[name], state[name]) for name in state if "attn" in name)
    torch.testing.assert_close(kind.run(moved), kind.run(two), rtol=1e-4, atol=1e-5)
