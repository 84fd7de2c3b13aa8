"""Merges of the true size, from the first byte read to the index, without the bytes of parents or output.

    python tests/benchmarks/true_size.py v3-linear v3-chimera qwen3-slerp gpt-oss-ties
    python tests/benchmarks/true_size.py v3-linear --layers 6           # the same tensors in fewer layers
    python tests/benchmarks/true_size.py v3-linear --share 0.02         # the whole plan, stopped early
    python tests/benchmarks/true_size.py v3-linear --kill 0.5           # killed half way, and resumed

Parents have the published names, shapes, dtypes and files, and values that are made up as they are read; the
output is digested and dropped (``benchmarks/discarding.py``). All else is what ``raymerge submit`` does with
``--workers 2 --threads 1 --memory 4GiB``: planning, an embedded Ray with two workers, receipts in a durable
ledger, config, index, verification of headers and sizes, publishing. It prints a table with a column for each
merge, and what the simulator makes of its figures for ten machines and 64 workers.

What this shows and what it does not: reading costs a copy within memory, and writing nothing but the digest,
so the time is that of everything but the storage. The kernel's part in I/O is left out: where storage is as
fast as memory a merge takes longer than here.

``--kill SHARE`` ends the driver, Ray and the workers with SIGKILL once so much of the plan's bytes is made,
and gives the same command again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import cpu_seconds, machine, status_bytes, tree
from kits.checkpoint_maker import TOKENIZER_FILES, sparse_checkpoint
from kits.deepseek_headers import V3_CONFIG, deepseek_v3_specs
from kits.fused_headers import GPT_OSS_CONFIG, gpt_oss_120b_specs
from kits.qwen3_headers import QWEN3_CONFIG, qwen3_235b_specs
from kits.recipe_maker import linear, slerp

from raymerge.checkpoints.header import TensorSpec, split_into_shards

WORKERS, MEMORY = 2, 4 << 30
_FILE_NBYTES = 4 << 30
_CHECKED = 3
"""Segments that are made once more, in another process with other tiles, to compare their digests."""


@dataclass(frozen=True, slots=True)
class Case:
    config: Mapping[str, Any]
    files: Callable[[Mapping[str, Any]], Sequence[Sequence[TensorSpec]]]
    recipe: Callable[[Sequence[str]], dict[str, Any]]
    num_models: int = 2

    def of_layers(self, layers: int | None) -> Case:
        return self if layers is None else replace(self, config={**self.config, "num_hidden_layers": layers})


def _chimera(models: Sequence[str]) -> dict[str, Any]:
    """Experts as they are in the first model, and the mean of everything else."""
    experts = {"role": "expert", "merge_method": "passthrough", "sources": [models[0]]}
    return linear(*models, base_model=models[0], methods=[experts])


def _ties(models: Sequence[str]) -> dict[str, Any]:
    tuned = [{"model": each, "parameters": {"weight": 0.5, "density": 0.5}} for each in models[1:]]
    return {"merge_method": "ties", "base_model": models[0], "models": tuned}


CASES: Mapping[str, Case] = {
    "v3-linear": Case(V3_CONFIG, deepseek_v3_specs, lambda models: linear(*models)),
    "v3-chimera": Case(V3_CONFIG, deepseek_v3_specs, _chimera),
    "qwen3-slerp": Case(
        QWEN3_CONFIG,
        lambda config: split_into_shards(qwen3_235b_specs(config), _FILE_NBYTES),
        lambda models: slerp(*models, t=0.4),
    ),
    "gpt-oss-ties": Case(
        GPT_OSS_CONFIG,
        lambda config: split_into_shards(gpt_oss_120b_specs(config), _FILE_NBYTES),
        _ties,
        num_models=3,
    ),
}


def main() -> None:
    asked = _asked()
    if asked.child:
        _child(Path(asked.child), is_share=asked.share is not None)
        return
    with tempfile.TemporaryDirectory(dir=asked.place, prefix="true-size-") as place:
        for name in asked.cases:
            facts = measured(name, Path(place), asked.layers, share=asked.share, kill=asked.kill)
            title = name if asked.layers is None else f"{name}, {asked.layers} layers"
            rows = (f"| {what} | {fact} |" for what, fact in facts.items())
            _say("\n".join(["", f"| {title} | {machine()} |", "|---|---|", *rows]))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--layers", type=int, help="layers of the models; all of them where it is left out")
    parser.add_argument("--share", type=float, help="stop once so much of the plan is made")
    parser.add_argument("--kill", type=float, help="kill everything once so much is made, and go on")
    parser.add_argument("--place", help="directory for headers and records, a few hundred MB")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.cases) - CASES.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return asked


# One process that merges, as the command does


def _child(place: Path, *, is_share: bool) -> None:
    """Plan and merge what ``place`` describes; tells events as JSON lines, and what it took itself."""
    from benchmarks.discarding import DiscardingStaging

    from raymerge.errors import IncompleteError
    from raymerge.options import RunOptions
    from raymerge.planner.merges import plan_merges
    from raymerge.publish.record import Journal
    from raymerge.recipes.load import recipe_from_mapping
    from raymerge.runtime.driver.run import Run
    from raymerge.runtime.workers.ray_pool import RayPool

    began = time.monotonic()
    options = RunOptions(workers=WORKERS, threads=1, memory=MEMORY, device="cpu")
    output = place / "out"
    _tell({"event": "begun"})
    with Journal(lambda event: _tell(event.to_json())) as emit:
        recipe = recipe_from_mapping(json.loads((place / "recipe.json").read_text()))
        (merge,) = plan_merges([recipe], place / "steps", version="0")
        _tell({"event": "plan_made"})
        staging = DiscardingStaging(output, merge.plan, patterns=place / "patterns")
        run = Run(
            merge.plan,
            merge.sources,
            output,
            options,
            on_event=emit,
            began=began,
            journal=emit,
            staging=staging,
        )
        run.check()
        pool = RayPool(options, emit, parts=len(merge.plan["segments"]))
        try:
            pool.start()
            pool.conclude()
            # Stopped is as good as done where a share is asked for.
            with suppress(*([IncompleteError] if is_share else [])):
                run.carry_out(pool)
        finally:
            pool.close()


def _tell(event: Mapping[str, Any]) -> None:
    print(json.dumps({"at": time.monotonic(), "cpu": time.process_time(), **event}), flush=True)


# The process that watches it


@dataclass(slots=True)
class Watched:
    """What a merge was seen to do and take, until it ended or was ended."""

    events: list[dict[str, Any]] = field(default_factory=list)
    most: dict[int, dict[str, int]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    before: Mapping[int, float] = field(default_factory=dict)
    idle: int = 0
    """Bytes of its own that a worker had before it began."""
    roles: dict[int, str] = field(default_factory=dict)
    in_hand: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def cpu(self, role: str) -> float:
        """Seconds of processor time since the run began its segments: imports do not count."""
        mine = ((pid, seconds) for pid, seconds in self.seconds.items() if self.roles[pid] == role)
        return sum(seconds - self.before.get(pid, 0.0) for pid, seconds in mine)

    def peak(self, role: str, name: str) -> int:
        return max((own[name] for pid, own in self.most.items() if self.roles[pid] == role), default=0)

    def look(self, root: int) -> None:
        for pid in tree(root):
            status = status_bytes(pid)
            if "VmHWM" not in status:
                continue
            self.roles[pid] = "driver" if pid == root else _role(pid)
            now = {"own": status.get("RssAnon", 0) + status.get("RssShmem", 0), "all": status["VmHWM"]}
            before = self.most.get(pid, now)
            self.seconds[pid] = cpu_seconds(pid)
            self.most[pid] = {name: max(now[name], before[name]) for name in now}


def _role(pid: int) -> str:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return "other"
    return "worker" if words and words[0].startswith("ray::MergeWorker") else "other"


def _watched(place: Path, until: float | None, *, kills: bool) -> Watched:
    """Have a merge made, or a share of it: then it is asked to stop, or killed with all that it started.

    Raises SystemExit where it ends by itself before it is published.
    """
    share = [] if until is None or kills else ["--share", str(until)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*_paths(), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", str(place), *share],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    seen, ended, is_cut = Watched(), threading.Event(), False

    def look() -> None:
        while not ended.wait(0.5):
            seen.look(process.pid)

    threading.Thread(target=look, daemon=True).start()
    assert process.stdout is not None
    made, total, next_share = 0, 1, 0.1
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        seen.events.append(event)
        if event["event"] == "worker_progress":
            seen.in_hand[event["worker"]] = seen.events.pop()["parts"]
        if event["event"] == "started":
            seen.before, seen.idle = dict(seen.seconds), seen.peak("worker", "own")
        total = event.get("total_bytes", total)
        made += event.get("planned_bytes", 0) + event.get("done_bytes", 0) * (event["event"] == "started")
        if made >= next_share * total:
            next_share = made / total + 0.1
            passed = event["at"] - seen.events[0]["at"]
            _say(f"{place.name}: {made / total:.0%} of the plan after {passed:,.0f} s")
        if until is not None and not is_cut and made >= until * total:
            is_cut = True
            if kills:
                _kill(process.pid)
            else:
                os.kill(process.pid, signal.SIGINT)
    ended.set()
    process.stdout.close()
    failed = process.wait() != 0 and not (is_cut and kills)
    if failed or not (is_cut or seen.of("published")):
        raise SystemExit(f"{place.name}: the merge failed; its last words: {seen.events[-1:]}")
    return seen


def _paths() -> list[str]:
    tests = Path(__file__).resolve().parents[1]
    return [str(tests), str(tests.parent)]


def _kill(root: int) -> None:
    for pid in [root, *tree(root)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


# What comes of it


def measured(
    name: str, place: Path, layers: int | None, *, share: float | None = None, kill: float | None = None
) -> dict[str, str]:
    case = CASES[name].of_layers(layers)
    root = place / name
    prepare(case, root)
    try:
        killed = None if kill is None else _watched(root, kill, kills=True)
        seen = _watched(root, share, kills=False)
        if not seen.of("segment_done"):
            raise SystemExit(f"{name}: no segment was made; its last words: {seen.events[-1:]}")
        facts = {**_facts(seen), **({} if killed is None else _resumed(killed, seen))}
        published = "yes" if seen.of("published") else "no, it was stopped before"
        return {**facts, **_proved(root), "verified and published": published, **_extrapolated(root, seen)}
    finally:
        shutil.rmtree(root)


def prepare(case: Case, root: Path) -> None:
    from benchmarks.discarding import write_patterns

    models = [str(root / f"model{number}") for number in range(case.num_models)]
    files = case.files(case.config)
    for model in models:
        sparse_checkpoint(Path(model), files, case.config)
        for companion, text in TOKENIZER_FILES.items():
            (Path(model) / companion).write_text(text)
    write_patterns(root / "patterns")
    (root / "recipe.json").write_text(json.dumps(case.recipe(models)))


def _sums(seen: Watched) -> tuple[int, int, int]:
    """Bytes read, written, and planned to be read and written, of the segments made."""
    done = seen.of("segment_done")
    read, written, planned = (
        sum(event[key] for event in done) for key in ("read_bytes", "written_bytes", "planned_bytes")
    )
    return read, written, planned


def _facts(seen: Watched) -> dict[str, str]:
    (begun,), (whole,), done = seen.of("started"), seen.of("planned"), seen.of("segment_done")
    read, written, planned = _sums(seen)
    seconds, cpu = done[-1]["at"] - begun["at"], seen.cpu("worker")
    driver, ended = done[-1]["cpu"] - begun["cpu"], seen.events[-1]
    facts = {
        "output": f"{whole['output_bytes'] / 1e9:,.1f} GB in {whole['segments']:,} segments",
        "made in this run": f"{written / 1e9:,.1f} GB of {read / 1e9:,.1f} GB read, {len(done):,} receipts",
        "planning; until workers are ready": (
            f"{seen.of('plan_made')[0]['at'] - seen.of('begun')[0]['at']:.1f} s; "
            f"{begun['at'] - seen.of('begun')[0]['at']:.1f} s"
        ),
        "segments": f"{seconds:,.1f} s, {read / seconds / 1e9:.2f} GB/s read",
        "then until it was published, or had stopped": f"{ended['at'] - done[-1]['at']:.1f} s",
        "processor time of the workers": (
            f"{cpu:,.0f} s, {1e9 * cpu / read:.2f} ns for a byte read; "
            f"both cores busy with it for {cpu / 2 / seconds:.0%} of the time"
        ),
        "driver": (
            f"{ended['cpu']:.1f} s of processor time, {driver:.1f} s of it for {len(done):,} segments: "
            f"{1e3 * driver / len(done):.2f} ms each"
        ),
        "memory stated": (
            f"{whole['projected_peak'] / 2**20:,.0f} MiB of a worker, beyond the "
            f"{seen.idle / 2**20:,.0f} of an idle one"
        ),
        "whole plan at this rate": f"{whole['total_bytes'] / planned * seconds / 60:,.1f} min",
        "whole plan if both cores did nothing else": f"{whole['total_bytes'] / planned * cpu / 120:,.1f} min",
    }
    for role in ("worker", "driver"):
        own, every = (seen.peak(role, name) / 2**20 for name in ("own", "all"))
        facts[f"peak memory of a {role}"] = f"{own:,.0f} MiB of its own, {every:,.0f} with mapped files"
    return facts


def _resumed(killed: Watched, seen: Watched) -> dict[str, str]:
    before, after = ({event["segment"] for event in one.of("segment_done")} for one in (killed, seen))
    read, written, _ = _sums(killed)
    seconds = killed.of("segment_done")[-1]["at"] - killed.of("started")[0]["at"]
    in_hand = [part for parts in killed.in_hand.values() for part in parts if part["part"] in after]
    (begun,) = seen.of("started")
    lost = sum(part["done_bytes"] for part in in_hand)
    return {
        "before it was killed": f"{seconds:,.1f} s, {written / 1e9:,.1f} GB of {read / 1e9:,.1f} GB read",
        "killed with": f"{len(before):,} receipts; {begun['done_segments']:,} were taken up",
        "made again": f"{len(before & after)} of them; {len(in_hand)} in hand with {lost / 1e9:.2f} GB done",
    }


def _proved(root: Path) -> dict[str, str]:
    """What stands in place of reading the output back."""
    from benchmarks.discarding import complete_receipts, same_again, stored_bytes

    (record,) = root.glob("*out*/raymerge")
    plan, receipts = complete_receipts(record)
    made = sorted(receipts)
    some = {number: receipts[number] for number in made[:: -(-len(made) // _CHECKED)]}
    models = sorted(root.glob("model*"))
    equal = same_again(plan, some, models, root / "again", root / "patterns")
    if equal < len(some):
        raise SystemExit(
            f"{root.name}: made once more, only {equal} of {len(some)} segments gave the same digests"
        )
    read = sum(each.read_bytes for each in receipts.values())
    return {
        "bytes read for each of the parents'": f"{read / stored_bytes(plan, made):.3f}",
        "receipts in the record": f"{len(made):,}, each with all digests and bytes of its segment",
        "made once more, alone": f"{equal} of {len(some)} segments gave the same digests",
    }


_STORAGE = (5e9, 25e9, 100e9)


def _extrapolated(root: Path, seen: Watched) -> dict[str, str]:
    """Ten machines with 32 cores and 25 Gbit/s each, 64 workers of four threads, as the simulator has it: a
    thread computes as fast as one did here, and start-up takes the driver's processor time before it."""
    from raymerge.merge_plan.tables import load_plan
    from raymerge.planner.simulation import Cluster, simulate_plan

    (record,) = root.glob("*out*/raymerge/plan")
    plan = load_plan(record)
    read, _, _ = _sums(seen)
    (begun,) = seen.of("started")
    cluster = Cluster(
        workers=64,
        threads=4,
        memory=MEMORY,
        compute=read / seen.cpu("worker"),
        per_worker=10 * 25e9 / 8 / 64,
        startup=begun["cpu"],
        storage=_STORAGE[0],
    )
    found = {}
    for speed in _STORAGE:
        result = simulate_plan(plan, replace(cluster, storage=speed), MEMORY)
        found[f"64 workers, storage of {speed / 1e9:.0f} GB/s"] = (
            f"{result.seconds / 60:.1f} min, limited by {result.limiter}"
        )
    return found


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
