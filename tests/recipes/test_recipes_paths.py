"""Every place that recipes read from is found, where it is written."""

from __future__ import annotations

from raymerge.recipes import parse_recipes
from raymerge.recipes.order import places_read

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
