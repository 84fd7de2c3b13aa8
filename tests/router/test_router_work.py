"""A router's stage: what it makes, what it refuses, and what it reports."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors, write_checkpoint, write_json
from kits.gate_stages import (
    LAYERS,
    SPECIAL,
    VOCABULARY,
    WIDTH,
    Made,
    WholeModel,
    expert,
    make,
    random_texts,
    reading_base,
    stage_of,
    text,
    three_experts,
    tokens_of,
)
from kits.layer_streams import KINDS, altered, make_base, open_base, streamed, token_runs
from kits.marks import slow_but
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaModel

from raymerge.architectures.moe_targets import AddedTensor
from raymerge.device_numerics import torch_threads
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError, PlanError
from raymerge.planner.inputs.sources import ExpertPrompts, Source
from raymerge.stages.router.results import LayerReport, condition_of, gate_report, layer_report
from raymerge.stages.router.work import PROMPTS, gate_work
from raymerge.stages.streamed_model import LayerStream, Shape

STREAMED = ("hidden", "hidden_last", "hidden_avg", "router_input", "centroid", "ridge")
ALL_MODES = (*STREAMED, "cheap_embed", "random", "uniform_random")
EACH_WAY = slow_but(ALL_MODES, "hidden_last", "ridge", "cheap_embed", "random")

Vector = Callable[[str, int], torch.Tensor]
"""One vector of a text at a layer."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return reading_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def whole(base: Source) -> WholeModel:
    return WholeModel(base)


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.div(torch.linalg.vector_norm(vectors, dim=-1, keepdim=True))


def mean_of(prompts: tuple[str, ...], vector: Vector, layer: int) -> torch.Tensor:
    return torch.stack([vector(prompt, layer) for prompt in prompts]).mean(0)


def rows(made: Made, layer: int) -> torch.Tensor:
    return made.tensors[f"router.{layer}"]


@pytest.mark.parametrize("mode", slow_but([*STREAMED, "cheap_embed"], "hidden", "ridge", "cheap_embed"))
def test_an_empty_prompt_is_read_as_the_beginning_alone(
    tmp_path: Path, base: Source, whole: WholeModel, mode: str
) -> None:
    experts = [expert("a", ""), expert("b", text(5, 6, 7), text(8))]
    made = make(stage_of(base, mode, experts), tmp_path)
    first, second = rows(made, 1).double()
    assert torch.isfinite(rows(made, 1)).all()
    assert not torch.allclose(first, second)
    if mode.startswith("hidden"):
        torch.testing.assert_close(first, unit(whole.read("")[0][1][-1]), rtol=2e-4, atol=2e-5)


