"""The config that a plan writes, what configs must agree in, and headers that do not fit theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, llama_shapes, sparse_checkpoint, tiny_llama
from kits.deepseek_headers import V3_CONFIG, deepseek_v3_specs
from kits.marks import one_in, slow_but
from kits.plan_maker import Specs, good, header_checkpoint, llama, llama_specs, planned, refusals
from kits.recipe_maker import linear, one, piece, stack

from raymerge.checkpoints.json_files import json_bytes
from raymerge.dtypes import DType
from raymerge.errors import PlanError
from raymerge.planner.config import output_config, vocabulary_size
from raymerge.verifier.structure import verify_structure


def test_lists_of_dense_layers_agree_with_what_is_stored(tmp_path: Path) -> None:
    a, b = stored(tmp_path / "a", *moe(dense=[0])), stored(tmp_path / "b", *moe(dense=[0, 1], layers=4))
    for pieces in ([(a, 0, 1), (b, 1, 3)], [(b, 0, 4), (a, 0, 3)], [(b, 2, 4), (a, 0, 1), (b, 0, 2)]):
        made = good(stack(*(piece(*each) for each in pieces)))
        dense = [int(name.split(".")[2]) for name in made.names() if name.endswith(".mlp.up_proj.weight")]
        assert made.config["mlp_only_layers"] == dense


def test_what_no_config_can_say_names_both_models_and_the_field(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a", 4, moe_layer_interval=2), llama(tmp_path / "b", 4)
    (problem,) = refusals(stack(piece(a, 0, 2), piece(b, 2, 4)))
    for words in ("moe_layer_interval is 2", str(b), "slices", "models whose configs agree"):
        assert words in problem


def _fp8(root: Path, said: dict[str, Any]) -> Path:
    """A Llama of two layers, in the second of which one matrix is block FP8."""
    config, specs = llama_config(layers=2), dict(llama_specs(2))
    name = "model.layers.1.self_attn.q_proj.weight"
    specs |= {name: (DType.F8_E4M3, specs[name][1]), f"{name}_scale_inv": (DType.F32, (1, 1))}
    table = {"quant_method": "fp8", "weight_block_size": [128, 128], **said}
    return header_checkpoint(root, specs, {**config, "quantization_config": table})


def test_names_in_what_is_said_of_quantisation_are_renumbered(tmp_path: Path) -> None:
    name = "model.layers.{}.self_attn.q_proj"
    said = {"modules_to_not_convert": [name.format(0), "lm_head"]}
    a = _fp8(tmp_path / "a", said)
    made = good(stack(piece(a, 1, 2), piece(a, 0, 1), piece(a, 0, 1)))
    kept = made.config["quantization_config"]["modules_to_not_convert"]
    assert kept == [name.format(1), name.format(2), "lm_head"]
    pattern = _fp8(tmp_path / "p", {**said, "ignore": ["re:.*layers.0.*"]})
    fresh = good(stack(piece(pattern, 1, 2), piece(pattern, 0, 1))).config["quantization_config"]
    assert "ignore" not in fresh
    assert name.format(1) in fresh["modules_to_not_convert"]
    assert name.format(0) not in fresh["modules_to_not_convert"]


def test_patterns_of_layers_are_refused_where_no_other_table_can_be_written(tmp_path: Path) -> None:
    model = _fp8(tmp_path / "a", {"quant_method": "gptq", "ignore": ["re:.*layers.0.*"]})
    said = refusals(stack(piece(model, 1, 2), piece(model, 0, 1)))
    assert len(said) == 2
    assert "re:.*layers.0.*" in said[0]
    assert "2 tensors would be copied as GPTQ (such as model.layers.0.self_attn.q_proj.weight" in said[1]


def _predicting(root: Path, predicts: int, *, declared: int | None = None, apart: bool = False) -> Path:
    """A Llama of two layers, and layers that predict further tokens."""
    config, specs = llama_config(layers=2), dict(llama_specs(2))
    for number in range(predicts):
        block = f"mtp.layers.{number}" if apart else f"model.layers.{2 + number}"
        specs[f"{block}.enorm.weight"] = (DType.BF16, (32,))
        specs[f"{block}.eh_proj.weight"] = (DType.BF16, (32, 64))
    number = predicts if declared is None else declared
    return header_checkpoint(root, specs, {**config, "num_nextn_predict_layers": number})


@pytest.mark.parametrize("apart", [True, False])
def test_prediction_layers_are_counted_as_they_are_written(apart: bool, tmp_path: Path) -> None:
    one, none = _predicting(tmp_path / "one", 1, apart=apart), _predicting(tmp_path / "none", 0)
    for pieces, count in (([(none, 0, 2), (one, 0, 2)], 1), ([(one, 0, 2), (none, 0, 2)], 0)):
        made = good(stack(*(piece(*each) for each in pieces)))
        assert any("enorm" in name for name in made.names()) == bool(count)
        assert made.config["num_nextn_predict_layers"] == count


def test_a_donor_without_a_number_of_prediction_layers_gets_one(tmp_path: Path) -> None:
    base, one = llama(tmp_path / "base", 2), _predicting(tmp_path / "one", 1)
    made = good(stack(piece(one, 0, 2), piece(one, 1, 2), base_model=base))
    assert made.config["num_nextn_predict_layers"] == 1


def test_a_number_that_was_published_wrong_is_left_alone(tmp_path: Path) -> None:
    a = _predicting(tmp_path / "a", 0, declared=1)
    assert good(stack(piece(a, 0, 2), piece(a, 1, 2))).config["num_nextn_predict_layers"] == 1
    assert good(one(a)).config["num_nextn_predict_layers"] == 1


TEXT = {"num_hidden_layers": 2, "tie_word_embeddings": True, "hidden_size": 4}


def _multimodal(root: Path, **text: Any) -> Path:
    specs: Specs = {
        "model.language_model.embed_tokens.weight": (DType.BF16, (8, 4)),
        **{f"model.language_model.layers.{n}.w.weight": (DType.BF16, (4, 4)) for n in range(2)},
        **{f"model.visual.blocks.{n}.w.weight": (DType.BF16, (4, 4)) for n in range(2)},
    }
    config = {"model_type": "any_vl", "architectures": ["Any"], "text_config": {**TEXT, **text}}
    return header_checkpoint(root, specs, {**config, "vision_config": {"depth": 2}})


def test_a_module_taken_whole_from_another_model_brings_what_its_config_says(tmp_path: Path) -> None:
    a, b = (_multimodal(tmp_path / kinds, layer_types=[*kinds]) for kinds in ("xy", "yy"))
    modules = {"vision_tower": {"models": [{"model": a}]}, "text_decoder": {"models": [{"model": b}]}}
    made = good({"merge_method": "passthrough", "modules": modules})
    assert made.config["text_config"] == {**TEXT, "layer_types": ["y", "y"]}


def test_every_place_that_has_a_dtype_gets_the_new_one_but_not_the_vision_side() -> None:
    silent = {"text_config": {"hidden_size": 8}}
    assert output_config(silent, dtype=DType.F16) == {**silent, "dtype": "float16"}
    donor = {
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32"},
        "vision_config": {"dtype": "float32"},
    }
    assert output_config(donor, dtype=DType.BF16) == {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"dtype": "float32"},
    }
    nested = {"text_config": {"torch_dtype": "float32"}}
    assert output_config(nested, dtype=DType.BF16) == {"text_config": {"torch_dtype": "bfloat16"}}


@pytest.mark.parametrize("tie", [True, False])
def test_the_tie_goes_where_the_donor_has_it(tie: bool) -> None:
    assert output_config({"tie_word_embeddings": not tie}, tie=tie) == {"tie_word_embeddings": tie}
    assert output_config({}, tie=tie) == {"tie_word_embeddings": tie}
    nested = {"text_config": {"tie_word_embeddings": not tie}}
    assert output_config(nested, tie=tie) == {"text_config": {"tie_word_embeddings": tie}}
    deep = {
        "tie_word_embeddings": not tie,
        "thinker_config": {"text_config": {"tie_word_embeddings": not tie}},
    }
    result = output_config(deep, tie=tie)
    assert result["tie_word_embeddings"] is tie
    assert result["thinker_config"]["text_config"]["tie_word_embeddings"] is tie


def test_the_text_of_a_config() -> None:
    config = {"z": 1, "a": {"eps": 1e-05, "name": "modèle"}, "list": []}
    assert json_bytes(config).decode() == (
        '{\n  "z": 1,\n  "a": {\n    "eps": 1e-05,\n    "name": "modèle"\n  },\n  "list": []\n}\n'
    )


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"vocab_size": 8}, {}),
        ({"vocab_size": 6}, {"vocab_size": 8}),
        ({"hidden_size": 6}, {}),
        (
            {"vocab_size": 6, "vocab_size_per_layer_input": 6},
            {"vocab_size": 8, "vocab_size_per_layer_input": 8},
        ),
        ({"vocab_size": 6, "vocab_size_per_layer_input": 4}, {"vocab_size": 8}),
        ({"vocab_size": 9, "text_config": {"vocab_size": 6}}, {"vocab_size": 8, "text_config.vocab_size": 8}),
    ],
)
def test_every_field_that_counts_the_rows_follows_them(
    config: dict[str, Any], changes: dict[str, int]
) -> None:
    assert vocabulary_size(config, 8) == changes


MEANING = {
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (2, 4),
    "head_dim": (8, 4),
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (1.0, 2.5),
    "scoring_func": ("softmax", "sigmoid"),
    "rope_interleave": (True, False),
}
NOTED = {
    "num_experts_per_tok": (2, 3),
    "moe_k": (6, 4),
    "moe_topk": (6, 4),
    "n_group": (8, 1),
    "topk_group": (4, 1),
    "swiglu_limit": (7.0, 10.0),
    "rope_scaling": ({"factor": 2}, {"factor": 4}),
    "rope_theta": (1e4, 1e6),
    "rms_norm_eps": (1e-5, 1e-6),
    "hidden_act": ("silu", "gelu"),
    "attention_bias": (False, True),
}


def _stack_of(*models: Any, **more: Any) -> dict[str, Any]:
    slices = [piece(model, 0, 2) for model in models]
    return stack(*slices, **more)


@pytest.mark.parametrize("field", one_in(2, MEANING))
@pytest.mark.parametrize("recipe", slow_but([linear, _stack_of], linear))
def test_weights_that_mean_something_else_are_refused(tmp_path: Path, field: str, recipe: Any) -> None:
    own, other = MEANING[field]
    a, b = llama(tmp_path / "a", **{field: own}), llama(tmp_path / "b", **{field: other})
    (problem,) = refusals(recipe(a, b))
    assert f"{b} has {field} {other} where {a} has {own}: its weights mean something else (" in problem


@pytest.mark.parametrize("field", one_in(3, NOTED))
@pytest.mark.parametrize("recipe", slow_but([linear, _stack_of], linear))
def test_what_leaves_weights_what_they_are_is_a_note_with_its_reason(
    tmp_path: Path, field: str, recipe: Any
) -> None:
    own, other = NOTED[field]
    a, b = llama(tmp_path / "a", **{field: own}), llama(tmp_path / "b", **{field: other})
    made = good(recipe(a, b))
    start = f"{b} has {field} {other} where {a} has {own}; the output's config is that of {a}: "
    (note,) = [note for note in made.plan.manifest["notes"] if note.startswith(start)]
    assert note != start
    assert made.config[field] == own


def test_all_fields_of_a_model_are_told_in_one_sentence(tmp_path: Path) -> None:
    a = llama(tmp_path / "a")
    b = llama(tmp_path / "b", num_attention_heads=8, num_key_value_heads=4)
    (problem,) = refusals(linear(a, b))
    assert f"num_attention_heads 8 where {a} has 4, num_key_value_heads 4 where {a} has 2" in problem
    assert "models[1].model" in problem


def test_two_that_state_a_field_differ_though_the_donor_does_not_state_it(tmp_path: Path) -> None:
    stated: list[dict[str, int]] = [{}, {"routed_scaling_factor": 2}, {"routed_scaling_factor": 3}]
    a, b, c = (llama(tmp_path / each, **more) for each, more in zip("abc", stated, strict=True))
    good(linear(a, b))
    (problem,) = refusals(linear(a, b, c))
    assert f"{c} has routed_scaling_factor 3 where {b} has 2" in problem


@pytest.mark.parametrize("absent", [{}, {"norm_topk_prob": None, "rope_scaling": None}])
def test_what_only_one_config_states_is_a_note(tmp_path: Path, absent: dict[str, Any]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4}
    a = llama(tmp_path / "a", **absent)
    b = llama(tmp_path / "b", norm_topk_prob=True, rope_scaling=yarn)
    for first, second, words in (
        (a, b, (f"norm_topk_prob True where {a} does not", f"rope_scaling {yarn} where {a} does not")),
        (b, a, (f"no norm_topk_prob where {b} has True", f"no rope_scaling where {b} has {yarn}")),
    ):
        notes = [n for n in good(linear(first, second)).plan.manifest["notes"] if f"{second} has " in n]
        assert len(notes) == len(words)
        for note, start in zip(notes, words, strict=True):
            assert note.startswith(f"{second} has {start}")
            assert f"the output's config is that of {first}: " in note


def test_defaults_that_are_known_are_no_note(tmp_path: Path) -> None:
    a = llama(tmp_path / "a", head_dim=None, num_key_value_heads=None, attention_bias=None)
    b = llama(tmp_path / "b", head_dim=8, num_key_value_heads=4, attention_bias=False)
    for models in ((a, b), (b, a)):
        assert not [note for note in good(linear(*models)).plan.manifest["notes"] if " has " in note]


def test_the_donor_s_config_must_hold_though_it_gives_no_weights(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b", head_dim=4)
    (problem,) = refusals(_stack_of(b, base_model=a))
    assert f"{b} has head_dim 4 where {a} has 8" in problem


def test_an_override_of_the_family_does_not_waive_it(tmp_path: Path) -> None:
    a = llama(tmp_path / "a")
    b = llama(tmp_path / "b", architectures=["Other"], model_type="other", head_dim=4)
    named = {"model": str(b), "override_architecture": "LlamaForCausalLM"}
    (problem,) = refusals(linear(a, named))
    assert "head_dim 4 where" in problem


def _several(root: Path, text: dict[str, Any], vision: dict[str, Any]) -> Path:
    """A model of text and images."""
    specs = {name.replace("model.", "model.language_model.", 1): s for name, s in llama_specs(2).items()}
    more: Specs = {"model.vision_tower.layers.0.w.weight": (DType.BF16, (8, 8))}
    config = {
        "architectures": ["Some"],
        "model_type": "llava",
        "text_config": {**llama_config(layers=2), **text},
        "vision_config": {"num_hidden_layers": 1, **vision},
        "tie_word_embeddings": False,
    }
    return header_checkpoint(root, {**specs, **more}, config)


def test_only_those_parts_count_that_are_merged(tmp_path: Path) -> None:
    a = _several(tmp_path / "a", {}, {"num_attention_heads": 2})
    text, vision = (
        _several(tmp_path / "text", {"head_dim": 4}, {"num_attention_heads": 2}),
        _several(tmp_path / "vision", {}, {"num_attention_heads": 4}),
    )
    for other, words in ((text, "head_dim 4 where"), (vision, "num_attention_heads 4 where")):
        (problem,) = refusals(linear(a, other))
        assert words in problem
    tower = {"merge_method": "linear", "base_model": a, "parameters": {"weight": 1}}
    both = {"models": [{"model": a}, {"model": text}]}
    good({**tower, "modules": {"vision_tower": both}})
    (problem,) = refusals({**tower, "modules": {"text_decoder": both}})
    assert "head_dim 4 where" in problem


def test_keeping_the_base_s_tensors_needs_a_base(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    (problem,) = refusals(linear(a, b, missing_tensors="copy_base"))
    assert "missing_tensors" in problem.split(": ")[1]
    assert "there is no base_model. Name the base_model" in problem
    good(linear(a, b, missing_tensors="copy_base", base_model=a))
    good(linear(b, missing_tensors="copy_base", base_model=a))


def test_every_slice_must_take_the_base_that_is_to_be_kept(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    both = piece((a, b), 0, 2)
    alone = piece(b, 2, 3)
    data = {"merge_method": "linear", "parameters": {"weight": 1}, "missing_tensors": "copy_base"}
    good({**data, "base_model": a, "slices": [both]})
    good({**data, "slices": [{**both, "base_model": a}]})
    (problem,) = refusals({**data, "base_model": a, "slices": [both, alone]})
    assert "some slices do not take the base_model" in problem


def test_problems_of_the_recipe_do_not_hide_those_of_the_tensors(tmp_path: Path) -> None:
    specs = {**llama_specs(3), "lm_head.weight": (DType.BF16, (80, 32))}
    a = llama(tmp_path / "a")
    b = header_checkpoint(tmp_path / "b", specs, {**llama_config(), "head_dim": 4})
    data = linear(a, b, chat_template="chatmll", missing_tensors="copy_base")
    data["parameters"] = {"weight": 1, "wieght": 1}
    made = planned(data)
    problems = [str(problem) for problem in made.plan.problems]
    for words in (
        "Did you mean 'chatml'?",
        "'wieght' is not a parameter of linear",
        "head_dim 4 where",
        "there is no base_model",
        "1 of its tensors have 80 rows, one for each token",
    ):
        assert any(words in problem for problem in problems), words
    assert len(problems) == 6


def test_models_of_two_families_have_no_plan_but_all_that_the_recipe_lacks_is_told(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b", architectures=["Other"], head_dim=4)
    data = linear(a, b, missing_tensors="copy_base")
    with pytest.raises(PlanError) as error:
        planned(data)
    text = str(error.value)
    assert all(word in text for word in ("another family", "head_dim 4", "there is no base_model"))


@pytest.mark.parametrize("stated", slow_but([[5], [[]], 5, "LlamaForCausalLM", None], [5], None))
def test_class_names_that_are_no_list_of_names_break_nothing(tmp_path: Path, stated: Any) -> None:
    a, b = llama(tmp_path / "a", architectures=stated), llama(tmp_path / "b", architectures=stated)
    assert planned(linear(a, b))


Shapes = dict[str, tuple[int, ...]]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def stored(root: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Path:
    return header_checkpoint(root, {name: (DType.BF16, shape) for name, shape in shapes.items()}, config)


def said(root: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> list[str]:
    """What verify says of a checkpoint of these shapes."""
    return [str(problem) for problem in verify_structure(stored(root / "model", shapes, config)).problems]


def dense(layers: int = 4, **config: Any) -> tuple[Shapes, dict[str, Any]]:
    made = llama_config(layers=layers)
    return llama_shapes(made), {**made, **config}


def only(problems: list[str]) -> str:
    (problem,) = problems
    return problem


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": None}, "hidden_size is null; expected a whole number of at least 1"),
        ({"hidden_size": 0}, "hidden_size is 0; expected a whole number of at least 1"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5; expected a whole number of at least 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is null; expected"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true; expected"),
        ({"vocab_size": -1}, "vocab_size is -1; expected a whole number of at least 0"),
        ({"vocab_size": "96"}, 'vocab_size is "96"; expected'),
        ({"num_experts_per_tok": [2, -2]}, "num_experts_per_tok is [2, -2]; expected"),
        ({"text_config": {"num_attention_heads": 2.5}}, "text_config.num_attention_heads is 2.5; expected"),
        ({"ffn_config": {"moe_num_experts": "8"}}, 'ffn_config.moe_num_experts is "8"; expected'),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    shapes, config = dense(**fields)
    assert any(words in problem for problem in said(tmp_path, shapes, config))
    root = tmp_path / "model"
    (problem,) = refusals(one(root))
    assert f"{root}/config.json: {words}" in problem
    assert "Correct it, or take config.json from the place the weights come from." in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": None, "num_experts": None},
        {"num_key_value_heads": [2, 2, 2, 2], "num_experts": 0},
        {"text_config": llama_config(layers=4), "hidden_size": None, "num_hidden_layers": None},
    ],
)
def test_values_that_stand_for_a_default(fields: dict[str, Any], tmp_path: Path) -> None:
    shapes, config = dense(**fields)
    assert said(tmp_path, shapes, config) == []


def test_a_hidden_size_that_is_not_the_embeddings_width(tmp_path: Path) -> None:
    shapes, config = dense(hidden_size=64)
    problem = only(said(tmp_path, shapes, config))
    assert "the hidden size is 64, but model.embed_tokens.weight is 32 wide" in problem
    for field in ("embedding_size", "word_embed_proj_dim", "emb_dim"):
        assert said(tmp_path / field, shapes, {**config, field: 32}) == []


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_too_few_rows_for_the_vocabulary(name: str, tmp_path: Path) -> None:
    shapes, config = dense()
    shapes[name] = (63, 32)
    assert f"vocab_size is 64, but {name} has 63 rows" in only(said(tmp_path, shapes, config))
    assert said(tmp_path / "drafts", shapes, {**config, "draft_vocab_size": 63}) == []


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.mtp.embed_tokens.weight", (60, 32)),
        ("mtp_layers.0.shared_head.head.weight", (60, 32)),
        ("encoder.embed_tokens.weight", (60, 32)),
        ("lm_head.bias", (60,)),
    ],
)
def test_too_few_rows_of_a_tensor_beside_the_pair(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    shapes, config = dense()
    problem = only(said(tmp_path / "short", {**shapes, name: shape}, config))
    assert f"vocab_size is 64, but {name} has 60 rows" in problem
    assert said(tmp_path / "whole", {**shapes, name: (64, *shape[1:])}, config) == []
    # A vocabulary of its own has a field of its own, wherever that stands.
    assert said(tmp_path / "own", {**shapes, name: shape}, {**config, "audio": {"vocab_size": 60}}) == []


def test_what_counts_no_tokens_is_left_alone(tmp_path: Path) -> None:
    shapes, config = dense()
    names = ("visual.embed_tokens.weight", "encoder.embed_positions.weight", "wpe.weight")
    assert said(tmp_path, {**shapes, **dict.fromkeys(names, (60, 32))}, config) == []


def test_an_absent_layer(tmp_path: Path) -> None:
    shapes, config = dense()
    rest = {name: shape for name, shape in shapes.items() if ".layers.1." not in name}
    assert "no tensors of model.layers are in layers 1." in only(said(tmp_path, rest, config))
    blocks = [{"no_op": layer == 1} for layer in range(4)]
    assert said(tmp_path / "blocks", rest, {**config, "block_configs": blocks}) == []


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    shapes = {"model.layers.999999999.a.weight": (1,)}
    config = {"architectures": ["A"], "model_type": "a", "num_hidden_layers": 1_000_000_000}
    assert "counts 1000000000 layers, but only 1 tensors" in only(said(tmp_path, shapes, config))


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("suffix", ["mlp.up_proj.weight", "self_attn.q_proj.weight"])
def test_a_layer_with_a_hole(layer: int, suffix: str, tmp_path: Path) -> None:
    shapes, config = dense()
    del shapes[f"model.layers.{layer}.{suffix}"]
    assert f"model.layers.{layer} lacks {suffix}, which the other layers have" in only(
        said(tmp_path, shapes, config)
    )


def test_an_incomplete_base_is_neither_copied_nor_merged(tmp_path: Path) -> None:
    shapes, config = dense(5)
    name = "mlp.down_proj.weight"
    rest = {each: shape for each, shape in shapes.items() if each != f"model.layers.2.{name}"}
    whole, base, other = (
        stored(tmp_path / each, own, config)
        for each, own in (("whole", shapes), ("base", rest), ("other", rest))
    )
    named = str(base)
    mean, mixed = linear(base, other, base_model=named), linear(base, whole, base_model=named)
    for recipe in (one(base), mean, {**mixed, "extra_tensors": "drop"}):
        assert f"model.layers.2 lacks {name}, which the other layers have" in only(refusals(recipe))


def _zaya(shapes: Shapes) -> None:
    """No scale of earlier router states in the first layer."""
    shapes |= {f"model.layers.{n}.mlp.gate.states_scale": (32,) for n in range(1, 4)}


def _zaya_as_published(shapes: Shapes) -> None:
    """Experts in every other layer, the first of which has no scale of earlier router states."""
    for layer in range(1, 8, 2):
        for name in [each for each in shapes if f".layers.{layer}.self_attn." in each]:
            del shapes[name]
        shapes[f"model.layers.{layer}.router.weight"] = (4, 32)
        if layer > 1:
            shapes[f"model.layers.{layer}.router_states_scale"] = (32,)


def _rwkv_7(shapes: Shapes) -> None:
    """Nothing that mixes in the first layer's values in the first layer."""
    for layer in range(1, 4):
        module = f"model.layers.{layer}.self_attn.v_lora.lora"
        shapes |= {f"{module}.0.weight": (4, 32), f"{module}.2.weight": (32, 4), f"{module}.2.bias": (32,)}


