"""Leave to compute: never more lanes at once than there are turns, and none that is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kits.method_kit import threads

from raymerge.execute.threads import ComputePermit, one_thread


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


def test_the_number_of_threads_comes_back_after_a_failure() -> None:
    with threads(2):
        with pytest.raises(ValueError, match="seen: 1"), one_thread():
            raise ValueError(f"seen: {torch.get_num_threads()}")
        assert torch.get_num_threads() == 2
