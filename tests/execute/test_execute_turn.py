"""Leave to compute: never more lanes at once than there are turns, and none that is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.execute.threads import ComputePermit


def _free(turns: threading.Semaphore) -> int:
    """How many could be taken now."""
    count = 0
    while turns.acquire(blocking=False):
        count += 1
    for _ in range(count):
        turns.release()
    return count


@pytest.mark.parametrize("threads", [1, 3])
def test_only_so_many_compute_at_once_and_all_of_them_get_there(threads: int) -> None:
    turns = threading.Semaphore(threads)
    lock, computing, most = threading.Lock(), 0, 0
    # As many as may compute meet there, so that one turn too few would stop them all.
    meeting = threading.Barrier(threads)

    def step(change: int) -> None:
        nonlocal computing, most
        with lock:
            computing += change
            most = max(most, computing)

    def lane(_: int) -> None:
        turn = ComputePermit(turns)
        for _ in range(20):
            turn.take()
            step(1)
            meeting.wait(10)
            step(-1)
            with turn.away():
                pass
            turn.rest()

    lanes = 2 * threads
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(lane, range(lanes)))
    assert most == threads
    assert _free(turns) == threads


def test_away_takes_a_turn_again_only_when_there_is_one() -> None:
    turns = threading.Semaphore(1)
    mine, other, back = ComputePermit(turns), ComputePermit(turns), threading.Event()

    def lane() -> None:
        mine.take()
        with mine.away():
            other.take()
        back.set()

    thread = threading.Thread(target=lane)
    thread.start()
    assert not back.wait(0.1)
    other.rest()
    assert back.wait(10)
    thread.join()
    assert _free(turns) == 0


def test_a_block_that_raises_leaves_the_turn_as_it_was() -> None:
    turns = threading.Semaphore(1)
    turn = ComputePermit(turns)
    turn.take()
    with pytest.raises(OSError, match="broken"), turn.away():
        raise OSError("broken")
    assert _free(turns) == 0
    turn.rest()
    assert _free(turns) == 1


@given(
    threads=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["take", "rest", "away"])), max_size=30),
)
@settings(deadline=None, max_examples=100)
def test_turns_are_neither_lost_nor_made(threads: int, steps: list[tuple[int, str]]) -> None:
    """Whatever lanes do, as far as none has to wait."""
    turns = threading.Semaphore(threads)
    lanes, held = [ComputePermit(turns) for _ in range(3)], [False] * 3

    def take(number: int) -> None:
        if held[number] or sum(held) < threads:
            lanes[number].take()
            held[number] = True

    def rest(number: int) -> None:
        lanes[number].rest()
        held[number] = False

    def away(number: int) -> None:
        with lanes[number].away():
            assert _free(turns) == threads - sum(held) + held[number]

    moves: dict[str, Callable[[int], None]] = {"take": take, "rest": rest, "away": away}
    for number, step in steps:
        moves[step](number)
        assert _free(turns) == threads - sum(held)
