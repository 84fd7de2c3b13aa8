"""Recipes of mixtures: builds, prompts, and routers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from kits.recipe_texts import problems, recipe_of

from raymerge.errors import RecipeError
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.load import canonical, parse_recipe, recipe_from_mapping
from raymerge.recipes.moe import RANDOM_GATES, TEXT_GATES, Expert, GateMode, MoeRecipe, Trunk, trunk_recipe
from raymerge.recipes.order import references
from raymerge.recipes.schema import Align, MethodRule, ModelEntry, Recipe

recipe = partial(recipe_of, MoeRecipe)

TWO = """\
base_model: models/base
gate_mode: hidden
experts:
  - source_model: models/code
    positive_prompts: ["def area(width, height):"]
  - source_model: models/med
    positive_prompts: ["The patient reports mild pain."]
"""


@pytest.mark.parametrize(
    "gate", ["hidden", "hidden_last", "hidden_avg", "cheap_embed", "router_input", "centroid", "ridge"]
)
def test_other_gates_need_prompts_for_every_expert(gate: str) -> None:
    text = TWO.replace("gate_mode: hidden", f"gate_mode: {gate}")
    assert recipe(text).gate_mode == gate
    cut = text.replace('    positive_prompts: ["The patient reports mild pain."]\n', "")
    (told,) = problems(cut)
    some = "some, or a prompt_file" if gate in ("router_input", "centroid", "ridge") else "some"
    assert told == (
        f"r.yml:6:5: expert 1 (models/med) has no positive_prompts, which gate_mode {gate} needs. "
        f"Give it {some}, or write gate_mode: random."
    )


def test_negative_prompts_can_tell_experts_apart() -> None:
    same = TWO.replace('["The patient reports mild pain."]', '["def area(width, height):"]')
    assert recipe(f"{same}    negative_prompts: [x]\n").experts[1].negative_prompts == ("x",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gate_mode: random\n", "r.yml:1:1: the key 'experts' is missing or empty. Add it."),
        ("gate_mode: random\n", "r.yml:1:1: the key 'base_model' is missing or empty. Add it."),
        (
            "base_model: a\nexperts: x\ngate_mode: random\n",
            "r.yml:2:1: experts: 'x' is a text; expected a list.",
        ),
        (
            f"{TWO}merge_method: linear\n",
            "r.yml:8:1: unknown key 'merge_method'. A recipe with 'experts' builds",
        ),
        (TWO.replace('["def', '[5, "def'), "r.yml:5:24: 5 is a number; expected a text."),
        (f"{TWO}  - 3\n", "r.yml:8:5: 3 is a number where a map belongs. Write a map like {source_model"),
    ],
)
def test_bad_recipes(text: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(text))


def test_canonical_sees_prompts_and_sources() -> None:
    assert canonical(recipe(TWO)) == canonical(recipe(f"# said again\n{TWO}seed: 0\n"))
    for changed in (TWO.replace("area", "size"), TWO.replace("models/code", "models/other")):
        assert canonical(recipe(TWO)) != canonical(recipe(changed))


def test_the_method_of_a_mixture_may_be_called_moe() -> None:
    read = recipe(f"{TWO}merge_method: moe\n")
    assert read == recipe(TWO)
    (note,) = read.notes
    assert "'merge_method: moe' has no effect" in note
    told = problems("merge_method: moe\nmodels: [{model: a}]\nexperts: {keep: [0]}\nbase_model: a\n")
    assert "unknown key 'merge_method'" in told[0]


RANDOM = "base_model: a\ngate_mode: random\nexperts: [{source_model: b}, {source_model: c}]\n"
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs" / "recipes").rglob("moe-*.yml"))


def test_every_key_of_a_build() -> None:
    read = recipe(
        """\
name: mixture
base_model: a
gate_mode: ridge
gate_scale: 2
gate_ridge: 1e-3
granularity: 4
weight_scaling: false
layout: fused
pickled_weights: refuse
experts:
  - {source_model: b, prompt_file: b.txt, reinit_fraction: 0.5, noise_scale: 0.01}
  - {source_model: c+adapter, positive_prompts: [x], reinit_fraction: 1}
trunk:
  merge_method: ties
  models: [{model: b, parameters: {weight: 0.5}}, {model: c}]
  parameters: {weight: 1, density: 0.5}
  methods: [{role: norm, merge_method: passthrough, sources: [b]}]
