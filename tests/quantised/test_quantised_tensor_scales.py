"""Formats with one scale for a whole matrix: FP8 by tensor and NVFP4, merged and written back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.marks import slow_but
from kits.memory_meter import AllocationMeter
from kits.merge_cases import INLINE, Family, digests, merge, recipes
from kits.quantised_merges import (
    Maker,
    Merge,
    changed_bytes,
    check_merged,
    check_stored_alike,
    config_of,
    entries,
    linear,
    merge_cases,
    merged_values,
    plain_twin,
    read_numbers,
    slerp,
)
from kits.quantised_models import QuantisedModel
from kits.quantised_numbers import Values
from kits.segment_bench import Bench, counted_buffers, make_bench, tiles_of
from kits.tensor_scaled_models import EXPERTS, JOINED, ODD, fp8_llama, fp8_mixture, nvfp4_llama
from safetensors.torch import load_file, save_file

from raymerge.api import AuditOptions, audit, plan, submit, verify
from raymerge.errors import NonFiniteError
from raymerge.events import Event, SegmentDone, Started
from raymerge.execute.ops import Jobs
from raymerge.merge_plan import segments
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.plan import input_bytes
from raymerge.options import RunOptions
from raymerge.planner.explain import explain
from raymerge.planner.inputs.sources import open_sources
from raymerge.recipes import parse_recipe

MAKERS: Mapping[str, Maker] = {"FP8": fp8_llama, "NVFP4": nvfp4_llama}


@pytest.fixture(scope="module", params=MAKERS)
def parents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """A base and two more of its kind."""
    root = tmp_path_factory.mktemp("parents")
    return [MAKERS[request.param](root / name, seed) for seed, name in enumerate(("base", "one", "two"))]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """Two with fused experts, of which each matrix holds gate and up."""
    root = tmp_path_factory.mktemp("mixtures")
    return [fp8_mixture(root / name, seed) for seed, name in enumerate("ab")]


def _linear(*models: QuantisedModel, **more: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": entries(models, [0.5] * len(models)), **more}


@pytest.mark.parametrize("method", ["linear", "slerp", "ties"])
def test_a_merge_is_the_merge_of_what_the_parents_mean(
    method: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Each number is the nearest that codes with its scales can be."""
    recipe, count, expected = merge_cases(parents)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    check_merged(tmp_path / "out", merged_values(parents[:count], expected), parents)
    assert verify(tmp_path / "out").problems == ()


# Scales of inputs, keys and values


