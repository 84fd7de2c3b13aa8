"""Print what merging 140,000 tensors x 4 sources costs without bytes: ``python tests/benchmarks/scale.py``.

Headers, planning, the saved plan, its projection, what is sent to workers, the rows that they decode, and
what the driver does at the end. The checkpoints have true headers, and data that is one hole. Every line is
the work of a process of its own: its seconds, processor seconds, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kits.deepseek_headers import HugeSize, huge_checkpoint

_BUDGET = 4 << 30


class Timer:
    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {}

    def __call__(self, step: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter(), time.process_time()
        result = work()
        self.steps[step] = [time.perf_counter() - began[0], time.process_time() - began[1]]
        return result


def recipes(models: Sequence[str], layers: int) -> dict[str, dict[str, Any]]:
    every = [{"model": model, "parameters": {"weight": 0.5}} for model in models]
    trained = [{"model": model, "parameters": {"weight": 1, "density": 0.5}} for model in models[1:]]
    rising = [{"filter": "self_attn", "value": [0.25, 1]}, {"value": 0.5}]
    half = layers // 2
    return {
        "linear": {"merge_method": "linear", "models": every},
        "gradient": {
            "merge_method": "linear",
            "models": [{"model": model} for model in models],
            "parameters": {"weight": rising},
        },
        "ties": {"merge_method": "ties", "base_model": models[0], "models": trained},
        "passthrough": {"merge_method": "passthrough", "models": [{"model": models[0]}]},
        "slices": {
            "merge_method": "passthrough",
            "slices": [
                {"sources": [{"model": models[0], "layer_range": [0, half]}]},
                *({"sources": [{"model": model, "layer_range": [half // 2, half]}]} for model in models[1:3]),
                {"sources": [{"model": models[-1], "layer_range": [half, layers]}]},
            ],
        },
    }


def plan(timer: Timer, place: Path, name: str) -> dict[str, Any]:
    from raymerge.merge_plan.tables import save_plan
    from raymerge.planner.inputs.sources import open_models
    from raymerge.planner.merges import build_plan
    from raymerge.recipes.load import recipe_from_mapping
    from raymerge.recipes.schema import Recipe

    recipe = recipe_from_mapping(json.loads((place / f"{name}.json").read_text()))
    assert isinstance(recipe, Recipe)
    sources = timer("read headers", lambda: open_models(recipe).require())
    made = timer("plan", lambda: build_plan(recipe, sources, version="0")).require()
    (place / name).mkdir()
    timer("save plan", lambda: save_plan(made, place / name))
    counts = {each: made[each].num_rows for each in ("tensors", "ops", "inputs", "segments")}
    return {"digest": made.digest, **counts}


def load(timer: Timer, place: Path, name: str) -> dict[str, Any]:
    from raymerge.merge_plan.tables import load_plan

    timer("load plan", lambda: load_plan(place / name))
    return {}


def project(timer: Timer, place: Path, name: str) -> dict[str, Any]:
    from raymerge.merge_plan.memory import project
    from raymerge.merge_plan.tables import load_plan

    made = load_plan(place / name)
    timer("project memory", lambda: project(made, _BUDGET))
    return {}


def send(timer: Timer, place: Path, name: str) -> dict[str, Any]:
    import pickle

    from raymerge.merge_plan.tables import load_plan

    made = load_plan(place / name)
    buffers: list[pickle.PickleBuffer] = []
    sent = timer("send plan", lambda: pickle.dumps(made, protocol=5, buffer_callback=buffers.append))
    raw = [bytes(each.raw()) for each in buffers]
    timer("receive plan", lambda: pickle.loads(sent, buffers=raw))
    return {"sent bytes": len(sent), "buffer bytes": sum(map(len, raw))}


def dispatch(timer: Timer, place: Path, name: str) -> dict[str, Any]:
    from raymerge.merge_plan.jobs import Jobs
    from raymerge.merge_plan.tables import load_plan

    made = load_plan(place / name)
    jobs = timer("open jobs", lambda: Jobs(made))
    count = timer("decode ops", lambda: sum(len(jobs.ops(s)) for s in range(made["segments"].num_rows)))
    return {"microseconds an op": round(1e6 * timer.steps["decode ops"][1] / count, 1)}


def finish(timer: Timer, place: Path, name: str) -> dict[str, Any]:
    from raymerge.merge_plan.report import found_duplicates
    from raymerge.merge_plan.tables import load_plan, save_plan
    from raymerge.planner.inputs.sources import open_models
    from raymerge.publish.finish import check_shards, finish_companions, finish_config, parents_of
    from raymerge.recipes.load import recipe_from_mapping
    from raymerge.storage.local.store import LocalStore
    from raymerge.verifier.structure import RECORD_PLAN, verify_structure

    made = load_plan(place / name)
    sources = open_models(recipe_from_mapping(json.loads((place / f"{name}.json").read_text()))).require()
    donor = sources[int(made.manifest["donor"])].checkpoint
    root = place / f"{name}-out"
    (root / RECORD_PLAN).mkdir(parents=True)
    save_plan(made, root / RECORD_PLAN)
    for shard in made["shards"].to_pylist():
        with (root / shard["name"]).open("wb") as file:
            file.write(shard["header"])
            file.truncate(shard["nbytes"])
    digests = {row: f"{row:032x}" for row in range(made["ops"].num_rows)}
    timer("find duplicates", lambda: found_duplicates(made, digests, shared_bytes=None))
    with LocalStore(root) as store, LocalStore(Path(donor.root)) as files:
        timer("check shards", lambda: check_shards(made, store))
        companions, parents = donor.companions, parents_of(sources)
        timer(
            "write companions",
            lambda: finish_companions(made, files, store, companions=companions, parents=parents),
        )
        timer("write config, index", lambda: finish_config(made, files, store, donor_config=donor.config))
    verdict = timer("verify structure", lambda: verify_structure(root))
    # What was not merged has no provenance, and nothing else is wrong with it.
    if any("provenance.json" not in problem.where for problem in verdict.problems):
        verdict.require()
    return {}


PARTS: Mapping[str, Callable[[Timer, Path, str], dict[str, Any]]] = {
    each.__name__: each for each in (plan, load, project, send, dispatch, finish)
}


def child(part: str, place: Path, name: str) -> None:
    timer = Timer()
    facts = PARTS[part](timer, place, name)
    print(json.dumps({"steps": timer.steps, "peak": _peak(), "facts": facts}))


def _peak() -> int:
    # Not ru_maxrss, which begins with what the parent had.
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def measured(place: Path, name: str, parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        command = [sys.executable, __file__, "--child", part, str(place), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        report = json.loads(done.stdout)
        for step, (wall, busy) in report["steps"].items():
            yield f"{name:12} {step:20} {wall:8.2f} s {busy:8.2f} s of one core"
        facts = ", ".join(f"{key} {value}" for key, value in report["facts"].items())
        yield f"{name:12} {'peak of these':20} {report['peak'] / 1e9:8.2f} GB  {facts}".rstrip()


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        part, where, name = sys.argv[2:]
        child(part, Path(where), name)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, default=4)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=768)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        size = HugeSize(layers=given.layers, experts=given.experts)
        models = [str(huge_checkpoint(place / f"model{n}", size)) for n in range(given.sources)]
        for name, recipe in recipes(models, given.layers).items():
            if given.recipes and name not in given.recipes:
                continue
            (place / f"{name}.json").write_text(json.dumps(recipe))
            for line in measured(place, name, given.parts):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
