"""Averages of the checkpoints of a training run: which checkpoints, with which coefficients."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from raymerge.errors import RecipeError
from raymerge.recipes.load import parse_recipe
from raymerge.recipes.sweep import SweepDraft, SweepOutput, draft_sweep, draft_sweep_mapping
from raymerge.recipes.training_run import RunFiles

EXAMPLES = Path(__file__).parents[2] / "configs" / "recipes" / "sweeps"
NAMES = ["checkpoint-0", "checkpoint-500", "checkpoint-900", "checkpoint-1000", "checkpoint-1500", "logs"]
TEXT = """\
checkpoints:
  root: runs/a
  from: 0
  to: 2000
  every: 500
  windows: [2, 4]
  schedule: minus-sqrt
out_dtype: float32
"""


def drafted(text: str, tmp_path: Path, names: Sequence[str] = NAMES) -> SweepDraft:
    path = tmp_path / "w.yml"
    path.write_text(text, encoding="utf-8")
    draft = draft_sweep(path, exists=lambda _: False, files=RunFiles(lambda _: names))
    assert draft is not None
    return draft


def problems(text: str, tmp_path: Path, names: Sequence[str] = NAMES) -> list[str]:
    found = drafted(text, tmp_path, names).problems
    assert all(problem.remedy for problem in found)
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in found]


def coefficients(schedule: object, number: int) -> list[float]:
    block = {"root": "r", "schedule": schedule, "windows": number}
    names = [f"iter_{each:07}" for each in range(number)]
    draft = draft_sweep_mapping({"checkpoints": block}, files=RunFiles(lambda _: names))
    assert draft is not None
    (made,) = draft.require()
    assert list(made.coefficients) == [f"r/{name}" for name in names]
    return list(made.coefficients.values())


def by_differences(left: Sequence[float]) -> list[float]:
    """What each checkpoint takes of a schedule with these values, the first of which is 1."""
    others = [left[i] - left[i + 1] for i in range(1, len(left) - 1)]
    rest = [*others, left[-1]] if len(left) > 1 else []
    return [1 - math.fsum(rest), *rest]


def test_the_coefficients_of_minus_sqrt_are_those_of_the_paper() -> None:
    assert [round(each, 4) for each in coefficients("minus-sqrt", 5)] == [
        0.4472,
        0.1852,
        0.1421,
        0.1198,
        0.1056,
    ]


@pytest.mark.parametrize("number", [1, 2, 3, 20])
def test_the_coefficients_are_the_differences_of_the_schedule(number: int) -> None:
    parts = [i / number for i in range(number)]
    for name, left in {
        "minus-sqrt": [1 - x**0.5 for x in parts],
        "linear": [1 - x for x in parts],
        "cosine": [0.5 + 0.5 * math.cos(math.pi * x) for x in parts],
    }.items():
        assert coefficients(name, number) == pytest.approx(by_differences(left), abs=1e-12), name
    assert coefficients("linear", number) == [1 / number] * number


def test_an_exponential_average_forgets_at_its_rate() -> None:
    made = coefficients({"ema": 0.75}, 4)
    assert made == pytest.approx([27 / 175, 36 / 175, 48 / 175, 64 / 175])
    assert coefficients("ema:0.75", 4) == made


def test_windows_are_the_last_checkpoints_at_their_distance(tmp_path: Path) -> None:
    two, four = drafted(TEXT, tmp_path).require()
    assert (two.name, two.values, four.name) == ("window-2", {"window": "2"}, "window-4")
    steps = ["0", "500", "1000", "1500"]
    assert list(four.coefficients) == [f"runs/a/checkpoint-{step}" for step in steps]
    assert list(two.coefficients) == list(four.coefficients)[2:]
    plain = yaml.safe_load(two.text)
    weights = [entry["parameters"]["weight"] for entry in plain["models"]]
    assert weights == list(two.coefficients.values())
    assert (plain["merge_method"], plain["parameters"], plain["out_dtype"]) == (
        "linear",
        {"normalize": False},
        "float32",
    )
    assert two.recipes == (parse_recipe(two.text, exists=lambda _: False),)
    assert two.recipes[0].where("models", 1, "model") == f"{tmp_path / 'w.yml'}:1:1"


def test_the_newest_may_have_the_weight_of_the_oldest(tmp_path: Path) -> None:
    (_, made), (_, turned) = (
        drafted(text, tmp_path).require() for text in (TEXT, TEXT.replace("to:", "reverse: true\n  to:"))
    )
    assert [*turned.coefficients.values()] == [*made.coefficients.values()][::-1]
    assert [*turned.coefficients] == [*made.coefficients]


def test_windows_go_with_a_sweep(tmp_path: Path) -> None:
    text = TEXT.replace("minus-sqrt", "$s") + "sweep: {s: [linear, cosine]}\n"
    names = [each.name for each in drafted(text, tmp_path).require()]
    assert names == ["window-2-s-linear", "window-4-s-linear", "window-2-s-cosine", "window-4-s-cosine"]
    named = drafted(text + "outputs: '{s}-{window}'\n", tmp_path).require()
    assert [each.name for each in named] == ["linear-2", "linear-4", "cosine-2", "cosine-4"]


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoint-70", "iter_0000070", "step-70", "step_70", "step70", "global_step70", "70", "ckpt_70"),
        *("step-70-temp0.7", "template-step-70", "step70-temp_0.7", "attempt-step-70"),
        *("step70-unsharded", "epoch=3-step=70", "llama--val_loss=2.31-step=70-consumed_samples=560.0-last"),
    ],
)
def test_names_that_trainers_write(name: str, tmp_path: Path) -> None:
    text = "checkpoints: {root: r, schedule: linear, from: 70, to: 70}\n"
    others = [
        "tmp-checkpoint-70",
        "step-70.tmp12",
        "temp_step-70",
        "step-70-incomplete",
        ".checkpoint-70",
        "step-70e3",
        "step70k",
    ]
    (made,) = drafted(text, tmp_path, [*others, "runs", "eval-70", "v2.70", name]).require()
    assert (made.name, made.coefficients) == ("window-1", {f"r/{name}": 1.0})


def test_a_pattern_says_which_of_several_are_meant(tmp_path: Path) -> None:
    names = ["step5", "step5-unsharded", "step10", "step10-unsharded"]
    text = "checkpoints: {root: r, schedule: linear}\n"
    assert problems(text, tmp_path, names) == [
        "w.yml:1:15: root: 'step5' and 'step5-unsharded' are both of iteration 5. "
        "Say which are meant: pattern: 'step{iteration}-unsharded'."
    ]
    text = text.replace("linear", "linear, pattern: 'step{iteration}-unsharded'")
    (made,) = drafted(text, tmp_path, names).require()
    assert list(made.coefficients) == ["r/step5-unsharded", "r/step10-unsharded"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("minus-sqrt", "minus_sqr", "7:3: schedule: 'minus_sqr' is no schedule. Did you mean 'minus-sqrt'?"),
        ("minus-sqrt", "{ema: 1}", "7:14: ema: 1 is not between 0 and 1."),
        ("from: 0", "from: 3000", "4:3: to: the range from 3000 to 2000 holds nothing."),
        ("from: 0\n  to: 2000", "from: 1600", "2:3: root: no checkpoint of 'runs/a' is in the range: the"),
        ("[2, 4]", "[2, 5]", "6:16: a window of 5 checkpoints is larger than the 4 that are there."),
        ("[2, 4]", "[2, 2]", "6:16: 2 stands twice."),
        ("[2, 4]", "0", "6:3: windows: 0 is out of range."),
        ("root:", "rot:", "1:1: checkpoints: the key 'root' is missing or empty."),
        ("runs/a", "s3://b/a?endpoint_override=x", "2:3: root: 's3://b/a' has options"),
        (
            "every: 500",
            "every: 500\n  pattern: step",
            "6:3: pattern: 'step' does not say where the number is.",
        ),
        ("out_dtype", "merge_method: ties\nout_dtype", "8:1: merge_method: an average of checkpoints is a"),
        ("out_dtype", "models: []\nout_dtype", "8:1: 'models' and 'checkpoints' both say what is merged."),
        ("out_dtype", "parameters: {weight: 1}\nout_dtype", "8:14: 'weight' follows from the schedule."),
        ("out_dtype", "parameters: [1]\nout_dtype", "8:1: parameters: "),
        ("out_dtype", "parameters: text\nout_dtype", "8:1: parameters: "),
        ("out_dtype", "methods: [{filter: mlp}]\nout_dtype", "8:1: an average takes every tensor from all"),
        ("out_dtype", "router: base\nout_dtype", "8:1: an average takes every tensor from all"),
        ("out_dtype", "align: experts\nout_dtype", "8:1: an average takes every tensor from all"),
        ("out_dtype", "x-average: {}\nout_dtype", "8:1: 'x-average' follows from 'checkpoints'."),
        ("out_dtype", "out_dtpe", "8:1: unknown key 'out_dtpe'. Did you mean 'out_dtype'?"),
    ],
)
def test_what_is_refused_is_told_where_it_is(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in TEXT
    (problem, *_) = problems(TEXT.replace(old, new), tmp_path)
    assert problem.startswith(f"w.yml:{expected}")


def test_a_root_without_checkpoints_is_described(tmp_path: Path) -> None:
    text = "checkpoints: {root: r, schedule: linear}\nout_dtpe: float32\n"
    unnamed, key = problems(text, tmp_path, ["logs", "final"])
    assert unnamed.startswith(
        "w.yml:1:15: root: no directory of 'r' is named by its iteration: there are logs, final."
    )
    assert key.startswith("w.yml:2:1: unknown key 'out_dtpe'.")
    path = tmp_path / "w.yml"
    missing = draft_sweep(path)
    assert missing is not None
    assert "'r' cannot be read (No such file or directory)." in str(missing.problems[0])


def test_the_example_of_a_window_is_a_recipe() -> None:
    names = [f"iter_{number:07}" for number in range(95000, 205000, 5000)]
    draft = draft_sweep(EXAMPLES / "window.yml", files=RunFiles(lambda _: names))
    assert draft is not None
    five, ten, twenty = draft.require()
    assert (five.name, len(ten.coefficients), len(twenty.coefficients)) == ("average-5", 10, 20)
    assert list(twenty.coefficients)[-1] == "runs/pretrain/iter_0200000"


def test_the_table_of_schedules_is_what_they_give() -> None:
    page = (EXAMPLES.parents[2] / "docs" / "how-to" / "average-checkpoints.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| `([^`]+)` \| ([0-9., ]+)", page, re.MULTILINE))
    assert len(lines) == 4
    for schedule, shown in lines.items():
        made = coefficients(yaml.safe_load(schedule), 5)
        assert [float(each) for each in shown.split(", ")] == pytest.approx(made, abs=6e-5)


def grown(schedule: object, number: int, text: str | None = None) -> SweepOutput:
    """The average of so many checkpoints of a run, with all or with those that ``text`` is not made of."""
    names = [f"step-{each * 10}" for each in range(1, number + 1)]
    more = {} if text is None else {"continue": "before"}
    given = {"checkpoints": {"root": "r", "schedule": schedule, **more}, "out_dtype": "float32"}
    draft = draft_sweep_mapping(given, files=RunFiles(lambda _: names, recipe=lambda _: str(text)))
    assert draft is not None
    return draft.require()[0]


@pytest.mark.parametrize("schedule", ["linear", {"ema": 0.8}])
def test_an_average_goes_on_without_the_checkpoints_that_it_is_made_of(schedule: object) -> None:
    def value(made: SweepOutput, before: float) -> float:
        numbers = {"before": before, **{f"r/step-{10 * each}": math.sin(each) for each in range(1, 10)}}
        return math.fsum(weight * numbers[place] for place, weight in made.coefficients.items())

    first = grown(schedule, 4)
    second = grown(schedule, 6, text=first.text)
    third = grown(schedule, 9, text=second.text)
    assert list(third.coefficients) == ["before", "r/step-70", "r/step-80", "r/step-90"]
    assert third.name == "window-9"
    whole = value(grown(schedule, 9), math.nan)
    assert value(third, value(second, value(first, math.nan))) == pytest.approx(whole, abs=1e-14)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("linear", "cosine", "continue: with this schedule every new checkpoint changes the shares"),
        ("linear", "ema:0.5", "continue: the average was made with the schedule 'linear'."),
        ("linear", "linear, windows: [3]", "'windows' does not go with 'continue'"),
        ("linear", "linear, to: 40", "root: no checkpoint of 'r' is newer than the average, from 41 to 40"),
        ("linear", "linear, every: 20", "root: no checkpoint of 'r' is newer than the average, from 60 on"),
        ("x-average", "x-more", "continue: 'before' is no average that can be continued."),
    ],
)
def test_an_average_that_cannot_go_on(old: str, new: str, expected: str, tmp_path: Path) -> None:
    text = "checkpoints: {root: r, schedule: linear, continue: before}\nout_dtype: float32\n"
    before = grown("linear", 4).text.replace("x-average", new if old == "x-average" else "x-average")
    files = RunFiles(lambda _: ["step-40", "step-50"], recipe=lambda _: before)
    (tmp_path / "w.yml").write_text(text.replace(old, new), encoding="utf-8")
    draft = draft_sweep(tmp_path / "w.yml", files=files)
    assert draft is not None
    (problem, *_) = draft.problems
    assert problem.what.startswith(expected)
    assert "'from'" not in problem.remedy


@pytest.mark.parametrize("is_grown", [False, True])
def test_a_recipe_that_was_edited_is_not_gone_on_from(is_grown: bool) -> None:
    text = grown({"ema": 0.9}, 4).text
    made = yaml.safe_load(grown({"ema": 0.9}, 7, text=text).text if is_grown else text)
    models = made["models"]
    heavier = [*models[:-1], {**models[-1], "parameters": {"weight": 0.5}}]
    for same in ({}, {"shard_size": 0}):
        assert "before" in grown({"ema": 0.9}, 9, text=yaml.safe_dump({**made, **same})).coefficients
    for edit in (
        *({"models": models[1:]}, {"models": models[:-1]}, {"models": heavier}, {"models": models * 3}),
        *({"parameters": {"normalize": True}}, {"merge_method": "ties"}, {"out_dtype": "bfloat16"}),
        *({"out_format": "fp8_block"}, {"methods": [{"filter": "mlp", "merge_method": "passthrough"}]}),
    ):
        with pytest.raises(RecipeError, match="continue: the recipe of 'before' is not that of the average"):
            grown({"ema": 0.9}, 9, text=yaml.safe_dump({**made, **edit}))


@pytest.mark.parametrize(
    ("more", "is_recorded"),
    [
        ({"dtype": "float32"}, True),
        ({"dtype": "float32", "out_dtype": "bfloat16"}, False),
        ({"dtype": "float32", "out_format": "fp8_block"}, False),
        ({"dtype": "float32", "out_format": [{"role": "mlp", "value": "int4"}]}, False),
    ],
)
def test_only_what_is_written_in_float32_can_go_on(more: dict[str, object], is_recorded: bool) -> None:
    given = {"checkpoints": {"root": "r", "schedule": "linear"}, **more}
    draft = draft_sweep_mapping(given, files=RunFiles(lambda _: NAMES))
    assert draft is not None
    (made,) = draft.require()
    assert ("x-average" in yaml.safe_load(made.text)) == is_recorded
    assert made.recipes[-1].notes == ()