def assert_rows(made: Made, wanted: Callable[[int], torch.Tensor]) -> None:
    for layer in range(LAYERS):
        torch.testing.assert_close(rows(made, layer).double(), wanted(layer), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mode", ["hidden", "hidden_last", "hidden_avg", "router_input"])
@pytest.mark.parametrize("negative", slow_but([False, True], True))
def test_rows_of_vectors_of_texts(
    tmp_path: Path, base: Source, whole: WholeModel, *, mode: str, negative: bool
) -> None:
    """Those of router inputs are centred."""
    experts = three_experts(negative=negative)
    made = make(stage_of(base, mode, experts), tmp_path)

    def vector(prompt: str, layer: int) -> torch.Tensor:
        states = whole.read(prompt)[mode == "router_input"][layer]
        return states.mean(0) if mode in ("hidden_avg", "router_input") else states[-1]

    def wanted(layer: int) -> torch.Tensor:
        found = torch.stack([mean_of(each.positive, vector, layer) for each in experts])
        if negative:
            found -= torch.stack([mean_of(each.negative, vector, layer) for each in experts])
        return unit(found - found.mean(0) if mode == "router_input" else found)

    assert_rows(made, wanted)


def test_rows_of_centroids_are_means_of_directions(tmp_path: Path, base: Source, whole: WholeModel) -> None:
    experts = three_experts()
    made = make(stage_of(base, "centroid", experts), tmp_path)

    def wanted(layer: int) -> torch.Tensor:
        tokens = [torch.cat([whole.read(each)[1][layer] for each in one.positive]) for one in experts]
        centres = unit(torch.stack([unit(each).mean(0) for each in tokens]))
        return unit(centres - centres.mean(0))

    assert_rows(made, wanted)


def test_rows_of_ridge_are_those_of_least_squares(tmp_path: Path, base: Source, whole: WholeModel) -> None:
    experts = three_experts()
    made = make(stage_of(base, "ridge", experts, penalty=0.2), tmp_path)
    for layer in range(LAYERS):
        tokens = [torch.cat([whole.read(each)[1][layer] for each in one.positive]) for one in experts]
        weights = torch.cat([torch.full((len(each),), 1 / (3 * len(each))) for each in tokens]).double()
        inputs = torch.cat(tokens)
        targets = torch.cat(
            [torch.eye(3).double()[at].expand(len(each), 3) for at, each in enumerate(tokens)]
        )
        penalty = 0.2 * float((weights[:, None] * inputs**2).sum() / WIDTH)
        root = weights.sqrt()[:, None]
        left = torch.cat([root * inputs, penalty**0.5 * torch.eye(WIDTH).double()])
        right = torch.cat([root * (targets - 1 / 3), torch.zeros(WIDTH, 3).double()])
        wanted = torch.linalg.lstsq(left, right).solution.T
        found = rows(made, layer).double()
        factor = float((found * wanted).sum() / wanted.square().sum())
        assert factor > 1
        torch.testing.assert_close(found, wanted * factor, rtol=2e-3, atol=2e-3)


def test_rows_of_cheap_embed(tmp_path: Path, base: Source, whole: WholeModel) -> None:
    experts = three_experts(negative=True)
    work = gate_work(stage_of(base, "cheap_embed", experts))
    made = make(stage_of(base, "cheap_embed", experts), tmp_path)

    def side(prompts: tuple[str, ...]) -> torch.Tensor:
        tokens = [token for prompt in prompts for token in tokens_of(prompt)]
        return unit(whole.embedding[tokens].sum(0))

    wanted = unit(torch.stack([side(each.positive) - side(each.negative) for each in experts]))
    assert_rows(made, lambda _: wanted)
    used = {token for one in experts for prompt in one.positive for token in tokens_of(prompt)}
    assert work.costs() == (len(used) * WIDTH * 4,), "rows that no prompt has are not read"


@pytest.mark.parametrize("mode", ["random", "uniform_random"])
def test_random_rows_need_no_prompts_and_no_tokenizer(tmp_path: Path, *, mode: str) -> None:
    base = reading_base(tmp_path / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / file).unlink()
    experts, shared = [expert("copy")] * 7, [expert("shared")]
    made = make(stage_of(base, mode, experts, shared=shared), tmp_path / "made")
    assert made.tensors["router.0"].shape == (7, WIDTH)
    assert made.tensors["shared_gate.0"].shape == (1, WIDTH)
    every = torch.cat(list(made.tensors.values()))
    assert len({tuple(row) for row in every.tolist()}) == 8 * LAYERS, (
        "copies of one model get rows of their own"
    )
    assert made.report["summary"]["routing"] is None
    again = make(stage_of(base, mode, experts, shared=shared, seed=1), tmp_path / "again")
    assert not torch.equal(again.tensors["router.0"], made.tensors["router.0"])


@pytest.mark.parametrize("mode", EACH_WAY)
def test_scale_is_a_factor_on_routed_rows_alone(tmp_path: Path, base: Source, *, mode: str) -> None:
    experts, shared = three_experts(), [expert("shared", text(5, 50, 30))]
    plain = make(stage_of(base, mode, experts, shared=shared), tmp_path / "plain")
    scaled = make(stage_of(base, mode, experts, shared=shared, scale=4.0), tmp_path / "scaled")
    for name, tensor in plain.tensors.items():
        factor = 4.0 if name.startswith("router") else 1.0
        assert torch.equal(scaled.tensors[name], tensor * factor)


@pytest.mark.parametrize("mode", ["hidden_avg", "centroid", "cheap_embed"])
def test_a_shared_expert_gets_the_row_of_its_own_prompts(tmp_path: Path, base: Source, *, mode: str) -> None:
    experts, own = three_experts(), random_texts(8, 6, 4)
    shared = make(stage_of(base, mode, experts, shared=[expert("s", *own)]), tmp_path / "a")
    alone = make(stage_of(base, mode, [expert("s", *own)]), tmp_path / "b")
    for layer in range(LAYERS):
        torch.testing.assert_close(shared.tensors[f"shared_gate.{layer}"], alone.tensors[f"router.{layer}"])
    without = make(stage_of(base, mode, experts), tmp_path / "c")
    for layer in range(LAYERS):
        torch.testing.assert_close(rows(shared, layer), rows(without, layer))


def test_ridge_gives_a_shared_expert_a_high_logit_on_its_own_text(
    tmp_path: Path, base: Source, whole: WholeModel
) -> None:
    own = random_texts(3, 9, 9, low=43, high=64)
    stage = stage_of(base, "ridge", three_experts(), shared=[expert("s", *own)])
    made = make(stage, tmp_path)
    for layer in range(LAYERS):
        row = made.tensors[f"shared_gate.{layer}"][0].double()
        on_own = torch.cat([whole.read(each)[1][layer] for each in own]) @ row
        on_other = torch.cat([whole.read(each)[1][layer] for each in three_experts()[0].positive]) @ row
        assert float(on_own.mean()) > float(on_other.mean()) + 0.3


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", slow_but(STREAMED, "hidden", "centroid", "ridge"))
def test_units_do_not_matter(
    tmp_path: Path, base: Source, monkeypatch: pytest.MonkeyPatch, *, mode: str
) -> None:
    stage = stage_of(base, mode, three_experts(negative=True), shared=[expert("s", text(4, 9))])
    one = make(stage, tmp_path / "one")
    monkeypatch.setattr("raymerge.stages.router.prompts.UNIT_TOKENS", 20)
    several = make(stage, tmp_path / "several")
    backwards = make(stage, tmp_path / "backwards", backwards=True)
    assert one.num_units == 1
    assert several.num_units > 2
    assert backwards.data == several.data, "the order in which units are done changes nothing"
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(several.tensors[name], tensor, rtol=1e-5, atol=1e-5)
    separations = [each.report["summary"]["separation"] for each in (several, one)]
    assert separations[0] == pytest.approx(separations[1])
    for ours, theirs in zip(several.report["layers"], one.report["layers"], strict=True):
        assert ours["routing"] == theirs["routing"]
        assert ours["margin"] == pytest.approx(theirs["margin"], rel=1e-4)


@pytest.mark.parametrize("mode", EACH_WAY)
def test_the_same_bytes_twice_over_what_was_left_and_after_pickling(
    tmp_path: Path, base: Source, *, mode: str
) -> None:
    stage = stage_of(base, mode, three_experts())
    first = make(stage, tmp_path)
    work = pickle.loads(pickle.dumps(gate_work(stage)))
    work.unit(0, staging=tmp_path, device=torch.device("cpu"), budget=1 << 30, tell=lambda _: None)
    work.conclude(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == first.data
    assert not list(tmp_path.glob("spill*"))


@pytest.mark.parametrize("mode", EACH_WAY)
def test_the_result_is_laid_out_as_planned_with_constants(tmp_path: Path, base: Source, *, mode: str) -> None:
    constants = (AddedTensor("q.bias", DType.BF16, (3,), 0.0), AddedTensor("one", DType.F32, (2, 2), 1.0))
    stage = stage_of(base, mode, three_experts(), constants=constants, layers=(0, 2))
    made = make(stage, tmp_path)
    assert made.data.startswith(stage.layout.header)
    assert len(made.data) == stage.layout.nbytes
    assert made.tensors.keys() == {"router.0", "router.2", "q.bias", "one"}
    assert torch.equal(made.tensors["q.bias"], torch.zeros(3, dtype=torch.bfloat16))
    assert torch.equal(made.tensors["one"], torch.ones(2, 2))
    assert [each["layer"] for each in made.report["layers"]] == [0, 2]


def test_layers_do_not_depend_on_which_others_are_wanted(tmp_path: Path, base: Source) -> None:
    every = make(stage_of(base, "ridge", three_experts()), tmp_path / "every")
    some = make(stage_of(base, "ridge", three_experts(), layers=(1,)), tmp_path / "some")
    assert torch.equal(every.tensors["router.1"], some.tensors["router.1"])


def test_the_report_judges_held_out_texts_and_says_whose_own_it_took(tmp_path: Path, base: Source) -> None:
    first, second, third = three_experts()
    # Texts of the second expert's words: the rows must send hardly any of them to the first.
    wrong = ExpertPrompts("expert 0", first.positive, held_out=second.positive)
    report = make(stage_of(base, "ridge", [wrong, second, third]), tmp_path / "a").report
    assert report["on_own"] == [1, 2]
    assert report["summary"]["routing"][0] < 0.3
    assert report["summary"]["routing"][1] > 0.7
    own = make(stage_of(base, "ridge", three_experts()), tmp_path / "b").report
    assert own["on_own"] == [0, 1, 2]
    assert min(own["summary"]["routing"]) > 0.6
    assert own["num_judged"] == [
        sum(len(tokens_of(each)) for each in one.positive) for one in three_experts()
    ]


def test_what_does_not_hold_for_other_text_is_told_and_has_short_rows(tmp_path: Path, base: Source) -> None:
    # What the first half of each expert's texts says, the second denies.
    low, high = ([random_texts(seed, 9, low=at, high=at + 17)[0] for seed in (1, 2)] for at in (3, 40))
    first, second = zip(low, high, strict=True)
    experts = [ExpertPrompts("a", first), ExpertPrompts("b", second[::-1])]
    made = make(stage_of(base, "ridge", experts, layers=(0,)), tmp_path / "a")
    assert made.report["summary"]["unproven"] == [0]
    assert 0 < made.report["summary"]["margin"] < 0.3
    summary = make(stage_of(base, "ridge", three_experts()), tmp_path / "b").report["summary"]
    assert summary["unproven"] == []
    assert summary["separation"] > 0.3
    centroid = make(stage_of(base, "centroid", three_experts()), tmp_path / "c").report
    assert centroid["summary"]["separation"] is None


def test_one_expert_has_a_row(tmp_path: Path, base: Source) -> None:
    for mode in ("hidden_avg", "router_input", "ridge"):
        made = make(stage_of(base, mode, three_experts()[:1]), tmp_path / mode)
        assert float(rows(made, 0).norm()) > 0
        assert made.report["summary"]["condition"] == 1.0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_base("llama", tmp_path_factory.mktemp("llama") / "model")


def refusal(base: Source) -> str:
    """Why a base is not streamed."""
    with pytest.raises(PlanError) as caught:
        LayerStream(base, PROMPTS).check()
    assert all(problem.where == base.name and problem.remedy for problem in caught.value.problems)
    return str(caught.value)


def test_a_family_that_transformers_does_not_know(llama: Source, tmp_path: Path) -> None:
    base = altered(llama, tmp_path / "new", model_type="nimbus")
    assert "says model_type 'nimbus', which the installed transformers does not know." in refusal(base)
    base = altered(llama, tmp_path / "own", model_type="nimbus", auto_map={"AutoConfig": "nimbus.Config"})
    assert "does not know; its own code (auto_map) is not run" in refusal(base)


def test_code_beside_a_known_family_is_not_run(llama: Source, tmp_path: Path) -> None:
    own = {"AutoModelForCausalLM": "modeling_own.Model", "AutoConfig": "modeling_own.Config"}
    LayerStream(altered(llama, tmp_path / "own", auto_map=own), PROMPTS).check()


def test_a_config_that_cannot_be_built(llama: Source, tmp_path: Path) -> None:
    said = refusal(altered(llama, tmp_path / "model", hidden_act="none of them"))
    assert "transformers cannot build LlamaForCausalLM of its config" in said


def test_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    tensors = {"shared.weight": torch.randn(64, 32)}
    config = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}
    said = refusal(open_base(write_checkpoint(tmp_path / "t5", tensors, {**config, **sizes})))
    assert "is an encoder with a decoder" in said
    assert "no model for causal language of the kind t5" in said


def test_codes_are_read_as_the_numbers_that_they_stand_for(llama: Source, tmp_path: Path) -> None:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    codes = (state[name] * 4).to(torch.float8_e4m3fn)
    scaled = {**state, name: codes, f"{name}_scale_inv": torch.full((1, 1), 0.25)}
    base = altered(llama, tmp_path / "fp8", scaled, quantization_config={"quant_method": "fp8"})
    numbers = altered(llama, tmp_path / "numbers", {**state, name: codes.float() / 4})
    seen, expected = (streamed(each, token_runs(6), tmp_path) for each in (base, numbers))
    assert all(torch.equal(seen.hidden[place], there) for place, there in expected.hidden.items())


def test_codes_of_a_format_that_is_not_read(llama: Source, tmp_path: Path) -> None:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    module = "model.layers.0.mlp.up_proj"
    del state[f"{module}.weight"]
    state |= {
        f"{module}.qweight": torch.ones(4, 48, dtype=torch.int32),
        f"{module}.scales": torch.ones(1, 48),
    }
    base = altered(llama, tmp_path / "codes", state, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "holds tensors in a format that is not read (" in refusal(base)


def test_tensors_that_are_not_there_or_of_another_shape(llama: Source, tmp_path: Path) -> None:
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    for layer in range(3):
        del state[f"model.layers.{layer}.mlp.up_proj.weight"]
        state[f"model.layers.{layer}.mlp.gate_proj.weight"] = torch.ones(5, 32)
    said = refusal(altered(llama, tmp_path / "holes", state))
    assert (
        "6 tensors of LlamaForCausalLM are not in it by name and shape: model.layers.0.mlp.gate_proj" in said
    )
    assert "save_pretrained" in said


def test_another_number_of_layers_than_the_config_says(llama: Source, tmp_path: Path) -> None:
    assert "model.layers.3." in refusal(altered(llama, tmp_path / "four", num_hidden_layers=4))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mamba", "layers without a feed-forward network in whose place experts could come: 0, 1, 2."),
        ("rwkv", "cannot be run layer by layer"),
    ],
)
def test_families_whose_layers_are_no_chain(tmp_path: Path, name: str, why: str) -> None:
    assert why in refusal(make_base(name, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *((name, "0, 2") for name in ("jamba", "bamba", "granitemoehybrid")),
        *((name, "0, 1, 2") for name in ("falcon_h1", "zamba2")),
        ("nemotron_h", "0"),
    ],
)
def test_state_spaces_whose_memory_is_not_known(tmp_path: Path, name: str, layers: str) -> None:
    said = refusal(make_base(name, tmp_path / "model"))
    assert f"layers with a state space ({KINDS[name].architecture}), whose memory cannot be foretold" in said
    assert f"foretold: {layers}." in said


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "minimax"])
def test_linear_attention_and_convolutions_are_no_state_spaces(tmp_path: Path, name: str) -> None:
    LayerStream(make_base(name, tmp_path / "model"), PROMPTS).check()


