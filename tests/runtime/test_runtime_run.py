"""One run: its events, its order of writing, how it stops, and how it goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.merge_cases import INLINE, EventLog, Family, digests, least_memory, merge, recipes, staging_of
from safetensors.torch import save_file

from raymerge.api import submit
from raymerge.errors import IncompleteError, NonFiniteError, OptionError, TargetError
from raymerge.events import (
    DeviceFailed,
    DuplicatesFound,
    Event,
    Planned,
    Published,
    SegmentDone,
    ShardDone,
    Started,
    Stopping,
    Verified,
)
from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.merge_plan.memory import lanes_of
from raymerge.merge_plan.report import DuplicateGroup
from raymerge.options import RunOptions
from raymerge.publish import shards as shards_module
from raymerge.publish.finish import without_places
from raymerge.publish.record import Ledger
from raymerge.publish.shards import SegmentsRunner
from raymerge.runtime.driver import run as run_module
from raymerge.runtime.workers.pool import InlinePool
from raymerge.storage.local.store import LocalStore

REPLACE = RunOptions(inline=True, replace=True)


@pytest.fixture
def recipe(medium: Family) -> dict[str, Any]:
    return recipes(medium)["ties"]


@pytest.fixture
def own(small: Family, tmp_path: Path) -> tuple[dict[str, Any], Family]:
    """A recipe over sources that the test may change."""
    for root in (small.base, *small.tunes):
        shutil.copytree(root, tmp_path / root.name)
    family = Family(tmp_path / "base", tuple(tmp_path / tune.name for tune in small.tunes))
    return recipes(family)["task_arithmetic"], family


def _interrupted(recipe: dict[str, Any], output: Path, *, after: int) -> int:
    """Stop a run by Ctrl-C after some segments; how many were done in all."""
    events = _signalling(signal.SIGINT, after=after)
    with pytest.raises(IncompleteError):
        submit(recipe, output, INLINE, on_event=events)
    return len(events.of(SegmentDone))


def _signalling(number: int, *, after: int, times: int = 1) -> EventLog:
    def signals(event: Event) -> None:
        if isinstance(event, SegmentDone) and len(events.of(SegmentDone)) == after:
            for _ in range(times):
                signal.raise_signal(number)

    events = EventLog(signals)
    return events


# Events


def test_events_come_in_order_and_their_bytes_add_up(recipe: dict[str, Any], tmp_path: Path) -> None:
    merged = merge({**recipe, "shard_size": 1_000_000}, tmp_path / "out")
    planned, started = merged.events[:2]
    assert isinstance(planned, Planned)
    assert isinstance(started, Started)
    done, shards = merged.of(SegmentDone), merged.of(ShardDone)
    kinds = [type(event) for event in merged.events[2:]]
    assert kinds == [SegmentDone] * planned.segments + [ShardDone] * len(shards) + [Verified, Published]
    assert sorted(event.segment for event in done) == list(range(planned.segments))
    assert sum(event.read_bytes + event.written_bytes for event in done) >= planned.total_bytes
    assert sum(event.nbytes for event in shards) == planned.output_bytes
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert {event.shard: event.nbytes for event in shards} == files
    assert len(files) > 1
    assert planned.digest == merged.result.digest
    assert (started.workers, started.device, started.done_segments) == (("inline",), "cpu", 0)
    (verified,), (published,) = merged.of(Verified), merged.of(Published)
    assert (verified.tensors, verified.nbytes) == (planned.tensors, planned.output_bytes)
    assert published.path == str(tmp_path / "out") == merged.result.verdict.path


def test_events_are_json(recipe: dict[str, Any], tmp_path: Path) -> None:
    for event in merge(recipe, tmp_path / "out").events:
        record = json.loads(json.dumps(event.to_json()))
        assert record["event"].replace("_", "") == type(event).__name__.lower()


# The finished directory


def test_headers_come_first_and_the_index_last(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    for name in ("create", "write_atomic", "rename"):
        _record(monkeypatch, name, written)
    merge({**recipe, "shard_size": 1_000_000}, tmp_path / "out")
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    grown = [entry for entry in written if entry.startswith("create model-")]
    assert grown == [f"create {shard}.part" for shard in shards]
    assert written.index("write_atomic ledger.jsonl") < written.index(grown[0])
    named = [entry for entry in written if entry.startswith("rename ") and entry.endswith(".safetensors")]
    assert named == [f"rename {shard}" for shard in shards]
    record = ["raymerge/provenance.json", "raymerge/run.json"]
    last = ["README.md", *record, "config.json", "model.safetensors.index.json"]
    asked = [f"write_atomic {name}" for name in last]
    after = written[written.index(named[-1]) + 1 :]
    assert [entry for entry in after if entry.startswith("write_atomic ")] == asked


def _record(monkeypatch: pytest.MonkeyPatch, name: str, written: list[str]) -> None:
    original = getattr(LocalStore, name)

    def noting(self: LocalStore, key: str, *rest: Any) -> Any:
        written.append(f"{name} {rest[0] if name == 'rename' else key}")
        return original(self, key, *rest)

    monkeypatch.setattr(LocalStore, name, noting)


def test_the_card_and_the_record_say_what_was_done(small: Family, tmp_path: Path) -> None:
    merged = merge(recipes(small)["ties"], tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert merged.result.digest in card
    assert "merge_method" in card
    record = tmp_path / "out" / "raymerge"
    kept = {"events.jsonl", "ledger.jsonl", "numerics.json", "plan", "provenance.json", "recipe.yml"}
    kept.add("run.json")
    assert {path.name for path in record.iterdir()} == kept
    assert without_places((record / "recipe.yml").read_text()).strip() in card
    numerics = json.loads((record / "numerics.json").read_text())
    assert numerics == {"device": "cpu", "torch": torch.__version__, "float32": "full"}
    lines = [json.loads(line) for line in (record / "ledger.jsonl").read_text().splitlines()]
    # The conditions, the receipts, and what tells the files that were published.
    assert [*lines[0], *lines[-1]] == ["conditions", "files"]
    assert len(lines) == 1 + len(merged.result.receipts) + 1


# Stopping


def test_parts_in_hand_are_given_up_when_the_time_after_sigterm_is_over(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 0.0)
    events = _signalling(signal.SIGTERM, after=5)
    with pytest.raises(IncompleteError, match=re.escape(run_module.STOPPED_AT_ONCE)):
        submit(recipe, tmp_path / "out", INLINE, on_event=events)
    assert Stopping(0.0) in events
    done = len(events.of(SegmentDone))
    assert merge(recipe, tmp_path / "out").of(Started)[0].done_segments >= done >= 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_the_same_command_goes_on(
    number: int, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 60.0)
    events, before = _signalling(number, after=5), signal.getsignal(number)
    with pytest.raises(IncompleteError, match=r"stopped with \d+ of \d+ segments done") as caught:
        submit(recipe, tmp_path / "out", INLINE, on_event=events)
    assert caught.value.exit_code == 3
    assert signal.getsignal(number) == before
    done = {event.segment for event in events.of(SegmentDone)}
    # The fifth receipt's event asks, and no event comes before the next receipts are waited for: as many more
    # may be in hand or done as are let go ahead of the driver.
    (begun,) = events.of(Started)
    assert 5 <= len(done) <= 4 + 2 * (lanes_of(begun.threads) + 1)
    assert not (tmp_path / "out").exists()
    merged = merge(recipe, tmp_path / "out")
    (started,) = merged.of(Started)
    assert started.done_segments == len(done)
    assert started.done_bytes > 0
    assert done.isdisjoint(event.segment for event in merged.of(SegmentDone))
    assert len(merged.result.receipts) == merged.of(Planned)[0].segments
    merge(recipe, tmp_path / "fresh")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_a_second_signal_stops_at_once(recipe: dict[str, Any], tmp_path: Path) -> None:
    events = _signalling(signal.SIGINT, after=3, times=2)
    with pytest.raises(IncompleteError, match="stopped at once"):
        submit(recipe, tmp_path / "out", INLINE, on_event=events)
    told = len(events.of(SegmentDone))
    assert told == 3
    (started,) = merge(recipe, tmp_path / "out").of(Started)
    # Receipts that came together were recorded together, before the first of them was told of.
    assert told <= started.done_segments <= 2 + 2 * (lanes_of(started.threads) + 1)


def test_a_run_beside_the_main_thread_leaves_signals_alone(recipe: dict[str, Any], tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []
    with ThreadPoolExecutor(1) as thread:
        thread.submit(
            submit, recipe, tmp_path / "out", INLINE,
            on_event=lambda _: seen.append(signal.getsignal(signal.SIGINT)),
        ).result()  # fmt: skip
    assert set(seen) == {before}


def test_an_error_of_the_listener_stops_the_run_and_keeps_what_is_done(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    def broken(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        submit(recipe, tmp_path / "out", INLINE, on_event=broken)
    (started,) = merge(recipe, tmp_path / "out").of(Started)
    # With what was recorded together with the first.
    assert started.done_segments >= 1


# Going on


def test_a_changed_recipe_is_refused_with_the_difference(recipe: dict[str, Any], tmp_path: Path) -> None:
    _interrupted(recipe, tmp_path / "out", after=2)
    changed = {**recipe, "seed": 99}
    with pytest.raises(TargetError, match=r"another plan: .*recipe > seed was .*, is 99"):
        merge(changed, tmp_path / "out")
    merged = merge(changed, tmp_path / "out", REPLACE)
    assert merged.of(Started)[0].done_segments == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _stopped_early(recipe: dict[str, Any], output: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentRunner, "run", _no_disk)
        with pytest.raises(IncompleteError, match=r"reading or writing failed: .*Input/output error"):
            merge(recipe, output)


def _no_disk(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_source_written_again_is_refused_with_its_name(
    own: tuple[dict[str, Any], Family], tmp_path: Path
) -> None:
    recipe, family = own
    _stopped_early(recipe, tmp_path / "out")
    os.utime(family.tunes[1] / "model.safetensors", ns=(1, 1))
    pattern = r"versions > .*tune2 > files > model\.safetensors > 2 was \"\d+\", is \"1\""
    with pytest.raises(TargetError, match=pattern):
        merge(recipe, tmp_path / "out")
    merge(recipe, tmp_path / "out", REPLACE)
    assert (tmp_path / "out" / "config.json").exists()


def test_other_numerics_are_refused_with_the_difference(
    own: tuple[dict[str, Any], Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = own
    _stopped_early(recipe, tmp_path / "out")
    monkeypatch.setattr(InlinePool, "numerics", {"device": "cpu", "torch": "0.0.1"})
    with pytest.raises(TargetError, match=r"numerics > torch was .*, is \"0\.0\.1\""):
        merge(recipe, tmp_path / "out")
    merge(recipe, tmp_path / "out", REPLACE)


def test_an_unreadable_record_is_refused_and_replaced(
    own: tuple[dict[str, Any], Family], tmp_path: Path
) -> None:
    recipe, _ = own
    _stopped_early(recipe, tmp_path / "out")
    (staging_of(tmp_path / "out") / "raymerge" / "plan" / "manifest.json").write_text("{")
    with pytest.raises(TargetError, match="its record cannot be read"):
        merge({**recipe, "seed": 99}, tmp_path / "out")
    merge({**recipe, "seed": 99}, tmp_path / "out", REPLACE)


# Sources that go wrong meanwhile


def test_a_bad_value_removes_what_was_begun(own: tuple[dict[str, Any], Family], tmp_path: Path) -> None:
    recipe, family = own
    tensors = read_tensors(family.tunes[0])
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, family.tunes[0] / "model.safetensors", metadata={"format": "pt"})
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(NonFiniteError, match=r"tune1: model\.norm\.weight: the source holds NaN"):
        merge(recipe, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_bad_values_in_integers_and_buffers_are_nobodys_fault(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4), "b.codes": torch.full((4,), 0x7FC00000, dtype=torch.int32)}
    write_checkpoint(tmp_path / "one", tensors, {"architectures": ["Odd"], "model_type": "odd"})
    merge({"merge_method": "passthrough", "models": [{"model": str(tmp_path / "one")}]}, tmp_path / "out")
    assert torch.equal(read_tensors(tmp_path / "out")["b.codes"], tensors["b.codes"])


# Options


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workers": 0}, "--workers: 0 workers"),
        ({"memory": 0}, "--memory: 0 bytes"),
        ({"inline": True, "address": "auto"}, "--inline: a run in this process has no cluster"),
        ({"inline": True, "workers": 2}, "--inline: a run in this process is one worker"),
        ({"workers": 10001}, "--workers: 10001 workers are more than Ray is tested with. Give at most 10000"),
        ({"workers": 10**20}, "--workers: 1(0{20}) workers are more than Ray is tested with"),
        ({"scratch": " "}, "--scratch: ' ' is no path of a directory"),
        ({"scratch": "s3://me:word@b/x"}, "--scratch: 's3://b/x' is no path of a directory"),
        ({"scratch": "s3:/b/x"}, "--scratch: 's3:/b/x' is no path of a directory"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        RunOptions(**wrong)


def test_all_contradictions_of_options_are_told_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        RunOptions(workers=0, memory=-1, inline=True, address="auto")
    assert len(caught.value.problems) == 4


def test_too_little_memory_is_refused_with_the_least_that_works(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    options = RunOptions(inline=True, memory=1_000_000)
    said = r"--memory: 1\.00 MB a worker are too little for .* with (\w+)\. .*works is (\d+) bytes"
    with pytest.raises(OptionError, match=said) as refused:
        merge(recipe, tmp_path / "out", options)
    found = re.search(said, str(refused.value))
    assert found is not None
    assert int(found[2]) == least_memory(recipe)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--device: cuda was asked for, but no GPU is visible"):
        merge(recipe, tmp_path / "out", RunOptions(inline=True, device="cuda"))
    assert list(tmp_path.iterdir()) == []


SMALL = RunOptions(inline=True, memory=16 << 20)


def _marking(monkeypatch: pytest.MonkeyPatch, **marks: dict[int, object]) -> None:
    """Have receipts of segments say more: a field's values by the segment."""
    run = SegmentsRunner.run

    def marked(self: SegmentsRunner, number: int, budget: int | None = None) -> Receipt:
        given = {name: values[number] for name, values in marks.items() if number in values}
        return replace(run(self, number, budget), **given)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentsRunner, "run", marked)


