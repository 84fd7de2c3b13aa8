"""Places in recipes, paths, references, and the order of several merges."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.recipe_texts import nowhere, problems

from raymerge.documents.fields import Fault, FaultError
from raymerge.documents.positions import MAX_DOCUMENTS, MAX_NODES, Located, read_document, split_documents
from raymerge.errors import RecipeError
from raymerge.recipes.entry import RECIPE, ModelReference, parse_reference, plain_reference, read_reference
from raymerge.recipes.load import draft_recipes, parse_recipe, parse_recipes
from raymerge.recipes.order import AnyRecipe, merge_order, places_read, references

TEXT = """\
# a comment
merge_method: linear
models:
  - model: a
    parameters: {weight: 0.5}
  - model: b
    parameters:
      weight:
        - filter: mlp
          value: [1, 2]
"""


def read(text: str) -> Located:
    (part,) = split_documents(text, "r.yml", RECIPE)
    return read_document(part, "r.yml", RECIPE)


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert problem.what.endswith(".")
    assert problem.remedy.endswith((".", '".'))
    return str(problem)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ((), "r.yml:1:1"),
        (("merge_method",), "r.yml:2:1"),
        (("models",), "r.yml:3:1"),
        (("models", 0), "r.yml:4:5"),
        (("models", 0, "parameters"), "r.yml:5:5"),
        (("models", 0, "parameters", "weight"), "r.yml:5:18"),
        (("models", 1), "r.yml:6:5"),
        (("models", 1, "parameters", "weight", 0, "value", 1), "r.yml:10:22"),
        # What is not there has the place of its nearest parent.
        (("models", 0, "parameters", "density"), "r.yml:5:5"),
        (("models", 7, "model"), "r.yml:3:1"),
        (("base_model",), "r.yml:1:1"),
    ],
)
def test_every_key_and_item_has_its_place(path: tuple[str | int, ...], place: str) -> None:
    assert read(TEXT).places.at(path) == place


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 1\n", ["a: 1\n"]),
        ("# x\n\na: 1\n---\nb: 2\n", ["# x\n\na: 1\n", "---\nb: 2\n"]),
        ("--- {a: 1}\n--- {b: 2}", ["--- {a: 1}\n", "--- {b: 2}"]),
        ("a: 1\r\n---\r\nb: 2\r\n", ["a: 1\r\n", "---\r\nb: 2\r\n"]),
        ("a: 1\n...\n# y\n---\nb: 2\n", ["a: 1\n...\n# y\n", "---\nb: 2\n"]),
        (
            "%YAML 1.1\n---\na: 1\n...\n%YAML 1.1\n---\nb: 2\n",
            ["%YAML 1.1\n---\na: 1\n...\n", "%YAML 1.1\n---\nb: 2\n"],
        ),
        ("a: |\n  x\n  ---\n  y\n", ["a: |\n  x\n  ---\n  y\n"]),
        ("é: 1\n---\nü: 2\n", ["é: 1\n", "---\nü: 2\n"]),
        ("---\n---\na: 1\n---\n# nothing\n", ["---\n---\na: 1\n---\n# nothing\n"]),
        ("a: 1\n---\n---\nb: 2\n---\n", ["a: 1\n---\n", "---\nb: 2\n---\n"]),
    ],
)
def test_documents_have_their_own_part_of_the_text_and_empty_ones_none(text: str, parts: list[str]) -> None:
    assert [part.text for part in split_documents(text, "r.yml", RECIPE)] == parts
    assert "".join(parts) == text


def test_a_file_has_a_bounded_number_of_documents() -> None:
    assert len(split_documents("--- {a: 1}\n" * MAX_DOCUMENTS, "r.yml", RECIPE)) == MAX_DOCUMENTS
    assert f"r.yml:{MAX_DOCUMENTS + 1}:1: the file has more than {MAX_DOCUMENTS} YAML documents." in refusal(
        "---\n" * 1_000
    )


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.floats(-1e3, 1e3)
    | st.text("ab:#-[]{}*& '\"\n"),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.text("abcxyz", min_size=1), PLAIN, min_size=1, max_size=4))
def test_data_is_what_a_safe_yaml_reader_gives(data: dict[str, object]) -> None:
    document = read(yaml.safe_dump(data))
    assert document.data == data
    assert document.faults == ()


def test_dates_stay_texts() -> None:
    assert read("a: 2024-01-31\n").data == {"a": "2024-01-31"}


def test_anchors_and_merge_keys() -> None:
    text = "x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: {<<: [{a: 5}, *x]}\nw: *x\n"
    document = read(text)
    assert document.data["y"] == {"a": 1, "b": 3}
    assert document.data["z"] == {"a": 5, "b": 2}
    assert document.data["w"] == {"a": 1, "b": 2}
    assert document.places.at(("y", "a")) == "r.yml:1:8"
    assert document.places.at(("y", "b")) == "r.yml:2:13"


def test_a_merge_key_takes_maps_only() -> None:
    (fault,) = read("a: {<<: 3, b: 1}\n").faults
    assert fault.path == ("a",)
    assert "'<<' takes a map" in fault.what


def test_repeated_keys_name_the_first_line() -> None:
    document = read("a: 1\nb: {c: 1, c: 2}\na: 3\na: 4\n")
    assert document.data == {"a": 1, "b": {"c": 1}}
    assert [str(problem) for problem in document.places.problems(list(document.faults))] == [
        "r.yml:2:11: the key 'c' was given before, on line 2. Remove one of the two.",
        "r.yml:3:1: the key 'a' was given before, on line 1. Remove one of the two.",
        "r.yml:4:1: the key 'a' was given before, on line 1. Remove one of the two.",
    ]


def test_a_number_is_a_key_as_it_is_spelled_and_a_text() -> None:
    located = read("0: a\nb: {12: [c], x: d}\n")
    assert located.data == {"0": "a", "b": {"12": ["c"], "x": "d"}}
    assert located.places.at(("b", "12", 0)) == "r.yml:2:10"
    (fault,) = read("1: a\n'1': b\n").faults
    assert fault.what == "the key '1' was given before, on line 1."


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1_0: a\n", "r.yml:1:1: the key '1_0' is not a text."),
        ("a: {[1, 2]: a}\n", "r.yml:1:5: the key a list or map is not a text."),
        ("a: !x 3\n", "r.yml:1:1: a: the tag !x has no meaning"),
        ("a: !!python/name:os.system ''\n", "python/name:os.system has no meaning"),
        ("a: " + "9" * 5000 + "\n", "cannot be read"),
        ("a: !!int x\n", "r.yml:1:1: a: 'x' cannot be read"),
    ],
)
def test_yaml_that_no_recipe_needs(text: str, what: str) -> None:
    document = read(text)
    (problem,) = document.places.problems(list(document.faults))
    assert what in str(problem)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "r.yml:1:1: the recipe is empty."),
        ("- a\n", "r.yml:1:1: a recipe is a map of keys to values."),
        ("a: 1\n--- b: 2\n", "r.yml:2:6: this is not YAML"),
        ("a: 1\n\tb: 2\n", "r.yml:2:1: a tab stands here. Indent with spaces"),
        ("a: 'x\n", "this is not YAML"),
        ("a: *x\n", "r.yml:1:4: this is not YAML: found undefined alias 'x'."),
        ("filter: *\n", "r.yml:1:10: '*' starts an alias here. Put it in quotes"),
        ("a: 1\nb: \x07\n", "r.yml:2:4: the character U+0007 may not stand in YAML."),
    ],
)
def test_texts_that_are_no_recipe(text: str, what: str) -> None:
    assert what in refusal(text)


def _tenfold(first: str, following: str) -> str:
    """Nine values, of which each names the one before ten times."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {following.format(', '.join([f'*a{i - 1}'] * 10))}" for i in range(1, 9)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [*a]\n", "nested more than 64 levels"),
        ("a: &a\n  <<: *a\n", "nested more than 64 levels"),
        ("a: &a {b: &b {c: *a}}\n", "nested more than 64 levels"),
        ("a: " + "[" * 70 + "]" * 70, "nested more than 64 levels"),
        ("[" * 1_000, "levels inside one another"),
        (_tenfold("[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", "[{}]"), f"more than {MAX_NODES} values"),
        (_tenfold("{x: 1}", "{{<<: [{}]}}"), f"more than {MAX_NODES} values"),
    ],
    ids=["list", "merge key", "maps", "brackets", "no end", "aliases", "merge keys"],
)
def test_what_holds_itself_or_blows_up_is_refused(text: str, words: str) -> None:
    assert words in refusal(text)


