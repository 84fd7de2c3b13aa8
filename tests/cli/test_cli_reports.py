"""What a finished run says of equal output, of what encoding changed, and of the rows of routers."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kits.command_line import run_command
from kits.merges import MEAN, STACK, make_models, write_recipe
from rich.console import Console

from raymerge.api import RunOptions
from raymerge.cli.render.progress import PlainProgress
from raymerge.cli.render.reports import show_routing
from raymerge.events import DuplicatesFound, EncodingErrorsFound, Event, OnEvent, Published, StageReport
from raymerge.merge_plan.report import DuplicateGroup, ErrorsAbove, RoleError, TensorError
from raymerge.stages.router.results import LayerReport, gate_report

GROUPS = (
    DuplicateGroup("model.layers.*.mlp.up_proj.weight", 14, 3_000_000),
    DuplicateGroup("model.layers.*.mlp.down_proj.weight", 14, 2_000_000),
    DuplicateGroup("model.layers.*.input_layernorm.weight", 2, 1000),
)
ATTENTION = TensorError("model.layers.0.self_attn.o_proj.weight", "attention", 0.0266)
EXPERT = TensorError("model.layers.1.mlp.experts.3.up_proj.weight", "expert", 0.031)
ROLES = (RoleError("attention", 1, 0.0266, ATTENTION), RoleError("expert", 24, 0.0262, EXPERT))
LAYERS = (LayerReport(0, 2.5, (0.9, 0.5), (0.7, 0.3), 1.5), LayerReport(1, 7.0, (0.7, 0.5), (0.6, 0.4), 0.5))
ROWS = gate_report("ridge", ("expert 0 (code)", "expert 1 (french)"), LAYERS, (200, 30), (1,))
ENTROPY = ROWS["summary"]["entropy"]


def _said(event: Event) -> list[str]:
    stream = io.StringIO()
    PlainProgress(Console(file=stream, width=80), "out")(event)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("shared", "more"),
    [(0, "; the file system cannot have them share storage"), (4_000_000, "; 4.00 MB share storage")],
)
def test_what_was_made_once_is_told_with_the_largest_groups(shared: int | None, more: str) -> None:
    assert _said(DuplicatesFound(30, 5_001_000, GROUPS, shared, ())) == [
        f"duplicates: 30 tensors (5.00 MB) equal others, made once and written to each place{more}",
        "  model.layers.*.mlp.up_proj.weight: 14 tensors, 3.00 MB",
        "  model.layers.*.mlp.down_proj.weight: 14 tensors, 2.00 MB",
        "  and 1 group more",
    ]


def test_what_turned_out_equal_has_lines_of_its_own() -> None:
    group = DuplicateGroup("a\x1b[31m", 2, 1000)
    assert _said(DuplicatesFound(0, 0, (), None, (group,))) == [
        "duplicates: 2 tensors (1.00 kB) turned out equal to others, which the plan could not know",
        "  a\\x1b[31m: 2 tensors, 1.00 kB",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_stack_ends_with_its_duplicates(as_json: bool, tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), STACK)
    flags = ("--json",) if as_json else ()
    outcome = run_command("submit", recipe, "-o", "out", "--inline", *flags, cwd=tmp_path)
    assert outcome.code == 0
    lines = outcome.text.splitlines()
    if as_json:
        (found,) = [each for each in map(json.loads, lines) if each["event"] == "duplicates_found"]
        assert (found["tensors"], len(found["groups"])) == (9, 9)
        assert found["nbytes"] == sum(group["nbytes"] for group in found["groups"])
        return
    (place,) = [number for number, line in enumerate(lines) if line.startswith("duplicates: 9 tensors (")]
    assert lines[place + 3] == "  and 7 groups more"
    assert lines[place + 4].startswith("verified: ")


def test_encoding_errors_are_told_by_role_with_a_warning_below() -> None:
    assert _said(EncodingErrorsFound(ROLES, ErrorsAbove(0.03, 2, EXPERT))) == [
        "encoded: 25 tensors as codes with scales; relative error that this added:",
        "  attention: 0.0266 in 1 tensor, at most 0.0266 in model.layers.0.self_attn.o_proj.weight",
        "  expert: 0.0262 in 24 tensors, at most 0.031 in model.layers.1.mlp.experts.3.up_proj.weight",
        "warning: encoding changed 2 tensors by more than 0.03 (warn_encoding_error), "
        "model.layers.1.mlp.experts.3.up_proj.weight most of all, by 0.031; "
        "'{role: expert, value: bf16}' as the first line of out_format keeps that role in bfloat16",
    ]
    assert len(_said(EncodingErrorsFound(ROLES, None))) == 3


def _table(report: Mapping[str, Any]) -> str:
    stream = io.StringIO()
    show_routing(Console(file=stream, width=120), [StageReport("router rows of a mixture", report)])
    return stream.getvalue()


def test_the_table_says_what_the_rows_are_like() -> None:
    lines = [" ".join(line.split()) for line in _table(ROWS).splitlines()]
    assert lines == [
        "",
        "router rows of a mixture",
        "gate mode ridge",
        "layers 2",
        "condition 7.0 at worst, good below 100",
        f"load entropy {ENTROPY:.2f} of 1.00 bits; in the lowest layer {LAYERS[0].entropy:.2f}",
        "margin 1 between the first and the second logit",
        "expert tokens chosen first for",
        "expert 0 (code) 200 80%",
        "expert 1 (french)* 30 50%",
        "* judged on the texts that its row was made from, for want of held-out ones",
    ]
    # Other stages have none.
    assert _table({"reference": "one", "other": "two", "layers": []}) == ""


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ((math.inf, 9.0), "infinite at worst; above 5, experts are hardly told apart, in layers 0, 1"),
        ((9.0,) * 20, "in layers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_rows_that_hardly_differ_are_pointed_at(conditions: tuple[float, ...], said: str) -> None:
    layers = tuple(LayerReport(number, each) for number, each in enumerate(conditions))
    text = _table(gate_report("hidden", ("a", "b"), layers))
    assert said in text
    # No text was run, so nothing is said of routing.
    assert "expert " not in text
    assert "margin" not in text


@pytest.mark.parametrize("as_json", [False, True])
def test_submit_ends_with_the_table(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table stands behind the lines of the run; JSON has the report as an event."""
    recipe = write_recipe(make_models(tmp_path), MEAN)

    def submit(recipe: str, output: str, options: RunOptions, *, on_event: OnEvent) -> None:
        on_event(StageReport("router rows", ROWS))
        on_event(Published("/somewhere/out", 61.0))

    monkeypatch.setattr("raymerge.api.submit", submit)
    outcome = run_command("submit", recipe, "-o", "out", *(["--json"] if as_json else []), cwd=tmp_path)
    assert outcome.code == 0
    if as_json:
        events = [json.loads(line) for line in outcome.text.splitlines()]
        assert [event["report"]["mode"] for event in events if event["event"] == "stage_report"] == ["ridge"]
    else:
        assert outcome.text.index("done: out") < outcome.text.index("gate mode")