def test_a_failed_device_is_an_event_and_stays_in_the_record(
    medium: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _marking(monkeypatch, note={3: "an illegal access"})
    merged = merge(recipes(medium)["linear"], tmp_path / "out", SMALL)
    assert merged.of(DeviceFailed) == [DeviceFailed("inline", 3, "an illegal access")]
    kept = Ledger(tmp_path / "out" / "raymerge" / "ledger.jsonl", {}).receipts()
    assert [number for number, receipt in kept.items() if receipt.note] == [3]
    assert kept[3].note == "an illegal access"


def test_the_larger_peak_is_told(medium: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _marking(monkeypatch, peak_rss={0: 5, 1: 7}, peak_device={0: 9, 1: 0})
    merged = merge(recipes(medium)["linear"], tmp_path / "out", SMALL)
    peaks = {event.segment: event.peak_bytes for event in merged.of(SegmentDone)}
    assert (peaks[0], peaks[1]) == (9, 7)


def test_a_ledger_of_before_is_still_read(tmp_path: Path) -> None:
    receipt = {
        "segment": 4,
        "read_bytes": 1,
        "written_bytes": 2,
        "seconds": 0.5,
        "worker": "worker-0",
        "digests": {"7": "ab"},
    }
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"conditions": {}}\n' + json.dumps({"receipt": receipt}) + "\n")
    (found,) = Ledger(path, {}).receipts().values()
    assert (found.segment, found.note, found.peak_rss, found.peak_device) == (4, "", 0, 0)
    assert found.encoding_errors == {}


NORM = "model.layers.{}.input_layernorm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "one", 0, hidden=32, layers=2)


def _twice(model: Path, **more: Any) -> dict[str, Any]:
    span = {"sources": [{"model": str(model), "layer_range": [0, 1]}]}
    return {"merge_method": "passthrough", "slices": [span, span], **more}


def _mean(model: Path) -> dict[str, Any]:
    entry = {"model": str(model), "parameters": {"weight": 1.0}}
    return {"merge_method": "linear", "models": [entry]}


def _with_equal_norms(model: Path) -> dict[str, torch.Tensor]:
    """Have the norms of both layers hold the same; all tensors."""
    tensors = read_tensors(model)
    tensors[NORM.format(1)] = tensors[NORM.format(0)].clone()
    write_checkpoint(model, tensors, json.loads((model / "config.json").read_text()))
    return tensors


def test_nothing_equal_is_nothing_said(model: Path, tmp_path: Path) -> None:
    merged = merge(_mean(model), tmp_path / "out")
    assert merged.of(DuplicatesFound) == []
    assert not merged.result.duplicates


def test_what_was_made_once_is_told_by_names_and_bytes(model: Path, tmp_path: Path) -> None:
    merged = merge(_twice(model), tmp_path / "out")
    (event,) = merged.of(DuplicatesFound)
    layer = {name: t for name, t in read_tensors(tmp_path / "out").items() if ".layers.1." in name}
    assert (event.tensors, event.nbytes) == (len(layer), sum(t.nbytes for t in layer.values()))
    assert {group.pattern for group in event.groups} == {name.replace(".1.", ".*.") for name in layer}
    assert (event.shared_bytes, event.unforeseen) == (None, ())
    assert merged.result.duplicates.planned.groups == event.groups
    kinds = [type(each) for each in merged.events]
    assert kinds.index(ShardDone) < kinds.index(DuplicatesFound) < kinds.index(Verified)


def test_what_turned_out_equal_is_told(model: Path, tmp_path: Path) -> None:
    nbytes = _with_equal_norms(model)[NORM.format(0)].nbytes
    merged = merge(_mean(model), tmp_path / "out")
    (event,) = merged.of(DuplicatesFound)
    assert (event.tensors, event.groups) == (0, ())
    assert event.unforeseen == (DuplicateGroup(NORM.format("*"), 1, nbytes),)
    assert merged.result.duplicates.unforeseen == event.unforeseen


def test_receipts_of_an_earlier_run_count_too(tmp_path: Path) -> None:
    """Of the two equal tensors one may be made before the stop, and the other after it."""
    model = tiny_llama(tmp_path / "one", 0, hidden=256, vocab=256, layers=2)
    _with_equal_norms(model)
    output = tmp_path / "out"
    _interrupted(_mean(model), output, after=2)
    merged = merge(_mean(model), output)
    assert 0 < len(merged.of(SegmentDone)) < len(merged.result.receipts)
    (event,) = merged.of(DuplicatesFound)
    assert [group.pattern for group in event.unforeseen] == [NORM.format("*")]


# Sharing storage


@pytest.mark.parametrize("shared", [0, 1])
def test_bytes_that_share_storage_are_told(
    shared: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system decides; one that can and one that cannot are put in its place."""
    from raymerge.storage.local.store import LocalStore

    def share(*_: Any, nbytes: int, **__: Any) -> int:
        return nbytes * shared

    monkeypatch.setattr(LocalStore, "share", share)
    merged = merge(_twice(model, duplicates="share"), tmp_path / "out")
    (event,) = merged.of(DuplicatesFound)
    assert event.shared_bytes == event.nbytes * shared
    assert merged.result.duplicates.shared_bytes == event.shared_bytes


def test_the_file_system_at_hand_shares_or_not(model: Path, tmp_path: Path) -> None:
    merged = merge(_twice(model, duplicates="share"), tmp_path / "share")
    (event,) = merged.of(DuplicatesFound)
    assert event.shared_bytes is not None
    assert 0 <= event.shared_bytes <= event.nbytes
    merge(_twice(model), tmp_path / "keep")
    weights = [digests(tmp_path / name)["model.safetensors"] for name in ("share", "keep")]
    assert weights[0] == weights[1]


def test_what_an_earlier_run_shared_is_not_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards have their final names already."""
    recipe, calls = _twice(model, duplicates="share"), []
    original = shards_module.share_duplicates
    monkeypatch.setattr(shards_module, "share_duplicates", lambda *a: calls.append(original(*a)) or 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.runtime.driver.run.finish_companions", _fail)
        with pytest.raises(IncompleteError):
            merge(recipe, tmp_path / "out")
    (event,) = merge(recipe, tmp_path / "out").of(DuplicatesFound)
    assert event.shared_bytes is None
    assert len(calls) == 1


def _fail(*_: Any, **__: Any) -> None:
    raise OSError(5, "once")
