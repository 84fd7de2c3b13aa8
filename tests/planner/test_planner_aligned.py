"""Stages that align experts: what they will write, how a plan reads it, and what cannot be aligned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, write_adapter
from kits.checkpoint_maker import write_checkpoint
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
from kits.plan_maker import Planned, llama, make_recipe

from raymerge.dtypes import DType
from raymerge.errors import PlanError
from raymerge.planner.inputs.sources import AlignSpec, Stage, holdings, open_sources, prepared_of
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.merges import build_plan
from raymerge.planner.moe.expert_permutation import align_stages, aligned_blocks

ALIGNED = {"merge_method": "linear", "align": "experts", "parameters": {"weight": 1}}


def _entry(root: object) -> dict[str, Any]:
    if "+" in str(root):
        return {"model": str(root)}
    return {"model": {"model": str(root), "override_architecture": "Mixture"}}


def _stages(data: Mapping[str, Any], *, version: str = "0") -> list[Stage]:
    recipe = make_recipe(data)
    return align_stages(recipe, open_sources(recipe), version=version)


def _write(root: Path, tensors: Mapping[str, torch.Tensor], family: Family) -> Path:
    return write_checkpoint(root, tensors, family.config)


def _of(*roots: object, **more: Any) -> dict[str, Any]:
    return {**ALIGNED, "models": [_entry(root) for root in roots], **more}


def _planned(data: Mapping[str, Any], steps: Path) -> Planned:
    """The plan of a recipe that reads its stages' results, which are not made."""
    recipe = make_recipe(data)
    sources = list(open_sources(recipe))
    for stage in align_stages(recipe, sources, version="0"):
        assert isinstance(stage.spec, AlignSpec)
        index = stage.spec.other.index
        sources[index] = replace(sources[index], prepared=(prepared_of(stage, steps),))
    return Planned(build_plan(recipe, sources, version="0"), tuple(sources))