def test_what_aliases_nest_under_a_tag_is_refused_for_the_tag() -> None:
    lists = [f"  - &a{i} [{f'*a{i - 1}' if i else 1}]" for i in range(1500)]
    faults = read("\n".join(["a: !x", *lists, "b: !x [*a1499]"])).faults
    assert [fault.what for fault in faults] == ["the tag !x has no meaning in a recipe."] * 2


def test_a_long_recipe_within_the_bound_is_read() -> None:
    text = "a: [" + ", ".join(["1"] * (MAX_NODES - 10)) + "]"
    assert len(read(text).data["a"]) == MAX_NODES - 10  # type: ignore[arg-type]


CHAIN = """\
name: first
merge_method: linear
models:
  - model: s3://b/one+./adapter
    parameters: {weight: 1}
  - model: org/two@main
    parameters: {weight: 1}
---
base_model: first
gate_mode: centroid
dtype: bfloat16
experts:
  - source_model: ./three
    positive_prompts: [a]
  - source_model: /four
    prompt_file: prompts.txt
"""
EXPERTS = """\
base_model: ./mixture
experts:
  drop: 2
  scores: scores.json
"""


def test_models_adapters_and_prompts_are_found_and_results_of_the_same_file_are_not() -> None:
    found = list(places_read(parse_recipes(CHAIN, "r.yml", exists=lambda _: False)))
    assert found == [
        ("r.yml:4:5", "s3://b/one"),
        ("r.yml:4:5", "./adapter"),
        ("r.yml:6:5", "org/two"),
        ("r.yml:13:5", "./three"),
        ("r.yml:15:5", "/four"),
        ("r.yml:16:5", "prompts.txt"),
    ]


