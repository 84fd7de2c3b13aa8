"""Mixtures of experts built from dense models, and stages that align experts, as they are planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, write_adapter
from kits.checkpoint_maker import llama_config, llama_shapes, write_checkpoint
from kits.marks import one_in
from kits.permuted_experts import (
    DEEPSEEK,
    FAMILIES,
    FUSED,
    GPT_OSS,
    GRANITE,
    LLAMA4,
    MIXTRAL,
    QWEN,
    Family,
    make_model,
    store,
    stored,
)
from kits.plan_maker import Planned, header_checkpoint, llama, llama_specs, make_recipe, planned_merge
from kits.recipe_maker import one

from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.memory import project
from raymerge.planner.inputs.sources import AlignSpec, GateSpec, Stage, holdings, open_models, prepared_of
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.merges import build_plan
from raymerge.planner.moe.expert_permutation import align_stages, aligned_blocks


def _good(root: Path, data: dict[str, Any]) -> Planned:
    made = planned_merge(root, data)
    made.plan.require()
    _assert_all_told(made)
    return made


def _assert_all_told(made: Planned) -> None:
    held = enumerate(holdings(made.sources))
    assert made.fates() == {(index, name) for index, holding in held for name in holding.tensors}


def _refusals(root: Path, data: dict[str, Any]) -> list[str]:
    try:
        return [str(problem) for problem in planned_merge(root, data).plan.problems]
    except PlanError as error:
        return [str(problem) for problem in error.problems]


def _mixture(root: Path, **more: Any) -> dict[str, Any]:
    base, one, two = (llama(root / name) for name in ("base", "one", "two"))
    experts = [{"source_model": one}, {"source_model": two}]
    return {"base_model": base, "gate_mode": "random", "experts": experts, **more}


def test_a_mixture_of_two_llamas_is_a_mixtral(tmp_path: Path) -> None:
    made = _good(tmp_path, _mixture(tmp_path))
    block = "model.layers.1.block_sparse_moe"
    assert made.reads(f"{block}.experts.1.w1.weight") == [(2, "model.layers.1.mlp.gate_proj.weight")]
    assert made.reads(f"{block}.experts.0.w2.weight") == [(1, "model.layers.1.mlp.down_proj.weight")]
    assert made.reads(f"{block}.experts.0.w3.weight") == [(1, "model.layers.1.mlp.up_proj.weight")]
    assert made.reads(f"{block}.gate.weight") == [(3, "router.1")]
    assert made.dtype(f"{block}.gate.weight") == "BF16"
    assert made.reads("model.layers.1.self_attn.q_proj.weight") == [
        (0, "model.layers.1.self_attn.q_proj.weight")
    ]
    assert not any(".mlp." in name for name in made.names())
    assert made.config["model_type"] == "mixtral"
    assert (made.config["num_local_experts"], made.config["num_experts_per_tok"]) == (2, 2)
    assert made.method(f"{block}.experts.1.w1.weight") == "copy"


def test_every_source_tensor_has_its_reason(tmp_path: Path) -> None:
    made = _good(tmp_path, _mixture(tmp_path))
    up = "model.layers.0.mlp.up_proj.weight"
    assert made.fate(1, up) == ("copied", "expert", "model.layers.0.block_sparse_moe.experts.0.w3.weight")
    assert made.fate(0, up)[:2] == ("dropped", "replaced_by_experts")
    assert made.fate(2, "model.layers.0.self_attn.q_proj.weight")[:2] == ("dropped", "only_experts_taken")
    assert made.fate(0, "lm_head.weight")[0] == "copied"
    assert made.fate(3, "router.0")[:2] == ("converted", "stage")


def test_copies_are_read_once_and_written_each(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    data["experts"] = [{"source_model": data["base_model"], "copies": 8, "residual_scale": 0.5}]
    made = _good(tmp_path, data)
    rows = made.plan["ops"].to_pylist()
    name = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
    (first,) = made.rows(name.format(0))
    assert first["copy_of"] == -1
    for expert in range(1, 8):
        (row,) = made.rows(name.format(expert))
        assert rows[row["copy_of"]] == first
    assert made.settings(name.format(0))["sources"] == [{"scale": 0.5}]
    assert made.plan["tensors"].num_rows == 3 + 3 * 6 + 3 * 3 * 8 + 3


def test_noise_and_neurons_drawn_anew_differ_from_copy_to_copy(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    data["experts"] = [{"source_model": data["base_model"], "copies": 2, "reinit_fraction": 0.5}]
    made = _good(tmp_path, data)
    keys: dict[int, set[float]] = {}
    for expert in range(2):
        for projection in ("w1", "w2", "w3"):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{projection}.weight"
            (said,) = made.settings(name)["sources"]
            assert made.method(name) == "upcycle"
            assert said["neuron_axis"] == (1 if projection == "w2" else 0)
            keys.setdefault(expert, set()).add(said["neuron_key"])
    assert all(len(each) == 1 for each in keys.values())
    assert keys[0] != keys[1]


def test_granularity_cuts_neurons_and_repeats_router_rows(tmp_path: Path) -> None:
    made = _good(tmp_path, _mixture(tmp_path, granularity=2, experts_per_token=1))
    block = "model.layers.0.block_sparse_moe"
    shapes = dict(zip(made.names(), made.plan["tensors"].column("shape").to_pylist(), strict=True))
    assert shapes[f"{block}.experts.3.w1.weight"] == [32, 32]
    assert shapes[f"{block}.experts.3.w2.weight"] == [32, 32]
    assert shapes[f"{block}.gate.weight"] == [4, 32]
    assert made.config["intermediate_size"] == 32
    assert (made.config["num_local_experts"], made.config["num_experts_per_tok"]) == (4, 2)
    assert made.settings(f"{block}.experts.3.w2.weight")["sources"] == [{"scale": 2.0}]
    assert made.method(f"{block}.experts.1.w1.weight") == "copy"


def test_a_shared_expert_may_be_a_model_that_is_nothing_else(tmp_path: Path) -> None:
    data = _mixture(tmp_path, architecture="qwen")
    other = llama(tmp_path / "other")
    data["shared_experts"] = [{"source_model": other, "residual_scale": 0.1}]
    made = _good(tmp_path, data)
    block = "model.layers.0.mlp"
    shapes = dict(zip(made.names(), made.plan["tensors"].column("shape").to_pylist(), strict=True))
    assert made.reads(f"{block}.shared_expert.up_proj.weight") == [(3, "model.layers.0.mlp.up_proj.weight")]
    assert shapes[f"{block}.shared_expert_gate.weight"] == [1, 32]
    assert shapes[f"{block}.gate.weight"] == [2, 32]
    assert shapes["model.layers.0.self_attn.q_proj.bias"] == [32]
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == [16]


def test_models_that_fit_no_family_are_refused_family_by_family(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    wide = header_checkpoint(tmp_path / "wide", llama_specs(hidden=64), llama_config(hidden=64))
    data["experts"][1]["source_model"] = wide
    (told,) = _refusals(tmp_path, data)
    assert "no family" in told
    assert "wide" in told
    assert "64" in told
    data["experts"][1]["source_model"] = data["base_model"]
    data["shared_experts"] = [{"source_model": data["base_model"], "copies": 1}] * 2
    data["architecture"] = "q"
    found = _refusals(tmp_path, data)
    assert any(each.count("Qwen2-MoE") and "2 shared experts" in each for each in found)
    assert any("Qwen3-MoE" in each for each in found)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "mixtrall"}, "mixtrall"),
        ({"architecture": "qwen"}, "shared"),
        ({"granularity": 3}, "64"),
    ],
)
def test_what_cannot_be_built_says_why(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    assert any(words in each for each in _refusals(tmp_path, {**_mixture(tmp_path), **change}))


def test_prompt_files_that_cannot_be_read_are_all_told(tmp_path: Path) -> None:
    data = _mixture(tmp_path, gate_mode="ridge")
    (tmp_path / "empty.txt").write_text(" \n")
    data["experts"][0]["prompt_file"] = tmp_path / "absent.txt"
    data["experts"][1]["prompt_file"] = tmp_path / "empty.txt"
    found = _refusals(tmp_path, data)
    assert any("absent.txt cannot be read" in each for each in found)
    assert any("empty.txt is empty" in each for each in found)
    data["experts"][0]["prompt_file"] = "~nobody-of-that-name/x.txt"
    assert any("~nobody-of-that-name/x.txt cannot be read" in each for each in _refusals(tmp_path, data))


def test_prompts_change_the_plan_and_not_its_shape(tmp_path: Path) -> None:
    data = _mixture(tmp_path, gate_mode="hidden")
    for number, expert in enumerate(data["experts"]):
        expert["positive_prompts"] = [f"text {number}"]
    first = _good(tmp_path, data)
    data["experts"][0]["positive_prompts"] = ["other text"]
    second = _good(tmp_path, data)
    assert first.plan.digest != second.plan.digest
    assert first.plan["tensors"] == second.plan["tensors"]


def test_mixed_dtypes_are_written_in_the_bases(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    config = llama_config(dtype=torch.float32)
    tensors = {name: torch.zeros(shape) for name, shape in llama_shapes(config).items()}
    data["experts"][0]["source_model"] = write_checkpoint(tmp_path / "wide", tensors, config)
    made = _good(tmp_path, data)
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert (made.dtype(name), made.method(name)) == ("BF16", "passthrough")
    assert made.fate(1, "model.layers.0.mlp.gate_proj.weight")[0] == "converted"


def _qwen2(root: Path, said: dict[str, Any]) -> Path:
    shapes = llama_shapes(llama_config())
    biases = {
        f"model.layers.{n}.self_attn.{p}_proj.bias": (32 if p == "q" else 16,)
        for n in range(3)
        for p in "qkv"
    }
    config = {**llama_config(), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    header_checkpoint(root, {n: (DType.BF16, s) for n, s in {**shapes, **biases}.items()}, config)
    (root / "tokenizer_config.json").write_text(json.dumps(said))
    return root


@pytest.mark.parametrize(
    "said", one_in(2, ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", None])
)
def test_a_tokenizer_is_loaded_as_that_of_the_base(tmp_path: Path, said: str | None) -> None:
    base = _qwen2(tmp_path / "base", {"pad_token": "é", **({"tokenizer_class": said} if said else {})})
    data = {"base_model": base, "gate_mode": "random", "experts": [{"source_model": base, "copies": 2}]}
    made = _good(tmp_path, {**data, "architecture": "qwen2_moe", "shared_experts": [{"source_model": base}]})
    files = {row["name"]: json.loads(row["content"]) for row in made.plan["files"].to_pylist()}
    if said == "PreTrainedTokenizerFast":
        assert files == {"tokenizer_config.json": {"pad_token": "é", "tokenizer_class": "Qwen2Tokenizer"}}
        assert any("names Qwen2Tokenizer" in note for note in made.plan.manifest["notes"])
    else:
        assert not files


@pytest.mark.parametrize("file", one_in(2, ["tokenizer.json", "config.json"]))
def test_a_stage_is_another_one_where_the_tokenizer_or_the_config_is(tmp_path: Path, file: str) -> None:
    data = _mixture(tmp_path)
    place = tmp_path / "base" / file
    place.write_text(place.read_text() if place.exists() else "{}")
    before = _good(tmp_path, data).sources[0].prepared[0].stage.digest
    changed = json.loads(place.read_text()) | {"rms_norm_eps": 0.5}
    place.write_text(json.dumps(changed))
    assert _good(tmp_path, data).sources[0].prepared[0].stage.digest != before


def test_a_prompt_file_is_an_ordinary_file_and_its_mark_no_text(tmp_path: Path) -> None:
    data = _mixture(tmp_path, gate_mode="ridge")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfsome text")
    data["experts"][0]["prompt_file"] = tmp_path / "marked.txt"
    for file in ("/dev/zero", "."):
        data["experts"][1]["prompt_file"] = file
        assert any(f"{file} is no ordinary file" in each for each in _refusals(tmp_path, data))
    (tmp_path / "plain.txt").write_text("other text")
    data["experts"][1]["prompt_file"] = tmp_path / "plain.txt"
    spec = _good(tmp_path, data).sources[0].prepared[0].stage.spec
    assert isinstance(spec, GateSpec)
    assert [each.text for each in spec.experts] == ["some text", "other text"]


HIDDEN = 2048
WIDTH = 2 * HIDDEN
MATRIX_NBYTES = 4 * HIDDEN * WIDTH
RUN_NBYTES = 8 << 20
RUN_ELEMENTS = 1 << 20
LEAST = 80 << 20


def _parent(root: Path) -> Path:
    """Headers alone of a Llama of one layer, in float32."""
    config = {**llama_config(hidden=HIDDEN, layers=1), "torch_dtype": "float32"}
    return header_checkpoint(root, llama_specs(1, dtype=DType.F32, hidden=HIDDEN), config)


def _wide_mixture(root: Path, **more: Any) -> dict[str, Any]:
    one, two = _parent(root / "one"), _parent(root / "two")
    experts = [{"source_model": one}, {"source_model": two}]
    return {"base_model": one, "gate_mode": "random", "experts": experts, **more}


def _shared(root: Path, *settings: dict[str, Any]) -> dict[str, Any]:
    data = _wide_mixture(root, architecture="glm4_moe")
    models = [each["source_model"] for each in data["experts"]]
    data["shared_experts"] = [{"source_model": m, **s} for m, s in zip(models, settings, strict=True)]
    return data


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_pieces_of_a_down_projection_are_read_a_few_rows_at_a_time(tmp_path: Path, layout: str) -> None:
    made = _good(tmp_path, _wide_mixture(tmp_path, granularity=4, layout=layout))
    assert project(made.plan, 1).least_budget <= LEAST
    is_fused = layout == "fused"
    block = "model.layers.0.mlp" if is_fused else "model.layers.0.block_sparse_moe"
    name = f"{block}.experts.down_proj" if is_fused else f"{block}.experts.3.w2.weight"
    first = [made.inputs(row)[0] for row in made.rows(name)]
    read = [(each["offset"], each["offset"] + each["nbytes"]) for each in first]
    assert all(stop - start <= RUN_NBYTES for start, stop in read)
    assert len(read) == MATRIX_NBYTES // RUN_NBYTES * (8 if is_fused else 1)
    assert all(before[1] == after[0] for before, after in pairwise(read[:2]))
    elements = HIDDEN * WIDTH * 2 if is_fused else HIDDEN * WIDTH // 4
    assert sum(row["num_elements"] for row in made.rows(name)) == elements


def test_down_projections_of_several_shared_experts_are_made_in_runs(tmp_path: Path) -> None:
    made = _good(tmp_path, _shared(tmp_path, {"residual_scale": 0.5}, {"residual_scale": 0.5}))
    assert project(made.plan, 1).least_budget <= LEAST
    name = "model.layers.0.mlp.shared_experts.down_proj.weight"
    rows = made.rows(name)
    assert len(rows) == 2 * HIDDEN * WIDTH // RUN_ELEMENTS
    assert made.settings(name)["sources"] == [{"scale": 0.5}]
    for row in rows:
        one, two = made.inputs(row)
        assert {one["source"], two["source"]} == {0, 1}
        assert one["nbytes"] + two["nbytes"] == 4 * RUN_ELEMENTS
        assert [part["view_offset"] for part in made.parts(row)] == [0, WIDTH]
        assert {tuple(part["view_strides"]) for part in made.parts(row)} == {(2 * WIDTH, 1)}


def test_a_matrix_of_which_chance_is_drawn_is_one_row(tmp_path: Path) -> None:
    data = _wide_mixture(tmp_path, granularity=2)
    data["experts"][0]["noise_scale"] = 0.1
    made = planned_merge(tmp_path, data)
    block = "model.layers.0.block_sparse_moe.experts"
    assert len(made.rows(f"{block}.0.w2.weight")) == 1
    assert len(made.rows(f"{block}.2.w2.weight")) > 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "settings",
    [
        ({}, {"residual_scale": 0.0}),
        ({"residual_scale": 0.5}, {"residual_scale": 0.25}),
        ({"reinit_fraction": 0.25}, {"reinit_fraction": 0.25}),
        ({}, {"noise_scale": 0.1}),
    ],
)
def test_shared_experts_of_settings_of_their_own_are_refused(
    tmp_path: Path, settings: tuple[dict[str, Any], ...]
) -> None:
    made = planned_merge(tmp_path, _shared(tmp_path, *settings))
    (problem,) = made.plan.problems
    assert str(problem).startswith("recipe: shared_experts: 2 shared experts are stored as one network")
    assert "same residual_scale" in problem.remedy
    with pytest.raises(PlanError):
        made.plan.require()


def test_shared_experts_of_equal_settings_are_not_refused(tmp_path: Path) -> None:
    planned_merge(tmp_path, _shared(tmp_path, {"residual_scale": 1}, {"noise_scale": 0})).plan.require()


LINEAR: dict[str, Any] = {"merge_method": "linear", "parameters": {"weight": 0.5}}


def _problems(root: Path, trunk: dict[str, Any]) -> tuple[Problem, ...]:
    return planned_merge(root, _mixture(root, trunk=trunk)).plan.problems


def _rule(root: Path, **selector: Any) -> dict[str, Any]:
    return {
        **LINEAR,
        "methods": [{**selector, "merge_method": "passthrough", "sources": [str(root / "one")]}],
    }


def test_a_rule_of_the_trunk_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, _rule(tmp_path, filter="self_atn"))
    assert problem.where == "recipe: trunk.methods[0]"
    assert "matches no tensor" in problem.what


@pytest.mark.parametrize(
    "selector", one_in(3, [{"role": "mlp"}, {"filter": "down_proj"}, {"glob": "*.2.mlp.*"}])
)
def test_a_rule_about_what_experts_replace_is_refused(tmp_path: Path, selector: dict[str, Any]) -> None:
    (problem,) = _problems(tmp_path, _rule(tmp_path, **selector))
    assert "matches only feed-forward tensors, such as model.layers." in problem.what
    assert "attention" in problem.remedy


def test_a_rule_about_a_whole_layer_is_used_for_the_rest_of_it(tmp_path: Path) -> None:
    made = _good(tmp_path, _mixture(tmp_path, trunk=_rule(tmp_path, layers=[0])))
    assert made.method("model.layers.0.self_attn.q_proj.weight") == "copy"
    assert made.method("model.layers.1.self_attn.q_proj.weight") == "linear"


def _with_rows(root: Path, rows: int) -> Path:
    config = {**llama_config(), "vocab_size": rows}
    specs = {name: (DType.BF16, shape) for name, shape in llama_shapes(config).items()}
    return header_checkpoint(root, specs, config)


def test_another_vocabulary_in_the_trunk_has_a_remedy_that_a_mixture_has(tmp_path: Path) -> None:
    data = _mixture(tmp_path, trunk=LINEAR)
    data["experts"][1]["source_model"] = _with_rows(tmp_path / "longer", 70)
    (problem,) = planned_merge(tmp_path, data).plan.problems
    assert problem.where.endswith("longer")
    assert "2 of its tensors have 70 rows" in problem.what
    assert "lm_head.weight; model.embed_tokens.weight" in problem.what
    assert "embedding_sizes" not in problem.remedy
    assert "'models'" in problem.remedy


def test_another_vocabulary_is_none_of_the_trunks_business_where_it_takes_no_part(tmp_path: Path) -> None:
    data = _mixture(tmp_path, trunk={**LINEAR, "models": [{"model": tmp_path / "one"}]})
    data["experts"][1]["source_model"] = _with_rows(tmp_path / "longer", 70)
    planned_merge(tmp_path, data).plan.require()


def test_a_rule_may_leave_the_vocabulary_to_one_model(tmp_path: Path) -> None:
    rules = [
        {"role": role, "merge_method": "passthrough", "sources": [str(tmp_path / "one")]}
        for role in ("embedding", "head")
    ]
    data = _mixture(tmp_path, trunk={**LINEAR, "methods": rules})
    data["experts"][1]["source_model"] = _with_rows(tmp_path / "longer", 70)
    made = _good(tmp_path, data)
    assert made.reads("model.embed_tokens.weight") == [(1, "model.embed_tokens.weight")]


def test_a_misspelt_parameter_is_one_problem_at_its_place(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, {"merge_method": "linear", "parameters": {"wieght": 0.5}})
    assert problem.where == "recipe: trunk.parameters.wieght"
    assert "Did you mean 'weight'?" in problem.remedy


def test_prompts_that_random_gates_do_not_read_are_told(tmp_path: Path) -> None:
    data = _mixture(tmp_path, trunk=LINEAR)
    silent = planned_merge(tmp_path, data).plan.manifest["notes"]
    data["experts"][0]["negative_prompts"] = ["text"]
    told = "prompts are not read by gate_mode random"
    assert told in planned_merge(tmp_path, data).plan.manifest["notes"]
    assert told not in silent


def test_the_stage_has_a_name_that_no_merge_can_have(tmp_path: Path) -> None:
    names = []
    for more in ({}, {"name": "mixture"}):
        (source, *_) = planned_merge(tmp_path, _mixture(tmp_path, trunk=LINEAR, **more)).sources
        names += [each.stage.name for each in source.prepared]
    assert names == ["@router", "@router-mixture"]


ALIGNED = {"merge_method": "linear", "align": "experts", "parameters": {"weight": 1}}


def _entry(root: object) -> dict[str, Any]:
    if "+" in str(root):
        return {"model": str(root)}
    return {"model": {"model": str(root), "override_architecture": "Mixture"}}


def _stages(data: Mapping[str, Any], *, version: str = "0") -> list[Stage]:
    recipe = make_recipe(data)
    return align_stages(recipe, open_models(recipe).require(), version=version)


def _of(*roots: object, **more: Any) -> dict[str, Any]:
    return {**ALIGNED, "models": [_entry(root) for root in roots], **more}


def _planned(data: Mapping[str, Any], steps: Path) -> Planned:
    """The plan of a recipe that reads its stages' results, which are not made: without a problem."""
    recipe = make_recipe(data)
    sources = list(open_models(recipe).require())
    for stage in align_stages(recipe, sources, version="0"):
        assert isinstance(stage.spec, AlignSpec)
        index = stage.spec.other.index
        sources[index] = replace(sources[index], prepared=(prepared_of(stage, steps),))
    made = Planned(build_plan(recipe, sources, version="0").require(), tuple(sources))
    _assert_all_told(made)
    return made


