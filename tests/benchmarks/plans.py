"""Plans of models of the true size: ``raymerge plan`` as a user gives it, each in a process of its own.

    python tests/benchmarks/plans.py                                     # every model by every method
    python tests/benchmarks/plans.py kimi-k3 gpt-oss --methods linear ties

Parents have the published names, shapes, dtypes and files, and data that is one hole. For each plan a line of
a table: what a parent stores, what planning took (imports and headers included) and its peak memory, how many
bytes a merge with the usual memory reads for each that the parents have, and the memory of a worker: the
least that works, and what it takes. Ends with 1 where a linear plan takes more time or memory than it should.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Watch, machine
from kits.checkpoint_maker import sparse_checkpoint
from kits.deepseek_headers import KIMI_CONFIG, V3_CONFIG, deepseek_v3_specs, kimi_k2_thinking_specs
from kits.fused_headers import GPT_OSS_CONFIG, MAVERICK_CONFIG, gpt_oss_120b_specs, maverick_specs
from kits.kimi_k3_headers import K3_CONFIG, kimi_k3_specs
from kits.qwen3_headers import QWEN3_CONFIG, qwen3_235b_specs
from kits.recipe_maker import linear, slerp

from raymerge.checkpoints.header import TensorSpec, split_into_shards

_FILE_NBYTES = 5 << 30
_SAMPLE_SECONDS = 0.05
_MOST_BYTES = 2_000_000_000
_TITLES = (
    *("model", "method", "tensors of a parent", "bytes of the parents", "planned in", "of a core"),
    *("peak memory", "segments", "bytes read for each", "least memory", "memory"),
)


@dataclass(frozen=True, slots=True)
class Model:
    config: Mapping[str, Any]
    files: Callable[[], Sequence[Sequence[TensorSpec]]]
    most_seconds: float = math.inf
    """What a linear plan of two should take at most, on two cores."""


MODELS: Mapping[str, Model] = {
    "kimi-k3": Model(K3_CONFIG, kimi_k3_specs, most_seconds=60.0),
    "kimi-k2": Model(KIMI_CONFIG, kimi_k2_thinking_specs),
    "qwen3-235b": Model(QWEN3_CONFIG, lambda: split_into_shards(qwen3_235b_specs(), _FILE_NBYTES)),
    "deepseek-v3": Model(V3_CONFIG, deepseek_v3_specs),
    "gpt-oss": Model(
        GPT_OSS_CONFIG, lambda: split_into_shards(gpt_oss_120b_specs(), _FILE_NBYTES), most_seconds=5.0
    ),
    "maverick": Model(
        MAVERICK_CONFIG, lambda: split_into_shards(maverick_specs(), _FILE_NBYTES), most_seconds=15.0
    ),
}


def _of_deltas(method: str) -> Callable[..., dict[str, Any]]:
    def recipe(*models: str) -> dict[str, Any]:
        tuned = [{"model": each, "parameters": {"weight": 0.5, "density": 0.5}} for each in models]
        return {"merge_method": method, "base_model": models[0], "models": tuned[1:]}

    return recipe


METHODS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "linear": linear,
    "slerp": lambda *models: slerp(*models, t=0.4),
    "ties": _of_deltas("ties"),
    "della": _of_deltas("della"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - MODELS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    _say(f"{machine()}, two parents each\n")
    _say(f"| {' | '.join(_TITLES)} |\n|{'---|' * len(_TITLES)}")
    beyond: list[str] = []
    for name in chosen.models:
        with tempfile.TemporaryDirectory(prefix="plans-") as place:
            for planned in measured(name, chosen.methods, Path(place)):
                _say(f"| {' | '.join(planned.row)} |")
                beyond += planned.faults
    _say("\n".join(["", *beyond]))
    return int(bool(beyond))


class Planned(NamedTuple):
    row: tuple[str, ...]
    faults: Sequence[str]


def measured(name: str, methods: Sequence[str], place: Path) -> Iterator[Planned]:
    files, most = MODELS[name].files(), MODELS[name].most_seconds
    parents = [str(sparse_checkpoint(place / each, files, MODELS[name].config)) for each in "ab"]
    for method in methods:
        recipe = place / f"{method}.json"
        recipe.write_text(json.dumps(METHODS[method](*parents)))
        report, seconds, watch = _planned(recipe)
        faults = []
        if method == "linear" and seconds > most:
            faults.append(f"{name} took {seconds:.1f} s to plan, where {most:.0f} are wanted")
        if method == "linear" and watch.peak > _MOST_BYTES:
            faults.append(f"{name} took {watch.peak / 1e9:.2f} GB, where {_MOST_BYTES / 1e9:.0f} are wanted")
        yield Planned((name, method, *_facts(report, seconds, watch)), faults)


def _planned(recipe: Path) -> tuple[dict[str, Any], float, Watch]:
    """What the command prints, how many seconds it took, and what was seen of its processes."""
    command = [sys.executable, "-m", "raymerge.cli", "plan", str(recipe), "--json"]
    with tempfile.TemporaryFile("w+") as printed:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=printed, env=os.environ)
        watch = Watch(process.pid)
        while process.poll() is None:
            watch.look()
            time.sleep(_SAMPLE_SECONDS)
        seconds = time.monotonic() - began
        printed.seek(0)
        text = printed.read()
    if process.returncode:
        raise SystemExit(f"{recipe} cannot be planned: {text}")
    return json.loads(text), seconds, watch


def _facts(report: Mapping[str, Any], seconds: float, watch: Watch) -> tuple[str, ...]:
    stored, memory = sum(each["nbytes"] for each in report["sources"]), report["memory"]
    read = report["read_bytes"] + sum(each["nbytes"] for each in report["again"])
    return (
        f"{report['sources'][0]['tensors']:,}",
        f"{stored / 1e9:,.1f} GB",
        f"{seconds:.1f} s",
        f"{watch.cpu:.1f} s",
        f"{watch.peak / 1e9:.2f} GB",
        f"{report['segments']:,}",
        f"{read / stored:.3f}",
        f"{memory['least_budget'] / 2**20:,.0f} MiB",
        f"{memory['peak'] / 2**20:,.0f} MiB",
    )


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
