"""The units of an aligning stage: what they write and report, what they refuse, and that they stand alone."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.permuted_experts import (
    DEEPSEEK,
    LLAMA4,
    MIXTRAL,
    Family,
    make_model,
    moved,
    noisy,
    same_bytes,
    store,
)
from kits.plan_maker import make_recipe
from safetensors.torch import load_file

from raymerge.errors import IncompleteError, NonFiniteError, PlanError
from raymerge.planner.inputs.sources import AlignSpec, Stage, open_sources
from raymerge.planner.moe.expert_permutation import align_stages
from raymerge.stages.alignment import AlignWork, align_work

CPU = torch.device("cpu")


def _untold(nbytes: int) -> None:
    del nbytes


def _stage(*roots: Path, align: object = "experts") -> Stage:
    models = [{"model": {"model": str(root), "override_architecture": "Mixture"}} for root in roots]
    parameters = {"weight": 1}
    recipe = make_recipe(
        {"merge_method": "linear", "models": models, "parameters": parameters, "align": align}
    )
    return align_stages(recipe, open_sources(recipe), version="0")[0]


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
    spec = replace(stage.spec, other=open_sources(recipe)[0])
    with pytest.raises(PlanError, match="another number of experts"):
        align_work(replace(stage, spec=spec)).check()