def _refusal(data: Mapping[str, Any]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        _stages(data)
    return [str(problem) for problem in caught.value.problems]


def _two(root: Path, family: Family) -> tuple[Path, Path]:
    one, two = (store(root / str(seed), make_model(family, seed), family) for seed in (1, 2))
    return one, two


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return _two(tmp_path, DEEPSEEK)


class TestStages:
    def test_every_model_but_the_first_gets_one(self, tmp_path: Path) -> None:
        roots = [store(tmp_path / str(seed), make_model(MIXTRAL, seed), MIXTRAL) for seed in range(3)]
        stages = _stages(_of(*roots))
        specs = [stage.spec for stage in stages if isinstance(stage.spec, AlignSpec)]
        assert [(spec.reference.index, spec.other.index) for spec in specs] == [(0, 1), (0, 2)]
        assert all(spec.layers == (0, 1) and spec.neurons for spec in specs)
        assert len({stage.name for stage in stages}) == 2
        assert all(stage.place.startswith("recipe") for stage in stages)

    def test_the_base_is_the_reference_wherever_it_stands(self, tmp_path: Path) -> None:
        roots = [store(tmp_path / str(seed), make_model(MIXTRAL, seed), MIXTRAL) for seed in range(2)]
        base = _entry(roots[1])["model"]
        (stage,) = _stages(_of(*roots, merge_method="task_arithmetic", base_model=base))
        assert isinstance(stage.spec, AlignSpec)
        assert stage.spec.reference.reference.path == str(roots[1])
        assert stage.spec.other.reference.path == str(roots[0])

    def test_the_digest_hangs_on_all_that_changes_the_result(self, pair: tuple[Path, Path]) -> None:
        digests = {
            _stages(_of(*pair))[0].digest,
            _stages(_of(*pair), version="1")[0].digest,
            _stages(_of(*pair, align={"neurons": False}))[0].digest,
            _stages(_of(*reversed(pair)))[0].digest,
        }
        assert len(digests) == 4
        assert _stages(_of(*pair))[0].digest in digests

    @pytest.mark.parametrize(
        "family", one_in(2, FAMILIES), ids=lambda family: f"{family.name}-{family.layout}"
    )
    def test_the_result_has_all_that_moves_by_canonical_names(self, tmp_path: Path, family: Family) -> None:
        one, two = _two(tmp_path, family)
        (stage,) = _stages(_of(one, two))
        found = {tensor.name: tensor for tensor in stage.layout.tensors}
        model = make_model(family, 2)
        sparse = tuple(f"model.layers.{layer}.mlp." for layer in range(family.dense, family.layers))
        wanted = {name for name in model if name.startswith(sparse)}
        if family is GRANITE:
            # Its shared expert is stored with gate above up, and stays so.
            wanted = {name for name in wanted if "shared_mlp" not in name}
            wanted |= {
                f"{path}shared_mlp.{side}_linear.weight" for path in sparse for side in ("input", "output")
            }
        assert found.keys() == wanted
        for name in wanted & model.keys():
            assert found[name].shape == tuple(model[name].shape)
            assert found[name].dtype is (DType.F32 if model[name].dtype is torch.float32 else DType.BF16)


class TestPlans:
    @pytest.mark.parametrize(
        "family", one_in(2, [FUSED, MIXTRAL, DEEPSEEK, LLAMA4]), ids=lambda family: family.name
    )
    def test_experts_are_read_from_the_result_and_all_is_accounted_for(
        self, tmp_path: Path, family: Family
    ) -> None:
        one, two = _two(tmp_path, family)
        made = _planned(_of(one, two), tmp_path / "steps")
        assert len(holdings(made.sources)) == 3
        prepared = made.sources[1].prepared[0]
        read = {name for tensor in made.names() for store, name in made.reads(tensor) if store == 2}
        assert read == prepared.tensors.keys()
        for tensor in made.names():
            stores = {store for store, _ in made.reads(tensor)}
            moves = any(word in tensor for word in ("experts", "router", "gate.", ".shared_expert."))
            assert stores == ({0, 2} if moves and ".layers.0.mlp.gate_proj" not in tensor else {0, 1}), tensor
        assert {made.fate(1, name)[:2] for name in made.sources[1].checkpoint.tensors} == {
            ("merged", "method")
        }

    def test_the_result_is_part_of_the_plan_s_digest(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        made = _planned(_of(*pair), tmp_path / "steps")
        (stage,) = _stages(_of(*pair))
        assert made.plan.manifest["sources"][2]["made_by"] == stage.digest

    def test_a_copy_is_one_of_the_result(self, tmp_path: Path) -> None:
        one, two = _two(tmp_path, MIXTRAL)
        source = _entry(two)["model"]
        rule = {"role": "expert", "merge_method": "passthrough", "sources": [source]}
        made = _planned(_of(one, two, methods=[rule]), tmp_path / "steps")
        name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
        assert made.method(name) == "copy"
        assert made.reads(name) == [(2, "model.layers.0.mlp.experts.3.gate_proj.weight")]

    def test_a_fused_tensor_is_not_copied_past_the_result(self, tmp_path: Path) -> None:
        one, two = _two(tmp_path, FUSED)
        source = _entry(two)["model"]
        rule = {"role": "expert", "merge_method": "passthrough", "sources": [source]}
        made = _planned(_of(one, two, methods=[rule]), tmp_path / "steps")
        reads = made.reads("model.layers.0.mlp.experts.gate_up_proj")
        assert {store for store, _ in reads} == {2}
        assert len(reads) == 2 * FUSED.experts

    def test_results_come_behind_adapters(self, tmp_path: Path) -> None:
        one, two = _two(tmp_path, MIXTRAL)
        norm = torch.ones(12, dtype=torch.bfloat16)
        lora = write_adapter(tmp_path / "lora", {f"{PREFIX}model.norm.weight": norm}, lora_config())
        recipe = make_recipe(_of(f"{one}+{lora}", two))
        sources = list(open_models(recipe).require())
        (stage,) = align_stages(recipe, sources, version="0")
        sources[1] = replace(sources[1], prepared=(prepared_of(stage, tmp_path / "steps"),))
        resolver = InputResolver(sources, [LogicalTensors(source) for source in sources])
        assert resolver.aligned[1].store == 3
        assert holdings(sources)[3] is sources[1].prepared[0]
        name = "model.layers.1.block_sparse_moe.gate.weight"
        norm_name, moved = "model.norm.weight", sources[1].prepared[0].tensors
        assert resolver.stored(1, name) == (3, moved["model.layers.1.mlp.gate.weight"])
        assert resolver.stored(1, norm_name) == (1, sources[1].checkpoint.tensors[norm_name])


class TestRefusals:
    def test_slices_set_other_layers_side_by_side(self, tmp_path: Path) -> None:
        one, two = _two(tmp_path, MIXTRAL)
        piece = {"sources": [{**_entry(root), "layer_range": [0, 2]} for root in (one, two)]}
        (said,) = _refusal({**ALIGNED, "slices": [piece]})
        assert "slices: 'align' matches each layer's experts with those of the same layer" in said
        assert "List whole models below 'models', or remove 'align'." in said
        (said,) = _refusal({**ALIGNED, "modules": {"text_decoder": {"slices": [piece]}}})
        assert "modules.text_decoder.slices" in said

    def test_models_without_experts(self, tmp_path: Path) -> None:
        dense = [llama(tmp_path / name) for name in ("a", "b")]
        said = _refusal(_of(*dense))
        for each, text in zip(dense, said, strict=True):
            assert f"{each} as Mixture: it has no experts that could be aligned." in text

    def test_another_number_of_experts_and_other_shapes(self, tmp_path: Path) -> None:
        one = store(tmp_path / "one", make_model(MIXTRAL, 1), MIXTRAL)
        fewer = replace(MIXTRAL, experts=4)
        two = store(tmp_path / "two", make_model(fewer, 2), fewer)
        narrow = {
            name: value[:8]
            if name.endswith(("gate_proj.weight", "up_proj.weight"))
            else value[:, :8]
            if ".down_proj" in name
            else value
            for name, value in make_model(MIXTRAL, 3).items()
        }
        three = store(tmp_path / "three", narrow, MIXTRAL)
        first, second = _refusal(_of(one, two, three))
        assert "2 layers have another number of experts than in" in first
        assert "model.layers.0.mlp has 4 here and 6 there" in first
        assert "three" in second
        assert "2 layers have experts of other shapes" in second

    def test_biases_on_one_side_only(self, tmp_path: Path) -> None:
        plain = replace(GPT_OSS, is_biased=False)
        one = store(tmp_path / "one", make_model(GPT_OSS, 1), GPT_OSS)
        two = store(tmp_path / "two", make_model(plain, 2), plain)
        (said,) = _refusal(_of(one, two))
        assert "other biases" in said

    def test_groups_that_differ_or_do_not_fit(self, tmp_path: Path) -> None:
        one = store(tmp_path / "one", make_model(DEEPSEEK, 1), DEEPSEEK)
        two = store(tmp_path / "two", make_model(DEEPSEEK, 2), DEEPSEEK, n_group=2)
        three = store(tmp_path / "three", make_model(DEEPSEEK, 3), DEEPSEEK, n_group=3)
        said = _refusal(_of(one, two, three))
        assert "chooses from 2 group(s) of experts, that of" in said[0]
        assert any("do not make 3 equal groups: model.layers.1.mlp has 8" in text for text in said)

    def test_layers_that_have_no_experts_in_common(self, tmp_path: Path) -> None:
        early = replace(MIXTRAL, layers=2, name="deepseek_v3", layout="each")
        one = store(
            tmp_path / "one",
            make_model(replace(early, layers=4, dense=2), 1),
            replace(early, layers=4, dense=2),
        )
        two = store(tmp_path / "two", make_model(early, 2), early)
        (said,) = _refusal(_of(one, two))
        assert "it has experts in other layers than" in said

    def test_codes(self, tmp_path: Path) -> None:
        one = store(tmp_path / "one", make_model(QWEN, 1), QWEN)
        tensors = stored(make_model(QWEN, 2), QWEN)
        name = "model.layers.0.mlp.experts.3.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
        two = write_checkpoint(tmp_path / "two", tensors, QWEN.config)
        (said,) = [text for text in _refusal(_of(one, two)) if "fp8_block" in text]
        assert f"{name}" in said
        assert "only plain numbers are aligned" in said
        assert "raymerge convert MODEL --to bf16 -o OUT" in said

    def test_tensors_of_which_nobody_knows_how_they_move(self, tmp_path: Path) -> None:
        model = stored(make_model(QWEN, 1), QWEN)
        odd = {
            "model.layers.0.mlp.experts.temperature": torch.ones(6),
            "model.layers.1.mlp.gate.table": torch.ones(3, 5),
        }
        one = write_checkpoint(tmp_path / "one", {**model, **odd}, QWEN.config)
        two = write_checkpoint(tmp_path / "two", model, QWEN.config)
        (said,) = _refusal(_of(one, two))
        assert "it is not known how 2 tensors would move" in said
        assert "experts.temperature" in said

    def test_an_expert_that_lacks_a_matrix(self, tmp_path: Path) -> None:
        model = stored(make_model(QWEN, 1), QWEN)
        one = write_checkpoint(tmp_path / "one", model, QWEN.config)
        del model["model.layers.0.mlp.experts.2.down_proj.weight"]
        two = write_checkpoint(tmp_path / "two", model, QWEN.config)
        assert any("model.layers.0.mlp.experts" in text for text in _refusal(_of(one, two)))

    def test_experts_of_several_dtypes(self, tmp_path: Path) -> None:
        model = make_model(QWEN, 1)
        one = store(tmp_path / "one", model, QWEN)
        for kind in ("gate", "up", "down"):
            name = f"model.layers.0.mlp.experts.2.{kind}_proj.weight"
            model[name] = model[name].float()
        two = store(tmp_path / "two", model, QWEN)
        (said,) = _refusal(_of(one, two))
        assert "the experts of 1 layers are stored in different dtypes: model.layers.0.mlp." in said

    def test_an_adapter_on_experts(self, tmp_path: Path) -> None:
        one, two = _two(tmp_path, MIXTRAL)
        module = "model.layers.0.block_sparse_moe.experts.1.w1"
        factors = factor_tensors(module, (10, 12), 2, torch.Generator().manual_seed(1))
        lora = write_adapter(tmp_path / "lora", factors, lora_config(r=2))
        (said,) = _refusal(_of(one, f"{two}+{lora}"))
        assert "its adapter changes experts or routers" in said
        assert "experts.1.w1" in said
        assert "Merge the adapter into its model first" in said
        assert len(_stages(_of(f"{one}+{lora}", two))) == 1


def test_dense_layers_and_gates_of_shared_experts_are_no_part_of_a_block(tmp_path: Path) -> None:
    tensors = stored(make_model(DEEPSEEK, 1), DEEPSEEK)
    tensors["model.layers.1.mlp.shared_expert_gate.weight"] = torch.ones(1, 12)
    root = write_checkpoint(tmp_path / "one", tensors, DEEPSEEK.config)
    (source,) = open_models(make_recipe({"merge_method": "passthrough", "models": [_entry(root)]})).require()
    found = aligned_blocks(source, LogicalTensors(source))
    assert list(found) == ["model.layers.1.mlp", "model.layers.2.mlp"]
    block = found["model.layers.1.mlp"]
    assert not block.strays
    assert not any("shared_expert_gate" in piece.logical for piece in block.pieces(neurons=True))
    assert [len(block.experts), len(block.shared), len(block.router)] == [8, 1, 2]


def test_one_model_alone_has_nothing_to_align_with(tmp_path: Path) -> None:
    root = llama(tmp_path / "a")
    recipe = make_recipe(one(root, align="experts"))
    with pytest.raises(PlanError, match="one model alone"):
        align_stages(recipe, open_models(recipe).require(), version="0")
