"""What a run says of output that equals other output, once it is made."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.merge_cases import INLINE, digests, merge

from raymerge.api import submit
from raymerge.errors import IncompleteError
from raymerge.events import DuplicatesFound, Event, SegmentDone, ShardDone, Verified
from raymerge.merge_plan.report import DuplicateGroup
from raymerge.publish import shards as shards_module

NORM = "model.layers.{}.input_layernorm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two layers."""
    return tiny_llama(tmp_path / "one", 0, hidden=32, layers=2)


def _twice(model: Path, **more: Any) -> dict[str, Any]:
    """The first layer two times."""
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


def test_the_event_is_json(model: Path, tmp_path: Path) -> None:
    (event,) = merge(_twice(model), tmp_path / "out").of(DuplicatesFound)
    record = json.loads(json.dumps(event.to_json()))
    assert record["event"] == "duplicates_found"
    assert set(record["groups"][0]) == {"pattern", "tensors", "nbytes"}


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
    output, done = tmp_path / "out", 0

    def stop(event: Event) -> None:
        nonlocal done
        done += isinstance(event, SegmentDone)
        if isinstance(event, SegmentDone) and done == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(IncompleteError):
        submit(_mean(model), output, INLINE, on_event=stop)
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