def test_a_file_of_scores_is_found_and_the_word_weights_is_none() -> None:
    found = list(places_read(parse_recipes(EXPERTS, "r.yml", exists=lambda _: False)))
    assert found == [("r.yml:1:1", "./mixture"), ("r.yml:4:3", "scores.json")]
    weights = EXPERTS.replace("scores.json", "weights")
    assert len(list(places_read(parse_recipes(weights, "r.yml", exists=lambda _: False)))) == 1


PIECES = st.text("abc/.-_+@ ", min_size=1, max_size=8).filter(lambda text: bool(text.strip()))
OPTIONAL = st.none() | PIECES


def faults_in(value: object) -> list[Fault]:
    with pytest.raises(FaultError) as caught:
        read_reference(value)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("models/base", ModelReference("models/base")),
        ("org/name@main", ModelReference("org/name", "main")),
        ("base+lora", ModelReference("base", None, "lora")),
        ("base@v1+lora@v2", ModelReference("base", "v1", "lora", "v2")),
        ("base+lora@v2", ModelReference("base", None, "lora", "v2")),
        ("/data/my model", ModelReference("/data/my model")),
        ("hf://gpt2@main", ModelReference("hf://gpt2", "main")),
        ("hdfs://me@host/a", ModelReference("hdfs://me@host/a")),
        ("https://me:p@s+s@h/a@v1", ModelReference("https://me:p@s+s@h/a", "v1")),
        ("s3://b/a+oss://k:s@b/c@v1", ModelReference("s3://b/a", None, "oss://k:s@b/c", "v1")),
        ("s3://b+lora@v2", ModelReference("s3://b", None, "lora", "v2")),
    ],
)
def test_the_grammar(text: str, reference: ModelReference) -> None:
    assert parse_reference(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize("path", ["models/a+b", "me@work/model", "a+b+c", "a@b@c", "v1+v2@x"])
def test_a_directory_of_exactly_that_name_is_taken_as_it_stands(path: str) -> None:
    assert parse_reference(path, exists=lambda text: text == path) == ModelReference(path)


def test_the_disk_is_asked_only_about_texts_that_could_mean_two_things() -> None:
    asked: list[str] = []

    def exists(path: str) -> bool:
        asked.append(path)
        return False

    parse_reference("models/base", exists=exists)
    assert asked == []
    parse_reference("models/base+lora", exists=exists)
    assert asked == ["models/base+lora"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a+b+c", "more than one adapter"),
        ("a@b@c", "two revisions"),
        ("", "empty"),
        ("a+", "empty"),
        ("@main", "empty"),
        ("a@+b", "empty"),
    ],
)
def test_what_the_grammar_does_not_allow(text: str, words: str) -> None:
    (fault,) = faults_in(text)
    assert words in fault.what
    assert f"'{text}'" in fault.what
    assert "path: PATH" in fault.remedy


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        ({"model": "base"}, ModelReference("base")),
        ({"model": {"path": "a+b@c"}}, ModelReference("a+b@c")),
        (
            {"model": {"path": "base", "revision": "v1"}, "lora": "l@v2"},
            ModelReference("base", "v1", "l", "v2"),
        ),
        ({"model": "base", "lora": {"path": "l+m"}}, ModelReference("base", None, "l+m")),
        (
            {"model": "base", "override_architecture": "LlamaForCausalLM"},
            ModelReference("base", override_architecture="LlamaForCausalLM"),
        ),
    ],
)
def test_maps(value: object, reference: ModelReference) -> None:
    assert read_reference(value) == reference
    assert read_reference(reference) is reference


