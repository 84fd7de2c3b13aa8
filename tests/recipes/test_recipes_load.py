"""Recipes as they are read: fields, defaults, problems and hints."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.recipe_texts import problems
from pydantic import ValidationError

from raymerge.documents.positions import MAX_TEXT_BYTES
from raymerge.dtypes import DType
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.load import canonical, draft_recipes, parse_recipe, recipe_from_mapping
from raymerge.recipes.schema import FLAG_ADVICE, ModelEntry, Recipe

TEXT = """\
# weights that sum to one
merge_method: linear
base_model: models/base
models:
  - model: models/base
    parameters: {weight: 0.5}
  - model: models/code
    parameters: {weight: 0.5}
"""


def recipe(text: str) -> Recipe:
    parsed = parse_recipe(text, exists=lambda _: False)
    assert isinstance(parsed, Recipe)
    return parsed


def file_problem(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        draft_recipes(path).require()[0]
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2
    assert problem.remedy
    return str(problem)


def test_messages_name_the_file_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yml").write_text("dtpye: x\n" + TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert file_problem(Path("recipe.yml")) == "recipe.yml:1:1: unknown key 'dtpye'. Did you mean 'dtype'?"


def test_a_byte_order_mark_and_windows_lines_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    loaded = draft_recipes(path).require()[0]
    assert loaded == recipe(TEXT)
    assert loaded.where("models", 1) == f"{path}:7:5"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert file_problem(tmp_path / "no.yml").startswith(f"{tmp_path / 'no.yml'}: there is no such file.")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yml"
    with path.open("wb") as file:
        file.truncate(2**33)
    assert f"more than {MAX_TEXT_BYTES} bytes" in file_problem(path)


def test_paths_of_models_are_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "a+b").mkdir(parents=True)
    (tmp_path / "recipe.yml").write_text("merge_method: linear\nmodels: [{model: a+b}]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    first = draft_recipes("recipe.yml").require()[0]
    monkeypatch.chdir(tmp_path / "here")
    second = draft_recipes("../recipe.yml").require()[0]
    assert isinstance(first, Recipe)
    assert isinstance(second, Recipe)
    assert first.models[0].model == ModelReference("a", None, "b")
    assert second.models[0].model == ModelReference("a+b")


def test_a_mapping_says_the_same_as_its_text() -> None:
    from_mapping = recipe_from_mapping(yaml.safe_load(TEXT))
    assert from_mapping == recipe(TEXT)
    assert canonical(from_mapping) == canonical(recipe(TEXT))
    assert from_mapping.where("models", 0, "parameters", "weight") == "recipe: models[0].parameters.weight"


def test_a_mapping_may_hold_tuples_and_references() -> None:
    data = {
        "merge_method": "passthrough",
        "slices": ({"sources": ({"model": ModelReference("a+b"), "layer_range": (0, 2)},)},),
    }
    read = recipe_from_mapping(data)
    assert isinstance(read, Recipe)
    assert read.slices[0].sources[0].layer_range == (0, 2)
    assert recipe(read.text) == read


def test_a_recipe_can_be_pickled_with_its_places() -> None:
    read = recipe(TEXT)
    again = pickle.loads(pickle.dumps(read))
    assert again == read
    assert again.text == TEXT
    assert again.where("models", 0, "parameters", "weight") == "recipe:6:18"


WEIGHTS = st.floats(-10, 10)
SETTINGS = (
    WEIGHTS
    | st.booleans()
    | st.lists(WEIGHTS, min_size=1, max_size=3)
    | st.lists(
        st.fixed_dictionaries(
            {"filter": st.text("ab*._", max_size=4), "value": WEIGHTS},
            optional={
                "glob": st.text("ab*?._", max_size=4),
                "role": st.sampled_from(["norm", ["mlp", "expert"], ["expert", "mlp", "mlp"]]),
                "layers": st.sampled_from([3, "0..7", [5, "1..2", "5"]]),
            },
        ),
        min_size=1,
        max_size=2,
    )
)
PARAMETERS = st.dictionaries(st.sampled_from(["weight", "density", "t"]), SETTINGS, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {"model": st.sampled_from(["a", "b@v1", "c+d@v2", {"model": {"path": "x+y"}}])},
    optional={"parameters": PARAMETERS},
)
RECIPES = st.fixed_dictionaries(
    {
        "merge_method": st.sampled_from(["linear", "ties"]),
        "models": st.lists(ENTRIES, min_size=1, max_size=3),
    },
    optional={
        "base_model": st.just("base"),
        "dtype": st.sampled_from(["bfloat16", "float32", "torch.float16", "half"]),
        "parameters": PARAMETERS,
        "seed": st.integers(0, 2**64 - 1),
        "shard_size": st.sampled_from(["5GB", "1MiB", 0, 12345]),
        "duplicates": st.sampled_from(["keep", "share"]),
        "name": st.sampled_from(["mine", "step 2"]),
        "embedding_sizes": st.sampled_from(["error", "common", "pad"]),
        "pickled_weights": st.sampled_from(["refuse", "read"]),
        "warn_encoding_error": st.sampled_from([0.05, "1e-3", 2]),
        "adapter": st.sampled_from([{}, {"rank": 4, "energy": 0.5}, {"combine": "concatenate"}]),
        "methods": st.lists(
            st.sampled_from(
                [
                    {"role": "norm", "merge_method": "passthrough", "sources": ["a", "b@v1"]},
                    {"layers": ["4..7", 9], "glob": "*.mlp.*", "parameters": {"weight": [0, 1]}},
                    {"filter": "x", "role": ["router", "expert"], "merge_method": "ties"},
                ]
            ),
            max_size=3,
        ),
        "chat_template": st.text("{%}a\n: ", min_size=1, max_size=12),
        "tokenizer": st.fixed_dictionaries(
            {"source": st.sampled_from(["union", "base", "a@v"])},
            optional={
                "tokens": st.dictionaries(
                    st.text("<>ab", min_size=1, max_size=3),
                    st.sampled_from(
                        [
                            {},
                            {"source": "a", "force": True},
                            {"source": {"kind": "zero"}},
                            {"source": {"kind": "model_token", "model": "a", "token_id": 3}},
                        ]
                    ),
                    max_size=3,
                )
            },
        ),
    },
)


@settings(deadline=None, max_examples=30)
@given(RECIPES)
def test_a_recipe_without_a_text_writes_one_that_says_the_same(data: dict[str, object]) -> None:
    made = recipe_from_mapping(data, exists=lambda _: False)
    read = recipe(made.text)
    assert read == made
    assert canonical(read) == canonical(made)


def test_canonical_does_not_depend_on_spelling() -> None:
    other = """
