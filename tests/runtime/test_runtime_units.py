"""What units of a stage tell while they are in hand, and the digests of what they leave."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.errors import IncompleteError
from raymerge.runtime.driver import stage_work
from raymerge.runtime.driver.stage_work import digests_of, telling, told
from raymerge.storage.store import Range


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# How far a unit is


def test_a_number_is_there_while_the_unit_is_in_hand(tmp_path: Path) -> None:
    with telling(tmp_path, 3, threading.Event()) as tell:
        assert told(tmp_path) == {}
        tell(1000)
        assert told(tmp_path) == {3: 1000}
        assert [path.name for path in tmp_path.iterdir()] == ["progress-3"]
    assert list(tmp_path.iterdir()) == []


def test_a_number_goes_with_a_unit_that_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with telling(tmp_path, 3, threading.Event()) as tell:
            tell(1000)
            raise ValueError("it is odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_twice_a_second_at_most(tmp_path: Path) -> None:
    clock = Clock()
    with telling(tmp_path, 0, threading.Event(), clock=clock) as tell:
        seen = []
        for number in range(1, 8):
            tell(number)
            seen.append(told(tmp_path)[0])
            clock.now += 0.25
    assert seen == [1, 1, 3, 3, 5, 5, 7]


def test_a_unit_that_was_given_up_ends_when_it_next_tells(tmp_path: Path) -> None:
    aborted = threading.Event()
    with telling(tmp_path, 0, aborted) as tell:
        tell(1)
        aborted.set()
        with pytest.raises(IncompleteError, match="stopped at once"):
            tell(2)


def test_what_cannot_be_written_is_no_reason_to_give_up(tmp_path: Path) -> None:
    with telling(tmp_path / "absent", 0, threading.Event()) as tell:
        tell(1)
    assert told(tmp_path / "absent") == {}


def test_several_units_have_their_own_numbers(tmp_path: Path) -> None:
    event = threading.Event()
    with telling(tmp_path, 0, event) as one, telling(tmp_path, 11, event) as other:
        one(5)
        other(7)
        assert told(tmp_path) == {0: 5, 11: 7}


def test_what_is_no_number_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "progress-1").write_text("")
    (tmp_path / "progress-two").write_text("2")
    (tmp_path / "progress-3").write_text("3")
    assert told(tmp_path) == {3: 3}


# What a unit leaves


def _file(root: Path, data: bytes, name: str = "piece.bin") -> Path:
    (root / name).write_bytes(data)
    return root


def test_a_whole_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    _file(tmp_path, b"one", "a")
    _file(tmp_path, b"", "b")
    wanted = {key: xxhash.xxh3_128_hexdigest(data) for key, data in (("a", b"one"), ("b", b""))}
    assert digests_of(tmp_path, {"a": (), "b": ()}) == wanted


def test_a_file_that_is_absent_or_too_short_has_none(tmp_path: Path) -> None:
    _file(tmp_path, b"0123")
    assert digests_of(tmp_path, {"other": (), "piece.bin": (Range(0, 2), Range(3, 2))}) == {}


@given(
    data=st.binary(min_size=1, max_size=60),
    cuts=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), min_size=1, max_size=4),
    chunk=st.integers(1, 70),
)
@settings(deadline=None, max_examples=40)
def test_ranges_are_digested_one_after_the_other(
    data: bytes, cuts: list[tuple[int, int]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = _file(tmp_path_factory.mktemp("files"), data)
    spans = [sorted((min(a, len(data)), min(b, len(data)))) for a, b in cuts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_work, "_CHUNK", chunk)
        found = digests_of(root, {"piece.bin": [Range(start, end - start) for start, end in spans]})
    assert found == {"piece.bin": xxhash.xxh3_128_hexdigest(b"".join(data[a:b] for a, b in spans))}
