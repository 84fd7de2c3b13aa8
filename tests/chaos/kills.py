"""Processes that are killed: workers, drivers and everything at once, at moments that a seed chooses."""

from __future__ import annotations

import contextlib
import time
from random import Random

import psutil
from chaos.yard import Attempt, BrokenPromiseError, Place

RAY = ("--workers", "2", "--threads", "1")
"""The flags of a run with workers of an embedded Ray."""
_MOST_ATTEMPTS = 40
"""Commands that a run may take; each of them makes progress or is killed on purpose."""


def kill_workers(place: Place, random: Random, times: int, *, flags: tuple[str, ...] = RAY) -> int:
    """Kill workers while they work, one or several at once, until the run ends; how many were killed."""
    killed = 0
    while not place.output.exists():
        _check_attempts(place)
        place.pause(0.04)
        with place.submit(*flags, environment=place.disk()) as attempt:
            while killed < times and place.wait_for(_moment(place, random, times - killed), attempt):
                killed += _kill_some(attempt, random, times - killed)
            place.pause(0)
            # 3 where one segment was in the hands of three workers that were killed.
            attempt.ends(0, 3)
    return killed


def kill_drivers(
    place: Place,
    random: Random,
    times: int,
    *,
    flags: tuple[str, ...] = ("--inline",),
    is_forked: bool = False,
) -> int:
    """Kill the driver alone, again and again, and then let it end; how often it was killed."""
    killed = 0
    while not place.output.exists():
        _check_attempts(place)
        place.pause(0.01 if killed < times else 0)
        with place.submit(*flags, environment=place.disk(), is_forked=is_forked) as attempt:
            if killed == times:
                attempt.ends(0)
            elif place.wait_for(_moment(place, random, times - killed), attempt):
                time.sleep(random.uniform(0, 0.05))
                killed += not attempt.is_over()
                attempt.kill()
    return killed


def kill_everything(place: Place, random: Random, times: int) -> int:
    """Kill driver, Ray and workers in one go, and then let the run end; how often."""
    killed, step = 0, max(1, place.yard.segments // (times + 1))
    while killed < times:
        _check_attempts(place)
        place.pause(0.04)
        with place.submit(*RAY, environment=place.disk()) as attempt:
            if not place.wait_for(place.count() + random.randint(1, step), attempt):
                raise BrokenPromiseError(f"the run ended before it was hit: {attempt.tail()}")
            attempt.kill_everything()
            killed += 1
    place.finish(*RAY)
    return killed


def _moment(place: Place, random: Random, kills: int) -> int:
    """Receipts that are there when the next kill comes, of which there are to be so many."""
    done = place.count()
    # One share more than there are kills: the last one is to come before the end, too.
    share = max(1, (place.yard.segments - done) // (kills + 1))
    return min(done + random.randint(1, share), place.yard.segments)


def _kill_some(attempt: Attempt, random: Random, most: int) -> int:
    """Kill some of the workers; how many."""
    workers = attempt.workers()
    killed = 0
    for each in random.sample(workers, min(most, random.randint(1, max(1, len(workers))), len(workers))):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
            killed += 1
    return killed


def _check_attempts(place: Place) -> None:
    if place.is_closed:
        raise BrokenPromiseError("there was no more time")
    if place.attempts >= _MOST_ATTEMPTS:
        raise BrokenPromiseError(f"{place.attempts} commands did not end the run")