def _refusal(data: Mapping[str, Any]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        _stages(data)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two models of DeepSeek's build."""
    one, two = (store(tmp_path / str(seed), make_model(DEEPSEEK, seed), DEEPSEEK) for seed in (1, 2))
    return one, two


class TestStages:
    """What is made before the merge."""

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

    @pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}-{family.layout}")
    def test_the_result_has_all_that_moves_by_canonical_names(self, tmp_path: Path, family: Family) -> None:
        one, two = (store(tmp_path / str(seed), make_model(family, seed), family) for seed in (1, 2))
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
    """How the merge reads what was prepared."""

    @pytest.mark.parametrize("family", [MIXTRAL, FUSED, LLAMA4, DEEPSEEK], ids=lambda family: family.name)
    def test_experts_are_read_from_the_result_and_all_is_accounted_for(
        self, tmp_path: Path, family: Family
    ) -> None:
        one, two = (store(tmp_path / str(seed), make_model(family, seed), family) for seed in (1, 2))
        made = _planned(_of(one, two), tmp_path / "steps")
        made.plan.require()
        assert len(holdings(made.sources)) == 3
        prepared = made.sources[1].prepared[0]
        read = {name for tensor in made.names() for store, name in made.reads(tensor) if store == 2}
        assert read == prepared.tensors.keys()
        for tensor in made.names():
            stores = {store for store, _ in made.reads(tensor)}
            moves = any(word in tensor for word in ("experts", "router", "gate.", ".shared_expert."))
            assert stores == ({0, 2} if moves and ".layers.0.mlp.gate_proj" not in tensor else {0, 1}), tensor
        held = enumerate(holdings(made.sources))
        assert made.fates() == {(index, name) for index, holding in held for name in holding.tensors}
        assert {made.fate(1, name)[:2] for name in made.sources[1].checkpoint.tensors} == {
            ("merged", "method")
        }

    def test_the_result_is_part_of_the_plan_s_digest(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        made = _planned(_of(*pair), tmp_path / "steps")
        (stage,) = _stages(_of(*pair))
        assert made.plan.manifest["sources"][2]["made_by"] == stage.digest

    def test_a_copy_is_one_of_the_result(self, tmp_path: Path) -> None:
        one, two = (store(tmp_path / str(seed), make_model(MIXTRAL, seed), MIXTRAL) for seed in (1, 2))
        source = _entry(two)["model"]
        rule = {"role": "expert", "merge_method": "passthrough", "sources": [source]}
        made = _planned(_of(one, two, methods=[rule]), tmp_path / "steps")
        made.plan.require()
        name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
        assert made.method(name) == "copy"
        assert made.reads(name) == [(2, "model.layers.0.mlp.experts.3.gate_proj.weight")]
        held = enumerate(holdings(made.sources))
        assert made.fates() == {(index, each) for index, holding in held for each in holding.tensors}

    def test_a_fused_tensor_is_not_copied_past_the_result(self, tmp_path: Path) -> None:
        one, two = (store(tmp_path / str(seed), make_model(FUSED, seed), FUSED) for seed in (1, 2))
        source = _entry(two)["model"]
        rule = {"role": "expert", "merge_method": "passthrough", "sources": [source]}
        made = _planned(_of(one, two, methods=[rule]), tmp_path / "steps")
        made.plan.require()
        reads = made.reads("model.layers.0.mlp.experts.gate_up_proj")
        assert {store for store, _ in reads} == {2}
        assert len(reads) == 2 * FUSED.experts

    def test_results_come_behind_adapters(self, tmp_path: Path) -> None:
        one, two = (store(tmp_path / str(seed), make_model(MIXTRAL, seed), MIXTRAL) for seed in (1, 2))
        norm = torch.ones(12, dtype=torch.bfloat16)
        lora = write_adapter(tmp_path / "lora", {f"{PREFIX}model.norm.weight": norm}, lora_config())
        recipe = make_recipe(_of(f"{one}+{lora}", two))
        sources = list(open_sources(recipe))
        (stage,) = align_stages(recipe, sources, version="0")
        sources[1] = replace(sources[1], prepared=(prepared_of(stage, tmp_path / "steps"),))
        resolver = InputResolver(sources, [LogicalTensors(source) for source in sources])
        assert resolver.aligned[1].store == 3
        assert holdings(sources)[3] is sources[1].prepared[0]
        name = "model.layers.1.block_sparse_moe.gate.weight"
        assert resolver.stored(1, name) == (
            3,
            sources[1].prepared[0].tensors["model.layers.1.mlp.gate.weight"],
        )
        assert resolver.stored(1, "model.norm.weight") == (
            1,
            sources[1].checkpoint.tensors["model.norm.weight"],
        )


class TestRefusals:
    """What cannot be aligned is said at once, with its place."""

    def test_slices_set_other_layers_side_by_side(self, tmp_path: Path) -> None:
        one, two = (store(tmp_path / str(seed), make_model(MIXTRAL, seed), MIXTRAL) for seed in (1, 2))
        piece = {"sources": [{**_entry(root), "layer_range": [0, 2]} for root in (one, two)]}
        (said,) = _refusal({**ALIGNED, "slices": [piece]})
        assert "slices: 'align' matches each layer's experts with those of the same layer" in said
        assert "List whole models below 'models', or remove 'align'." in said
        (said,) = _refusal({**ALIGNED, "modules": {"text_decoder": {"slices": [piece]}}})
        assert "modules.text_decoder.slices" in said

    def test_models_without_experts(self, tmp_path: Path) -> None:
        dense = [llama(tmp_path / name) for name in ("a", "b")]
        said = _refusal(_of(*dense))
        assert [
            f"{each} as Mixture: it has no experts that could be aligned." in text
            for each, text in zip(dense, said, strict=True)
        ] == [True, True]

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
        two = _write(tmp_path / "two", tensors, QWEN)
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
        one = _write(tmp_path / "one", {**model, **odd}, QWEN)
        two = _write(tmp_path / "two", model, QWEN)
        (said,) = _refusal(_of(one, two))
        assert "it is not known how 2 tensors would move" in said
        assert "experts.temperature" in said

    def test_an_expert_that_lacks_a_matrix(self, tmp_path: Path) -> None:
        model = stored(make_model(QWEN, 1), QWEN)
        one = _write(tmp_path / "one", model, QWEN)
        del model["model.layers.0.mlp.experts.2.down_proj.weight"]
        two = _write(tmp_path / "two", model, QWEN)
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
        one, two = (store(tmp_path / str(seed), make_model(MIXTRAL, seed), MIXTRAL) for seed in (1, 2))
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
    root = _write(tmp_path / "one", tensors, DEEPSEEK)
    (source,) = open_sources(make_recipe({"merge_method": "passthrough", "models": [_entry(root)]}))
    found = aligned_blocks(source, LogicalTensors(source))
    assert list(found) == ["model.layers.1.mlp", "model.layers.2.mlp"]
    block = found["model.layers.1.mlp"]
    assert not block.strays
    assert not any("shared_expert_gate" in piece.logical for piece in block.pieces(neurons=True))
    assert [len(block.experts), len(block.shared), len(block.router)] == [8, 1, 2]


def test_one_model_alone_has_nothing_to_align_with(tmp_path: Path) -> None:
    root = llama(tmp_path / "a")
    recipe = make_recipe({"merge_method": "passthrough", "models": [{"model": root}], "align": "experts"})
    with pytest.raises(PlanError, match="one model alone"):
        align_stages(recipe, open_sources(recipe), version="0")
