"""What a node that joins is asked while parts are done: asked on this machine, with a Ray of paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymerge.merge_plan.files_read import SourceFile
from raymerge.runtime.workers.placement import Seen, Sight
from raymerge.runtime.workers.ray_nodes import Nodes


class _NoAnswerError(Exception): ...


def _get(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _nodes(monkeypatch: pytest.MonkeyPatch, *, answers: bool = True) -> Nodes:
    alive = {"NodeID": "late", "Alive": True, "NodeManagerHostname": "10.0.0.2", "Resources": {"CPU": 1.0}}
    ray = SimpleNamespace(
        nodes=lambda: [alive], get=_get, exceptions=SimpleNamespace(RayError=_NoAnswerError)
    )

    def asked(_: Nodes, question: Callable[..., Any], node: str, *arguments: Any) -> Any:
        assert node == "late"
        return question(*arguments) if answers else _NoAnswerError("it went")

    monkeypatch.setattr(Nodes, "_asked", asked)
    return Nodes(ray, is_here=False)


@pytest.mark.parametrize(("place", "lack"), [("there", ""), ("elsewhere", "is not to be found"), (None, "")])
def test_a_node_tells_what_it_sees(
    place: str | None, lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    files = [SourceFile(0, str(tmp_path), name, 8, "") for name in ("model.safetensors", "none.safetensors")]
    nodes = _nodes(monkeypatch)
    answer = nodes.begin_sight("late", files, None if place is None else tmp_path / place)
    assert nodes.sight("late", answer, files) == Sight("10.0.0.2", (Seen.SAME, Seen.ABSENT), lack)


def test_a_node_that_does_not_answer_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [SourceFile(0, "/models", "model.safetensors", 8, "")]
    nodes = _nodes(monkeypatch, answers=False)
    found = nodes.sight("late", nodes.begin_sight("late", files, Path("/out")), files)
    assert found.files == (Seen.ABSENT,)
    assert found.lack
