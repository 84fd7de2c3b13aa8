"""Files, texts and mappings; places; texts that say the same; digests."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.documents.positions import MAX_TEXT_BYTES
from raymerge.errors import RecipeError
from raymerge.recipes import (
    ModelReference,
    Recipe,
    canonical,
    draft_recipes,
    parse_recipe,
    recipe_from_mapping,
)

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


@settings(deadline=None, max_examples=100)
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


@settings(deadline=None, max_examples=150)
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
