"""The faults, each injected into commands that really run, and what is promised of every one of them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeAlias

from chaos.kills import RAY, kill_drivers, kill_everything, kill_workers
from chaos.table import Row
from chaos.yard import Attempt, BrokenPromiseError, Place, Yard, waited

QUICK_HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""A node that does not answer is given up after seconds; by itself Ray takes a minute."""
_GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL, of the schedulers that give least."""
_RUNS_OF_RAY = 4
"""Of the twenty whose processes are killed at random."""


class NotHereError(Exception):
    """The fault cannot be injected on this machine; says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    yard: Yard
    name: str
    random: Random
    times: int
    """How often the fault comes, where it can come often."""

    def place(self, number: int = 0) -> Place:
        return self.yard.place(f"{self.name}-{number}")


Outcome: TypeAlias = tuple[int, Sequence[Place]]
"""How often the fault was injected, and the places, every one of them published by now."""


@dataclass(frozen=True, slots=True)
class Fault:
    title: str
    inject: Callable[[Trial], Outcome]
    """Does it, and has the run end; raises BrokenPromiseError or NotHereError."""
    times: int = 1
    sample: int = 0
    """How often in the sample that ``make test`` takes; 0 leaves it out."""
    is_random: bool = False
    """Whether it is processes that are killed at moments that nobody chose."""


def tried(fault: Fault, yard: Yard, *, times: int, seed: int) -> Row:
    began = time.monotonic()
    name = fault.inject.__name__
    trial = Trial(yard, name, Random(f"{seed} {name}"), times)
    try:
        injected, places = fault.inject(trial)
    except NotHereError as reason:
        return Row(fault.title, skipped=str(reason))
    except Exception as error:
        # Whatever it is, the other faults are to have their lines.
        broken = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(fault.title, seconds=time.monotonic() - began, broken=broken, is_random=fault.is_random)
    return Row(
        fault.title,
        injected,
        times,
        sum(place.redone for place in places),
        sum(place.lost_bytes for place in places),
        sum(place.is_right() for place in places),
        len(places),
        time.monotonic() - began,
        is_random=fault.is_random,
    )


# Killed


def workers_killed(trial: Trial) -> Outcome:
    """A worker's death costs the segments that it had in hand."""
    place = trial.place()
    return kill_workers(place, trial.random, trial.times), [place]


def drivers_killed(trial: Trial) -> Outcome:
    """The same command goes on where a killed driver stopped."""
    place = trial.place()
    return kill_drivers(place, trial.random, trial.times), [place]


def drivers_of_ray_killed(trial: Trial) -> Outcome:
    """The workers of a killed driver may write for a moment more; that does no harm."""
    place = trial.place()
    return kill_drivers(place, trial.random, trial.times, flags=RAY), [place]


def everything_killed(trial: Trial) -> Outcome:
    place = trial.place()
    return kill_everything(place, trial.random, trial.times), [place]


def raylet_killed(trial: Trial) -> Outcome:
    """Without its raylet an embedded Ray is no more; it may end the driver with an exit code of its own."""
    place = trial.place()
    for number in range(trial.times):
        place.pause(0.3)
        with place.submit(*RAY, environment={**place.disk(), **QUICK_HEALTH}) as attempt:
            come_to(place, attempt, place.count() + 1 + number)
            attempt.raylet().kill()
            attempt.ends(1, 3)
    place.finish()
    return trial.times, [place]


def random_kills_of_workers(trial: Trial) -> Outcome:
    """Runs with workers of Ray, killed at moments that nobody chose."""
    return _many(trial, kill_workers, runs=_RUNS_OF_RAY)


def random_kills_of_drivers(trial: Trial) -> Outcome:
    """Runs in the driver's process, killed at moments that nobody chose."""
    return _many(trial, partial(kill_drivers, is_forked=True), runs=20 - _RUNS_OF_RAY, beside=5)


def calls_lost(trial: Trial) -> Outcome:
    """Ray's own switch loses requests and replies: what a worker was told, or answered, nobody knows then."""
    place = trial.place()
    lost = {"num_failures": 2, "req_failure_prob": 30, "resp_failure_prob": 30}
    switches = {
        "RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": lost}),
        "RAY_testing_rpc_failure_avoid_intra_node_failures": "0",
    }
    with place.submit(*RAY, environment={**place.disk(), **switches}) as attempt:
        attempt.ends(0)
        (started,) = attempt.events("started")
        # The first calls that get lost may be those that ask whether workers are ready.
        replaced = {"worker-0", "worker-1"} - set(started["workers"])
        return len(attempt.events("worker_lost")) + len(replaced), [place]


# Stopped


def worker_hung(trial: Trial) -> Outcome:
    """A worker that is stopped for good is given up after its patience, and replaced."""
    place = trial.place()
    place.pause(0.04)
    with place.submit(*RAY, "--patience", "5", environment=place.disk()) as attempt:
        both_work(attempt)
        attempt.workers()[0].suspend()
        place.pause(0)
        attempt.ends(0)
        if not attempt.events("worker_lost"):
            raise BrokenPromiseError("nobody missed the worker that hung")
    return 1, [place]