def _inputs(root: Path) -> dict[str, float]:
    """The scale of the inputs of every matrix, of NVFP4 what they are divided by."""
    stored = read_tensors(root)
    return {name: float(stored[name]) for name in stored if re.search(r"\.input_(global_)?scale$", name)}


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_scales_of_inputs_are_those_of_the_largest(
    method: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """One that is too small cuts off what is larger. What is divided by one has the smallest."""
    recipe, count, _ = merge_cases(parents)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    before = [_inputs(parent.root) for parent in parents[:count]]
    most = min if next(iter(before[0])).endswith("global_scale") else max
    expected = {name: most(each[name] for each in before) for name in before[0]}
    assert len(expected) == 7
    assert any(each != expected for each in before)
    assert _inputs(tmp_path / "out") == expected
    (note,) = [
        each for each in plan({"merge_method": method, **recipe}).manifest["notes"] if "inputs" in each
    ]
    assert note.startswith("7 scales of inputs and of cached keys and values are not merged as weights")
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems


def test_what_is_joined_has_the_scale_of_the_largest_inputs(tmp_path: Path) -> None:
    """Also where a rule takes one of the joined matrices from one parent alone."""
    one, other = (fp8_llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    block = "model.layers.0.mlp"
    _edit(one.root, {f"{block}.{word}_proj.input_scale": torch.tensor([3.0]) for word in ("gate", "up")})
    _edit(other.root, {f"{block}.{word}_proj.input_scale": torch.tensor([5.0]) for word in ("gate", "up")})
    rule = {"glob": "*.up_proj.*", "merge_method": "passthrough", "sources": [str(one.root)]}
    merge({**_linear(one, other), "methods": [rule]}, tmp_path / "out")
    found = _inputs(tmp_path / "out")
    assert (found[f"{block}.gate_proj.input_scale"], found[f"{block}.up_proj.input_scale"]) == (5.0, 5.0)


@pytest.mark.parametrize("method", ["linear", "ties", "passthrough"])
def test_scales_of_cached_keys_and_values_are_no_weights(method: str, tmp_path: Path) -> None:
    models = [fp8_llama(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for number, model in enumerate(models):
        config = config_of(model.root)
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        (model.root / "config.json").write_text(json.dumps(config))
        _add(
            model.root, {f"{_CACHE}.k_scale": (0.5, 0.25, 2.0)[number], f"{_CACHE}.v_scale": 1.0 - number / 4}
        )
    recipe, count, _ = merge_cases(models)[method if method != "passthrough" else "linear"]
    if method == "passthrough":
        recipe, count = {"models": [{"model": str(models[1].root)}]}, 0
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    have = [float(found[f"{_CACHE}.{word}_scale"]) for word in "kv"]
    assert have == {0: [0.25, 0.75], 2: [0.5, 1.0], 3: [2.0, 1.0]}[count]


_CACHE = "model.layers.0.self_attn"
_WORDS = (
    *("self_attn.o_proj.output_scale", "self_attn.qkv_proj.output_scale", "mlp.down_proj.output_scale"),
    *("self_attn.prob_output_scale", "mlp.act_scale", "mlp.experts.down_proj_input_scale"),
)


@pytest.mark.parametrize("make", [*MAKERS.values(), None])
def test_no_scale_that_quantisers_write_of_what_is_computed_is_a_weight(
    make: Maker | None, tmp_path: Path
) -> None:
    """The same words in a model that declares no quantisation are weights, which are merged."""
    models = [(make or fp8_llama)(tmp_path / name, seed) for seed, name in enumerate("ab")]
    if make is None:
        models = [plain_twin(model, tmp_path / f"{model.root.name} plain") for model in models]
    for model, scale in zip(models, (0.5, 2.0), strict=True):
        _add(model.root, {f"model.layers.0.{word}": scale for word in _WORDS})
        _add(model.root, {"model.layers.0.mlp.output_global_scale": scale, "model.norm.layer_scale": scale})
    merge(_linear(*models), tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    expected = dict.fromkeys(_WORDS, 2.0) | {"mlp.output_global_scale": 0.5}
    expected = dict.fromkeys(expected, 1.25) if make is None else expected
    assert {word: float(found[f"model.layers.0.{word}"]) for word in expected} == expected
    assert float(found["model.norm.layer_scale"]) == 1.25


def _add(root: Path, scales: Mapping[str, float]) -> None:
    """Add scales to a checkpoint, in its first file."""
    index_file, file = root / "model.safetensors.index.json", "model.safetensors"
    if index_file.exists():
        index = json.loads(index_file.read_text())
        file = min(index["weight_map"].values())
        index["weight_map"] |= dict.fromkeys(scales, file)
        index_file.write_text(json.dumps(index))
    added = {name: torch.tensor(value) for name, value in scales.items()}
    save_file({**load_file(root / file), **added}, root / file, metadata={"format": "pt"})


def _edit(root: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give tensors of a checkpoint other numbers."""
    for file in root.glob("*.safetensors"):
        held = load_file(file)
        save_file({**held, **{n: tensors[n] for n in held if n in tensors}}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_merged_with_itself_is_itself(kind: str, tmp_path: Path) -> None:
    """To the last byte of codes, of scales and of the one scale."""
    same = [MAKERS[kind](tmp_path / f"same{number}", 1).root for number in range(4)]
    asked_of = recipes(Family(same[0], tuple(same[1:])))
    for method in ("linear", "slerp", "ties", "nuslerp"):
        # Linear's recipe asks for another dtype.
        asked = {key: value for key, value in asked_of[method].items() if key != "dtype"}
        merge(asked, tmp_path / method)
        check_stored_alike(tmp_path / method, same[0])
        assert changed_bytes(tmp_path / method, same[0]) == set(), method


def test_what_one_parent_gives_is_its_bytes(parents: list[QuantisedModel], tmp_path: Path) -> None:
    base, one, _ = parents
    rule = {"role": "mlp", "merge_method": "passthrough", "sources": [str(one.root)]}
    merge({**_linear(base, one), "methods": [rule]}, tmp_path / "out")
    foreign = changed_bytes(tmp_path / "out", one.root)
    assert not {name for name in foreign if ".mlp." in name}
    assert {name for name in foreign if ".self_attn." in name}


# What servers join


_ODD = f"model.layers.0.self_attn.{ODD}"


def _divisors(root: Path) -> dict[str, float]:
    stored = read_tensors(root)
    return {name: float(each) for name, each in stored.items() if name.endswith(".weight_global_scale")}


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_what_shares_a_scale_of_nvfp4_shares_it_afterwards(method: str, tmp_path: Path) -> None:
    """Otherwise servers that join q, k and v, or gate and up, would take the scale of one for all."""
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("abc")]
    merge({"merge_method": method, **merge_cases(models)[method][0]}, tmp_path / "out")
    before, after = _divisors(models[0].root), _divisors(tmp_path / "out")
    assert len({after[name] for name in after if any(word in name for word in JOINED)}) == 1
    assert {name for name in before if before[name] != after[name]} == {f"{_ODD}.weight_global_scale"}
    assert after[f"{_ODD}.weight_global_scale"] == 16 * before[f"{_ODD}.weight_global_scale"]


def _scaled(model: QuantisedModel, word: str, factor: float) -> None:
    """Make the numbers of a matrix so many times as large, by its one scale alone."""
    name = f"model.layers.0.{word}"
    scale = read_tensors(model.root)[f"{name}.weight_global_scale"]
    _edit(model.root, {f"{name}.weight_global_scale": scale / factor})
    values: dict[str, Any] = dict(model.values)
    values[f"{name}.weight"] = values[f"{name}.weight"] * factor
    object.__setattr__(model, "values", values)


@pytest.mark.parametrize(
    ("word", "method"), [("mlp.gate_proj", "linear"), ("mlp.up_proj", "ties"), ("self_attn.k_proj", "slerp")]
)
def test_a_matrix_that_outgrows_its_scale_takes_what_it_is_joined_with_along(
    word: str, method: str, tmp_path: Path
) -> None:
    """A server that takes the scale of one for all of them reads the same numbers."""
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for model in models[1:]:
        _scaled(model, word, 64.0)
    recipe, count, expected = merge_cases(models)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models[:count], expected), models)
    after = {name.removeprefix("model.layers.0."): each for name, each in _divisors(tmp_path / "out").items()}
    before = _divisors(models[0].root)[f"model.layers.0.{word}.weight_global_scale"]
    for group in (("mlp.gate_proj", "mlp.up_proj"), tuple(f"self_attn.{each}_proj" for each in "qkv")):
        scales = {after[f"{each}.weight_global_scale"] for each in group}
        assert len(scales) == 1
        assert (scales != {before}) == (word in group)
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems


def test_what_is_read_again_for_a_shared_scale_is_in_the_plan(tmp_path: Path) -> None:
    """At most so much: rows of one group that lie in one segment are looked at together."""
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("ab")]
    recipe = {"merge_method": "linear", "models": entries(models, (1, 1))}
    events: list[Event] = []
    submit(recipe, tmp_path / "out", options=INLINE, on_event=events.append)
    made = plan(recipe)
    said = explain(made, open_sources(parse_recipe(json.dumps(recipe))), project(made, 1 << 30))
    read = sum(each.read_bytes for each in events if isinstance(each, SegmentDone))
    assert input_bytes(made).sum() < read <= said.read_bytes


def test_copies_of_two_parents_are_encoded_under_one_scale(tmp_path: Path) -> None:
    """Each would come with a scale of its own."""
    one, other = (nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    for word in ("q_proj", "k_proj", "v_proj"):
        _scaled(other, f"self_attn.{word}", 64.0)
    rule = {"glob": "*.k_proj.*", "merge_method": "passthrough", "sources": [str(other.root)]}
    recipe = {"merge_method": "linear", "models": entries([one, other], (1, 0)), "methods": [rule]}
    merge(recipe, tmp_path / "out")
    after = _divisors(tmp_path / "out")
    attention = {each for name, each in after.items() if re.search(r"\.[qkv]_proj\.", name)}
    assert len(attention) == 1
    found = read_numbers(tmp_path / "out")["model.layers.0.self_attn.k_proj.weight"]
    assert np.array_equal(found.values, other.values["model.layers.0.self_attn.k_proj.weight"])
    rule["sources"] = [str(one.root)]
    merge(recipe, tmp_path / "same")
    assert not changed_bytes(tmp_path / "same", one.root) - _inputs(one.root).keys()


def test_a_scale_of_nvfp4_that_no_longer_serves_is_divided_by_a_power_of_16(tmp_path: Path) -> None:
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("ab")]
    twice = {"merge_method": "linear", "models": entries(models, (1, 1)), "parameters": {"normalize": False}}
    merge(twice, tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models, lambda pair: np.stack(pair).sum(0)[None]), models)
    before, after = _divisors(models[0].root), _divisors(tmp_path / "out")
    del before[f"{_ODD}.weight_global_scale"]
    assert {name: after[name] for name in before} == {name: scale / 16 for name, scale in before.items()}


# Other formats


@pytest.mark.parametrize("is_lead", [True, False])
def test_it_merges_with_bfloat16(is_lead: bool, parents: list[QuantisedModel], tmp_path: Path) -> None:
    twin = plain_twin(parents[1], tmp_path / "twin")
    models = [parents[0], twin] if is_lead else [twin, parents[0]]
    merge(_linear(*models), tmp_path / "out")
    assert ("quantization_config" in config_of(tmp_path / "out")) == is_lead
    check_merged(tmp_path / "out", merged_values(models, linear(1, 1)), models)


def test_numbers_become_codes_where_the_lead_has_codes(parents: list[QuantisedModel], tmp_path: Path) -> None:
    """What comes from a parent in bfloat16 has no scale that could be kept."""
    base, twin = parents[0], plain_twin(parents[1], tmp_path / "twin")
    rule = {"role": "mlp", "merge_method": "passthrough", "sources": [str(twin.root)]}
    merge({**_linear(base, twin), "methods": [rule]}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", base.root)
    own, mean = merged_values([twin], linear(1)), merged_values([base, twin], linear(1, 1))
    expected = {name: (own if ".mlp." in name else mean)[name] for name in base.values}
    check_merged(tmp_path / "out", expected, [base, twin])


# Fused experts


def _experts(values: Values, name: str) -> list[Values]:
    """The matrices of fused experts: gate and up, or down."""
    halves = 2 if name.endswith("gate_up_proj") else 1
    return [part for expert in values for part in np.split(expert, halves)]


@pytest.mark.parametrize(("method", "expected"), [("linear", linear(0.5, 0.5)), ("slerp", slerp(0.4))])
def test_each_fused_matrix_has_its_own_scale(
    method: str, expected: Merge, mixtures: list[QuantisedModel], tmp_path: Path
) -> None:
    one, other = mixtures
    slerped = {"base_model": str(one.root), "models": [{"model": str(other.root)}], "parameters": {"t": 0.4}}
    merge(_linear(one, other) if method == "linear" else {"merge_method": "slerp", **slerped}, tmp_path / "o")
    check_stored_alike(tmp_path / "o", one.root)
    found, stored = read_numbers(tmp_path / "o"), read_tensors(tmp_path / "o")
    for name in one.quantised:
        assert len(set(stored[f"{name}_scale"].flatten().tolist())) == EXPERTS
        pairs = zip(_experts(one.values[name], name), _experts(other.values[name], name), strict=True)
        wanted = [expected(pair)[0] for pair in pairs]
        have, steps = (_experts(part, name) for part in (found[name].values, found[name].steps))
        for mean, values, step in zip(wanted, have, steps, strict=True):
            assert np.all(np.abs(mean - values) <= step / 2 * (1 + 1e-4) + 1e-7), name


def test_fused_matrices_are_converted_part_by_part(mixtures: list[QuantisedModel], tmp_path: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(mixtures[0].root)}]}
    merge({**recipe, "dtype": "bfloat16"}, tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    for name, values in mixtures[0].values.items():
        assert torch.equal(found[name], torch.from_numpy(values).float().bfloat16()), name


# However it is run

_SIZES = {f"model.layers.0.mlp.{word}_proj.weight": (256, 512) for word in ("gate", "up")}
_SIZES["model.norm.weight"] = (32,)
_TIGHT, _WIDE = 1 << 20, 64 << 20
_OBJECTS = 128 << 10
"""Bytes of Python's own objects, which are counted too."""


@pytest.fixture(scope="module", params=MAKERS)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """Parents with a matrix that a small lane does not hold."""
    root, make = tmp_path_factory.mktemp("large"), {"FP8": fp8_llama, "NVFP4": nvfp4_llama}[request.param]
    return [make(root / name, seed, shapes=_SIZES) for seed, name in enumerate("abc")]


def _made(recipe: Mapping[str, Any], root: Path, budget: int) -> tuple[Bench, int]:
    """A bench that was run, and the most tiles that one of its rows has."""
    bench = make_bench(recipe, root, budget=budget)
    rows = [row for segment in bench.segments for row in Jobs(bench.plan).rows(segment)]
    for segment in bench.segments:
        bench.runner.run(segment)
    tiles = [tile.row.index for tile in tiles_of(rows, bench.projection.lane.budget)]
    return bench, max(map(tiles.count, tiles))


@pytest.mark.parametrize("name", ["ties", "itself"])
def test_tiles_change_no_byte(name: str, large: list[QuantisedModel], tmp_path: Path) -> None:
    """The one scale is that of the whole matrix: it is chosen before the first code is made."""
    itself = _linear(large[0], large[0])
    recipe = itself if name == "itself" else {"merge_method": name, **merge_cases(large)[name][0]}
    whole, one = _made(recipe, tmp_path / "whole", _WIDE)
    tiled, several = _made(recipe, tmp_path / "tiled", _TIGHT)
    assert (one, several > 1) == (1, True)
    assert dict(whole.written()) == dict(tiled.written())
    if name == "itself":
        stored = {key: bytes(each.view(-1).view(torch.uint8).numpy()) for key, each in _stored(large[0])}
        assert {key: bytes(each) for key, each in tiled.written()} == stored


@pytest.mark.parametrize("name", slow_but(["linear", "ties"], "ties"))
def test_no_more_is_in_use_than_was_stated(name: str, large: list[QuantisedModel], tmp_path: Path) -> None:
    recipe = {"merge_method": name, **merge_cases(large)[name][0]}
    for budget in (_WIDE, _TIGHT):
        # Once unmeasured: what is compiled when it is first needed is no part of what was stated.
        bench, _ = _made(recipe, tmp_path / f"{budget}", budget)
        with counted_buffers() as buffers, AllocationMeter() as meter:
            for segment in bench.segments:
                bench.runner.run(segment)
        assert meter.peak_bytes + buffers.most <= bench.projection.peak + _OBJECTS


def _stored(model: QuantisedModel) -> list[tuple[str, torch.Tensor]]:
    return list(read_tensors(model.root).items())


def test_threads_and_segments_change_no_byte(
    parents: list[QuantisedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"merge_method": "ties", **merge_cases(parents)["ties"][0]}
    merge(recipe, tmp_path / "one", RunOptions(inline=True, threads=1))
    monkeypatch.setattr(segments, "_segment_target", lambda _: 1)
    merge(recipe, tmp_path / "two", RunOptions(inline=True, threads=2))
    assert {f: d for f, d in digests(tmp_path / "one").items() if f.endswith(".safetensors")} == {
        f: d for f, d in digests(tmp_path / "two").items() if f.endswith(".safetensors")
    }


def test_a_scale_that_a_power_cut_took_is_made_again(
    parents: list[QuantisedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in another segment's bytes than the one that makes it."""
    monkeypatch.setattr(segments, "_segment_target", lambda _: 1)
    recipe = _linear(*parents[:2])
    merge(recipe, tmp_path / "whole")
    done = 0

    def abort(event: Event) -> None:
        nonlocal done
        done += isinstance(event, SegmentDone)
        if done == 12:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        submit(recipe, tmp_path / "out", INLINE, on_event=abort)
    (staging,) = tmp_path.glob(".out.raymerge-*")
    lines = (staging / "raymerge" / "ledger.jsonl").read_text().splitlines()[1:]
    made = {int(row) for line in lines for row in json.loads(line)["receipt"]["digests"]}
    rows, shards = plan(recipe)["rows"].to_pylist(), plan(recipe)["shards"].column("name").to_pylist()
    scale = next(rows[row["tensor_scale"]] for row in rows if row["tensor_scale"] in made)
    with (staging / f"{shards[scale['shard']]}.part").open("r+b") as file:
        file.seek(scale["offset"])
        file.write(b"lost")
    merged = merge(recipe, tmp_path / "out")
    assert merged.of(Started)[0].done_segments == len(lines) - 1
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_blamed(value: float, tmp_path: Path) -> None:
    models = [fp8_llama(tmp_path / name, seed, shapes=_SIZES) for seed, name in enumerate("ab")]
    name = "model.layers.0.mlp.up_proj.weight_scale"
    (file,) = [each for each in sorted(models[1].root.glob("*.safetensors")) if name in load_file(each)]
    save_file({**load_file(file), name: torch.tensor([value])}, file, metadata={"format": "pt"})
    data = file.read_bytes()
    byte = data.index(torch.tensor([value]).numpy().tobytes())
    with pytest.raises(NonFiniteError, match=rf"here first at byte {byte} of {file.name}"):
        merge(_linear(*models), tmp_path / "out")
