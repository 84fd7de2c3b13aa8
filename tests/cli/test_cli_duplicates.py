"""What a finished run says on the screen of output that equals other output."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.command_line import run_command
from kits.merges import MEAN, STACK, make_models, write_recipe
from rich.console import Console

from raymerge.cli.render.duplicates import duplicate_lines, group_lines
from raymerge.cli.render.progress import PlainProgress
from raymerge.events import DuplicatesFound
from raymerge.merge_plan.report import DuplicateGroup

GROUPS = (
    DuplicateGroup("model.layers.*.mlp.up_proj.weight", 14, 3_000_000),
    DuplicateGroup("model.layers.*.mlp.down_proj.weight", 14, 2_000_000),
    DuplicateGroup("model.layers.*.input_layernorm.weight", 2, 1000),
)


def _found(*, shared: int | None = None, unforeseen: tuple[DuplicateGroup, ...] = ()) -> DuplicatesFound:
    return DuplicatesFound(30, 5_001_000, GROUPS, shared, unforeseen)


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        (None, ""),
        (0, "; the file system cannot have them share storage"),
        (4_000_000, "; 4.00 MB share storage"),
    ],
)
def test_what_was_made_once_is_told_with_the_largest_groups(shared: int | None, said: str) -> None:
    assert list(duplicate_lines(_found(shared=shared))) == [
        f"duplicates: 30 tensors (5.00 MB) equal others, made once and written to each place{said}",
        "  model.layers.*.mlp.up_proj.weight: 14 tensors, 3.00 MB",
        "  model.layers.*.mlp.down_proj.weight: 14 tensors, 2.00 MB",
        "  and 1 group more",
    ]


def test_what_turned_out_equal_has_lines_of_its_own() -> None:
    event = DuplicatesFound(0, 0, (), None, GROUPS[2:])
    assert list(duplicate_lines(event)) == [
        "duplicates: 2 tensors (1.00 kB) turned out equal to others, which the plan could not know",
        "  model.layers.*.input_layernorm.weight: 2 tensors, 1.00 kB",
    ]
    assert len(list(duplicate_lines(_found(unforeseen=GROUPS)))) == 8


@given(count=st.integers(0, 9), shown=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_every_group_is_shown_or_counted(count: int, shown: int) -> None:
    groups = [DuplicateGroup(f"name{number}", 1, 1) for number in range(count)]
    lines = list(group_lines(groups, shown=shown))
    hidden = max(0, count - shown)
    assert len(lines) == min(count, shown) + bool(hidden)
    assert not hidden or f"and {hidden} group" in lines[-1]


def test_names_of_files_do_not_steer_the_terminal() -> None:
    stream = io.StringIO()
    event = DuplicatesFound(1, 1, (DuplicateGroup("a\x1b[31m", 1, 1),), None, ())
    PlainProgress(Console(file=stream, width=80), "out")(event)
    assert "\x1b" not in stream.getvalue()


def test_a_stack_ends_with_its_duplicates(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), STACK)
    outcome = run_command("submit", recipe, "-o", "out", "--inline", cwd=tmp_path)
    assert outcome.code == 0
    lines = outcome.text.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("duplicates: 9 tensors (")]
    assert lines[place + 3] == "  and 7 groups more"
    assert lines[place + 4].startswith("verified: ")


def test_as_json_all_groups_are_there(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), STACK)
    text = run_command("submit", recipe, "-o", "out", "--inline", "--json", cwd=tmp_path).text
    events = [json.loads(line) for line in text.splitlines()]
    (found,) = [event for event in events if event["event"] == "duplicates_found"]
    assert (found["tensors"], len(found["groups"])) == (9, 9)
    assert found["nbytes"] == sum(group["nbytes"] for group in found["groups"])


def test_a_mean_says_nothing_of_duplicates(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), MEAN)
    text = run_command("submit", recipe, "-o", "out", "--inline", cwd=tmp_path).text
    assert "duplicates" not in text
