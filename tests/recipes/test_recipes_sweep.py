"""Sweeps: one recipe that stands for several, each with positions and a text of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raymerge.errors import RecipeError
from raymerge.recipes.axes import AxesReader
from raymerge.recipes.load import parse_recipe, parse_recipes
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


def test_axes_in_step_make_no_product(tmp_path: Path) -> None:
    some = (
        "sweep:\n  a: [1, 2]\n  b: [x, y]\n  c: [true, no]\n  zip: [a, c]\n"
        "merge_method: linear\nseed: $a\nmodels: [{model: $b}]\nparameters: {normalize: $c}\n"
    )
    made = outputs(some, tmp_path)
    assert [each.name for each in made] == ["a1-b-x-c-true", "a1-b-y-c-true", "a2-b-x-c-no", "a2-b-y-c-no"]
    made = outputs(some.replace("zip: [a, c]", "zip: true"), tmp_path)
    assert [each.name for each in made] == ["a1-b-x-c-true", "a2-b-y-c-no"]
    last = {"seed": 2, "models": [{"model": "y"}], "parameters": {"normalize": False}}
    assert yaml.safe_load(made[1].text) == {"merge_method": "linear", **last}


def test_include_adds_and_exclude_takes_out(tmp_path: Path) -> None:
    text = TEXT.replace(
        "\n\nmerge_method",
        "\n  exclude: [{t: 0.5, method: slerp}]\n  include: [{method: lines, t: 1}]\n\nmerge_method",
    )
    names = [each.name for each in outputs(text, tmp_path)]
    assert names == ["slerp-t0.3", "nuslerp-t0.3", "nuslerp-t0.50", "lines-t1"]


def test_what_is_excluded_does_not_count_as_outputs() -> None:
    numbers = [*range(40)]
    excluded = [{"a": a, "b": b} for a in numbers for b in numbers[10:]]
    reader = AxesReader({"a": numbers, "b": numbers, "exclude": excluded}, lambda _: None)
    left = [tuple(value.value for value in each.values()) for each in reader.assignments()]
    assert left == [(a, b) for a in numbers for b in numbers[:10]]
    huge = AxesReader(dict.fromkeys("abcdefgh", numbers), lambda _: None)
    assert huge.assignments() == ()
    assert [fault.what for fault in huge.faults] == [
        f"'sweep' has {40**8} assignments before 'exclude'; at most 100000 are planned together."
    ]


def test_values_stand_in_gradients_rules_and_models(tmp_path: Path) -> None:
    text = (
        "sweep: {m: ['org/a, b', 7], low: [0.1], part: [attention]}\n"
        "merge_method: linear\n"
        "models: [{model: b}, {model: $m, parameters: "
        "{weight: [{filter: q, value: [$low, 1]}, {value: $low}]}}]\n"
        "methods: [{role: $part, merge_method: slerp}]\n"
        "outputs: x{low}\n"
    ).replace(", 7]", "]")
    (made,) = outputs(text, tmp_path)
    assert (
        '{model: "org/a, b", parameters: {weight: [{filter: q, value: [0.1, 1]}, {value: 0.1}]}}' in made.text
    )
    assert made.recipes == (parse_recipe(made.text, exists=lambda _: False),)


def test_the_merges_before_the_sweep_are_common_to_all_outputs(tmp_path: Path) -> None:
    first = "name: mean\nmerge_method: linear\nmodels: [{model: x}, {model: y}]\n---\n"
    made = outputs(first + TEXT.replace("{model: a}", "{model: mean}"), tmp_path)
    assert [each.recipes[0] for each in made] == [made[0].recipes[0]] * 4
    assert made[0].text.startswith(first)
    assert parse_recipes(made[0].text, exists=lambda _: False) == made[0].recipes
    assert problems(TEXT + "---\n" + first[:-4], tmp_path) == [
        "s.yml:2:1: 'sweep' stands in a merge that is not the last of the file. "
        "Only the last, the result, may make several outputs."
    ]


def test_a_fault_of_one_value_names_it_and_a_fault_of_all_is_told_once(tmp_path: Path) -> None:
    text = TEXT.replace("[0.3, 0.50]", "[0.3, high]").replace("dtype: float32", "dtype: flote32")
    assert problems(text, tmp_path) == [
        "s.yml:10:3: with t = high: t: 'high' is a text; expected a number. Write a number, like 0.5.",
        "s.yml:12:1: dtype: 'flote32' is not a dtype to merge to. Did you mean 'float32'? "
        "Write one of: float32, fp32, float16, fp16, half, bfloat16, bf16, float64.",
    ]


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('t: "$t"', "t: $tt", "10:3: t: '$tt' is no axis of the sweep. Did you mean 't'? Axes"),
        ('t: "$t"', "t: 0.3", "2:1: the outputs 'slerp-t0.3' and 'slerp-t0.50' are the same merge."),
        ("outputs: ", "x-more: a/$t\noutputs: ", "11:1: x-more: '$t' stands within a longer text"),
        ("[0.3, 0.50]", "[0.3, $method]", "3:12: '$method' stands for a value itself."),
        ("  t: [", "  'a[': [1]\n  t: [", "3:3: 'a[' cannot be the name of an axis."),
        ("[0.3, 0.50]", "[]", "3:3: the axis 't' has no values."),
        ("[0.3, 0.50]", "0.3", "3:3: the axis 't' is a number."),
        ("[0.3, 0.50]", "[0.3, [0.5]]", "3:12: [0.5] is a list."),
        ("[0.3, 0.50]", "[0.3, 0.30]", "3:12: t = 0.30 stands twice."),
        ("[0.3, 0.50]", "[0.3, .nan]", "3:12: nan is not a finite number."),
        (
            "method: [",
            "zip: true\n  method: [a, ",
            "4:3: zip: axes in step need equally many values: 't' has 2",
        ),
        ("method: [", "zip: [t, mehod]\n  method: [", "4:12: 'mehod' is no axis of the sweep. Did you"),
        ("method: [", "exclude: [{t: 9}]\n  method: [", "4:13: nothing has t = 9."),
        (
            "method: [",
            "exclude: [{t: 0.3}, {t: 0.5}]\n  method: [",
            "4:3: exclude: every assignment is excluded.",
        ),
        ("method: [", "include: [{t: 9}]\n  method: [", "4:13: the assignment has no value for 'method'."),
        (
            "method: [",
            "include: [{t: 9, x: 1, method: lines}]\n  method: [",
            "4:20: 'x' is no axis of the sweep.",
        ),
        (
            "method: [",
            "include: [{t: .5, method: slerp}]\n  method: [",
            "4:13: the assignment t = .5, method",
        ),
        ("method: [", "seed: [1]\n  method: [", "4:3: nothing uses the axis 'seed'."),
        (
            "{method}-t{t}",
            "{method}",
            "11:1: outputs: both t = 0.3, method = slerp and t = 0.50, method = slerp are named",
        ),
        (
            "{method}-t{t}",
            "{metod}-{t}",
            "11:1: outputs: '{metod}' is no axis of the sweep. Did you mean 'method'?",
        ),
        ("{method}-t{t}", "{method}-{t", "11:1: outputs: a bracket of '{method}-{t' has no partner."),
        (
            "{method}-t{t}",
            "{method}/{t}",
            "11:1: outputs: 'slerp/0.3' (with t = 0.3, method = slerp) cannot be the name",
        ),
        (
            "{method}-t{t}",
            "../{method}{t}",
            "11:1: outputs: '../slerp0.3' (with t = 0.3, method = slerp) cannot be",
        ),
        ('"{method}-t{t}"', "[a]", "11:1: 'outputs' is a list."),
        ("[0.3, 0.50]", str([number / 1000 for number in range(501)]), "2:1: 'sweep' has 1002 outputs"),
    ],
)
def test_what_is_refused_is_told_where_it_is(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in TEXT
    (problem, *more) = problems(TEXT.replace(old, new), tmp_path)
    assert problem.startswith(f"s.yml:{expected}")
    assert more == []


def test_a_sweep_is_needed_for_what_names_it(tmp_path: Path) -> None:
    plain = TEXT.replace(TEXT[TEXT.index("sweep:") : TEXT.index("\nmerge_method")], "")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(plain, "s.yml")
    assert [problem.where for problem in caught.value.problems] == ["s.yml:3:1", "s.yml:7:3", "s.yml:8:1"]
    assert "'outputs' names the outputs of a sweep, and there is none." in str(caught.value)
    assert "'$t' stands for a value of a sweep, and there is none." in str(caught.value)
    with pytest.raises(RecipeError, match="'sweep' makes several outputs of a recipe") as caught:
        parse_recipe(TEXT, "s.yml")
    assert len(caught.value.problems) == 1