models:
- {parameters: {weight: "0.5"}, model: models/base}
- {parameters: {weight: 5.0e-1}, model: {model: {path: models/code}}}
base_model: {model: models/base}
shard_size: 5000000000
seed: 0
parameters:
merge_method: linear
"""
    assert canonical(recipe(other)) == canonical(recipe(TEXT))


@pytest.mark.parametrize(
    "line",
    [
        "seed: 1",
        "shard_size: 1GB",
        "duplicates: share",
        "dtype: bfloat16",
        "out_dtype: bfloat16",
        "parameters: {normalize: false}",
        "tokenizer_source: base",
        "tokenizer: {pad_to_multiple_of: 8}",
        "chat_template: chatml",
        "methods: [{role: norm, merge_method: passthrough}]",
        "embedding_sizes: pad",
        "pickled_weights: refuse",
        "adapter: {}",
        "missing_tensors: copy_base",
        "extra_tensors: drop",
        "router: base",
        "align: experts",
    ],
)
def test_canonical_sees_every_field(line: str) -> None:
    assert canonical(recipe(f"{TEXT}{line}\n")) != canonical(recipe(TEXT))


@pytest.mark.parametrize("line", ["name: mine", "warn_encoding_error: 5.0e-2"])
def test_what_changes_no_byte_is_no_part_of_the_digest(line: str) -> None:
    changed = recipe(f"{TEXT}{line}\n")
    assert changed != recipe(TEXT)
    assert canonical(changed) == canonical(recipe(TEXT))


def test_canonical_sees_the_order_of_models_and_of_tokens() -> None:
    assert canonical(recipe(TEXT)) != canonical(
        recipe(TEXT.replace("code", "x").replace("models/base\n    p", "models/code\n    p"))
    )
    head = "merge_method: linear\nmodels: [{model: a}]\n"
    first = recipe(head + "tokenizer: {tokens: {x: {}, y: {}}}\n")
    second = recipe(head + "tokenizer: {tokens: {y: {}, x: {}}}\n")
    assert canonical(first) != canonical(second)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_damaged_recipe_is_a_recipe_or_a_recipe_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(TEXT)))
    cut = data.draw(st.integers(0, 4))
    put = data.draw(st.text("x:{}[]*&-\n\t '\"", max_size=4))
    text = TEXT[:at] + put + TEXT[at + cut :]
    with contextlib.suppress(RecipeError):
        assert parse_recipe(text, exists=lambda _: False).text == text


LISTED = """\
merge_method: ties
base_model: *base
models: [{model: a, parameters: *usual}, {model: b, parameters: *usual}]
"""


def test_keys_that_hold_anchors_only_are_noted() -> None:
    anchored = f"""\
