"""The method chosen tensor by tensor: which rule holds, who takes part, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.plan_maker import good, header_checkpoint, llama, llama_specs, planned, refusals

NORM = "model.layers.{}.input_layernorm.weight"
Q = "model.layers.{}.self_attn.q_proj.weight"
UP = "model.layers.{}.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"

Models = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Three Llamas of four layers."""
    root = tmp_path_factory.mktemp("models")
    return llama(root / "a", 4), llama(root / "b", 4), llama(root / "c", 4)


def _ties(models: Models, *rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    base, one, two = models
    weighted = [{"model": each, "parameters": {"weight": 1, "density": 0.5}} for each in (one, two)]
    return {"merge_method": "ties", "base_model": base, "models": weighted, "methods": list(rules), **more}


def test_attention_by_slerp_norms_from_the_base_and_the_rest_by_ties(models: Models) -> None:
    base, one, _ = models
    made = good(
        _ties(
            models,
            {"role": "attention", "merge_method": "slerp", "sources": [base, one], "parameters": {"t": 0.3}},
            {"role": "norm", "merge_method": "passthrough", "sources": [base]},
        )
    )
    assert made.method(Q.format(2)) == "slerp"
    assert made.settings(Q.format(2))["values"] == {"t": 0.3}
    assert [source for source, _ in made.reads(Q.format(2))] == [0, 1]
    assert made.method(NORM.format(2)) == "copy"
    assert made.reads(NORM.format(2)) == [(0, NORM.format(2))]
    assert made.fate(1, NORM.format(2)) == ("dropped", "not_chosen", NORM.format(2))
    assert made.method(UP.format(2)) == made.method(EMBEDDING) == "ties"
    assert [source for source, _ in made.reads(UP.format(2))] == [0, 1, 2]
    assert made.plan.manifest["rules"] == ["slerp", "passthrough"]


def test_layers_are_those_of_the_output(models: Models) -> None:
    a, b, _ = models
    recipe = {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": a, "layer_range": [0, 4]}]},
            {"sources": [{"model": b, "layer_range": [1, 3]}]},
        ],
        "methods": [{"layers": 4, "parameters": {"scale": 0.5}}],
    }
    made = good(recipe)
    assert made.method(UP.format(4)) == "passthrough"
    assert made.reads(UP.format(4)) == [(1, UP.format(1))]
    assert made.method(UP.format(5)) == made.method(UP.format(1)) == "copy"


def test_a_rule_s_parameters_hold_before_the_entry_s_and_the_recipe_s(models: Models) -> None:
    _, one, two = models
    rule = {"role": "mlp", "parameters": {"weight": [{"layers": "1..3", "value": 0.25}], "lambda": 2.0}}
    recipe = _ties(models, rule, parameters={"lambda": 3.0, "weight": 9})
    recipe["models"] = [{"model": one, "parameters": {"weight": 1}}, {"model": two}]
    made = good(recipe)
    assert made.weights(UP.format(1)) == [0.25, 0.25]
    assert made.weights(UP.format(0)) == [1, 9]
    assert made.settings(UP.format(0))["values"]["lambda"] == 2.0
    assert made.weights(Q.format(0)) == [1, 9]
    assert made.settings(Q.format(0))["values"]["lambda"] == 3.0


def test_sources_take_part_in_the_order_of_the_rule(models: Models) -> None:
    _, one, two = models
    rule = {"role": "mlp", "merge_method": "slerp_delta", "sources": [two, one], "parameters": {"t": 0.0}}
    made = good(_ties(models, rule))
    assert [source for source, _ in made.reads(UP.format(0))] == [0, 2, 1]
    problems = refusals(_ties(models, {**rule, "sources": [one, one]}))
    assert any(f"methods[0].sources[1]: {one} is named twice in this rule" in each for each in problems)


