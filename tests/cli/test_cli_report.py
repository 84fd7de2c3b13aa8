"""report, and the reports of submit and diff: what they write, and what they refuse before they read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.command_line import run_command
from kits.merges import MEAN, make_models, write_recipe

from raymerge.verifier.measurements import Report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    recipe = write_recipe(make_models(root), MEAN)
    done = run_command("submit", recipe, "-o", "out", "--inline", "--report", "merge.html", cwd=root)
    assert done.code == 0, done.text
    return root


def test_submit_writes_the_page_and_its_numbers(folder: Path) -> None:
    page, numbers = folder / "merge.html", Report.load(folder / "merge.parquet")
    assert "<svg" in page.read_text()
    assert numbers.kind == "merge"
    assert [Path(each).name for each in numbers.parents] == ["one", "two"]
    assert numbers.measurements.merged.all()


def test_a_recipe_and_its_output_have_a_page_each(folder: Path) -> None:
    for what, kind in (("recipe.yml", "recipe"), ("out", "merge")):
        done = run_command("report", what, "--json", cwd=folder)
        assert done.code == 0, done.text
        event = json.loads(done.text.splitlines()[-1])
        name = "recipe" if what == "recipe.yml" else "out"
        assert (event["page"], event["numbers"]) == (f"{name}-report.html", f"{name}-report.parquet")
        assert event["observations"]
        assert Report.load(folder / event["numbers"]).kind == kind
        assert (folder / event["page"]).stat().st_size < 2e6


def test_diff_writes_a_page_of_what_the_second_changes(folder: Path) -> None:
    done = run_command("diff", "one", "two", "--report", "diff.html", cwd=folder)
    assert done.code == 2
    made = Report.load(folder / "diff.parquet")
    assert (made.kind, made.base, made.parents) == ("diff", "one", ("two",))


def test_what_cannot_be_written_or_read_is_refused_with_a_remedy(folder: Path) -> None:
    run_command("report", "out", "-o", "page.pdf", cwd=folder).check_refusal("the page is HTML", "page.html")
    run_command("report", "out", "-o", "no/page.html", cwd=folder).check_refusal("not there", "Make it first")
    run_command("report", "gone", cwd=folder).check_refusal("gone", "nothing here", "Name a recipe")
    run_command("report", "out", "-o", "out/page.html", cwd=folder).check_refusal("in the checkpoint")
    run_command("diff", "one", "one", "--report", "d.html", cwd=folder).check_refusal("A itself")
    run_command("report", "one", cwd=folder).check_refusal("keeps no plan", "raymerge diff A B --report")
    run_command("report", "out", "--source", "one", cwd=folder).check_refusal("NAME=DIRECTORY")


def test_a_page_of_a_run_elsewhere_is_refused(folder: Path) -> None:
    args = ("--address", "http://127.0.0.1:9", "--report", "page.html")
    done = run_command("submit", "recipe.yml", "-o", "/shared/out", *args, cwd=folder)
    done.check_refusal("--report", "raymerge report OUT")


def test_numbers_of_others_are_not_written_over(folder: Path) -> None:
    mine = folder / "mine.parquet"
    mine.write_bytes(b"of the user")
    run_command("report", "out", "-o", "mine.html", cwd=folder).check_refusal("mine.parquet", "another name")
    assert mine.read_bytes() == b"of the user"
    # Those of an earlier report are.
    assert run_command("report", "out", "-o", "merge.html", cwd=folder).code == 0
    assert not list(folder.glob(".*.part"))