x-note: anything
X: &base models/base
shared:
  usual: &usual {{weight: 0.5}}
{LISTED}"""
    parsed = recipe(anchored)
    plain = LISTED.replace("*base", "models/base").replace("*usual", "{weight: 0.5}")
    assert parsed == recipe(plain)
    assert canonical(parsed) == canonical(recipe(plain))
    assert parsed.text == anchored
    assert [note.split("'")[1] for note in parsed.notes] == ["x-note", "X", "shared"]
    assert recipe(plain).notes == ()
    merged = recipe(
        "defaults: &d {base_model: models/base}\n<<: *d\nmerge_method: ties\nmodels: [{model: a}]\n"
    )
    assert str(merged.base_model) == "models/base"
    assert len(merged.notes) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shared: &base models/base\n" + TEXT, "unknown key 'shared'"),
        ("dtyp: &d float32\nout_dtype: *d\n" + TEXT, "unknown key 'dtyp'. Did you mean 'dtype'?"),
        ("xnote: anything\n" + TEXT, "unknown key 'xnote'"),
        ("dtype: &d float32\nother: *d\n" + TEXT, "unknown key 'other'"),
        (TEXT.replace("model: models/code", "model: models/code\n    x-note: a"), "unknown key 'x-note'"),
    ],
)
def test_other_unknown_keys_are_refused_beside_anchors(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(text)
    (problem,) = caught.value.problems
    assert said in str(problem)


MODELS = "models: [{model: a, parameters: {weight: 1}}]\n"
HEAD = f"merge_method: linear\n{MODELS}"


def problem(text: str) -> str:
    (only,) = problems(text)
    return only


@pytest.mark.parametrize("flag", sorted(FLAG_ADVICE))
@pytest.mark.parametrize("spelling", ["{}", "--{}"])
def test_a_flag_of_mergekit_gets_its_own_sentence(flag: str, spelling: str) -> None:
    key = spelling.format(flag.replace("_", "-") if spelling.startswith("--") else flag)
    told = problem(f'{HEAD}"{key}": true\n')
    assert f"unknown key '{key}'." in told
    assert f"--{flag.replace('_', '-')}" in told
    assert f"'{flag}'?" in told or key == flag


def test_clone_tensor_is_told_clone_tensors_and_that_it_is_not_needed() -> None:
    assert problem(f"{HEAD}clone_tensor: true\n") == (
        "r.yml:3:1: unknown key 'clone_tensor'. Did you mean 'clone_tensors'? In mergekit that is the flag "
        "--clone-tensors; it is not needed here, since every tensor gets its own bytes. Remove the key."
    )
    assert "Did you mean" not in problem(f"{HEAD}clone_tensors: true\n")


def test_flags_that_became_fields_name_the_field() -> None:
    assert "write 'shard_size: 5GB'" in problem(f"{HEAD}out_shard_size: 5B\n")
    assert "write 'seed: 7'" in problem(f"{HEAD}random_seed: 3\n")


def test_all_problems_of_a_recipe_come_at_once_in_the_order_of_the_text() -> None:
    told = problems(
        """merge_method: ties
