"""The conformance pack: its recipes and its own comparator, which judges them, run in this process.

The tests and the printed table (``tests/conformance_table.py``) share this.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kits.command_line import Outcome, run_command
from kits.method_kit import threads

EXPLICIT = {"embed-size-mismatch": "embedding_sizes: common"}
"""Recipes that raymerge refuses until they say what they mean, and the line that says so."""

WEIGHTS_ONLY = {
    "linear-unnormalized-bf16": "logits amplify the reference's bfloat16 arithmetic",
    "ties-bf16-sources": "logits amplify the reference's bfloat16 arithmetic",
    "arcee-fusion-pair": "logits amplify 10 elements at the threshold, which float32 divergences misjudge",
}
"""Recipes whose tensors agree within the manifest's tolerance while logits do not, and why.

The float64 result, rounded once, is off by 0.28 standard deviations in the first, too; in the last, it has
raymerge's 10 elements, not the reference's.
"""


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: str
    name: str
    worst: str
    reason: str = ""

    def line(self) -> str:
        return f"{self.verdict:8} {self.name:40} {self.worst:12} {self.reason}".rstrip()


@dataclass(frozen=True, slots=True)
class Defect:
    reason: str
    complaint: str
    """All that the comparator may say against right numbers, as a regular expression."""


DIFFERS = {
    "della-single": Defect(
        "mergekit rescales a tensor by one factor, the paper each element by 1 / its probability",
        r"statistic coef_0 is 1\.0\d+, expected 1\.1\d+ \+- [\d.]+ \(\+1 more\)$",
    )
}
"""Recipes whose expected results show a defect of the reference.

The other complaint about della is that the factor varies within a tensor. The unk_token is what
transformers 5 gives every tokenizer of the model type qwen2, whatever its files say, and mergekit saves what
it loaded.
"""


@dataclass(frozen=True, slots=True)
class Merge:
    name: str
    outcome: Outcome
    verdict: str

    def judged(self) -> Judged:
        found = re.search(r"max abs ([\d.e+-]+)", self.verdict)
        worst = found.group(1) if found else "-"
        if self.outcome.code:
            last = (self.outcome.text.strip().splitlines() or ["nothing said"])[-1]
            return Judged("FAIL", self.name, worst, f"exit code {self.outcome.code}: {last}")
        if self.verdict.startswith("PASS"):
            return Judged("PASS", self.name, worst, self._remark(measured=found is not None))
        known = DIFFERS.get(self.name)
        if known is not None and re.search(known.complaint, self._said()):
            return Judged("DIFFERS", self.name, worst, known.reason)
        return Judged("FAIL", self.name, worst, self._said())

    def _remark(self, *, measured: bool) -> str:
        if self.name in WEIGHTS_ONLY:
            return f"without logits: {WEIGHTS_ONLY[self.name]}"
        if self.name in EXPLICIT:
            return f"with '{EXPLICIT[self.name]}'; refused without"
        return "" if measured else self._said()

    def _said(self) -> str:
        return re.sub(r"^\w+ [\w-]+(?: \[\w+\] |: )|  \([\d.]+s\)$", "", self.verdict)


def manifest(pack: Path) -> dict[str, Any]:
    path = pack / "manifest.json"
    found: dict[str, Any] = {"recipes": [], "bad": []}
    return json.loads(path.read_text()) if path.is_file() else found


def recipe_names(pack: Path) -> list[str]:
    return [entry["name"] for entry in manifest(pack)["recipes"]]


def bad_names(pack: Path) -> list[str]:
    return [entry["name"] for entry in manifest(pack)["bad"]]


def submit_inline(recipe: str, out: Path, cwd: Path) -> Outcome:
    return run_command("submit", recipe, "-o", str(out), "--inline", cwd=cwd)


def run_recipes(pack: Path, place: Path, names: Iterable[str]) -> dict[str, Merge]:
    """The recipes of these names, run here and judged by the comparator in a process of its own."""
    cwd, outs = _explicit_pack(pack, place / "pack"), place / "outs"
    outcomes = {name: submit_inline(f"recipes/{name}.yml", outs / name, cwd) for name in names}
    compare = [str(pack / "compare.py"), "--pack", str(pack), "--outputs", str(outs)]
    calls = [
        [*compare, "--only", _any_of(outcomes.keys() - WEIGHTS_ONLY), "--logits"],
        [*compare, "--only", _any_of(WEIGHTS_ONLY.keys() & outcomes)],
    ]
    verdicts = "".join(map(_compared, calls))
    found = re.finditer(r"^(?:PASS|FAIL) ([\w-]+).*$", verdicts, re.MULTILINE)
    said = {match.group(1): match.group() for match in found}
    assert said, f"no verdicts: {verdicts}"
    return {name: Merge(name, outcome, said.get(name, "")) for name, outcome in outcomes.items()}


def _compared(arguments: list[str]) -> str:
    """What the comparator prints, called as a command, but in this process: transformers is there already."""
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        for manager in (
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
            warnings.catch_warnings(),
            mock.patch.object(sys, "argv", arguments),
            threads(1),
        ):
            stack.enter_context(manager)
        warnings.simplefilter("ignore")
        runpy.run_path(arguments[0], run_name="__main__")
    return printed.getvalue()


def _any_of(names: Iterable[str]) -> str:
    return f"^({'|'.join(sorted(names))})$"


def _explicit_pack(pack: Path, place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "models").symlink_to(pack / "models")
    shutil.copytree(pack / "recipes", place / "recipes", copy_function=shutil.copyfile)
    for name, line in EXPLICIT.items():
        with (place / "recipes" / f"{name}.yml").open("a") as recipe:
            recipe.write(f"\n{line}\n")
    return place