def test_a_text_within_a_map_may_be_a_directory_with_an_at_sign() -> None:
    value = {"model": "me@work/model"}
    assert read_reference(value, exists=lambda _: True) == ModelReference("me@work/model")
    assert read_reference(value) == ModelReference("me", "work/model")


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        (5, (), "5 is a number"),
        ({}, (), "names no model"),
        ({"model": 3}, ("model",), "3 is a number"),
        ({"model": {"revision": "x"}}, ("model",), "has no path"),
        ({"model": {"path": "a", "revison": "x"}}, ("model", "revison"), "unknown key 'revison'"),
        ({"model": "a", "override_architecture": 1}, ("override_architecture",), "1 is a number"),
        ("a\0b", (), "U+0000"),
    ],
)
def test_a_fault_has_its_place_within_the_reference(
    value: object, path: tuple[object, ...], words: str
) -> None:
    faults = faults_in(value)
    assert [fault.path for fault in faults if words in fault.what] == [path]
    assert all(fault.remedy for fault in faults)


@pytest.mark.parametrize("value", [{"path": "a", "revision": "main"}, {"model": "a", "revision": "main"}])
def test_path_and_revision_a_level_too_high_get_the_form_that_works(value: dict[str, str]) -> None:
    (fault,) = faults_in(value)
    written = yaml.safe_load(fault.remedy.removeprefix("Write ").removesuffix("."))
    assert read_reference(written) == ModelReference("a", "main")


@settings(deadline=None, max_examples=50)
@given(PIECES, OPTIONAL, OPTIONAL, OPTIONAL, st.none() | st.just("LlamaForCausalLM"))
def test_any_reference_survives_being_written_and_read(
    path: str, revision: str | None, lora: str | None, lora_revision: str | None, architecture: str | None
) -> None:
    reference = ModelReference(path, revision, lora, lora_revision if lora else None, architecture)
    assert read_reference(plain_reference(reference)) == reference


MERGES = """\
# first the two halves
name: left
merge_method: linear
models: [{model: a}, {model: b}]
---
name: right
merge_method: linear
models: [{model: a}, {model: c}]
---
merge_method: slerp
base_model: left
models: [{model: left}, {model: right}]
parameters: {t: 0.5}
"""


def parse(text: str) -> tuple[AnyRecipe, ...]:
    return parse_recipes(text, "r.yml", exists=nowhere)


def merge(name: str | None, *models: str) -> str:
    head = "" if name is None else f"name: {name}\n"
    listed = ", ".join(f"{{model: {model}}}" for model in models)
    return f"---\n{head}merge_method: linear\nmodels: [{listed}]\n"


def names(recipes: tuple[AnyRecipe, ...]) -> list[str | None]:
    return [recipe.name for recipe in recipes]


def test_several_recipes_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "chain.yml"
    path.write_text(MERGES, encoding="utf-8")
    left, right, last = draft_recipes(path).require()
    assert (left.name, right.name, last.name) == ("left", "right", None)
    assert "".join((left.text, right.text, last.text)) == MERGES
    assert right.text.startswith("---\nname: right\n")
    assert last.where("models", 1, "model") == f"{path}:12:26"
    assert parse_recipe(last.text, exists=nowhere) == last
    assert merge_order((left, right, last), exists=nowhere) == (left, right, last)


def test_where_one_recipe_is_expected_several_are_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(MERGES, "chain.yml")
    assert str(caught.value) == (
        "chain.yml:5:1: a second recipe starts here, the file has 3; one is expected. Give the file to "
        "'raymerge submit', which carries out all of them, or keep one recipe in it."
    )