clone_tensor: true
dtype: int64
models:
  - model: a+b+c
    parameters: {weight: abc, gamma: [1, x]}
  - just/a/path
slices:
  - sources: [{model: a, layer_range: [3, 1]}]
seed: -1
seed: 2
5: 3
"""
    )
    places = [line.split(": ")[0] for line in told]
    assert places == [f"r.yml:{mark}" for mark in (
        "2:1", "3:1", "5:5", "6:18", "6:42", "7:5", "8:1", "9:26", "10:1", "11:1", "12:1",
    )]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"merge_method": "x", "models": [1, {"model": []}, {"model": "a", "parameters": {1: 2}}]},
        {"merge_method": "x", "slices": [{"sources": {"a": 1}}], "duplicates": [], "dtype": {}},
        {"merge_method": "x", "modules": {"a": {"models": 3}, 4: {}}, "tokenizer": {"tokens": [1]}},
        {"experts": [{"source_model": None, "positive_prompts": [1], "noise_scale": "x"}], "gate_mode": 3},
        {"experts": {"keep": object(), "drop": [], "merge": "x", "add": [3], "dense": {}, "of": 1}},
    ],
)
def test_messages_are_sentences_and_free_of_the_machinery(data: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_mapping(data)
    for line in str(caught.value).splitlines():
        assert line.startswith("recipe")
        for word in ("pydantic", "http", "Input should", "validation", "type=", "ctx", "Traceback"):
            assert word not in line


@pytest.mark.parametrize("text", ['"\\ud800": 1\n', 'merge_method: "\\udfff"\n'])
def test_half_a_character_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(RecipeError, match=r"r\.yml:1:1"):
        parse_recipe(text, "r.yml")


@pytest.mark.parametrize(
    "body",
    [
        "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]",
        "modules: {text_decoder: {models: [{model: a}]}}",
    ],
)
def test_adapters_are_merged_whole(body: str) -> None:
    text = f"merge_method: linear\n{body}\nadapter: {{}}\n"
    assert problem(text).startswith(
        "r.yml:3:1: 'adapter' merges adapters, which are merged as wholes. List them"
    )


@pytest.mark.parametrize(("text", "num_bytes"), [("5GB", 5 * 10**9), ("1.5GiB", 3 * 2**29), ("0", 0)])
def test_shard_size(text: str, num_bytes: int) -> None:
    assert recipe(f"{HEAD}shard_size: {text}\n").shard_size == num_bytes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dtpye: bfloat16", "r.yml:3:1: unknown key 'dtpye'. Did you mean 'dtype'?"),
        (
            "dtype: int64",
            "r.yml:3:1: dtype: 'int64' holds whole numbers only, and merging makes fractions. Write one of: ",
        ),
        ("dtype: bfloat", "r.yml:3:1: dtype: 'bfloat' is not a dtype to merge to. Did you mean 'bfloat16'?"),
        ("out_dtype: float8_e4m3fn", "r.yml:3:1: out_dtype: 'float8_e4m3fn' is not a dtype to merge to."),
        (
            "seed: -1",
            "r.yml:3:1: seed: -1 is out of range. Write a whole number from 0 to 18446744073709551615.",
        ),
        ("chat_template: [a]", "r.yml:3:1: chat_template: ['a'] is a list; expected a text."),
        ("parameters: {t: x}", "r.yml:3:14: t: 'x' is a text; expected a number."),
        ("base_model: a+b+c", "r.yml:3:1: base_model: 'a+b+c' names more than one adapter"),
        ("tokenizer: {pad_to_multiple_of: 0}", "r.yml:3:13: pad_to_multiple_of: 0 is out of range."),
        ("tokenizer: {tokens: {x: {force: 1}}}", "r.yml:3:26: force: 1 is a number; expected true or false."),
        ("tokenizer: {tokens: {x: {source: {kind: zero, a: 1}}}}", "r.yml:3:47: unknown key 'a'."),
        (
            "tokenizer: {tokens: {x: {source: {kind: model_token, model: a}}}}",
            "r.yml:3:26: source: the model_token is not named. Give exactly one of 'token' and 'token_id'.",
        ),
        (
            "tokenizer: {tokens: {x: {source: {kind: model_token, model: a, token: b, token_id: 1}}}}",
            "is named both by 'token' and by 'token_id'.",
        ),
        (
            "tokenizer_source: base\ntokenizer: {}",
            "r.yml:3:1: 'tokenizer_source' and 'tokenizer' both choose",
        ),
        (
            "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]",
            "r.yml:3:1: 'models' and 'slices' are both",
        ),
        ("shard_size: 1e3", "r.yml:3:1: shard_size: '1e3' is not a size"),
        ("shard_size: -5", "r.yml:3:1: shard_size: "),
        ("shard_size: 5B", "'5B' means 5 bytes. Write '5GB' or so."),
        ("name: a/b", "r.yml:3:1: name: 'a/b' cannot be the name of a merge. Write letters, digits"),
        ("warn_encoding_error: 0", "r.yml:3:1: warn_encoding_error: 0 is not above 0."),
        ('name: "a\\n"', "cannot be the name of a merge."),
        (f"name: {'x' * 101}", "at most 100 bytes"),
        (
            "pickled_weights: true",
            "r.yml:3:1: pickled_weights: true is not known here. Write one of: read, refuse",
        ),
        ("adapter: {energy: 0}", "r.yml:3:11: energy: 0 is not a share of the energy."),
        (
            "adapter: {combine: concatenate, rank: 8}",
            "r.yml:3:33: 'rank' limits the rank, which 'combine: concatenate' does not do. Remove 'rank'",
        ),
        (
            "weight: 0.5",
            "unknown key 'weight'. A parameter of the method goes below 'parameters'. Keys known",
        ),
    ],
)
def test_one_bad_line(line: str, expected: str) -> None:
    assert expected in problem(f"{HEAD}{line}\n")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{model: }", "r.yml:2:11: the key 'model' is missing or empty. Add it."),
        (
            "{model: a, layer_range: [0, 2]}",
            "r.yml:2:21: unknown key 'layer_range'. mergekit ignores it here.",
        ),
        ("{model: a, weight: 1}", "r.yml:2:21: unknown key 'weight'. A parameter of the method goes below"),
        ("{model: {path: a, model: b}}", "r.yml:2:19: 'path' belongs into a map below 'model'."),
    ],
)
def test_a_bad_model_entry(entry: str, expected: str) -> None:
    assert expected in problem(f"merge_method: linear\nmodels: [{entry}]\n")


@pytest.mark.parametrize(
    ("layer_range", "what"),
    [
        ("[3, 1]", "layer_range [3, 1] of models/b runs backwards. Write [1, 3]."),
        ("[3, 3]", "layer_range [3, 3] of models/b is empty."),
        ("[-1, 3]", "layer_range [-1, 3] of models/b starts below layer 0."),
        ("[1]", "layer_range [1] of models/b is not a pair of whole numbers."),
        ("[0, 1.5]", "layer_range [0, 1.5] of models/b is not a pair of whole numbers."),
    ],
)
def test_a_bad_layer_range_names_model_range_and_place(layer_range: str, what: str) -> None:
    text = "merge_method: passthrough\nslices:\n- sources:\n  - model: models/b\n"
    text += f"    layer_range: {layer_range}\n"
    assert problem(text).startswith("r.yml:5:5: ")
    assert what in problem(text)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{sources: []}", "r.yml:2:11: sources: the slice has no sources."),
        ("{sources: [{model: a}]}", "r.yml:2:21: the key 'layer_range' is missing or empty."),
        (
            "{sources: [{layer_range: [2, 1]}, {model: b, layer_range: [0, 1]}]}",
            "of the source runs backwards.",
        ),
        (
            "{sources: [{model: a, layer_range: [0, 1]}], residual_weight: 0.5}",
            "unknown key 'residual_weight'. mergekit reads it and never uses it: it never had an effect.",
        ),
    ],
)
def test_a_bad_slice(entry: str, expected: str) -> None:
    assert any(expected in told for told in problems(f"merge_method: passthrough\nslices: [{entry}]\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "merge_method: linear\n",
            "r.yml:1:1: nothing says what to merge. Fill one of: models, slices, modules.",
        ),
        ("merge_method: linear\nmodels: []\n", "r.yml:2:1: 'models' is empty."),
        ("merge_method: linear\nmodules: {a: {models: []}}\n", "r.yml:2:15: 'models' is empty."),
        (
            "merge_method: linear\nmodels: {model: a}\n",
            "r.yml:2:1: models: {'model': 'a'} is a map; expected a list.",
        ),
        (MODELS, "r.yml:1:1: the key 'merge_method' is missing or empty."),
    ],
)
def test_what_a_recipe_needs(text: str, expected: str) -> None:
    assert expected in problem(text)


def test_a_dtype_that_means_nothing_to_a_merge_is_refused_from_python_too() -> None:
    with pytest.raises(ValidationError, match="is not a dtype to merge to"):
        Recipe(merge_method="linear", models=[ModelEntry(model="a")], dtype=DType.F8_E4M3)


LINEAR: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": "a", "parameters": {"weight": 1}}, {"model": "b", "parameters": {"weight": 1}}],
}


def refused(data: dict[str, Any]) -> Problem:
    with pytest.raises(RecipeError) as caught:
        recipe_from_mapping(data)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "bfloat16"), ("out_dtype", "float32"), ("seed", 42), ("tokenizer_source", "union")],
)
@pytest.mark.parametrize("where", ["recipe", "model", "beside"])
def test_keys_of_the_recipe_below_the_top(key: str, value: object, where: str) -> None:
    data = copy.deepcopy(LINEAR)
    entry = data["models"][1]
    places = {"recipe": data.setdefault("parameters", {}), "model": entry["parameters"], "beside": entry}
    place = places[where]
    place[key] = value
    problem = refused(data)
    assert f"'{key}' is a key of the" in problem.what
    assert problem.remedy == "Move it to the top of the recipe."
    data[key] = place.pop(key)
    assert recipe_from_mapping(data) == recipe_from_mapping({**LINEAR, key: value})


@pytest.mark.parametrize("source", [None, "base"])
def test_a_multiple_for_the_vocabulary_at_the_top_or_among_parameters(source: str | None) -> None:
    tokenizer = {} if source is None else {"tokenizer_source": source, "base_model": "a"}
    for misplaced in ({"pad_to_multiple_of": 64}, {"parameters": {"pad_to_multiple_of": 64}}):
        problem = refused({**LINEAR, **tokenizer, **misplaced})
        assert "tokenizer: {source: union, pad_to_multiple_of: 64}" in problem.remedy
        assert "takes the place of 'tokenizer_source'" in problem.remedy
    followed = {
        **LINEAR,
        "base_model": "a",
        "tokenizer": {"source": source or "union", "pad_to_multiple_of": 64},
    }
    recipe = recipe_from_mapping(followed)
    assert isinstance(recipe, Recipe)
    assert recipe.tokenizer is not None


def test_revisions_beside_a_model_or_at_the_top() -> None:
    data = copy.deepcopy(LINEAR)
    data["models"][0]["revision"] = "v1"
    assert "'model: PATH@REVISION'" in refused(data).remedy
    assert "'model: PATH@REVISION'" in refused({**LINEAR, "revision": "v1"}).remedy
    del data["models"][0]["revision"]
    data["models"][0]["model"] = "a@v1"
    recipe = recipe_from_mapping(data)
    assert isinstance(recipe, Recipe)
    assert recipe.models[0].model == ModelReference("a", "v1")
    experts = [{"source_model": name, "positive_prompts": [name]} for name in "ab"]
    experts[0]["revision"] = "v1"
    assert "'source_model: PATH@REVISION'" in refused({"base_model": "a", "experts": experts}).remedy