def test_a_source_of_a_rule_must_take_part_where_the_rule_matches(models: Models) -> None:
    a, b, c = models
    slices = [
        {"sources": [{"model": each, "layer_range": [0, 2]} for each in (a, b)]},
        {"sources": [{"model": each, "layer_range": [2, 4]} for each in (a, c)]},
    ]
    recipe = {"merge_method": "linear", "slices": slices, "parameters": {"weight": 1}}
    rule: dict[str, Any] = {"role": "mlp", "sources": [a, b]}
    (problem,) = refusals({**recipe, "methods": [rule]})
    assert f"methods[0].sources[1]: {b} takes no part in what is at recipe: slices[1]" in problem
    made = good({**recipe, "methods": [{**rule, "layers": "0..1"}]})
    assert [source for source, _ in made.reads(UP.format(3))] == [0, 2]


def test_a_tensor_is_kept_from_the_base_only_where_one_who_takes_part_lacks_it(
    models: Models, tmp_path: Path
) -> None:
    base, one, _ = models
    specs = dict(llama_specs(4))
    del specs[UP.format(0)]
    holed = header_checkpoint(tmp_path / "holed", specs, llama_config(layers=4))
    recipe = _ties((base, one, holed), {"role": "mlp", "sources": [one]}, missing_tensors="copy_base")
    assert good(recipe).fate(1, UP.format(0))[0] == "merged"
    kept = good({**recipe, "methods": []})
    assert kept.fate(0, UP.format(0)) == ("copied", "only_in_base", UP.format(0))


def test_positional_methods_go_by_the_depth_of_the_whole_stack(models: Models) -> None:
    a, b, _ = models
    slices = [{"sources": [{"model": m, "layer_range": r} for m in (a, b)]} for r in ([0, 2], [2, 4])]
    recipe = {"merge_method": "lines", "base_model": a, "slices": slices, "parameters": {"weight": 1}}
    made = good(recipe)
    positions = [made.settings(Q.format(layer))["position"] for layer in range(4)]
    assert positions == [0.0, 1 / 3, 2 / 3, 1.0]


def test_settings_too_go_by_role_and_layer(models: Models) -> None:
    a, b, _ = models
    weight = [{"role": "norm", "value": 5}, {"role": "mlp", "layers": "2..3", "value": 7}, {"value": 1}]
    recipe = {
        "merge_method": "linear",
        "models": [{"model": a, "parameters": {"weight": weight}}, {"model": b}],
        "parameters": {"weight": 2},
    }
    made = good(recipe)
    assert made.weights(NORM.format(0)) == [5, 2]
    assert [made.weights(UP.format(layer))[0] for layer in range(4)] == [1, 1, 7, 7]
    assert made.weights(EMBEDDING) == [1, 2]


def test_a_method_that_takes_all_may_be_chosen_where_the_recipe_s_own_cannot_be(models: Models) -> None:
    a, b, c = models
    recipe = {
        "merge_method": "slerp",
        "base_model": a,
        "models": [{"model": each} for each in (a, b, c)],
        "parameters": {"weight": 1, "t": 0.5},
        "methods": [{"filter": "*", "merge_method": "linear"}],
    }
    assert good(recipe).method(Q.format(0)) == "linear"
    recipe["methods"] = [{"role": "norm", "merge_method": "linear"}]
    problems = refusals(recipe)
    assert any("slerp takes 1 model(s) beside the base, but 2 are listed here" in each for each in problems)


def test_two_rules_for_one_tensor_are_refused_with_both_places(models: Models) -> None:
    made = planned(
        _ties(
            models,
            {"role": "attention", "merge_method": "task_arithmetic"},
            {"glob": "*.q_proj.*", "parameters": {"lambda": 0.5}},
        )
    )
    (problem,) = made.plan.problems
    assert problem.where == "recipe: methods[1]"
    assert "4 tensors are matched by this rule and by the one at recipe: methods[0] as well" in problem.what
    assert Q.format(0) in problem.what


def test_a_rule_that_matches_nothing_is_refused(models: Models) -> None:
    (problem,) = refusals(_ties(models, {"glob": "*.qproj.*", "merge_method": "linear"}))
    assert "methods[0]: this rule matches no tensor of the output" in problem


