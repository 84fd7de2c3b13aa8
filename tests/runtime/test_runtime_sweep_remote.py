"""Outputs of a sweep in an object store: the bytes of separate merges, of one read of the sources."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import moto.s3.models as moto_s3
import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.marks import slow_but
from kits.merge_cases import INLINE, NOT_REPRODUCED, EventLog, digests, make_family, merge, recipes
from kits.quantised_merges import MAKERS
from kits.s3_server import MotoServer, S3Server

from raymerge.api import plan, read_sweep, submit_sweep
from raymerge.cli.plan import explain_sweep
from raymerge.cli.render.sweeps import SweepAccount
from raymerge.errors import IncompleteError, NonFiniteError
from raymerge.events import OutputFailed, OutputsStarted, Planned, SegmentDone, Started
from raymerge.merge_plan.joint import joint_groups
from raymerge.merge_plan.memory import LEAST_BLOCK
from raymerge.options import RunOptions
from raymerge.publish import staging as staging_module
from raymerge.publish.object_shards import ShardSink, shard_orders
from raymerge.storage.objects import writer as stream
from raymerge.storage.objects.writer import ObjectWriter

_PART = 128 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three outputs of a dozen shards."""
    family = make_family(tmp_path_factory.mktemp("family"), hidden=128, files=2)
    ties = recipes(family)["ties"]
    models = [{**each, "parameters": {"weight": "$w", "density": 0.5}} for each in ties["models"]]
    return {**ties, "models": models, "sweep": {"w": [0.2, 0.6, 0.9]}, "shard_size": "100KB"}


def _apart(sweep: Mapping[str, Any], root: Path) -> dict[str, dict[str, str]]:
    """Digests of the files of each output, from a merge of its plain recipe into a directory."""
    made = {}
    for output in read_sweep(sweep) or ():
        (plain,) = output.recipes
        merge(plain, root / output.name)
        made[output.name] = digests(root / output.name)
    assert made
    return made