@pytest.mark.parametrize(("design", "layers"), [(_zaya, 4), (_zaya_as_published, 8), (_rwkv_7, 4)])
def test_what_a_design_leaves_out_of_a_layer_is_no_hole(
    design: Callable[[Shapes], None], layers: int, tmp_path: Path
) -> None:
    shapes, config = dense(layers)
    design(shapes)
    a, b = (stored(tmp_path / each, shapes, config) for each in "ab")
    good(one(a))
    good(linear(a, b))
    assert verify_structure(a).problems == ()
    # Such a design does not hide damage.
    del shapes["model.layers.2.mlp.up_proj.weight"]
    assert "model.layers.2 lacks mlp.up_proj.weight" in only(said(tmp_path / "holed", shapes, config))


@pytest.mark.parametrize("module", ["self_attn", "mlp"])
def test_a_last_layer_without_its_last_tensors(module: str, tmp_path: Path) -> None:
    shapes, config = dense()
    rest = {name: shape for name, shape in shapes.items() if f".layers.3.{module}." not in name}
    assert f"model.layers.3 lacks {module}." in only(said(tmp_path, rest, config))


_UP = "2.mlp.up_proj.weight"

DESIGNS: Mapping[str, tuple[str, Shapes, dict[str, Any]]] = {
    "ModernBERT's first layer": ("0.input_layernorm.weight", {}, {}),
    "a kind that occurs once": (_UP, {}, {"layer_types": ["a", "a", "b", "a"]}),
    "listed by number": (_UP, {}, {"table": {"special_layers": [3]}}),
    "in a string": (_UP, {}, {"hybrid_override_pattern": "MM*M"}),
    "by period": ("", {"3.mlp.up_proj.weight": (5, 32)}, {"moe_layer_interval": 4}),
    "T5's first layer": ("", {"0.self_attn.relative_bias.weight": (4, 4)}, {}),
    "shared keys": ("3.self_attn.k_proj.weight", {}, {"num_kv_shared_layers": 1}),
    "a buffer in some": ("", {f"{n}.self_attn.rotary_emb.inv_freq": (4,) for n in (0, 1)}, {}),
    "OpenELM's sizes by layer": (
        "",
        {f"{n}.mlp.up_proj.weight": (64 + n, 32) for n in range(4)},
        {"ffn_sizes": [64, 65, 66, 67]},
    ),
}
"""What layers lack and have besides, and what the config says of it."""


