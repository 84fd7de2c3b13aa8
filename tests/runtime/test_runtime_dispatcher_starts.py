"""Workers that do not start: how many of them a run bears, with a Ray that does as it is told."""

from __future__ import annotations

import pytest
from kits.dispatcher_scene import Scene, make_all
from kits.fake_ray import ActorDiedError, receipt

from raymerge.errors import IncompleteError
from raymerge.events import WorkerLost
from raymerge.runtime.workers.worker_group import ATTEMPTS

DIED = ActorDiedError("it crashed")


def _lose(scene: Scene, failing: int) -> None:
    """Have the worker make a part and die in the next, and then so many others not start."""
    made = scene.handles[-1].run.last
    made.answer(receipt(made.arguments[0]))
    scene.step()
    scene.handles[-1].run.last.answer(DIED)
    scene.step()
    for _ in range(failing):
        scene.handles[-1].open.last.answer(DIED)
        scene.step()


def test_failed_starts_count_in_a_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts after all has the count begin anew."""
    scene = Scene(monkeypatch, range(8), slots=1)
    for _ in range(3):
        _lose(scene, ATTEMPTS - 1)
        scene.handles[-1].is_up()
        scene.step()
    make_all(scene, scene.handles[-1])
    assert sorted(scene.done) == list(range(8))
    assert sum(not lost.segments for lost in scene.of(WorkerLost)) == 3 * (ATTEMPTS - 1)


def test_as_many_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(8), slots=1)
    with pytest.raises(IncompleteError, match=f"{ATTEMPTS} workers did not start"):
        _lose(scene, ATTEMPTS)