def test_among_equals_the_order_is_that_of_the_file() -> None:
    parts = [merge("z", "m"), merge("y", "m"), merge("x", "m")]
    for ordered in itertools.permutations(parts):
        text = merge(None, "x", "y", "z") + "".join(ordered)
        expected = [*names(parse(text))[1:], None]
        assert names(merge_order(parse(text), exists=nowhere)) == expected


@pytest.mark.parametrize(
    "body",
    [
        "merge_method: linear\nmodels: [{model: a}]\nbase_model: step",
        "merge_method: linear\nmodels: [{model: {model: {path: step}}}]",
        "merge_method: linear\nmodels: [{model: step+adapter}]",
        "merge_method: linear\nmodels: [{model: a+step}]",
        "merge_method: linear\nslices: [{sources: [{model: step, layer_range: [0, 1]}]}]",
        "merge_method: linear\nslices: [{sources: [{model: a, layer_range: [0, 1]}], base_model: step}]",
        "merge_method: linear\nmodules: {m: {models: [{model: step}]}}",
        "merge_method: linear\nmodules: {m: {slices: [{sources: [{model: step, layer_range: [0, 1]}]}]}}",
        "merge_method: linear\nmodels: [{model: a}]\nmethods: [{role: norm, sources: [step]}]",
        "merge_method: linear\nmodels: [{model: a}]\ntokenizer_source: step",
        "merge_method: linear\nmodels: [{model: a}]\ntokenizer: {source: step}",
        "merge_method: linear\nmodels: [{model: a}]\ntokenizer: {tokens: {x: {source: step}}}",
        "merge_method: linear\nmodels: [{model: a}]\n"
        "tokenizer: {tokens: {x: {source: {kind: model_token, model: step, token: y}}}}",
        "gate_mode: random\nbase_model: step\nexperts: [{source_model: a}, {source_model: b}]",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: step}]",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: b}]\n"
        "shared_experts: [{source_model: step}]",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: b}]\n"
        "trunk: {merge_method: linear, models: [{model: step}]}",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: b}]\n"
        "trunk: {merge_method: linear, methods: [{role: norm, sources: [step]}]}",
        "experts: {dense: 0}\nbase_model: step",
        "base_model: a\nexperts: {add: [{model: step}]}",
        "merge_method: linear\nmodels: [{model: a}]\nrouter: step",
    ],
)
def test_every_place_of_a_model_may_name_a_merge(body: str) -> None:
    recipes = parse(f"{body}\n{merge('step', 'a')}")
    assert names(merge_order(recipes, exists=nowhere)) == ["step", None]
    (found,) = [
        (path, model) for path, model in references(recipes[0]) if "step" in (model.path, model.lora_path)
    ]
    assert recipes[0].where(*found[0]) != recipes[0].where()


@pytest.mark.parametrize(
    "line", ["chat_template: step", "parameters: {step: 1}", "methods: [{filter: step, merge_method: step}]"]
)
def test_other_texts_are_no_merges(line: str) -> None:
    (told,) = problems(f"merge_method: step\nmodels: [{{model: a}}]\n{line}\n{merge('step', 'a')}")
    assert "no other merge uses 'step'" in told