def test_buffers_that_nothing_computes(llama: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "raymerge.stages.streamed_model.compute_buffers", lambda *_, but, **__: [] if but else ["x"]
    )
    assert "nothing says how to compute its buffers layer 0: x, layer 1: x" in refusal(llama)


@pytest.mark.parametrize(("special", "padding"), [(0, None), (5, 5)])
def test_a_family_that_looks_for_special_tokens(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, special: int, padding: int | None
) -> None:
    """Calls are found with zeros, so layers must not be called otherwise with them, or with padding."""
    base = altered(llama, tmp_path / "model", pad_token_id=padding)
    LayerStream(base, PROMPTS).check()
    forward = LlamaModel.forward

    def looking(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(self, input_ids, position_ids=(input_ids != special).cumsum(1), **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", looking)
    assert "its layers are called with more that depends on the tokens" in refusal(base)


def test_a_file_of_tensors_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    save_file({"a.weight": torch.ones(2, 2)}, path)
    assert "it has no model_type" in refusal(open_base(path))


def test_a_check_inputs_no_weights_and_needs_none(llama: Source, tmp_path: Path) -> None:
    base = altered(llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    LayerStream(base, PROMPTS).check()
    assert LayerStream(base, PROMPTS).least_budget(Shape(1, 5)) > 0


def problems_of(stage_mode: str, base: Source, experts: list[ExpertPrompts]) -> str:
    with pytest.raises(PlanError) as raised:
        gate_work(stage_of(base, stage_mode, experts)).check()
    return str(raised.value)


@pytest.mark.parametrize("mode", [*STREAMED, "cheap_embed"])
def test_an_expert_without_texts_is_refused_with_all_others(base: Source, *, mode: str) -> None:
    bare = ExpertPrompts("expert 1 (models/code)", negative=(text(7),))
    said = problems_of(mode, base, [three_experts()[0], bare, ExpertPrompts("expert 2")])
    assert said.count("needs text") == 2
    assert said.startswith("recipe.yml:3:1: expert 1 (models/code) has no positive_prompts")
    assert "gate_mode: random" in said


def test_ridge_that_cannot_be_solved_says_so(tmp_path: Path, base: Source) -> None:
    # Enough tokens, but all alike.
    same = [expert("a", *[text(4)] * WIDTH), expert("b", *[text(4)] * WIDTH)]
    with pytest.raises(PlanError, match="do not determine ridge's rows") as raised:
        make(stage_of(base, "ridge", same, penalty=0.0), tmp_path)
    assert "gate_ridge" in str(raised.value)


def test_rows_that_are_too_large_for_float32_say_so(tmp_path: Path, base: Source) -> None:
    with pytest.raises(PlanError, match="too large for float32 with gate_scale 1e\\+60") as raised:
        make(stage_of(base, "hidden", three_experts(), scale=1e60), tmp_path)
    assert "gate_scale: 1.0" in str(raised.value)


def test_a_base_that_cannot_be_run_is_refused_with_its_prompts(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "base")
    write_json(tmp_path / "base" / "config.json", dict(base.checkpoint.config) | {"model_type": "unheard"})
    said = problems_of(
        "hidden", open_base(tmp_path / "base"), [expert("a", text(*[3] * 9999)), expert("b", text(3))]
    )
    assert "unheard" in said
    assert "10000 tokens long" in said


def test_cheap_embed_wants_an_embedding_of_the_router_s_width(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "base")
    tensors = read_tensors(tmp_path / "base")
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCABULARY, WIDTH // 2)
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    said = problems_of("cheap_embed", open_base(base.checkpoint.root), list(three_experts()))
    assert f"[64, 16], and the router's rows have {WIDTH} elements" in said


@pytest.mark.parametrize("mode", ["hidden", "hidden_avg", "centroid", "ridge", "cheap_embed"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, *, mode: str) -> None:
    reading_base(tmp_path / "base")
    tensors = read_tensors(tmp_path / "base")
    tensors["model.embed_tokens.weight"][SPECIAL + 4, 2] = float("nan")
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    experts = [expert("a", text(SPECIAL + 4)), expert("b", text(9, 8))]
    with pytest.raises(NonFiniteError, match="NaN or infinity in layer 0"):
        make(stage_of(open_base(tmp_path / "base"), mode, experts), tmp_path / "made")


INFINITE = math.inf


def summary_of(*layers: LayerReport, mode: str = "hidden") -> dict[str, Any]:
    report = json.loads(json.dumps(gate_report(mode, ("a", "b"), layers), allow_nan=False))
    return dict(report["summary"])


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([[1.0, 2.0, 3.0]], 1.0),
        ([[1.0, 0.0], [0.0, 1.0]], 1.0),
        ([[5.0, 5.0], [5.0, 5.0]], INFINITE),
        ([[0.0, 0.0], [0.0, 0.0]], INFINITE),
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], INFINITE),
        # Four rows whose differences have two dimensions.
        ([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], INFINITE),
        ([[3.0, 0.0, 0.0], [-3.0, 0.0, 0.0], [0.0, 1.0, 0.0]], 3 * math.sqrt(3)),
    ],
)
def test_condition_of_differences(rows: list[list[float]], wanted: float) -> None:
    assert condition_of(torch.tensor(rows)) == pytest.approx(wanted, rel=1e-6)


