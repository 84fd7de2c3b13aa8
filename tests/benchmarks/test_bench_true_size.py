"""The benchmark of the true size: its made-up parents and its output that stores nothing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import true_size
from benchmarks.discarding import (
    DiscardingStaging,
    MadeUpStore,
    complete_receipts,
    same_again,
    stored_bytes,
    write_patterns,
)
from kits.checkpoint_maker import sparse_checkpoint
from kits.deepseek_headers import V3_CONFIG, deepseek_v3_specs
from kits.merge_cases import INLINE, EventLog
from kits.recipe_maker import linear
from safetensors import SafetensorError, safe_open

from raymerge.api import read_recipe, submit
from raymerge.errors import IncompleteError
from raymerge.events import Event, SegmentDone, Started
from raymerge.planner.merges import plan_merges
from raymerge.publish.record import Ledger
from raymerge.runtime.driver.run import Run, RunResult
from raymerge.runtime.workers.pool import InlinePool
from raymerge.storage.local.buffers import aligned_buffer
from raymerge.storage.local.mapping import MAP_LEAST, PageMaps

SMALL = {
    **V3_CONFIG,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "vocab_size": 1024,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("true-size")
    write_patterns(root / "patterns")
    for name in ("model0", "model1"):
        sparse_checkpoint(root / name, deepseek_v3_specs(SMALL), SMALL)
    return root


def _discarded(place: Path, output: Path, on_event: EventLog) -> RunResult:
    recipe = read_recipe(linear(place / "model0", place / "model1"))
    (merge,) = plan_merges([recipe], output / "steps", version="0")
    staging = DiscardingStaging(output, merge.plan, patterns=place / "patterns")
    pool = InlinePool("cpu", 1)
    pool.start()
    try:
        run = Run(merge.plan, merge.sources, output, INLINE, on_event=on_event, staging=staging)
        run.check()
        return run.carry_out(pool)
    finally:
        pool.close()


def test_pages_of_a_made_up_parent_are_never_mapped(place: Path) -> None:
    """Also when somebody has read the file itself, whose data are holes, so that it is cached."""
    (path, *_) = sorted((place / "model0").glob("*.safetensors"))
    nbytes = len(path.read_bytes()) // MAP_LEAST * MAP_LEAST
    buffer = torch.frombuffer(aligned_buffer(nbytes), dtype=torch.uint8)
    maps = PageMaps()
    maps.watch(buffer.numpy().data, buffer)
    assert nbytes
    with MadeUpStore(place / "model0", patterns=place / "patterns", seed=0) as store:
        assert store.map_extent(path.name, 0, nbytes, buffer.numpy().data, maps) is None


def _written_out(place: Path, seed: int, root: Path) -> Path:
    """A made-up parent as files like any other."""
    source = place / f"model{seed}"
    root.mkdir()
    (root / "config.json").write_bytes((source / "config.json").read_bytes())
    with MadeUpStore(source, patterns=place / "patterns", seed=seed) as store:
        for path in source.glob("*.safetensors"):
            data = path.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            (root / path.name).write_bytes(data[:start] + store.read(path.name, start, len(data) - start))
    return root


@pytest.mark.slow
def test_what_is_discarded_has_the_digests_of_what_would_be_written(place: Path, tmp_path: Path) -> None:
    made = _discarded(place, tmp_path / "out", EventLog())
    models = [_written_out(place, seed, tmp_path / f"real{seed}") for seed in (0, 1)]
    real = submit(linear(*models), tmp_path / "real", INLINE)
    digests = [{op: each.digests for each in one.receipts for op in each.digests} for one in (made, real)]
    assert len(digests[0]) > 90
    assert digests[0] == digests[1]
    plan, receipts = complete_receipts(tmp_path / "out" / "raymerge")
    roots = [place / name for name in ("model0", "model1")]
    assert same_again(plan, receipts, roots, tmp_path / "again", place / "patterns") == len(receipts)
    read = sum(each.read_bytes for each in receipts.values())
    assert read == stored_bytes(plan, receipts) == 2 * sum(plan["tensors"].column("nbytes").to_pylist())


def test_nobody_takes_a_discarded_output_for_weights(place: Path, tmp_path: Path) -> None:
    _discarded(place, tmp_path / "out", EventLog())
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert shards
    assert sum(path.stat().st_size for path in shards) < 1 << 20
    for path in shards:
        with pytest.raises(SafetensorError), safe_open(path, "pt"):
            pass


def test_segments_that_differ_when_made_once_more_end_the_benchmark(place: Path, tmp_path: Path) -> None:
    for each in place.glob("[mp]*"):
        (tmp_path / each.name).symlink_to(each)
    _discarded(place, tmp_path / "out", EventLog())
    assert true_size._proved(tmp_path)["made once more, alone"].startswith("3 of 3 ")
    (tmp_path / "patterns").unlink()
    (tmp_path / "patterns").mkdir()
    for each in (place / "patterns").iterdir():
        with (tmp_path / "patterns" / each.name).open("wb") as zeros:
            zeros.truncate(each.stat().st_size)
    with pytest.raises(SystemExit, match="only 0 of 3 segments"):
        true_size._proved(tmp_path)


_CHILD = """
import json, signal, sys, time
for event in ({"event": "started"}, {"event": "planned", "total_bytes": 4}):
    print(json.dumps({"at": 0, "cpu": 0, **event}), flush=True)
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print(json.dumps({"at": 1, "cpu": 0, "event": "segment_done", "planned_bytes": 2}), flush=True)
time.sleep(0.2)
if %r:
    print(json.dumps({"at": 1, "cpu": 0, "event": "published"}), flush=True)
sys.exit(%r)
"""


@pytest.mark.parametrize(
    ("is_published", "code", "share", "is_good"),
    [
        (True, 0, None, True),
        (False, 3, None, False),
        (False, 0, None, False),
        (False, 0, 0.5, True),
        (False, 0, 0.9, False),
    ],
)
def test_only_a_merge_that_was_to_stop_may_end_before_it_is_published(
    is_published: bool,
    code: int,
    share: float | None,
    is_good: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "child.py").write_text(_CHILD % (is_published, code))
    monkeypatch.setattr(true_size, "__file__", str(tmp_path / "child.py"))
    with nullcontext() if is_good else pytest.raises(SystemExit, match="the merge failed"):
        true_size._watched(tmp_path, share, kills=False)


def test_a_run_goes_on_by_receipts_that_prove_their_segments(place: Path, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, SegmentDone) and len(events.of(SegmentDone)) == 5:
            raise KeyboardInterrupt

    events = EventLog(stop)
    with pytest.raises(IncompleteError):
        _discarded(place, tmp_path / "out", events)
    (ledger,) = tmp_path.glob(".out.*/raymerge/ledger.jsonl")
    first, second, *others = Ledger.read(ledger).values()
    lacking = replace(first, digests=dict(list(first.digests.items())[1:]))
    short = replace(second, written_bytes=second.written_bytes - 1)
    conditions = Ledger.conditions(ledger)
    assert conditions is not None
    Ledger(ledger, conditions).begin({each.segment: each for each in (lacking, short, *others)})
    again = EventLog()
    _discarded(place, tmp_path / "out", again)
    (started,) = again.of(Started)
    made = {event.segment for event in again.of(SegmentDone)}
    assert started.done_segments == len(others) > 0
    assert {first.segment, second.segment} <= made
    assert made.isdisjoint(each.segment for each in others)
