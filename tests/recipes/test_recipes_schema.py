"""The recipe's fields: what is read, what is refused, where, and with which remedy."""

from __future__ import annotations

from functools import partial

import pytest
from kits.recipe_texts import problems, recipe_of
from pydantic import ValidationError

from raymerge.dtypes import DType
from raymerge.recipes import (
    Conditional,
    Gradient,
    ModelEntry,
    ModelReference,
    Recipe,
    Scalar,
    TokenEntry,
    Tokenizer,
    TokenRow,
    ZeroRow,
)

recipe = partial(recipe_of, Recipe)

MODELS = "models: [{model: a, parameters: {weight: 1}}]\n"
HEAD = f"merge_method: linear\n{MODELS}"


def problem(text: str) -> str:
    (only,) = problems(text)
    return only


def test_models() -> None:
    read = recipe(
        """
merge_method: ties
base_model: org/base@main
models:
  - model: a+lora
    parameters: {weight: [0, 1], density: "1e-1", normalize: true}
  - model: {model: {path: b+c}, override_architecture: LlamaForCausalLM}
    parameters:
      weight: [{filter: mlp, value: 0.5}, {value: 1}]
  - model: d
    parameters:
parameters: {lambda: 0.5}
dtype: torch.bfloat16
out_dtype: float16
"""
    )
    first, second, third = read.models
    assert read.base_model == ModelReference("org/base", "main")
    assert first.model == ModelReference("a", None, "lora")
    assert first.parameters == {
        "weight": Gradient((0.0, 1.0)),
        "density": Scalar(0.1),
        "normalize": Scalar(1.0),
    }
    assert second.model == ModelReference("b+c", override_architecture="LlamaForCausalLM")
    assert isinstance(second.parameters["weight"], Conditional)
    assert third.parameters == {}
    assert read.parameters == {"lambda": Scalar(0.5)}
    assert (read.dtype, read.out_dtype) == (DType.BF16, DType.F16)


@pytest.mark.parametrize("name", ["2024", "L3.1 8B_v2"])
def test_name(name: str) -> None:
    assert recipe(f"{HEAD}name: '{name}'\n").name == name


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


def test_slices() -> None:
    read = recipe(
        """
merge_method: passthrough
slices:
  - sources:
      - {model: a, layer_range: [0, 4], parameters: {scale: 0.5}}
    base_model: b
    parameters: {t: 1}
  - sources: [{model: a, layer_range: [2, 6]}]
"""
    )
    first, second = read.slices
    assert first.sources[0].layer_range == (0, 4)
    assert first.sources[0].parameters == {"scale": Scalar(0.5)}
    assert first.base_model == ModelReference("b")
    assert first.parameters == {"t": Scalar(1.0)}
    assert second.sources[0].layer_range == (2, 6)


def test_modules() -> None:
    read = recipe(
        """
merge_method: linear
modules:
  text_decoder:
    slices: [{sources: [{model: a, layer_range: [0, 2]}]}]
  vision_tower:
    models: [{model: a}]
    parameters: {weight: 1}
"""
    )
    assert list(read.modules) == ["text_decoder", "vision_tower"]
    assert read.modules["text_decoder"].slices[0].sources[0].layer_range == (0, 2)
    assert read.modules["vision_tower"].models == (ModelEntry(model="a"),)
    assert read.modules["vision_tower"].parameters == {"weight": Scalar(1.0)}


def test_tokenizer() -> None:
    read = recipe(
        HEAD
        + """
tokenizer:
  source: models/x
  tokens:
    "<a>": {source: models/y, force: true}
    "<b>": {source: {kind: zero}}
    "<c>": {source: {kind: model_token, model: z, token: "</s>"}}
    "<d>": {source: {kind: model_token, model: z, token_id: 1}}
    "<e>": {}
    "<f>": {source: {model: {path: a+b}}}
  pad_to_multiple_of: 64
chat_template: chatml
"""
    )
    assert read.tokenizer == Tokenizer(
        source=ModelReference("models/x"),
        tokens={
            "<a>": TokenEntry(source=ModelReference("models/y"), force=True),
            "<b>": TokenEntry(source=ZeroRow(kind="zero")),
            "<c>": TokenEntry(source=TokenRow(kind="model_token", model="z", token="</s>")),
            "<d>": TokenEntry(source=TokenRow(kind="model_token", model="z", token_id=1)),
            "<e>": TokenEntry(),
            "<f>": TokenEntry(source=ModelReference("a+b")),
        },
        pad_to_multiple_of=64,
    )
    assert read.chat_template == "chatml"


@pytest.mark.parametrize(
    ("value", "source"), [("union", "union"), ("base", "base"), ("x@v", ModelReference("x", "v"))]
)
def test_tokenizer_source(value: str, source: object) -> None:
    assert recipe(f"{HEAD}tokenizer_source: {value}\n").tokenizer_source == source
    assert recipe(f"{HEAD}tokenizer: {{source: {value}}}\n").tokenizer == Tokenizer(source=source)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("5GB", 5 * 10**9), ("1.5GiB", 3 * 2**29), ("0", 0), ("1e3", None)]
)
def test_shard_size(text: str, num_bytes: int | None) -> None:
    if num_bytes is None:
        assert "is not a size" in problem(f"{HEAD}shard_size: {text}\n")
    else:
        assert recipe(f"{HEAD}shard_size: {text}\n").shard_size == num_bytes


@pytest.mark.parametrize(
    ("text", "words"), [("5B", "'5B' means 5 bytes. Write '5GB' or so."), ("-5", "is not a size")]
)
def test_a_bad_shard_size(text: str, words: str) -> None:
    assert problem(f"{HEAD}shard_size: {text}\n").startswith("r.yml:3:1: shard_size: ")
    assert words in problem(f"{HEAD}shard_size: {text}\n")


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
        ("name: a/b", "r.yml:3:1: name: 'a/b' cannot be the name of a merge. Write letters, digits"),
        ("warn_encoding_error: 0", "r.yml:3:1: warn_encoding_error: 0 is not above 0."),
        ('name: "a\\n"', "cannot be the name of a merge."),
        (f"name: {'x' * 101}", "at most 100 bytes"),
        (
            "pickled_weights: true",
            "r.yml:3:1: pickled_weights: true is not known here. Write one of: read, refuse",
        ),
        ("adapter: {energy: 0}", "r.yml:3:11: energy: 0.0 is not a share of the energy."),
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


def test_an_empty_list_beside_a_full_one_is_harmless() -> None:
    assert recipe(f"{HEAD}slices: []\nmodules: {{}}\n").models == (
        ModelEntry(model="a", parameters={"weight": 1}),
    )


def test_a_dtype_that_means_nothing_to_a_merge_is_refused_from_python_too() -> None:
    with pytest.raises(ValidationError, match="is not a dtype to merge to"):
        Recipe(merge_method="linear", models=[ModelEntry(model="a")], dtype=DType.F8_E4M3)
