"""Several attempts at one run: whoever makes them may not have heard how the first one ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kits.command_line import run_command
from kits.merge_cases import make_family, recipes

RUN = "raymerge-0123456789ab"


def test_what_a_run_has_published_is_not_made_again(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipes(make_family(tmp_path / "models"))["linear"]))

    def attempt(*flags: str) -> tuple[int, list[dict[str, Any]]]:
        command = ("submit", str(recipe), "-o", "out", "--inline", "--json", *flags)
        outcome = run_command(*command, cwd=tmp_path)
        return outcome.code, [json.loads(line) for line in outcome.text.splitlines()]

    code, events = attempt("--run", RUN)
    made = (tmp_path / "out").stat().st_ino
    assert (code, events[-1]["event"]) == (0, "published")
    for flags in ((), ("--replace",)):
        code, again = attempt("--run", RUN, *flags)
        assert (code, [each["event"] for each in again]) == (0, ["published"])
        assert again[0]["path"] == events[-1]["path"]
        assert (tmp_path / "out").stat().st_ino == made
    # Anybody else's checkpoint is in the way, or replaced.
    other = RUN.replace("0", "f")
    assert attempt("--run", other)[0] == attempt()[0] == 2
    code, events = attempt("--run", other, "--replace")
    assert (code, events[0]["event"]) == (0, "planned")
    assert (tmp_path / "out").stat().st_ino != made