"""
    )
    assert (read.name, read.gate_scale, read.gate_ridge) == ("mixture", 2.0, 1e-3)
    assert (read.granularity, read.weight_scaling) == (4, False)
    assert (read.layout, read.pickled_weights) == ("fused", "refuse")
    assert [each.reinit_fraction for each in read.experts] == [0.5, 1.0]
    assert read.trunk == Trunk(
        merge_method="ties",
        models=[ModelEntry(model="b", parameters={"weight": 0.5}), ModelEntry(model="c")],
        parameters={"weight": 1, "density": 0.5},
        methods=[MethodRule(role="norm", merge_method="passthrough", sources=["b"])],
    )


def test_models_of_a_trunk_are_named_behind_the_experts_and_its_rules_last() -> None:
    models, rule = "models: [{model: d}, {model: b}]", "methods: [{role: mlp, sources: [b]}]"
    trunk = f"trunk: {{merge_method: linear, {models}, {rule}}}\n"
    read = recipe(f"{RANDOM}shared_experts: [{{source_model: e}}]\n{trunk}")
    assert [(".".join(map(str, path)), str(each)) for path, each in references(read)] == [
        ("base_model", "a"),
        ("experts.0.source_model", "b"),
        ("experts.1.source_model", "c"),
        ("shared_experts.0.source_model", "e"),
        ("trunk.models.0.model", "d"),
        ("trunk.models.1.model", "b"),
        ("trunk.methods.0.sources.0", "b"),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("granularity: 0", "granularity: 0 is out of range. Write a whole number at least 1."),
        ("layout: fuse", "layout: 'fuse' is not known here. Did you mean 'fused'? Write one of: hub, fused."),
        ("gate_scale: 0", "gate_scale: 0 is out of range. Write a number from 1e-06 to 1000000."),
        ("gate_scale: 1e39", "gate_scale: '1e39' is out of range. Write a number from 1e-06 to 1000000."),
        (
            "tokenizer_source: union",
            "unknown key 'tokenizer_source'. A mixture has the tokenizer and the vocabulary of its "
            "base_model. Merge vocabularies in a recipe of their own before this one, and name its result as "
            "base_model.",
        ),
        (
            "gate_ridge: 0.1",
            "'gate_ridge' belongs to gate_mode ridge, and gate_mode is random. "
            "Remove it, or write gate_mode: ridge.",
        ),
        (
            "load_in_4bit: true",
            "unknown key 'load_in_4bit'. In mergekit that is the flag --load-in-4bit; it is not needed here, "
            "since the base is run with one layer in memory at a time. Remove the key.",
        ),
        (
            "models: [{model: a}]",
            "unknown key 'models'. Everything but the experts is merged by "
            "'trunk: {merge_method: ..., models: [...]}'.",
        ),
        (
            "merge_method: linear",
            "unknown key 'merge_method'. A recipe with 'experts' builds a mixture of experts and has no "
            "method. Everything but the experts is merged by 'trunk: {merge_method: ..., models: [...]}'.",
        ),
    ],
)
def test_wrong_keys(line: str, expected: str) -> None:
    (told,) = problems(f"{RANDOM}{line}\n")
    assert told.startswith("r.yml:4:")
    assert told.split(": ", 1)[1] == expected


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (
            "noise_scale: -0.1",
            "noise_scale: -0.1 is below 0, and is a standard deviation. Write 0 or more, like 0.01.",
        ),
        ("reinit_fraction: 1.5", "reinit_fraction: 1.5 is not a fraction. Write a number from 0 to 1."),
    ],
)
def test_wrong_keys_of_an_expert(key: str, told: str) -> None:
    text = RANDOM.replace("source_model: b", f"source_model: b, {key}")
    assert problems(text) == [f"r.yml:3:29: {told}"]


TRUNK = """\
base_model: a
gate_mode: random
experts: [{source_model: b}, {source_model: c}]
trunk:
  merge_method: linear
  parameters: {weight: 1}
  models:
    - {model: b, parameters: {weight: 0.5}}
    - model: c
  methods: [{role: norm, sources: [b]}]
