"""Results between that are written to by others: no checkpoint is published of what was read of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.chains import documents
from kits.checkpoint_maker import tiny_llama
from kits.marks import slow_but
from kits.merge_cases import INLINE, digests
from kits.permuted_experts import MIXTRAL, make_model, moved, store

from raymerge.api import plan_for, submit
from raymerge.errors import CheckpointError, IncompleteError, TargetError
from raymerge.events import Event, SegmentDone, ShardDone, Started, StepKept, StepStarted, UnitDone
from raymerge.publish.steps_place import steps_directory
from raymerge.runtime.driver.result_cache import kept_steps

Recipes = list[dict[str, Any]]
Harm = Callable[[Path], object]


def _flip(place: Path) -> None:
    """Change every byte behind the header of the weights."""
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
    _flip(place)
    (place / "other").write_bytes(path.read_bytes())
    os.utime(place / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (place / "other").replace(path)


def _edit(place: Path) -> None:
    (place / "tokenizer_config.json").write_text('{"another": 1}', encoding="utf-8")


def _spoil(place: Path) -> None:
    (place / "raymerge" / "provenance.json").write_text("{", encoding="utf-8")


@pytest.fixture
def chain(tmp_path: Path) -> Recipes:
    """``right`` does not use ``left``, and the last merge has several segments and uses both."""
    for seed, name in enumerate(("one", "two")):
        tiny_llama(tmp_path / "models" / name, seed, hidden=64, vocab=64, layers=1)
    left, _, last = documents(root=str(tmp_path / "models"))
    return [left, {**left, "name": "right", "models": left["models"][::-1]}, {**last, "shard_size": "40KB"}]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "outs" / "out"


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


def _stop() -> None:
    raise IncompleteError("as the test has it")


def _again(recipes: Recipes, output: Path, **options: Any) -> tuple[list[tuple[str, str]], int]:
    """Give the command again: what became of the merges before, and with how many segments the last began."""
    events: list[Event] = []
    submit(recipes, output, replace(INLINE, **options), on_event=events.append)
    steps = [event for event in events if isinstance(event, StepStarted | StepKept)]
    *_, last = (event for event in events if isinstance(event, Started))
    made = [(each.name, "made" if isinstance(each, StepStarted) else "kept") for each in steps if each.name]
    return made, last.done_segments


def _is_as_fresh(recipes: Recipes, output: Path) -> bool:
    fresh = output.with_name("fresh")
    submit(recipes, fresh, INLINE)
    return digests(output) == digests(fresh)


LEFT_ALONE = [("left", "made"), ("right", "kept")]


@pytest.mark.parametrize("harm", slow_but([_flip, _exchange, _edit, _spoil], _exchange, _spoil))
def test_one_that_is_touched_while_another_is_made_is_made_again(
    harm: Harm, chain: Recipes, output: Path
) -> None:
    left = steps_directory(output) / "left"
    touch = _At("right", 1, lambda: harm(left))
    with pytest.raises(CheckpointError, match=r"left: it is no longer the result .* Give the command again"):
        submit(chain, output, INLINE, on_event=touch)
    assert not output.exists()
    assert kept_steps(plan_for(chain, output), output) == {"right"}
    assert _again(chain, output) == (LEFT_ALONE, 0)
    assert _is_as_fresh(chain, output)


def test_what_is_laid_beside_one_is_not_copied_from_it(chain: Recipes, output: Path) -> None:
    notes = steps_directory(output) / "left" / "chat_template.jinja"
    submit(chain, output, INLINE, on_event=_At("right", 1, lambda: notes.write_text("{{ mine }}")))
    assert _is_as_fresh(chain, output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "kind", "least"), [(_flip, SegmentDone, 1), (_exchange, SegmentDone, 1), (_exchange, Started, 0)]
)
def test_there_is_no_receipt_of_what_is_read_of_a_touched_one(
    harm: Harm, kind: type[Event], least: int, chain: Recipes, output: Path
) -> None:
    """Made again it has the same contents: what was made of the wrong ones would be believed."""
    left = steps_directory(output) / "left"
    touch = _At("", 1, lambda: harm(left), kind)
    with pytest.raises(CheckpointError, match=rf"changed while it was merged\. Leave {left} alone, and give"):
        submit(chain, output, INLINE, on_event=touch)
    assert not output.exists()
    made, began = _again(chain, output)
    assert (made, began >= least) == (LEFT_ALONE, True)
    assert _is_as_fresh(chain, output)


@pytest.mark.slow
def test_one_that_is_removed_while_it_is_read_is_made_again(chain: Recipes, output: Path) -> None:
    left = steps_directory(output) / "left"
    with pytest.raises(IncompleteError, match=r"left: .* gone since .* the same command makes it again\."):
        submit(chain, output, INLINE, on_event=_At("", 1, lambda: shutil.rmtree(left)))
    assert not output.exists()
    assert _again(chain, output)[0] == LEFT_ALONE
    assert _is_as_fresh(chain, output)


@pytest.mark.parametrize("harm", slow_but([_flip, _edit], _edit))
def test_one_that_is_touched_when_all_is_made_is_not_published_of(
    harm: Harm, chain: Recipes, output: Path
) -> None:
    """Companions are copied at the end."""
    touch = _At("", 1, lambda: harm(steps_directory(output) / "left"), ShardDone)
    with pytest.raises(CheckpointError, match=r"changed while it was merged.*give the command again"):
        submit(chain, output, INLINE, on_event=touch)
    assert not output.exists()
    made, began = _again(chain, output)
    assert (made, began > 2) == (LEFT_ALONE, True)
    assert _is_as_fresh(chain, output)


@pytest.mark.slow
def test_what_was_made_of_one_is_read_of_no_other(chain: Recipes, output: Path) -> None:
    """One that others use in turn is not published of a touched one either."""
    one, two = chain[0]["models"]
    recipes = [chain[0], {**chain[1], "models": [{**one, "model": "left"}, two]}, chain[2]]
    left = steps_directory(output) / "left"
    with pytest.raises(CheckpointError, match="changed while it was merged"):
        submit(recipes, output, INLINE, on_event=_At("right", 1, lambda: _flip(left)))
    assert _again(recipes, output)[0] == [("left", "made"), ("right", "made")]
    assert _is_as_fresh(recipes, output)


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
    touch = _At("", after, lambda: _flip(steps_directory(output) / "left"), kind)
    with pytest.raises(CheckpointError):
        submit(recipes, output, INLINE, on_event=touch)
    assert touch.is_done
    assert not output.exists()
    _again(recipes, output)
    assert _is_as_fresh(recipes, output)


# What is not touched, but another


def _nudge(models: Path) -> None:
    _flip(models / "one")


def _other_companions(models: Path) -> None:
    for name in ("one", "two"):
        _edit(models / name)


@pytest.mark.slow
@pytest.mark.parametrize("change", [_nudge, _other_companions])
def test_what_was_made_of_other_contents_does_not_go_on(
    change: Harm, chain: Recipes, output: Path, tmp_path: Path
) -> None:
    """A plan knows no numbers, and no plan knows what is in companions."""
    with pytest.raises(IncompleteError, match="as the test has it"):
        submit(chain, output, INLINE, on_event=_At("", 2, _stop))
    change(tmp_path / "models")
    with pytest.raises(TargetError, match=r"other conditions: (versions|companions)"):
        submit(chain, output, INLINE)
    assert not output.exists()
    assert _again(chain, output, replace=True)[1] == 0
    assert _is_as_fresh(chain, output)
