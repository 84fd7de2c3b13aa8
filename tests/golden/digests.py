"""What merges give, file by file: sha256 of every output file that no clock, version or place changes.

    python tests/golden/digests.py           compare with digests.json; exit code 1 where anything differs
    python tests/golden/digests.py --write   write it anew

``own`` are merges of the project's own recipes and of small models that the tests make; the others are those
of the reference packs beside the checkout, as far as they are there. What BLAS computes (decompositions,
router rows from a model's run) hangs on the processor: elsewhere write the file anew from an older commit.
What a model's run decides (``BY_BLAS``) is reported and no failure; tests compare it with bounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
DIGESTS = Path(__file__).with_name("digests.json")
SHARED = ROOT.parent / "shared"
BY_BLAS = ("own: moe-hidden", "own: fisher", "own: regmean", "packs: recipes-in-use/120-moe")
"""Merges with what a model's run gives, which processors round each in their way."""
Case = tuple[str, str | Mapping[str, Any], Path]
"""Name, recipe or its file, and the directory that its paths begin at."""


def own_cases(place: Path) -> Iterator[Case]:
    """The recipes that are shipped, and merges of models that are made below ``place``."""
    recipes = ROOT / "configs" / "recipes"
    for path in sorted((*recipes.glob("*.yml"), *recipes.glob("moe/*.yml"))):
        yield path.stem, str(path), ROOT
    yield "quickstart", "configs/quickstart/recipe.yml", ROOT
    yield from _quantised(place / "quantised")
    yield from _others(place / "others")


def pack_cases(place: Path) -> Iterator[Case]:
    for pack in ("conformance", "behaviour"):
        for path in sorted((SHARED / pack / "recipes").glob("*.yml")):
            yield f"{pack}/{path.stem}", str(path), SHARED / pack
    used, models = SHARED / "recipes-in-use", place / "models"
    if used.is_dir():
        _run(used / "build_models.py", str(models))
        for path in sorted((used / "recipes").glob("*.yml")):
            yield f"recipes-in-use/{path.stem}", str(path), models / "f32"


def digests(recipe: str | Mapping[str, Any], output: Path, cwd: Path) -> dict[str, str]:
    """sha256 of each file of what a recipe gives; where it is refused, the error under ``refused``."""
    import raymerge
    from raymerge.errors import RaymergeError

    try:
        with contextlib.chdir(cwd):
            raymerge.submit(recipe, output, raymerge.RunOptions(inline=True, threads=1))
    except RaymergeError as error:
        return {"refused": type(error).__name__}
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != "README.md" and "raymerge" not in path.relative_to(output).parts
    }


def made(cases: Iterator[Case], place: Path) -> dict[str, dict[str, str]]:
    torch.set_num_threads(1)
    return {
        name: digests(recipe, place / f"{number}", cwd) for number, (name, recipe, cwd) in enumerate(cases)
    }


def _quantised(place: Path) -> Iterator[Case]:
    from kits.quantised_merges import MAKERS

    for kind, make in MAKERS.items():
        models = [{"model": str(make(place / kind / name, seed).root)} for seed, name in enumerate("ab")]
        weighted = [{**model, "parameters": {"weight": 0.5}} for model in models]
        yield f"{kind} linear", {"merge_method": "linear", "models": weighted}, place
        plain = {"merge_method": "passthrough", "models": models[:1], "out_format": "bf16"}
        yield f"{kind} as bf16", plain, place


def _others(place: Path) -> Iterator[Case]:
    from kits.adapter_maker import tiny_lora
    from kits.checkpoint_maker import read_tensors
    from kits.expert_models import sparse, write_model
    from kits.merge_cases import make_family

    family = make_family(place / "family", hidden=64)
    models = [{"model": str(each), "parameters": {"weight": 1.0}} for each in family.tunes]
    yield "shards", {"merge_method": "linear", "models": models, "shard_size": "64KB"}, place
    adapter = tiny_lora(place / "adapter", read_tensors(family.base), 1)
    yield "adapter", {"merge_method": "passthrough", "models": [{"model": f"{family.base}+{adapter}"}]}, place
    write_model(place / "mixture", sparse("mixtral"), 1)
    for name, change in {"kept": {"keep": [0, 2]}, "merged": {"merge": [[0, 1], [2, 3]]}}.items():
        yield f"experts {name}", {"base_model": str(place / "mixture"), "experts": change}, place


def _run(script: Path, *args: str) -> None:
    import subprocess

    subprocess.run([sys.executable, str(script), *args], check=True, capture_output=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        found = {
            "own": made(own_cases(place / "in"), place / "own"),
            "packs": made(pack_cases(place / "packs"), place / "out"),
        }
    if "--write" in sys.argv:
        DIGESTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    wanted = json.loads(DIGESTS.read_text(encoding="utf-8"))
    apart = [
        f"{part}: {name}: {file}"
        for part, cases in found.items()
        for name, files in cases.items()
        for file in sorted(files.keys() | wanted[part].get(name, {}).keys())
        if files.get(file) != wanted[part].get(name, {}).get(file)
    ]
    print("\n".join(apart) or f"{sum(map(len, found.values()))} merges are as they were")
    return any(not line.startswith(BY_BLAS) for line in apart)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    raise SystemExit(main())