@pytest.mark.parametrize("design", DESIGNS)
def test_odd_designs_are_sound(design: str, tmp_path: Path) -> None:
    shapes, config = dense()
    lacking, more, fields = DESIGNS[design]
    if lacking:
        del shapes[f"model.layers.{lacking}"]
    shapes |= {f"model.layers.{name}": shape for name, shape in more.items()}
    assert said(tmp_path, shapes, {**config, **fields}) == []


@pytest.mark.parametrize("kinds", [["a", "a", "a", "a"], ["b", "a", "a", "a"]])
def test_kinds_that_are_told_apart_do_not_hide_a_hole_within_one(kinds: list[str], tmp_path: Path) -> None:
    shapes, config = dense(layer_types=kinds)
    del shapes["model.layers.2.mlp.up_proj.weight"]
    assert "model.layers.2 lacks mlp.up_proj.weight" in only(said(tmp_path, shapes, config))


def test_layers_of_other_shapes(tmp_path: Path) -> None:
    shapes, config = dense(2)
    wide = llama_shapes(llama_config(layers=2, hidden=64))
    shapes |= {name: shape for name, shape in wide.items() if ".layers.1." in name}
    problem = only(said(tmp_path, shapes, config))
    assert "model.layers.1." in problem
    assert "and 8 more tensors alike" in problem


