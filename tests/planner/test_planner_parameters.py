"""Which number and which method hold for which tensor: precedence, rules, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.marks import one_in
from kits.plan_maker import good, header_checkpoint, llama, llama_specs, planned, refusals
from kits.recipe_maker import linear, piece, stack

Models = tuple[Path, Path, Path]
NORM = "model.layers.{}.input_layernorm.weight"
Q = "model.layers.{}.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return llama(root / "a", 4), llama(root / "b", 4), llama(root / "c", 4)


def _sliced(a: Path, b: Path, **levels: Any) -> dict[str, Any]:
    entry = {"model": a, "layer_range": [0, 4], "parameters": levels.get("entry", {})}
    other = {"model": b, "layer_range": [0, 4], "parameters": {"weight": 9}}
    return {
        "merge_method": "linear",
        "slices": [{"sources": [entry, other], "parameters": levels.get("slice", {})}],
        "parameters": levels.get("recipe", {}),
    }


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ({"entry": {"weight": 1}, "slice": {"weight": 2}, "recipe": {"weight": 3}}, 1),
        ({"slice": {"weight": 2}, "recipe": {"weight": 3}}, 2),
        ({"recipe": {"weight": 3}}, 3),
        ({"entry": {"weight": [{"filter": "mlp", "value": 1}]}, "slice": {"weight": 2}}, 2),
        ({"entry": {"weight": [{"filter": "attn", "value": 1}, {"value": 5}]}, "slice": {"weight": 2}}, 1),
    ],
)
def test_the_nearest_level_that_says_something_holds(
    models: Models, levels: dict[str, Any], expected: float
) -> None:
    made = good(_sliced(*models[:2], **levels))
    assert made.weights(Q.format(0)) == [expected, 9]


def test_a_module_stands_between_slice_and_recipe(models: Models) -> None:
    a, b, _ = models
    module: dict[str, Any] = {
        "models": [{"model": a}, {"model": b, "parameters": {"weight": 4}}],
        "parameters": {"weight": 2},
    }
    made = good({"merge_method": "linear", "modules": {"default": module}, "parameters": {"weight": 3}})
    assert made.weights(Q.format(0)) == [2, 4]
    pieces = [piece(a, 0, 4, parameters={"weight": 5})]
    stacked: dict[str, Any] = {"slices": pieces, "parameters": {"weight": 2}}
    data = {"merge_method": "linear", "parameters": {"normalize": False}}
    assert good({**data, "modules": {"default": stacked}}).weights(Q.format(0)) == [5]
    del pieces[0]["parameters"]
    assert good({**data, "modules": {"default": stacked}}).weights(Q.format(0)) == [2]


def test_filters_see_the_source_s_name_or_the_output_s(models: Models) -> None:
    """Layer 2 of the source is layer 0 of the output."""
    a, b, _ = models
    entries = [
        {"model": a, "layer_range": [2, 4], "parameters": {"weight": [{"filter": "layers.2.", "value": 5}]}},
        {"model": b, "layer_range": [0, 2]},
    ]
    normalize = [{"filter": "layers.0.", "value": False}, {"value": True}]
    data = {"merge_method": "linear", "slices": [{"sources": entries}]}
    made = good({**data, "parameters": {"weight": 1, "normalize": normalize}})
    assert made.weights(Q.format(0)) == [5, 1]
    assert made.weights(Q.format(1)) == [1, 1]
    assert made.settings(Q.format(0))["values"] == {"normalize": False}
    assert made.settings(Q.format(1))["values"] == {"normalize": True}


def test_gradients_restart_in_every_slice_and_are_at_their_start_outside(models: Models) -> None:
    a, b, _ = models
    slices = [piece((a, b), low, high) for low, high in ((0, 3), (2, 3), (1, 3))]
    made = good({"merge_method": "slerp", "base_model": a, "slices": slices, "parameters": {"t": [0, 1]}})
    t = [made.settings(NORM.format(layer))["values"]["t"] for layer in range(6)]
    assert t == [0, 0.5, 1, 1, 0, 1]
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert made.settings(name)["values"]["t"] == 0


def test_an_unlisted_base_counts_in_a_mean_with_a_weight_for_all(models: Models) -> None:
    a, b, c = models
    data = {"merge_method": "linear", "base_model": c, "models": [{"model": a}, {"model": b}]}
    made = good({**data, "parameters": {"weight": 1}})
    assert [name for _, name in made.reads("lm_head.weight")] == ["lm_head.weight"] * 3
    assert [source for source, _ in made.reads("lm_head.weight")] == [1, 2, 0]
    for entry in data["models"]:
        entry["parameters"] = {"weight": 1}
    made = good(data)
    assert [source for source, _ in made.reads("lm_head.weight")] == [1, 2]
    assert made.fate(0, "lm_head.weight") == ("dropped", "config_only", "")


def test_an_unlisted_base_is_appended_for_deltas_and_needs_no_parameters(models: Models) -> None:
    a, b, c = models
    entries = [{"model": m, "parameters": {"weight": 0.5, "density": 0.5}} for m in (a, b)]
    for method in ("ties", "task_arithmetic"):
        made = good({"merge_method": method, "base_model": c, "models": entries})
        assert [source for source, _ in made.reads(Q.format(1))] == [0, 1, 2]
        assert len(made.settings(Q.format(1))["sources"]) == 2
        listed = good({"merge_method": method, "base_model": c, "models": [{"model": c}, *entries]})
        assert [source for source, _ in listed.reads(Q.format(1))] == [0, 1, 2]


def test_a_base_of_its_own_holds_in_its_slice(models: Models) -> None:
    a, b, c = models
    slices = [piece((a, b), 0, 1), piece((a, c), 1, 2, base_model=c)]
    made = good({"merge_method": "slerp", "base_model": b, "slices": slices, "parameters": {"t": 0.5}})
    numbers = {source.name: source.index for source in made.sources}
    assert made.reads(Q.format(0)) == [(numbers[str(b)], Q.format(0)), (numbers[str(a)], Q.format(0))]
    assert made.reads(Q.format(1)) == [(numbers[str(c)], Q.format(1)), (numbers[str(a)], Q.format(1))]


def test_a_base_must_be_among_the_sources_of_its_slice(models: Models) -> None:
    a, b, c = models
    sources = [{"model": m, "layer_range": [0, 4]} for m in (a, b)]
    data = {"merge_method": "slerp", "base_model": c, "slices": [{"sources": sources}]}
    (problem,) = refusals({**data, "parameters": {"t": 0.5}})
    assert f"base_model {c} is not among the sources of this slice" in problem
    (problem,) = refusals({"merge_method": "slerp", "models": [{"model": a}], "parameters": {"t": 1}})
    assert "slerp needs a base_model" in problem
    alone = {"merge_method": "slerp", "base_model": a, "models": [{"model": a}], "parameters": {"t": 1}}
    (problem,) = refusals(alone)
    assert "slerp takes 1 model(s) beside the base, but 0 are listed" in problem
    (problem,) = refusals({"merge_method": "passthrough", "models": [{"model": a}, {"model": b}]})
    assert "passthrough takes 1 model(s), but 2 are listed here" in problem


@pytest.mark.parametrize(
    "method", one_in(3, ["task_arithmetic", "ties", "dare_ties", "della", "sce", "model_stock", "lines"])
)
def test_a_base_alone_is_what_deltas_give(models: Models, method: str) -> None:
    a, _, _ = models
    made = good({"merge_method": method, "base_model": a, "models": [{"model": a}]})
    assert {made.method(name) for name in made.names()} == {"copy"}
    assert f"{method} has no source beside the base: the result is {a}" in made.plan.manifest["notes"]


def test_a_base_alone_in_one_slice_is_taken_as_it_is(models: Models) -> None:
    a, b, _ = models
    both = [{"model": m, "layer_range": [2, 4], "parameters": {"weight": 1}} for m in (a, b)]
    slices = [piece(a, 0, 2), {"sources": both}]
    made = good({"merge_method": "ties", "base_model": a, "slices": slices})
    assert (made.method(Q.format(1)), made.method(Q.format(2))) == ("copy", "ties")


def test_one_model_twice_is_two_sources(models: Models) -> None:
    a, b, _ = models
    entries = [
        {"model": a, "layer_range": [0, 2], "parameters": {"weight": 1}},
        {"model": a, "layer_range": [2, 4], "parameters": {"weight": 3}},
    ]
    made = good({"merge_method": "linear", "slices": [{"sources": entries}]})
    assert made.reads(Q.format(0)) == [(0, Q.format(0)), (0, Q.format(2))]
    assert made.weights(Q.format(0)) == [1, 3]
    made = good(linear(a, b, a))
    assert made.rows(Q.format(0))[0]["num_inputs"] == 3


def test_what_is_one_value_per_tensor_is_refused_under_a_model(models: Models) -> None:
    a, b, _ = models
    entries = [{"model": a}, {"model": b, "parameters": {"t": 0.5}}]
    problems = refusals({"merge_method": "slerp", "base_model": a, "models": entries})
    assert any("'t' is one value per tensor" in problem and "models[1]" in problem for problem in problems)


def test_unknown_parameters_are_refused_at_every_level_at_once(models: Models) -> None:
    a, _, _ = models
    source = {"model": a, "layer_range": [0, 4], "parameters": {"weigth": 1}}
    piece = {"sources": [source], "parameters": {"normalise": True}}
    data = {"merge_method": "linear", "slices": [piece], "parameters": {"drop_rate": 1, "weight": 1}}
    problems = refusals(data)
    assert len(problems) == 3
    assert "Did you mean 'weight'?" in "\n".join(problems)
    assert "linear has: weight, normalize." in problems[0]


def test_missing_and_impossible_values_are_said_once_each(models: Models) -> None:
    a, b, c = models
    entries = [
        {"model": a},
        {"model": b, "parameters": {"weight": [{"filter": "mlp", "value": 1}]}},
        {"model": c, "parameters": {"weight": 1, "density": [0.5, 2.5]}},
    ]
    data = {"merge_method": "ties", "base_model": c, "models": entries}
    (problem,) = refusals(data)
    assert f"source {a} has no value of 'weight', which ties requires (39 tensors)" in problem
    entries[0]["parameters"] = {"weight": 1}
    (problem,) = refusals(data)
    assert f"source {b} has no value of 'weight'" in problem
    assert "27 tensors" in problem
    assert "and 22 more" in problem
    entries[1]["parameters"] = {"weight": 1, "density": [0.5, 2.5]}
    (problem,) = refusals(data)
    assert "models[1].parameters.density" in problem
    assert "between 0 and 1" in problem


def test_a_parameter_missing_for_all_tensors_is_said_without_a_list(models: Models) -> None:
    a, b, _ = models
    (problem,) = refusals({"merge_method": "linear", "models": [{"model": a}, {"model": b}]})
    assert "tensors" not in problem
    assert f"source {a} has no value of 'weight', which linear requires." in problem


def test_weights_that_cancel_are_refused(models: Models) -> None:
    a, b, _ = models
    entries = [{"model": a, "parameters": {"weight": 1}}, {"model": b, "parameters": {"weight": -1}}]
    (problem,) = refusals({"merge_method": "linear", "models": entries})
    assert "the weights sum to 0" in problem
    assert "39 tensors" in problem


def _without_effect(made: Any) -> list[str]:
    return sorted(note for note in made.plan.manifest["notes"] if "has no effect" in note)


def test_a_parameter_without_effect_is_noted(models: Models) -> None:
    a, b, _ = models
    entries = [{"model": b, "parameters": {"weight": 1, "density": 0.5, "int8_mask": True}}]
    data = {"merge_method": "task_arithmetic", "base_model": a, "models": entries}
    made = good({**data, "parameters": {"int8_mask": True}})
    assert [note.split("'")[1] for note in _without_effect(made)] == ["density", "int8_mask"]


@pytest.mark.parametrize("method", ["slerp", "model_stock"])
def test_parameters_of_other_methods_change_nothing_and_are_noted(models: Models, method: str) -> None:
    """Values that the other method would refuse, gradients and filters too: nobody reads them."""
    a, b, c = models
    others = [b] if method == "slerp" else [b, c]
    own = {"t": 0.5} if method == "slerp" else {}
    theirs = {"density": 7.5, "weight": [{"filter": "mlp", "value": 1}, {"value": 0.5}], "lambda": [0, 1]}
    data: dict[str, Any] = {"merge_method": method, "base_model": a}
    plain = good({**data, "models": [{"model": m} for m in others], "parameters": own})
    entries = [{"model": m, "parameters": theirs} for m in others]
    made = good({**data, "models": entries, "parameters": {"normalize": False, "int8_mask": True, **own}})
    notes = _without_effect(made)
    assert [note.split("'")[1] for note in notes] == ["density", "int8_mask", "lambda", "normalize", "weight"]
    assert all(f"has no effect on {method}" in note for note in notes)
    for name in plain.names():
        assert made.settings(name) == plain.settings(name)


def test_a_parameter_of_another_method_is_noted_with_the_one_that_may_be_meant(models: Models) -> None:
    a, b, c = models
    data = {"merge_method": "ram", "base_model": a, "models": [{"model": b}, {"model": c}]}
    (note,) = _without_effect(good({**data, "parameters": {"eps": 0.1}}))
    assert "did you mean 'epsilon'?" in note


UP = "model.layers.{}.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def _ties(models: Models, *rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    base, one, two = models
    weighted = [{"model": each, "parameters": {"weight": 1, "density": 0.5}} for each in (one, two)]
    return {"merge_method": "ties", "base_model": base, "models": weighted, "methods": list(rules), **more}


def test_attention_by_slerp_norms_from_the_base_and_the_rest_by_ties(models: Models) -> None:
    base, one, _ = models
    slerp = {"merge_method": "slerp", "sources": [base, one], "parameters": {"t": 0.3}}
    norms = {"role": "norm", "merge_method": "passthrough", "sources": [base]}
    made = good(_ties(models, {"role": "attention", **slerp}, norms))
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
    recipe = stack(piece(a, 0, 4), piece(b, 1, 3), methods=[{"layers": 4, "parameters": {"scale": 0.5}}])
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
    slices = [piece((a, b), 0, 2), piece((a, c), 2, 4)]
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


def test_a_method_that_takes_all_may_be_chosen_where_the_recipe_s_own_cannot_be(models: Models) -> None:
    a, b, c = models
    recipe = linear(a, b, c, base_model=a) | {"merge_method": "slerp", "parameters": {"weight": 1, "t": 0.5}}
    every = [{"filter": "*", "merge_method": "linear"}]
    assert good({**recipe, "methods": every}).method(Q.format(0)) == "linear"
    problems = refusals({**recipe, "methods": [{"role": "norm", "merge_method": "linear"}]})
    assert any("slerp takes 1 model(s) beside the base, but 2 are listed here" in each for each in problems)


def test_two_rules_for_one_tensor_are_refused_with_both_places(models: Models) -> None:
    one = {"role": "attention", "merge_method": "task_arithmetic"}
    other = {"glob": "*.q_proj.*", "parameters": {"lambda": 0.5}}
    (problem,) = planned(_ties(models, one, other)).plan.problems
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
    models = [{"model": each, "parameters": {"weight": 1}} for each in (b, c)]
    rules = [{"role": "mlp", "merge_method": "task_arithmetic"}]
    made = good({"merge_method": "linear", "base_model": a, "models": models, "methods": rules})
    assert [source for source, _ in made.reads(UP.format(0))] == [0, 1, 2]
    assert [source for source, _ in made.reads(Q.format(0))] == [1, 2]
    assert made.fate(0, Q.format(0))[:2] == ("dropped", "not_chosen")


@pytest.mark.parametrize("method", one_in(2, ["slerp", "nearswap", "arcee_fusion"]))
@pytest.mark.parametrize("is_sliced", [False, True])
def test_the_base_that_a_message_names_works(models: Models, method: str, is_sliced: bool) -> None:
    a, b, _ = models
    parameters = {} if method == "arcee_fusion" else {"t": 0.5}
    listed: dict[str, Any] = {"models": [{"model": a}, {"model": b}]}
    if is_sliced:
        listed = {"slices": [piece((a, b), 0, 4)]}
    data = {"merge_method": method, "parameters": parameters, **listed}
    (problem,) = refusals(data)
    assert "needs a base_model" in problem
    named = problem.split("Add 'base_model: ")[1].split("'")[0]
    made = good({**data, "base_model": named})
    assert made.method(Q.format(0)) == method


def test_the_base_that_a_message_names_for_a_slice_works(models: Models) -> None:
    a, b, c = models
    slices: list[dict[str, Any]] = [piece(pair, low, low + 2) for low, pair in ((0, (a, b)), (2, (c, b)))]
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
