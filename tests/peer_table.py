"""Print whether mergekit does what docs/compatibility.md says of it: ``python tests/peer_table.py VENV``.

VENV is an environment that has mergekit, as ``make bench`` makes one. A line for each claim of
tests/data/peer-claims.yml and each command's options; ends with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from benchmarks import peer
from kits.checkpoint_maker import read_config, read_tensors, tiny_llama, write_checkpoint
from kits.command_line import run_command

TESTS = Path(__file__).resolve().parent
DRIVER = TESTS / "benchmarks" / "peer_cases.py"
CLAIMS: list[dict[str, Any]] = yaml.safe_load((TESTS / "data" / "peer-claims.yml").read_text())
OPTIONS: dict[str, list[str]] = json.loads((TESTS / "data" / "mergekit-options.json").read_text())
ALIKE = 1e-5
"""Of a tensor's length."""
QUIET = ("--no-copy-tokenizer", "--no-write-model-card")
NOT_IMPORTED = ("every command", "mergekit-evolve")
"""The first is of mergekit-yaml; the other one's command imports packages that come with an extra."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("venv", type=Path, metavar="VENV")
    python = peer.interpreter(parser.parse_args().venv.absolute())
    if not python.exists():
        parser.error(f"there is no environment at {python.parents[1]}: make bench makes one")
    with tempfile.TemporaryDirectory() as place:
        faults = [*_options_that_differ(python), *_claims_that_fail(python, Path(place))]
    print(f"{len(faults)} do not hold")
    return 1 if faults else 0


def _options_that_differ(python: Path) -> Iterator[str]:
    shared = set(OPTIONS["every command"])
    names = ["mergekit-yaml", *(name for name in OPTIONS if name not in NOT_IMPORTED)]
    for name, found in zip(names, _peer(python, [[name] for name in names], TESTS), strict=True):
        own = {*OPTIONS.get(name, ()), *(() if name == "bakllama" else shared)} - {"--help"}
        yield from _told(f"options of {name}", sorted(own ^ set(found)))


def _claims_that_fail(python: Path, place: Path) -> Iterator[str]:
    _make_models(place)
    for number, claim in enumerate(CLAIMS):
        (place / f"{number}.yml").write_text(yaml.safe_dump(claim["recipe"]))
    jobs = [
        ["mergekit-yaml", f"{number}.yml", f"theirs-{number}", *QUIET, *claim.get("options", ())]
        for number, claim in enumerate(CLAIMS)
    ]
    for number, (claim, error) in enumerate(zip(CLAIMS, _peer(python, jobs, place), strict=True)):
        outcome = run_command("submit", f"{number}.yml", f"ours-{number}", "--inline", cwd=place)
        ours = outcome.text if outcome.code else ""
        outputs = (place / f"theirs-{number}", place / f"ours-{number}")
        faults = [*_unexpected(claim, "theirs", error), *_unexpected(claim, "ours", ours)]
        yield from _told(claim["claim"], faults or list(_results(claim, *outputs)))


def _unexpected(claim: Mapping[str, Any], whose: str, error: str) -> Iterator[str]:
    expected = claim.get(whose, "")
    if expected not in error or bool(expected) != bool(error):
        yield f"{whose}: {error[:200] or 'accepted'}, expected {expected or 'that it is accepted'}"


def _results(claim: Mapping[str, Any], theirs: Path, ours: Path) -> Iterator[str]:
    if "same" in claim and claim["same"] != (same := _same(read_tensors(theirs), read_tensors(ours))):
        yield f"the results are {'the same' if same else 'others'}"
    for field, expected in claim.get("fields", {}).items():
        if (values := [read_config(out).get(field) for out in (theirs, ours)]) != expected:
            yield f"{field} is {values}, expected {expected}"


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To rounding, and with the same sign of 0."""
    if one.dtype != other.dtype or float((one - other).norm()) > ALIKE * float(other.norm()):
        return False
    return bool((torch.signbit(one) == torch.signbit(other))[(one == 0) & (other == 0)].all())


def _told(text: str, faults: Sequence[str]) -> Sequence[str]:
    print(f"{'FAIL' if faults else 'holds':6}{text}{': ' if faults else ''}{'; '.join(faults)}", flush=True)
    return faults


def _peer(python: Path, jobs: Sequence[Sequence[str]], place: Path) -> list[Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), str(DRIVER)], input=json.dumps(jobs), stdout=subprocess.PIPE, cwd=place,
        env=environment, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def _make_models(place: Path) -> None:
    def make(name: str, seed: int, **settings: Any) -> None:
        tiny_llama(place / name, seed, dtype=torch.float32, **{"hidden": 16, **settings})

    make("base", 0)
    for seed, name in enumerate(("a", "b"), start=1):
        make(name, seed, base=place / "base")
    for name, scale in (("near", 1e-5), ("nearer", 3e-6)):
        make(name, 3, base=place / "base", scale=scale)
    make("long", 4, vocab=80)
    make("wide", 5, hidden=32)
    for seed, name in enumerate(("tied", "tied2"), start=6):
        make(name, seed, tie=True)
    for name in ("base2", "base3", "base4"):
        _change(place, "base", name)
    for name, source in (("small", "a"), ("smaller", "b")):
        _change(place, source, name, lambda tensor: tensor * 1e-9)
    for name in ("minus", "minus2"):
        _change(place, "a", name, lambda tensor: torch.where(tensor > 0, tensor, -0.0))
    _change(place, "a", "nan", lambda tensor: tensor * float("nan"))
    _change(place, "a", "heads", num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    _change(place, "a", "typed", layer_types=["full_attention"] * 3)
    extra = {**read_tensors(place / "a"), "model.layers.0.extra.weight": torch.ones(2)}
    write_checkpoint(place / "extra", extra, read_config(place / "a"))


def _change(
    place: Path,
    source: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    **fields: object,
) -> None:
    tensors = {key: change(tensor) for key, tensor in read_tensors(place / source).items()}
    write_checkpoint(place / name, tensors, {**read_config(place / source), **fields})


if __name__ == "__main__":
    sys.exit(main())
