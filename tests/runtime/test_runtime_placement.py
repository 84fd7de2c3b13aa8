"""Which nodes can do what, by what each of them sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymerge.merge_plan.files_read import SourceFile
from raymerge.runtime.workers.placement import Placement, Seen, Sight, placement_of, stations, survey_problems
from raymerge.runtime.workers.ray_nodes import Nodes

FILES = (
    SourceFile(0, "/models/base", "one.safetensors", 10, "1"),
    SourceFile(0, "/models/base", "two.safetensors", 10, "1"),
    SourceFile(1, "/models/tune", "model.safetensors", 10, "1"),
)
READS = (frozenset({0, 2}), frozenset({1, 2}), frozenset({0}))
SAME, ABSENT, ANOTHER = Seen.SAME, Seen.ABSENT, Seen.ANOTHER


def _sight(name: str, *files: Seen, lack: str = "") -> Sight:
    return Sight(name, files, lack)


def _said(sights: dict[str, Sight]) -> list[str]:
    return [str(problem) for problem in survey_problems(sights, FILES, READS, "/out")]


def test_where_all_see_all_anybody_does_anything() -> None:
    sights = {"a": _sight("a", SAME, SAME, SAME), "b": _sight("b", SAME, SAME, SAME)}
    assert placement_of(sights, READS) == Placement()
    assert Placement().is_served({"a"}, {"a", "b"})
    assert Placement().allows("of a later node", 2)
    assert not _said(sights)


def test_a_node_that_joins_does_what_it_can() -> None:
    assert Placement().joined("b", [True, True], {"a"}) == Placement()
    some = Placement((frozenset({"a"}), frozenset({"a", "b"})))
    assert Placement().joined("b", [False, True], {"a"}) == some
    assert some.joined("c", [True, False], {"a", "b"}).able == (frozenset({"a", "c"}), frozenset({"a", "b"}))


def test_a_part_goes_to_nodes_that_see_all_its_files() -> None:
    sights = {"a": _sight("a", SAME, ABSENT, SAME), "b": _sight("b", SAME, SAME, ANOTHER)}
    sights["c"] = _sight("c", ABSENT, SAME, SAME)
    found = placement_of(sights, READS)
    assert found.able == ({"a"}, {"c"}, {"a", "b"})
    assert found.allows("b", 2)
    assert not found.allows("b", 0)
    assert found.ordered([2, 0, 1]) == [0, 1, 2]
    assert found.short_of([0, 1, 2], {"a"}, {"a", "b", "c"}) == {"c"}
    assert found.short_of([0, 2], {"a"}, {"a", "b", "c"}) == set()
    assert found.is_served({"a", "c"}, {"a", "b", "c"})
    # Nobody does the second part; one has nothing to do.
    assert not found.is_served({"a", "b"}, {"a", "b", "c"})
    assert not found.is_served({"a", "c", "elsewhere"}, {"a", "b", "c"})
    # Workers of this kind can only be on two of the nodes, and the second part is for others.
    assert found.is_served({"a", "b"}, {"a", "b"})
    assert not found.is_served({"b"}, {"a", "b"})
    assert found.is_served({"b"}, set())
    assert found.short_of([0, 1, 2], {"a"}, {"a", "b"}) == set()
    assert found.short_of([0, 1], {"b"}, {"a", "b"}) == {"a"}
    assert not _said(sights)


@pytest.mark.parametrize(
    ("workers", "rooms", "expected"),
    [
        (2, {"a": 4, "b": 4, "c": 4}, ["a", "c"]),
        (5, {"a": 1, "b": 3, "c": 2}, ["a", "c", "b", "b", "b"]),
        (9, {"a": 1, "b": 1, "c": 1, "useless": 8}, ["a", "c", "b"]),
        (1, {"a": 4, "b": 4, "c": 4}, ["a", "c"]),
    ],
)
def test_workers_are_where_every_part_can_be_done(
    workers: int, rooms: dict[str, int], expected: list[str]
) -> None:
    placement = Placement((frozenset("a"), frozenset("c"), frozenset("ab"), frozenset("b") | {"a"}))
    assert sorted(stations(placement, rooms, workers)) == sorted(expected)


def test_what_no_node_sees_is_told_by_node() -> None:
    sights = {"a": _sight("10.0.0.1", SAME, SAME, ABSENT), "b": _sight("10.0.0.2", SAME, SAME, ANOTHER)}
    (said,) = _said(sights)
    assert said == (
        "/models/tune: no node with CPUs sees the files that were planned with (10.0.0.1: model.safetensors "
        "is absent; 10.0.0.2: model.safetensors is another file). Put the source on a shared file system, or "
        "copy it to the nodes under the same path, with its times (rsync -a)."
    )


def test_a_node_that_cannot_write_the_output_is_told() -> None:
    sights = {"a": _sight("10.0.0.1", SAME, SAME, SAME, lack="is not to be found")}
    (said,) = _said(sights)
    assert said.startswith(
        "node 10.0.0.1: the directory /out, which is written to, is not to be found there."
    )


def test_parts_whose_files_are_on_no_node_together_are_told() -> None:
    sights = {"a": _sight("10.0.0.1", SAME, SAME, ABSENT), "b": _sight("10.0.0.2", ABSENT, ABSENT, SAME)}
    (said,) = _said(sights)
    assert said == (
        "sources: no node sees all the files that a part of the work reads, for 2 of 3 parts. Of part 0: "
        "10.0.0.1 lacks /models/tune/model.safetensors; 10.0.0.2 lacks /models/base/one.safetensors. Put the "
        "sources on a shared file system, or copy to one node what is read together."
    )


# What a node that joins is asked while parts are done, with a Ray of paper


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