def workers_paused(trial: Trial) -> Outcome:
    """Workers that are stopped for a moment and go on are not given up."""
    place = trial.place()
    place.pause(0.04)
    with place.submit(*RAY, environment=place.disk()) as attempt:
        for _ in range(trial.times):
            come_to(place, attempt, place.count() + 1)
            paused = attempt.workers()
            for worker in paused:
                worker.suspend()
            time.sleep(0.5)
            for worker in paused:
                worker.resume()
        place.pause(0)
        attempt.ends(0)
        if lost := attempt.events("worker_lost"):
            raise BrokenPromiseError(f"a worker was given up that was only slow: {lost}")
    return trial.times, [place]


def terminated(trial: Trial) -> Outcome:
    """SIGTERM: over within the time that schedulers leave, even with slow segments in hand."""
    place = trial.place()
    for _ in range(trial.times):
        place.pause(0.02)
        with place.submit("--inline", environment=place.disk()) as attempt:
            come_to(place, attempt, place.count() + 5)
            place.pause(30)
            time.sleep(0.3)
            asked = time.monotonic()
            attempt.process.send_signal(signal.SIGTERM)
            attempt.ends(3)
            if (took := time.monotonic() - asked) > _GRACE_SECONDS:
                raise BrokenPromiseError(f"SIGTERM took {took:.1f} s")
    place.finish()
    return trial.times, [place]


def interrupted(trial: Trial, *, signals: int = 1) -> Outcome:
    """Exit code 3. Ctrl-C once: what is in hand is finished and nothing is done again; twice: it is given up
    at once."""
    place = trial.place()
    for _ in range(trial.times):
        place.pause(0.02)
        with place.submit("--inline", environment=place.disk()) as attempt:
            come_to(place, attempt, place.count() + 5)
            for _ in range(signals):
                attempt.process.send_signal(signal.SIGINT)
                time.sleep(0.1)
            attempt.ends(3)
    place.finish()
    if signals == 1 and place.redone:
        raise BrokenPromiseError(f"{place.redone} segments in hand were not finished")
    return trial.times, [place]


def interrupted_twice(trial: Trial) -> Outcome:
    return interrupted(trial, signals=2)


# Two at once


def two_commands(trial: Trial) -> Outcome:
    """Of several commands for one place at once one goes on; the others are told, or find it done."""
    place = trial.place()
    place.pause(0.01)
    with ExitStack() as stack:
        attempts = [
            stack.enter_context(place.submit("--inline", environment=place.disk()))
            for _ in range(trial.times + 1)
        ]
        codes = [attempt.ends(0, 2) for attempt in attempts]
    if codes.count(0) != 1:
        raise BrokenPromiseError(f"of commands at once {codes.count(0)} have published: {codes}")
    return trial.times, [place]


def _many(trial: Trial, kill: Callable[[Place, Random, int], int], *, runs: int, beside: int = 1) -> Outcome:
    """``times`` kills over so many runs, of which some go on beside one another."""
    places = [trial.place(number) for number in range(runs)]
    counts = [len(range(number, trial.times, runs)) for number in range(runs)]
    seeded = [Random(trial.random.random()) for _ in range(runs)]
    with ThreadPoolExecutor(beside) as threads:
        try:
            return sum(threads.map(kill, places, seeded, counts)), places
        finally:
            # Where the time is up, threads are not to be waited for.
            for place in places:
                place.close()


def both_work(attempt: Attempt) -> None:
    """Wait until both workers have made something."""
    if not waited(lambda: len({each["worker"] for each in attempt.events("segment_done")}) > 1, attempt):
        raise BrokenPromiseError(f"the run ended before the fault: {attempt.tail()}")


def come_to(place: Place, attempt: Attempt, count: int) -> None:
    """Wait for so many receipts, which must come before the driver ends."""
    if not place.wait_for(count, attempt):
        raise BrokenPromiseError(f"the run ended before the fault: {attempt.tail()}")


FAULTS: tuple[Fault, ...] = (
    Fault("SIGKILL of workers in the middle of segments", workers_killed, 6, sample=2),
    Fault("SIGKILL of the driver", drivers_killed, 2, sample=2),
    Fault("SIGKILL of the driver of an embedded Ray", drivers_of_ray_killed),
    Fault("SIGKILL of driver, Ray and workers at once", everything_killed),
    Fault("SIGKILL of the raylet of an embedded Ray", raylet_killed, 1),
    Fault("calls to workers that get lost", calls_lost),
    Fault("a worker that hangs (SIGSTOP)", worker_hung),
    Fault("workers that pause (SIGSTOP, SIGCONT)", workers_paused, 3),
    Fault("SIGTERM, 3 seconds to live", terminated, 1, sample=1),
    Fault("Ctrl-C once", interrupted),
    Fault("Ctrl-C twice", interrupted_twice),
    Fault("further commands for the same place at once", two_commands, 3, sample=1),
    Fault("random kills of workers, 4 runs", random_kills_of_workers, 52, is_random=True),
    Fault("random kills of drivers, 16 runs", random_kills_of_drivers, 152, is_random=True),
)