def test_packed_tensors_may_differ_by_layer(tmp_path: Path) -> None:
    shapes, config = dense()
    specs = {name: (DType.BF16, shape) for name, shape in shapes.items()}
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.up_proj"
        del specs[f"{name}.weight"]
        specs |= {
            f"{name}.qweight": (DType.I32, (8 + layer, 32)),
            f"{name}.scales": (DType.F16, (layer + 1, 32)),
        }
    config["quantization_config"] = {"quant_method": "gptq"}
    assert verify_structure(header_checkpoint(tmp_path / "m", specs, config)).problems == ()


def test_a_layer_that_is_not_quantised_is_no_hole(tmp_path: Path) -> None:
    shapes, config = dense(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    specs = {name: (DType.BF16, shape) for name, shape in shapes.items()}
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        specs |= {name: (DType.F8_E4M3, shapes[name]), f"{name}_scale_inv": (DType.F32, (1, 1))}
    assert verify_structure(header_checkpoint(tmp_path / "whole", specs, config)).problems == ()
    for ending in ("", "_scale_inv"):
        del specs[f"model.layers.1.mlp.up_proj.weight{ending}"]
    verdict = verify_structure(header_checkpoint(tmp_path / "hole", specs, config))
    assert "model.layers.1 lacks mlp.up_proj.weight" in only([str(each) for each in verdict.problems])


def moe(
    *, experts: int = 4, rows: int = 4, fused: bool = False, layers: int = 3, dense: Sequence[int] = ()
) -> tuple[Shapes, dict[str, Any]]:
    """A Qwen3 mixture of experts whose listed layers are dense."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "moe_intermediate_size": 6,
        "num_experts": 4,
        "num_hidden_layers": layers,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
        "tie_word_embeddings": True,
        "vocab_size": 16,
    }
    shapes: Shapes = {EMBEDDING: (16, 8), "model.norm.weight": (8,)}
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp"
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (8,)
        if layer not in dense:
            shapes[f"{block}.gate.weight"] = (rows, 8)
        if fused:
            shapes[f"{block}.experts.gate_up_proj"] = (experts, 12, 8)
            shapes[f"{block}.experts.down_proj"] = (experts, 8, 6)
            continue
        paths = [block] if layer in dense else [f"{block}.experts.{expert}" for expert in range(experts)]
        for path in paths:
            shapes |= {f"{path}.{each}_proj.weight": (6, 8) for each in ("gate", "up")}
            shapes[f"{path}.down_proj.weight"] = (8, 6)
    return shapes, config


@pytest.mark.parametrize("fused", [True, False])
def test_experts_against_their_number(fused: bool, tmp_path: Path) -> None:
    assert said(tmp_path / "good", *moe(fused=fused)) == []
    problem = only(said(tmp_path / "bad", *moe(fused=fused, experts=3)))
    assert "counts 4 experts, but in layers 0, 1, 2 of model.layers 3 are stored" in problem


def test_router_rows_against_the_number_of_experts(tmp_path: Path) -> None:
    shapes, config = moe(rows=5)
    problem = only(said(tmp_path / "bad", shapes, config))
    assert "counts 4 experts, but in layers 0, 1, 2 of model.layers mlp.gate.weight has 5 rows" in problem
    assert said(tmp_path / "zero", shapes, {**config, "zero_expert_num": 1}) == []


def test_routers_of_several_matrices_are_left_alone(tmp_path: Path) -> None:
    shapes, config = moe()
    shapes |= {f"model.layers.{layer}.mlp.router.down_proj.weight": (5, 8) for layer in range(3)}
    assert said(tmp_path, shapes, config) == []


def test_an_absent_expert_of_one_layer(tmp_path: Path) -> None:
    shapes, config = moe()
    shapes = {name: shape for name, shape in shapes.items() if "layers.1.mlp.experts.2." not in name}
    problems = "\n".join(said(tmp_path, shapes, config))
    assert "in layers 1 of model.layers 3 are stored" in problems
    assert "model.layers.1 lacks mlp.experts.2.down_proj.weight" in problems


@pytest.mark.parametrize("declared", [0, 2])
def test_prediction_layers_against_their_number(declared: int, tmp_path: Path) -> None:
    shapes, config = dense(num_nextn_predict_layers=1)
    shapes |= {"model.layers.4.enorm.weight": (32,), "model.layers.4.eh_proj.weight": (32, 64)}
    assert said(tmp_path / "good", shapes, config) == []
    # Those that were left out by who published are no damage.
    assert said(tmp_path / "left out", *dense(num_nextn_predict_layers=1)) == []
    problem = only(said(tmp_path / "bad", shapes, {**config, "num_nextn_predict_layers": declared}))
    assert (
        f"num_nextn_predict_layers is {declared}, but 1 multi-token-prediction layers are stored" in problem
    )


@pytest.mark.slow
def test_deepseek_v3_is_sound(tmp_path: Path) -> None:
    root = sparse_checkpoint(tmp_path / "v3", [[s for f in deepseek_v3_specs() for s in f]], V3_CONFIG)
    assert verify_structure(root).problems == ()


def test_a_donor_that_names_another_dtype_than_it_has_is_put_right(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "a", 1, dtype=torch.bfloat16)
    config = json.loads((model / "config.json").read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    (model / "config.json").write_text(json.dumps({**config, key: "float32"}))
    assert good(one(model)).config[key] == "bfloat16"
