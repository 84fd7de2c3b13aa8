"""Sweeps: one recipe that stands for several, each with positions and a text of its own."""

from __future__ import annotations

from pathlib import Path

import yaml

from raymerge.recipes.load import parse_recipe
from raymerge.recipes.sweep import SweepDraft, SweepOutput, draft_sweep, draft_sweep_mapping

TEXT = """\
# two parents
sweep:                       # the axes
  t: [0.3, 0.50]
  method: [slerp, "nuslerp"]

merge_method: $method
base_model: a
models: [{model: a}, {model: b}]
parameters:
  t: "$t"                    # quotes go
outputs: "{method}-t{t}"
dtype: float32
"""


def drafted(text: str, tmp_path: Path) -> SweepDraft:
    path = tmp_path / "s.yml"
    path.write_text(text, encoding="utf-8")
    draft = draft_sweep(path, exists=lambda _: False)
    assert draft is not None
    return draft


def outputs(text: str, tmp_path: Path) -> tuple[SweepOutput, ...]:
    return drafted(text, tmp_path).require()


def problems(text: str, tmp_path: Path) -> list[str]:
    found = drafted(text, tmp_path).problems
    assert all(problem.remedy for problem in found)
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in found]


def test_the_product_of_the_axes_and_its_texts(tmp_path: Path) -> None:
    made = outputs(TEXT, tmp_path)
    assert [each.name for each in made] == ["slerp-t0.3", "nuslerp-t0.3", "slerp-t0.50", "nuslerp-t0.50"]
    assert made[3].values == {"t": "0.50", "method": "nuslerp"}
    assert made[3].text == (
        '# two parents\n\nmerge_method: "nuslerp"\nbase_model: a\nmodels: [{model: a}, {model: b}]\n'
        "parameters:\n  t: 0.50                    # quotes go\ndtype: float32\n"
    )
    for each in made:
        assert each.recipes == (parse_recipe(each.text, exists=lambda _: False),)


def test_messages_have_the_positions_of_the_sweep(tmp_path: Path) -> None:
    (made, *_) = outputs(TEXT, tmp_path)
    assert made.recipes[-1].where("parameters", "t") == f"{tmp_path / 's.yml'}:10:3"


def test_json_in_one_line(tmp_path: Path) -> None:
    text = (
        '{"sweep": {"w": [0.25, 1]}, "merge_method": "linear", "models": [{"model": "a", "parameters": '
        '{"weight": "$w"}}, {"model": "b"}], "parameters": {"weight": 1}, "outputs": "w{w}"}'
    )
    made = outputs(text, tmp_path)
    assert [each.name for each in made] == ["w0.25", "w1"]
    assert made[0].text == (
        '{"merge_method": "linear", "models": [{"model": "a", "parameters": '
        '{"weight": 0.25}}, {"model": "b"}], "parameters": {"weight": 1}}'
    )


def test_a_mapping_gives_the_same_recipes(tmp_path: Path) -> None:
    draft = draft_sweep_mapping(yaml.safe_load(TEXT), exists=lambda _: False)
    assert draft is not None
    assert [each.recipes for each in draft.require()] == [each.recipes for each in outputs(TEXT, tmp_path)]
    assert draft_sweep_mapping({"merge_method": "linear"}) is None


def test_an_anchor_that_is_cut_with_the_sweep_is_written_out(tmp_path: Path) -> None:
    text = TEXT.replace("[0.3, 0.50]", "[&low 0.3, 0.50]").replace("dtype: float32", "x-low: *low")
    made = outputs(text, tmp_path)
    assert parse_recipe(made[0].text, exists=lambda _: False) == made[0].recipes[0]