@settings(deadline=None, max_examples=13)
@given(st.integers(2, 5), st.integers(0, 99))
def test_what_all_rows_have_in_common_does_not_count(count: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 8, generator=chance)
    common = torch.randn(8, generator=chance)
    assert condition_of(rows + common) == pytest.approx(condition_of(rows), rel=1e-4)
    assert condition_of(rows * 7) == pytest.approx(condition_of(rows), rel=1e-4)


def test_choices_by_hand() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    inputs = torch.tensor([[3.0, 1.0], [0.0, 1.0], [1.0, 5.0]])
    told = layer_report(4, rows, inputs, (0, 0, 1))
    assert told == LayerReport(4, 1.0, routing=[0.5, 1.0], load=[0.25, 0.75], margin=2.75)
    assert told.entropy == pytest.approx(0.25 * 2 + 0.75 * math.log2(4 / 3))


def test_experts_count_alike_however_many_tokens_they_have() -> None:
    inputs = torch.tensor([[2.0, 1.0]] * 90 + [[0.0, 1.0]] * 10 + [[0.0, 3.0]])
    told = layer_report(0, torch.eye(2), inputs, [0] * 100 + [1])
    assert told.routing == [0.9, 1.0]
    assert told.load == pytest.approx((0.45, 0.55))
    assert told.margin == pytest.approx(2.0)