def test_references_are_in_written_order() -> None:
    (read,) = parse(
        """
base_model: base
merge_method: linear
models: [{model: a}, {model: b@v}]
methods: [{role: norm, sources: [b@v, a]}]
tokenizer: {source: c, tokens: {x: {source: {kind: zero}}, y: {source: d}, z: {}}}
"""
    )
    assert list(references(read)) == [
        (("base_model",), ModelReference("base")),
        (("models", 0, "model"), ModelReference("a")),
        (("models", 1, "model"), ModelReference("b", "v")),
        (("methods", 0, "sources", 0), ModelReference("b", "v")),
        (("methods", 0, "sources", 1), ModelReference("a")),
        (("tokenizer", "source"), ModelReference("c")),
        (("tokenizer", "tokens", "y", "source"), ModelReference("d")),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            merge("x", "a") + merge("x", "b") + merge(None, "x"),
            ["r.yml:6:1: the name 'x' was given before, at r.yml:2:1. Give each merge a name of its own."],
        ),
        (
            merge(None, "a") + merge(None, "b") + merge(None, "c"),
            [
                "r.yml:4:1: this merge has no name, and neither has the one at r.yml:1:1. Only one may go",
                "r.yml:7:1: this merge has no name, and neither has the one at r.yml:1:1. Only one may go",
            ],
        ),
        (
            merge("x", "a") + merge(None, "b"),
            ["r.yml:2:1: no other merge uses 'x', but a file has one result, here the one without a name."],
        ),
        (
            merge("x", "a") + merge("y", "b") + merge("z", "c"),
            [
                "r.yml:2:1: no other merge uses 'x', but a file has one result, here 'z'.",
                "r.yml:6:1: no other merge uses 'y', but a file has one result, here 'z'.",
            ],
        ),
        (
            merge("x", "a", "x"),
            ["r.yml:4:23: 'x' uses itself. Name a model that is there before, or rename one"],
        ),
        (
            merge("x", "z") + merge("y", "x") + merge("z", "y") + merge(None, "z"),
            ["the merges need each other: 'x' uses 'z', 'z' uses 'y', 'y' uses 'x'."],
        ),
        (
            merge("p", "q") + merge("q", "p") + merge("r", "r", "q") + merge(None, "r"),
            ["the merges need each other: 'p' uses 'q', 'q' uses 'p'.", "'r' uses itself."],
        ),
        (
            merge("x", "a") + merge(None, "x@main"),
            ["r.yml:7:11: 'x' is a merge of this file and has no revision 'main'. Write 'x' alone."],
        ),
    ],
)
def test_merges_that_do_not_fit_together(text: str, expected: list[str]) -> None:
    told = problems(text)
    assert len(told) == len(expected)
    assert all(words in problem for words, problem in zip(expected, told, strict=True))


def test_a_name_that_is_a_directory_too_means_two_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step").mkdir()
    monkeypatch.chdir(tmp_path)
    text = merge("step", "a") + merge("result", "step")
    with pytest.raises(RecipeError) as caught:
        parse_recipes(text, "r.yml")
    assert str(caught.value) == (
        "r.yml:8:11: 'step' is a merge of this file, and a directory too. "
        "Rename the merge, or write './step' for the directory."
    )
    with pytest.raises(RecipeError, match="and a directory too"):
        merge_order(parse(text))


def test_all_that_is_wrong_in_all_recipes_is_told_at_once() -> None:
    text = merge("x", "a").replace("linear", "3") + "---\n- a list\n" + merge("y", "b") + "wieght: 1\n"
    told = problems(text + merge("z", "z") + merge("z", "x") + merge(None, "a"))
    assert told == [
        "r.yml:3:1: merge_method: 3 is a number; expected a text. Put it in quotes.",
        "r.yml:6:1: a recipe is a map of keys to values. Start with 'merge_method: ...'.",
        told[2],
        "r.yml:15:11: 'z' uses itself. Name a model that is there before, or rename one of the merges.",
        "r.yml:17:1: the name 'z' was given before, at r.yml:13:1. Give each merge a name of its own.",
    ]
    assert told[2].startswith("r.yml:11:1: unknown key 'wieght'.")


def test_a_merge_is_not_called_unused_while_another_cannot_be_read() -> None:
    (told,) = problems(merge("x", "a") + merge(None, "x") + "seed: -1\n")
    assert told.startswith("r.yml:8:1: seed: -1 is out of range.")


GRAPHS = st.integers(2, 7).flatmap(
    lambda size: st.tuples(
        st.permutations(range(size)),
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=12),
    )
)


@settings(deadline=None, max_examples=15)
@given(GRAPHS)
def test_any_graph_of_merges_is_put_in_order(graph: tuple[list[int], list[tuple[int, int]]]) -> None:
    listed, edges = graph
    uses = {index: sorted({low for low, high in edges if low < high == index}) for index in listed}
    unused = sorted(set(listed) - {low for lows in uses.values() for low in lows})
    text = "".join(merge(f"m{index}", "model", *(f"m{low}" for low in uses[index])) for index in listed)
    recipes = merge_order(parse(text + merge(None, "model", *(f"m{low}" for low in unused))), exists=nowhere)
    places = {recipe.name: place for place, recipe in enumerate(recipes)}
    assert places[None] == len(listed)
    assert all(places[f"m{low}"] < places[f"m{index}"] for index in listed for low in uses[index])
