"""The output's config: what changes, where, and how it is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.dtypes import DType
from raymerge.planner.config import config_bytes, output_config, vocabulary_size


def test_a_silent_donor_gets_a_dtype_at_the_top() -> None:
    donor = {"text_config": {"hidden_size": 8}}
    assert output_config(donor, dtype=DType.F16) == {"text_config": {"hidden_size": 8}, "dtype": "float16"}


def test_every_place_that_has_a_dtype_gets_the_new_one_but_not_the_vision_side() -> None:
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
    assert config_bytes(config).decode() == (
        '{\n  "z": 1,\n  "a": {\n    "eps": 1e-05,\n    "name": "modèle"\n  },\n  "list": []\n}\n'
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(config=st.dictionaries(st.text(), JSON, max_size=5))
@settings(deadline=None, max_examples=50)
def test_a_config_is_read_back_as_it_was_in_its_order(config: dict[str, Any]) -> None:
    read = json.loads(config_bytes(config))
    assert read == config
    assert list(read) == list(config)


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