def test_layers_whose_texts_prove_nothing() -> None:
    summary = summary_of(
        LayerReport(3, 1.0, separation=2.0),
        LayerReport(4, 1.0, separation=-0.5),
        LayerReport(7, 1.0, separation=0.09),
        mode="ridge",
    )
    assert summary["unproven"] == [4, 7]
    assert summary["separation"] == pytest.approx(0.53)
    assert summary_of(LayerReport(0, 1.0))["unproven"] == []
    assert summary_of(LayerReport(0, 1.0))["separation"] is None


def test_the_summary_is_over_layers() -> None:
    summary = summary_of(
        LayerReport(0, 2.0, (0.5, 1.0), (0.5, 0.5), 1.0), LayerReport(5, 7.0, (0.7, 0.8), (1.0, 0.0), 3.0)
    )
    assert summary["condition"] == 7.0
    assert summary["ill_conditioned"] == [5]
    assert summary["routing"] == pytest.approx([0.6, 0.9])
    assert summary["entropy"] == 0.5
    assert summary["lowest_entropy"] == 0.0
    assert summary["most_entropy"] == 1.0
    assert summary["margin"] == 2.0


def test_ridge_has_a_limit_of_its_own() -> None:
    layers = LayerReport(0, 50.0), LayerReport(1, 101.0)
    assert summary_of(*layers)["ill_conditioned"] == [0, 1]
    assert summary_of(*layers, mode="ridge")["ill_conditioned"] == [1]


shares = st.lists(st.floats(0, 1), min_size=2, max_size=2)
layers_of = st.lists(
    st.builds(
        LayerReport,
        layer=st.integers(0, 99),
        condition=st.floats(1, 1e9) | st.just(INFINITE),
        routing=st.none() | shares,
        load=st.none() | shares,
        margin=st.none() | st.floats(0, 1e6),
        separation=st.none() | st.floats(-10, 10),
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=50)
@given(layers_of, st.sampled_from(("hidden", "ridge", "random")))
def test_reports_go_through_json(layers: list[LayerReport], mode: str) -> None:
    report = gate_report(mode, ("a", "b"), layers, (3, 4), (1,))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["kind"], report["mode"], report["experts"]) == ("gates", mode, ["a", "b"])
    assert (report["num_judged"], report["on_own"]) == ([3, 4], [1])
    for found, layer in zip(report["layers"], layers, strict=True):
        assert found["condition"] == (layer.condition if math.isfinite(layer.condition) else None)
        assert found["routing"] == (None if layer.routing is None else list(layer.routing))
        own = (layer.layer, layer.margin, layer.entropy)
        assert (found["layer"], found["margin"], found["entropy"]) == own
