"""What configs must agree in, what is only told, and that one trouble does not hide another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.plan_maker import Specs, good, header_checkpoint, llama, llama_specs, planned, refusals

from raymerge.dtypes import DType
from raymerge.errors import PlanError

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


def _linear(*models: Any, **more: Any) -> dict[str, Any]:
    entries = [{"model": model} for model in models]
    return {"merge_method": "linear", "models": entries, "parameters": {"weight": 1}, **more}


def _stack(*models: Any, **more: Any) -> dict[str, Any]:
    slices = [{"sources": [{"model": model, "layer_range": [0, 2]}]} for model in models]
    return {"merge_method": "passthrough", "slices": slices, **more}


@pytest.mark.parametrize("field", MEANING)
@pytest.mark.parametrize("recipe", [_linear, _stack])
def test_weights_that_mean_something_else_are_refused(tmp_path: Path, field: str, recipe: Any) -> None:
    own, other = MEANING[field]
    a, b = llama(tmp_path / "a", **{field: own}), llama(tmp_path / "b", **{field: other})
    (problem,) = refusals(recipe(a, b))
    assert f"{b} has {field} {other} where {a} has {own}: its weights mean something else (" in problem


@pytest.mark.parametrize("field", NOTED)
@pytest.mark.parametrize("recipe", [_linear, _stack])
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
    (problem,) = refusals(_linear(a, b))
    assert f"num_attention_heads 8 where {a} has 4, num_key_value_heads 4 where {a} has 2" in problem
    assert "models[1].model" in problem


def test_two_that_state_a_field_differ_though_the_donor_does_not_state_it(tmp_path: Path) -> None:
    stated: list[dict[str, int]] = [{}, {"routed_scaling_factor": 2}, {"routed_scaling_factor": 3}]
    a, b, c = (llama(tmp_path / each, **more) for each, more in zip("abc", stated, strict=True))
    good(_linear(a, b))
    (problem,) = refusals(_linear(a, b, c))
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
        notes = [n for n in good(_linear(first, second)).plan.manifest["notes"] if f"{second} has " in n]
        assert len(notes) == len(words)
        for note, start in zip(notes, words, strict=True):
            assert note.startswith(f"{second} has {start}")
            assert f"the output's config is that of {first}: " in note


def test_defaults_that_are_known_are_no_note(tmp_path: Path) -> None:
    a = llama(tmp_path / "a", head_dim=None, num_key_value_heads=None, attention_bias=None)
    b = llama(tmp_path / "b", head_dim=8, num_key_value_heads=4, attention_bias=False)
    for models in ((a, b), (b, a)):
        assert not [note for note in good(_linear(*models)).plan.manifest["notes"] if " has " in note]


def test_the_donor_s_config_must_hold_though_it_gives_no_weights(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b", head_dim=4)
    (problem,) = refusals(_stack(b, base_model=a))
    assert f"{b} has head_dim 4 where {a} has 8" in problem


def test_an_override_of_the_family_does_not_waive_it(tmp_path: Path) -> None:
    a = llama(tmp_path / "a")
    b = llama(tmp_path / "b", architectures=["Other"], model_type="other", head_dim=4)
    named = {"model": str(b), "override_architecture": "LlamaForCausalLM"}
    (problem,) = refusals(_linear(a, named))
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
        (problem,) = refusals(_linear(a, other))
        assert words in problem
    tower = {"merge_method": "linear", "base_model": a, "parameters": {"weight": 1}}
    both = {"models": [{"model": a}, {"model": text}]}
    good({**tower, "modules": {"vision_tower": both}})
    (problem,) = refusals({**tower, "modules": {"text_decoder": both}})
    assert "head_dim 4 where" in problem


def test_keeping_the_base_s_tensors_needs_a_base(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    (problem,) = refusals(_linear(a, b, missing_tensors="copy_base"))
    assert "missing_tensors" in problem.split(": ")[1]
    assert "there is no base_model. Name the base_model" in problem
    good(_linear(a, b, missing_tensors="copy_base", base_model=a))
    good(_linear(b, missing_tensors="copy_base", base_model=a))


def test_every_slice_must_take_the_base_that_is_to_be_kept(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    both = {"sources": [{"model": model, "layer_range": [0, 2]} for model in (a, b)]}
    alone = {"sources": [{"model": b, "layer_range": [2, 3]}]}
    data = {"merge_method": "linear", "parameters": {"weight": 1}, "missing_tensors": "copy_base"}
    good({**data, "base_model": a, "slices": [both]})
    good({**data, "slices": [{**both, "base_model": a}]})
    (problem,) = refusals({**data, "base_model": a, "slices": [both, alone]})
    assert "some slices do not take the base_model" in problem


def test_problems_of_the_recipe_do_not_hide_those_of_the_tensors(tmp_path: Path) -> None:
    specs = {**llama_specs(3), "lm_head.weight": (DType.BF16, (80, 32))}
    a = llama(tmp_path / "a")
    b = header_checkpoint(tmp_path / "b", specs, {**llama_config(), "head_dim": 4})
    data = _linear(a, b, chat_template="chatmll", missing_tensors="copy_base")
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
    data = _linear(a, b, missing_tensors="copy_base")
    with pytest.raises(PlanError) as error:
        planned(data)
    text = str(error.value)
    assert all(word in text for word in ("another family", "head_dim 4", "there is no base_model"))


@pytest.mark.parametrize("stated", [[5], [[]], 5, "LlamaForCausalLM", None])
def test_class_names_that_are_no_list_of_names_break_nothing(tmp_path: Path, stated: Any) -> None:
    a, b = llama(tmp_path / "a", architectures=stated), llama(tmp_path / "b", architectures=stated)
    assert planned(_linear(a, b))
