"""The behaviour pack: small trained models, merged in this process and judged by the pack's own evaluation.

The tests and the printed table of gates (``tests/gate_table.py``) share this.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kits.command_line import Outcome, run_command

DOMAINS = ("code", "english", "french")

EVALUATIONS_AT_ONCE = 2

PADDED_MEANS = frozenset(
    {"moe-hidden_avg", "moe-hidden_avg-near", "moe-hidden_avg-positive-only", "moe-hidden_avg-top2"}
)
"""Recipes whose reference numbers have padding in the means of hidden states, which raymerge leaves out."""

_JUDGE = """
import json, os, runpy, sys
import torch
torch.set_num_threads(1)
pack, outs, padded, names = sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4:]
tools = runpy.run_path(os.path.join(pack, "eval.py"))
rules = json.load(open(os.path.join(pack, "thresholds.json")))["recipes"]
for name in names:
    try:
        result = tools["evaluate"](os.path.join(outs, name))
        known = rules.get(name, {})
        parity = {} if name in padded else known.get("parity", {})
        failed = tools["check"](result, known) + tools["check"](result, parity)
    except Exception as error:
        result, failed = {"loss": {}}, [repr(error)]
    found = {"loss": result["loss"], "routing": result.get("router_top1") or {}}
    print(json.dumps({"name": name, "failed": failed, **found}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Behaviour:
    name: str
    loss: Mapping[str, float]
    """Nats per token by domain, and their mean as ``avg``; empty where the model could not be run."""
    routing: Mapping[str, Sequence[float]]
    """Share of a domain's tokens by the expert that the router puts first, mean over layers; {} if dense."""
    failed: tuple[str, ...]

    @property
    def right_first(self) -> Mapping[str, float]:
        return {domain: self.routing[domain][number] for number, domain in enumerate(DOMAINS)}


@dataclass(frozen=True, slots=True)
class Gate:
    mode: str
    experts_per_token: int = 1
    from_file: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.experts_per_token}{'-file' if self.from_file else ''}"

    def recipe(self, pack: Path, place: Path) -> Path:
        """Write the recipe, and the files of text that it names, into ``place``.

        Experts and prompts are those of the pack's ``moe-hidden_avg``; they come from the files that the
        models were trained on, not from those that are predicted. Of negative prompts, which are the other
        experts' positive ones, a mode gets what it reads.
        """
        recipe = yaml.safe_load((pack / "recipes" / "moe-hidden_avg.yml").read_text(encoding="utf-8"))
        recipe |= {"gate_mode": self.mode, "experts_per_token": self.experts_per_token}
        for number, expert in enumerate(recipe["experts"]):
            if self.mode in {"ridge", "centroid"}:
                del expert["negative_prompts"]
            if self.from_file:
                file = place / f"{self.name}-{number}.txt"
                file.write_text("\n\n".join(expert.pop("positive_prompts")), encoding="utf-8")
                expert["prompt_file"] = str(file)
        path = place / f"{self.name}.yml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path


def submit(pack: Path, recipe: str, out: Path) -> Outcome:
    return run_command("submit", recipe, "-o", str(out), "--inline", cwd=pack)


def mixtures(pack: Path, place: Path, gates: Sequence[Gate]) -> dict[str, Outcome]:
    recipes = place / "recipes"
    recipes.mkdir()
    return {
        gate.name: submit(pack, str(gate.recipe(pack, recipes)), place / "outs" / gate.name) for gate in gates
    }


def judge(pack: Path, outs: Path, names: Sequence[str]) -> dict[str, Behaviour]:
    command = [sys.executable, "-c", _JUDGE, str(pack), str(outs), ",".join(sorted(PADDED_MEANS))]
    shares = [names[index::EVALUATIONS_AT_ONCE] for index in range(EVALUATIONS_AT_ONCE)]
    running = [
        subprocess.Popen([*command, *share], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for share in shares
    ]
    ended = [process.communicate(timeout=60 + 40 * len(names)) for process in running]
    for process, (_, complaints) in zip(running, ended, strict=True):
        assert process.returncode == 0, complaints
    return {found.name: found for printed, _ in ended for found in _read(printed)}


def reference_losses(pack: Path) -> Mapping[str, Mapping[str, float]]:
    merges: Any = json.loads((pack / "reference-results.json").read_text(encoding="utf-8"))["merges"]
    return {name: found["loss"] for name, found in merges.items()}


def _read(printed: str) -> Iterator[Behaviour]:
    for line in printed.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            yield Behaviour(entry["name"], entry["loss"], entry["routing"], tuple(entry["failed"]))