@pytest.fixture(scope="module")
def apart(sweep: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return _apart(sweep, tmp_path_factory.mktemp("apart"))


def _there(s3: S3Server) -> dict[str, dict[str, str]]:
    made: dict[str, dict[str, str]] = {}
    for key, data in s3.objects("outs/").items():
        _, name, key_there = key.split("/", 2)
        if key_there not in NOT_REPRODUCED:
            made.setdefault(name, {})[key_there] = hashlib.sha256(data).hexdigest()
    return made


def _shards_put(s3: S3Server) -> list[str]:
    put = (each.key for each in s3.asked("PUT", ".safetensors") if each.status == 200)
    return [key for key in put if key.endswith(".safetensors")]


def _read_bytes(events: EventLog) -> int:
    return sum(event.read_bytes for event in events.of(SegmentDone))


def test_outputs_are_those_of_separate_merges_and_read_each_source_once(
    s3: S3Server, sweep: dict[str, Any], apart: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    events = EventLog()
    results = submit_sweep(sweep, s3.place("outs"), INLINE, on_event=events)
    assert _there(s3) == apart
    assert [event.names for event in events.of(OutputsStarted)] == [tuple(apart)]
    (alone, *_) = read_sweep(sweep) or ()
    once = _read_bytes(merge(alone.recipes[0], tmp_path / "alone"))
    assert _read_bytes(events) == once > 0
    receipts = [receipt for result in results.values() for receipt in result.receipts]
    assert sum(receipt.read_bytes for receipt in receipts) == once
    (planned,) = events.of(Planned)
    done = events.of(SegmentDone)
    assert sorted(event.segment for event in done) == list(range(planned.segments))
    assert sum(event.planned_bytes for event in done) == planned.total_bytes
    assert len(_shards_put(s3)) == len(set(_shards_put(s3))) == 3 * len(plan(alone.recipes[0])["shards"]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("scratch", [False, True])
def test_uploads_of_several_parts_go_side_by_side(
    s3: S3Server,
    server: S3Server,
    sweep: dict[str, Any],
    apart: dict[str, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scratch: bool,
) -> None:
    if not isinstance(server, MotoServer):
        pytest.skip("it takes no parts of less than 5 MiB, as S3 itself")
    monkeypatch.setattr(stream, "SMALLEST_PART", _PART)
    monkeypatch.setattr(moto_s3, "S3_UPLOAD_PART_MIN_SIZE", 1)
    options = RunOptions(inline=True, scratch=str(tmp_path / "scratch") if scratch else None)
    submit_sweep(sweep, s3.place("outs"), options)
    assert _there(s3) == apart
    assert s3.uploads() == []
    assert not scratch or list((tmp_path / "scratch").iterdir()) == []


def _case(name: str, root: Path) -> dict[str, Any]:
    """A sweep whose bytes are equal in several places, or that makes codes with scales."""
    if name == "duplicates":
        model = str(tiny_llama(root / "one", 0, hidden=64, layers=2))
        scaled = {"sources": [{"model": model, "layer_range": [1, 2], "parameters": {"scale": "$w"}}]}
        span = {"sources": [{"model": model, "layer_range": [0, 1]}]}
        slices = [span, scaled, span, scaled]
        return {"merge_method": "passthrough", "slices": slices, "shard_size": "200KB"}
    parents = [str(MAKERS[name](root / each, seed).root) for seed, each in enumerate(("a", "b"))]
    entries = [{"model": each, "parameters": {"weight": "$w"}} for each in parents]
    parameters = {"normalize": False}
    return {"merge_method": "linear", "models": entries, "parameters": parameters, "shard_size": "100KB"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most_early"),
    slow_but(
        [("duplicates", 0), ("duplicates", MIB), ("DeepSeek-V3 F32", 0), ("gpt-oss", MIB)],
        ("duplicates", MIB),
    ),
)
def test_what_lies_in_several_shards_is_made_for_each(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most_early: int
) -> None:
    monkeypatch.setattr(staging_module, "shard_orders", partial(shard_orders, most_early=most_early))
    case = {**_case(name, tmp_path), "sweep": {"w": [0.5, 0.8]}}
    events = EventLog()
    submit_sweep(case, s3.place("outs"), INLINE, on_event=events)
    assert len(events.of(OutputsStarted)) == 1
    assert _there(s3) == _apart(case, tmp_path / "apart")


@pytest.mark.slow
def test_one_output_that_is_not_finite_does_not_lose_the_others(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("base", 1.0), ("tune", 3.0)):
        tensors = {f"{number}.weight": torch.full((256, 512), value) for number in range(8)}
        halves = {each: tensor.to(torch.float16) for each, tensor in tensors.items()}
        write_checkpoint(tmp_path / name, halves, {"architectures": ["Odd"], "model_type": "odd"})
    case = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "base"),
        "models": [{"model": str(tmp_path / "tune"), "parameters": {"weight": "$w"}}],
        "sweep": {"w": [0.5, 5e6, 2.0]},
        "shard_size": "600KB",
    }
    begun: list[str] = []
    enter = ShardSink.__enter__

    def counted(self: ShardSink) -> ShardSink:
        begun.append(f"{self._writer.place.rsplit('/', 1)[-1]} {self._order.name}")
        return enter(self)

    monkeypatch.setattr(ShardSink, "__enter__", counted)
    events = EventLog()
    with pytest.raises(NonFiniteError, match=r"^w5000000\.0: [0-7]\.weight: "):
        submit_sweep(case, s3.place("outs"), RunOptions(inline=True, threads=1), on_event=events)
    assert [event.name for event in events.of(OutputFailed)] == ["w5000000.0"]
    there = [key for key in s3.objects("outs/") if key.endswith(".safetensors")]
    assert {key.split("/")[1] for key in there} == {"w0.5", "w2.0"}
    for weight, value in ((0.5, 2.0), (2.0, 5.0)):
        root = tmp_path / f"got{weight}"
        root.mkdir()
        for key, data in s3.objects(f"outs/w{weight}/").items():
            if "raymerge/" not in key:
                (root / key.rsplit("/", 1)[1]).write_bytes(data)
        assert [tensor.unique().tolist() for tensor in read_tensors(root).values()] == [[value]] * 8
    assert len(there) == 8
    # What is in hand when it is seen is made again, and nothing else.
    again = len(begun) - len(set(begun))
    assert again == 2 * len([each for each in begun if each.startswith("w5000000.0")]) < len(there)
    assert s3.uploads() == []


def test_a_stopped_sweep_goes_on_with_what_is_missing(
    s3: S3Server, sweep: dict[str, Any], apart: dict[str, dict[str, str]]
) -> None:
    def stop(event: object) -> None:
        if isinstance(event, SegmentDone) and len(first.of(SegmentDone)) == 1:
            signal.raise_signal(signal.SIGINT)

    first = EventLog(stop)
    with pytest.raises(IncompleteError, match="0 of 3 outputs are published"):
        submit_sweep(sweep, s3.place("outs"), RunOptions(inline=True, threads=1), on_event=first)
    before = set(_shards_put(s3))
    # One of them loses a shard.
    lost = min(before)
    ObjectWriter(s3.place("outs")).delete([lost.removeprefix("outs/")])
    s3.requests.clear()
    again = EventLog()
    submit_sweep(sweep, s3.place("outs"), INLINE, on_event=again)
    assert _there(s3) == apart
    put = _shards_put(s3)
    assert before & set(put) == {lost}
    (started,), (planned,) = again.of(Started), again.of(Planned)
    assert 0 < started.done_bytes < planned.total_bytes
    assert started.done_bytes + sum(e.planned_bytes for e in again.of(SegmentDone)) == planned.total_bytes


@pytest.mark.slow
def test_uploads_count_in_how_many_are_made_of_one_read(
    s3: S3Server, sweep: dict[str, Any], apart: dict[str, dict[str, str]]
) -> None:
    def planned(memory: int) -> SweepAccount:
        options = RunOptions(inline=True, memory=memory, threads=1)
        return explain_sweep(sweep, s3.place("outs"), options, title="")

    ample = planned(64 * MIB)
    assert [len(group.numbers) for group in ample.groups] == [3]
    alone = ample.accounts[0].explanation.memory
    assert alone.upload > 2 * MIB
    few = alone.least_budget + 2 * (LEAST_BLOCK + alone.upload) + LEAST_BLOCK // 2
    assert [len(group.numbers) for group in planned(few).groups] == [2, 1]
    events, options = EventLog(), RunOptions(inline=True, memory=few, threads=1)
    submit_sweep(sweep, s3.place("outs"), options, on_event=events)
    assert _there(s3) == apart
    assert [len(event.names) for event in events.of(OutputsStarted)] == [2, 1]
    assert all(0 < event.projected_peak <= few for event in events.of(Planned))


def test_outputs_whose_shards_are_made_otherwise_are_read_apart(tmp_path: Path) -> None:
    model = str(tiny_llama(tmp_path / "one", 0, hidden=64, layers=2))
    plans = []
    for scale in (1.0, 0.5):
        span = {"sources": [{"model": model, "layer_range": [0, 1]}]}
        other = {"sources": [{"model": model, "layer_range": [0, 1], "parameters": {"scale": scale}}]}
        plans.append(plan({"merge_method": "passthrough", "slices": [span, other]}))
    assert json.dumps(joint_groups(plans, in_order=True)) == "[[0], [1]]"