"""
WEIGHT = ("parameters", "weight")


@pytest.mark.parametrize(
    ("path", "mark", "words"),
    [
        ((), "4:1", "trunk"),
        (("base_model",), "1:1", "base_model"),
        (("models", 0, *WEIGHT), "8:31", "trunk.models[0].parameters.weight"),
        (("models", 1, *WEIGHT), "6:16", "trunk.parameters.weight"),
        (("methods", 0, "sources", 0), "10:36", "trunk.methods[0].sources[0]"),
    ],
)
def test_places_of_a_trunk_are_those_of_the_mixture(
    path: tuple[str | int, ...], mark: str, words: str
) -> None:
    written, plain = recipe(TRUNK), recipe_from_mapping(yaml.safe_load(TRUNK))
    assert isinstance(plain, MoeRecipe)
    assert trunk_recipe(written, ["weight"]).where(*path) == f"r.yml:{mark}"
    assert trunk_recipe(plain, ["weight"]).where(*path) == f"recipe: {words}"


def test_places_of_a_trunk_that_lists_no_models_or_is_none() -> None:
    text = f"{RANDOM}trunk: {{merge_method: linear, parameters: {{weight: 1}}}}\n"
    listed = trunk_recipe(recipe(text), ["weight"])
    assert listed.where("models", 1) == "r.yml:4:1"
    assert listed.where("models", 1, *WEIGHT) == "r.yml:4:44"
    assert trunk_recipe(recipe(RANDOM), []).where("models", 0) == "r.yml:1:1"
    made = recipe_from_mapping(yaml.safe_load(RANDOM))
    assert isinstance(made, MoeRecipe)
    assert trunk_recipe(made, []).where("models", 0) == "recipe: base_model"


def test_a_gate_that_is_none_is_one_fault() -> None:
    text = RANDOM.replace("random", "rigde") + "gate_ridge: 0.1\nshared_experts: [{source_model: b}]\n"
    (told,) = problems(text)
    assert told.startswith("r.yml:2:1: gate_mode: 'rigde' is not known here. Did you mean 'ridge'?")


@pytest.mark.parametrize(
    "change",
    [
        *("layout: fused", "granularity: 2", "weight_scaling: false", "gate_scale: 2"),
        *("pickled_weights: refuse", "trunk: {merge_method: linear}"),
        "trunk: {merge_method: linear, parameters: {weight: 1}}",
    ],
)
def test_canonical_sees_every_choice(change: str) -> None:
    assert canonical(recipe(RANDOM)) != canonical(recipe(f"{RANDOM}{change}\n"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_ours_is_a_recipe_of_models_that_are_there(example: Path) -> None:
    read = parse_recipe(example.read_text(encoding="utf-8"))
    assert isinstance(read, MoeRecipe)
    assert all((ROOT / reference.path).is_dir() for _, reference in references(read))
    files = [each.prompt_file for each in read.experts if each.prompt_file is not None]
    assert all((ROOT / file).is_file() for file in files)


MODES = get_args(GateMode)
PROMPTED = [mode for mode in MODES if mode not in RANDOM_GATES]


def two(gate: str, first: str, second: str = "positive_prompts: [y]") -> str:
    return (
        f"base_model: a\ngate_mode: {gate}\nexperts:\n"
        f"  - {{source_model: b, {first}}}\n  - {{source_model: c, {second}}}\n"
    )


@pytest.mark.parametrize("gate", TEXT_GATES)
def test_a_file_stands_for_prompts_where_the_gate_learns_from_every_token(gate: str) -> None:
    read = recipe(two(gate, "prompt_file: texts/b.txt"))
    assert [each.prompt_file for each in read.experts] == ["texts/b.txt", None]
    assert read.experts[0].positive_prompts == ()


@pytest.mark.parametrize("gate", [mode for mode in MODES if mode not in TEXT_GATES])
def test_other_gates_read_no_file(gate: str) -> None:
    (told,) = problems(two(gate, "prompt_file: b.txt"))
    instead = "." if gate in RANDOM_GATES else " and write positive_prompts."
    assert told.startswith(f"r.yml:4:23: gate_mode {gate} reads no 'prompt_file'. ")
    assert told.endswith(f"Write one of gate_mode: router_input, centroid, ridge; or remove it{instead}")


def test_ridge_takes_no_negative_prompts() -> None:
    (told,) = problems(two("ridge", "positive_prompts: [x], negative_prompts: [z]"))
    assert told == (
        "r.yml:4:46: negative_prompts: gate_mode ridge learns what is not an expert's from the prompts of "
        "the others. Remove 'negative_prompts'."
    )


@pytest.mark.parametrize("gate", ["cheap_embed", *sorted(RANDOM_GATES)])
def test_held_out_prompts_need_a_run_of_the_base(gate: str) -> None:
    (told,) = problems(two(gate, "positive_prompts: [x], held_out_prompts: [z]"))
    assert told == (
        f"r.yml:4:46: gate_mode {gate} does not run the base, so no 'held_out_prompts' are routed. "
        "Remove them, or choose another gate_mode."
    )


def test_held_out_prompts_alone_are_not_enough() -> None:
    (told,) = problems(two("ridge", "held_out_prompts: [x]"))
    assert told.startswith("r.yml:4:5: expert 0 (b) has no positive_prompts, which gate_mode ridge needs.")


def test_one_file_for_all_tells_nobody_apart() -> None:
    (told,) = problems(two("centroid", "prompt_file: t.txt", "prompt_file: t.txt"))
    assert told == (
        "r.yml:3:1: experts 0 (b), 1 (c) all have the same prompts; no router tells them apart. "
        "Give each its own, or write gate_mode: random."
    )


@pytest.mark.parametrize("gate", PROMPTED)
def test_copies_have_the_same_prompts(gate: str) -> None:
    (told,) = problems(two(gate, "positive_prompts: [x], copies: 3"))
    assert told == (
        "r.yml:4:46: copies: the 3 copies of expert 0 (b) have the same prompts; no router tells them apart. "
        "List the model again with prompts of its own, or write gate_mode: random."
    )


@pytest.mark.parametrize("gate", sorted(RANDOM_GATES))
def test_copies_count_as_experts(gate: str) -> None:
    text = (
        f"base_model: a\ngate_mode: {gate}\nexperts_per_token: 4\nexperts: [{{source_model: b, copies: 4}}]\n"
    )
    assert recipe(text).experts[0].copies == 4
    (told,) = problems(text.replace("per_token: 4", "per_token: 5"))
    assert told == (
        "r.yml:3:1: experts_per_token is 5, but 'experts' has only 4: 0 (b) x 4. "
        "Add experts, or write experts_per_token: 4."
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "0 is out of range. Write a whole number from 1 to 4096."),
        ("4097", "4097 is out of range."),
        ("many", "'many' is not a whole number."),
    ],
)
def test_copies_are_a_number(value: str, words: str) -> None:
    told = problems(f"base_model: a\ngate_mode: random\nexperts: [{{source_model: b, copies: {value}}}]\n")
    assert any(line.startswith(f"r.yml:3:29: copies: {words}") for line in told)


def test_shared_experts_have_no_copies() -> None:
    shared = "shared_experts: [{source_model: b, copies: 2}]\n"
    (told,) = problems(two("hidden", "positive_prompts: [x]") + shared)
    assert told == (
        "r.yml:6:36: 'copies' of a shared expert would all see every token. "
        "Remove it; 'residual_scale' makes a shared expert count for more."
    )
    assert recipe(two("hidden", "positive_prompts: [x]") + shared.replace("2", "1")).shared_experts


def test_shared_experts_need_no_prompts_and_none_that_the_gate_cannot_use() -> None:
    text = two("ridge", "positive_prompts: [x]") + "shared_experts: [{source_model: b}]\n"
    assert recipe(text).shared_experts == (Expert(source_model="b"),)
    wrong = text.replace("{source_model: b}", "{source_model: b, negative_prompts: [x]}")
    (told,) = problems(wrong)
    assert told.startswith("r.yml:6:36: negative_prompts: gate_mode ridge learns")


def test_all_that_is_wrong_with_prompts_comes_at_once() -> None:
    text = two("cheap_embed", "prompt_file: x, held_out_prompts: [u]", "copies: 2, negative_prompts: [v]")
    assert [line.split(": ")[0] for line in problems(text)] == [
        "r.yml:4:23",
        "r.yml:4:39",
        "r.yml:5:5",
        "r.yml:5:23",
    ]


@pytest.mark.parametrize("gate", MODES)
def test_rules_hold_for_plain_values_and_for_made_experts_alike(gate: str) -> None:
    plain: dict[str, Any] = {"source_model": "b", "positive_prompts": ["x"], "copies": 2}
    for expert in (plain, Expert(**plain)):
        data = {"base_model": "a", "gate_mode": gate, "experts": [expert]}
        if gate in RANDOM_GATES:
            assert recipe_from_mapping(data)
            continue
        with pytest.raises(
            RecipeError, match=r"recipe: experts\[0\]\.copies: the 2 copies of expert 0 \(b\)"
        ):
            recipe_from_mapping(data)


def test_an_expert_has_a_source_model_and_no_model() -> None:
    told = problems("base_model: a\ngate_mode: random\nexperts: [{model: b, copies: 2}]\n")
    assert told == [
        "r.yml:3:11: the key 'source_model' is missing or empty. Add it.",
        "r.yml:3:12: unknown key 'model'. An expert's model is its 'source_model'.",
    ]


@pytest.mark.parametrize("other", ["[b, a]", "[a, b, a]"])
def test_prompts_in_another_order_are_the_same(other: str) -> None:
    text = "base_model: m\nexperts:\n- {source_model: x, positive_prompts: [a, b]}\n"
    with pytest.raises(RecipeError, match="all have the same prompts"):
        parse_recipe(f"{text}- {{source_model: y, positive_prompts: {other}}}\n", "r.yml")


router_recipe = partial(recipe_of, Recipe)

TEXT = "merge_method: linear\nmodels: [{model: a}, {model: b@v+c}]\nbase_model: a\n"


def test_routers_are_merged_and_nothing_is_aligned_unless_it_is_said() -> None:
    assert (router_recipe(TEXT).router, router_recipe(TEXT).align) == ("merge", None)
    assert canonical(router_recipe(f"{TEXT}router: merge\nalign: none\n")) == canonical(router_recipe(TEXT))


@pytest.mark.parametrize(
    ("written", "router"),
    [
        ("merge", "merge"),
        ("base", "base"),
        ("./base", ModelReference("./base")),
        ("b@v+c", ModelReference("b", "v", "c")),
        ("{model: {path: b, revision: v}}", ModelReference("b", "v")),
    ],
)
def test_a_router_is_a_word_or_a_model(written: str, router: str | ModelReference) -> None:
    read = router_recipe(f"{TEXT}router: {written}\n")
    assert read.router == router
    assert recipe_from_mapping(dict(read.model_dump(mode="json", exclude_defaults=True))) == read


def test_a_model_whose_router_is_taken_is_named_last() -> None:
    read = router_recipe(f"router: b@v+c\n{TEXT}tokenizer_source: d\n")
    assert [path for path, _ in references(read)][-2:] == [("tokenizer_source",), ("router",)]
    assert list(references(read))[-1] == (("router",), ModelReference("b", "v", "c"))
    assert all(path != ("router",) for path, _ in references(router_recipe(f"{TEXT}router: base\n")))


@pytest.mark.parametrize(
    ("written", "align"),
    [
        ("experts", Align(experts=True, neurons=True)),
        ("{experts: true, neurons: false}", Align(experts=True, neurons=False)),
        ("{neurons: false}", Align(experts=True, neurons=False)),
        ("none", None),
    ],
)
def test_alignment(written: str, align: Align | None) -> None:
    read = router_recipe(f"{TEXT}align: {written}\n")
    assert read.align == align
    assert router_recipe(read.model_copy().text) == read
    assert Recipe(merge_method="linear", models=[{"model": "a"}], align=align).align == align


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("router: a+b+c", "router: 'a+b+c' names more than one adapter ('+' twice). If the path itself"),
        ("router: {path: a}", "'path' belongs into a map below 'model'. Write {model: {path: a}}."),
        (
            "align: expert",
            "align: 'expert' is not known here. Did you mean 'experts'? "
            "Write experts, none, or a map like {experts: true, neurons: false}.",
        ),
        ("align: {neuron: true}", "unknown key 'neuron'. Did you mean 'neurons'?"),
        (
            "align: {experts: false, neurons: true}",
            "'experts' is false, and neurons are matched within matched experts only. "
            "Remove it, or write 'align: none'.",
        ),
    ],
)
def test_wrong_words(line: str, expected: str) -> None:
    told = problems(f"{TEXT}{line}\n")
    assert any(each.split(": ", 1)[1].startswith(expected) for each in told)
    assert all(each.startswith("r.yml:4:") for each in told)


@pytest.mark.parametrize(("key", "value"), [("router", "base"), ("align", "experts")])
def test_adapters_have_no_routers(key: str, value: str) -> None:
    (told,) = problems(
        f"merge_method: linear\nmodels: [{{model: a}}]\n{key}: {value}\nadapter: {{rank: 4}}\n"
    )
    assert told == (
        f"r.yml:3:1: '{key}' has no meaning beside 'adapter': adapters have no router of their own. "
        f"Remove '{key}', or name models with adapters on them."
    )
