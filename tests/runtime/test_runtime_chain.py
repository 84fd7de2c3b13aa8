"""Several merges in one submission: what is kept between, what is made again, and what is left at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kits.chains import documents
from kits.checkpoint_maker import tiny_llama
from kits.marks import slow_but
from kits.merge_cases import INLINE, EventLog, digests, flip
from kits.permuted_experts import MIXTRAL, make_model, moved, store

from raymerge.api import plan_for, submit, verify
from raymerge.errors import CheckpointError, IncompleteError, TargetError
from raymerge.events import (
    Event,
    Planned,
    Published,
    SegmentDone,
    ShardDone,
    Started,
    StepKept,
    StepStarted,
    UnitDone,
)
from raymerge.options import RunOptions
from raymerge.publish.output_place import steps_directory
from raymerge.publish.staging import LocalStaging
from raymerge.runtime.driver.chained_merges import kept_steps
from raymerge.runtime.driver.run import RunResult
from raymerge.runtime.workers.pool import InlinePool

KEEP = RunOptions(inline=True, keep_intermediates=True)
AGAIN = RunOptions(inline=True, keep_intermediates=True, replace=True)


@pytest.fixture
def chain(tmp_path: Path) -> list[dict[str, Any]]:
    """The recipes over models that a test may change, in ``tmp_path / "models"``."""
    for seed, name in enumerate(("one", "two")):
        tiny_llama(tmp_path / "models" / name, seed, hidden=128, vocab=128, layers=2)
    return documents(root=str(tmp_path / "models"))


@dataclass(frozen=True, slots=True)
class Kept:
    """A chain that was made, with its intermediate results; tests that harm these have them made again."""

    recipes: list[dict[str, Any]]
    output: Path
    digests: dict[str, str]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    root = tmp_path_factory.mktemp("kept")
    for seed, name in enumerate(("one", "two")):
        tiny_llama(root / name, seed, hidden=128, vocab=128, layers=2)
    recipes = documents(root=str(root))
    _submit(recipes, root / "outs" / "out")
    return Kept(recipes, root / "outs" / "out", digests(root / "outs" / "out"))


def _submit(
    recipes: Any,
    output: Path,
    options: RunOptions = KEEP,
    on_event: Callable[[Event], object] = lambda _: None,
) -> tuple[RunResult, EventLog]:
    events = EventLog(on_event)
    return submit(recipes, output, options, on_event=events), events


def _steps(events: EventLog) -> list[tuple[str, str]]:
    steps = events.of(StepStarted, StepKept)
    return [(event.name, "made" if isinstance(event, StepStarted) else "kept") for event in steps]


def _weights(output: Path) -> dict[str, str]:
    return {name: found for name, found in digests(output).items() if name.endswith(".safetensors")}


# What is made


def test_a_chain_gives_the_bytes_of_its_merges_made_one_by_one(kept: Kept, tmp_path: Path) -> None:
    for recipe in kept.recipes:
        named = {
            **recipe,
            "models": [{**e, "model": _by_hand(e["model"], tmp_path)} for e in recipe["models"]],
        }
        if "base_model" in recipe:
            named["base_model"] = _by_hand(recipe["base_model"], tmp_path)
        submit(named, tmp_path / recipe.get("name", "last"), INLINE)
    assert _weights(kept.output) == _weights(tmp_path / "last")
    assert verify(kept.output).problems == ()
    for name in ("left", "right"):
        assert _weights(steps_directory(kept.output) / name) == _weights(tmp_path / name)


def _by_hand(model: str, root: Path) -> str:
    return str(root / model) if model in ("left", "right") else model


@pytest.mark.slow
def test_the_pool_is_told_which_work_is_the_last(
    chain: list[dict[str, Any]], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event | None] = []
    monkeypatch.setattr(InlinePool, "conclude", lambda _: told.append(None))
    _submit(chain, output, on_event=told.append)
    published = [number for number, event in enumerate(told) if isinstance(event, Published)]
    (concluded,) = (number for number, event in enumerate(told) if event is None)
    assert len(published) == len(chain)
    assert published[-2] < concluded < published[-1]
    (begun,) = (n for n, event in enumerate(told) if n > published[-2] and isinstance(event, Started))
    assert concluded < begun
    told.clear()
    _submit(chain[0], output.parent / "other", on_event=told.append)
    assert [event for event in told if event is None] == [None]


@pytest.mark.slow
def test_a_tokenizer_that_a_merge_changes_is_what_the_next_one_is_planned_with(
    chain: list[dict[str, Any]], output: Path
) -> None:
    chain[0]["chat_template"] = template = "{{ messages }}, as the first merge has it"
    chain[2]["chat_template"] = "auto"
    _submit(chain, output)
    assert template in (output / "tokenizer_config.json").read_text()


# What is left


@pytest.mark.slow
def test_a_link_to_the_output_place_has_its_steps_where_it_leads(
    chain: list[dict[str, Any]], output: Path, tmp_path: Path
) -> None:
    output.mkdir()
    (tmp_path / "link").symlink_to(output)
    _submit(chain, tmp_path / "link")
    assert (output.parent / ".out.raymerge.steps" / "left" / "config.json").is_file()


def test_a_taken_place_is_refused_before_anything_is_made(chain: list[dict[str, Any]], output: Path) -> None:
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    with pytest.raises(TargetError, match="not empty"):
        _submit(chain, output)
    assert [path.name for path in output.parent.iterdir()] == ["out"]


# What is kept, and what is made again


def _again(recipes: Any, output: Path) -> list[tuple[str, str]]:
    return _steps(_submit(recipes, output, AGAIN)[1])


MADE = [("left", "made"), ("right", "made"), ("", "made")]
KEPT = [("left", "kept"), ("right", "kept"), ("", "made")]


def test_a_change_makes_again_what_depends_on_it(chain: list[dict[str, Any]], output: Path) -> None:
    first, _ = _submit(chain, output)
    chain[1]["models"][0]["parameters"]["weight"] = 0.4
    assert _again(chain, output) == [("left", "kept"), ("right", "made"), ("", "made")]
    second = json.loads((output / "raymerge" / "plan" / "manifest.json").read_text())["digest"]
    assert second != first.digest
    chain[0]["models"][0]["parameters"]["weight"] = 0.9
    assert _again(chain, output) == MADE


def _cut_short(place: Path) -> None:
    path = place / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _flip(place: Path) -> None:
    flip(place / "model.safetensors")


def _touch(place: Path) -> None:
    os.utime(place / "model.safetensors", ns=(1, 1))


def _flip_all(place: Path) -> None:
    path = place / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(byte ^ 1 for byte in data[begin:]))


def _exchange(place: Path) -> None:
    """Put another file of the same size and time in the place of the weights."""
    path = place / "model.safetensors"
    shutil.copy2(path, place / "other")
    status = path.stat()
    _flip_all(place)
    (place / "other").write_bytes(path.read_bytes())
    os.utime(place / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (place / "other").replace(path)


HARMS = [
    _cut_short,
    _exchange,
    lambda place: (place / "config.json").unlink(),
    lambda place: (place / "config.json").write_text('{"model_type": "llama"}'),
    lambda place: (place / "tokenizer.json").unlink(),
    lambda place: (place / "raymerge" / "ledger.jsonl").unlink(),
    lambda place: (place / "raymerge" / "plan" / "manifest.json").write_text("[]"),
    lambda place: (place / "raymerge" / "plan" / "ops.arrow").write_bytes(b""),
    shutil.rmtree,
]


@pytest.mark.slow
@pytest.mark.parametrize("harm", slow_but(HARMS, HARMS[1], HARMS[4], HARMS[6]))
def test_what_is_not_sound_is_made_again(harm: Callable[[Path], object], kept: Kept) -> None:
    harm(steps_directory(kept.output) / "left")
    # What uses it stays where its weights were never written to.
    assert _again(kept.recipes, kept.output)[0] == ("left", "made")
    assert digests(kept.output) == kept.digests


def _done_before(events: EventLog) -> tuple[int, int]:
    """Segments of the first merge that were done when it started, and all of them."""
    return events.of(Started)[0].done_segments, events.of(Planned)[0].segments


@pytest.mark.slow
@pytest.mark.parametrize(("harm", "num_lost"), [(_flip, 1), (_touch, 0)])
def test_what_was_touched_is_compared_with_its_receipts(
    harm: Callable[[Path], None], num_lost: int, kept: Kept
) -> None:
    """Only what differs is computed again, and then nothing is in doubt any more."""
    harm(steps_directory(kept.output) / "left")
    _, events = _submit(kept.recipes, kept.output, AGAIN)
    done, total = _done_before(events)
    assert done == total - num_lost > 1
    assert digests(kept.output) == kept.digests
    assert _again(kept.recipes, kept.output) == KEPT


def test_a_file_that_somebody_laid_beside_the_weights_is_named_and_stays(kept: Kept) -> None:
    """Results between are deleted in the end, and with them what lies there."""
    notes = steps_directory(kept.output) / "left" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(TargetError, match=r"no part of the checkpoint, such as notes\.txt"):
        _again(kept.recipes, kept.output)
    assert notes.read_text() == "mine"
    notes.unlink()


@pytest.mark.slow
def test_a_touched_result_that_cannot_be_taken_back_is_made_anew(
    chain: list[dict[str, Any]], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _submit(chain, output)
    before = digests(output)
    left = steps_directory(output) / "left"
    _flip(left)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == left and target.name.startswith(".left.raymerge-"):
            raise PermissionError(13, "not yours")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    _, events = _submit(chain, output, AGAIN)
    assert _done_before(events)[0] == 0
    assert digests(output) == before


@pytest.mark.slow
def test_a_companion_that_was_changed_is_copied_again(
    chain: list[dict[str, Any]], output: Path, tmp_path: Path
) -> None:
    _submit(chain, output)
    (tmp_path / "models" / "one" / "tokenizer.json").write_text("{}\n")
    assert _again(chain, output) == MADE
    assert (output / "tokenizer.json").read_text() == "{}\n"


@pytest.mark.slow
def test_other_numerics_make_everything_again(
    chain: list[dict[str, Any]], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _submit(chain, output)
    monkeypatch.setattr(InlinePool, "numerics", {"device": "cpu", "torch": "another", "float32": "full"})
    assert _again(chain, output) == MADE


def test_a_result_that_something_else_exchanged_is_not_read(
    chain: list[dict[str, Any]], output: Path
) -> None:
    """As where a file system takes two names for one."""
    root = steps_directory(output)

    def exchange(event: Event) -> None:
        if isinstance(event, StepStarted) and event.number == event.total:
            shutil.rmtree(root / "left")
            shutil.copytree(root / "right", root / "left")

    with pytest.raises(CheckpointError, match="no longer the result"):
        _submit(chain, output, AGAIN, exchange)


# Stopping and going on


class _Interrupter:
    def __init__(self, step: str, after: int) -> None:
        self._step = step
        self._left = after
        self._name = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepStarted):
            self._name = event.name
        if isinstance(event, SegmentDone) and self._name == self._step:
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", slow_but(["left", "right", ""], "right"))
def test_a_stopped_chain_goes_on_where_it_was(
    step: str, chain: list[dict[str, Any]], output: Path, tmp_path: Path
) -> None:
    with pytest.raises(IncompleteError):
        _submit(chain, output, INLINE, _Interrupter(step, after=1))
    assert not output.exists()
    _, events = _submit(chain, output, INLINE)
    names = ["left", "right", ""]
    assert _steps(events) == [
        (name, "kept" if names.index(name) < names.index(step) else "made") for name in names
    ]
    assert events.of(Started)[0].done_segments >= 1
    _submit(chain, tmp_path / "fresh", INLINE)
    assert digests(output) == digests(tmp_path / "fresh")
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_change_discards_what_is_unfinished_between_and_asks_about_the_output(
    chain: list[dict[str, Any]], output: Path
) -> None:
    with pytest.raises(IncompleteError):
        _submit(chain, output, INLINE, _Interrupter("right", after=1))
    chain[0]["models"][0]["parameters"]["weight"] = 0.9
    with pytest.raises(IncompleteError):
        _submit(chain, output, INLINE, _Interrupter("", after=1))
    assert sorted(path.name for path in steps_directory(output).iterdir()) == ["left", "right"]
    chain[0]["models"][0]["parameters"]["weight"] = 0.8
    with pytest.raises(TargetError, match="made_by was"):
        _submit(chain, output, INLINE)
    assert _again(chain, output) == MADE


def test_two_drivers_do_not_make_one_chain(chain: list[dict[str, Any]], output: Path) -> None:
    (*_, last) = plan_for(chain, output)
    held = LocalStaging(steps_directory(output), last.plan).lock()
    with held, pytest.raises(TargetError, match="another run makes this very checkpoint"):
        _submit(chain, output)


@pytest.mark.slow
@pytest.mark.ray
def test_one_ray_pool_makes_all_merges(
    chain: list[dict[str, Any]], output: Path, tmp_path: Path, ray_cluster: Any
) -> None:
    del ray_cluster
    _, events = _submit(chain, output, RunOptions(workers=2, memory=16 << 20))
    workers = {event.workers for event in events.of(Started)}
    assert workers == {("worker-0", "worker-1")}
    _submit(chain, tmp_path / "inline", INLINE)
    assert digests(output) == digests(tmp_path / "inline")


Recipes = list[dict[str, Any]]
Harm = Callable[[Path], object]


def _edit(place: Path) -> None:
    (place / "tokenizer_config.json").write_text('{"another": 1}', encoding="utf-8")


def _spoil(place: Path) -> None:
    (place / "raymerge" / "provenance.json").write_text("{", encoding="utf-8")


@pytest.fixture(scope="module")
def two_apart(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    """``right`` does not use ``left``, and the last merge has several segments and uses both."""
    root = tmp_path_factory.mktemp("apart")
    for seed, name in enumerate(("one", "two")):
        tiny_llama(root / name, seed, hidden=64, vocab=64, layers=1)
    left, _, last = documents(root=str(root))
    return [left, {**left, "name": "right", "models": left["models"][::-1]}, {**last, "shard_size": "40KB"}]


class _At:
    """Calls something after an event of a merge, once; it may end the submission after another one."""

    def __init__(self, step: str, after: int, do: Callable[[], object], kind: type[Event] = SegmentDone):
        self._at = (step, kind, after)
        self._do = do
        self._step = ""
        self._seen = 0
        self.is_done = False

    def __call__(self, event: Event) -> None:
        step, kind, after = self._at
        if isinstance(event, StepStarted):
            self._step = event.name
        if self._step == step and isinstance(event, kind):
            self._seen += 1
            if self._seen == after:
                self.is_done = True
                self._do()


def _again_inline(recipes: Recipes, output: Path, **options: Any) -> tuple[list[tuple[str, str]], int]:
    """Give the command again: what became of the merges before, and with how many segments the last began."""
    events = EventLog()
    submit(recipes, output, replace(INLINE, **options), on_event=events)
    made = [step for step in _steps(events) if step[0]]
    return made, events.of(Started)[-1].done_segments


@pytest.fixture(scope="module")
def expected(two_apart: Recipes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("expected") / "out"
    submit(two_apart, output, INLINE)
    return digests(output)


LEFT_ALONE = [("left", "made"), ("right", "kept")]


@pytest.mark.slow
@pytest.mark.parametrize("harm", slow_but([_flip_all, _exchange, _edit, _spoil], _spoil))
def test_one_that_is_touched_while_another_is_made_is_made_again(
    harm: Harm, two_apart: Recipes, expected: dict[str, str], output: Path
) -> None:
    left = steps_directory(output) / "left"
    touch = _At("right", 1, lambda: harm(left))
    with pytest.raises(CheckpointError, match=r"left: it is no longer the result .* Give the command again"):
        submit(two_apart, output, INLINE, on_event=touch)
    assert not output.exists()
    assert kept_steps(plan_for(two_apart, output), output) == {"right"}
    assert _again_inline(two_apart, output) == (LEFT_ALONE, 0)
    assert digests(output) == expected


@pytest.mark.slow
def test_what_is_laid_beside_one_is_not_copied_from_it(
    two_apart: Recipes, expected: dict[str, str], output: Path
) -> None:
    notes = steps_directory(output) / "left" / "chat_template.jinja"
    submit(two_apart, output, INLINE, on_event=_At("right", 1, lambda: notes.write_text("{{ mine }}")))
    assert digests(output) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "kind", "least"),
    [(_flip_all, SegmentDone, 1), (_exchange, SegmentDone, 1), (_exchange, Started, 0)],
)
def test_there_is_no_receipt_of_what_is_read_of_a_touched_one(
    harm: Harm, kind: type[Event], least: int, two_apart: Recipes, expected: dict[str, str], output: Path
) -> None:
    """Made again it has the same contents: what was made of the wrong ones would be believed."""
    left = steps_directory(output) / "left"
    touch = _At("", 1, lambda: harm(left), kind)
    with pytest.raises(CheckpointError, match=rf"changed while it was merged\. Leave {left} alone, and give"):
        submit(two_apart, output, INLINE, on_event=touch)
    assert not output.exists()
    made, began = _again_inline(two_apart, output)
    assert (made, began >= least) == (LEFT_ALONE, True)
    assert digests(output) == expected


@pytest.mark.slow
def test_one_that_is_removed_while_it_is_read_is_made_again(
    two_apart: Recipes, expected: dict[str, str], output: Path
) -> None:
    left = steps_directory(output) / "left"
    with pytest.raises(IncompleteError, match=r"left: .* gone since .* the same command makes it again\."):
        submit(two_apart, output, INLINE, on_event=_At("", 1, lambda: shutil.rmtree(left)))
    assert not output.exists()
    assert _again_inline(two_apart, output)[0] == LEFT_ALONE
    assert digests(output) == expected


@pytest.mark.slow
@pytest.mark.parametrize("harm", slow_but([_flip_all, _edit], _edit))
def test_one_that_is_touched_when_all_is_made_is_not_published_of(
    harm: Harm, two_apart: Recipes, expected: dict[str, str], output: Path
) -> None:
    touch = _At("", 1, lambda: harm(steps_directory(output) / "left"), ShardDone)
    with pytest.raises(CheckpointError, match=r"changed while it was merged.*give the command again"):
        submit(two_apart, output, INLINE, on_event=touch)
    assert not output.exists()
    made, began = _again_inline(two_apart, output)
    assert (made, began > 2) == (LEFT_ALONE, True)
    assert digests(output) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "after"), [(StepStarted, 1), (UnitDone, 1)])
def test_a_stage_is_not_made_of_a_touched_one(
    kind: type[Event], after: int, tmp_path: Path, output: Path
) -> None:
    model = make_model(MIXTRAL, 1)
    moves = [model, moved(model, MIXTRAL, 2), moved(model, MIXTRAL, 3)]
    roots = [str(store(tmp_path / f"mixtral{n}", each, MIXTRAL)) for n, each in enumerate(moves)]

    def merge(*models: str, **more: Any) -> dict[str, Any]:
        entries = [{"model": each, "override_architecture": "Mixture"} for each in models]
        return {
            "merge_method": "linear",
            "models": [{"model": each, "parameters": {"weight": 0.5}} for each in entries],
            **more,
        }

    recipes = [merge(*roots[:2], name="left"), merge("left", roots[2], align="experts")]
    touch = _At("", after, lambda: _flip_all(steps_directory(output) / "left"), kind)
    with pytest.raises(CheckpointError):
        submit(recipes, output, INLINE, on_event=touch)
    assert touch.is_done
    assert not output.exists()
    _again_inline(recipes, output)
    submit(recipes, tmp_path / "fresh", INLINE)
    assert digests(output) == digests(tmp_path / "fresh")