def test_sources_of_a_rule_must_be_the_recipe_s_and_enough(models: Models, tmp_path: Path) -> None:
    other = llama(tmp_path / "other", 4)
    problems = refusals(_ties(models, {"role": "norm", "merge_method": "linear", "sources": [other]}))
    assert any(f"{other} is not one of the models that the recipe merges" in each for each in problems)
    problems = refusals(_ties(models, {"role": "norm", "merge_method": "slerp", "parameters": {"t": 1}}))
    assert len(problems) == 1
    assert "slerp takes 1 model(s) beside the base, but 2 are listed here" in problems[0]
    assert "sources: [...]" in problems[0]


def test_every_unknown_method_and_parameter_is_named(models: Models) -> None:
    problems = refusals(
        _ties(models, {"role": "norm", "merge_method": "slurp"}, {"role": "mlp", "merge_method": "tyes"})
    )
    assert len(problems) == 2
    assert "there is no merge_method 'slurp'. Did you mean 'slerp'?" in problems[0]
    (problem,) = refusals(_ties(models, {"role": "norm", "merge_method": "linear", "parameters": {"q": 1}}))
    assert "methods[0].parameters.q" in problem
    assert "'q' is not a parameter of linear" in problem
    (problem,) = refusals(_ties(models, {"role": "norm", "merge_method": "linear"}, parameters={"q": 1}))
    assert "'q' is not a parameter of ties or linear" in problem


def test_a_base_listed_nowhere_takes_part_only_where_a_method_uses_it(models: Models) -> None:
    a, b, c = models
    recipe = {
        "merge_method": "linear",
        "base_model": a,
        "models": [{"model": b, "parameters": {"weight": 1}}, {"model": c, "parameters": {"weight": 1}}],
        "methods": [{"role": "mlp", "merge_method": "task_arithmetic"}],
    }
    made = good(recipe)
    assert [source for source, _ in made.reads(UP.format(0))] == [0, 1, 2]
    assert [source for source, _ in made.reads(Q.format(0))] == [1, 2]
    assert made.fate(0, Q.format(0))[:2] == ("dropped", "not_chosen")


@pytest.mark.parametrize("method", ["slerp", "nearswap", "arcee_fusion"])
@pytest.mark.parametrize("is_sliced", [False, True])
def test_the_base_that_a_message_names_works(models: Models, method: str, is_sliced: bool) -> None:
    a, b, _ = models
    parameters = {} if method == "arcee_fusion" else {"t": 0.5}
    listed: dict[str, Any] = {"models": [{"model": a}, {"model": b}]}
    if is_sliced:
        listed = {"slices": [{"sources": [{"model": m, "layer_range": [0, 4]} for m in (a, b)]}]}
    data = {"merge_method": method, "parameters": parameters, **listed}
    (problem,) = refusals(data)
    assert "needs a base_model" in problem
    named = problem.split("Add 'base_model: ")[1].split("'")[0]
    made = good({**data, "base_model": named})
    assert made.method(Q.format(0)) == method


def test_the_base_that_a_message_names_for_a_slice_works(models: Models) -> None:
    a, b, c = models
    slices: list[dict[str, Any]] = [
        {"sources": [{"model": m, "layer_range": [low, low + 2]} for m in pair]}
        for low, pair in ((0, (a, b)), (2, (c, b)))
    ]
    data = {"merge_method": "slerp", "base_model": a, "slices": slices, "parameters": {"t": 0.5}}
    (problem,) = refusals(data)
    assert "is not among the sources of this slice" in problem
    slices[1]["base_model"] = problem.split("Write 'base_model: ")[1].split("'")[0]
    assert good(data).method(Q.format(3)) == "slerp"


def test_deltas_in_slices_are_told_to_list_the_base_too(models: Models) -> None:
    a, b, c = models
    entries = [{"model": m, "layer_range": [0, 4], "parameters": {"weight": 1}} for m in (b, c)]
    data = {"merge_method": "ties", "slices": [{"sources": entries}]}
    (problem,) = refusals(data)
    assert "the model that the others were trained from, and list it with its layer_range" in problem
    entries.append({"model": a, "layer_range": [0, 4]})
    good({**data, "base_model": a})
